//! Content of a model's GGUF file: metadata, and which weights are in which tensor.
//!
//! The tables are the reader's, and what is planned is read back by the reader before anything is written: a setting that
//! a file cannot state is an error.

use std::path::Path;

use powerinfer_artifact::Hint;
use powerinfer_tensor::{BLOCK, Format};
use serde_json::Value as Json;

use super::{
    architectures::{architecture, architecture_of},
    configuration::{self, ROPE_DIVISORS},
    file::GgufFile,
    names::Layout,
    rope::{Rope, TOLERANCE},
    tokenizer, tokenizer_metadata,
    writer::{Dialect, Elements, Metadata, TensorEntry},
};
use crate::{
    Files, LayerWeight, ModelConfig, ModelError, Positions, Rotary, Weight, source::WeightSource,
};

/// A GGUF file to be written.
#[derive(Debug)]
pub struct Export {
    /// Variant of the format.
    pub dialect: Dialect,
    /// Metadata; more may be appended.
    pub metadata: Metadata,
    /// Tensors, in the order of the forward pass.
    pub tensors: Vec<PlannedTensor>,
    /// Differences from the source that do not prevent the export.
    pub notes: Vec<String>,
}

/// Tensor of a file to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedTensor {
    /// Name and shape, and the format of the numbers.
    pub entry: TensorEntry,
    /// Where the numbers come from.
    pub content: Content,
}

/// Origin of a tensor's numbers.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// The rows of a weight, unchanged.
    Rows(Weight),
    /// Weights whose rows are moved, or of which several are fused.
    Moved(Vec<MovedWeight>),
    /// These numbers.
    Values(Vec<f32>),
}

/// Weight whose rows are moved within its tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct MovedWeight {
    /// The weight.
    pub weight: Weight,
    /// Its shape.
    pub shape: Vec<usize>,
    source: WeightSource,
    /// Index of the weight's first row (first column, if its neurons are columns) that is in this tensor; 0 unless the weight is split
    /// over several tensors.
    first: usize,
}

impl MovedWeight {
    /// Writes the weight's `values`, row-major, to their places in the `tensor`.
    ///
    /// # Panics
    ///
    /// If the tensor has no room for them.
    pub fn store(&self, values: &[f32], tensor: &mut [f32]) {
        let (parts, by_columns) = match &self.source {
            WeightSource::Stacked { parts, by_columns } => (parts, *by_columns),
            source => return source.store(values, &self.shape, tensor),
        };
        // Numbers per row; 1 for a bias.
        let width: usize = self.shape[1..].iter().product();
        let mut first = self.first;
        for part in parts {
            let (rows, columns) = match by_columns {
                true => (self.shape[0], part.size),
                false => (part.size, width),
            };
            let tensor = tensor.chunks_exact_mut(rows * columns).nth(part.slice());
            let tensor = tensor.expect("the tensor has room for every expert");
            for (row, to) in tensor.chunks_exact_mut(columns).enumerate() {
                let from = match by_columns {
                    true => row * width + first,
                    false => (first + row) * width,
                };
                to.copy_from_slice(&values[from..][..columns]);
            }
            first += part.size;
        }
    }
}

/// Export of everything but the weights, and notes on possible differences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExportOptions {
    /// Variant of the format.
    pub dialect: Dialect,
    /// Format of the matrices, any but `q4_k`.
    pub quant: Format,
    /// Whether the tokenizer is exported.
    pub tokenizer: bool,
    /// Whether the file may mean another activation function, for measurements of speed.
    pub any_activation: bool,
}

