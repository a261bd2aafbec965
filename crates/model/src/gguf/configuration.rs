//! Conversion of GGUF metadata to a `config.json`, so that families read only that.

use serde_json::{Map, Value as Json, json};

use crate::{
    Experts, LatentAttention, ModelConfig, ModelError,
    container::Container,
    gguf::{
        architectures::Architecture,
        file::{GgufFile, bad},
        rope::{Rope, Scaling},
        value::Value,
        writer::Metadata,
    },
    rotary,
};

/// Keys, without the architecture prefix, that are read separately or are redundant.
const OTHER_KEYS: &[&str] = &[
    "attention.head_count_kv",
    "attention.key_length",
    "attention.key_length_mla",
    "attention.scale",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.value_length",
    "attention.value_length_mla",
    "embedding_scale",
    "logit_scale",
    "residual_scale",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
    "tensor_data_layout",
];

/// Tensor of divisors of the rotary frequencies.
pub(super) const ROPE_DIVISORS: &str = "rope_freqs.weight";

/// Names of the tensors with the rotary divisors for short and for long contexts.
pub(super) const SHORT_DIVISORS: &str = "rope_factors_short.weight";
pub(super) const LONG_DIVISORS: &str = "rope_factors_long.weight";

/// Converts a configuration to metadata: the inverse of [`configuration`], by the same table. The rotary settings but
/// the base are added by [`Rope`].
pub(super) fn metadata(
    config: &ModelConfig,
    architecture: &Architecture,
    rope: Option<&Rope>,
) -> Metadata {
    let mut metadata = Metadata::default();
    let prefix = architecture.name;
    for (key, name) in architecture.all_keys() {
        let value: Value = match *name {
            "max_position_embeddings" => config.context_length.into(),
            "hidden_size" => config.hidden_size.into(),
            "num_hidden_layers" => config.layer_count.into(),
            "num_attention_heads" => config.head_count.into(),
            "num_key_value_heads" | "num_kv_heads" => config.kv_head_count.into(),
            "head_dim" => config.head_size.into(),
            "vocab_size" => config.vocabulary_size.into(),
            "intermediate_size" | "ffn_hidden_size" | "ffn_dim" | "n_inner" => {
                let size = config.experts.as_ref().map(|experts| match &experts.dense {
                    Some(dense) => dense.size,
                    None => experts.size,
                });
                size.unwrap_or(config.ffn_size).into()
            }
            "q_lora_rank" => match latent_of(config).query_rank {
                Some(rank) => rank.into(),
                None => continue,
            },
            "kv_lora_rank" => latent_of(config).rank.into(),
            // Written with the rotary settings.
            "qk_rope_head_dim" => continue,
            // llama.cpp requires this key and the next but one.
            "n_shared_experts" => {
                let experts = experts_of(config);
                (experts.shared_size / experts.size).into()
            }
            "routed_scaling_factor" => experts_of(config).scale.into(),
            "first_k_dense_replace" => {
                let dense = experts_of(config).dense.as_ref();
                dense.map_or(0, |dense| dense.layers.len()).into()
            }
            "num_local_experts" | "num_experts" | "n_routed_experts" => {
                experts_of(config).count.into()
            }
            "num_experts_per_tok" => experts_of(config).per_token.into(),
            "moe_intermediate_size" => experts_of(config).size.into(),
            "shared_expert_intermediate_size" => match experts_of(config).shared_size {
                0 => continue,
                size => size.into(),
            },
            "rms_norm_eps"
            | "layer_norm_eps"
            | "layer_norm_epsilon"
            | "_layer_norm_epsilon"
            | "norm_eps"
            | "norm_epsilon" => config.norm_epsilon.into(),
            "embedding_multiplier" => config.embedding_scale.into(),
            // The weights contain these multipliers.
            "residual_multiplier" | "logits_scaling" | "logit_scale" => 1f32.into(),
            "attn_logit_softcapping" => match config.soft_caps.attention {
                Some(cap) => cap.into(),
                None => continue,
            },
            "final_logit_softcapping" => match config.soft_caps.logits {
                Some(cap) => cap.into(),
                None => continue,
            },
            "sliding_window" => match config.attention_windows.iter().flatten().next() {
                Some(window) => (*window).into(),
                None => continue,
            },
            // If the key is absent, llama.cpp assumes 10,000.
            "rope_local_base_freq" => continue,
            "use_parallel_residual" => config.block.is_parallel().into(),
            "rope_theta" | "rotary_emb_base" => match rope {
                Some(rope) => (rope.theta as f32).into(),
                None => continue,
            },
            other => unreachable!("`{other}` is a key of the table"),
        };
        metadata.push(format!("{prefix}.{key}"), value);
    }
    if config.family == "minicpm" {
        metadata.push(format!("{prefix}.embedding_scale"), config.embedding_scale);
        metadata.push(format!("{prefix}.residual_scale"), 1f32);
        metadata.push(format!("{prefix}.logit_scale"), 1f32);
    }
    if let Some(rope) = rope {
        let lengths = match &config.latent {
            None => vec![("value_length", config.head_size)],
            // Lengths in the KV cache, then lengths of the heads.
            Some(latent) => vec![
                ("key_length", config.head_size),
                ("value_length", latent.rank),
                ("key_length_mla", latent.query_size()),
                ("value_length_mla", latent.value_size),
            ],
        };
        for (name, length) in lengths {
            metadata.push(format!("{prefix}.attention.{name}"), length);
        }
        metadata.push(format!("{prefix}.rope.dimension_count"), rope.width);
        rope.scaling.describe(prefix, &mut metadata);
        if let (Some(_), Scaling::Yarn { .. }) = (config.latent, &rope.scaling) {
            // The weights already contain the factor of the scores. Without this key, sines and cosines would also be scaled.
            let key = format!("{prefix}.rope.scaling.yarn_log_multiplier");
            metadata.push(key, 1e-9f32);
        }
    }
    metadata
}

