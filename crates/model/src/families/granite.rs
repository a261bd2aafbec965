//! Granite: Llama with multipliers of embeddings, attention scores, residual branches and logits.

use crate::{
    ModelError,
    families::{
        Family,
        llama::{IGNORED, LLAMA_DEFAULTS, biases, llama_like, llama_names},
    },
};

/// Granite 3 and 4, without mixture-of-experts or state-space layers.
pub(super) const GRANITE: Family = Family {
    name: "granite",
    architectures: &["GraniteForCausalLM"],
    describe: |keys| {
        let mut config = llama_like(keys, "granite", &LLAMA_DEFAULTS)?;
        config.biases = biases(keys)?;
        let number = |key: &str| Ok::<_, ModelError>(keys.positive(key)?.unwrap_or(1.0));
        config.embedding_scale = number("embedding_multiplier")? as f32;
        config.multipliers.residual = number("residual_multiplier")? as f32;
        config.multipliers.logits = (1.0 / number("logits_scaling")?) as f32;
        let scores = number("attention_multiplier")? * (config.head_size as f64).sqrt();
        config.multipliers.attention = vec![scores as f32; config.layer_count];
        Ok(config)
    },
    source: |_, weight| llama_names(weight),
    ignored: IGNORED,
};