impl Export {
    /// Plans the file of the model `name` with `config`; its other files are `files`.
    ///
    /// # Errors
    ///
    /// GGUF cannot represent the model or its tokenizer, or a file cannot be read.
    ///
    /// # Panics
    ///
    /// If the format is `q4_k`.
    pub fn plan(
        name: &str,
        config: &ModelConfig,
        files: &Files,
        options: ExportOptions,
    ) -> Result<Self, ModelError> {
        let ExportOptions { dialect, quant, .. } = options;
        assert!(quant != Format::Q4K, "q4_k is not written");
        let architecture =
            architecture_of(&config.family).ok_or_else(|| ModelError::NotInGguf {
                model: name.to_owned(),
                architecture: "GGUF".to_owned(),
                reason: format!(
                    "llama.cpp has no architecture for the family {}",
                    config.family
                ),
                hint: None,
            })?;
        if let Some(reason) = mixture_obstacle(config, architecture.name) {
            return Err(ModelError::NotInGguf {
                model: name.to_owned(),
                architecture: format!("`{}` in GGUF", architecture.name),
                reason: reason.to_owned(),
                hint: None,
            });
        }
        let mut notes = Vec::new();
        let windowless;
        let config = if architecture.states_windows {
            config
        } else {
            windowless = without_windows(config, &mut notes);
            &windowless
        };
        let path = files.path("config.json");
        let stated: Option<Json> = match files.read("config.json")? {
            Some(bytes) => powerinfer_artifact::json::from_slice(&bytes).ok(),
            None => None, // bundles have none
        };
        let rope = config.rotary_tables().first();
        let rope = rope.map(|rotary| Rope::new(rotary, stated.as_ref(), config.context_length));
        if config.latent.is_some()
            && rope
                .as_ref()
                .is_some_and(|rope| !rope.divisors().is_empty())
        {
            return Err(ModelError::NotInGguf {
                model: name.to_owned(),
                architecture: format!("`{}` in GGUF", architecture.name),
                reason:
                    "its rotary frequencies cannot be stated; export the model instead of a bundle"
                        .to_owned(),
                hint: None,
            });
        }
        let mut metadata = Metadata::default();
        metadata.push("general.architecture", architecture.name);
        if dialect == Dialect::Ggml {
            metadata.push("general.type", "model");
        }
        metadata.push("general.name", name);
        metadata.push("general.file_type", file_type(quant));
        if dialect == Dialect::Ggml || quant.is_quantised() {
            metadata.push("general.quantization_version", 2usize);
        }
        metadata.append(configuration::metadata(config, architecture, rope.as_ref()));
        let layout = Layout::written(architecture, dialect);
        let mut tensors = tensors(config, layout, options, &mut notes);
        if config.tied_embeddings && architecture.needs_head(dialect) {
            tensors.extend(head_of_embedding(&tensors));
        }
        if let Some(rope) = rope.as_ref().filter(|rope| !rope.divisors().is_empty()) {
            tensors.insert(0, divisors(rope));
        }
        verify(name, config, &metadata, &tensors, &path, options)?;
        if options.tokenizer {
            notes.extend(tokenizer_metadata::describe(
                files,
                config,
                stated.as_ref(),
                &mut metadata,
            )?)
        } else {
            metadata.push("tokenizer.ggml.model", tokenizer::NONE)
        }
        Ok(Self {
            dialect,
            metadata,
            tensors,
            notes,
        })
    }
}

/// Returns the setting of a mixture of experts that llama.cpp's loader of `architecture` does not accept.
fn mixture_obstacle(config: &ModelConfig, architecture: &str) -> Option<&'static str> {
    config.experts.as_ref()?;
    let is_plain = matches!(architecture, "olmoe" | "qwen2moe");
    if is_plain && config.head_count * config.head_size != config.hidden_size {
        Some("its loader expects heads that are as wide together as the hidden state")
    } else if architecture == "olmoe" && config.kv_head_count != config.head_count {
        Some("its loader expects as many key and value heads as query heads")
    } else if config.biases.attention_output && architecture != "gpt-oss" {
        Some("its loader has no bias of attention's output")
    } else {
        None
    }
}

/// llama.cpp's number for files whose matrices are in a format.
fn file_type(quant: Format) -> usize {
    match quant {
        Format::F32 => 0,
        Format::F16 => 1,
        Format::Q4_0 => 2,
        Format::Q8_0 => 7,
        Format::Q4K => 15,
        Format::Bf16 => 32,
    }
}

/// The configuration with full attention: within the window of the model both are the same, so the context ends there.
fn without_windows(config: &ModelConfig, notes: &mut Vec<String>) -> ModelConfig {
    let mut config = config.clone();
    let windows = config.attention_windows.iter().flatten();
    if let Some(window) = windows.min().copied() {
        if window < config.context_length {
            notes.push(format!(
                "the context is {window} tokens instead of {}: from there on the model has a sliding window, which the file cannot state",
                config.context_length
            ));
            config.context_length = window;
        }
        config.attention_windows.fill(None);
    }
    config
}

