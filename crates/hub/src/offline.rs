//! Lookup of models in the cache without a network.

use std::{collections::BTreeSet, fs, path::Path};

use crate::{
    ModelName, Snapshot, SnapshotFile,
    cache::ModelCache,
    file_name::FileName,
    selection::{SelectedFiles, Weights, gguf_parts, shards},
    snapshot::Selection,
};

/// Greatest depth of folders in a snapshot.
const DEEPEST: usize = 8;

/// The requested files of `model` if the cache has all of them.
pub(crate) fn cached(
    cache: &ModelCache,
    model: &ModelName,
    selection: Selection<'_>,
) -> Option<Snapshot> {
    let commit = cache.commit(model.revision())?;
    let folder = cache.snapshot(&commit);
    let mut names = BTreeSet::new();
    add_names(&folder, "", DEEPEST, &mut names);
    let mut path = folder.clone();
    let files = match selection {
        Selection::File(file) => {
            path.push(file.to_path());
            gguf_parts(model, file, &names).ok()?
        }
        Selection::Model(_) => {
            let selection = SelectedFiles::new(model, &names).ok()?;
            let mut files = selection.companions;
            match selection.weights {
                Weights::Gguf(parts) => {
                    path.push(parts[0].to_path());
                    files.extend(parts);
                }
                _ if !names.contains("config.json") => return None,
                Weights::Files(shards) => files.extend(shards),
                Weights::Sharded(index) => {
                    let bytes = fs::read(folder.join(index.to_path())).ok()?;
                    files.extend(shards(model, &index, &bytes).ok()?);
                    files.push(index);
                }
            }
            files
        }
    };
    let file = |name: &FileName| {
        let metadata = fs::metadata(folder.join(name.to_path())).ok()?;
        metadata.is_file().then(|| SnapshotFile {
            name: name.to_string(),
            bytes: metadata.len(),
            fetched: false,
        })
    };
    Some(Snapshot {
        path,
        commit: commit.as_str().to_owned(),
        files: files.iter().map(file).collect::<Option<_>>()?,
        folder,
    })
}

/// Adds the names of the files in `folder` with `/` between components and `prefix` before them.
fn add_names(folder: &Path, prefix: &str, depth: usize, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let Some(name) = entry
            .file_name()
            .to_str()
            .map(|name| format!("{prefix}{name}"))
        else {
            continue;
        };
        if path.is_file() {
            names.insert(name);
        } else if depth > 0 && path.is_dir() {
            add_names(&path, &format!("{name}/"), depth - 1, names);
        }
    }
}
