//! Phi 3, 3.5 and 4: Llama with one matrix for queries, keys and values, and one for gate and up.

use crate::{
    LayerWeight, Weight,
    families::{
        Family,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, llama_like, llama_names},
    },
    rotary::RotaryDefaults,
    source::{Fused, Rows, Transform, WeightSource, fused_concatenated},
};

/// Phi 3 to 4: text models without mixture of experts.
pub(super) const PHI3: Family = Family {
    name: "phi3",
    architectures: &["Phi3ForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            hidden_size: 3072,
            ffn_size: 8192,
            vocabulary: 32064,
            context: 4096,
            epsilon: ("rms_norm_eps", 1e-5),
            rotary: RotaryDefaults {
                share_key: Some("partial_rotary_factor"),
                ..RotaryDefaults::STANDARD
            },
            ..LLAMA_DEFAULTS
        };
        // All files state this key; LongRoPE uses it.
        keys.size("original_max_position_embeddings")?;
        let mut config = llama_like(keys, "phi3", &defaults)?;
        config.attention_windows = vec![keys.size("sliding_window")?; config.layer_count];
        Ok(config)
    },
    source: |config, weight| {
        let Weight::Layer(layer, layer_weight) = weight else {
            return llama_names(weight);
        };
        let rows_of = |name: &str, rows| WeightSource::Tensor {
            name: format!("model.layers.{layer}.{name}.weight"),
            rows,
            transform: Transform::None,
        };
        let projection = |part| {
            let (heads, kv_heads) = (config.head_count, config.kv_head_count);
            let rows = fused_concatenated(part, heads, kv_heads, config.head_size);
            rows_of("self_attn.qkv_proj", rows)
        };
        let half = |index: usize| {
            let length = config.ffn_size;
            let rows = Rows::Strided {
                first: index * length,
                length,
                step: length,
                total: 2 * length,
            };
            rows_of("mlp.gate_up_proj", rows)
        };
        match layer_weight {
            LayerWeight::Query => projection(Fused::Query),
            LayerWeight::Key => projection(Fused::Key),
            LayerWeight::Value => projection(Fused::Value),
            LayerWeight::Gate => half(0),
            LayerWeight::Up => half(1),
            _ => llama_names(weight),
        }
    },
    ignored: IGNORED,
};
