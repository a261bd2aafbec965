//! Shapes of synthetic checkpoints: published models by name, or any configuration.

use std::path::Path;

use powerinfer_artifact::{ArtifactError, json};
use powerinfer_model::ModelConfig;
use serde_json::{Map, Value, json};

use crate::SynthError;

/// Configuration of a checkpoint to make.
#[derive(Debug, Clone)]
pub struct Shape {
    /// Name of the model it resembles.
    pub name: String,
    config: Map<String, Value>,
}

/// Built-in shape: name and `config.json`.
type Named = (&'static str, fn() -> Value);

/// Built-in shapes of mixtures of experts. Except for SmallThinker, the activation is SiLU, so all neurons of a selected expert are
/// active.
pub const EXPERT_SHAPES: [Named; 7] = [
    ("mixtral-8x7b", || {
        json!({
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
            "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8,
            "num_experts_per_tok": 2, "vocab_size": 32000, "hidden_act": "silu",
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "sliding_window": null, "tie_word_embeddings": false,
        })
    }),
    ("qwen3-30b-a3b", || {
        json!({
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
            "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
            "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
            "norm_topk_prob": true, "vocab_size": 151_936, "hidden_act": "silu",
            "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "tie_word_embeddings": false,
        })
    }),
    ("gpt-oss-20b", || gpt_oss(24, 32)),
    ("gpt-oss-120b", || gpt_oss(36, 128)),
    ("olmoe-1b-7b", || {
        json!({
            "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe",
            "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
            "num_key_value_heads": 16, "intermediate_size": 1024, "num_experts": 64,
            "num_experts_per_tok": 8, "norm_topk_prob": false, "vocab_size": 50304,
            "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": false,
        })
    }),
    ("smallthinker-21b", || {
        json!({
            "architectures": ["SmallThinkerForCausalLM"], "model_type": "smallthinker",
            "hidden_size": 2560, "num_hidden_layers": 52, "num_attention_heads": 28,
            "num_key_value_heads": 4, "head_dim": 128, "moe_ffn_hidden_size": 768,
            "moe_num_primary_experts": 64, "moe_num_active_primary_experts": 6,
            "moe_primary_router_apply_softmax": false, "vocab_size": 151_936,
            "max_position_embeddings": 16384, "rms_norm_eps": 1e-6, "rope_theta": 1.5e6,
            "tie_word_embeddings": false,
        })
    }),
    // Without YaRN, so the context is the original one, which YaRN would extend.
    ("deepseek-v2-lite", || {
        json!({
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
            "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
            "num_key_value_heads": 16, "q_lora_rank": null, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
            "norm_topk_prob": false, "routed_scaling_factor": 1.0, "topk_method": "greedy",
            "vocab_size": 102_400, "hidden_act": "silu", "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": false,
        })
    }),
];

/// Built-in shapes of dense models. Models whose activation function is never exactly zero have a ReLU instead, like the
/// published ReLU versions of these models.
pub const SHAPES: [Named; 17] = [
    ("llama-1b", || llama(2048, 22, 32, 4, 5632, 32000)),
    ("llama-7b", || llama(4096, 32, 32, 32, 11008, 32000)),
    ("llama-13b", || llama(5120, 40, 40, 40, 13824, 32000)),
    ("llama-30b", || llama(6656, 60, 52, 52, 17920, 32000)),
    ("llama-70b", || llama(8192, 80, 64, 8, 28672, 32000)),
    ("llama3-8b", || llama(4096, 32, 32, 8, 14336, 128_256)),
    ("llama3-70b", || llama(8192, 80, 64, 8, 28672, 128_256)),
    ("mistral-7b", || mistral("MistralForCausalLM", "mistral")),
    ("bamboo-7b", || mistral("BambooForCausalLM", "bamboo")),
    ("opt-1.3b", || opt(2048, 24, 32)),
    ("opt-6.7b", || opt(4096, 32, 32)),
    ("opt-13b", || opt(5120, 40, 40)),
    ("opt-30b", || opt(7168, 48, 56)),
    ("opt-66b", || opt(9216, 64, 72)),
    ("opt-175b", || opt(12288, 96, 96)),
    ("falcon-7b", || falcon(4544, 32, 71, 1, false)),
    ("falcon-40b", || falcon(8192, 60, 128, 8, true)),
];

fn gpt_oss(layers: usize, experts: usize) -> Value {
    json!({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": true,
        "hidden_size": 2880, "num_hidden_layers": layers, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
        "num_local_experts": experts, "num_experts_per_tok": 4, "vocab_size": 201_088,
        "hidden_act": "silu", "swiglu_limit": 7.0, "sliding_window": 128,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1.5e5,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 4096, "truncate": false,
        },
        "tie_word_embeddings": false,
    })
}

fn llama(
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    ffn: usize,
    vocabulary: usize,
) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocabulary,
        "hidden_act": "relu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false,
    })
}

fn mistral(architecture: &str, model_type: &str) -> Value {
    json!({
        "architectures": [architecture], "model_type": model_type,
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000,
        "hidden_act": "relu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "sliding_window": null, "tie_word_embeddings": false,
    })
}

fn opt(hidden: usize, layers: usize, heads: usize) -> Value {
    json!({
        "architectures": ["OPTForCausalLM"], "model_type": "opt",
        "hidden_size": hidden, "word_embed_proj_dim": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "ffn_dim": 4 * hidden, "vocab_size": 50272,
        "activation_function": "relu", "max_position_embeddings": 2048,
        "do_layer_norm_before": true, "tie_word_embeddings": true,
    })
}

