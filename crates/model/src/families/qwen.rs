//! Qwen2 (biases of queries, keys and values) and Qwen3 (norms of query and key heads).

use crate::{
    Biases, ModelConfig, ModelError, QueryKeyNorm,
    families::{
        Family, layer_windows,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, llama_like, llama_names},
    },
    keys::Keys,
};

pub(super) const DEFAULTS: Defaults = Defaults {
    ffn_size: 22016,
    kv_heads: Some(32),
    vocabulary: 151_936,
    context: 32_768,
    ..LLAMA_DEFAULTS
};

/// Qwen 2 and 2.5.
pub(super) const QWEN2: Family = Family {
    name: "qwen2",
    architectures: &["Qwen2ForCausalLM"],
    describe: |keys| {
        let mut config = llama_like(keys, "qwen2", &DEFAULTS)?;
        config.biases.query_key_value = true;
        windows(keys, &mut config)?;
        Ok(config)
    },
    source: |_, weight| llama_names(weight),
    ignored: IGNORED,
};

/// Qwen 3.
pub(super) const QWEN3: Family = Family {
    name: "qwen3",
    architectures: &["Qwen3ForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            head_size: Some(128),
            ..DEFAULTS
        };
        let mut config = llama_like(keys, "qwen3", &defaults)?;
        let attention_bias = keys.flag("attention_bias", false)?;
        config.query_key_norm = QueryKeyNorm::PerHead;
        config.biases = Biases {
            query_key_value: attention_bias,
            attention_output: attention_bias,
            ..Biases::default()
        };
        windows(keys, &mut config)?;
        Ok(config)
    },
    source: |_, weight| llama_names(weight),
    ignored: IGNORED,
};

/// Reads the sliding windows: off by default; if on, on the layers listed in `layer_types`, or from
/// `max_window_layers` on.
pub(super) fn windows(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), ModelError> {
    let enabled = keys.flag("use_sliding_window", false)?;
    let window = match keys.size("sliding_window")? {
        None if !keys.has("sliding_window") => Some(4096),
        window => window, // null means no window
    };
    let first = match keys.number("max_window_layers")? {
        Some(first) => first as usize,
        None => 28,
    };
    config.attention_windows = layer_windows(
        keys,
        config.layer_count,
        window.filter(|_| enabled),
        |layer| layer >= first,
    )?;
    Ok(())
}
