//! Weights in a single file, or in shards listed by an index or numbered in their names.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use powerinfer_artifact::{ArtifactError, PartName, json, mapped_file::FileBytes};
use serde::Deserialize;

use crate::{Files, ModelError};

/// `<name>.index.json`.
#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl Files {
    /// Opens the file called `single`; otherwise the shards that `<single>.index.json` lists, sorted; otherwise, without an
    /// index, all numbered shards. Returns `None` if there are no such files.
    ///
    /// # Errors
    ///
    /// Returns an error if a file cannot be read, or if a shard is missing or outside the folder.
    pub fn shards(&self, single: &str) -> Result<Option<Vec<(PathBuf, FileBytes)>>, ModelError> {
        if let Some(bytes) = self.read(single)? {
            return Ok(Some(vec![(self.path(single), bytes)]));
        }
        let index = format!("{single}.index.json");
        let shards = match self.read(&index)? {
            Some(bytes) => {
                let shards = listed_shards(&self.path(&index), &bytes)?;
                let names = self.names();
                let missing = shards.iter().filter(|shard| !names.contains(shard));
                let missing: Vec<String> = missing.cloned().collect();
                if !missing.is_empty() {
                    return Err(ModelError::MissingShards {
                        folder: self.folder().to_owned(),
                        index,
                        shards: missing,
                    });
                }
                shards
            }
            None => match self.numbered_shards(single)? {
                Some(shards) => shards,
                None => return Ok(None),
            },
        };
        let mut opened = Vec::new();
        for shard in shards {
            if let Some(bytes) = self.read(&shard)? {
                opened.push((self.path(&shard), bytes));
            }
        }
        Ok(Some(opened))
    }

    /// Returns the names of the numbered shards of `single`, after checking that all exist; `None` if there are none.
    fn numbered_shards(&self, single: &str) -> Result<Option<Vec<String>>, ModelError> {
        let names = self.names();
        let stem = single.rsplit_once('.');
        let shard = names.iter().find_map(|name| {
            let part = PartName::parse(name)?;
            (Some((part.stem, part.extension)) == stem).then_some((name, part))
        });
        let Some((name, shard)) = shard else {
            return Ok(None);
        };
        let (shards, parts): (Vec<String>, Vec<String>) =
            shard.all().partition(|shard| names.contains(shard));
        if parts.is_empty() {
            Ok(Some(shards))
        } else {
            Err(ModelError::MissingParts {
                path: self.path(name),
                parts,
            })
        }
    }
}

/// Returns the sorted names of the shards in the index at `path`.
fn listed_shards(path: &Path, bytes: &[u8]) -> Result<Vec<String>, ModelError> {
    let parsed: ShardIndex = json::from_slice(bytes).map_err(|source| ArtifactError::NotJson {
        path: path.to_owned(),
        source,
    })?;
    let mut names = BTreeSet::new();
    for (tensor, shard) in parsed.weight_map {
        if Path::new(&shard).file_name() != Some(shard.as_ref()) {
            return Err(ModelError::ShardOutside {
                path: path.to_owned(),
                tensor,
                shard,
            });
        }
        names.insert(shard);
    }
    Ok(names.into_iter().collect())
}
