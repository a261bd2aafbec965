//! Locks on finished folders.

use std::{fs, path::Path};

use super::is_temporary;
use crate::ArtifactError;

/// Exclusive lock on a finished folder whose files are to be changed; released on drop.
#[derive(Debug)]
pub struct FolderLock {
    /// Open handle of the folder, on systems that lock folders; no lock file is needed.
    _lock: Option<fs::File>,
}

impl FolderLock {
    /// Locks `folder` and removes temporary files of killed runs.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Busy`] if another run has the lock.
    pub fn of(folder: &Path) -> Result<Self, ArtifactError> {
        let lock = fs::File::open(folder).ok();
        if let Some(lock) = &lock {
            let is_locked = !matches!(lock.try_lock(), Err(fs::TryLockError::WouldBlock));
            // The run that had the lock may have replaced the folder since.
            if !is_locked || !is_at(lock, folder) {
                return Err(ArtifactError::Busy {
                    path: folder.to_owned(),
                });
            }
        }
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if is_temporary(&entry.file_name().to_string_lossy()) {
                let _ = fs::remove_file(entry.path()); // best effort; a folder stays
            }
        }
        Ok(Self { _lock: lock })
    }

    /// Waits until no other run has the lock, then locks `folder` if it exists.
    pub(super) fn wait(folder: &Path) -> Self {
        while let Ok(lock) = fs::File::open(folder) {
            // If folders cannot be locked, no other run has the lock either.
            if lock.lock().is_err() || is_at(&lock, folder) {
                return Self { _lock: Some(lock) };
            }
        }
        Self { _lock: None }
    }
}

/// Whether `path` is the path of the open `file`.
pub(super) fn is_at(file: &fs::File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let id = |found: &fs::Metadata| (found.dev(), found.ino());
        matches!((file.metadata(), fs::metadata(path)), (Ok(open), Ok(found)) if id(&open) == id(&found))
    }
    #[cfg(not(unix))]
    {
        let _ = (file, path);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_lock_is_exclusive() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(".powerinfer-x.partial"), b"killed").unwrap();
        let lock = FolderLock::of(folder.path()).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        if cfg!(unix) {
            let busy = FolderLock::of(folder.path()).unwrap_err();
            assert!(matches!(busy, ArtifactError::Busy { .. }), "{busy}");
        }
        drop(lock);
        FolderLock::of(folder.path()).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
