//! The folder of one model in the cache, laid out as the Python client does:
//!
//! ```text
//! models--org--name/
//!   blobs/<etag>               contents; <etag>.incomplete while they arrive
//!   snapshots/<commit>/<file>  links to blobs
//!   refs/<revision>            a commit
//! .locks/models--org--name/<etag>.lock
//! ```

use std::{
    fs::{self, OpenOptions},
    io::ErrorKind,
    path::{Path, PathBuf},
    time::Duration,
};

use powerinfer_artifact::{
    ArtifactError, Progress,
    write::{FileLock, write_file},
};

use crate::{HubError, ModelName, checksum::Etag, file_name::FileName};

/// Pause between attempts to take a lock that another process holds.
const LOCK_PAUSE: Duration = Duration::from_millis(100);

/// A model's folder in the cache.
#[derive(Debug)]
pub(crate) struct ModelCache {
    folder: PathBuf,
    locks: PathBuf,
}

/// A commit: 40 hexadecimal digits, safe as a file name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Commit(String);

impl Commit {
    /// Parses a commit; none if `text` is something else.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let is_commit = text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_commit.then(|| Self(text.to_owned()))
    }

    /// The digits.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl ModelCache {
    /// The folder of `model` in `cache`; it need not exist.
    pub(crate) fn new(cache: &Path, model: &ModelName) -> Self {
        let name = format!("models--{}", model.repository().replace('/', "--"));
        Self {
            folder: cache.join(&name),
            locks: cache.join(".locks").join(name),
        }
    }

    /// The folder with the files of a commit.
    pub(crate) fn snapshot(&self, commit: &Commit) -> PathBuf {
        self.folder.join("snapshots").join(commit.as_str())
    }

    /// Path of the content with this tag.
    pub(crate) fn blob(&self, etag: &Etag) -> PathBuf {
        self.folder.join("blobs").join(etag.as_str())
    }

    /// Path of the content with this tag while it is downloaded.
    pub(crate) fn partial(&self, etag: &Etag) -> PathBuf {
        let name = format!("{}.incomplete", etag.as_str());
        self.folder.join("blobs").join(name)
    }

    /// Whether the content with this tag is complete, with `size` bytes.
    pub(crate) fn has_blob(&self, etag: &Etag, size: u64) -> bool {
        fs::metadata(self.blob(etag)).is_ok_and(|metadata| metadata.len() == size)
    }

    /// Bytes of the content with this tag, `size` in all, that were downloaded already.
    pub(crate) fn downloaded(&self, etag: &Etag, size: u64) -> u64 {
        if self.has_blob(etag, size) {
            return size;
        }
        let partial = fs::metadata(self.partial(etag)).map_or(0, |metadata| metadata.len());
        // A file that is too long will be discarded.
        if partial <= size { partial } else { 0 }
    }

    /// Commit of `revision` at its last download.
    pub(crate) fn commit(&self, revision: &str) -> Option<Commit> {
        let known = fs::read_to_string(self.folder.join("refs").join(revision)).ok();
        known
            .and_then(|text| Commit::parse(&text))
            .or_else(|| Commit::parse(revision))
    }

    /// Records that `revision` is at `commit`.
    pub(crate) fn remember(&self, revision: &str, commit: &Commit) -> Result<(), HubError> {
        let path = self.folder.join("refs").join(revision);
        if revision == commit.as_str() || self.commit(revision).as_ref() == Some(commit) {
            return Ok(());
        }
        Ok(write_file(&path, commit.as_str().as_bytes())?)
    }

    /// Links the file `name` of `commit` to the content with this tag.
    pub(crate) fn link(
        &self,
        commit: &Commit,
        name: &FileName,
        etag: &Etag,
    ) -> Result<(), HubError> {
        let path = self.snapshot(commit).join(name.to_path());
        if path.exists() {
            return Ok(());
        }
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(ArtifactError::write(folder))?;
        }
        // Relative, so that the cache can be moved: one `..` per folder of the name, for the commit
        // and for `snapshots`.
        let mut target: PathBuf = name.components().map(|_| "..").collect();
        target.push("../blobs");
        target.push(etag.as_str());
        match make_link(&target, &self.blob(etag), &path) {
            // Another process made the link first.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            result => Ok(result.map_err(ArtifactError::write(&path))?),
        }
    }

    /// Waits until no other process downloads the content with this tag, and locks it until the
    /// result is dropped.
    pub(crate) fn lock(
        &self,
        etag: &Etag,
        name: &FileName,
        progress: &dyn Progress,
    ) -> Result<FileLock, HubError> {
        let path = self.locks.join(format!("{}.lock", etag.as_str()));
        fs::create_dir_all(&self.locks).map_err(ArtifactError::write(&self.locks))?;
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).write(true).open(&path);
        let mut file = file.map_err(ArtifactError::write(&path))?;
        let mut waited = false;
        loop {
            // On a file system without locks, the digest reveals two concurrent writers.
            file = match FileLock::new(file) {
                Ok(lock) => return Ok(lock),
                Err(file) => file,
            };
            if !waited {
                progress.note(&format!("waiting for another process to fetch `{name}`"));
                waited = true;
            }
            progress.advance(0)?;
            std::thread::sleep(LOCK_PAUSE);
        }
    }
}

/// Makes a symbolic link, or if that fails a hard link or a copy.
fn make_link(target: &Path, blob: &Path, path: &Path) -> std::io::Result<()> {
    #[cfg(unix)]
    let linked = std::os::unix::fs::symlink(target, path);
    #[cfg(windows)]
    let linked = std::os::windows::fs::symlink_file(target, path);
    #[cfg(not(any(unix, windows)))]
    let linked: std::io::Result<()> = Err(std::io::Error::from(ErrorKind::Unsupported));
    match linked {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            fs::hard_link(blob, path).or_else(|_| fs::copy(blob, path).map(drop))
        }
        result => result,
    }
}
