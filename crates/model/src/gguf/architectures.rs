//! Architectures of GGUF, and their counterparts in `config.json`.

use serde_json::{Value as Json, json};

use super::{
    file::{GgufFile, bad},
    foreign,
    value::Value,
    writer::Dialect,
};
use crate::{ModelError, kinds};

/// GGUF architecture and its counterpart in `config.json`.
pub(super) struct Architecture {
    /// `general.architecture`.
    pub(super) name: &'static str,
    /// Counterpart in `architectures`.
    pub(super) hugging_face: &'static str,
    /// Metadata keys without the architecture prefix, and the configuration key for each.
    keys: &'static [(&'static str, &'static str)],
    /// Families that are written in this architecture.
    families: &'static [&'static str],
    /// Like `keys`, for the keys of experts; empty for dense models. One `name` can have an entry of each kind.
    expert_keys: &'static [(&'static str, &'static str)],
    /// Whether queries and keys are stored for interleaved rotary pairs.
    pub(super) interleaved_rope: bool,
    /// Whether queries, keys and values are written as one tensor; both are read.
    pub(super) fused_attention: bool,
    /// Whether a file states sliding windows; llama.cpp then decides which layers have them.
    pub(super) states_windows: bool,
    /// Settings stated in no file; `powerinfer` is true for a file of the original PowerInfer.
    pub(super) fixed: fn(powerinfer: bool) -> Json,
}

impl Architecture {
    /// All metadata keys without the architecture prefix, and the configuration key for each.
    pub(super) fn all_keys(&self) -> impl Iterator<Item = &(&'static str, &'static str)> {
        COMMON.iter().chain(self.keys).chain(self.expert_keys)
    }

    /// Whether models of several activation functions have this architecture, which a file does not distinguish.
    pub(super) fn assumes_activation(&self) -> bool {
        (self.fixed)(true) != (self.fixed)(false) || self.name == "minicpm"
    }

    /// Whether programs that read a file in the `dialect` need an output head, even if it is the embedding.
    pub(super) fn needs_head(&self, dialect: Dialect) -> bool {
        match dialect {
            Dialect::Ggml => matches!(
                self.name,
                "gptneox" | "phi2" | "qwen2moe" | "olmoe" | "gpt-oss"
            ),
            Dialect::PowerInfer => matches!(self.name, "llama" | "bamboo" | "falcon"),
        }
    }
}

/// Metadata keys of all architectures, and the configuration key for each.
const COMMON: &[(&str, &str)] = &[
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("attention.head_count", "num_attention_heads"),
    ("vocab_size", "vocab_size"),
];

/// Metadata keys of Llama and its descendants.
const LLAMA: &[(&str, &str)] = &[
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("rope.freq_base", "rope_theta"),
];

/// Metadata keys of experts, and the key in Qwen's configurations for each.
const QWEN_EXPERTS: &[(&str, &str)] = &[
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    (
        "expert_shared_feed_forward_length",
        "shared_expert_intermediate_size",
    ),
];

/// Metadata keys of experts, and the key in DeepSeek's configurations for each.
const DEEPSEEK_EXPERTS: &[(&str, &str)] = &[
    ("expert_count", "n_routed_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_count", "n_shared_experts"),
    ("expert_weights_scale", "routed_scaling_factor"),
    ("leading_dense_block_count", "first_k_dense_replace"),
];

/// Properties of most architectures.
const PLAIN: Architecture = Architecture {
    name: "",
    hugging_face: "",
    keys: LLAMA,
    families: &[],
    expert_keys: &[],
    interleaved_rope: false,
    fused_attention: false,
    states_windows: false,
    fixed: |_| json!({}),
};

