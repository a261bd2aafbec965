//! Shapes to make checkpoints of: published models by name, or any configuration.

use std::path::Path;

use powerinfer_artifact::ArtifactError;
use powerinfer_model::ModelConfig;
use serde_json::{Map, Value, json};

use crate::SynthError;

/// A configuration that a checkpoint will have.
#[derive(Debug, Clone)]
pub struct Shape {
    /// What it is like, for people.
    pub name: String,
    config: Map<String, Value>,
}

/// A named shape, and the keys that tell it from its family's others.
type Named = (&'static str, fn() -> Value);

/// The shapes known by name. Where the published model's activation is never exactly zero, the
/// stand-in has a ReLU, as the ReLU versions of these models have.
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

impl Shape {
    /// The shape called `name`, or that of the `config.json` in the folder of that name.
    pub fn find(name: &str) -> Result<Self, SynthError> {
        let known = SHAPES.iter().find(|(known, _)| *known == name);
        let folder = Path::new(name);
        let config = match known {
            Some((_, config)) => config(),
            None if folder.is_dir() => {
                let path = folder.join("config.json");
                let bytes = std::fs::read(&path).map_err(ArtifactError::read(&path))?;
                serde_json::from_slice(&bytes)
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
                known: SHAPES.map(|(known, _)| known).join(", "),
            }),
        }
    }

    /// The same with another number of layers.
    #[must_use]
    pub fn with_layers(mut self, layers: usize) -> Self {
        let keys = ["num_hidden_layers", "n_layer"];
        let known = keys.into_iter().find(|key| self.config.contains_key(*key));
        let key = known.unwrap_or(keys[0]);
        self.config.insert(key.to_owned(), layers.into());
        self
    }

    /// The configuration file, with `marks` in it.
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

    /// The configuration as models are described here.
    pub fn describe(&self) -> Result<ModelConfig, SynthError> {
        let bytes = serde_json::to_vec(&self.config).expect("a map of JSON is JSON");
        Ok(ModelConfig::parse(&bytes, Path::new("config.json"))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_is_a_model_of_about_its_name() {
        for (name, _) in SHAPES {
            let config = Shape::find(name).unwrap().describe().unwrap();
            let numbers = |weight| config.shape(weight).iter().product::<usize>();
            let parameters: usize = config.weights().into_iter().map(numbers).sum();
            let (_, said) = name.rsplit_once('-').unwrap();
            let said: f64 = said.trim_end_matches('b').parse().unwrap();
            let found = parameters as f64 / 1e9;
            assert!(
                (found / said - 1.0).abs() < 0.17,
                "{name}: {found:.2} billion"
            );
            assert!(config.activation.has_exact_zeros());
        }
    }

    #[test]
    fn layers_can_be_left_out() {
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
