//! GPT-2, with matrices stored as `[in, out]`, and GPT-BigCode (StarCoder 1), with one key/value head.

use crate::{
    Biases, Block, FfnKind, LayerWeight, ModelConfig, ModelError, Multipliers, NormKind, Positions,
    QueryKeyNorm, SoftCaps, Weight,
    families::{
        Family, layer_tensor,
        llama::{activation, head_size},
    },
    keys::Keys,
    source::{Fused, Transform, WeightSource, fused_by_group, fused_concatenated},
};

/// GPT-2 and DistilGPT-2.
pub(super) const GPT2: Family = Family {
    name: "gpt2",
    architectures: &["GPT2LMHeadModel"],
    describe: |keys| {
        let mut config = describe(keys, "gpt2", "gelu_new")?;
        if keys.flag("scale_attn_by_inverse_layer_idx", false)? {
            for (layer, factor) in config.multipliers.attention.iter_mut().enumerate() {
                *factor /= (layer + 1) as f32;
            }
        }
        Ok(config)
    },
    source: |config, weight| {
        let source = names(config, weight, fused_concatenated);
        match config.shape(weight).len() {
            2 if !matches!(weight, Weight::Embedding | Weight::Positions | Weight::Head) => {
                source.with(Transform::Transposed)
            }
            _ => source,
        }
    },
    ignored: &["attn.bias", "attn.masked_bias"],
};

/// GPT-BigCode: StarCoder 1 and SantaCoder.
pub(super) const GPT_BIGCODE: Family = Family {
    name: "gpt_bigcode",
    architectures: &["GPTBigCodeForCausalLM"],
    describe: |keys| {
        let mut config = describe(keys, "gpt_bigcode", "gelu_pytorch_tanh")?;
        if keys.flag("multi_query", true)? {
            config.kv_head_count = 1;
        }
        Ok(config)
    },
    source: |config, weight| names(config, weight, fused_by_group),
    ignored: &["attn.bias", "attn.masked_bias"],
};

/// Reads a configuration with GPT-2's keys.
fn describe(
    keys: &Keys<'_>,
    family: &str,
    default_activation: &str,
) -> Result<ModelConfig, ModelError> {
    // Settings of heads for other tasks, and the precision of attention.
    keys.ignore_prefix("summary_");
    keys.ignore_prefix("attention_softmax_in_fp32");
    keys.ignore_prefix("scale_attention_softmax_in_fp32");
    keys.ignore_prefix("reorder_and_upcast_attn");
    let hidden_size = keys.size_or(&["n_embd", "hidden_size"], 768)?;
    let layer_count = keys.size_or(&["n_layer", "num_hidden_layers"], 12)?;
    let head_count = keys.size_or(&["n_head", "num_attention_heads"], 12)?;
    let head_size = head_size(keys, hidden_size, head_count)?;
    let is_scaled = keys.flag("scale_attn_weights", true)?;
    let scores = if is_scaled {
        1.0
    } else {
        (head_size as f32).sqrt()
    };
    Ok(ModelConfig {
        family: family.to_owned(),
        hidden_size,
        embedding_size: hidden_size,
        embedding_scale: 1.0,
        layer_count,
        head_count,
        kv_head_count: head_count,
        head_size,
        ffn_size: keys.size_or(&["n_inner"], 4 * hidden_size)?,
        experts: None,
        latent: None,
        vocabulary_size: keys.size_or(&["vocab_size"], 50257)?,
        context_length: keys.size_or(&["n_positions", "max_position_embeddings"], 1024)?,
        positions: Positions::Learned { offset: 0 },
        attention_windows: vec![None; layer_count],
        block: Block::PreNorm,
        norm: NormKind::Layer,
        norm_epsilon: keys.positive("layer_norm_epsilon")?.unwrap_or(1e-5) as f32,
        query_key_norm: QueryKeyNorm::None,
        final_norm: true,
        ffn: FfnKind::Plain,
        activation: activation(keys, "activation_function", default_activation)?,
        soft_caps: SoftCaps::default(),
        attention_sinks: false,
        multipliers: Multipliers {
            attention: vec![scores; layer_count],
            ..Multipliers::default()
        },
        biases: Biases {
            query_key_value: true,
            attention_output: true,
            ffn: true,
            head: false,
        },
        tied_embeddings: keys.flag("tie_word_embeddings", true)?,
        end_of_text: keys.token_ids("eos_token_id")?,
    })
}

/// Returns tensor names; queries, keys and values are the rows `rows` of one tensor.
fn names(
    config: &ModelConfig,
    weight: Weight,
    rows: fn(Fused, usize, usize, usize) -> crate::source::Rows,
) -> WeightSource {
    let (layer, weight) = match weight {
        Weight::Embedding => return WeightSource::tensor("transformer.wte.weight"),
        Weight::Positions => return WeightSource::tensor("transformer.wpe.weight"),
        Weight::FinalNorm => return WeightSource::tensor("transformer.ln_f.weight"),
        Weight::FinalNormBias => return WeightSource::tensor("transformer.ln_f.bias"),
        Weight::Head => return WeightSource::tensor("lm_head.weight"),
        Weight::Layer(layer, weight) => (layer, weight),
        other => unreachable!("GPT-2 has no {other:?}"),
    };
    let fused = |part, end: &str| WeightSource::Tensor {
        name: format!("transformer.h.{layer}.attn.c_attn.{end}"),
        rows: rows(
            part,
            config.head_count,
            config.kv_head_count,
            config.head_size,
        ),
        transform: Transform::None,
    };
    let name = match weight {
        LayerWeight::AttentionNorm => "ln_1.weight",
        LayerWeight::AttentionNormBias => "ln_1.bias",
        LayerWeight::Query => return fused(Fused::Query, "weight"),
        LayerWeight::QueryBias => return fused(Fused::Query, "bias"),
        LayerWeight::Key => return fused(Fused::Key, "weight"),
        LayerWeight::KeyBias => return fused(Fused::Key, "bias"),
        LayerWeight::Value => return fused(Fused::Value, "weight"),
        LayerWeight::ValueBias => return fused(Fused::Value, "bias"),
        LayerWeight::Output => "attn.c_proj.weight",
        LayerWeight::OutputBias => "attn.c_proj.bias",
        LayerWeight::FfnNorm => "ln_2.weight",
        LayerWeight::FfnNormBias => "ln_2.bias",
        LayerWeight::Gate => "mlp.c_fc.weight",
        LayerWeight::GateBias => "mlp.c_fc.bias",
        LayerWeight::Down => "mlp.c_proj.weight",
        LayerWeight::DownBias => "mlp.c_proj.bias",
        other => unreachable!("GPT-2 has no {other:?}"),
    };
    layer_tensor("transformer.h", layer, name)
}
