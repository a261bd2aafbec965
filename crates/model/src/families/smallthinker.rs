//! SmallThinker: ReLU experts whose router reads the layer's input, and layers without position encoding.

use serde_json::Value;

use crate::{
    Activation, Experts, ModelConfig, ModelError, RouterScores, Weight,
    families::{
        Family, expert_source, layer_flags,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, llama_like},
        smollm3::without_some,
    },
    keys::Keys,
    source::WeightSource,
};

/// SmallThinker.
pub(super) const SMALL_THINKER: Family = Family {
    name: "smallthinker",
    architectures: &["SmallThinkerForCausalLM"],
    describe: |keys| {
        let size = keys.size_or(&["moe_ffn_hidden_size"], 768)?;
        let defaults = Defaults {
            ffn_size: size,
            tied: true,
            activation: "relu",
            ..LLAMA_DEFAULTS
        };
        let mut config = llama_like(keys, "smallthinker", &defaults)?;
        // The model's code always applies ReLU, regardless of `hidden_act`.
        config.activation = Activation::Relu;
        let experts = Experts {
            count: keys.size_or(&["moe_num_primary_experts"], 32)?,
            size,
            per_token: keys.size_or(&["moe_num_active_primary_experts"], 4)?,
            scores: match keys.flag("moe_primary_router_apply_softmax", false)? {
                true => RouterScores::SoftmaxOfSelected,
                false => RouterScores::SigmoidOfSelected,
            },
            has_router_bias: false,
            reads_layer_input: true,
            shared_size: 0,
            has_shared_gate: false,
            scale: 1.0,
            dense: None,
        };
        // The model's code reads none of these.
        keys.ignore_prefix("norm_topk_prob");
        keys.ignore_prefix("model_name");
        every_layer_has_experts(keys)?;
        let layers = config.layer_count;
        if let Some(rotated) = layer_flags(keys, "rope_layout", layers)? {
            config.positions = without_some(&config, &rotated);
        }
        let window = keys.size("sliding_window_size")?;
        if let Some(slides) = layer_flags(keys, "sliding_window_layout", layers)? {
            let windows = slides.iter().map(|slides| window.filter(|_| *slides));
            config.attention_windows = windows.collect();
        }
        Ok(config.with_experts(experts))
    },
    source,
    ignored: IGNORED,
};

/// Checks that no layer has a dense FFN.
fn every_layer_has_experts(keys: &Keys<'_>) -> Result<(), ModelError> {
    let is_one = |flag: &Value| flag.as_u64() == Some(1);
    match keys.list("moe_layer_layout")? {
        Some(flags) if !flags.iter().all(is_one) => {
            Err(keys.unsupported("moe_layer_layout", "not 1 for every layer", "1"))
        }
        _ => Ok(()),
    }
}

fn source(config: &ModelConfig, weight: Weight) -> WeightSource {
    expert_source(
        config,
        weight,
        "block_sparse_moe.experts",
        ["gate", "up", "down"],
        "block_sparse_moe.primary_router.weight",
    )
}
