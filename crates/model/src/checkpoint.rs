//! A checkpoint: a configuration, and tensors in some container.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use powerinfer_artifact::{ArtifactError, Digest, ModelIdentity, TensorFile};
use serde::Deserialize;

use crate::{
    Files, ModelConfig, ModelError, Weight,
    container::{Container, Safetensors},
    families,
    pickle::Pickles,
    source::Source,
};

/// An open checkpoint whose tensors are all there, in the shapes the configuration asks for.
#[derive(Debug)]
pub struct Checkpoint {
    files: Files,
    config: ModelConfig,
    container: Box<dyn Container>,
    sources: fn(&ModelConfig, Weight) -> Source,
    identity: ModelIdentity,
}

/// `model.safetensors.index.json`.
#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

/// A token id, or a list of them.
#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

/// What generation takes from `generation_config.json`.
#[derive(Deserialize)]
struct GenerationConfig {
    eos_token_id: Option<OneOrMany>,
}

impl Checkpoint {
    /// Opens the checkpoint in `folder`.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        if !folder.is_dir() {
            return Err(ModelError::NoSuchFolder {
                path: folder.to_owned(),
            });
        }
        Self::from_files(Files::Folder(folder.to_owned()))
    }

    /// Opens the checkpoint that consists of `files`, its weights in safetensors or, where there
    /// are none, in PyTorch's own files.
    pub fn from_files(files: Files) -> Result<Self, ModelError> {
        let folder = files.folder().to_owned();
        let missing = |file: &str| ModelError::MissingFile {
            folder: folder.clone(),
            file: file.to_owned(),
        };
        if files.read("config.json")?.is_none() {
            return Err(missing("config.json"));
        }
        let container: Box<dyn Container> = match open_shards(&files, &folder)? {
            Some(shards) => Box::new(Safetensors { shards }),
            None => match Pickles::open(&files, &folder)? {
                Some(pickles) => Box::new(pickles),
                None => return Err(missing("model.safetensors")),
            },
        };
        Self::from_container(files, container)
    }

    /// Opens the checkpoint whose weights are in `container`, under the names that its family
    /// gives them, and whose other parts are in `files`.
    pub fn from_container(files: Files, container: Box<dyn Container>) -> Result<Self, ModelError> {
        let folder = files.folder().to_owned();
        let config_bytes = files
            .read("config.json")?
            .ok_or_else(|| ModelError::MissingFile {
                folder: folder.clone(),
                file: "config.json".to_owned(),
            })?;
        let mut config = ModelConfig::parse(&config_bytes, &folder.join("config.json"))?;
        if let Some(bytes) = files.read("generation_config.json")? {
            let path = folder.join("generation_config.json");
            let generation: GenerationConfig = serde_json::from_slice(&bytes)
                .map_err(|source| ArtifactError::NotJson { path, source })?;
            match generation.eos_token_id {
                Some(OneOrMany::One(token)) => config.end_of_text = vec![token],
                Some(OneOrMany::Many(tokens)) => config.end_of_text = tokens,
                None => {}
            }
        }
        let family = families::named(&config.family).expect("a configuration names its family");
        let identity = ModelIdentity {
            name: files.name(),
            fingerprint: fingerprint(&config_bytes, container.as_ref())?,
        };
        let checkpoint = Self {
            files,
            config,
            container,
            sources: family.source,
            identity,
        };
        checkpoint.check(family.spare)?;
        Ok(checkpoint)
    }

    /// Sizes, constants and structure.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Name and fingerprint.
    pub fn identity(&self) -> &ModelIdentity {
        &self.identity
    }

    /// The files beside the weights: tokenizer, templates, generation settings.
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Reads one weight as float32, row-major; a NaN or infinite value is an error.
    pub fn read(&self, weight: Weight) -> Result<Vec<f32>, ModelError> {
        let wanted = self.config.shape(weight);
        let source = (self.sources)(&self.config, weight);
        let name = match &source {
            Source::Constant(value) => return Ok(vec![*value; wanted.iter().product()]),
            Source::Tensor { name, .. } => self.resolve(name)?,
        };
        let values = self.container.read(&name)?;
        if let Some(index) = values.iter().position(|value| !value.is_finite()) {
            return Err(ModelError::NotFinite {
                path: self.container.path(&name),
                value: values[index],
                tensor: name,
                index,
            });
        }
        Ok(source.apply(values, &wanted))
    }

    /// The name under which the container has the tensor that a family calls `name`: checkpoints
    /// of a bare decoder leave out the first part, the name of the model around it.
    fn resolve(&self, name: &str) -> Result<String, ModelError> {
        let bare = name.split_once('.').map_or(name, |(_, bare)| bare);
        [name, bare]
            .into_iter()
            .find(|name| self.container.shape(name).is_some())
            .map(str::to_owned)
            .ok_or_else(|| ModelError::MissingTensor {
                path: self.files.folder().to_owned(),
                tensor: name.to_owned(),
            })
    }

    /// Checks that every weight is there in the right shape, and that nothing is left over but
    /// tensors whose names end as in `spare`.
    fn check(&self, spare: &[&str]) -> Result<(), ModelError> {
        let mut used = BTreeSet::new();
        for weight in self.config.weights() {
            let source = (self.sources)(&self.config, weight);
            let Source::Tensor { name, .. } = &source else {
                continue;
            };
            let name = self.resolve(name)?;
            let expected = source.tensor_shape(&self.config.shape(weight));
            let found = self.container.shape(&name).unwrap_or_default();
            if found != expected {
                return Err(ModelError::WrongShape {
                    path: self.container.path(&name),
                    tensor: name,
                    expected,
                    found,
                });
            }
            used.insert(name);
        }
        // Where embeddings are tied, a stored head repeats them.
        if let Source::Tensor { name, .. } = (self.sources)(&self.config, Weight::Head) {
            used.extend(self.resolve(&name).ok());
        }
        let mut names = self.container.names();
        names.sort();
        let left = names.into_iter().find(|name| {
            !used.contains(name) && !spare.iter().any(|ending| name.ends_with(ending))
        });
        match left {
            None => Ok(()),
            Some(tensor) => Err(ModelError::LeftOver {
                path: self.container.path(&tensor),
                family: self.config.family.clone(),
                tensor,
            }),
        }
    }
}

