//! DeepSeek-V2: latent attention, routed and shared experts, and dense FFNs in the first layers.

use crate::{
    DenseLayers, Experts, LatentAttention, LayerWeight, ModelConfig, ModelError, RouterScores,
    Weight,
    families::{
        Family, expert_source, layer_tensor,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, llama_like, llama_names},
    },
    keys::Keys,
    source::{Rows, Transform, WeightSource},
};

/// DeepSeek-V2-Lite, DeepSeek-Coder-V2-Lite.
pub(super) const DEEPSEEK_V2: Family = Family {
    name: "deepseek-v2",
    architectures: &["DeepseekV2ForCausalLM"],
    describe: |keys| {
        let latent = LatentAttention {
            query_rank: match keys.has("q_lora_rank") {
                true => keys.size("q_lora_rank")?,
                false => Some(1536),
            },
            rank: keys.size_or(&["kv_lora_rank"], 512)?,
            rotary_size: keys.size_or(&["qk_rope_head_dim"], 64)?,
            key_size: keys.size_or(&["qk_nope_head_dim"], 128)?,
            value_size: keys.size_or(&["v_head_dim"], 128)?,
        };
        // Only the rotated part of a head has a position encoding, so `head_dim` is the size of that part.
        if keys
            .size("head_dim")?
            .is_some_and(|size| size != latent.rotary_size)
        {
            return Err(keys.bad(format!(
                "`head_dim` differs from `qk_rope_head_dim`, which is {}",
                latent.rotary_size
            )));
        }
        let defaults = Defaults {
            head_size: Some(latent.rotary_size),
            ..LLAMA_DEFAULTS
        };
        let mut config = llama_like(keys, "deepseek-v2", &defaults)?;
        for key in ["attention_bias", "mlp_bias"] {
            if keys.flag(key, false)? {
                return Err(keys.unsupported(key, "true", "false"));
            }
        }
        config.kv_head_count = 1;
        config.head_size = latent.head_size();
        config.latent = Some(latent);
        let scale = score_scale(keys)?;
        if scale != 1.0 {
            config.multipliers.attention = vec![scale as f32; config.layer_count];
        }
        let experts = experts(keys, &config)?;
        Ok(config.with_experts(experts))
    },
    source,
    ignored: IGNORED,
};

/// Factor that YaRN applies to the attention scores, the square of `0.1·mscale_all_dim·ln(factor) + 1`, as in the published code;
/// transformers omits it.
fn score_scale(keys: &Keys<'_>) -> Result<f64, ModelError> {
    for key in ["rope_parameters", "rope_scaling"] {
        let Some(scaling) = keys.object(key)? else {
            continue;
        };
        let all = scaling.number("mscale_all_dim")?.unwrap_or(0.0);
        let factor = scaling.positive("factor")?.unwrap_or(1.0);
        if factor > 1.0 {
            return Ok((0.1 * all * factor.ln() + 1.0).powi(2));
        }
    }
    Ok(1.0)
}

/// Reads the configuration of the experts.
fn experts(keys: &Keys<'_>, config: &ModelConfig) -> Result<Experts, ModelError> {
    for (key, supported) in [("topk_method", "greedy"), ("scoring_func", "softmax")] {
        if let Some(other) = keys.text(key)?.filter(|value| *value != supported) {
            return Err(keys.unsupported(key, other, supported));
        }
    }
    if let Some(step) = keys.size("moe_layer_freq")?.filter(|step| *step != 1) {
        return Err(keys.unsupported("moe_layer_freq", &step.to_string(), "1"));
    }
    // Greedy selection does not use groups; the model's class does not read the other keys.
    for unused in [
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
    ] {
        keys.ignore_prefix(unused);
    }
    let size = keys.size_or(&["moe_intermediate_size"], 1407)?;
    let shared = match keys.number("n_shared_experts")? {
        None if keys.has("n_shared_experts") => 0,
        None => 2,
        Some(0.0) => 0,
        Some(_) => keys.size_or(&["n_shared_experts"], 2)?,
    };
    let dense = match keys.number("first_k_dense_replace")? {
        None | Some(0.0) => 0,
        Some(_) => keys.size_or(&["first_k_dense_replace"], 0)?,
    };
    Ok(Experts {
        count: keys.size_or(&["n_routed_experts"], 64)?,
        size,
        per_token: keys.size_or(&["num_experts_per_tok"], 6)?,
        scores: RouterScores::Softmax,
        has_router_bias: false,
        reads_layer_input: false,
        shared_size: shared * size,
        has_shared_gate: false,
        scale: keys.positive("routed_scaling_factor")?.unwrap_or(1.0) as f32,
        dense: (dense > 0).then(|| DenseLayers {
            layers: (0..dense.min(config.layer_count)).collect(),
            size: config.ffn_size,
        }),
    })
}

fn source(config: &ModelConfig, weight: Weight) -> WeightSource {
    let (Weight::Layer(layer, of_layer), Some(latent)) = (weight, config.latent) else {
        return llama_names(weight);
    };
    let heads = config.head_count;
    let tensor =
        |name: &str| layer_tensor("model.layers", layer, &format!("self_attn.{name}.weight"));
    // For each head, `kv_b_proj` has the rows of the keys, then those of the values.
    let step = latent.key_size + latent.value_size;
    let of_heads = |first: usize, length: usize, transform: Transform| WeightSource::Tensor {
        name: format!("model.layers.{layer}.self_attn.kv_b_proj.weight"),
        rows: Rows::Strided {
            first,
            length,
            step,
            total: heads * step,
        },
        transform,
    };
    let rotary = latent.rotary_size;
    match of_layer {
        LayerWeight::QueryDown => tensor("q_a_proj"),
        LayerWeight::QueryDownNorm => tensor("q_a_layernorm"),
        LayerWeight::Query => {
            let name = if latent.query_rank.is_some() {
                "q_b_proj"
            } else {
                "q_proj"
            };
            tensor(name).with(Transform::RotaryFirst { heads, rotary })
        }
        LayerWeight::Key => {
            tensor("kv_a_proj_with_mqa").with(Transform::RotaryFirst { heads: 1, rotary })
        }
        LayerWeight::LatentNorm => tensor("kv_a_layernorm"),
        LayerWeight::LatentQuery => {
            of_heads(0, latent.key_size, Transform::TransposedHeads { heads })
        }
        LayerWeight::Value => of_heads(latent.key_size, latent.value_size, Transform::None),
        _ => expert_source(
            config,
            weight,
            "mlp.experts",
            ["gate_proj", "up_proj", "down_proj"],
            "mlp.gate.weight",
        ),
    }
}
