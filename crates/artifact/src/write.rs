//! Atomic writes: to a temporary file or folder next to the target, then a rename, so that readers see
//! either the old or the new content, even if the program is killed.

mod folder;
mod scratch;

use std::{fs, io::Write, path::Path};

use tempfile::{Builder, NamedTempFile};

pub use self::{
    folder::{FolderLock, PartialFolder},
    scratch::ScratchFolder,
};
use crate::ArtifactError;

/// Prefix and suffix of temporary file names.
const TEMPORARY: (&str, &str) = (".powerinfer-", ".partial");

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
        let name = entry.file_name();
        let is_temporary = name
            .to_str()
            .is_some_and(|name| name.starts_with(prefix) && name.ends_with(TEMPORARY.1));
        if is_temporary
            && let Ok(file) = fs::File::open(entry.path())
            && file.try_lock().is_ok()
        {
            // At worst it stays.
            let _ = fs::remove_file(entry.path());
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
    let link_target = match path.is_symlink() {
        true => fs::canonicalize(path).ok(),
        false => None,
    };
    let path = link_target.as_deref().unwrap_or(path);
    let mut file = temporary_file_for(path)?;
    file.write_all(bytes).map_err(ArtifactError::write(path))?;
    persist(file, path)
}

/// Lets `write` fill a temporary file in the folder of `path`, then renames it to `path`.
///
/// # Errors
///
/// [`ArtifactError::Write`], or the error of `write`; `path` is unchanged then.
pub fn write_with<Failure: From<ArtifactError>>(
    path: &Path,
    write: impl FnOnce(&Path) -> Result<(), Failure>,
) -> Result<(), Failure> {
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
        write_file(&path, b"new").unwrap();
        assert!(!of_killed.exists());
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
        // A dangling link is replaced.
        fs::remove_file(&target).unwrap();
        write_file(&link, b"here").unwrap();
        assert_eq!(fs::read(&link).unwrap(), b"here");
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
