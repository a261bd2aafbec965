//! GPT-NeoX, Pythia: layer norms, partial rotary embedding, parallel attention and FFN.

use crate::{
    Biases, Block, FfnKind, LayerWeight, ModelConfig, Multipliers, NormKind, Positions,
    QueryKeyNorm, SoftCaps, Weight,
    families::{
        Family, layer_tensor,
        llama::{activation, head_size},
    },
    rotary::{RotaryDefaults, rotary},
    source::{Fused, Transform, WeightSource, fused_by_group},
};

/// GPT-NeoX 20B, Pythia, Dolly.
pub(super) const GPT_NEOX: Family = Family {
    name: "gpt_neox",
    architectures: &["GPTNeoXForCausalLM"],
    describe: |keys| {
        let hidden_size = keys.size_or(&["hidden_size"], 6144)?;
        let layer_count = keys.size_or(&["num_hidden_layers"], 44)?;
        let head_count = keys.size_or(&["num_attention_heads"], 64)?;
        let head_size = head_size(keys, hidden_size, head_count)?;
        let context_length = keys.size_or(&["max_position_embeddings"], 2048)?;
        let attention_bias = keys.flag("attention_bias", true)?;
        let defaults = RotaryDefaults {
            theta_key: "rotary_emb_base",
            share: 0.25,
            share_key: Some("rotary_pct"),
            ..RotaryDefaults::STANDARD
        };
        Ok(ModelConfig {
            family: "gpt_neox".to_owned(),
            hidden_size,
            embedding_size: hidden_size,
            embedding_scale: 1.0,
            layer_count,
            head_count,
            kv_head_count: head_count,
            head_size,
            ffn_size: keys.size_or(&["intermediate_size"], 24576)?,
            experts: None,
            latent: None,
            vocabulary_size: keys.size_or(&["vocab_size"], 50432)?,
            context_length,
            positions: Positions::Rotary(rotary(keys, head_size, context_length, &defaults)?),
            attention_windows: vec![None; layer_count],
            block: if keys.flag("use_parallel_residual", true)? {
                Block::Parallel
            } else {
                Block::PreNorm
            },
            norm: NormKind::Layer,
            norm_epsilon: keys.positive("layer_norm_eps")?.unwrap_or(1e-5) as f32,
            query_key_norm: QueryKeyNorm::None,
            final_norm: true,
            ffn: FfnKind::Plain,
            activation: activation(keys, "hidden_act", "gelu")?,
            soft_caps: SoftCaps::default(),
            attention_sinks: false,
            multipliers: Multipliers::default(),
            biases: Biases {
                query_key_value: attention_bias,
                attention_output: attention_bias,
                ffn: true,
                head: false,
            },
            tied_embeddings: keys.flag("tie_word_embeddings", false)?,
            end_of_text: keys.token_ids("eos_token_id")?,
        })
    },
    source,
    // Masks and tables stored in older checkpoints.
    ignored: &[
        "attention.bias",
        "attention.masked_bias",
        "rotary_emb.inv_freq",
    ],
};

fn source(config: &ModelConfig, weight: Weight) -> WeightSource {
    let (layer, weight) = match weight {
        Weight::Embedding => return WeightSource::tensor("gpt_neox.embed_in.weight"),
        Weight::FinalNorm => return WeightSource::tensor("gpt_neox.final_layer_norm.weight"),
        Weight::FinalNormBias => return WeightSource::tensor("gpt_neox.final_layer_norm.bias"),
        Weight::Head => return WeightSource::tensor("embed_out.weight"),
        Weight::Layer(layer, weight) => (layer, weight),
        other => unreachable!("GPT-NeoX has no {other:?}"),
    };
    let fused = |part, end: &str| WeightSource::Tensor {
        name: format!("gpt_neox.layers.{layer}.attention.query_key_value.{end}"),
        rows: fused_by_group(
            part,
            config.head_count,
            config.kv_head_count,
            config.head_size,
        ),
        transform: Transform::None,
    };
    let name = match weight {
        LayerWeight::AttentionNorm => "input_layernorm.weight",
        LayerWeight::AttentionNormBias => "input_layernorm.bias",
        LayerWeight::Query => return fused(Fused::Query, "weight"),
        LayerWeight::QueryBias => return fused(Fused::Query, "bias"),
        LayerWeight::Key => return fused(Fused::Key, "weight"),
        LayerWeight::KeyBias => return fused(Fused::Key, "bias"),
        LayerWeight::Value => return fused(Fused::Value, "weight"),
        LayerWeight::ValueBias => return fused(Fused::Value, "bias"),
        LayerWeight::Output => "attention.dense.weight",
        LayerWeight::OutputBias => "attention.dense.bias",
        LayerWeight::FfnNorm => "post_attention_layernorm.weight",
        LayerWeight::FfnNormBias => "post_attention_layernorm.bias",
        LayerWeight::Gate => "mlp.dense_h_to_4h.weight",
        LayerWeight::GateBias => "mlp.dense_h_to_4h.bias",
        LayerWeight::Down => "mlp.dense_4h_to_h.weight",
        LayerWeight::DownBias => "mlp.dense_4h_to_h.bias",
        other => unreachable!("GPT-NeoX has no {other:?}"),
    };
    layer_tensor("gpt_neox.layers", layer, name)
}
