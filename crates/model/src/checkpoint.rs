//! A Hugging Face checkpoint: a configuration and named tensors in one or more safetensors files.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use powerinfer_artifact::{ArtifactError, Digest, ModelIdentity, TensorFile, tensor_file::Dtype};
use serde::Deserialize;

use crate::{Files, ModelConfig, ModelError, Weight, config::OneOrMany};

/// An open checkpoint whose tensors are all there, in the shapes the configuration asks for.
#[derive(Debug)]
pub struct Checkpoint {
    files: Files,
    config: ModelConfig,
    shards: Vec<TensorFile>,
    identity: ModelIdentity,
}

/// `model.safetensors.index.json`.
#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
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

    /// Opens the checkpoint that consists of `files`.
    pub fn from_files(files: Files) -> Result<Self, ModelError> {
        let folder = files.folder().to_owned();
        let missing = |file: &str| ModelError::MissingFile {
            folder: folder.clone(),
            file: file.to_owned(),
        };
        let config_bytes = files
            .read("config.json")?
            .ok_or_else(|| missing("config.json"))?;
        let mut config = ModelConfig::parse(&config_bytes, &folder.join("config.json"))?;
        if let Some(bytes) = files.read("generation_config.json")? {
            let path = folder.join("generation_config.json");
            let generation: GenerationConfig = serde_json::from_slice(&bytes)
                .map_err(|source| ArtifactError::NotJson { path, source })?;
            if let Some(end_of_text) = generation.eos_token_id {
                config.end_of_text = end_of_text.into();
            }
        }
        let shards = open_shards(&files, &folder)?;
        let fingerprint = fingerprint(&config_bytes, &shards);
        let identity = ModelIdentity {
            name: files.name(),
            fingerprint,
        };
        let checkpoint = Self {
            files,
            config,
            shards,
            identity,
        };
        for weight in checkpoint.config.weights() {
            checkpoint.check(weight)?;
        }
        Ok(checkpoint)
    }

    /// Sizes and constants.
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
        let name = weight.name();
        let (shard, view) = self.find(&name)?;
        let values: Vec<f32> = match view.dtype {
            Dtype::F32 => view
                .bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            Dtype::F16 => view
                .bytes
                .chunks_exact(2)
                .map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
            Dtype::BF16 => view
                .bytes
                .chunks_exact(2)
                .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
            other => {
                return Err(ModelError::WrongType {
                    path: shard.path().to_owned(),
                    tensor: name,
                    found: format!("{other:?}"),
                });
            }
        };
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(index) => Err(ModelError::NotFinite {
                path: shard.path().to_owned(),
                tensor: name,
                index,
                value: values[index],
            }),
        }
    }

    /// The tensor called `name` and the file it is in.
    fn find(
        &self,
        name: &str,
    ) -> Result<
        (
            &TensorFile,
            powerinfer_artifact::tensor_file::TensorView<'_>,
        ),
        ModelError,
    > {
        self.shards
            .iter()
            .find_map(|shard| shard.find(name).map(|view| (shard, view)))
            .ok_or_else(|| ModelError::MissingTensor {
                folder: self.files.folder().to_owned(),
                tensor: name.to_owned(),
            })
    }

    /// Checks that `weight` is there in the right shape.
    fn check(&self, weight: Weight) -> Result<(), ModelError> {
        let name = weight.name();
        let (shard, view) = self.find(&name)?;
        let expected = self.config.shape(weight);
        if view.shape != expected {
            return Err(ModelError::WrongShape {
                path: shard.path().to_owned(),
                tensor: name,
                expected,
                found: view.shape.to_vec(),
            });
        }
        Ok(())
    }
}

/// Opens `model.safetensors`, or the shards that the index names.
fn open_shards(files: &Files, folder: &Path) -> Result<Vec<TensorFile>, ModelError> {
    const INDEX: &str = "model.safetensors.index.json";
    const SINGLE: &str = "model.safetensors";
    if let Some(bytes) = files.read(SINGLE)? {
        return Ok(vec![TensorFile::from_bytes(&folder.join(SINGLE), bytes)?]);
    }
    let Some(bytes) = files.read(INDEX)? else {
        return Err(ModelError::MissingFile {
            folder: folder.to_owned(),
            file: SINGLE.to_owned(),
        });
    };
    let path = folder.join(INDEX);
    let index: ShardIndex =
        serde_json::from_slice(&bytes).map_err(|source| ArtifactError::NotJson {
            path: path.clone(),
            source,
        })?;
    let mut names: Vec<&String> = Vec::new();
    for (tensor, shard) in &index.weight_map {
        if Path::new(shard).file_name() != Some(shard.as_ref()) {
            return Err(ModelError::ShardOutside {
                path,
                tensor: tensor.clone(),
                shard: shard.clone(),
            });
        }
        names.push(shard);
    }
    names.sort();
    names.dedup();
    names
        .into_iter()
        .map(|shard| {
            let bytes = files.read(shard)?.ok_or_else(|| ModelError::MissingShard {
                folder: folder.to_owned(),
                shard: shard.clone(),
            })?;
            let path: PathBuf = folder.join(shard);
            Ok(TensorFile::from_bytes(&path, bytes)?)
        })
        .collect()
}

/// A digest that tells models apart without reading hundreds of gigabytes: the configuration,
/// every tensor's name, type and shape, and sixteen evenly spread samples of 4 KiB of its data
/// (all of it where it is smaller). The bundle's manifest has digests of every byte.
fn fingerprint(config: &[u8], shards: &[TensorFile]) -> Digest {
    const SAMPLE: usize = 4096;
    const SAMPLES: usize = 16;
    let mut tensors: Vec<(String, Digest)> = Vec::new();
    for shard in shards {
        for name in shard.names() {
            let Some(view) = shard.find(&name) else {
                continue;
            };
            let kind = format!("{name} {:?} {:?}", view.dtype, view.shape);
            let mut parts = vec![kind.as_bytes()];
            if view.bytes.len() <= SAMPLE * SAMPLES {
                parts.push(view.bytes);
            } else {
                let step = (view.bytes.len() - SAMPLE) / (SAMPLES - 1);
                parts.extend(
                    (0..SAMPLES).map(|index| &view.bytes[index * step..index * step + SAMPLE]),
                );
            }
            let digest = Digest::of_parts(parts);
            tensors.push((name, digest));
        }
    }
    // By name, so that sharding the same weights differently does not make another model.
    tensors.sort();
    let digests: Vec<String> = tensors
        .iter()
        .map(|(_, digest)| digest.to_string())
        .collect();
    Digest::of_parts(std::iter::once(config).chain(digests.iter().map(String::as_bytes)))
}
