//! MiniCPM and MiniCPM-S (FATReLU): Llama with multipliers of embeddings, residual branches and logits.

use crate::{
    families::{
        Family,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, biases, llama_like, llama_names},
    },
    rotary::RotaryDefaults,
};

/// MiniCPM 1, 2 and 4, and MiniCPM-S.
pub(super) const MINICPM: Family = Family {
    name: "minicpm",
    architectures: &["MiniCPMForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            tied: true,
            rotary: RotaryDefaults {
                share_key: None,
                ..RotaryDefaults::STANDARD
            },
            ..LLAMA_DEFAULTS
        };
        let mut config = llama_like(keys, "minicpm", &defaults)?;
        config.biases = biases(keys)?;
        config.embedding_scale = keys.positive("scale_emb")?.unwrap_or(1.0) as f32;
        let depth = keys.positive("scale_depth")?.unwrap_or(1.0);
        let base = keys.positive("dim_model_base")?.unwrap_or(1.0);
        config.multipliers.residual = (depth / (config.layer_count as f64).sqrt()) as f32;
        config.multipliers.logits = (base / config.hidden_size as f64) as f32;
        Ok(config)
    },
    source: |_, weight| llama_names(weight),
    ignored: IGNORED,
};
