//! OPT: layer norms before or after, learned positions, an FFN without gate and with biases.

use crate::{
    Biases, Block, FfnKind, LayerWeight, ModelConfig, Multipliers, NormKind, Positions,
    QueryKeyNorm, SoftCaps, Weight,
    families::{
        Family, layer_tensor,
        llama::{activation, head_size},
    },
    source::WeightSource,
};

/// OPT and Galactica, which omits biases and norm weights.
pub(super) const OPT: Family = Family {
    name: "opt",
    architectures: &["OPTForCausalLM"],
    describe: |keys| {
        let hidden_size = keys.size_or(&["hidden_size"], 768)?;
        let layer_count = keys.size_or(&["num_hidden_layers"], 12)?;
        let head_count = keys.size_or(&["num_attention_heads"], 12)?;
        let norm_before = keys.flag("do_layer_norm_before", true)?;
        let biased = keys.flag("enable_bias", true)?;
        let norm_weights = keys.flag("layer_norm_elementwise_affine", true)?;
        // Galactica states that its positions are learned; no OPT model has others.
        if !keys.flag("learned_embeddings", true)? {
            return Err(keys.unsupported("learned_embeddings", "false", "true"));
        }
        Ok(ModelConfig {
            // The family records whether checkpoints contain norm weights.
            family: if norm_weights {
                "opt"
            } else {
                "opt_plain_norm"
            }
            .to_owned(),
            hidden_size,
            embedding_size: keys.size_or(&["word_embed_proj_dim"], hidden_size)?,
            embedding_scale: 1.0,
            layer_count,
            head_count,
            kv_head_count: head_count,
            head_size: head_size(keys, hidden_size, head_count)?,
            ffn_size: keys.size_or(&["ffn_dim"], 3072)?,
            experts: None,
            latent: None,
            vocabulary_size: keys.size_or(&["vocab_size"], 50272)?,
            context_length: keys.size_or(&["max_position_embeddings"], 2048)?,
            // The first two rows are for padding.
            positions: Positions::Learned { offset: 2 },
            attention_windows: vec![None; layer_count],
            block: if norm_before {
                Block::PreNorm
            } else {
                Block::PostNorm
            },
            norm: NormKind::Layer,
            norm_epsilon: 1e-5,
            query_key_norm: QueryKeyNorm::None,
            final_norm: norm_before && !keys.flag("_remove_final_layer_norm", false)?,
            ffn: FfnKind::Plain,
            activation: activation(keys, "activation_function", "relu")?,
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
    source: |_, weight| names(weight),
    ignored: &[],
};

/// OPT without norm weights.
pub(super) const OPT_PLAIN_NORM: Family = Family {
    name: "opt_plain_norm",
    architectures: &[],
    source: |_, weight| match weight {
        Weight::FinalNorm | Weight::Layer(_, LayerWeight::AttentionNorm | LayerWeight::FfnNorm) => {
            WeightSource::Constant(1.0)
        }
        Weight::FinalNormBias
        | Weight::Layer(_, LayerWeight::AttentionNormBias | LayerWeight::FfnNormBias) => {
            WeightSource::Constant(0.0)
        }
        weight => names(weight),
    },
    ..OPT
};

/// Tensor names of OPT checkpoints.
fn names(weight: Weight) -> WeightSource {
    let (layer, weight) = match weight {
        Weight::Embedding => return WeightSource::tensor("model.decoder.embed_tokens.weight"),
        Weight::Positions => return WeightSource::tensor("model.decoder.embed_positions.weight"),
        Weight::ProjectIn => return WeightSource::tensor("model.decoder.project_in.weight"),
        Weight::ProjectOut => return WeightSource::tensor("model.decoder.project_out.weight"),
        Weight::FinalNorm => return WeightSource::tensor("model.decoder.final_layer_norm.weight"),
        Weight::FinalNormBias => {
            return WeightSource::tensor("model.decoder.final_layer_norm.bias");
        }
        Weight::Head => return WeightSource::tensor("lm_head.weight"),
        Weight::Layer(layer, weight) => (layer, weight),
        other => unreachable!("OPT has no {other:?}"),
    };
    let name = match weight {
        LayerWeight::AttentionNorm => "self_attn_layer_norm.weight",
        LayerWeight::AttentionNormBias => "self_attn_layer_norm.bias",
        LayerWeight::Query => "self_attn.q_proj.weight",
        LayerWeight::QueryBias => "self_attn.q_proj.bias",
        LayerWeight::Key => "self_attn.k_proj.weight",
        LayerWeight::KeyBias => "self_attn.k_proj.bias",
        LayerWeight::Value => "self_attn.v_proj.weight",
        LayerWeight::ValueBias => "self_attn.v_proj.bias",
        LayerWeight::Output => "self_attn.out_proj.weight",
        LayerWeight::OutputBias => "self_attn.out_proj.bias",
        LayerWeight::FfnNorm => "final_layer_norm.weight",
        LayerWeight::FfnNormBias => "final_layer_norm.bias",
        LayerWeight::Gate => "fc1.weight",
        LayerWeight::GateBias => "fc1.bias",
        LayerWeight::Down => "fc2.weight",
        LayerWeight::DownBias => "fc2.bias",
        other => unreachable!("OPT has no {other:?}"),
    };
    layer_tensor("model.decoder.layers", layer, name)
}
