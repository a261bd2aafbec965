//! gpt-oss: experts with biases and a clamped gate, attention sinks, and sliding windows in every second layer.

use serde_json::{Value, json};

use crate::{
    Activation, Biases, Experts, FfnKind, LayerWeight, ModelConfig, ModelError, Positions, Rotary,
    Weight,
    families::{
        Family, layer_tensor, layer_windows,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, llama_like, llama_names},
        mixtral,
    },
    keys::Keys,
    rotary::{RotaryDefaults, rotary},
    source::{Part, Rows, Transform, WeightSource},
};

/// gpt-oss.
pub(super) const GPT_OSS: Family = Family {
    name: "gpt-oss",
    architectures: &["GptOssForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            hidden_size: 2880,
            layers: 36,
            heads: 64,
            kv_heads: Some(8),
            head_size: Some(64),
            ffn_size: 2880,
            vocabulary: 201_088,
            context: 131_072,
            epsilon: ("rms_norm_eps", 1e-5),
            rotary: RotaryDefaults {
                theta: 150_000.0,
                ..RotaryDefaults::STANDARD
            },
            ..LLAMA_DEFAULTS
        };
        let mut config = llama_like(keys, "gpt-oss", &defaults)?;
        let limit = keys.positive("swiglu_limit")?.unwrap_or(7.0) as f32;
        config.activation = Activation::ClampedSwish { limit };
        config.ffn = FfnKind::ClampedGated;
        if let Some(slope) = keys.positive("swiglu_alpha")?
            && slope as f32 != Activation::SWISH_SLOPE
        {
            let supported = Activation::SWISH_SLOPE.to_string();
            return Err(keys.unsupported("swiglu_alpha", &slope.to_string(), &supported));
        }
        let attention_bias = keys.flag("attention_bias", true)?;
        config.biases = Biases {
            query_key_value: attention_bias,
            attention_output: attention_bias,
            ffn: true,
            head: false,
        };
        if !keys.has("rope_scaling") && !keys.has("rope_parameters") {
            config.positions = Positions::Rotary(default_rotary(keys, &config, &defaults)?);
        }
        config.attention_sinks = true;
        let window = keys.size_or(&["sliding_window"], 128)?;
        config.attention_windows =
            layer_windows(keys, config.layer_count, Some(window), |layer| {
                layer % 2 == 0
            })?;
        // Older names of keys, which the model's code does not read.
        keys.ignore_prefix("experts_per_token");
        keys.ignore_prefix("initial_context_length");
        let experts = Experts {
            has_router_bias: true,
            ..mixtral::experts(keys, config.ffn_size, [128, 4])?
        };
        Ok(config.with_experts(experts))
    },
    source,
    ignored: IGNORED,
};

/// Rotary embedding of a configuration that states none: the default of the model's class.
fn default_rotary(
    keys: &Keys<'_>,
    config: &ModelConfig,
    defaults: &Defaults,
) -> Result<Rotary, ModelError> {
    let stated = json!({
        "rope_theta": keys.positive("rope_theta")?,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 4096, "truncate": false,
        },
    });
    let Value::Object(stated) = stated else {
        unreachable!("an object")
    };
    let (size, context) = (config.head_size, config.context_length);
    rotary(
        &Keys::new(keys.path, &stated),
        size,
        context,
        &defaults.rotary,
    )
}

fn source(config: &ModelConfig, weight: Weight) -> WeightSource {
    let (Weight::Layer(layer, of_layer), Some(experts)) = (weight, &config.experts) else {
        return llama_names(weight);
    };
    let at = |name: &str| layer_tensor("model.layers", layer, name);
    // Rows of gate and up alternate. Matrices are stored transposed.
    let (name, row, transform) = match of_layer {
        LayerWeight::Router => return at("mlp.router.weight"),
        LayerWeight::RouterBias => return at("mlp.router.bias"),
        LayerWeight::Sinks => return at("self_attn.sinks"),
        LayerWeight::DownBias => return at("mlp.experts.down_proj_bias"),
        LayerWeight::Gate => ("gate_up_proj", Some(0), Transform::Transposed),
        LayerWeight::Up => ("gate_up_proj", Some(1), Transform::Transposed),
        LayerWeight::GateBias => ("gate_up_proj_bias", Some(0), Transform::None),
        LayerWeight::UpBias => ("gate_up_proj_bias", Some(1), Transform::None),
        LayerWeight::Down => ("down_proj", None, Transform::Transposed),
        _ => return llama_names(weight),
    };
    let count = experts.count;
    let parts = (0..count).map(|index| Part {
        source: WeightSource::Tensor {
            name: format!("model.layers.{layer}.mlp.experts.{name}"),
            rows: match row {
                Some(first) => Rows::Alternate {
                    first,
                    index,
                    count,
                },
                None => Rows::Slice { index, count },
            },
            transform,
        },
        size: experts.size,
    });
    WeightSource::Stacked {
        parts: parts.collect(),
        by_columns: of_layer == LayerWeight::Down,
    }
}
