//! Models in the cache, and what to put there.

use std::{
    error::Error,
    path::{Path, PathBuf},
};

use crate::file_name::FileName;

/// A model, or a file of one, in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The folder of the commit; it may hold more files than were requested.
    pub folder: PathBuf,
    /// Path to open: the folder, or the file if a single one was requested or is the whole model.
    pub path: PathBuf,
    /// Commit of the revision, 40 hexadecimal digits.
    pub commit: String,
    /// The requested files.
    pub files: Vec<SnapshotFile>,
}

/// A file of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotFile {
    /// Its name in the repository.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// Whether it was downloaded, rather than found in the cache.
    pub fetched: bool,
}

/// Check of the small files of a model, in a folder that has no weights yet.
pub type Check<'a> = dyn Fn(&Path) -> Result<(), Box<dyn Error + Send + Sync>> + 'a;

/// Part of a model to fetch.
#[derive(Clone, Copy)]
pub(crate) enum Selection<'a> {
    /// Everything needed to run the model, if the check of its small files succeeds.
    Model(&'a Check<'a>),
    /// One file.
    File(&'a FileName),
}