fn falcon(hidden: usize, layers: usize, heads: usize, kv_heads: usize, new: bool) -> Value {
    json!({
        "architectures": ["FalconForCausalLM"], "model_type": "falcon",
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_kv_heads": kv_heads, "ffn_hidden_size": 4 * hidden, "vocab_size": 65024,
        "activation": "relu", "new_decoder_architecture": new, "multi_query": true,
        "parallel_attn": true, "bias": false, "alibi": false, "tie_word_embeddings": true,
    })
}

/// All built-in shapes.
fn all() -> impl Iterator<Item = Named> {
    SHAPES.into_iter().chain(EXPERT_SHAPES)
}

impl Shape {
    /// Finds the built-in shape `name`, or reads a `config.json` if `name` is its path or its folder.
    ///
    /// # Errors
    ///
    /// There is no such shape or folder, or its `config.json` cannot be read.
    pub fn find(name: &str) -> Result<Self, SynthError> {
        let known = all().find(|(known, _)| *known == name);
        let given = Path::new(name);
        // The path of the `config.json` itself is also accepted.
        let folder = match given.parent() {
            Some(parent) if given.ends_with("config.json") && given.is_file() => parent,
            _ => given,
        };
        let config = match known {
            Some((_, config)) => config(),
            None if folder.is_dir() => {
                let path = folder.join("config.json");
                let bytes = std::fs::read(&path).map_err(ArtifactError::read(&path))?;
                json::from_slice(&bytes)
                    .map_err(|source| ArtifactError::NotJson { path, source })?
            }
            None => Value::Null,
        };
        match config {
            Value::Object(config) => Ok(Self {
                name: folder.file_name().map_or_else(
                    || name.to_owned(),
                    |name| name.to_string_lossy().into_owned(),
                ),
                config,
            }),
            _ => Err(SynthError::UnknownShape {
                name: name.to_owned(),
                known: all().map(|(known, _)| known).collect::<Vec<_>>().join(", "),
            }),
        }
    }

    /// Sets the number of layers.
    #[must_use]
    pub fn with_layers(mut self, layers: usize) -> Self {
        let keys = ["num_hidden_layers", "n_layer"];
        let known = keys.into_iter().find(|key| self.config.contains_key(*key));
        let key = known.unwrap_or(keys[0]);
        self.config.insert(key.to_owned(), layers.into());
        self
    }

    /// Serialises the `config.json`, with `marks` that identify the checkpoint as synthetic.
    pub(crate) fn file(&self, dtype: &str, end_of_text: u32, marks: Value) -> Vec<u8> {
        let mut config = self.config.clone();
        config.insert("torch_dtype".to_owned(), dtype.into());
        config.remove("dtype");
        config.insert("bos_token_id".to_owned(), Value::Null);
        config.insert("eos_token_id".to_owned(), end_of_text.into());
        config.insert("powerinfer_synthetic".to_owned(), marks);
        let mut bytes = serde_json::to_vec_pretty(&config).expect("a map of JSON is JSON");
        bytes.push(b'\n');
        bytes
    }

    /// Parses the configuration.
    ///
    /// # Errors
    ///
    /// The model is not supported.
    #[expect(clippy::missing_panics_doc, reason = "a JSON map is valid JSON")]
    pub fn describe(&self) -> Result<ModelConfig, SynthError> {
        let bytes = serde_json::to_vec(&self.config).expect("a JSON map is valid JSON");
        Ok(ModelConfig::parse(&bytes, Path::new("config.json"))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_counts_match_the_names_of_shapes() {
        for (name, _) in SHAPES {
            let config = Shape::find(name).unwrap().describe().unwrap();
            let elements = |weight| config.shape(weight).iter().product::<usize>();
            let parameters: usize = config.weights().into_iter().map(elements).sum();
            let (_, stated) = name.rsplit_once('-').unwrap();
            let stated: f64 = stated.trim_end_matches('b').parse().unwrap();
            let found = parameters as f64 / 1e9;
            assert!(
                (found / stated - 1.0).abs() < 0.17,
                "{name}: {found:.2} billion"
            );
            assert!(config.activation.has_exact_zeros());
        }
    }

    #[test]
    fn mixtures_have_the_published_numbers_of_parameters() {
        // Of gpt-oss, 3.6 and 5.1 billion are published as active, without the embedding of 0.6 billion.
        let published = [
            [46.7, 12.9],
            [30.5, 3.3],
            [20.9, 4.2],
            [116.8, 5.7],
            [6.9, 1.3],
            [21.5, 3.7],
            [15.7, 2.7],
        ];
        for ((name, _), [all, active]) in EXPERT_SHAPES.into_iter().zip(published) {
            let config = Shape::find(name).unwrap().describe().unwrap();
            let found = config.parameters() as f64 / 1e9;
            assert!((found / all - 1.0).abs() < 0.02, "{name}: {found}");
            // Published numbers include the embedding unless it is also the head.
            let embedding = config.vocabulary_size * config.embedding_size;
            let embedding = if config.tied_embeddings { 0 } else { embedding };
            let found = (config.parameters_per_token() + embedding as u64) as f64 / 1e9;
            assert!((found / active - 1.0).abs() < 0.1, "{name}: {found} active");
        }
    }

    #[test]
    fn the_number_of_layers_can_be_reduced() {
        let shape = Shape::find("falcon-40b").unwrap().with_layers(2);
        assert_eq!(shape.describe().unwrap().layer_count, 2);
        assert!(
            Shape::find("gpt-5")
                .unwrap_err()
                .to_string()
                .contains("llama-7b")
        );
    }
}