/// Plans the tensors of all weights.
fn tensors(
    config: &ModelConfig,
    layout: Layout,
    options: ExportOptions,
    notes: &mut Vec<String>,
) -> Vec<PlannedTensor> {
    let mut planned: Vec<PlannedTensor> = Vec::new();
    let mut rounded = 0;
    for weight in config.weights() {
        let source = layout.source(config, weight);
        let shape = config.shape(weight);
        let moved = |source: &WeightSource, first: usize| MovedWeight {
            weight,
            shape: shape.clone(),
            source: source.clone(),
            first,
        };
        let mut format_of = |stored: &[usize]| match (stored, weight) {
            (_, Weight::Layer(_, weight)) if stays_exact(weight) => Format::F32,
            ([_], _) => Format::F32,
            (_, Weight::Positions) if options.dialect == Dialect::Ggml => Format::F32,
            (_, Weight::Positions) => Format::F16,
            ([.., columns], _) if options.quant.is_quantised() && columns % BLOCK != 0 => {
                rounded += 1;
                Format::F16
            }
            _ => options.quant,
        };
        let entry = |name: &str, stored: Vec<usize>, format| TensorEntry {
            name: name.to_owned(),
            shape: stored,
            elements: Elements::Weights(format),
        };
        let name = match &source {
            WeightSource::Tensor { name, .. } => name,
            WeightSource::Constant(_) => continue, // a constant of the architecture
            WeightSource::Stacked { parts, by_columns } => {
                // Consecutive experts in the same tensor are written together; a shared expert has a separate tensor.
                let mut first = 0;
                for parts in parts.chunk_by(|one, next| one.source.name() == next.source.name()) {
                    let mut of_part = shape.clone();
                    of_part[usize::from(*by_columns)] = parts[0].size;
                    let stored = parts[0].source.tensor_shape(&of_part);
                    let own = WeightSource::Stacked {
                        parts: parts.to_vec(),
                        by_columns: *by_columns,
                    };
                    let name = parts[0].source.name().expect("experts have tensors");
                    let format = format_of(&stored);
                    planned.push(PlannedTensor {
                        entry: entry(name, stored, format),
                        content: Content::Moved(vec![moved(&own, first)]),
                    });
                    first += parts.iter().map(|part| part.size).sum::<usize>();
                }
                continue;
            }
        };
        let same = |tensor: &&mut PlannedTensor| tensor.entry.name == *name;
        // The parts of a fused tensor follow each other within a layer.
        if let Some(PlannedTensor {
            content: Content::Moved(parts),
            ..
        }) = planned.iter_mut().rev().take(8).find(same)
        {
            parts.push(moved(&source, 0));
            continue;
        }
        let stored = source.tensor_shape(&shape);
        let format = format_of(&stored);
        planned.push(PlannedTensor {
            entry: entry(name, stored, format),
            content: match source.stored_name() {
                Some(_) => Content::Rows(weight),
                None => Content::Moved(vec![moved(&source, 0)]),
            },
        });
    }
    if rounded > 0 {
        notes.push(format!(
            "{rounded} matrices are in f16: their row length is not a multiple of {BLOCK}, the block of {}",
            options.quant
        ));
    }
    planned
}

/// Whether a weight is always written in float32, as in llama.cpp's own files: routers, gates of shared experts, and biases of experts.
fn stays_exact(weight: LayerWeight) -> bool {
    use LayerWeight::{DownBias, GateBias, Router, SharedGate, UpBias};
    matches!(weight, Router | SharedGate | GateBias | UpBias | DownBias)
}

/// The embedding once more, as the output head.
fn head_of_embedding(tensors: &[PlannedTensor]) -> Option<PlannedTensor> {
    let embedding = Content::Rows(Weight::Embedding);
    let mut head = tensors
        .iter()
        .find(|tensor| tensor.content == embedding)?
        .clone();
    head.entry.name = "output.weight".to_owned();
    Some(head)
}

/// Tensor of the divisors of the rotary frequencies.
fn divisors(rope: &Rope) -> PlannedTensor {
    PlannedTensor {
        entry: TensorEntry {
            name: ROPE_DIVISORS.to_owned(),
            shape: vec![rope.divisors().len()],
            elements: Elements::Weights(Format::F32),
        },
        content: Content::Values(rope.divisors().to_vec()),
    }
}