/// Returns the experts of a model whose architecture has keys for experts.
fn experts_of(config: &ModelConfig) -> &Experts {
    let experts = config.experts.as_ref();
    experts.expect("only mixtures of experts have these keys")
}

/// Returns the sizes of latent attention of a model whose architecture has keys for them.
fn latent_of(config: &ModelConfig) -> LatentAttention {
    config.latent.expect("only latent attention has these keys")
}

/// Converts a value to JSON; an array of equal values, one per layer, to that value.
fn to_json(value: &Value) -> Option<Json> {
    Some(match value {
        Value::Unsigned(number) => json!(number),
        Value::Signed(number) => json!(number),
        Value::Float(number) => json!(number),
        Value::Bool(flag) => json!(flag),
        Value::Text(text) => json!(text),
        Value::Array(items) => {
            let first = to_json(items.first()?)?;
            let all = items
                .iter()
                .all(|item| to_json(item).as_ref() == Some(&first));
            all.then_some(first)?
        }
    })
}

/// Converts the metadata of `file` to a `config.json`.
pub(super) fn configuration(
    file: &GgufFile,
    architecture: &Architecture,
) -> Result<Json, ModelError> {
    let mut config = Map::new();
    config.insert(
        "architectures".to_owned(),
        json!([architecture.hugging_face]),
    );
    let fixed = (architecture.fixed)(file.is_powerinfer());
    config.extend(fixed.as_object().cloned().unwrap_or_default());
    let prefix = format!("{}.", architecture.name);
    for (key, name) in architecture.all_keys() {
        let Some(value) = file.value(&format!("{prefix}{key}")) else {
            continue;
        };
        let value = to_json(value).ok_or_else(|| {
            let reason = format!("`{prefix}{key}` differs from layer to layer");
            bad(file, format!("{reason}, which is not supported"))
        })?;
        config.insert((*name).to_owned(), value);
    }
    check_keys(file, architecture, &prefix)?;

    // Settings that follow from the tensors.
    let has = |name: &str| file.shape(name).is_some();
    config.insert(
        "tie_word_embeddings".to_owned(),
        json!(!has("output.weight")),
    );
    if let Some([vocabulary, _]) = file.shape("token_embd.weight").as_deref() {
        config.insert("vocab_size".to_owned(), json!(vocabulary));
    }
    // Older files do not state the sizes of experts.
    for (key, tensor) in [
        ("moe_intermediate_size", "blk.0.ffn_gate_exps.weight"),
        (
            "shared_expert_intermediate_size",
            "blk.0.ffn_gate_shexp.weight",
        ),
    ] {
        let is_read = architecture.all_keys().any(|(_, name)| *name == key);
        if let (true, Some([.., neurons, _])) = (is_read, file.shape(tensor).as_deref()) {
            config.entry(key).or_insert(json!(neurons));
        }
    }
    let attention_bias = has("blk.0.attn_q.bias") || has("blk.0.attn_qkv.bias");
    match architecture.name {
        "llama" => {
            config.insert("attention_bias".to_owned(), json!(attention_bias));
            config.insert("mlp_bias".to_owned(), json!(has("blk.0.ffn_up.bias")));
        }
        "qwen2moe" => {
            config.insert("qkv_bias".to_owned(), json!(attention_bias));
        }
        "qwen3" | "qwen3moe" | "olmoe" | "gemma" | "gemma2" | "gemma3" | "olmo2" | "command-r" => {
            config.insert("attention_bias".to_owned(), json!(attention_bias));
        }
        "arcee" | "nemotron" | "smollm3" | "granite" | "minicpm" => {
            config.insert("attention_bias".to_owned(), json!(attention_bias));
            config.insert("mlp_bias".to_owned(), json!(has("blk.0.ffn_up.bias")));
        }
        "deepseek2" => latent_settings(file, &mut config),
        "stablelm" => {
            config.insert("use_qkv_bias".to_owned(), json!(attention_bias));
            config.insert(
                "qk_layernorm".to_owned(),
                json!(has("blk.0.attn_q_norm.weight")),
            );
            if !has("blk.0.ffn_norm.weight") {
                config.insert("use_parallel_residual".to_owned(), json!(true));
            }
        }
        "starcoder2" => {
            config.insert("use_bias".to_owned(), json!(attention_bias));
        }
        "starcoder" => {
            let heads = file.value("starcoder.attention.head_count_kv");
            let heads = heads.and_then(Value::as_u64).unwrap_or(1);
            config.insert("multi_query".to_owned(), json!(heads == 1));
        }
        "falcon" => {
            // Falcon 7B and 40B differ in this norm; their fused rows are stored alike in GGUF.
            let norms = if has("blk.0.attn_norm_2.weight") {
                2
            } else {
                1
            };
            config.insert("num_ln_in_parallel_attn".to_owned(), json!(norms));
        }
        _ => {}
    }
    multipliers(file, architecture, &mut config);
    rotary_settings(file, architecture, &mut config)?;
    if let Some(id) = file
        .value("tokenizer.ggml.eos_token_id")
        .and_then(Value::as_u64)
    {
        config.insert("eos_token_id".to_owned(), json!(id));
    }
    Ok(Json::Object(config))
}

