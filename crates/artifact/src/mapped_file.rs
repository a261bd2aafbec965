//! Memory-mapped files; the only `mmap` of the workspace.
//!
//! A mapping keeps its file open, so digests and copies are those of the mapped file, whatever happens to its path.

#[cfg(unix)]
mod bus_error;

use std::{
    fs::{File, Metadata},
    io,
    ops::{Deref, Range},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::SystemTime,
};

#[cfg(unix)]
use memmap2::Advice;
use memmap2::{Mmap, MmapMut};

#[cfg(unix)]
pub use self::bus_error::exit_if_files_shrink;
use crate::{
    ArtifactError, ByteSize, Digest,
    digest::DigestBuilder,
    progress::{Interrupted, Progress},
    stand_in,
};

/// Does nothing: this system raises no SIGBUS.
#[cfg(not(unix))]
pub fn exit_if_files_shrink(_hint: &str) {}

/// Contents of a file at a stable address; cloning shares them.
#[derive(Debug, Clone)]
pub enum FileBytes {
    /// File mapped read-only.
    Mapped(Arc<MappedFile>),
    /// Bytes embedded in the program.
    Embedded(&'static [u8]),
    /// Bytes computed at run time.
    Owned(Arc<[u8]>),
    /// File read into anonymous memory.
    Loaded(Arc<Mmap>),
}

/// Mapped file, which stays open.
#[derive(Debug)]
pub struct MappedFile {
    // Dropped before the mapping.
    #[cfg(unix)]
    _watched: bus_error::Watched,
    bytes: Mmap,
    file: File,
    path: PathBuf,
    opened: FileState,
}

/// Length and modification time of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileState {
    length: u64,
    /// `None` if the file system does not record it.
    modified: Option<SystemTime>,
}

impl FileState {
    fn new(metadata: &Metadata) -> Self {
        Self {
            length: metadata.len(),
            modified: metadata.modified().ok(),
        }
    }
}

impl MappedFile {
    /// Fills `buffer` from the file at `offset`.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        #[cfg(unix)]
        return std::os::unix::fs::FileExt::read_exact_at(&self.file, buffer, offset);
        #[cfg(not(unix))]
        {
            use std::io::{Read, Seek, SeekFrom};
            let mut file = &self.file;
            file.seek(SeekFrom::Start(offset))?;
            file.read_exact(buffer)
        }
    }

    /// Whether the file still has the length and modification time that it had when it was opened. Replacing it under its path is
    /// not a change.
    fn is_unchanged(&self) -> bool {
        let now = self.file.metadata();
        now.is_ok_and(|now| FileState::new(&now) == self.opened)
    }
}

/// The first file that was found changed when its mapping ended.
static CHANGED: OnceLock<PathBuf> = OnceLock::new();

/// Checks that no file changed while it was mapped, for all mappings that have ended: results computed from a changed file are
/// worthless.
///
/// # Errors
///
/// [`ArtifactError::Changed`].
pub fn check_all_unchanged() -> Result<(), ArtifactError> {
    match CHANGED.get() {
        None => Ok(()),
        Some(path) => Err(ArtifactError::Changed { path: path.clone() }),
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        if !self.is_unchanged() {
            // The first one is enough.
            let _ = CHANGED.set(self.path.clone());
        }
    }
}

impl Deref for MappedFile {
    type Target = Mmap;

    fn deref(&self) -> &Mmap {
        &self.bytes
    }
}

/// Where the bytes of a file that is read repeatedly reside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Residence {
    /// Mapped: pages are read from the file on first access and may be evicted.
    #[default]
    Mapped,
    /// Mapped and locked: pages are never evicted.
    Locked,
    /// Copied into anonymous memory, in huge pages if available: faster random access for one copy at
    /// start-up.
    Loaded,
}

impl FileBytes {
    /// Maps the file at `path`.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Read`], or the file is a Git LFS pointer or the error page of a failed download.
    pub fn open(path: &Path) -> Result<Self, ArtifactError> {
        let bytes = Self::map(path)?;
        stand_in::refuse(path, &bytes)?;
        Ok(bytes)
    }

    fn map(path: &Path) -> Result<Self, ArtifactError> {
        let file = File::open(path).map_err(ArtifactError::read(path))?;
        let metadata = file.metadata().map_err(ArtifactError::read(path))?;
        if metadata.len() == 0 {
            return Ok(Self::Embedded(&[])); // an empty mapping is an error on some systems
        }
        if cfg!(miri) {
            // Miri maps no files.
            let bytes = std::fs::read(path).map_err(ArtifactError::read(path))?;
            return Ok(Self::Owned(bytes.into()));
        }
        // SAFETY: the mapping is read-only, and our own files are replaced by renaming, never
        // changed in place. Another program that truncates the file causes SIGBUS, which
        // `exit_if_files_shrink` turns into a message.
        #[expect(unsafe_code, reason = "the only mmap")]
        let bytes = unsafe { Mmap::map(&file) }.map_err(ArtifactError::read(path))?;
        Ok(Self::Mapped(Arc::new(MappedFile {
            #[cfg(unix)]
            _watched: bus_error::Watched::new(path, &file, &bytes),
            bytes,
            file,
            path: path.to_owned(),
            opened: FileState::new(&metadata),
        })))
    }

