//! The bytes of a file, mapped into memory; this module fences the workspace's one `mmap`.

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

/// Bytes that stay where they are: a mapped file, or bytes that were in memory all along.
#[derive(Debug, Clone)]
pub enum FileBytes {
    /// A file mapped read-only.
    Mapped(Arc<Mmap>),
    /// Bytes embedded in the program.
    Embedded(&'static [u8]),
    /// Bytes made while the program runs.
    Owned(Arc<[u8]>),
    /// A file read into memory of the program's own.
    Loaded(Arc<Mmap>),
}

/// How the bytes of a file are held that is read again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Residence {
    /// Mapped: what memory has no room for is read from the file when it is touched.
    #[default]
    Mapped,
    /// Mapped, and never given up for something else.
    Locked,
    /// Read into memory of the program's own, in huge pages where the system has them: what is read here
    /// and there comes faster, for the time of a copy at the start.
    Loaded,
}

impl FileBytes {
    /// Maps the file at `path`.
    pub fn open(path: &Path) -> Result<Self, ArtifactError> {
        let file = File::open(path).map_err(ArtifactError::read(path))?;
        let length = file.metadata().map_err(ArtifactError::read(path))?.len();
        if length == 0 {
            return Ok(Self::Embedded(&[])); // an empty mapping is an error on some systems
        }
        // SAFETY: the mapping is read-only, and our own files are replaced by renaming, never
        // changed in place. A foreign program that truncates the file under us ends in SIGBUS:
        // the price that every program pays which maps its model.
        #[allow(unsafe_code)]
        let mapped = unsafe { Mmap::map(&file) }.map_err(ArtifactError::read(path))?;
        Ok(Self::Mapped(Arc::new(mapped)))
    }
}

impl FileBytes {
    /// Holds the bytes, which are those of the file at `path`, as `residence` says; bytes that are in
    /// memory anyway stay.
    ///
    /// Fails where there is no room, or where the system lets no such amount be locked.
    pub fn hold(&mut self, path: &Path, residence: Residence) -> Result<(), ArtifactError> {
        let Self::Mapped(mapped) = self else {
            return Ok(());
        };
        let bytes = mapped.len();
        let failed = |source| ArtifactError::Hold {
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
                let mut memory = MmapMut::map_anon(bytes).map_err(failed)?;
                #[cfg(target_os = "linux")]
                drop(memory.advise(Advice::HugePage)); // a hint: others do as well
                let mut file = File::open(path).map_err(failed)?;
                file.read_exact(&mut memory).map_err(failed)?;
                *self = Self::Loaded(Arc::new(memory.make_read_only().map_err(failed)?));
            }
        }
        Ok(())
    }

    /// Reads all of a mapped file into memory now, a stretch after the other and in huge pages where the
    /// system has them; `progress` counts bytes. What lies in memory already takes next to no time, and
    /// what does not comes as fast as the disk reads, which pages touched here and there do not.
    pub fn read_ahead(&self, progress: &dyn Progress) -> Result<(), Interrupted> {
        #[cfg(target_os = "linux")]
        if let Self::Mapped(mapped) = self {
            const STRETCH: usize = 64 << 20;
            drop(mapped.advise(Advice::HugePage)); // a hint, as are all below
            for start in (0..mapped.len()).step_by(STRETCH) {
                let bytes = STRETCH.min(mapped.len() - start);
                if mapped
                    .advise_range(Advice::PopulateRead, start, bytes)
                    .is_err()
                {
                    drop(mapped.advise_range(Advice::WillNeed, start, bytes)); // of older systems
                }
                progress.advance(bytes as u64)?;
            }
        }
        #[cfg(not(target_os = "linux"))]
        let _ = progress; // pages come when they are touched
        Ok(())
    }

    /// Gives the memory behind `range` back: the bytes stay readable, from the file. Whoever
    /// streams a file larger than memory says so of what it is done with.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Self::Mapped(mapped) = self {
            // The system wants whole pages; those shared with neighbours stay.
            const PAGE: usize = 1 << 16;
            let start = range.start.next_multiple_of(PAGE);
            let end = range.end.min(mapped.len()) / PAGE * PAGE;
            if start < end {
                // SAFETY: the mapping is of a file and read-only, so pages that are dropped are
                // read from it again when they are touched; nothing can be lost.
                #[allow(unsafe_code)]
                let advised = unsafe {
                    mapped.unchecked_advise_range(
                        memmap2::UncheckedAdvice::DontNeed,
                        start,
                        end - start,
                    )
                };
                drop(advised); // a hint: a system that does not take it loses nothing
            }
        }
        #[cfg(not(unix))]
        drop(range);
    }

    /// Says that what is read next lies here and there, so that reading ahead would be for nothing.
    pub fn expect_scattered_reads(&self) {
        #[cfg(unix)]
        if let Self::Mapped(mapped) = self {
            drop(mapped.advise(Advice::Random)); // a hint, as above
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
    fn a_file_reads_the_same_however_it_is_held() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        for residence in [Residence::Mapped, Residence::Locked, Residence::Loaded] {
            let mut file = FileBytes::open(&path).unwrap();
            file.read_ahead(&Silent).unwrap();
            match file.hold(&path, residence) {
                Ok(()) => {}
                // Who runs this may be allowed to lock very little.
                Err(error) => assert!(residence == Residence::Locked, "{error}"),
            }
            assert_eq!(&file[..], &bytes[..]);
            file.release(0..bytes.len());
            assert_eq!(&file[..], &bytes[..]);
        }
    }

    #[test]
    fn a_file_that_is_gone_cannot_be_loaded_and_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [1; 5000]).unwrap();
        let mut file = FileBytes::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let error = file.hold(&path, Residence::Loaded).unwrap_err().to_string();
        assert!(
            error.starts_with("cannot keep") && error.contains("4.9 KiB"),
            "{error}"
        );
    }
}
