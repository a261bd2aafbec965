//! Checkpoints: a configuration, and tensors in a container.

use std::{collections::BTreeSet, ops::Range, path::Path, sync::Arc};

use powerinfer_artifact::{Digest, ModelIdentity};
use powerinfer_tensor::f16;
use rayon::prelude::*;

use crate::{
    Files, GenerationConfig, ModelConfig, ModelError, Weight,
    container::{Container, PART},
    families, foreign,
    gguf::{self, Layout},
    quantised,
    source::WeightSource,
};

/// Open checkpoint; all tensors exist with the shapes that the configuration requires.
#[derive(Debug)]
pub struct Checkpoint {
    files: Files,
    config: ModelConfig,
    container: Box<dyn Container>,
    naming: Naming,
    identity: ModelIdentity,
    ignored_keys: Vec<String>,
}

/// Tensor naming scheme of a checkpoint.
#[derive(Debug, Clone, Copy)]
enum Naming {
    /// Names of the model's family.
    Family(fn(&ModelConfig, Weight) -> WeightSource),
    /// Names of GGUF.
    Gguf(Layout),
}

impl Naming {
    fn source(self, config: &ModelConfig, weight: Weight) -> WeightSource {
        match self {
            Self::Family(source) => source(config, weight),
            Self::Gguf(layout) => layout.source(config, weight),
        }
    }
}