    /// Computes the digest of the bytes. A mapped file is read through its open handle, not through the mapping: the pages of a
    /// file larger than memory would evict others.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Read`], also if the file has become shorter.
    pub fn digest(&self) -> Result<Digest, ArtifactError> {
        let Self::Mapped(mapped) = self else {
            return Ok(Digest::from_content(self));
        };
        let mut digest = DigestBuilder::default();
        let mut buffer = vec![0; (1 << 20).min(mapped.len())];
        for start in (0..mapped.len()).step_by(buffer.len()) {
            let piece = buffer.len().min(mapped.len() - start);
            let read = mapped.read_at(&mut buffer[..piece], start as u64);
            read.map_err(ArtifactError::read(&mapped.path))?;
            digest.add(&buffer[..piece]);
        }
        Ok(digest.finish())
    }

    /// Checks that a mapped file still has the length and modification time that it had when it was opened.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Changed`].
    pub fn check_unchanged(&self) -> Result<(), ArtifactError> {
        match self {
            Self::Mapped(mapped) if !mapped.is_unchanged() => Err(ArtifactError::Changed {
                path: mapped.path.clone(),
            }),
            _ => Ok(()),
        }
    }
}

impl FileBytes {
    /// `length` bytes that `fill` writes, in huge pages if available.
    ///
    /// # Errors
    ///
    /// Fails if memory is too small, or if `fill` fails.
    pub fn in_memory(
        length: usize,
        fill: impl FnOnce(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<Self> {
        let mut memory = MmapMut::map_anon(length)?;
        #[cfg(target_os = "linux")]
        drop(memory.advise(Advice::HugePage)); // best effort
        fill(&mut memory)?;
        Ok(Self::Loaded(Arc::new(memory.make_read_only()?)))
    }

    /// Makes the bytes of a mapped file reside as `residence` requests; bytes that are not mapped stay as they
    /// are.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::KeepInMemory`] if memory or the lock limit does not suffice, or the file has become shorter.
    pub fn set_residence(&mut self, residence: Residence) -> Result<(), ArtifactError> {
        let Self::Mapped(mapped) = self else {
            return Ok(());
        };
        let bytes = mapped.len();
        let failed = |source| ArtifactError::KeepInMemory {
            path: mapped.path.clone(),
            bytes: ByteSize(bytes as u64),
            source,
        };
        match residence {
            Residence::Mapped => {}
            #[cfg(unix)]
            Residence::Locked => mapped.lock().map_err(failed)?,
            #[cfg(not(unix))]
            Residence::Locked => return Err(failed(io::ErrorKind::Unsupported.into())),
            Residence::Loaded => {
                let loaded = Self::in_memory(bytes, |memory| mapped.read_at(memory, 0));
                *self = loaded.map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Reads the whole mapping into memory sequentially, in huge pages if available; `progress` counts
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
            Self::Mapped(mapped) => mapped,
            Self::Loaded(memory) => memory,
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
            match file.set_residence(residence) {
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
    fn a_replaced_file_stays_readable_through_its_handle() {
        let folder = tempfile::tempdir().unwrap();
        let [path, other] = ["file", "other"].map(|name| folder.path().join(name));
        let bytes = [1; 5000];
        std::fs::write(&path, bytes).unwrap();
        let mut file = FileBytes::open(&path).unwrap();
        std::fs::write(&other, [2; 100]).unwrap();
        std::fs::rename(&other, &path).unwrap();
        assert_eq!(file.digest().unwrap(), Digest::from_content(&bytes));
        file.check_unchanged().unwrap();
        file.set_residence(Residence::Loaded).unwrap();
        assert_eq!(&file[..], &bytes[..]);
    }

    #[test]
    fn a_file_that_changes_in_place_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [1; 5000]).unwrap();
        let mut file = FileBytes::open(&path).unwrap();
        file.check_unchanged().unwrap();
        let opened = File::options().write(true).open(&path).unwrap();
        opened.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        let message = file.check_unchanged().unwrap_err().to_string();
        assert!(
            message.contains("file` changed while it was in use"),
            "{message}"
        );
        opened.set_len(100).unwrap();
        assert!(file.check_unchanged().is_err());
        assert!(matches!(file.digest(), Err(ArtifactError::Read { .. })));
        let message = file
            .set_residence(Residence::Loaded)
            .unwrap_err()
            .to_string();
        assert!(
            message.starts_with("cannot keep") && message.contains("4.9 KiB"),
            "{message}"
        );
    }
}
