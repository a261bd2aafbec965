//! Gemma: Llama with GELU, norms stored as `weight − 1`, and scaled embeddings.

use crate::{
    Activation, Biases, LayerWeight, Weight,
    families::{
        Family,
        llama::{Defaults, IGNORED, activation, llama_like, llama_names},
    },
    source::Transform,
};

const DEFAULTS: Defaults = Defaults {
    hidden_size: 3072,
    layers: 28,
    heads: 16,
    kv_heads: Some(16),
    head_size: Some(256),
    ffn_size: 24576,
    vocabulary: 256_000,
    context: 8192,
    tied: true,
};

/// Gemma 1.
pub(super) const GEMMA: Family = Family {
    name: "gemma",
    architectures: &["GemmaForCausalLM"],
    describe: |keys| {
        let mut config = llama_like(keys, "gemma", &DEFAULTS)?;
        // Early files state `gelu` for the tanh approximation.
        let key = if keys.text("hidden_activation")?.is_some() {
            "hidden_activation"
        } else {
            "hidden_act"
        };
        config.activation = match activation(keys, key, "gelu_pytorch_tanh")? {
            Activation::GeluErf => Activation::GeluTanh,
            other => other,
        };
        config.embedding_scale = (config.hidden_size as f32).sqrt();
        let attention_bias = keys.flag("attention_bias", false)?;
        config.biases = Biases {
            query_key_value: attention_bias,
            attention_output: attention_bias,
            ..Biases::default()
        };
        Ok(config)
    },
    source: |_, weight| {
        let source = llama_names(weight);
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