/// Reads the planned metadata as a file's, and compares the configuration with that of the model.
fn verify(
    name: &str,
    config: &ModelConfig,
    metadata: &Metadata,
    tensors: &[PlannedTensor],
    path: &Path,
    options: ExportOptions,
) -> Result<(), ModelError> {
    let shapes: Vec<_> = (tensors.iter())
        .map(|tensor| (tensor.entry.name.clone(), tensor.entry.shape.clone()))
        .collect();
    let values = tensors.iter().find_map(|tensor| match &tensor.content {
        Content::Values(values) => Some(&values[..]),
        _ => None,
    });
    let file = GgufFile::planned(
        path,
        options.dialect,
        metadata,
        &shapes,
        values.unwrap_or_default(),
    );
    let architecture = architecture(&file)?;
    let json = configuration::configuration(&file, architecture)?;
    let mut back = ModelConfig::parse(json.to_string().as_bytes(), path)?;
    let cannot = |reason: String, hint| ModelError::NotInGguf {
        model: name.to_owned(),
        architecture: match options.dialect {
            Dialect::Ggml => format!("`{}` in GGUF", architecture.name),
            Dialect::PowerInfer => format!("`{}` in the original PowerInfer", architecture.name),
        },
        reason,
        hint,
    };
    if back.activation != config.activation && !options.any_activation {
        let (theirs, ours) = (back.activation.name(), config.activation.name());
        let (only, hint) = match options.dialect {
            Dialect::Ggml => ("", Some(Hint::OtherActivation)),
            Dialect::PowerInfer => (", and its engine runs only ReLU models", None),
        };
        let name = architecture.name;
        let reason = format!("`{name}` computes {theirs}, the model {ours}{only}");
        return Err(cannot(reason, hint));
    }
    if !same_positions(&back.positions, &config.positions) {
        let reason = "its position encoding cannot be stated; run it with `powerinfer` itself";
        return Err(cannot(reason.to_owned(), None));
    }
    // What remains is compared as it is, whatever the settings are.
    back.tied_embeddings |= config.tied_embeddings && architecture.needs_head(options.dialect);
    back.activation = config.activation;
    back.positions = config.positions.clone();
    back.end_of_text = config.end_of_text.clone();
    back.family = config.family.clone();
    let settings = |config: &ModelConfig| match serde_json::to_value(config) {
        Ok(Json::Object(settings)) => settings,
        _ => unreachable!("a configuration is an object"),
    };
    let (ours, theirs) = (settings(config), settings(&back));
    match ours
        .iter()
        .find(|(key, value)| theirs.get(*key) != Some(*value))
    {
        None => Ok(()),
        Some((key, value)) => {
            let theirs = theirs.get(key).unwrap_or(&Json::Null);
            let reason = format!(
                "`{key}` would be {theirs} instead of {value}; run it with `powerinfer` itself"
            );
            Err(cannot(reason, None))
        }
    }
}

/// Whether two position encodings are the same but for the rounding of the rotary base.
fn same_positions(a: &Positions, b: &Positions) -> bool {
    match (a, b) {
        (Positions::Rotary(a), Positions::Rotary(b)) => same_rotary(a, b),
        (
            Positions::RotaryByLayer { tables, layers },
            Positions::RotaryByLayer {
                tables: other_tables,
                layers: other_layers,
            },
        ) => {
            let mut pairs = tables.iter().zip(other_tables);
            layers == other_layers
                && tables.len() == other_tables.len()
                && pairs.all(|(a, b)| same_rotary(a, b))
        }
        (a, b) => a == b,
    }
}

/// Whether two rotary embeddings are equal except for rounding of the base.
fn same_rotary(a: &Rotary, b: &Rotary) -> bool {
    let mut pairs = a.frequencies.iter().zip(&b.frequencies);
    let close = |a: f64, b: f64| (a - b).abs() <= TOLERANCE * b.abs();
    a.width() == b.width()
        && pairs.all(|(a, b)| close(*a, *b))
        && close(a.magnitude.into(), b.magnitude.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families;

    #[test]
    fn nearly_every_family_has_an_architecture() {
        let others = ["nanochat", "smallthinker", "turbosparse-mixtral"];
        for family in families::names() {
            assert_eq!(
                architecture_of(family).is_none(),
                others.contains(&family),
                "{family}"
            );
        }
    }
}