/// All supported architectures.
static ALL: [Architecture; 29] = [
    Architecture {
        name: "llama",
        hugging_face: "LlamaForCausalLM",
        families: &["llama", "sparse_llama", "mistral"],
        interleaved_rope: true,
        // The original PowerInfer runs Llama models with ReLU, which its files do not state.
        fixed: |powerinfer| json!({ "hidden_act": if powerinfer { "relu" } else { "silu" } }),
        ..PLAIN
    },
    Architecture {
        name: "llama",
        hugging_face: "MixtralForCausalLM",
        families: &["mixtral"],
        expert_keys: &[
            ("expert_count", "num_local_experts"),
            ("expert_used_count", "num_experts_per_tok"),
        ],
        interleaved_rope: true,
        fixed: |_| json!({ "hidden_act": "silu", "sliding_window": null }),
        ..PLAIN
    },
    Architecture {
        name: "qwen2moe",
        hugging_face: "Qwen2MoeForCausalLM",
        families: &["qwen2-moe"],
        expert_keys: QWEN_EXPERTS,
        fixed: |_| json!({ "norm_topk_prob": false }),
        ..PLAIN
    },
    Architecture {
        name: "qwen3moe",
        hugging_face: "Qwen3MoeForCausalLM",
        families: &["qwen3-moe"],
        expert_keys: QWEN_EXPERTS,
        fixed: |_| json!({ "norm_topk_prob": true }),
        ..PLAIN
    },
    Architecture {
        name: "olmoe",
        hugging_face: "OlmoeForCausalLM",
        families: &["olmoe"],
        // `feed_forward_length` is the size of an expert.
        expert_keys: &[
            ("expert_count", "num_experts"),
            ("expert_used_count", "num_experts_per_tok"),
        ],
        fixed: |_| json!({ "norm_topk_prob": false }),
        ..PLAIN
    },
    Architecture {
        name: "deepseek2",
        hugging_face: "DeepseekV2ForCausalLM",
        families: &["deepseek-v2"],
        keys: &[
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
            ("attention.q_lora_rank", "q_lora_rank"),
            ("attention.kv_lora_rank", "kv_lora_rank"),
            ("rope.dimension_count", "qk_rope_head_dim"),
            ("rope.freq_base", "rope_theta"),
        ],
        expert_keys: DEEPSEEK_EXPERTS,
        // A file states this rank only if queries are compressed.
        fixed: |_| json!({ "q_lora_rank": null }),
        ..PLAIN
    },
    Architecture {
        name: "gpt-oss",
        hugging_face: "GptOssForCausalLM",
        families: &["gpt-oss"],
        expert_keys: &[
            ("expert_count", "num_local_experts"),
            ("expert_used_count", "num_experts_per_tok"),
            ("expert_feed_forward_length", "intermediate_size"),
            ("attention.sliding_window", "sliding_window"),
        ],
        states_windows: true,
        fixed: |_| json!({ "hidden_act": "silu", "attention_bias": true }),
        ..PLAIN
    },
    Architecture {
        name: "bamboo",
        hugging_face: "BambooForCausalLM",
        families: &["bamboo"],
        interleaved_rope: true,
        fixed: |_| json!({ "hidden_act": "relu", "sliding_window": null }),
        ..PLAIN
    },
    Architecture {
        name: "qwen2",
        hugging_face: "Qwen2ForCausalLM",
        families: &["qwen2"],
        ..PLAIN
    },
    Architecture {
        name: "qwen3",
        hugging_face: "Qwen3ForCausalLM",
        families: &["qwen3"],
        ..PLAIN
    },
    Architecture {
        name: "gemma",
        hugging_face: "GemmaForCausalLM",
        families: &["gemma"],
        ..PLAIN
    },
    Architecture {
        name: "gptneox",
        hugging_face: "GPTNeoXForCausalLM",
        families: &["gpt_neox"],
        fused_attention: true,
        keys: &[
            ("feed_forward_length", "intermediate_size"),
            ("attention.layer_norm_epsilon", "layer_norm_eps"),
            ("use_parallel_residual", "use_parallel_residual"),
            ("rope.freq_base", "rotary_emb_base"),
        ],
        ..PLAIN
    },
    Architecture {
        name: "phi2",
        hugging_face: "PhiForCausalLM",
        families: &["phi"],
        keys: &[
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("attention.layer_norm_epsilon", "layer_norm_eps"),
            ("rope.freq_base", "rope_theta"),
        ],
        ..PLAIN
    },
    Architecture {
        name: "falcon",
        hugging_face: "FalconForCausalLM",
        families: &["falcon"],
        fused_attention: true,
        keys: &[
            ("feed_forward_length", "ffn_hidden_size"),
            ("attention.head_count_kv", "num_kv_heads"),
            ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
            ("rope.freq_base", "rope_theta"),
        ],
        fixed: |powerinfer| {
            json!({
                "activation": if powerinfer { "relu" } else { "gelu" },
                "new_decoder_architecture": true,
            })
        },
        ..PLAIN
    },
    Architecture {
        name: "opt",
        hugging_face: "OPTForCausalLM",
        families: &["opt", "opt_plain_norm"],
        // All OPT checkpoints have the same ε, which the family defines.
        keys: &[
            ("feed_forward_length", "ffn_dim"),
            ("attention.layer_norm_epsilon", "_layer_norm_epsilon"),
        ],
        ..PLAIN
    },
    Architecture {
        name: "gemma2",
        hugging_face: "Gemma2ForCausalLM",
        families: &["gemma2"],
        keys: &[
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("attention.key_length", "head_dim"),
            ("rope.freq_base", "rope_theta"),
            ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
            ("attention.sliding_window", "sliding_window"),
        ],
        states_windows: true,
        ..PLAIN
    },
    Architecture {
        name: "gemma3",
        hugging_face: "Gemma3ForCausalLM",
        families: &["gemma3"],
        keys: &[
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("attention.key_length", "head_dim"),
            ("rope.freq_base", "rope_theta"),
            ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
            ("final_logit_softcapping", "final_logit_softcapping"),
            ("attention.sliding_window", "sliding_window"),
            ("rope.freq_base_swa", "rope_local_base_freq"),
        ],
        states_windows: true,
        ..PLAIN
    },
    Architecture {
        name: "phi3",
        hugging_face: "Phi3ForCausalLM",
        families: &["phi3"],
        fused_attention: true,
        keys: &[
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("rope.freq_base", "rope_theta"),
            ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ],
        ..PLAIN
    },
    Architecture {
        name: "minicpm",
        hugging_face: "MiniCPMForCausalLM",
        families: &["minicpm"],
        interleaved_rope: true,
        ..PLAIN
    },
    Architecture {
        name: "arcee",
        hugging_face: "ArceeForCausalLM",
        families: &["arcee"],
        interleaved_rope: true,
        ..PLAIN
    },
    Architecture {
        name: "nemotron",
        hugging_face: "NemotronForCausalLM",
        families: &["nemotron"],
        keys: &[
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("attention.key_length", "head_dim"),
            ("rope.freq_base", "rope_theta"),
            ("attention.layer_norm_epsilon", "norm_eps"),
        ],
        ..PLAIN
    },
    Architecture {
        name: "olmo2",
        hugging_face: "Olmo2ForCausalLM",
        families: &["olmo2"],
        ..PLAIN
    },
    Architecture {
        name: "smollm3",
        hugging_face: "SmolLM3ForCausalLM",
        families: &["smollm3"],
        interleaved_rope: true,
        ..PLAIN
    },
    Architecture {
        name: "granite",
        hugging_face: "GraniteForCausalLM",
        families: &["granite"],
        keys: &[
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("attention.key_length", "head_dim"),
            ("rope.freq_base", "rope_theta"),
            ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
            ("embedding_scale", "embedding_multiplier"),
            ("residual_scale", "residual_multiplier"),
            ("logit_scale", "logits_scaling"),
        ],
        interleaved_rope: true,
        ..PLAIN
    },
    Architecture {
        name: "stablelm",
        hugging_face: "StableLmForCausalLM",
        families: &["stablelm"],
        keys: &[
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("rope.freq_base", "rope_theta"),
            ("attention.layer_norm_epsilon", "layer_norm_eps"),
            ("use_parallel_residual", "use_parallel_residual"),
        ],
        ..PLAIN
    },
    Architecture {
        name: "starcoder2",
        hugging_face: "Starcoder2ForCausalLM",
        families: &["starcoder2"],
        keys: &[
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("rope.freq_base", "rope_theta"),
            ("attention.layer_norm_epsilon", "norm_epsilon"),
        ],
        ..PLAIN
    },
    Architecture {
        name: "command-r",
        hugging_face: "CohereForCausalLM",
        families: &["cohere"],
        keys: &[
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("attention.key_length", "head_dim"),
            ("rope.freq_base", "rope_theta"),
            ("attention.layer_norm_epsilon", "layer_norm_eps"),
            ("logit_scale", "logit_scale"),
        ],
        interleaved_rope: true,
        ..PLAIN
    },
    Architecture {
        name: "gpt2",
        hugging_face: "GPT2LMHeadModel",
        families: &["gpt2"],
        fused_attention: true,
        keys: &[
            ("feed_forward_length", "n_inner"),
            ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        ],
        ..PLAIN
    },
    Architecture {
        name: "starcoder",
        hugging_face: "GPTBigCodeForCausalLM",
        families: &["gpt_bigcode"],
        fused_attention: true,
        keys: &[
            ("feed_forward_length", "n_inner"),
            ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        ],
        ..PLAIN
    },
];

