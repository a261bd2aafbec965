//! `config.json`, read into what the forward pass needs to know.

use std::path::Path;

use serde::Deserialize;

use crate::{LayerWeight, ModelError, Weight};

/// The nonlinearity of the FFN's gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// `max(0, x)`: exactly zero for a silent neuron.
    Relu,
    /// `x / (1 + e^−x)`: small, never exactly zero.
    Silu,
}

impl Activation {
    /// The function's value at `x`.
    #[inline]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Self::Relu => x.max(0.0),
            Self::Silu => x / (1.0 + (-x).exp()),
        }
    }

    /// Whether a silent neuron contributes exactly nothing, so that skipping it is exact.
    pub fn has_exact_zeros(self) -> bool {
        self == Self::Relu
    }
}

/// Sizes and constants of a decoder of the Llama family.
#[derive(Debug, Clone, PartialEq, serde::Serialize, Deserialize)]
pub struct ModelConfig {
    /// Numbers per token between layers (d_model).
    pub hidden_size: usize,
    /// Transformer layers.
    pub layer_count: usize,
    /// Query heads.
    pub head_count: usize,
    /// Key and value heads; divides `head_count`.
    pub kv_head_count: usize,
    /// Numbers per head.
    pub head_size: usize,
    /// FFN neurons per layer (d_ff).
    pub ffn_size: usize,
    /// Tokens in the vocabulary.
    pub vocabulary_size: usize,
    /// Longest sequence the positions are made for.
    pub context_length: usize,
    /// Nonlinearity of the gate.
    pub activation: Activation,
    /// ε of the RMS norms.
    pub norm_epsilon: f32,
    /// Base of the rotary frequencies (θ).
    pub rope_theta: f32,
    /// The output head is the embedding matrix.
    pub tied_embeddings: bool,
    /// Tokens that end a text.
    pub end_of_text: Vec<u32>,
}

/// The keys as they stand in the file; absent ones get the family's default.
#[derive(Deserialize)]
struct RawConfig {
    architectures: Option<Vec<String>>,
    hidden_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    intermediate_size: Option<usize>,
    vocab_size: Option<usize>,
    max_position_embeddings: Option<usize>,
    hidden_act: Option<String>,
    rms_norm_eps: Option<f32>,
    rope_theta: Option<f32>,
    rope_scaling: Option<serde_json::Value>,
    rope_parameters: Option<RopeParameters>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    sliding_window: Option<usize>,
    eos_token_id: Option<OneOrMany>,
}

/// The newer layout of the rotary settings.
#[derive(Deserialize)]
struct RopeParameters {
    rope_theta: Option<f32>,
    rope_type: Option<String>,
}

/// A token id, or a list of them.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl From<OneOrMany> for Vec<u32> {
    fn from(value: OneOrMany) -> Self {
        match value {
            OneOrMany::One(one) => vec![one],
            OneOrMany::Many(many) => many,
        }
    }
}

impl ModelConfig {
    /// Parses `config.json`; `path` is for messages.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, ModelError> {
        let raw: RawConfig = serde_json::from_slice(bytes).map_err(|source| {
            powerinfer_artifact::ArtifactError::NotJson {
                path: path.to_owned(),
                source,
            }
        })?;
        let unsupported = |key: &str, value: String, supported: &str| ModelError::Unsupported {
            path: path.to_owned(),
            key: format!("`{key}`"),
            value: format!("`{value}`"),
            supported: supported.to_owned(),
        };
        let bad = |reason: String| ModelError::BadConfig {
            path: path.to_owned(),
            reason,
        };
        let need = |key: &str, value: Option<usize>| match value {
            None => Err(bad(format!("the key `{key}` is missing"))),
            Some(0) => Err(bad(format!("`{key}` is 0"))),
            // No model has a dimension of a billion; a product of such numbers would overflow.
            Some(value) if value > 1 << 30 => {
                Err(bad(format!("`{key}` is {value}, which no model has")))
            }
            Some(value) => Ok(value),
        };

        let architecture = raw.architectures.unwrap_or_default().join(", ");
        if architecture != "LlamaForCausalLM" {
            return Err(unsupported(
                "architectures",
                architecture,
                "supported: LlamaForCausalLM",
            ));
        }
        let activation = match raw.hidden_act.as_deref() {
            Some("relu") => Activation::Relu,
            None | Some("silu" | "swish") => Activation::Silu,
            Some(other) => {
                return Err(unsupported(
                    "hidden_act",
                    other.to_owned(),
                    "supported: relu, silu",
                ));
            }
        };
        let scaling = raw
            .rope_scaling
            .filter(|value| !value.is_null())
            .map(|value| value.to_string());
        let rope_type = raw
            .rope_parameters
            .as_ref()
            .and_then(|rope| rope.rope_type.clone());
        if let Some(scaling) = scaling.or(rope_type.filter(|kind| kind != "default")) {
            return Err(unsupported("rope_scaling", scaling, "supported: none"));
        }
        for (key, value) in [
            ("attention_bias", raw.attention_bias),
            ("mlp_bias", raw.mlp_bias),
        ] {
            if value == Some(true) {
                return Err(unsupported(key, "true".to_owned(), "supported: false"));
            }
        }
        if let Some(window) = raw.sliding_window {
            return Err(unsupported(
                "sliding_window",
                window.to_string(),
                "supported: null",
            ));
        }

