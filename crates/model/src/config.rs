//! Model configuration: sizes, constants and structure, independent of the family.
//!
//! A [`ModelConfig`] is all that the engines know of a model. A family's description (`families/`) makes it
//! from a `config.json`, or from the metadata of a GGUF file.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{
    Activation, FfnKind, LayerWeight, ModelError, NormKind, Rotary, Weight, families,
    keys::{Keys, MAX_HEAD_SIZE},
};

/// Position encoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Positions {
    /// Rotary embedding of queries and keys.
    Rotary(Rotary),
    /// A learned vector is added to each embedding.
    Learned {
        /// Row of the embedding of position 0.
        offset: usize,
    },
    /// ALiBi: [`alibi_bias`](crate::alibi_bias) of the key's position is added to an attention score before
    /// the division by √head_size, as in Falcon.
    Alibi {
        /// One slope per head.
        slopes: Vec<f32>,
    },
}

/// Arrangement of attention, FFN and norms in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Block {
    /// `x += attention(norm(x))`, then `x += ffn(norm(x))`.
    PreNorm,
    /// `x = norm(x + attention(x))`, then `x = norm(x + ffn(x))`.
    PostNorm,
    /// `x += attention(norm(x)) + ffn(norm′(x))`.
    Parallel,
    /// `x += attention(norm(x)) + ffn(norm(x))`, with one norm for both.
    ParallelSharedNorm,
}

impl Block {
    /// Whether norms follow attention and FFN instead of preceding them.
    pub fn is_post_norm(self) -> bool {
        match self {
            Self::PostNorm => true,
            Self::PreNorm | Self::Parallel | Self::ParallelSharedNorm => false,
        }
    }

    /// Whether attention and FFN read the same hidden state.
    pub fn is_parallel(self) -> bool {
        match self {
            Self::Parallel | Self::ParallelSharedNorm => true,
            Self::PreNorm | Self::PostNorm => false,
        }
    }
}

/// Projections that have a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Biases {
    /// Query, key and value projections.
    pub query_key_value: bool,
    /// Output projection of attention.
    pub attention_output: bool,
    /// Projections of the FFN.
    pub ffn: bool,
    /// Output head.
    pub head: bool,
}

/// Configuration of a dense decoder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Name of the checkpoint's family.
    pub family: String,
    /// Elements of the hidden state (d_model).
    pub hidden_size: usize,
    /// Elements per token of the embedding; projected if different from `hidden_size`.
    pub embedding_size: usize,
    /// Factor on the embeddings.
    pub embedding_scale: f32,
    /// Number of transformer layers.
    pub layer_count: usize,
    /// Number of query heads.
    pub head_count: usize,
    /// Number of key and value heads; divides `head_count`.
    pub kv_head_count: usize,
    /// Elements per head.
    pub head_size: usize,
    /// Number of FFN neurons per layer (d_ff).
    pub ffn_size: usize,
    /// Number of tokens in the vocabulary.
    pub vocabulary_size: usize,
    /// Longest sequence that the model supports.
    pub context_length: usize,
    /// Position encoding.
    pub positions: Positions,
    /// Sliding window of each layer: the number of positions attended to, including the token's own; `None`
    /// for full attention.
    pub attention_windows: Vec<Option<usize>>,
    /// Arrangement of attention, FFN and norms.
    pub block: Block,
    /// Kind of the norms.
    pub norm: NormKind,
    /// ε of the norms.
    pub norm_epsilon: f32,
    /// Whether queries and keys are normalised per head before the position encoding.
    pub query_key_norm: bool,
    /// Whether there is a norm before the head.
    pub final_norm: bool,
    /// Kind of the FFN.
    pub ffn: FfnKind,
    /// Activation function of the gate.
    pub activation: Activation,
    /// Projections that have a bias.
    pub biases: Biases,
    /// Whether the output head is the embedding matrix.
    pub tied_embeddings: bool,
    /// Tokens that end a text (EOS).
    pub end_of_text: Vec<u32>,
}