/// Returns the architecture of a file.
pub(super) fn architecture(file: &GgufFile) -> Result<&'static Architecture, ModelError> {
    let name = file
        .value("general.architecture")
        .and_then(Value::as_text)
        .ok_or_else(|| bad(file, "the key `general.architecture` is missing".to_owned()))?;
    foreign::check(file, name)?;
    let experts = file.value(&format!("{name}.expert_count"));
    let experts = experts.and_then(Value::as_u64).filter(|count| *count > 0);
    let known = ALL.iter().find(|architecture| {
        architecture.name == name && architecture.expert_keys.is_empty() == experts.is_none()
    });
    known.ok_or_else(|| {
        if let Some(experts) = experts {
            let cause = format!("`{name}.expert_count` is {experts}");
            return kinds::mixture(file.path(), cause);
        }
        kinds::architecture(name, file.path()).unwrap_or_else(|| ModelError::Unsupported {
            path: file.path().to_owned(),
            key: "`general.architecture`".to_owned(),
            value: format!("`{name}`"),
            supported: format!(
                "supported: {}",
                ALL.each_ref().map(|known| known.name).join(", ")
            ),
        })
    })
}

/// Returns the architecture in which models of a family are written; `None` if llama.cpp has none.
pub(super) fn architecture_of(family: &str) -> Option<&'static Architecture> {
    ALL.iter().find(|known| known.families.contains(&family))
}
