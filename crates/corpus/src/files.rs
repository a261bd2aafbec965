//! Lists the files in a folder and its subfolders.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
};

use crate::{CorpusError, Skipped};

/// Sorted files of a folder and its subfolders, and the subfolders that cannot be listed.
pub(crate) struct Files {
    pub(crate) files: Vec<PathBuf>,
    pub(crate) skipped: Vec<Skipped>,
}

impl Files {
    /// Lists the files in `folder` and its subfolders, except hidden ones. Links are followed; each folder is entered only
    /// once, so cyclic links do no harm.
    ///
    /// # Errors
    ///
    /// `folder` itself cannot be listed.
    pub(crate) fn new(folder: &Path) -> Result<Self, CorpusError> {
        let mut found = Self {
            files: Vec::new(),
            skipped: Vec::new(),
        };
        let mut entered = HashSet::new();
        // A stack: the next path to visit is the last element.
        let mut open = vec![folder.to_owned()];
        while let Some(path) = open.pop() {
            if !path.is_dir() {
                found.files.extend(path.is_file().then_some(path));
                continue;
            }
            match entries(&path, &mut entered) {
                Ok(entries) => open.extend(entries.into_iter().rev()),
                Err(source) if path == folder => return Err(CorpusError::Read { path, source }),
                Err(error) => found.skipped.push(Skipped {
                    path,
                    records: None,
                    reason: error.into(),
                }),
            }
        }
        Ok(found)
    }
}

/// Returns the sorted paths in `folder`; none if the folder was entered before.
fn entries(folder: &Path, entered: &mut HashSet<PathBuf>) -> std::io::Result<Vec<PathBuf>> {
    if !entered.insert(folder.canonicalize()?) {
        return Ok(Vec::new());
    }
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}
