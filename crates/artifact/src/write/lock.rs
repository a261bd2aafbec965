//! Locks on files and on finished folders.

use std::{fs, path::Path};

use super::is_temporary;
use crate::ArtifactError;

/// Exclusive lock on an open file, released on drop.
#[derive(Debug)]
pub struct FileLock(fs::File);

impl FileLock {
    /// Locks `file`, or gives it back if another process has the lock. On file systems without locks, always succeeds.
    ///
    /// # Errors
    ///
    /// `file`, if another process has the lock.
    pub fn new(file: fs::File) -> Result<Self, fs::File> {
        match file.try_lock() {
            Err(fs::TryLockError::WouldBlock) => Err(file),
            _ => Ok(Self(file)),
        }
    }

    /// The locked file.
    pub fn file(&self) -> &fs::File {
        &self.0
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Closing the file is not enough: a process that another thread is starting shares our open files until it
        // executes its program. An error means that the file system has no locks.
        let _ = self.0.unlock();
    }
}

/// Exclusive lock on a finished folder whose files are to be changed; released on drop.
#[derive(Debug)]
pub struct FolderLock {
    /// Open handle of the folder, on systems that lock folders; no lock file is needed.
    _lock: Option<FileLock>,
}

impl FolderLock {
    /// Locks `folder` and removes temporary files of killed runs.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Busy`] if another run has the lock.
    pub fn new(folder: &Path) -> Result<Self, ArtifactError> {
        let lock = match fs::File::open(folder).ok().map(FileLock::new).transpose() {
            // The run that had the lock may have replaced the folder in the meantime.
            Ok(lock) if lock.as_ref().is_none_or(|lock| is_at(lock.file(), folder)) => lock,
            _ => {
                return Err(ArtifactError::Busy {
                    path: folder.to_owned(),
                });
            }
        };
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
                return Self {
                    _lock: Some(FileLock(lock)),
                };
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
        let lock = FolderLock::new(folder.path()).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        if cfg!(unix) {
            let busy = FolderLock::new(folder.path()).unwrap_err();
            assert!(matches!(busy, ArtifactError::Busy { .. }), "{busy}");
        }
        // A process that is being started has such a copy.
        let copy = lock._lock.as_ref().unwrap().file().try_clone().unwrap();
        drop(lock);
        FolderLock::new(folder.path()).unwrap();
        drop(copy);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
