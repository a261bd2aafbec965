//! Mistral: Llama with a sliding window.

use crate::{
    ModelConfig, ModelError,
    families::{
        Family,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, llama_like, llama_names},
    },
    keys::Keys,
};

/// Mistral 7B and compatible models.
pub(super) const MISTRAL: Family = Family {
    name: "mistral",
    architectures: &["MistralForCausalLM"],
    describe: |keys| mistral_like(keys, "mistral"),
    source: |_, weight| llama_names(weight),
    ignored: IGNORED,
};

pub(super) const DEFAULTS: Defaults = Defaults {
    ffn_size: 14336,
    kv_heads: Some(8),
    context: 4096 * 32,
    ..LLAMA_DEFAULTS
};

/// Reads a configuration with Mistral's keys.
pub(super) fn mistral_like(keys: &Keys<'_>, family: &str) -> Result<ModelConfig, ModelError> {
    const WINDOW: usize = 4096;
    let mut config = llama_like(keys, family, &DEFAULTS)?;
    let window = match keys.size("sliding_window")? {
        None if !keys.has("sliding_window") => Some(WINDOW),
        window => window, // null means no window
    };
    config.attention_windows = vec![window; config.layer_count];
    Ok(config)
}
