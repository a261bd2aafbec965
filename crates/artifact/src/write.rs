//! Writing beside the target and renaming, so that a reader never meets a half-written file and
//! a killed program never costs an old one.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use tempfile::{Builder, NamedTempFile};

use crate::ArtifactError;

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
    builder.prefix(".powerinfer-").suffix(".partial");
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
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), ArtifactError> {
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
/// [`write_file`] and so are whole when they are there.
#[derive(Debug)]
pub struct PartialFolder {
    target: PathBuf,
    partial: PathBuf,
}

impl PartialFolder {
    /// Opens the partial folder of `target`, making it where it is not there yet.
    pub fn open(target: &Path) -> Result<Self, ArtifactError> {
        let target: PathBuf = target.components().collect();
        let mut name = target.file_name().unwrap_or_default().to_owned();
        name.push(".partial");
        let partial = target.with_file_name(name);
        fs::create_dir_all(&partial).map_err(ArtifactError::write(&partial))?;
        Ok(Self { target, partial })
    }

    /// Throws away what an earlier, different run left.
    pub fn clear(&self) -> Result<(), ArtifactError> {
        fs::remove_dir_all(&self.partial).map_err(ArtifactError::write(&self.partial))?;
        fs::create_dir_all(&self.partial).map_err(ArtifactError::write(&self.partial))
    }

    /// Where to write meanwhile.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Gives the folder its name; an older one of that name is replaced.
    pub fn finish(self) -> Result<(), ArtifactError> {
        let failed = ArtifactError::write(&self.target);
        if self.target.exists() {
            let mut name = self.target.file_name().unwrap_or_default().to_owned();
            name.push(".old");
            let old = self.target.with_file_name(name);
            if old.exists() {
                fs::remove_dir_all(&old).map_err(ArtifactError::write(&old))?;
            }
            fs::rename(&self.target, &old).map_err(ArtifactError::write(&self.target))?;
            fs::rename(&self.partial, &self.target).map_err(failed)?;
            fs::remove_dir_all(&old).map_err(ArtifactError::write(&old))
        } else {
            fs::rename(&self.partial, &self.target).map_err(failed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let first = PartialFolder::open(&target).unwrap();
        write_file(&first.path().join("layer-000"), b"done").unwrap();
        assert!(!target.exists());
        let second = PartialFolder::open(&target).unwrap();
        assert!(
            second.path().join("layer-000").exists(),
            "an earlier run's work is still there"
        );
        second.finish().unwrap();
        assert!(target.join("layer-000").exists());
        let third = PartialFolder::open(&target).unwrap();
        write_file(&third.path().join("layer-001"), b"new").unwrap();
        third.finish().unwrap();
        assert!(target.join("layer-001").exists() && !target.join("layer-000").exists());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
