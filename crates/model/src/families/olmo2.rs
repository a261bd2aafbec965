//! OLMo 2: Llama with norms after attention and FFN, and norms over all query or key heads of a token.

use crate::{
    Block, LayerWeight, QueryKeyNorm, Weight,
    families::{
        Family, layer_tensor,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, biases, llama_like, llama_names},
    },
};

/// OLMo 2.
pub(super) const OLMO2: Family = Family {
    name: "olmo2",
    architectures: &["Olmo2ForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            vocabulary: 50304,
            epsilon: ("rms_norm_eps", 1e-5),
            ..LLAMA_DEFAULTS
        };
        let mut config = llama_like(keys, "olmo2", &defaults)?;
        config.block = Block::OutputNorm;
        config.query_key_norm = QueryKeyNorm::AllHeads;
        config.biases = biases(keys)?;
        Ok(config)
    },
    source: |_, weight| match weight {
        Weight::Layer(layer, LayerWeight::AttentionOutputNorm) => {
            layer_tensor("model.layers", layer, "post_attention_layernorm.weight")
        }
        Weight::Layer(layer, LayerWeight::FfnOutputNorm) => {
            layer_tensor("model.layers", layer, "post_feedforward_layernorm.weight")
        }
        weight => llama_names(weight),
    },
    ignored: IGNORED,
};
