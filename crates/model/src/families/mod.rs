//! The families of decoders, one description each: which keys say what, how the parts stand to
//! each other, and what checkpoints call the weights.
//!
//! A family is a file here and a line in [`ALL`]. It describes; nothing in it computes: the
//! forward passes of both engines know only [`ModelConfig`].

mod bamboo;
mod falcon;
mod gemma;
mod gpt_neox;
mod llama;
mod mistral;
mod opt;
mod phi;
mod qwen;

use crate::{ModelConfig, ModelError, Weight, keys::Keys, source::Source};

/// One family of decoders.
pub(crate) struct Family {
    /// Its name in our own files.
    pub(crate) name: &'static str,
    /// What `architectures` says in its checkpoints.
    pub(crate) architectures: &'static [&'static str],
    /// Reads its `config.json`; absent keys take the family's defaults.
    pub(crate) describe: fn(&Keys<'_>) -> Result<ModelConfig, ModelError>,
    /// Where its checkpoints keep a weight.
    pub(crate) source: fn(&ModelConfig, Weight) -> Source,
    /// Ends of names of tensors that checkpoints have and nobody needs.
    pub(crate) spare: &'static [&'static str],
}

/// Every family.
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

/// The family whose name stands in a [`ModelConfig`].
pub(crate) fn named(name: &str) -> Option<&'static Family> {
    ALL.into_iter().find(|family| family.name == name)
}

/// The family of a configuration.
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

/// `name.weight` or `name.bias` of a layer.
fn of_layer(prefix: &str, layer: usize, name: &str) -> Source {
    Source::whole(format!("{prefix}.{layer}.{name}"))
}