/// Adds the settings of latent attention and of the router.
fn latent_settings(file: &GgufFile, config: &mut Map<String, Json>) {
    let number = |key: &str| {
        let value = file.value(&format!("deepseek2.{key}"));
        value.and_then(Value::as_u64)
    };
    // In newer files, the sizes without `_mla` are those of the KV cache.
    let size = |key: &str| {
        number(&format!("attention.{key}_mla")).or_else(|| number(&format!("attention.{key}")))
    };
    let rotary = number("rope.dimension_count").unwrap_or(0);
    if let Some(size) = size("key_length") {
        let size = size.saturating_sub(rotary);
        config.insert("qk_nope_head_dim".to_owned(), json!(size));
    }
    if let Some(size) = size("value_length") {
        config.insert("v_head_dim".to_owned(), json!(size));
    }
}

/// Adds multipliers to `config`, converted to the form that `config.json` uses.
fn multipliers(file: &GgufFile, architecture: &Architecture, config: &mut Map<String, Json>) {
    let number = |key: &str| {
        let value = file.value(&format!("{}.{key}", architecture.name));
        value
            .and_then(Value::as_f64)
            .filter(|number| *number != 0.0)
    };
    let size = |key: &str| config.get(key).and_then(Json::as_f64).unwrap_or(1.0);
    let (hidden, layers) = (size("hidden_size"), size("num_hidden_layers"));
    let head = match config.get("head_dim").and_then(Json::as_f64) {
        Some(head) => head,
        None => hidden / size("num_attention_heads"),
    };
    let mut set = |key: &str, value: f64| config.insert(key.to_owned(), json!(value));
    match architecture.name {
        // Early files state none of them.
        "minicpm" => {
            set("scale_emb", number("embedding_scale").unwrap_or(12.0));
            let residual = number("residual_scale").map(|scale| scale * layers.sqrt());
            set("scale_depth", residual.unwrap_or(1.4));
            let base = number("logit_scale").map(|scale| hidden / scale);
            set("dim_model_base", base.unwrap_or(256.0));
        }
        "granite" => {
            let scale = number("attention.scale").unwrap_or(1.0 / head.sqrt());
            set("attention_multiplier", scale);
        }
        // The largest models divide scores by the root of another number, which files do not state.
        "gemma2" | "gemma3" => {
            let heads = size_of_heads(file, architecture);
            let largest = if architecture.name == "gemma2" {
                46.0
            } else {
                62.0
            };
            let scalar = if layers == largest {
                hidden / heads
            } else {
                head
            };
            set("query_pre_attn_scalar", scalar);
        }
        _ => {}
    }
}

/// Number of query heads.
fn size_of_heads(file: &GgufFile, architecture: &Architecture) -> f64 {
    let value = file.value(&format!("{}.attention.head_count", architecture.name));
    value.and_then(Value::as_f64).unwrap_or(1.0)
}