impl ModelConfig {
    /// Parses a `config.json`; `path` is for messages.
    ///
    /// # Errors
    ///
    /// The file is not JSON, contradicts itself, or describes a model that is not supported.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, ModelError> {
        let map: serde_json::Map<String, serde_json::Value> =
            powerinfer_artifact::json::from_slice(bytes).map_err(|source| {
                powerinfer_artifact::ArtifactError::NotJson {
                    path: path.to_owned(),
                    source,
                }
            })?;
        let keys = Keys::new(path, &map);
        if let Some(quantized) = keys.object("quantization_config")? {
            let method = quantized.text("quant_method")?.unwrap_or("unnamed");
            return Err(keys.unsupported(
                "quantization_config",
                method,
                "weights in float16, bfloat16 or float32, and GGUF files",
            ));
        }
        let family = families::of(&keys)?;
        let config = (family.describe)(&keys)?;
        config.validate().map_err(|reason| keys.bad(reason))?;
        keys.finish()?;
        Ok(config)
    }

    /// Checks that sizes are within limits and do not contradict each other; returns what is wrong.
    ///
    /// # Errors
    ///
    /// Describes the first contradiction, with the keys of `config.json` that it usually comes from.
    pub fn validate(&self) -> Result<(), String> {
        let sizes = [
            ("hidden size", self.hidden_size, 1 << 30),
            ("embedding size", self.embedding_size, 1 << 30),
            ("number of layers", self.layer_count, 1 << 14),
            ("number of heads", self.head_count, 1 << 30),
            ("number of key and value heads", self.kv_head_count, 1 << 30),
            ("head size", self.head_size, MAX_HEAD_SIZE),
            ("number of FFN neurons", self.ffn_size, 1 << 30),
            ("vocabulary", self.vocabulary_size, 1 << 24),
            ("context length", self.context_length, 1 << 30),
        ];
        if let Some((what, size, _)) = sizes
            .iter()
            .find(|(_, size, most)| !(1..=*most).contains(size))
        {
            return Err(format!("the {what} is {size}, which is not supported"));
        }
        let (heads, kv_heads) = (self.head_count, self.kv_head_count);
        if !heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "{kv_heads} key and value heads (`num_key_value_heads`, `num_kv_heads`) do not divide {heads} query heads"
            ));
        }
        for (a, b, what) in [
            (heads, self.head_size, "heads"),
            (self.ffn_size, self.hidden_size, "FFN neurons"),
            (self.vocabulary_size, self.embedding_size, "embeddings"),
        ] {
            // No model has a matrix of more than 2^40 elements.
            if a.checked_mul(b).is_none_or(|product| product > 1 << 40) {
                return Err(format!(
                    "{a} {what} of {b} elements exceed the largest supported matrix"
                ));
            }
        }
        if self.attention_windows.len() != self.layer_count
            || self.attention_windows.contains(&Some(0))
        {
            return Err(format!(
                "{} sliding windows, of which none may be 0, for {} layers",
                self.attention_windows.len(),
                self.layer_count
            ));
        }
        let are_fit = match &self.positions {
            Positions::Rotary(rotary) => {
                (1..=self.head_size).contains(&rotary.width())
                    && rotary.magnitude.is_finite()
                    && rotary
                        .frequencies
                        .iter()
                        .all(|frequency| frequency.is_finite())
            }
            Positions::Alibi { slopes } => {
                slopes.len() == heads && slopes.iter().all(|slope| slope.is_finite())
            }
            Positions::Learned { offset } => *offset <= self.context_length,
        };
        if !are_fit {
            return Err(format!(
                "the position encoding does not fit {heads} heads of {} elements",
                self.head_size
            ));
        }
        if !(self.norm_epsilon.is_normal()
            && self.norm_epsilon > 0.0
            && self.embedding_scale.is_finite())
        {
            return Err(
                "the ε of the norms or the scale of the embeddings is not a usable number"
                    .to_owned(),
            );
        }
        Ok(())
    }

    /// Returns the number of parameters.
    pub fn parameters(&self) -> u64 {
        let weights = self.weights().into_iter();
        let sizes = weights.map(|weight| self.shape(weight).iter().product::<usize>() as u64);
        sizes.sum()
    }

    /// Returns rows and columns of a weight; a norm or a bias has one dimension.
    pub fn shape(&self, weight: Weight) -> Vec<usize> {
        let hidden = self.hidden_size;
        let queries = self.head_count * self.head_size;
        let keys = self.kv_head_count * self.head_size;
        match weight {
            Weight::Embedding | Weight::Head => vec![self.vocabulary_size, self.embedding_size],
            Weight::Positions => vec![self.position_rows(), hidden],
            Weight::ProjectIn => vec![hidden, self.embedding_size],
            Weight::ProjectOut => vec![self.embedding_size, hidden],
            Weight::FinalNorm | Weight::FinalNormBias => vec![hidden],
            Weight::HeadBias => vec![self.vocabulary_size],
            Weight::Layer(_, weight) => match weight {
                LayerWeight::AttentionNorm
                | LayerWeight::AttentionNormBias
                | LayerWeight::FfnNorm
                | LayerWeight::FfnNormBias
                | LayerWeight::OutputBias
                | LayerWeight::DownBias => vec![hidden],
                LayerWeight::Query => vec![queries, hidden],
                LayerWeight::QueryBias => vec![queries],
                LayerWeight::Key | LayerWeight::Value => vec![keys, hidden],
                LayerWeight::KeyBias | LayerWeight::ValueBias => vec![keys],
                LayerWeight::QueryNorm
                | LayerWeight::QueryNormBias
                | LayerWeight::KeyNorm
                | LayerWeight::KeyNormBias => vec![self.head_size],
                LayerWeight::Output => vec![hidden, queries],
                LayerWeight::Gate | LayerWeight::Up => vec![self.ffn_size, hidden],
                LayerWeight::GateBias | LayerWeight::UpBias => vec![self.ffn_size],
                LayerWeight::Down => vec![hidden, self.ffn_size],
            },
        }
    }

    /// Returns the rows of the learned position embedding.
    fn position_rows(&self) -> usize {
        match self.positions {
            Positions::Learned { offset } => self.context_length + offset,
            _ => 0,
        }
    }

    /// Returns the number of FFN matrices: each neuron has a row or column in each.
    pub fn matrices_per_neuron(&self) -> usize {
        if self.is_gated() { 3 } else { 2 }
    }

    /// Returns whether the FFN has an up projection in addition to the gate.
    pub fn is_gated(&self) -> bool {
        self.ffn != FfnKind::Plain
    }

    /// Lists all weights in the order of the forward pass.
    pub fn weights(&self) -> Vec<Weight> {
        let projected = self.embedding_size != self.hidden_size;
        let biased_norm = self.norm == NormKind::Layer;
        let mut weights = vec![Weight::Embedding];
        let mut top = |present: bool, weight| weights.extend(present.then_some(weight));
        top(projected, Weight::ProjectIn);
        top(
            matches!(self.positions, Positions::Learned { .. }),
            Weight::Positions,
        );
        for layer in 0..self.layer_count {
            weights.extend(
                self.layer_weights()
                    .into_iter()
                    .map(|weight| Weight::Layer(layer, weight)),
            );
        }
        let mut top = |present: bool, weight| weights.extend(present.then_some(weight));
        top(self.final_norm, Weight::FinalNorm);
        top(self.final_norm && biased_norm, Weight::FinalNormBias);
        top(projected, Weight::ProjectOut);
        top(!self.tied_embeddings, Weight::Head);
        top(self.biases.head, Weight::HeadBias);
        weights
    }

    /// Lists the weights of each layer.
    pub fn layer_weights(&self) -> Vec<LayerWeight> {
        let biased_norm = self.norm == NormKind::Layer;
        let own_norm = self.block != Block::ParallelSharedNorm;
        let Biases {
            query_key_value,
            attention_output,
            ffn,
            ..
        } = self.biases;
        let heads = self.query_key_norm;
        [
            (true, LayerWeight::AttentionNorm),
            (biased_norm, LayerWeight::AttentionNormBias),
            (true, LayerWeight::Query),
            (query_key_value, LayerWeight::QueryBias),
            (true, LayerWeight::Key),
            (query_key_value, LayerWeight::KeyBias),
            (true, LayerWeight::Value),
            (query_key_value, LayerWeight::ValueBias),
            (heads, LayerWeight::QueryNorm),
            (heads && biased_norm, LayerWeight::QueryNormBias),
            (heads, LayerWeight::KeyNorm),
            (heads && biased_norm, LayerWeight::KeyNormBias),
            (true, LayerWeight::Output),
            (attention_output, LayerWeight::OutputBias),
            (own_norm, LayerWeight::FfnNorm),
            (own_norm && biased_norm, LayerWeight::FfnNormBias),
            (true, LayerWeight::Gate),
            (ffn, LayerWeight::GateBias),
            (self.is_gated(), LayerWeight::Up),
            (self.is_gated() && ffn, LayerWeight::UpBias),
            (true, LayerWeight::Down),
            (ffn, LayerWeight::DownBias),
        ]
        .into_iter()
        .filter_map(|(present, weight)| present.then_some(weight))
        .collect()
    }

    /// Returns whether each layer has `weight`.
    pub fn has(&self, weight: LayerWeight) -> bool {
        self.layer_weights().contains(&weight)
    }
}
