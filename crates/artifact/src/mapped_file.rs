//! Memory-mapped files; the only `mmap` of the workspace.

use std::{
    fs::File,
    io::Read,
    ops::{Deref, Range},
    path::Path,
    sync::Arc,
};

#[cfg(unix)]
use memmap2::Advice;
use memmap2::{Mmap, MmapMut};

use crate::{
    ArtifactError, ByteSize,
    progress::{Interrupted, Progress},
};

/// Contents of a file at a stable address; cloning shares them.
#[derive(Debug, Clone)]
pub enum FileBytes {
    /// File mapped read-only.
    Mapped(Arc<Mmap>),
    /// Bytes embedded in the program.
    Embedded(&'static [u8]),
    /// Bytes computed at run time.
    Owned(Arc<[u8]>),
    /// File read into anonymous memory.
    Loaded(Arc<Mmap>),
}

/// Where the bytes of a file that is read repeatedly reside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Residence {
    /// Mapped: pages are read from the file on first access and may be evicted.
    #[default]
    Mapped,
    /// Mapped and locked: pages are never evicted.
    Locked,
    /// Copied into anonymous memory, in huge pages where available: faster random access for one copy at
    /// start-up.
    Loaded,
}

impl FileBytes {
    /// Maps the file at `path`.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Read`].
    pub fn open(path: &Path) -> Result<Self, ArtifactError> {
        let file = File::open(path).map_err(ArtifactError::read(path))?;
        let length = file.metadata().map_err(ArtifactError::read(path))?.len();
        if length == 0 {
            return Ok(Self::Embedded(&[])); // an empty mapping is an error on some systems
        }
        if cfg!(miri) {
            // Miri maps no files.
            let bytes = std::fs::read(path).map_err(ArtifactError::read(path))?;
            return Ok(Self::Owned(bytes.into()));
        }
        // SAFETY: the mapping is read-only, and our own files are replaced by renaming, never
        // changed in place. Another program that truncates the file causes SIGBUS, a risk shared by every
        // program that maps its model.
        #[expect(unsafe_code, reason = "the only mmap")]
        let mapped = unsafe { Mmap::map(&file) }.map_err(ArtifactError::read(path))?;
        Ok(Self::Mapped(Arc::new(mapped)))
    }
}

impl FileBytes {
    /// `length` bytes that `fill` writes, in huge pages where available.
    ///
    /// # Errors
    ///
    /// Fails where there is not as much memory, or if `fill` does.
    pub fn in_memory(
        length: usize,
        fill: impl FnOnce(&mut [u8]) -> std::io::Result<()>,
    ) -> std::io::Result<Self> {
        let mut memory = MmapMut::map_anon(length)?;
        #[cfg(target_os = "linux")]
        drop(memory.advise(Advice::HugePage)); // best effort
        fill(&mut memory)?;
        Ok(Self::Loaded(Arc::new(memory.make_read_only()?)))
    }

    /// Makes the bytes of the file at `path` reside as `residence` requests; bytes that are not mapped stay
    /// as they are.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::KeepInMemory`] if memory or the lock limit does not suffice.
    pub fn set_residence(
        &mut self,
        path: &Path,
        residence: Residence,
    ) -> Result<(), ArtifactError> {
        let Self::Mapped(mapped) = self else {
            return Ok(());
        };
        let bytes = mapped.len();
        let failed = |source| ArtifactError::KeepInMemory {
            path: path.to_owned(),
            bytes: ByteSize(bytes as u64),
            source,
        };
        match residence {
            Residence::Mapped => {}
            #[cfg(unix)]
            Residence::Locked => mapped.lock().map_err(failed)?,
            #[cfg(not(unix))]
            Residence::Locked => return Err(failed(std::io::ErrorKind::Unsupported.into())),
            Residence::Loaded => {
                let mut file = File::open(path).map_err(failed)?;
                *self = Self::in_memory(bytes, |memory| file.read_exact(memory)).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Reads the whole mapping into memory sequentially, in huge pages where available; `progress` counts
    /// bytes. Reads at disk bandwidth, which page faults in random order do not reach; pages already in
    /// memory cost almost nothing.
    ///
    /// # Errors
    ///
    /// [`Interrupted`] if `progress` stops the work.
    pub fn read_ahead(&self, progress: &dyn Progress) -> Result<(), Interrupted> {
        #[cfg(target_os = "linux")]
        if let Self::Mapped(mapped) = self {
            const CHUNK: usize = 64 << 20;
            drop(mapped.advise(Advice::HugePage)); // best effort, as is all advice below
            for start in (0..mapped.len()).step_by(CHUNK) {
                let bytes = CHUNK.min(mapped.len() - start);
                if mapped
                    .advise_range(Advice::PopulateRead, start, bytes)
                    .is_err()
                {
                    drop(mapped.advise_range(Advice::WillNeed, start, bytes)); // on older kernels
                }
                progress.advance(bytes as u64)?;
            }
        }
        #[cfg(not(target_os = "linux"))]
        let _ = progress; // pages come when they are touched
        Ok(())
    }

    /// Releases the memory of `range`; the bytes stay readable from the file. For streaming through files
    /// larger than memory.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Self::Mapped(mapped) = self {
            // Whole pages only; those shared with neighbours stay.
            const PAGE: usize = 1 << 16;
            let start = range.start.next_multiple_of(PAGE);
            let end = range.end.min(mapped.len()) / PAGE * PAGE;
            if start < end {
                // SAFETY: the mapping is of a file and read-only, so pages that are dropped are
                // read from it again when they are touched; nothing can be lost.
                #[expect(unsafe_code, reason = "advice that drops pages")]
                let advised = unsafe {
                    mapped.unchecked_advise_range(
                        memmap2::UncheckedAdvice::DontNeed,
                        start,
                        end - start,
                    )
                };
                drop(advised); // best effort
            }
        }
        #[cfg(not(unix))]
        drop(range);
    }

    /// Disables read-ahead: the next reads are scattered.
    pub fn advise_random_access(&self) {
        #[cfg(unix)]
        if let Self::Mapped(mapped) = self {
            drop(mapped.advise(Advice::Random)); // best effort
        }
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(mapped) | Self::Loaded(mapped) => mapped,
            Self::Embedded(bytes) => bytes,
            Self::Owned(bytes) => bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    #[test]
    fn every_residence_reads_the_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        for residence in [Residence::Mapped, Residence::Locked, Residence::Loaded] {
            let mut file = FileBytes::open(&path).unwrap();
            file.read_ahead(&Silent).unwrap();
            match file.set_residence(&path, residence) {
                Ok(()) => {}
                // The lock limit of the test's user may be low.
                Err(error) => assert!(residence == Residence::Locked, "{error}"),
            }
            assert_eq!(&file[..], &bytes[..]);
            file.release(0..bytes.len());
            assert_eq!(&file[..], &bytes[..]);
        }
    }

    #[test]
    fn loading_a_removed_file_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [1; 5000]).unwrap();
        let mut file = FileBytes::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let error = file
            .set_residence(&path, Residence::Loaded)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("cannot keep") && error.contains("4.9 KiB"),
            "{error}"
        );
    }
}