/// Checks that every key of the architecture is read: others may change what is computed.
fn check_keys(
    file: &GgufFile,
    architecture: &Architecture,
    prefix: &str,
) -> Result<(), ModelError> {
    for (key, value) in file.entries() {
        let Some(rest) = key.strip_prefix(prefix) else {
            continue;
        };
        let mut mapped = architecture.all_keys();
        let neutral = match value {
            // One group of experts, and the softmax of routers, are what other files do not state.
            Value::Unsigned(1) if rest.starts_with("expert_group_") => true,
            Value::Unsigned(1)
                if rest == "expert_gating_func" && architecture.name == "deepseek2" =>
            {
                true
            }
            Value::Unsigned(0) | Value::Signed(0) | Value::Bool(false) => true,
            Value::Float(number) => *number == 0.0,
            _ => false,
        };
        if !neutral && !OTHER_KEYS.contains(&rest) && !mapped.any(|(known, _)| *known == rest) {
            return Err(ModelError::UnknownKey {
                path: file.path().to_owned(),
                key: key.to_owned(),
                value: to_json(value).unwrap_or_default().to_string(),
            });
        }
    }
    Ok(())
}

/// Converts the rotary settings.
fn rotary_settings(
    file: &GgufFile,
    architecture: &Architecture,
    config: &mut Map<String, Json>,
) -> Result<(), ModelError> {
    let value = |key: &str| file.value(&format!("{}.{key}", architecture.name));
    let number = |key: &str| value(key).and_then(Value::as_f64);
    let size = |key: &str| config.get(key).and_then(Json::as_f64);
    let shared = size("hidden_size").zip(size("num_attention_heads"));
    let head_size = number("attention.key_length").or(shared.map(|(hidden, heads)| hidden / heads));
    let head_size = head_size.unwrap_or(0.0);
    let is_latent = architecture.name == "deepseek2";
    if let Some(values) =
        number("attention.value_length").filter(|values| *values != head_size && !is_latent)
    {
        let reason = format!("keys have {head_size} and values {values} elements per head");
        return Err(bad(file, format!("{reason}, which is not supported")));
    }
    let share = number("rope.dimension_count").map_or(1.0, |rotated| rotated / head_size);
    match architecture.name {
        "gptneox" => drop(config.insert("rotary_pct".to_owned(), json!(share))),
        "phi2" | "phi3" | "nemotron" | "stablelm" => {
            config.insert("partial_rotary_factor".to_owned(), json!(share));
        }
        "opt" | "gpt2" | "starcoder" | "deepseek2" => {}
        _ if share == 1.0 => {}
        _ => {
            let reason = format!("only {share} of each head is rotated");
            return Err(bad(
                file,
                format!("{reason}, which is not supported for its architecture"),
            ));
        }
    }
    let kind = value("rope.scaling.type").and_then(Value::as_text);
    let factor = number("rope.scaling.factor").or(number("rope.scale_linear"));
    let original = || value("rope.scaling.original_context_length").and_then(Value::as_u64);
    // llama.cpp uses this multiplier for both `mscale` keys; files of other architectures do not have it.
    let log_multiplier = number("rope.scaling.yarn_log_multiplier").map(|scale| 10.0 * scale);
    let scaling = if file.shape(ROPE_DIVISORS).is_some() {
        json!({ "rope_type": rotary::DIVISORS, "divisors": file.read(ROPE_DIVISORS)? })
    } else if file.shape(SHORT_DIVISORS).is_some() {
        json!({
            "rope_type": "longrope",
            "short_factor": file.read(SHORT_DIVISORS)?,
            "attention_factor": number("rope.scaling.attn_factor"),
            "original_max_position_embeddings": original(),
        })
    } else {
        match (kind, factor) {
            (Some("none"), _) | (None, None) => return Ok(()),
            (None, factor) => json!({ "rope_type": "linear", "factor": factor }),
            (Some(kind), factor) => json!({
                "rope_type": kind,
                "factor": factor,
                "attention_factor": number("rope.scaling.attn_factor"),
                "mscale": log_multiplier,
                "mscale_all_dim": log_multiplier,
                "beta_fast": number("rope.scaling.yarn_beta_fast"),
                "beta_slow": number("rope.scaling.yarn_beta_slow"),
                "original_max_position_embeddings": original(),
                // gpt-oss does not round the ramp; its files do not state this.
                "truncate": (architecture.name == "gpt-oss").then_some(false),
            }),
        }
    };
    config.insert("rope_scaling".to_owned(), scaling);
    Ok(())
}
