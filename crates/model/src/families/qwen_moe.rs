//! Mixtures of experts with Qwen's tensor names: Qwen2-MoE (a shared expert), Qwen3-MoE and OLMoE.

use std::collections::BTreeSet;

use crate::{
    DenseLayers, Experts, LayerWeight, ModelConfig, ModelError, QueryKeyNorm, RouterScores, Weight,
    families::{
        Family, expert_source, layer_tensor,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, biases, llama_like},
        qwen,
    },
    keys::Keys,
    source::WeightSource,
};

/// Qwen 1.5 and 2 with experts.
pub(super) const QWEN2_MOE: Family = Family {
    name: "qwen2-moe",
    architectures: &["Qwen2MoeForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            kv_heads: Some(16),
            ..qwen::DEFAULTS
        };
        let mut config = llama_like(keys, "qwen2-moe", &defaults)?;
        config.biases.query_key_value = keys.flag("qkv_bias", true)?;
        qwen::windows(keys, &mut config)?;
        let experts = Experts {
            dense: dense_layers(keys, config.layer_count, config.ffn_size)?,
            shared_size: keys.size_or(&["shared_expert_intermediate_size"], 5632)?,
            has_shared_gate: true,
            ..experts(
                keys,
                keys.size_or(&["moe_intermediate_size"], 1408)?,
                [60, 4],
            )?
        };
        Ok(config.with_experts(experts))
    },
    source: |config, weight| match weight {
        Weight::Layer(layer, LayerWeight::SharedGate)
            if config
                .experts
                .as_ref()
                .is_none_or(|experts| experts.dense_size(layer).is_none()) =>
        {
            layer_tensor("model.layers", layer, "mlp.shared_expert_gate.weight")
        }
        weight => source(config, weight),
    },
    ignored: IGNORED,
};

/// Qwen 3 with experts.
pub(super) const QWEN3_MOE: Family = Family {
    name: "qwen3-moe",
    architectures: &["Qwen3MoeForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            kv_heads: Some(4),
            ..qwen::DEFAULTS
        };
        let mut config = llama_like(keys, "qwen3-moe", &defaults)?;
        config.query_key_norm = QueryKeyNorm::PerHead;
        config.biases = biases(keys)?;
        qwen::windows(keys, &mut config)?;
        let size = keys.size_or(&["moe_intermediate_size"], 768)?;
        let experts = Experts {
            dense: dense_layers(keys, config.layer_count, config.ffn_size)?,
            ..experts(keys, size, [128, 8])?
        };
        Ok(config.with_experts(experts))
    },
    source,
    ignored: IGNORED,
};

/// OLMoE.
pub(super) const OLMOE: Family = Family {
    name: "olmoe",
    architectures: &["OlmoeForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            hidden_size: 2048,
            layers: 16,
            heads: 16,
            ffn_size: 2048,
            vocabulary: 50304,
            context: 4096,
            epsilon: ("rms_norm_eps", 1e-5),
            ..LLAMA_DEFAULTS
        };
        let mut config = llama_like(keys, "olmoe", &defaults)?;
        config.query_key_norm = QueryKeyNorm::AllHeads;
        config.biases = biases(keys)?;
        if let Some(clip) = keys.number("clip_qkv")? {
            let clip = clip.to_string();
            return Err(keys.unsupported("clip_qkv", &clip, "null"));
        }
        let experts = experts(keys, config.ffn_size, [64, 8])?;
        Ok(config.with_experts(experts))
    },
    source,
    ignored: IGNORED,
};

/// Reads the expert keys that these families share.
fn experts(
    keys: &Keys<'_>,
    size: usize,
    [count, per_token]: [usize; 2],
) -> Result<Experts, ModelError> {
    Ok(Experts {
        count: keys.size_or(&["num_experts"], count)?,
        size,
        per_token: keys.size_or(&["num_experts_per_tok"], per_token)?,
        scores: match keys.flag("norm_topk_prob", false)? {
            true => RouterScores::SoftmaxOfSelected,
            false => RouterScores::Softmax,
        },
        has_router_bias: false,
        reads_layer_input: false,
        shared_size: 0,
        has_shared_gate: false,
        scale: 1.0,
        dense: None,
    })
}

/// Reads which layers have a dense FFN; each of these FFNs has `size` neurons.
fn dense_layers(
    keys: &Keys<'_>,
    count: usize,
    size: usize,
) -> Result<Option<DenseLayers>, ModelError> {
    let step = keys.size_or(&["decoder_sparse_step"], 1)?;
    let listed = keys.numbers("mlp_only_layers")?.into_iter();
    let listed: BTreeSet<usize> = listed.map(|layer| layer as usize).collect();
    let is_dense = |layer: &usize| !(layer + 1).is_multiple_of(step) || listed.contains(layer);
    let layers: Vec<usize> = (0..count).filter(is_dense).collect();
    Ok((!layers.is_empty()).then_some(DenseLayers { layers, size }))
}

fn source(config: &ModelConfig, weight: Weight) -> WeightSource {
    expert_source(
        config,
        weight,
        "mlp.experts",
        ["gate_proj", "up_proj", "down_proj"],
        "mlp.gate.weight",
    )
}
