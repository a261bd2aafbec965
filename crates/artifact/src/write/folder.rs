//! Folders that appear under their name only when complete, and locks on finished folders.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::TEMPORARY;
use crate::ArtifactError;

/// Folder that appears under its name only when it is complete.
///
/// The content is written to `NAME.partial` next to it. A partial folder left by an earlier run is
/// resumed unless [`clear`](Self::clear)ed; its files are whole, since they are written with
/// [`write_file`](super::write_file). Folders not made by this program are never touched, and only one run at a time works in
/// a folder.
#[derive(Debug)]
pub struct PartialFolder {
    target: PathBuf,
    partial: PathBuf,
    manifest: &'static str,
    /// Marks the partial folder as ours; locked while this run works in it.
    lock: fs::File,
}

/// Name of the file that marks a partial folder.
const MARK: &str = ".powerinfer-run";

impl PartialFolder {
    /// Opens or creates the partial folder of `target`.
    ///
    /// An existing `target` must be empty or an older artifact, which contains the file `manifest`.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::NotAnArtifact`] if `target` has other content, [`ArtifactError::Busy`] if another run
    /// works in the partial folder, or an error of the file system.
    pub fn open(target: &Path, manifest: &'static str) -> Result<Self, ArtifactError> {
        let target: PathBuf = target.components().collect();
        if target.file_name().is_none() {
            return Err(not_an_artifact(&target, manifest));
        }
        let partial = with_ending(&target, ".partial");
        for (folder, mark) in [
            (&target, manifest),
            (&with_ending(&target, ".old"), manifest),
            (&partial, MARK),
        ] {
            let marked = match mark {
                MARK => folder.join(MARK).exists(),
                manifest => is_manifest(&folder.join(manifest)),
            };
            if !marked && !is_absent_or_empty(folder)? {
                return Err(not_an_artifact(folder, manifest));
            }
        }
        fs::create_dir_all(&partial).map_err(ArtifactError::write(&partial))?;
        let mark = partial.join(MARK);
        let lock = fs::File::create(&mark).map_err(ArtifactError::write(&mark))?;
        let is_locked = !matches!(lock.try_lock(), Err(fs::TryLockError::WouldBlock));
        // The run that had the lock may have renamed the folder since.
        if !is_locked || !is_at(&lock, &mark) {
            return Err(ArtifactError::Busy { path: target });
        }
        remove_leftovers(&partial);
        // A run killed between its two renames has left the older artifact in `NAME.old`.
        let old = with_ending(&target, ".old");
        if !target.exists() && old.join(manifest).exists() {
            fs::rename(&old, &target).map_err(ArtifactError::write(&target))?;
        }
        Ok(Self {
            target,
            partial,
            manifest,
            lock,
        })
    }

    /// Removes the content left by an earlier run.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Write`].
    pub fn clear(&self) -> Result<(), ArtifactError> {
        let failed = || ArtifactError::write(&self.partial);
        for entry in fs::read_dir(&self.partial).map_err(failed())? {
            let path = entry.map_err(failed())?.path();
            let removed = match path.is_dir() {
                true => fs::remove_dir_all(&path),
                false if path.ends_with(MARK) => Ok(()),
                false => fs::remove_file(&path),
            };
            removed.map_err(ArtifactError::write(&path))?;
        }
        Ok(())
    }