        let hidden_size = need("hidden_size", raw.hidden_size)?;
        let head_count = need("num_attention_heads", raw.num_attention_heads)?;
        let kv_head_count = raw.num_key_value_heads.unwrap_or(head_count);
        let head_size = match raw.head_dim {
            Some(size) => need("head_dim", Some(size))?,
            None if hidden_size % head_count == 0 => hidden_size / head_count,
            None => {
                return Err(bad(format!(
                    "`hidden_size` {hidden_size} is not a multiple of `num_attention_heads` {head_count}"
                )));
            }
        };
        if kv_head_count == 0 || head_count % kv_head_count != 0 {
            return Err(bad(format!(
                "`num_key_value_heads` {kv_head_count} does not divide `num_attention_heads` {head_count}"
            )));
        }
        if head_size % 2 != 0 {
            return Err(bad(format!(
                "a head of {head_size} numbers cannot be rotated in pairs"
            )));
        }
        let norm_epsilon = raw.rms_norm_eps.unwrap_or(1e-6);
        let rope_theta = raw
            .rope_parameters
            .and_then(|rope| rope.rope_theta)
            .or(raw.rope_theta)
            .unwrap_or(10_000.0);
        if !(norm_epsilon.is_finite()
            && norm_epsilon >= 0.0
            && rope_theta.is_finite()
            && rope_theta > 0.0)
        {
            return Err(bad(format!(
                "`rms_norm_eps` {norm_epsilon} or `rope_theta` {rope_theta} is out of range"
            )));
        }
        Ok(Self {
            hidden_size,
            layer_count: need("num_hidden_layers", raw.num_hidden_layers)?,
            head_count,
            kv_head_count,
            head_size,
            ffn_size: need("intermediate_size", raw.intermediate_size)?,
            vocabulary_size: need("vocab_size", raw.vocab_size)?,
            context_length: need(
                "max_position_embeddings",
                raw.max_position_embeddings.or(Some(2048)),
            )?,
            activation,
            norm_epsilon,
            rope_theta,
            tied_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            end_of_text: raw.eos_token_id.map(Vec::from).unwrap_or_default(),
        })
    }

    /// Rows and columns of a weight; a norm has one dimension.
    pub fn shape(&self, weight: Weight) -> Vec<usize> {
        let queries = self.head_count * self.head_size;
        let keys = self.kv_head_count * self.head_size;
        match weight {
            Weight::Embedding | Weight::Head => vec![self.vocabulary_size, self.hidden_size],
            Weight::FinalNorm => vec![self.hidden_size],
            Weight::Layer(_, weight) => match weight {
                LayerWeight::AttentionNorm | LayerWeight::FfnNorm => vec![self.hidden_size],
                LayerWeight::Query => vec![queries, self.hidden_size],
                LayerWeight::Key | LayerWeight::Value => vec![keys, self.hidden_size],
                LayerWeight::Output => vec![self.hidden_size, queries],
                LayerWeight::Gate | LayerWeight::Up => vec![self.ffn_size, self.hidden_size],
                LayerWeight::Down => vec![self.hidden_size, self.ffn_size],
            },
        }
    }

    /// Every weight of the model, in the order of the forward pass.
    pub fn weights(&self) -> Vec<Weight> {
        let mut weights = vec![Weight::Embedding];
        for layer in 0..self.layer_count {
            weights.extend(LayerWeight::ALL.map(|weight| Weight::Layer(layer, weight)));
        }
        weights.push(Weight::FinalNorm);
        if !self.tied_embeddings {
            weights.push(Weight::Head);
        }
        weights
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ModelConfig, ModelError> {
        ModelConfig::parse(text.as_bytes(), Path::new("config.json"))
    }

    const PLAIN: &str = r#"{"architectures":["LlamaForCausalLM"],"hidden_size":64,"num_hidden_layers":2,
        "num_attention_heads":4,"intermediate_size":172,"vocab_size":640,"hidden_act":"relu"KEYS}"#;

    #[test]
    fn absent_keys_take_the_defaults_of_the_family() {
        let config = parse(&PLAIN.replace("KEYS", "")).unwrap();
        assert_eq!(
            (
                config.kv_head_count,
                config.head_size,
                config.tied_embeddings
            ),
            (4, 16, false)
        );
        assert_eq!((config.rope_theta, config.norm_epsilon), (10_000.0, 1e-6));
    }

    #[test]
    fn both_layouts_of_the_rotary_settings_are_read() {
        for keys in [
            r#","rope_theta":5e5"#,
            r#","rope_parameters":{"rope_theta":5e5,"rope_type":"default"}"#,
        ] {
            assert_eq!(parse(&PLAIN.replace("KEYS", keys)).unwrap().rope_theta, 5e5);
        }
    }

    #[test]
    fn what_changes_the_mathematics_is_refused_by_name() {
        for (keys, named) in [
            (
                r#","rope_scaling":{"rope_type":"llama3","factor":8}"#,
                "rope_scaling",
            ),
            (r#","rope_parameters":{"rope_type":"yarn"}"#, "rope_scaling"),
            (r#","attention_bias":true"#, "attention_bias"),
            (r#","mlp_bias":true"#, "mlp_bias"),
            (r#","sliding_window":128"#, "sliding_window"),
            (r#","num_key_value_heads":3"#, "num_key_value_heads"),
            (r#","num_key_value_heads":0"#, "num_key_value_heads"),
            (r#","head_dim":15"#, "rotated in pairs"),
            (
                r#","max_position_embeddings":99999999999"#,
                "max_position_embeddings",
            ),
        ] {
            let message = parse(&PLAIN.replace("KEYS", keys)).unwrap_err().to_string();
            assert!(message.contains(named), "{message}");
        }
        let message = parse(&PLAIN.replace("LlamaFor", "MambaFor").replace("KEYS", ""))
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("MambaForCausalLM") && message.contains("LlamaForCausalLM"),
            "{message}"
        );
    }
}
