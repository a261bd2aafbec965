//! Writing beside the target and renaming, so that a reader never meets a half-written file and
//! a killed program never costs an old one.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use tempfile::{Builder, NamedTempFile};

use crate::ArtifactError;

/// How names of temporary files begin and end.
const TEMPORARY: (&str, &str) = (".powerinfer-", ".partial");

/// The folder that holds `path`.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// A temporary file beside `path`, with the permissions an ordinary file would get.
fn beside(path: &Path) -> Result<NamedTempFile, ArtifactError> {
    let folder = parent(path);
    fs::create_dir_all(folder).map_err(ArtifactError::write(folder))?;
    let mut builder = Builder::new();
    builder.prefix(TEMPORARY.0).suffix(TEMPORARY.1);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder
        .tempfile_in(folder)
        .map_err(ArtifactError::write(path))
}

/// Flushes `file` to the disk and gives it its name.
fn persist(file: NamedTempFile, path: &Path) -> Result<(), ArtifactError> {
    file.as_file()
        .sync_all()
        .map_err(ArtifactError::write(path))?;
    file.persist(path).map_err(|error| ArtifactError::Write {
        path: path.to_owned(),
        source: error.error,
    })?;
    Ok(())
}

/// Writes `bytes` to `path`, all or nothing; missing folders are made.
///
/// Where a link stands, what it names is replaced; a pipe or a device is written to and stays.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), ArtifactError> {
    if let Ok(there) = fs::metadata(path)
        && !there.is_file()
        && !there.is_dir()
    {
        let open = fs::File::options().write(true).open(path);
        let written = open.and_then(|mut file| file.write_all(bytes));
        return written.map_err(ArtifactError::write(path));
    }
    let named = match path.is_symlink() {
        true => fs::canonicalize(path).ok(),
        false => None,
    };
    let path = named.as_deref().unwrap_or(path);
    let mut file = beside(path)?;
    file.write_all(bytes).map_err(ArtifactError::write(path))?;
    persist(file, path)
}

/// Lets `write` fill a temporary file beside `path`, then renames it, all or nothing.
pub fn write_with<Failure: From<ArtifactError>>(
    path: &Path,
    write: impl FnOnce(&Path) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let file = beside(path)?;
    write(file.path())?;
    // `write` may have replaced the file under its name, so the handle is taken anew.
    let temporary = file.into_temp_path();
    let handle = fs::File::open(&temporary).map_err(ArtifactError::write(path))?;
    handle.sync_all().map_err(ArtifactError::write(path))?;
    temporary
        .persist(path)
        .map_err(|error| ArtifactError::Write {
            path: path.to_owned(),
            source: error.error,
        })?;
    Ok(())
}

/// A folder that appears under its name only when it is complete.
///
/// The work happens in `NAME.partial` beside it. Unless told to start afresh, an earlier
/// partial folder is taken up again, so that long work resumes; files in it are written with
/// [`write_file`] and so are whole when they are there. Nothing is touched that this program has
/// not made, and no two runs work in one folder.
#[derive(Debug)]
pub struct PartialFolder {
    target: PathBuf,
    partial: PathBuf,
    manifest: &'static str,
    /// Marks the partial folder as ours; locked for as long as this run works in it.
    lock: fs::File,
}

/// The file that marks a partial folder.
const MARK: &str = ".powerinfer-run";

