//! Families of decoders, one description each: configuration keys, structure, and tensor names.
//!
//! A family is one file here and one line in [`ALL`]. It only describes: the forward passes of both engines
//! know only [`ModelConfig`].

mod bamboo;
mod falcon;
mod gemma;
mod gpt_neox;
mod llama;
mod mistral;
mod opt;
mod phi;
mod qwen;

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
const ALL: [&Family; 12] = [
    &llama::LLAMA,
    &llama::SPARSE_LLAMA,
    &mistral::MISTRAL,
    &bamboo::BAMBOO,
    &qwen::QWEN2,
    &qwen::QWEN3,
    &gemma::GEMMA,
    &opt::OPT,
    &opt::OPT_PLAIN_NORM,
    &falcon::FALCON,
    &gpt_neox::GPT_NEOX,
    &phi::PHI,
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

/// Returns the family of a configuration.
pub(crate) fn of(keys: &Keys<'_>) -> Result<&'static Family, ModelError> {
    let mut architectures = Vec::new();
    if let Some(serde_json::Value::Array(names)) = keys.value("architectures") {
        architectures.extend(names.iter().filter_map(serde_json::Value::as_str));
    }
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

/// Source of the whole tensor `{prefix}.{layer}.{name}`.
fn layer_tensor(prefix: &str, layer: usize, name: &str) -> WeightSource {
    WeightSource::tensor(format!("{prefix}.{layer}.{name}"))
}