/// Opens `model.safetensors`, or the shards that the index names; none where there is neither.
fn open_shards(files: &Files, folder: &Path) -> Result<Option<Vec<TensorFile>>, ModelError> {
    const INDEX: &str = "model.safetensors.index.json";
    const SINGLE: &str = "model.safetensors";
    if let Some(bytes) = files.read(SINGLE)? {
        let file = TensorFile::from_bytes(&folder.join(SINGLE), bytes)?;
        return Ok(Some(vec![file]));
    }
    let Some(bytes) = files.read(INDEX)? else {
        return Ok(None);
    };
    let shards = shard_names(&folder.join(INDEX), &bytes)?
        .into_iter()
        .map(|shard| {
            let bytes = files
                .read(&shard)?
                .ok_or_else(|| ModelError::MissingShard {
                    folder: folder.to_owned(),
                    index: INDEX.to_owned(),
                    shard: shard.clone(),
                })?;
            let path: PathBuf = folder.join(shard);
            Ok(TensorFile::from_bytes(&path, bytes)?)
        })
        .collect::<Result<_, ModelError>>()?;
    Ok(Some(shards))
}

/// Names of the files that the index in `path` lists, sorted; one that leaves the folder is an
/// error.
pub(crate) fn shard_names(path: &Path, bytes: &[u8]) -> Result<Vec<String>, ModelError> {
    let index: ShardIndex =
        serde_json::from_slice(bytes).map_err(|source| ArtifactError::NotJson {
            path: path.to_owned(),
            source,
        })?;
    let mut names = BTreeSet::new();
    for (tensor, shard) in index.weight_map {
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

/// A digest that tells models apart without reading hundreds of gigabytes: the configuration,
/// every tensor's name, type and shape, and samples of its data. The bundle's manifest has
/// digests of every byte.
fn fingerprint(config: &[u8], container: &dyn Container) -> Result<Digest, ModelError> {
    // By name, so that sharding the same weights differently does not make another model.
    let mut names = container.names();
    names.sort();
    let digests = names
        .iter()
        .map(|name| container.digest(name).map(|digest| digest.to_string()))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Digest::of_parts(
        std::iter::once(config).chain(digests.iter().map(String::as_bytes)),
    ))
}
