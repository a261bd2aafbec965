//! Mixtral and TurboSparse-Mixtral: Mistral with experts. TurboSparse (Song et al. 2024, §4) has a ReLU on both gate and up.

use crate::{
    Experts, FfnKind, ModelConfig, ModelError, RouterScores, Weight,
    families::{
        Family, expert_source,
        llama::{IGNORED, llama_like},
        mistral,
    },
    keys::Keys,
    source::WeightSource,
};

/// Mixtral.
pub(super) const MIXTRAL: Family = Family {
    name: "mixtral",
    architectures: &["MixtralForCausalLM"],
    describe: |keys| describe(keys, "mixtral"),
    source,
    ignored: IGNORED,
};

/// TurboSparse-Mixtral.
pub(super) const TURBO_SPARSE_MIXTRAL: Family = Family {
    name: "turbosparse-mixtral",
    architectures: &["TurboSparseMixtralForCausalLM"],
    describe: |keys| {
        let mut config = describe(keys, "turbosparse-mixtral")?;
        config.ffn = FfnKind::DoublyGated;
        Ok(config)
    },
    source,
    ignored: IGNORED,
};

fn describe(keys: &Keys<'_>, family: &str) -> Result<ModelConfig, ModelError> {
    let mut config = llama_like(keys, family, &mistral::DEFAULTS)?;
    let window = keys.size("sliding_window")?;
    config.attention_windows = vec![window; config.layer_count];
    let experts = experts(keys, config.ffn_size, [8, 2])?;
    Ok(config.with_experts(experts))
}

/// Reads the keys of experts of `size` neurons; by default, a token selects `per_token` of `count`.
pub(super) fn experts(
    keys: &Keys<'_>,
    size: usize,
    [count, per_token]: [usize; 2],
) -> Result<Experts, ModelError> {
    Ok(Experts {
        count: keys.size_or(&["num_local_experts"], count)?,
        size,
        per_token: keys.size_or(&["num_experts_per_tok"], per_token)?,
        scores: RouterScores::SoftmaxOfSelected,
        has_router_bias: false,
        reads_layer_input: false,
        shared_size: 0,
        has_shared_gate: false,
        scale: 1.0,
        dense: None,
    })
}

fn source(config: &ModelConfig, weight: Weight) -> WeightSource {
    expert_source(
        config,
        weight,
        "block_sparse_moe.experts",
        ["w1", "w3", "w2"],
        "block_sparse_moe.gate.weight",
    )
}
