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
    fs::{self, File, OpenOptions, TryLockError},
    io::ErrorKind,
    path::{Path, PathBuf},
    time::Duration,
};

use powerinfer_artifact::{ArtifactError, Progress, write::write_file};

use crate::{HubError, ModelName, checksum::Etag, file_name::FileName};

/// Pause between looks at a lock that another process holds.
const LOCK_PAUSE: Duration = Duration::from_millis(100);

/// A model's folder in the cache.
#[derive(Debug)]
pub(crate) struct ModelCache {
    folder: PathBuf,
    locks: PathBuf,
}

/// A commit, as 40 hexadecimal digits: safe as a name, and the same whatever the branch does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Commit(String);

impl Commit {
    /// Reads a commit; none where it is something else.
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
    /// The folder of `model` in `cache`; it need not be there.
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

    /// Where the contents called `etag` are.
    pub(crate) fn blob(&self, etag: &Etag) -> PathBuf {
        self.folder.join("blobs").join(etag.as_str())
    }

    /// Where the contents called `etag` are while they arrive.
    pub(crate) fn partial(&self, etag: &Etag) -> PathBuf {
        let name = format!("{}.incomplete", etag.as_str());
        self.folder.join("blobs").join(name)
    }

    /// Whether the contents called `etag` are there, `size` bytes of them.
    pub(crate) fn has_blob(&self, etag: &Etag, size: u64) -> bool {
        fs::metadata(self.blob(etag)).is_ok_and(|metadata| metadata.len() == size)
    }

    /// Bytes of the contents called `etag`, `size` in all, that are there already.
    pub(crate) fn length_there(&self, etag: &Etag, size: u64) -> u64 {
        if self.has_blob(etag, size) {
            return size;
        }
        let partial = fs::metadata(self.partial(etag)).map_or(0, |metadata| metadata.len());
        // One that is too long is thrown away.
        if partial <= size { partial } else { 0 }
    }

    /// The commit that `revision` was at when it was last fetched.
    pub(crate) fn commit(&self, revision: &str) -> Option<Commit> {
        let known = fs::read_to_string(self.folder.join("refs").join(revision)).ok();
        known
            .and_then(|text| Commit::parse(&text))
            .or_else(|| Commit::parse(revision))
    }

    /// Remembers that `revision` is at `commit`.
    pub(crate) fn remember(&self, revision: &str, commit: &Commit) -> Result<(), HubError> {
        let path = self.folder.join("refs").join(revision);
        if revision == commit.as_str() || self.commit(revision).as_ref() == Some(commit) {
            return Ok(());
        }
        Ok(write_file(&path, commit.as_str().as_bytes())?)
    }

    /// Makes the contents called `etag` the file `name` of `commit`.
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
        // Relative, so that the cache can be moved: out of the folders of the name, the commit
        // and `snapshots`.
        let mut target: PathBuf = name.components().map(|_| "..").collect();
        target.push("../blobs");
        target.push(etag.as_str());
        match make_link(&target, &self.blob(etag), &path) {
            // Another process was quicker.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            result => Ok(result.map_err(ArtifactError::write(&path))?),
        }
    }

    /// Waits until no other process fetches the contents called `etag`. Dropping the result lets
    /// the next one in.
    pub(crate) fn lock(
        &self,
        etag: &Etag,
        name: &FileName,
        progress: &dyn Progress,
    ) -> Result<File, HubError> {
        let path = self.locks.join(format!("{}.lock", etag.as_str()));
        fs::create_dir_all(&self.locks).map_err(ArtifactError::write(&self.locks))?;
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(ArtifactError::write(&path))?;
        let mut waited = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) => {
                    if !waited {
                        progress.note(&format!("waiting for another process to fetch `{name}`"));
                        waited = true;
                    }
                    progress.advance(0)?;
                    std::thread::sleep(LOCK_PAUSE);
                }
                // Some network file systems know no locks. Two writers at once would then be found
                // out by the digest.
                Err(TryLockError::Error(_)) => return Ok(file),
            }
        }
    }
}

/// A symbolic link, or where there are none, another name or a copy.
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