impl Checkpoint {
    /// Opens the checkpoint at `path`: a folder, or a GGUF file.
    ///
    /// # Errors
    ///
    /// A file is missing, damaged or contradicts the configuration.
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
            gguf.check_has_tensors()?;
            let naming = Naming::Gguf(gguf.layout());
            return Ok(Self::from_container(files, Box::new(gguf), Some(naming))?);
        }
        // Errors in the configuration are reported before errors in the weights.
        let config = files.read("config.json").map_err(ModelError::from)?;
        let config = config.ok_or_else(|| foreign::without(&files, "config.json"))?;
        ModelConfig::parse(&config, &files.path("config.json"))?;
        let container: Box<dyn Container> = match files.safetensors()? {
            Some(container) => container,
            None => other(&files)?.ok_or_else(|| foreign::without(&files, "model.safetensors"))?,
        };
        Ok(Self::from_container(files, container, None)?)
    }

    /// Opens the checkpoint with weights in `container` and all else in `files`. Tensors are named by
    /// `naming`, or as in the model's family.
    fn from_container(
        files: Files,
        container: Box<dyn Container>,
        naming: Option<Naming>,
    ) -> Result<Self, ModelError> {
        let config_bytes = files
            .read("config.json")?
            .ok_or_else(|| foreign::without(&files, "config.json"))?;
        let (mut config, ignored_keys) =
            ModelConfig::parse_noting(&config_bytes, &files.path("config.json"))?;
        if let Some(tokens) = GenerationConfig::read(&files)?.end_of_text {
            config.end_of_text = tokens;
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
            ignored_keys,
        };
        let ignored = match checkpoint.naming {
            Naming::Family(_) => family.ignored,
            Naming::Gguf(_) => gguf::IGNORED,
        };
        match checkpoint.check(ignored) {
            Ok(()) => Ok(checkpoint),
            Err(error) => Err(checkpoint.quantisation().unwrap_or(error)),
        }
    }

    /// Returns the model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns name and fingerprint of the model.
    pub fn identity(&self) -> &ModelIdentity {
        &self.identity
    }

    /// Returns the files next to the weights: tokenizer, templates, generation settings.
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Returns the keys of `config.json` that are ignored because the model's class in transformers ignores them too.
    pub fn ignored_keys(&self) -> &[String] {
        &self.ignored_keys
    }

    /// Returns whether the activation function is assumed: a GGUF file does not state it.
    pub fn assumes_activation(&self) -> bool {
        self.files
            .gguf()
            .is_some_and(|gguf| gguf.assumes_activation())
    }

    /// Reads one weight as f32, row-major, times its [multiplier](crate::Multipliers).
    ///
    /// # Errors
    ///
    /// The tensor cannot be read, or has a NaN or infinite value.
    pub fn read(&self, weight: Weight) -> Result<Vec<f32>, ModelError> {
        let shape = self.config.shape(weight);
        let source = self.source(weight);
        let values = match &source {
            WeightSource::Constant(value) => vec![*value; shape.iter().product()],
            WeightSource::Tensor { name, .. } => {
                let name = self.resolve(name)?;
                let values = self.container.read(&name)?;
                self.check_finite(&name, 0, &values)?;
                source.apply(values, &shape)
            }
            WeightSource::Stacked { by_columns, .. } => {
                let mut values = vec![0.0; shape.iter().product()];
                let mut first = 0;
                for (part, part_shape) in source.tensors(&shape) {
                    let WeightSource::Tensor { name, rows, .. } = part else {
                        unreachable!("a tensor");
                    };
                    let name = self.resolve(name)?;
                    let (own, before) = match rows.slice() {
                        Some(index) => {
                            let own = self.container.read_rows(&name, index..index + 1)?;
                            let before = index * own.len();
                            (own, before)
                        }
                        None => (self.container.read(&name)?, 0),
                    };
                    self.check_finite(&name, before, &own)?;
                    let own = part.apply(own, &part_shape);
                    let all: usize = shape[1..].iter().product();
                    let (width, start, column, step) = match by_columns {
                        true => (part_shape[1], 0, first, part_shape[1]),
                        false => (all, first, 0, own.len()),
                    };
                    let rows = values[start..].par_chunks_mut(all);
                    let rows = rows.zip(own.par_chunks(width)).with_min_len(PART / all);
                    rows.for_each(|(row, own)| row[column..][..width].copy_from_slice(own));
                    first += step;
                }
                values
            }
        };
        Ok(self.multiplied(weight, values))
    }

    /// Applies the multiplier of `weight`.
    fn multiplied(&self, weight: Weight, mut values: Vec<f32>) -> Vec<f32> {
        let factor = self.config.factor(weight);
        if factor != 1.0 {
            values.iter_mut().for_each(|value| *value *= factor);
        }
        values
    }

    /// Reads a range of a weight's rows; a weight with one dimension is a single row. Large matrices, such as
    /// embeddings, are not read as a whole.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn read_rows(&self, weight: Weight, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let shape = self.config.shape(weight);
        let width: usize = shape.last().copied().unwrap_or(1);
        let source = self.source(weight);
        match source.row_wise_name() {
            Some(name) if shape.len() > 1 => {
                let name = self.resolve(name)?;
                let values = self.container.read_rows(&name, rows.clone())?;
                self.check_finite(&name, rows.start * width, &values)?;
                let values = source.apply(values, &[rows.len(), width]);
                Ok(self.multiplied(weight, values))
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

    /// Reads the given rows of a matrix as ggml's Q4_K super-blocks of 144 bytes; `None` if the checkpoint
    /// does not store the matrix as Q4_K by rows.
    ///
    /// # Errors
    ///
    /// The tensor is missing, or a scale is NaN or infinite.
    pub fn read_q4_k(&self, weight: Weight, rows: &[u32]) -> Result<Option<Vec<u8>>, ModelError> {
        let source = self.source(weight);
        let shape = self.config.shape(weight);
        let (WeightSource::Tensor { name, .. }, [count, width]) = (&source, &shape[..]) else {
            return Ok(None);
        };
        let name = self.resolve(name)?;
        let (Some(stored), Some(order)) = (self.container.q4_k(&name), source.stored_rows(*count))
        else {
            return Ok(None);
        };
        let row_bytes = stored.len() / source.tensor_shape(&shape)[0].max(1);
        let factor = self.config.factor(weight);
        let mut blocks = Vec::with_capacity(rows.len() * row_bytes);
        for row in rows {
            let row = order[*row as usize];
            let of_row = &stored[row * row_bytes..][..row_bytes];
            for (block, bytes) in of_row.chunks_exact(Q4_K_BYTES).enumerate() {
                // All other fields of a block are small integers.
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
        if factor != 1.0 {
            // A super-block begins with two f16 scales: that of the block scales and that of the block minima.
            for scale in blocks
                .chunks_exact_mut(Q4_K_BYTES)
                .flat_map(|block| block[..4].chunks_exact_mut(2))
            {
                let multiplied = f16::from_le_bytes([scale[0], scale[1]]).to_f32() * factor;
                scale.copy_from_slice(&f16::from_f32(multiplied).to_le_bytes());
            }
        }
        Ok(Some(blocks))
    }

    /// Reads the rows of the embedding for `tokens`: `[tokens, embedding]`.
    ///
    /// The embedding is never held in memory as a whole.
    ///
    /// # Errors
    ///
    /// A token is outside the vocabulary, or as [`read`](Self::read).
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

    /// Checks that `values` are finite; `first` is the index of the first value within the tensor.
    fn check_finite(&self, name: &str, first: usize, values: &[f32]) -> Result<(), ModelError> {
        let parts = values.par_chunks(PART).enumerate();
        let found = parts.find_map_first(|(part, values)| {
            let index = values.iter().position(|value| !value.is_finite())?;
            Some(part * PART + index)
        });
        match found {
            None => Ok(()),
            Some(index) => Err(ModelError::NotFinite {
                path: self.container.path(name),
                tensor: name.to_owned(),
                index: first + index,
                value: values[index],
            }),
        }
    }

    /// Returns whether the checkpoint contains predictors of the original PowerInfer or of TurboSparse.
    pub fn has_predictors(&self) -> bool {
        let is_matrix = |name: &String| {
            is_of_predictor(name) || name.starts_with("blk.") && name.ends_with(".fc1.weight")
        };
        self.container.names().iter().any(is_matrix)
    }

    /// Returns the source of a weight in this checkpoint. Tied embeddings may be stored only under the head's name, because
    /// safetensors stores a shared tensor once.
    fn source(&self, weight: Weight) -> WeightSource {
        let source = self.naming.source(&self.config, weight);
        if weight != Weight::Embedding || !self.config.tied_embeddings {
            return source;
        }
        let head = self.naming.source(&self.config, Weight::Head);
        let is_there = |source: &WeightSource| match source {
            WeightSource::Tensor { name, .. } => self.resolve(name).is_ok(),
            WeightSource::Constant(_) | WeightSource::Stacked { .. } => true,
        };
        if !is_there(&source) && is_there(&head) {
            head
        } else {
            source
        }
    }

    /// Returns an error about quantised weights if the tensors are those of a quantised checkpoint.
    fn quantisation(&self) -> Option<ModelError> {
        let method = quantised::of_tensors(&self.container.names(), &self.files)?;
        Some(ModelError::QuantisedWeights {
            path: self.files.folder().to_owned(),
            method: method.to_owned(),
        })
    }

    /// Returns the container's name of the tensor that a family calls `name`: checkpoints of a bare decoder
    /// omit the first component, the name of the enclosing model.
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

    /// Checks that every weight exists with the right shape, and that no tensor is unused except those whose
    /// names end in one of `ignored`.
    fn check(&self, ignored: &[&str]) -> Result<(), ModelError> {
        let mut used = BTreeSet::new();
        for weight in self.config.weights() {
            let source = self.source(weight);
            for (source, shape) in source.tensors(&self.config.shape(weight)) {
                let WeightSource::Tensor { name, rows, .. } = source else {
                    continue;
                };
                let name = self.resolve(name)?;
                let expected = source.tensor_shape(&shape);
                let found = self.container.shape(&name).unwrap_or_default();
                // A single row may be stored as a vector, but not a single expert as a matrix.
                let is_row = rows.slice().is_none() && expected == [&[1], &found[..]].concat();
                if found != expected && !is_row {
                    return Err(ModelError::WrongShape {
                        path: self.container.path(&name),
                        tensor: name,
                        expected,
                        found,
                    });
                }
                self.container.check_type(&name)?;
                used.insert(name);
            }
        }
        // With tied embeddings, a stored head duplicates them.
        if let WeightSource::Tensor { name, .. } = self.source(Weight::Head) {
            used.extend(self.resolve(&name).ok());
        }
        let mut names = self.container.names();
        names.sort();
        let unused = names.into_iter().find(|name| {
            let mut ignored = ignored.iter().chain(LEFTOVERS);
            !used.contains(name)
                && !is_of_predictor(name)
                && !ignored.any(|suffix| name.ends_with(suffix))
        });
        match unused {
            None => Ok(()),
            Some(tensor) => Err(ModelError::UnusedTensor {
                path: self.container.path(&tensor),
                family: self.config.family.clone(),
                tensor,
            }),
        }
    }
}

/// Name suffixes of tensors that are not weights in older checkpoints of any family: tables, masks, format versions.
const LEFTOVERS: &[&str] = &[
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    ".masked_bias",
    "decoder.version",
];

/// Returns whether a tensor belongs to a predictor that is inside the checkpoint, as in TurboSparse.
fn is_of_predictor(name: &str) -> bool {
    [".predictor.fc1.", ".predictor.fc2."]
        .iter()
        .any(|part| name.contains(part))
}

/// Bytes of a super-block of Q4_K.
const Q4_K_BYTES: usize = 144;
/// Weights of a super-block of Q4_K.
const Q4_K_LENGTH: usize = 256;

/// Fingerprint of a model without reading all of its weights: the configuration, every tensor's name, type
/// and shape, and samples of its data. A bundle's manifest has the digests of all bytes.
fn fingerprint(config: &[u8], container: &dyn Container) -> Result<Digest, ModelError> {
    // Sorted by name, so that the fingerprint does not depend on sharding.
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
