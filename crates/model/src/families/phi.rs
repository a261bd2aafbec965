//! Phi 1, 1.5 and 2: parallel attention and FFN with a shared norm, biases in all projections.

use crate::{
    Biases, Block, FfnKind, LayerWeight, ModelConfig, Multipliers, NormKind, Positions,
    QueryKeyNorm, SoftCaps, Weight,
    families::{
        Family, layer_tensor,
        llama::{IGNORED, activation, head_size},
    },
    rotary::{RotaryDefaults, rotary},
    source::WeightSource,
};

/// Phi 1 to 2.
pub(super) const PHI: Family = Family {
    name: "phi",
    architectures: &["PhiForCausalLM"],
    describe: |keys| {
        let hidden_size = keys.size_or(&["hidden_size"], 2048)?;
        let layer_count = keys.size_or(&["num_hidden_layers"], 24)?;
        let head_count = keys.size_or(&["num_attention_heads"], 32)?;
        let head_size = head_size(keys, hidden_size, head_count)?;
        let context_length = keys.size_or(&["max_position_embeddings"], 2048)?;
        let defaults = RotaryDefaults {
            share: 0.5,
            share_key: Some("partial_rotary_factor"),
            ..RotaryDefaults::STANDARD
        };
        Ok(ModelConfig {
            family: "phi".to_owned(),
            hidden_size,
            embedding_size: hidden_size,
            embedding_scale: 1.0,
            layer_count,
            head_count,
            kv_head_count: keys.size_or(&["num_key_value_heads"], head_count)?,
            head_size,
            ffn_size: keys.size_or(&["intermediate_size"], 8192)?,
            experts: None,
            latent: None,
            vocabulary_size: keys.size_or(&["vocab_size"], 51200)?,
            context_length,
            positions: Positions::Rotary(rotary(keys, head_size, context_length, &defaults)?),
            attention_windows: vec![None; layer_count],
            block: Block::ParallelSharedNorm,
            norm: NormKind::Layer,
            norm_epsilon: keys.positive("layer_norm_eps")?.unwrap_or(1e-5) as f32,
            query_key_norm: if keys.flag("qk_layernorm", false)? {
                QueryKeyNorm::PerHead
            } else {
                QueryKeyNorm::None
            },
            final_norm: true,
            ffn: FfnKind::Plain,
            activation: activation(keys, "hidden_act", "gelu_new")?,
            soft_caps: SoftCaps::default(),
            attention_sinks: false,
            multipliers: Multipliers::default(),
            biases: Biases {
                query_key_value: true,
                attention_output: true,
                ffn: true,
                head: true,
            },
            tied_embeddings: keys.flag("tie_word_embeddings", false)?,
            end_of_text: keys.token_ids("eos_token_id")?,
        })
    },
    source: |_, weight| names(weight),
    ignored: IGNORED,
};

/// Tensor names of Phi checkpoints.
fn names(weight: Weight) -> WeightSource {
    let (layer, weight) = match weight {
        Weight::Embedding => return WeightSource::tensor("model.embed_tokens.weight"),
        Weight::FinalNorm => return WeightSource::tensor("model.final_layernorm.weight"),
        Weight::FinalNormBias => return WeightSource::tensor("model.final_layernorm.bias"),
        Weight::Head => return WeightSource::tensor("lm_head.weight"),
        Weight::HeadBias => return WeightSource::tensor("lm_head.bias"),
        Weight::Layer(layer, weight) => (layer, weight),
        other => unreachable!("Phi has no {other:?}"),
    };
    let name = match weight {
        LayerWeight::AttentionNorm => "input_layernorm.weight",
        LayerWeight::AttentionNormBias => "input_layernorm.bias",
        LayerWeight::Query => "self_attn.q_proj.weight",
        LayerWeight::QueryBias => "self_attn.q_proj.bias",
        LayerWeight::Key => "self_attn.k_proj.weight",
        LayerWeight::KeyBias => "self_attn.k_proj.bias",
        LayerWeight::Value => "self_attn.v_proj.weight",
        LayerWeight::ValueBias => "self_attn.v_proj.bias",
        LayerWeight::QueryNorm => "self_attn.q_layernorm.weight",
        LayerWeight::QueryNormBias => "self_attn.q_layernorm.bias",
        LayerWeight::KeyNorm => "self_attn.k_layernorm.weight",
        LayerWeight::KeyNormBias => "self_attn.k_layernorm.bias",
        LayerWeight::Output => "self_attn.dense.weight",
        LayerWeight::OutputBias => "self_attn.dense.bias",
        LayerWeight::Gate => "mlp.fc1.weight",
        LayerWeight::GateBias => "mlp.fc1.bias",
        LayerWeight::Down => "mlp.fc2.weight",
        LayerWeight::DownBias => "mlp.fc2.bias",
        other => unreachable!("Phi has no {other:?}"),
    };
    layer_tensor("model.layers", layer, name)
}
