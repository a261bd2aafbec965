//! Falcon: 40B and 180B (new decoder architecture), 7B (multi-query, one norm), and the RefinedWeb models
//! (ALiBi, sequential attention and FFN).

use crate::{
    Activation, Biases, Block, FfnKind, LayerWeight, ModelConfig, ModelError, Multipliers,
    NormKind, Positions, QueryKeyNorm, SoftCaps, Weight,
    alibi::slopes,
    families::{
        Family, layer_tensor,
        llama::{activation, head_size},
    },
    keys::Keys,
    rotary::{RotaryDefaults, rotary},
    source::{Fused, Transform, WeightSource, fused_by_group},
};

/// Falcon; the first checkpoints are called RefinedWeb (RW).
pub(super) const FALCON: Family = Family {
    name: "falcon",
    architectures: &["FalconForCausalLM", "RWForCausalLM"],
    describe: |keys| {
        let hidden_size = keys.size_or(&["hidden_size", "n_embed"], 4544)?;
        let layer_count = keys.size_or(&["num_hidden_layers", "n_layer"], 32)?;
        let head_count = keys.size_or(&["num_attention_heads", "n_head"], 71)?;
        let head_size = head_size(keys, hidden_size, head_count)?;
        // The first 40B checkpoints state it by the model type alone; `RefinedWebModel` is the 7B.
        let refined_web = keys.text("model_type")? == Some("RefinedWeb");
        let new = keys.flag("new_decoder_architecture", refined_web)?;
        let multi_query = keys.flag("multi_query", true)?;
        let kv_heads = keys.size_or(&["num_kv_heads", "n_head_kv"], head_count)?;
        let parallel = keys.flag("parallel_attn", true)? || new;
        let norms = keys.size("num_ln_in_parallel_attn")?.unwrap_or(2);
        if norms > 2 {
            return Err(keys.unsupported("num_ln_in_parallel_attn", &norms.to_string(), "1, 2"));
        }
        let context_length = keys.size_or(&["max_position_embeddings"], 2048)?;
        let biased = keys.flag("bias", false)?;
        let rotary = rotary(keys, head_size, context_length, &RotaryDefaults::STANDARD)?;
        Ok(ModelConfig {
            family: "falcon".to_owned(),
            hidden_size,
            embedding_size: hidden_size,
            embedding_scale: 1.0,
            layer_count,
            head_count,
            kv_head_count: match (new, multi_query) {
                (true, _) => kv_heads,
                (false, true) => 1,
                (false, false) => head_count,
            },
            head_size,
            ffn_size: keys.size_or(&["ffn_hidden_size"], 4 * hidden_size)?,
            experts: None,
            latent: None,
            vocabulary_size: keys.size_or(&["vocab_size"], 65024)?,
            context_length,
            positions: if keys.flag("alibi", false)? {
                Positions::Alibi {
                    slopes: slopes(head_count, alibi_strength(keys)?),
                }
            } else {
                Positions::Rotary(rotary)
            },
            attention_windows: vec![None; layer_count],
            block: match (parallel, new && norms == 2) {
                (false, _) => Block::PreNorm,
                (true, true) => Block::Parallel,
                (true, false) => Block::ParallelSharedNorm,
            },
            norm: NormKind::Layer,
            norm_epsilon: keys.positive("layer_norm_epsilon")?.unwrap_or(1e-5) as f32,
            query_key_norm: QueryKeyNorm::None,
            final_norm: true,
            ffn: FfnKind::Plain,
            activation: either_activation(keys)?,
            soft_caps: SoftCaps::default(),
            attention_sinks: false,
            multipliers: Multipliers::default(),
            biases: Biases {
                query_key_value: biased,
                attention_output: biased,
                ffn: biased,
                head: false,
            },
            tied_embeddings: keys.flag("tie_word_embeddings", true)?,
            end_of_text: keys.token_ids("eos_token_id")?,
        })
    },
    source,
    ignored: &["rotary_emb.inv_freq"],
};

