//! The bytes of a file, mapped into memory; this module fences the workspace's one `mmap`.

use std::{
    fs::File,
    ops::{Deref, Range},
    path::Path,
    sync::Arc,
};

use memmap2::Mmap;

use crate::ArtifactError;

/// Bytes that stay where they are: a mapped file, or bytes that were in memory all along.
#[derive(Debug, Clone)]
pub enum FileBytes {
    /// A file mapped read-only.
    Mapped(Arc<Mmap>),
    /// Bytes embedded in the program.
    Embedded(&'static [u8]),
    /// Bytes made while the program runs.
    Owned(Arc<[u8]>),
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
            drop(mapped.advise(memmap2::Advice::Random)); // a hint, as above
        }
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(mapped) => mapped,
            Self::Embedded(bytes) => bytes,
            Self::Owned(bytes) => bytes,
        }
    }
}