impl PartialFolder {
    /// Opens the partial folder of `target`, making it where it is not there yet.
    ///
    /// What is replaced in the end must be an older artifact of the kind: a folder with the file
    /// `manifest` in it, or an empty one.
    pub fn open(target: &Path, manifest: &'static str) -> Result<Self, ArtifactError> {
        let target: PathBuf = target.components().collect();
        if target.file_name().is_none() {
            return Err(foreign(&target, manifest));
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
            if !marked && !is_nothing(folder)? {
                return Err(foreign(folder, manifest));
            }
        }
        fs::create_dir_all(&partial).map_err(ArtifactError::write(&partial))?;
        let mark = partial.join(MARK);
        let lock = fs::File::create(&mark).map_err(ArtifactError::write(&mark))?;
        if let Err(fs::TryLockError::WouldBlock) = lock.try_lock() {
            return Err(ArtifactError::Busy { path: target });
        }
        remove_leftovers(&partial);
        // A run that was killed between its two renames has left the older artifact aside.
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

    /// Throws away what an earlier, different run left.
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

    /// Where to write meanwhile.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Gives the folder its name; an older one of that name is replaced.
    pub fn finish(self) -> Result<(), ArtifactError> {
        debug_assert!(self.partial.join(self.manifest).exists(), "it is complete");
        let failed = ArtifactError::write(&self.target);
        drop(self.lock);
        let old = with_ending(&self.target, ".old");
        if self.target.exists() {
            remove_marked(&old, self.manifest)?;
            fs::rename(&self.target, &old).map_err(ArtifactError::write(&self.target))?;
        }
        fs::rename(&self.partial, &self.target).map_err(failed)?;
        // Only now, so that a run killed before leaves a folder that the next one knows.
        let mark = self.target.join(MARK);
        fs::remove_file(&mark).map_err(ArtifactError::write(&mark))?;
        remove_marked(&old, self.manifest)
    }
}

/// The sole right to change files inside a finished folder; it ends when this is dropped.
#[derive(Debug)]
pub struct FolderLock {
    /// The folder itself, where the system locks folders: nothing is left in it.
    _lock: Option<fs::File>,
}

impl FolderLock {
    /// Takes the right, and removes the temporary files of runs that were killed; fails where
    /// another run has it.
    pub fn of(folder: &Path) -> Result<Self, ArtifactError> {
        let lock = fs::File::open(folder).ok();
        if let Some(lock) = &lock
            && let Err(fs::TryLockError::WouldBlock) = lock.try_lock()
        {
            return Err(ArtifactError::Busy {
                path: folder.to_owned(),
            });
        }
        remove_leftovers(folder);
        Ok(Self { _lock: lock })
    }
}

/// A folder beside an artifact for what is only there while a run measures; removed in the end, or
/// by the next run.
#[derive(Debug)]
pub struct ScratchFolder {
    folder: PathBuf,
    /// Locked for as long as this run uses it.
    _lock: fs::File,
}

/// The file that marks a scratch folder.
const SCRATCH: &str = ".powerinfer-scratch";

impl ScratchFolder {
    /// Makes the folder `NAME.measuring` beside `target`; one that a killed run has left is emptied.
    pub fn beside(target: &Path) -> Result<Self, ArtifactError> {
        Self::remove_leftover(target)?;
        let folder = Self::place(target);
        let failed = || ArtifactError::write(&folder);
        // Whatever is there still is not ours, or is in use.
        fs::create_dir_all(folder.parent().unwrap_or(Path::new("."))).map_err(failed())?;
        if fs::create_dir(&folder).is_err() && folder.exists() {
            let is_ours = folder.join(SCRATCH).exists();
            return Err(match is_ours {
                true => ArtifactError::Busy { path: folder },
                false => foreign(&folder, SCRATCH),
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

    /// Removes the folder that a killed run has left beside `target`, where there is one.
    pub fn remove_leftover(target: &Path) -> Result<(), ArtifactError> {
        let folder = Self::place(target);
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

    fn place(target: &Path) -> PathBuf {
        let target: PathBuf = target.components().collect();
        with_ending(&target, ".measuring")
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.folder
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        // What stays behind is removed by the next run.
        let _ = remove_marked(&self.folder, SCRATCH);
    }
}

/// Removes `folder`, where it is there, the file `mark` last: whenever this is cut short, what is
/// left is still known for ours.
fn remove_marked(folder: &Path, mark: &str) -> Result<(), ArtifactError> {
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

/// `path` with something behind its last name.
fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(ending);
    path.with_file_name(name)
}

fn foreign(path: &Path, manifest: &str) -> ArtifactError {
    ArtifactError::Foreign {
        path: path.to_owned(),
        manifest: manifest.to_owned(),
    }
}

/// Whether nothing is lost with `folder`: it is not there, or it is empty.
fn is_nothing(folder: &Path) -> Result<bool, ArtifactError> {
    match fs::symlink_metadata(folder) {
        Err(_) => return Ok(true),
        Ok(found) if !found.is_dir() => return Ok(false),
        Ok(_) => {}
    }
    let mut entries = fs::read_dir(folder).map_err(ArtifactError::read(folder))?;
    Ok(entries.next().is_none())
}

/// Bytes of a manifest within which the name of its format stands.
const BEGINNING: u64 = 1 << 20;

/// Whether the file at `path` says that it is one of ours; many programs write a `manifest.json`.
fn is_manifest(path: &Path) -> bool {
    use std::io::Read;
    let mut bytes = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(BEGINNING).read_to_end(&mut bytes));
    let name = b"powerinfer-";
    read.is_ok() && bytes.windows(name.len()).any(|part| part == name)
}

/// Removes the temporary files of runs that were killed, which nobody will ever rename.
fn remove_leftovers(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if path.is_dir() {
            remove_leftovers(&path);
        } else if name.starts_with(TEMPORARY.0) && name.ends_with(TEMPORARY.1) {
            let _ = fs::remove_file(path); // one left behind does no harm
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn links_are_followed_and_what_is_no_file_stays_what_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let [target, link] = ["target", "link"].map(|name| folder.path().join(name));
        fs::write(&target, "old").unwrap();
        std::os::unix::fs::symlink("target", &link).unwrap();
        write_file(&link, b"new").unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&target).unwrap(), b"new");
        // A link to nothing is replaced.
        fs::remove_file(&target).unwrap();
        write_file(&link, b"here").unwrap();
        assert_eq!(fs::read(&link).unwrap(), b"here");
        // A socket is neither file nor folder, and is not written to either.
        let socket = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        write_file(&socket, b"x").unwrap_err();
        assert!(!fs::metadata(&socket).unwrap().is_file());
    }

    #[test]
    fn a_failed_write_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.json");
        write_file(&path, b"old").unwrap();
        let result = write_with(&path, |temporary| {
            fs::write(temporary, b"half").unwrap();
            Err(ArtifactError::MissingTensor {
                path: temporary.to_owned(),
                tensor: "x".to_owned(),
            })
        });
        assert!(result.is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(
            fs::read_dir(folder.path()).unwrap().count(),
            1,
            "nothing is left beside it"
        );
    }

    #[test]
    fn a_partial_folder_resumes_and_replaces() {
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
            "an earlier run's work is still there"
        );
        second.finish().unwrap();
        let names = || -> Vec<_> {
            let entries = fs::read_dir(&target).unwrap();
            entries.map(|entry| entry.unwrap().file_name()).collect()
        };
        assert_eq!(names(), ["manifest.json"], "nothing else is in it");
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
    fn what_is_not_ours_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("profile");
        let refused = || {
            let error = PartialFolder::open(&target, "manifest.json").unwrap_err();
            assert!(matches!(error, ArtifactError::Foreign { .. }), "{error}");
        };
        for name in ["profile", "profile.partial", "profile.old"] {
            let precious = folder.path().join(name);
            fs::create_dir(&precious).unwrap();
            fs::write(precious.join("thesis.txt"), b"years").unwrap();
            refused();
            // Many programs have such a file.
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
    fn what_a_killed_run_left_is_known_for_ours() {
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
        // Killed between the two renames: the older one is put back.
        fs::rename(&target, folder.path().join("bundle.old")).unwrap();
        drop(open().unwrap());
        assert_eq!(fs::read(target.join("weights")).unwrap(), b"powerinfer-1");
        // Killed after them, before the older one was removed, or while it was.
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
    fn a_folder_is_changed_by_one_run_at_a_time() {
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

    #[test]
    fn scratch_is_removed_and_never_in_the_way_of_a_users_folder() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("bundle");
        let place = folder.path().join("bundle.measuring");
        let first = ScratchFolder::beside(&target).unwrap();
        fs::write(first.path().join("weights"), b"many").unwrap();
        let busy = ScratchFolder::beside(&target).unwrap_err();
        assert!(matches!(busy, ArtifactError::Busy { .. }), "{busy}");
        drop(first);
        assert!(!place.exists());
        // As a killed run leaves it.
        fs::create_dir(&place).unwrap();
        fs::write(place.join(SCRATCH), b"").unwrap();
        fs::write(place.join("weights"), b"many").unwrap();
        drop(ScratchFolder::beside(&target).unwrap());
        assert!(!place.exists());
        fs::create_dir(&place).unwrap();
        fs::write(place.join("manifest.json"), b"powerinfer-1").unwrap();
        let error = ScratchFolder::beside(&target).unwrap_err();
        assert!(matches!(error, ArtifactError::Foreign { .. }), "{error}");
        ScratchFolder::remove_leftover(&target).unwrap();
        assert!(place.join("manifest.json").exists());
    }
}
