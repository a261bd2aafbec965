//! Weights in a single file, or in shards listed by an index.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use powerinfer_artifact::{ArtifactError, json, mapped_file::FileBytes};
use serde::Deserialize;

use crate::{Files, ModelError};

/// `<name>.index.json`.
#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl Files {
    /// The file called `single`, or the shards that `<single>.index.json` lists, sorted; none where
    /// there is neither.
    ///
    /// # Errors
    ///
    /// Returns an error if a file cannot be read, or if a shard is missing or outside the folder.
    pub fn shards(&self, single: &str) -> Result<Option<Vec<(PathBuf, FileBytes)>>, ModelError> {
        if let Some(bytes) = self.read(single)? {
            return Ok(Some(vec![(self.path(single), bytes)]));
        }
        let index = format!("{single}.index.json");
        let Some(bytes) = self.read(&index)? else {
            return Ok(None);
        };
        let path = self.path(&index);
        let parsed: ShardIndex =
            json::from_slice(&bytes).map_err(|source| ArtifactError::NotJson {
                path: path.clone(),
                source,
            })?;
        let mut names = BTreeSet::new();
        for (tensor, shard) in parsed.weight_map {
            if Path::new(&shard).file_name() != Some(shard.as_ref()) {
                return Err(ModelError::ShardOutside {
                    path,
                    tensor,
                    shard,
                });
            }
            names.insert(shard);
        }
        let open = |shard: String| match self.read(&shard)? {
            Some(bytes) => Ok((self.path(&shard), bytes)),
            None => Err(ModelError::MissingShard {
                folder: self.folder().to_owned(),
                index: index.clone(),
                shard,
            }),
        };
        names
            .into_iter()
            .map(open)
            .collect::<Result<_, _>>()
            .map(Some)
    }
}
