//! A checkpoint: a configuration, and tensors in some container.

use std::{collections::BTreeSet, ops::Range, path::Path, sync::Arc};

use half::f16;
use powerinfer_artifact::{ArtifactError, Digest, ModelIdentity, TensorFile};
use serde::Deserialize;

use crate::{
    Files, ModelConfig, ModelError, Weight,
    container::{Container, Safetensors},
    families,
    gguf::{self, Layout},
    source::Source,
};

/// An open checkpoint whose tensors are all there, in the shapes the configuration asks for.
#[derive(Debug)]
pub struct Checkpoint {
    files: Files,
    config: ModelConfig,
    container: Box<dyn Container>,
    naming: Naming,
    identity: ModelIdentity,
}

/// Who says where a weight is.
#[derive(Debug, Clone, Copy)]
enum Naming {
    /// The model's family.
    Family(fn(&ModelConfig, Weight) -> Source),
    /// The conventions of GGUF.
    Gguf(Layout),
}

impl Naming {
    fn source(self, config: &ModelConfig, weight: Weight) -> Source {
        match self {
            Self::Family(source) => source(config, weight),
            Self::Gguf(layout) => layout.source(config, weight),
        }
    }
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
    /// Opens the checkpoint at `path`: a folder, or a GGUF file.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        Self::from_files(Files::open(path)?)
    }

    /// Opens the checkpoint that consists of `files`, its weights in a GGUF file or in safetensors.
    ///
    /// # Errors
    ///
    /// Returns an error if a file is missing, damaged or contradicts the configuration.
    pub fn from_files(files: Files) -> Result<Self, ModelError> {
        Self::from_files_or(files, |_| Ok(None))
    }

    /// Opens the checkpoint that consists of `files`; `other` opens the weights if they are neither in a GGUF
    /// file nor in safetensors.
    ///
    /// # Errors
    ///
    /// Returns the error of `other`, or an error if a file is missing, damaged or contradicts the configuration.
    pub fn from_files_or<E: From<ModelError>>(
        files: Files,
        other: impl FnOnce(&Files) -> Result<Option<Box<dyn Container>>, E>,
    ) -> Result<Self, E> {
        if let Some(gguf) = files.gguf() {
            let gguf = Arc::clone(gguf);
            let naming = Naming::Gguf(gguf.layout());
            return Ok(Self::from_container(files, Box::new(gguf), Some(naming))?);
        }
        let folder = files.folder().to_owned();
        let missing = |file: &str| ModelError::MissingFile {
            folder: folder.clone(),
            file: file.to_owned(),
        };
        // What is wrong with the configuration is said before what is wrong with the weights.
        let config = files.read("config.json").map_err(ModelError::from)?;
        let config = config.ok_or_else(|| missing("config.json"))?;
        ModelConfig::parse(&config, &files.path("config.json"))?;
        let container: Box<dyn Container> = match open_shards(&files)? {
            Some(shards) => Box::new(Safetensors { shards }),
            None => other(&files)?.ok_or_else(|| missing("model.safetensors"))?,
        };
        Ok(Self::from_container(files, container, None)?)
    }

    /// Opens the checkpoint whose weights are in `container`, under the names that its family
    /// gives them unless there is another `naming`, and whose other parts are in `files`.
    fn from_container(
        files: Files,
        container: Box<dyn Container>,
        naming: Option<Naming>,
    ) -> Result<Self, ModelError> {
        let config_bytes = files
            .read("config.json")?
            .ok_or_else(|| ModelError::MissingFile {
                folder: files.folder().to_owned(),
                file: "config.json".to_owned(),
            })?;
        let mut config = ModelConfig::parse(&config_bytes, &files.path("config.json"))?;
        if let Some(bytes) = files.read("generation_config.json")? {
            let path = files.path("generation_config.json");
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
            naming: naming.unwrap_or(Naming::Family(family.source)),
            identity,
        };
        let spare = match checkpoint.naming {
            Naming::Family(_) => family.spare,
            Naming::Gguf(_) => gguf::SPARE,
        };
        checkpoint.check(spare)?;
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
        let source = self.naming.source(&self.config, weight);
        let name = match &source {
            Source::Constant(value) => return Ok(vec![*value; wanted.iter().product()]),
            Source::Tensor { name, .. } => self.resolve(name)?,
        };
        let values = self.container.read(&name)?;
        self.check_finite(&name, 0, &values)?;
        Ok(source.apply(values, &wanted))
    }

    /// Reads some rows of a weight as [`read`](Self::read) reads all; what has one dimension is one
    /// row. Tables, which may be larger than any layer, are not read whole for it.
    pub fn read_rows(&self, weight: Weight, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let shape = self.config.shape(weight);
        let width: usize = shape.last().copied().unwrap_or(1);
        let source = self.naming.source(&self.config, weight);
        match source.as_stored() {
            Some(name) if shape.len() > 1 => {
                let name = self.resolve(name)?;
                let values = self.container.read_rows(&name, rows.clone())?;
                self.check_finite(&name, rows.start * width, &values)?;
                Ok(values)
            }
            _ => {
                let values = self.read(weight)?;
                if rows.len() * width == values.len() {
                    return Ok(values);
                }
                Ok(values[rows.start * width..rows.end * width].to_vec())
            }
        }
    }

    /// The rows `rows` of a matrix as ggml's super-blocks of 144 bytes, in their order, where the
    /// checkpoint stores it as Q4_K and by rows; a NaN or infinite scale is an error.
    pub fn read_q4_k(&self, weight: Weight, rows: &[u32]) -> Result<Option<Vec<u8>>, ModelError> {
        let source = self.naming.source(&self.config, weight);
        let shape = self.config.shape(weight);
        let (Source::Tensor { name, .. }, [count, width]) = (&source, &shape[..]) else {
            return Ok(None);
        };
        let name = self.resolve(name)?;
        let (Some(stored), Some(order)) = (self.container.q4_k(&name), source.stored_rows(*count))
        else {
            return Ok(None);
        };
        let row_bytes = stored.len() / source.tensor_shape(&shape)[0].max(1);
        let mut blocks = Vec::with_capacity(rows.len() * row_bytes);
        for row in rows {
            let row = order[*row as usize];
            let of_row = &stored[row * row_bytes..][..row_bytes];
            for (block, bytes) in of_row.chunks_exact(Q4_K_BYTES).enumerate() {
                // All else in a block is small whole numbers.
                let scales = [
                    f16::from_le_bytes([bytes[0], bytes[1]]),
                    f16::from_le_bytes([bytes[2], bytes[3]]),
                ];
                if let Some(scale) = scales.iter().find(|scale| !scale.is_finite()) {
                    return Err(ModelError::NotFinite {
                        path: self.container.path(&name),
                        tensor: name,
                        index: row * width + block * Q4_K_LENGTH,
                        value: scale.to_f32(),
                    });
                }
            }
            blocks.extend_from_slice(of_row);
        }
        Ok(Some(blocks))
    }

    /// The rows of the embedding that `tokens` name, in their order: `[tokens, embedding]`.
    ///
    /// The table of a large vocabulary is larger than any layer; this never holds it whole.
    pub fn embedding_rows(&self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        let vocabulary = self.config.vocabulary_size;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            return Err(ModelError::TokenOutside {
                token: *token,
                vocabulary,
            });
        }
        let mut values = Vec::with_capacity(tokens.len() * self.config.embedding_size);
        for run in tokens.chunk_by(|a, b| a + 1 == *b) {
            let first = run[0] as usize;
            values.extend(self.read_rows(Weight::Embedding, first..first + run.len())?);
        }
        Ok(values)
    }

    /// Fails on a NaN or an infinity; `first` is where in the tensor the values begin.
    fn check_finite(&self, name: &str, first: usize, values: &[f32]) -> Result<(), ModelError> {
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(()),
            Some(index) => Err(ModelError::NotFinite {
                path: self.container.path(name),
                tensor: name.to_owned(),
                index: first + index,
                value: values[index],
            }),
        }
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
            let source = self.naming.source(&self.config, weight);
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
        if let Source::Tensor { name, .. } = self.naming.source(&self.config, Weight::Head) {
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

/// Bytes of a super-block of Q4_K.
const Q4_K_BYTES: usize = 144;
/// Weights of a super-block of Q4_K.
const Q4_K_LENGTH: usize = 256;

/// Opens `model.safetensors`, or its shards; none where there is neither.
fn open_shards(files: &Files) -> Result<Option<Vec<TensorFile>>, ModelError> {
    let Some(shards) = files.shards("model.safetensors")? else {
        return Ok(None);
    };
    let files = shards
        .into_iter()
        .map(|(path, bytes)| Ok(TensorFile::from_bytes(&path, bytes)?))
        .collect::<Result<_, ModelError>>()?;
    Ok(Some(files))
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
