//! Download of the files of a model, one after another.

use std::{collections::BTreeSet, fs};

use powerinfer_artifact::{Progress, mapped_file::FileBytes};

use crate::{
    HubError, ModelName, Snapshot, SnapshotFile,
    cache::{Commit, ModelCache},
    client::Client,
    download::fetch_blob,
    file_name::FileName,
    remote_file::RemoteFile,
    selection::{SelectedFiles, Weights, gguf_parts, shards},
    snapshot::Selection,
};

/// Most names that an error lists.
const NAMES_IN_AN_ERROR: usize = 20;

/// Download of one commit into the cache.
pub(crate) struct Fetch<'a> {
    pub(crate) client: &'a Client,
    pub(crate) model: &'a ModelName,
    pub(crate) cache: &'a ModelCache,
    pub(crate) commit: &'a Commit,
    pub(crate) progress: &'a dyn Progress,
}

impl Fetch<'_> {
    /// Downloads the requested files among those called `names`.
    pub(crate) fn selection(
        &self,
        selection: Selection<'_>,
        names: &BTreeSet<String>,
    ) -> Result<Snapshot, HubError> {
        let folder = self.cache.snapshot(self.commit);
        let mut path = folder.clone();
        let files = match selection {
            Selection::File(file) => {
                if !names.contains(file.as_str()) {
                    return Err(self.no_such_file(file, names));
                }
                path.push(file.to_path());
                self.files(gguf_parts(self.model, file, names)?)?
            }
            Selection::Model(check) => {
                let selection = SelectedFiles::new(self.model, names)?;
                let mut files = self.files(selection.companions)?;
                if !files.is_empty() {
                    check(&folder).map_err(HubError::OfNoUse)?;
                }
                let weights = match selection.weights {
                    Weights::Files(weights) => weights,
                    Weights::Gguf(parts) => {
                        path.push(parts[0].to_path());
                        parts
                    }
                    Weights::Sharded(index) => {
                        files.extend(self.files(vec![index.clone()])?);
                        let bytes = FileBytes::open(&folder.join(index.to_path()))?;
                        let shards = shards(self.model, &index, &bytes)?;
                        let absent = |shard: &&FileName| !names.contains(shard.as_str());
                        if let Some(shard) = shards.iter().find(absent) {
                            return Err(HubError::BadIndex {
                                model: self.model.to_string(),
                                index: index.to_string(),
                                reason: format!("lists `{shard}`, which is not there"),
                            });
                        }
                        shards
                    }
                };
                files.extend(self.files(weights)?);
                files
            }
        };
        Ok(Snapshot {
            folder,
            path,
            commit: self.commit.as_str().to_owned(),
            files,
        })
    }

    /// Downloads the files in `wanted` that the snapshot lacks.
    fn files(&self, wanted: Vec<FileName>) -> Result<Vec<SnapshotFile>, HubError> {
        let folder = self.cache.snapshot(self.commit);
        let mut files = Vec::new();
        let mut missing = Vec::new();
        for name in wanted {
            let there = fs::metadata(folder.join(name.to_path()));
            let mut file = SnapshotFile {
                name: name.to_string(),
                bytes: 0,
                fetched: false,
            };
            match there {
                Ok(metadata) => file.bytes = metadata.len(),
                Err(_) => {
                    let remote = self.describe(&name)?;
                    file.bytes = remote.size;
                    file.fetched = !self.cache.has_blob(&remote.etag, remote.size);
                    missing.push(remote);
                }
            }
            files.push(file);
        }
        if missing.is_empty() {
            return Ok(files);
        }
        let left =
            |remote: &RemoteFile| remote.size - self.cache.downloaded(&remote.etag, remote.size);
        let total = missing.iter().map(left).fold(0, u64::saturating_add);
        self.progress.begin(&self.model.to_string(), total, "bytes");
        let result = missing.iter().try_for_each(|remote| {
            fetch_blob(self.client, self.model, self.cache, remote, self.progress)?;
            self.cache.link(self.commit, &remote.name, &remote.etag)
        });
        self.progress.end();
        result.map(|()| files)
    }

    /// Requests the hub's description of the file called `name`.
    fn describe(&self, name: &FileName) -> Result<RemoteFile, HubError> {
        // The commit rather than the branch, which may move during the download.
        let path = format!(
            "{}/resolve/{}",
            self.model.repository(),
            self.commit.as_str()
        );
        let address = self.client.address(&path, name.components())?;
        self.client.persist(self.progress, || {
            RemoteFile::describe(self.client, self.model, name, address.clone())
        })
    }

    fn no_such_file(&self, file: &FileName, names: &BTreeSet<String>) -> HubError {
        let mut known: Vec<String> = names
            .iter()
            .filter_map(|name| FileName::parse(name).ok())
            .map(|name| name.to_string())
            .take(NAMES_IN_AN_ERROR)
            .collect();
        if known.len() < names.len() {
            known.push("…".to_owned());
        }
        HubError::NoSuchFile {
            model: self.model.to_string(),
            file: file.to_string(),
            known: known.join(", "),
        }
    }
}
