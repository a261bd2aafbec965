//! Temporary folders for the time of a measurement.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::folder::{not_an_artifact, remove_marked, with_ending};
use crate::ArtifactError;

/// Temporary folder next to an artifact, for the time of a measurement; removed on drop, or by the next
/// run.
#[derive(Debug)]
pub struct ScratchFolder {
    folder: PathBuf,
    /// Locked while this run uses the folder.
    _lock: fs::File,
}

/// Name of the file that marks a scratch folder.
const SCRATCH: &str = ".powerinfer-scratch";

impl ScratchFolder {
    /// Creates the folder `NAME.measuring` next to `target`, removing one left by a killed run.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Busy`] if another run uses it, [`ArtifactError::NotAnArtifact`] if it is not a scratch
    /// folder, or [`ArtifactError::Write`].
    pub fn next_to(target: &Path) -> Result<Self, ArtifactError> {
        Self::remove_leftover(target)?;
        let folder = Self::path_for(target);
        let failed = || ArtifactError::write(&folder);
        // A folder that still exists is not ours, or in use.
        fs::create_dir_all(folder.parent().unwrap_or(Path::new("."))).map_err(failed())?;
        if fs::create_dir(&folder).is_err() && folder.exists() {
            let is_ours = folder.join(SCRATCH).exists();
            return Err(match is_ours {
                true => ArtifactError::Busy { path: folder },
                false => not_an_artifact(&folder, SCRATCH),
            });
        }
        let lock = fs::File::create(folder.join(SCRATCH)).map_err(failed())?;
        if let Err(fs::TryLockError::WouldBlock) = lock.try_lock() {
            return Err(ArtifactError::Busy { path: folder });
        }
        Ok(Self {
            folder,
            _lock: lock,
        })
    }

    /// Removes the scratch folder that a killed run has left next to `target`, if any.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Write`].
    pub fn remove_leftover(target: &Path) -> Result<(), ArtifactError> {
        let folder = Self::path_for(target);
        let mark = folder.join(SCRATCH);
        let is_link = fs::symlink_metadata(&folder).is_ok_and(|found| found.is_symlink());
        if is_link || !mark.exists() {
            return Ok(());
        }
        let lock = fs::File::open(&mark).map_err(ArtifactError::write(&mark))?;
        match lock.try_lock() {
            Err(fs::TryLockError::WouldBlock) => Ok(()),
            _ => remove_marked(&folder, SCRATCH),
        }
    }

    fn path_for(target: &Path) -> PathBuf {
        let target: PathBuf = target.components().collect();
        with_ending(&target, ".measuring")
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.folder
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        // What cannot be removed is left to the next run.
        let _ = remove_marked(&self.folder, SCRATCH);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_folders_are_removed_and_user_folders_kept() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("bundle");
        let scratch = folder.path().join("bundle.measuring");
        let first = ScratchFolder::next_to(&target).unwrap();
        fs::write(first.path().join("weights"), b"many").unwrap();
        let busy = ScratchFolder::next_to(&target).unwrap_err();
        assert!(matches!(busy, ArtifactError::Busy { .. }), "{busy}");
        drop(first);
        assert!(!scratch.exists());
        // As left by a killed run.
        fs::create_dir(&scratch).unwrap();
        fs::write(scratch.join(SCRATCH), b"").unwrap();
        fs::write(scratch.join("weights"), b"many").unwrap();
        drop(ScratchFolder::next_to(&target).unwrap());
        assert!(!scratch.exists());
        fs::create_dir(&scratch).unwrap();
        fs::write(scratch.join("manifest.json"), b"powerinfer-1").unwrap();
        let error = ScratchFolder::next_to(&target).unwrap_err();
        assert!(
            matches!(error, ArtifactError::NotAnArtifact { .. }),
            "{error}"
        );
        ScratchFolder::remove_leftover(&target).unwrap();
        assert!(scratch.join("manifest.json").exists());
    }
}
