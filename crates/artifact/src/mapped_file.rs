//! The bytes of a file, mapped into memory; this module fences the workspace's one `mmap`.

use std::{fs::File, ops::Deref, path::Path, sync::Arc};

use memmap2::Mmap;

use crate::ArtifactError;

/// Bytes that stay where they are: a mapped file, or bytes that were in memory all along.
#[derive(Debug, Clone)]
pub enum FileBytes {
    /// A file mapped read-only.
    Mapped(Arc<Mmap>),
    /// Bytes embedded in the program.
    Embedded(&'static [u8]),
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

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(mapped) => mapped,
            Self::Embedded(bytes) => bytes,
        }
    }
}
