//! StableLM 2: Llama with layer norms, partial rotary embedding and biases of queries, keys and values.

use crate::{
    Biases, Block, NormKind,
    families::{
        Family,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, llama_like, llama_names},
    },
    rotary::RotaryDefaults,
};

/// StableLM 3B and StableLM 2.
pub(super) const STABLELM: Family = Family {
    name: "stablelm",
    architectures: &["StableLmForCausalLM", "StableLMEpochForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            hidden_size: 2560,
            ffn_size: 6912,
            vocabulary: 50304,
            context: 4096,
            epsilon: ("layer_norm_eps", 1e-5),
            rotary: RotaryDefaults {
                share: 0.25,
                share_key: Some("partial_rotary_factor"),
                ..RotaryDefaults::STANDARD
            },
            ..LLAMA_DEFAULTS
        };
        let mut config = llama_like(keys, "stablelm", &defaults)?;
        if keys.flag("qk_layernorm", false)? {
            let value = "true (StableLM 2 12B: a norm for each head)";
            return Err(keys.unsupported("qk_layernorm", value, "false"));
        }
        config.norm = NormKind::Layer;
        config.block = if keys.flag("use_parallel_residual", false)? {
            Block::ParallelSharedNorm
        } else {
            Block::PreNorm
        };
        config.biases = Biases {
            query_key_value: keys.flag("use_qkv_bias", false)?,
            ..Biases::default()
        };
        Ok(config)
    },
    source: |_, weight| llama_names(weight),
    ignored: IGNORED,
};
