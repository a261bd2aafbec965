//! Gemma: Llama with GELU, norms stored as `weight − 1`, and scaled embeddings. Gemma 2 and 3 add norms of the outputs
//! of attention and FFN; Gemma 2 caps scores and logits, Gemma 3 normalises queries and keys.

use crate::{
    Activation, Block, LayerWeight, ModelConfig, ModelError, Positions, QueryKeyNorm, Weight,
    families::{
        Family, layer_tensor, layer_windows,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, activation, biases, llama_like, llama_names},
    },
    keys::Keys,
    rotary::{Rotary, RotaryDefaults},
    source::{Transform, WeightSource},
};

/// Gemma 1.
pub(super) const GEMMA: Family = Family {
    name: "gemma",
    architectures: &["GemmaForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            hidden_size: 3072,
            layers: 28,
            heads: 16,
            ffn_size: 24576,
            ..GEMMA_DEFAULTS
        };
        gemma_like(keys, "gemma", &defaults)
    },
    source: |_, weight| names(weight),
    ignored: IGNORED,
};

/// Gemma 2.
pub(super) const GEMMA2: Family = Family {
    name: "gemma2",
    architectures: &["Gemma2ForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            kv_heads: Some(4),
            ..GEMMA_DEFAULTS
        };
        let mut config = sandwich(keys, "gemma2", &defaults)?;
        let window = keys.size_or(&["sliding_window"], 4096)?;
        config.attention_windows =
            layer_windows(keys, config.layer_count, Some(window), |layer| {
                layer % 2 == 0
            })?;
        let cap = |key: &str, default: f32| match keys.positive(key)? {
            None if !keys.has(key) => Ok::<_, ModelError>(Some(default)),
            cap => Ok(cap.map(|cap| cap as f32)), // null means no cap
        };
        config.soft_caps.attention = cap("attn_logit_softcapping", 50.0)?;
        config.soft_caps.logits = cap("final_logit_softcapping", 30.0)?;
        Ok(config)
    },
    source: |_, weight| sandwich_names(weight),
    ignored: IGNORED,
};

/// Gemma 3, text models.
pub(super) const GEMMA3: Family = Family {
    name: "gemma3",
    architectures: &["Gemma3ForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            kv_heads: Some(4),
            vocabulary: 262_208,
            context: 131_072,
            rotary: RotaryDefaults {
                theta: 1e6,
                by_layer_type: Some("full_attention"),
                ..RotaryDefaults::STANDARD
            },
            ..GEMMA_DEFAULTS
        };
        let mut config = sandwich(keys, "gemma3", &defaults)?;
        if keys.flag("use_bidirectional_attention", false)? {
            return Err(keys.unsupported("use_bidirectional_attention", "true", "false"));
        }
        config.query_key_norm = QueryKeyNorm::PerHead;
        let window = keys.size_or(&["sliding_window"], 4096)?;
        let pattern = keys.size_or(&["sliding_window_pattern", "_sliding_window_pattern"], 6)?;
        config.attention_windows =
            layer_windows(keys, config.layer_count, Some(window), |layer| {
                !(layer + 1).is_multiple_of(pattern)
            })?;
        for (key, cap) in [
            ("attn_logit_softcapping", &mut config.soft_caps.attention),
            ("final_logit_softcapping", &mut config.soft_caps.logits),
        ] {
            *cap = keys.positive(key)?.map(|cap| cap as f32);
        }
        local_rotary(keys, &mut config)?;
        Ok(config)
    },
    source: |_, weight| sandwich_names(weight),
    ignored: IGNORED,
};

/// Defaults of Gemma 2; Gemma and Gemma 3 share most of them.
const GEMMA_DEFAULTS: Defaults = Defaults {
    hidden_size: 2304,
    layers: 26,
    heads: 8,
    kv_heads: None,
    head_size: Some(256),
    ffn_size: 9216,
    vocabulary: 256_000,
    context: 8192,
    tied: true,
    activation: "gelu_pytorch_tanh",
    ..LLAMA_DEFAULTS
};

fn gemma_like(
    keys: &Keys<'_>,
    family: &str,
    defaults: &Defaults,
) -> Result<ModelConfig, ModelError> {
    let mut config = llama_like(keys, family, defaults)?;
    // Early files state `gelu` for the tanh approximation.
    let key = if keys.text("hidden_activation")?.is_some() {
        "hidden_activation"
    } else {
        "hidden_act"
    };
    config.activation = match activation(keys, key, defaults.activation)? {
        Activation::GeluErf => Activation::GeluTanh,
        other => other,
    };
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    config.biases = biases(keys)?;
    Ok(config)
}

/// Reads the settings that Gemma 2 and 3 share.
fn sandwich(keys: &Keys<'_>, family: &str, defaults: &Defaults) -> Result<ModelConfig, ModelError> {
    let mut config = gemma_like(keys, family, defaults)?;
    config.block = Block::Sandwich;
    // Scores are divided by the root of this number instead of the root of the head size.
    let scalar = keys.positive("query_pre_attn_scalar")?.unwrap_or(256.0);
    let factor = (config.head_size as f64 / scalar).sqrt() as f32;
    config.multipliers.attention = vec![factor; config.layer_count];
    Ok(config)
}

/// Gives layers with a sliding window a separate rotary embedding.
fn local_rotary(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), ModelError> {
    let nested = match keys.object("rope_parameters")? {
        Some(parameters) => parameters.object("sliding_attention")?,
        None => None,
    };
    let stated = match &nested {
        Some(sliding) => sliding.positive("rope_theta")?,
        None => keys.positive("rope_local_base_freq")?,
    };
    let local = Rotary::plain(stated.unwrap_or(10_000.0), config.head_size);
    let mut tables = config.rotary_tables().to_vec();
    tables.push(local);
    let windows = config.attention_windows.iter();
    config.positions = Positions::RotaryByLayer {
        tables,
        layers: windows
            .map(|window| Some(usize::from(window.is_some())))
            .collect(),
    };
    Ok(())
}

fn names(weight: Weight) -> WeightSource {
    let source = llama_names(weight);
    match weight {
        Weight::FinalNorm
        | Weight::Layer(
            _,
            LayerWeight::AttentionNorm
            | LayerWeight::FfnNorm
            | LayerWeight::QueryNorm
            | LayerWeight::KeyNorm,
        ) => source.with(Transform::AddOne),
        _ => source,
    }
}

fn sandwich_names(weight: Weight) -> WeightSource {
    let Weight::Layer(layer, layer_weight) = weight else {
        return names(weight);
    };
    let name = match layer_weight {
        LayerWeight::AttentionOutputNorm => "post_attention_layernorm.weight",
        LayerWeight::FfnNorm => "pre_feedforward_layernorm.weight",
        LayerWeight::FfnOutputNorm => "post_feedforward_layernorm.weight",
        _ => return names(weight),
    };
    layer_tensor("model.layers", layer, name).with(Transform::AddOne)
}