/// Reads `activation`, or `hidden_act` as in ReluFalcon, which predates the former.
fn either_activation(keys: &Keys<'_>) -> Result<Activation, ModelError> {
    let newer = activation(keys, "activation", "gelu")?;
    let older = activation(keys, "hidden_act", "gelu")?;
    match (keys.text("activation")?, keys.text("hidden_act")?) {
        (Some(a), Some(b)) if newer != older => Err(keys.bad(format!(
            "`activation` is `{a}` and `hidden_act` is `{b}`; they must be the same"
        ))),
        (None, Some(_)) => Ok(older),
        _ => Ok(newer),
    }
}

/// Factor on the ALiBi bias.
///
/// The eager attention of transformers, from which the goldens are, adds the bias to the scores and again in
/// the mask; fused attention (`sdpa`) and the training code add it once. The factor is 1 if the configuration
/// names a fused implementation.
fn alibi_strength(keys: &Keys<'_>) -> Result<f64, ModelError> {
    let attention = match keys.text("_attn_implementation")? {
        None => keys.text("attn_implementation")?,
        stated => stated,
    };
    Ok(match attention {
        None | Some("eager") => 2.0,
        Some(_) => 1.0,
    })
}

fn source(config: &ModelConfig, weight: Weight) -> WeightSource {
    let (layer, weight) = match weight {
        Weight::Embedding => return WeightSource::tensor("transformer.word_embeddings.weight"),
        Weight::FinalNorm => return WeightSource::tensor("transformer.ln_f.weight"),
        Weight::FinalNormBias => return WeightSource::tensor("transformer.ln_f.bias"),
        Weight::Head => return WeightSource::tensor("lm_head.weight"),
        Weight::Layer(layer, weight) => (layer, weight),
        other => unreachable!("Falcon has no {other:?}"),
    };
    let fused = |part, end: &str| WeightSource::Tensor {
        name: format!("transformer.h.{layer}.self_attention.query_key_value.{end}"),
        rows: fused_by_group(
            part,
            config.head_count,
            config.kv_head_count,
            config.head_size,
        ),
        transform: Transform::None,
    };
    let two_norms = config.block == Block::Parallel;
    let name = match weight {
        LayerWeight::AttentionNorm if two_norms => "ln_attn.weight",
        LayerWeight::AttentionNormBias if two_norms => "ln_attn.bias",
        LayerWeight::FfnNorm if two_norms => "ln_mlp.weight",
        LayerWeight::FfnNormBias if two_norms => "ln_mlp.bias",
        LayerWeight::AttentionNorm => "input_layernorm.weight",
        LayerWeight::AttentionNormBias => "input_layernorm.bias",
        LayerWeight::FfnNorm => "post_attention_layernorm.weight",
        LayerWeight::FfnNormBias => "post_attention_layernorm.bias",
        LayerWeight::Query => return fused(Fused::Query, "weight"),
        LayerWeight::QueryBias => return fused(Fused::Query, "bias"),
        LayerWeight::Key => return fused(Fused::Key, "weight"),
        LayerWeight::KeyBias => return fused(Fused::Key, "bias"),
        LayerWeight::Value => return fused(Fused::Value, "weight"),
        LayerWeight::ValueBias => return fused(Fused::Value, "bias"),
        LayerWeight::Output => "self_attention.dense.weight",
        LayerWeight::OutputBias => "self_attention.dense.bias",
        LayerWeight::Gate => "mlp.dense_h_to_4h.weight",
        LayerWeight::GateBias => "mlp.dense_h_to_4h.bias",
        LayerWeight::Down => "mlp.dense_4h_to_h.weight",
        LayerWeight::DownBias => "mlp.dense_4h_to_h.bias",
        other => unreachable!("Falcon has no {other:?}"),
    };
    layer_tensor("transformer.h", layer, name)
}