    /// Temporary path that is renamed to the target by [`finish`](Self::finish).
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Renames the partial folder to the target, replacing an older artifact.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Write`].
    pub fn finish(self) -> Result<(), ArtifactError> {
        debug_assert!(
            self.partial.join(self.manifest).exists(),
            "the manifest is written"
        );
        let failed = ArtifactError::write(&self.target);
        let mut lock = Some(self.lock);
        if cfg!(windows) {
            lock = None; // a folder with an open file cannot be renamed
        }
        // Not while another run changes files of the older artifact, which it finds by their paths; and no other run
        // replaces the new one before the older one is gone.
        let locks = [&self.target, &self.partial].map(|folder| FolderLock::wait(folder));
        let old = with_ending(&self.target, ".old");
        if self.target.exists() {
            remove_marked(&old, self.manifest)?;
            fs::rename(&self.target, &old).map_err(ArtifactError::write(&self.target))?;
        }
        fs::rename(&self.partial, &self.target).map_err(failed)?;
        // Last, so that a folder left by a killed run is recognised by the next one.
        let mark = self.target.join(MARK);
        fs::remove_file(&mark).map_err(ArtifactError::write(&mark))?;
        let removed = remove_marked(&old, self.manifest);
        drop((lock, locks));
        removed
    }
}

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
        remove_leftovers(folder);
        Ok(Self { _lock: lock })
    }

    /// Locks `folder`, if it exists, once no other run has the lock.
    fn wait(folder: &Path) -> Self {
        while let Ok(lock) = fs::File::open(folder) {
            // Where folders cannot be locked, no other run has the lock either.
            if lock.lock().is_err() || is_at(&lock, folder) {
                return Self { _lock: Some(lock) };
            }
        }
        Self { _lock: None }
    }
}

/// Whether `path` is the path of the open `file`.
fn is_at(file: &fs::File, path: &Path) -> bool {
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

/// Removes `folder` if it exists, the file `mark` last, so that an interrupted removal can be
/// recognised and repeated.
pub(super) fn remove_marked(folder: &Path, mark: &str) -> Result<(), ArtifactError> {
    if !folder.exists() {
        return Ok(());
    }
    let failed = || ArtifactError::write(folder);
    for entry in fs::read_dir(folder).map_err(failed())? {
        let path = entry.map_err(failed())?.path();
        let removed = match path.is_dir() {
            true => fs::remove_dir_all(&path),
            false if path.ends_with(mark) => Ok(()),
            false => fs::remove_file(&path),
        };
        removed.map_err(ArtifactError::write(&path))?;
    }
    fs::remove_dir_all(folder).map_err(failed())
}

/// Appends `ending` to the file name of `path`.
pub(super) fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(ending);
    path.with_file_name(name)
}

pub(super) fn not_an_artifact(path: &Path, manifest: &str) -> ArtifactError {
    ArtifactError::NotAnArtifact {
        path: path.to_owned(),
        manifest: manifest.to_owned(),
    }
}

/// Returns whether `folder` does not exist or is empty.
fn is_absent_or_empty(folder: &Path) -> Result<bool, ArtifactError> {
    match fs::symlink_metadata(folder) {
        Err(_) => return Ok(true),
        Ok(found) if !found.is_dir() => return Ok(false),
        Ok(_) => {}
    }
    let mut entries = fs::read_dir(folder).map_err(ArtifactError::read(folder))?;
    Ok(entries.next().is_none())
}

/// Length of the prefix of a manifest that contains the name of its format.
const MANIFEST_PREFIX: u64 = 1 << 20;

/// Returns whether the file at `path` names a PowerInfer format; many programs write a `manifest.json`.
fn is_manifest(path: &Path) -> bool {
    use std::io::Read;
    let mut bytes = Vec::new();
    let read =
        fs::File::open(path).and_then(|file| file.take(MANIFEST_PREFIX).read_to_end(&mut bytes));
    let name = b"powerinfer-";
    read.is_ok() && bytes.windows(name.len()).any(|window| window == name)
}

/// Removes the temporary files of killed runs.
fn remove_leftovers(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if path.is_dir() {
            remove_leftovers(&path);
        } else if name.starts_with(TEMPORARY.0) && name.ends_with(TEMPORARY.1) {
            let _ = fs::remove_file(path); // best effort
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::write::write_file;

    #[test]
    fn a_partial_folder_resumes_and_replaces_the_target() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("profile");
        let open = || PartialFolder::open(&target, "manifest.json");
        let first = open().unwrap();
        write_file(&first.path().join("manifest.json"), b"powerinfer-1").unwrap();
        assert!(!target.exists());
        let busy = open().unwrap_err();
        assert!(matches!(busy, ArtifactError::Busy { .. }), "{busy}");
        fs::write(first.path().join(".powerinfer-x.partial"), b"killed").unwrap();
        drop(first);
        let second = open().unwrap();
        assert!(
            second.path().join("manifest.json").exists(),
            "the content of the earlier run is kept"
        );
        second.finish().unwrap();
        let names = || -> Vec<_> {
            let entries = fs::read_dir(&target).unwrap();
            entries.map(|entry| entry.unwrap().file_name()).collect()
        };
        assert_eq!(names(), ["manifest.json"], "no other file is left");
        let third = open().unwrap();
        third.clear().unwrap();
        write_file(&third.path().join("manifest.json"), b"powerinfer-2").unwrap();
        third.finish().unwrap();
        assert_eq!(
            fs::read(target.join("manifest.json")).unwrap(),
            b"powerinfer-2"
        );
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn folders_of_other_programs_are_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("profile");
        let refused = || {
            let error = PartialFolder::open(&target, "manifest.json").unwrap_err();
            assert!(
                matches!(error, ArtifactError::NotAnArtifact { .. }),
                "{error}"
            );
        };
        for name in ["profile", "profile.partial", "profile.old"] {
            let precious = folder.path().join(name);
            fs::create_dir(&precious).unwrap();
            fs::write(precious.join("thesis.txt"), b"years").unwrap();
            refused();
            // Many programs write a file of this name.
            fs::write(
                precious.join("manifest.json"),
                b"{ \"name\": \"my web app\" }",
            )
            .unwrap();
            refused();
            assert_eq!(fs::read(precious.join("thesis.txt")).unwrap(), b"years");
            fs::remove_dir_all(&precious).unwrap();
        }
        fs::write(&target, b"a file").unwrap();
        refused();
        fs::remove_file(&target).unwrap();
        fs::create_dir(&target).unwrap();
        PartialFolder::open(&target, "manifest.json").unwrap();
    }

    #[test]
    fn folders_of_killed_runs_are_recognised() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("bundle");
        let open = || PartialFolder::open(&target, "manifest.json");
        let make = |content: &[u8]| {
            let made = open().unwrap();
            write_file(&made.path().join("manifest.json"), content).unwrap();
            fs::write(made.path().join("weights"), content).unwrap();
            made.finish().unwrap();
        };
        make(b"powerinfer-1");
        // Killed between the two renames: the older artifact is restored.
        fs::rename(&target, folder.path().join("bundle.old")).unwrap();
        drop(open().unwrap());
        assert_eq!(fs::read(target.join("weights")).unwrap(), b"powerinfer-1");
        // Killed after them, before or during the removal of the older artifact.
        for left in [&["manifest.json", "weights"][..], &["manifest.json"], &[]] {
            let old = folder.path().join("bundle.old");
            fs::create_dir(&old).unwrap();
            for name in left {
                fs::write(old.join(name), b"powerinfer-0").unwrap();
            }
            make(b"powerinfer-2");
            assert_eq!(fs::read(target.join("weights")).unwrap(), b"powerinfer-2");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        }
    }

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

    #[cfg(unix)]
    #[test]
    fn a_folder_is_not_replaced_while_its_files_are_changed() {
        use std::{thread, time::Duration};

        let parent = tempfile::tempdir().unwrap();
        let target = parent.path().join("artifact");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("manifest.json"), "powerinfer-old").unwrap();
        let partial = PartialFolder::open(&target, "manifest.json").unwrap();
        fs::write(partial.path().join("manifest.json"), "powerinfer-new").unwrap();
        let content = || fs::read_to_string(target.join("manifest.json")).unwrap();
        let lock = FolderLock::of(&target).unwrap();
        let other = fs::File::open(&target).unwrap();
        thread::scope(|scope| {
            let finished = scope.spawn(|| partial.finish());
            thread::sleep(Duration::from_millis(100));
            assert!(!finished.is_finished());
            assert_eq!(content(), "powerinfer-old");
            drop(lock);
            finished.join().unwrap().unwrap();
        });
        assert_eq!(content(), "powerinfer-new");
        assert!(!is_at(&other, &target), "a lock on the old one is none");
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
        FolderLock::of(&target).unwrap();
    }

    #[test]
    fn no_run_enters_a_folder_that_another_one_finishes() {
        let parent = tempfile::tempdir().unwrap();
        let target = parent.path().join("artifact");
        let partial = PartialFolder::open(&target, "manifest.json").unwrap();
        fs::write(partial.path().join("manifest.json"), "powerinfer-new").unwrap();
        let busy = PartialFolder::open(&target, "manifest.json").unwrap_err();
        assert!(matches!(busy, ArtifactError::Busy { .. }), "{busy}");
        partial.finish().unwrap();
        let files: Vec<_> = fs::read_dir(&target).unwrap().collect();
        assert_eq!(files.len(), 1);
        PartialFolder::open(&target, "manifest.json").unwrap();
    }
}
