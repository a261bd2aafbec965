//! Temporary folders for the time of a measurement.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{Contents, FileLock, folder::with_ending, survey::Mark, unfollowed};
use crate::ArtifactError;

/// Temporary folder next to an artifact, for the time of a measurement; removed on drop, or by the next
/// run.
#[derive(Debug)]
pub struct ScratchFolder {
    folder: PathBuf,
    contents: Contents,
    /// Locked while this run uses the folder.
    _lock: FileLock,
}

/// Name of the file that marks a scratch folder.
const SCRATCH: &str = ".powerinfer-scratch";

/// Name of the folder in a scratch folder.
const INNER: &str = "bundle";

impl ScratchFolder {
    /// Creates the folder `NAME.measuring` next to `target`, removing one left by a killed run. It holds one folder of the kind
    /// `contents`, at [`path`](Self::path).
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Busy`] if another run uses it, [`ArtifactError::NotAnArtifact`] or [`ArtifactError::Foreign`] if
    /// it has other files, or [`ArtifactError::Write`].
    pub fn next_to(target: &Path, contents: &Contents) -> Result<Self, ArtifactError> {
        Self::remove_leftover(target, contents)?;
        let folder = Self::path_for(target);
        let contents = contents.nested(SCRATCH, INNER);
        let failed = || ArtifactError::write(&folder);
        // A folder that still exists is not ours, or in use.
        fs::create_dir_all(folder.parent().unwrap_or(Path::new("."))).map_err(failed())?;
        if fs::create_dir(&folder).is_err() {
            let survey = contents.survey(&folder, Mark::File(SCRATCH))?;
            survey.refuse_foreign()?;
            if !survey.is_empty() {
                return Err(ArtifactError::Busy { path: folder });
            }
        }
        let lock = unfollowed().create(true).open(folder.join(SCRATCH));
        let lock = lock.map_err(failed())?;
        let Ok(lock) = FileLock::new(lock) else {
            return Err(ArtifactError::Busy { path: folder });
        };
        Ok(Self {
            folder,
            contents,
            _lock: lock,
        })
    }

    /// Removes the scratch folder that a killed run has left next to `target`, if any. A folder with other files is kept.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Write`].
    pub fn remove_leftover(target: &Path, contents: &Contents) -> Result<(), ArtifactError> {
        let folder = Self::path_for(target);
        let contents = contents.nested(SCRATCH, INNER);
        let Ok(survey) = contents.survey(&folder, Mark::File(SCRATCH)) else {
            return Ok(());
        };
        if survey.is_empty() || survey.refuse_foreign().is_err() {
            return Ok(());
        }
        let mark = folder.join(SCRATCH);
        let lock = unfollowed().open(&mark);
        let lock = lock.map_err(ArtifactError::write(&mark))?;
        match FileLock::new(lock) {
            Ok(_lock) => survey.delete_folder(),
            Err(_) => Ok(()),
        }
    }

    fn path_for(target: &Path) -> PathBuf {
        let target: PathBuf = target.components().collect();
        with_ending(&target, ".measuring")
    }

    /// Path of the folder to write, which does not exist yet.
    pub fn path(&self) -> PathBuf {
        self.folder.join(INNER)
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        // What cannot be removed is left to the next run.
        let survey = self.contents.survey(&self.folder, Mark::File(SCRATCH));
        let _ = survey.and_then(|survey| survey.delete_folder());
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
        let contents = Contents::new("manifest.json", "powerinfer-test").with_names(&["weights"]);
        let next_to = || ScratchFolder::next_to(&target, &contents);
        let first = next_to().unwrap();
        fs::create_dir(first.path()).unwrap();
        fs::write(first.path().join("weights"), b"many").unwrap();
        let busy = next_to().unwrap_err();
        assert!(matches!(busy, ArtifactError::Busy { .. }), "{busy}");
        drop(first);
        assert!(!scratch.exists());
        // As left by a killed run.
        for ending in ["", ".partial"] {
            let inner = scratch.join(format!("{INNER}{ending}"));
            fs::create_dir_all(&inner).unwrap();
            fs::write(scratch.join(SCRATCH), b"").unwrap();
            fs::write(inner.join("weights"), b"many").unwrap();
            drop(next_to().unwrap());
            assert!(!scratch.exists());
        }
        // Files of others are never deleted.
        let used = next_to().unwrap();
        fs::write(scratch.join("thesis.txt"), b"years").unwrap();
        drop(used);
        let error = next_to().unwrap_err();
        assert!(matches!(error, ArtifactError::Foreign { .. }), "{error}");
        fs::remove_file(scratch.join(SCRATCH)).unwrap();
        let error = next_to().unwrap_err();
        assert!(
            matches!(error, ArtifactError::NotAnArtifact { .. }),
            "{error}"
        );
        ScratchFolder::remove_leftover(&target, &contents).unwrap();
        assert_eq!(fs::read(scratch.join("thesis.txt")).unwrap(), b"years");
    }
}
