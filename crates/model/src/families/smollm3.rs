//! SmolLM3: Llama in which some layers have no position encoding.

use crate::{
    ModelConfig, ModelError, Positions,
    families::{
        Family, layer_flags, layer_windows,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, biases, llama_like, llama_names},
    },
    keys::Keys,
    rotary::RotaryDefaults,
};

/// SmolLM3.
pub(super) const SMOLLM3: Family = Family {
    name: "smollm3",
    architectures: &["SmolLM3ForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            hidden_size: 2048,
            layers: 36,
            heads: 16,
            kv_heads: Some(4),
            vocabulary: 128_256,
            context: 32768,
            tied: true,
            rotary: RotaryDefaults {
                theta: 2e6,
                ..RotaryDefaults::STANDARD
            },
            ..LLAMA_DEFAULTS
        };
        let mut config = llama_like(keys, "smollm3", &defaults)?;
        config.biases = biases(keys)?;
        let rotated = rotated_layers(keys, config.layer_count)?;
        if rotated.contains(&false) {
            config.positions = without_some(&config, &rotated);
        }
        let slides = keys.flag("use_sliding_window", false)?;
        let window = keys.size("sliding_window")?.filter(|_| slides);
        config.attention_windows = layer_windows(keys, config.layer_count, window, |layer| {
            window.is_some() && !rotated[layer]
        })?;
        Ok(config)
    },
    source: |_, weight| llama_names(weight),
    ignored: IGNORED,
};

/// Reads which layers have a position encoding: by default all but every fourth.
fn rotated_layers(keys: &Keys<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let interval = keys.size_or(&["no_rope_layer_interval"], 4)?;
    Ok(match layer_flags(keys, "no_rope_layers", layers)? {
        Some(flags) => flags,
        None => (1..=layers)
            .map(|layer| !layer.is_multiple_of(interval))
            .collect(),
    })
}

/// Restricts the rotary embedding of `config` to the layers that are `rotated`.
pub(super) fn without_some(config: &ModelConfig, rotated: &[bool]) -> Positions {
    Positions::RotaryByLayer {
        tables: config.rotary_tables().to_vec(),
        layers: rotated.iter().map(|rotated| rotated.then_some(0)).collect(),
    }
}
