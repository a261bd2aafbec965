//! Families of decoders, one description each: configuration keys, structure, and tensor names.
//!
//! A family is one file here and one line in [`ALL`]. It only describes: the forward passes of both engines
//! know only [`ModelConfig`].

mod arcee;
mod bamboo;
mod cohere;
mod falcon;
mod gemma;
mod gpt2;
mod gpt_neox;
mod granite;
mod llama;
mod minicpm;
mod mistral;
mod nanochat;
mod nemotron;
mod olmo2;
mod opt;
mod phi;
mod phi3;
mod qwen;
mod smollm3;
mod sparse_llama;
mod stablelm;
mod starcoder2;

use crate::{ModelConfig, ModelError, Weight, keys::Keys, source::WeightSource};

/// Family of decoders.
pub(crate) struct Family {
    /// Name in PowerInfer's own files.
    pub(crate) name: &'static str,
    /// Values of `architectures` in its checkpoints.
    pub(crate) architectures: &'static [&'static str],
    /// Parses its `config.json`; absent keys have the family's defaults.
    pub(crate) describe: fn(&Keys<'_>) -> Result<ModelConfig, ModelError>,
    /// Returns the source of a weight in its checkpoints.
    pub(crate) source: fn(&ModelConfig, Weight) -> WeightSource,
    /// Name suffixes of tensors that checkpoints may contain and that are not used.
    pub(crate) ignored: &'static [&'static str],
}

/// All families.
const ALL: [&Family; 27] = [
    &llama::LLAMA,
    &sparse_llama::SPARSE_LLAMA,
    &mistral::MISTRAL,
    &bamboo::BAMBOO,
    &qwen::QWEN2,
    &qwen::QWEN3,
    &gemma::GEMMA,
    &gemma::GEMMA2,
    &gemma::GEMMA3,
    &opt::OPT,
    &opt::OPT_PLAIN_NORM,
    &falcon::FALCON,
    &gpt_neox::GPT_NEOX,
    &phi::PHI,
    &phi3::PHI3,
    &minicpm::MINICPM,
    &arcee::ARCEE,
    &nemotron::NEMOTRON,
    &nanochat::NANOCHAT,
    &olmo2::OLMO2,
    &smollm3::SMOLLM3,
    &granite::GRANITE,
    &stablelm::STABLELM,
    &starcoder2::STARCODER2,
    &cohere::COHERE,
    &gpt2::GPT2,
    &gpt2::GPT_BIGCODE,
];

/// Returns the family called `name` in a [`ModelConfig`].
pub(crate) fn named(name: &str) -> Option<&'static Family> {
    ALL.into_iter().find(|family| family.name == name)
}

/// Names of all families.
#[cfg(test)]
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    ALL.into_iter().map(|family| family.name)
}

/// Configuration keys that the classes of transformers read, by class, written by `scripts/generate-config-keys.py`.
const CONFIG_KEYS: &str = include_str!("config_keys.txt");

/// Returns the keys that the model's class in transformers reads; `None` if it has no class there or code of its own.
pub(crate) fn keys_of_class<'a>(keys: &Keys<'_>) -> Option<Vec<&'a str>> {
    if keys.has("auto_map") {
        return None;
    }
    let names = architectures(keys);
    let mut classes = CONFIG_KEYS.lines().filter_map(|line| line.split_once(": "));
    let (_, read) = classes.find(|(class, _)| names.contains(class))?;
    Some(read.split(' ').collect())
}

/// The model's classes, usually one.
fn architectures<'a>(keys: &Keys<'a>) -> Vec<&'a str> {
    match keys.value("architectures") {
        Some(serde_json::Value::Array(names)) => {
            names.iter().filter_map(serde_json::Value::as_str).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the family of a configuration.
pub(crate) fn of(keys: &Keys<'_>) -> Result<&'static Family, ModelError> {
    let architectures = architectures(keys);
    let found = ALL.into_iter().find(|family| {
        architectures
            .iter()
            .any(|name| family.architectures.contains(name))
    });
    found.ok_or_else(|| {
        if let Some(error) = keys.other_kind(&architectures) {
            return error;
        }
        let supported: Vec<&str> = ALL
            .iter()
            .flat_map(|family| family.architectures)
            .copied()
            .collect();
        keys.unsupported(
            "architectures",
            &architectures.join(", "),
            &supported.join(", "),
        )
    })
}

/// Reads the sliding windows of the layers: `window` on the layers that `layer_types` lists as sliding, or, without
/// that key, on those that `slides` names.
fn layer_windows(
    keys: &Keys<'_>,
    layers: usize,
    window: Option<usize>,
    slides: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>, ModelError> {
    let types = keys.list("layer_types")?;
    (0..layers)
        .map(|layer| {
            let Some(types) = types else {
                return Ok(window.filter(|_| slides(layer)));
            };
            match types.get(layer).and_then(serde_json::Value::as_str) {
                Some("sliding_attention") => Ok(window),
                Some("full_attention") => Ok(None),
                other => Err(keys.unsupported(
                    "layer_types",
                    other.unwrap_or("shorter than the layers"),
                    "full_attention, sliding_attention",
                )),
            }
        })
        .collect()
}

/// Source of the whole tensor `{prefix}.{layer}.{name}`.
fn layer_tensor(prefix: &str, layer: usize, name: &str) -> WeightSource {
    WeightSource::tensor(format!("{prefix}.{layer}.{name}"))
}
