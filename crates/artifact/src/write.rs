//! Atomic writes: to a temporary file or folder next to the target, then a rename, so that readers see
//! either the old or the new content, even if the program is killed.

mod contents;
mod folder;
mod lock;
mod scratch;
mod survey;

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use tempfile::{Builder, NamedTempFile};

pub use self::{
    contents::{Contents, matches},
    folder::PartialFolder,
    lock::{FileLock, FolderLock},
    scratch::ScratchFolder,
};
use crate::ArtifactError;

/// Prefix and suffix of temporary file names.
const TEMPORARY: (&str, &str) = (".powerinfer-", ".partial");

/// Maximum number of links followed in a row, as in Linux.
const MOST_LINKS: usize = 40;

/// Whether `name` is that of a temporary file.
fn is_temporary(name: &str) -> bool {
    name.starts_with(TEMPORARY.0) && name.ends_with(TEMPORARY.1)
}

/// Follows the links at `path` to their target, which need not exist.
fn resolved(path: &Path) -> Result<PathBuf, ArtifactError> {
    let mut found = path.to_owned();
    for _ in 0..MOST_LINKS {
        match fs::read_link(&found) {
            Ok(link) => found = parent(&found).join(link).components().collect(),
            // A link such as `..` has no file name.
            Err(_) if found.file_name().is_none() => {
                return found.canonicalize().map_err(ArtifactError::write(path));
            }
            Err(_) => return Ok(found),
        }
    }
    let error = io::Error::other("too many links in a row");
    Err(ArtifactError::write(path)(error))
}

/// Options to open a file for writing, with an error if it is a link.
fn unfollowed() -> fs::OpenOptions {
    let mut options = File::options();
    options.write(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NOFOLLOW);
    options
}

/// Returns the folder that contains `path`.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Creates a temporary file in the folder of `path`, with default permissions, and removes those that killed runs have left
/// there for `path`.
fn temporary_file_for(path: &Path) -> Result<NamedTempFile, ArtifactError> {
    let folder = parent(path);
    fs::create_dir_all(folder).map_err(ArtifactError::write(folder))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // The longest names of file systems have 255 bytes.
    let name: String = name.chars().take(40).collect();
    let prefix = format!("{}{name}-", TEMPORARY.0);
    remove_unlocked(folder, &prefix);
    loop {
        let file = new_temporary_file(path, folder, &prefix)?;
        // A file that another run has removed before it was locked is made again.
        if !cfg!(unix) || file.as_file().lock().is_err() || file.path().exists() {
            return Ok(file);
        }
    }
}

/// Removes the files in `folder` whose name begins with `prefix` and that no process has locked.
fn remove_unlocked(folder: &Path, prefix: &str) {
    if !cfg!(unix) {
        return;
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with(prefix) || !is_temporary(&name) {
            continue;
        }
        let (path, kind) = (entry.path(), entry.file_type());
        let is_unused = match kind {
            Ok(kind) if kind.is_file() => {
                let file = unfollowed().open(&path);
                file.is_ok_and(|file| file.try_lock().is_ok())
            }
            // A link is deleted, not its target.
            Ok(kind) => kind.is_symlink(),
            Err(_) => false,
        };
        if is_unused {
            // At worst it stays.
            let _ = fs::remove_file(path);
        }
    }
}

fn new_temporary_file(
    path: &Path,
    folder: &Path,
    prefix: &str,
) -> Result<NamedTempFile, ArtifactError> {
    let mut builder = Builder::new();
    builder.prefix(prefix).suffix(TEMPORARY.1);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder
        .tempfile_in(folder)
        .map_err(ArtifactError::write(path))
}

/// Flushes `file` to disk and renames it to `path`.
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

/// Writes `bytes` to `path` atomically; missing folders are created.
///
/// A symbolic link is followed to its target; a pipe or device is written to directly.
///
/// # Errors
///
/// [`ArtifactError::Write`].
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), ArtifactError> {
    if let Ok(existing) = fs::metadata(path)
        && !existing.is_file()
        && !existing.is_dir()
    {
        let open = fs::File::options().write(true).open(path);
        let written = open.and_then(|mut file| file.write_all(bytes));
        return written.map_err(ArtifactError::write(path));
    }
    let path = &resolved(path)?;
    let mut file = temporary_file_for(path)?;
    file.write_all(bytes).map_err(ArtifactError::write(path))?;
    persist(file, path)
}

/// Lets `write` fill a temporary file in the folder of `path`, then renames it to `path`. A symbolic link is followed.
///
/// # Errors
///
/// [`ArtifactError::Write`], or the error of `write`; `path` is unchanged then.
pub fn write_with<Failure: From<ArtifactError>>(
    path: &Path,
    write: impl FnOnce(&Path) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let path = &resolved(path)?;
    let file = temporary_file_for(path)?;
    write(file.path())?;
    // `write` may have replaced the file under its name, so the file is reopened.
    let (_locked, temporary) = file.into_parts();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn temporary_files_of_killed_runs_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let names = ["a-1", "a-2", "b-1"].map(|name| format!(".powerinfer-{name}.partial"));
        let [of_killed, of_running, of_another] = names.map(|name| folder.path().join(name));
        for file in [&of_killed, &of_another] {
            fs::write(file, "x").unwrap();
        }
        let running = fs::File::create(&of_running).unwrap();
        running.lock().unwrap();
        let link = folder.path().join(".powerinfer-a-3.partial");
        std::os::unix::fs::symlink(&of_another, &link).unwrap();
        write_file(&path, b"new").unwrap();
        assert!(!of_killed.exists() && !link.is_symlink());
        assert!(of_running.exists() && of_another.exists());
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_and_special_files_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let [target, link] = ["target", "link"].map(|name| folder.path().join(name));
        fs::write(&target, "old").unwrap();
        std::os::unix::fs::symlink("target", &link).unwrap();
        write_file(&link, b"new").unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&target).unwrap(), b"new");
        write_with(&link, |path| {
            fs::write(path, "newer").unwrap();
            Ok::<_, ArtifactError>(())
        })
        .unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&target).unwrap(), b"newer");
        // The target of a link need not exist.
        fs::remove_file(&target).unwrap();
        write_file(&link, b"here").unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&target).unwrap(), b"here");
        let ring = folder.path().join("ring");
        std::os::unix::fs::symlink("ring", &ring).unwrap();
        write_file(&ring, b"x").unwrap_err();
        // A socket cannot be written to and is not replaced.
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
            "no temporary file is left"
        );
    }
}
