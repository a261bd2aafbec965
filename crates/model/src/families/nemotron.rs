//! Nemotron and Minitron: squared ReLU without gate, layer norms stored as `weight − 1`, partial rotary embedding.

use crate::{
    FfnKind, LayerWeight, NormKind, Weight,
    families::{
        Family,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, biases, llama_like, ungated_names},
    },
    rotary::RotaryDefaults,
    source::Transform,
};

/// Nemotron 4 and Minitron.
pub(super) const NEMOTRON: Family = Family {
    name: "nemotron",
    architectures: &["NemotronForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            hidden_size: 6144,
            heads: 48,
            ffn_size: 24576,
            vocabulary: 256_000,
            context: 4096,
            epsilon: ("norm_eps", 1e-5),
            activation: "relu2",
            rotary: RotaryDefaults {
                share: 0.5,
                share_key: Some("partial_rotary_factor"),
                ..RotaryDefaults::STANDARD
            },
            ..LLAMA_DEFAULTS
        };
        let mut config = llama_like(keys, "nemotron", &defaults)?;
        config.norm = NormKind::Layer;
        config.ffn = FfnKind::Plain;
        config.biases = biases(keys)?;
        Ok(config)
    },
    source: |config, weight| {
        let source = ungated_names(config, weight);
        match weight {
            Weight::FinalNorm
            | Weight::Layer(_, LayerWeight::AttentionNorm | LayerWeight::FfnNorm) => {
                source.with(Transform::AddOne)
            }
            _ => source,
        }
    },
    ignored: IGNORED,
};
