//! Model configuration: sizes, constants and structure, independent of the family.
//!
//! A [`ModelConfig`] is all that the engines know of a model. A family's description (`families/`) makes it
//! from a `config.json`, or from the metadata of a GGUF file.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{
    Activation, Experts, FfnKind, LayerWeight, ModelError, NormKind, Rotary, Weight, families,
    keys::{Keys, MAX_HEAD_SIZE},
    kinds, quantised,
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
    /// Rotary embedding with different angles in different layers, or none in some.
    RotaryByLayer {
        /// Distinct rotary embeddings, all with the same number of pairs.
        tables: Vec<Rotary>,
        /// Index in `tables` of each layer; `None` for a layer without position encoding.
        layers: Vec<Option<usize>>,
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
    /// `x += norm(attention(x))`, then `x += norm(ffn(x))` (OLMo 2).
    OutputNorm,
    /// `x += norm(attention(norm′(x)))`, then `x += norm(ffn(norm′(x)))` (Gemma 2).
    Sandwich,
}

impl Block {
    /// Whether norms follow the residual addition instead of preceding attention and FFN.
    pub fn is_post_norm(self) -> bool {
        self == Self::PostNorm
    }

    /// Returns whether a norm precedes attention.
    pub fn norms_input(self) -> bool {
        match self {
            Self::PreNorm | Self::Parallel | Self::ParallelSharedNorm | Self::Sandwich => true,
            Self::PostNorm | Self::OutputNorm => false,
        }
    }

    /// Whether the outputs of attention and FFN are normalised before they are added to the hidden state.
    pub fn norms_output(self) -> bool {
        matches!(self, Self::OutputNorm | Self::Sandwich)
    }

    /// Whether attention and FFN read the same hidden state.
    pub fn is_parallel(self) -> bool {
        match self {
            Self::Parallel | Self::ParallelSharedNorm => true,
            Self::PreNorm | Self::PostNorm | Self::OutputNorm | Self::Sandwich => false,
        }
    }
}

/// How queries and keys are normalised before the position encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueryKeyNorm {
    /// No norm.
    None,
    /// Each head is normalised, with one weight for all heads.
    PerHead,
    /// All heads of a token are normalised together.
    AllHeads,
}

/// Soft caps, which replace `x` by `cap · tanh(x / cap)` (Gemma 2).
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct SoftCaps {
    /// Cap of attention scores, applied before the mask.
    pub attention: Option<f32>,
    /// Cap of the logits.
    pub logits: Option<f32>,
}

impl SoftCaps {
    /// Returns `cap · tanh(x / cap)`.
    pub fn apply(cap: f32, x: f32) -> f32 {
        cap * (x / cap).tanh()
    }
}

/// Factors that a checkpoint states separately from its weights. They are applied when a weight is read, so engines and
/// bundles never see them.
#[derive(Debug, Clone, PartialEq)]
pub struct Multipliers {
    /// Factor of the attention scores of each layer, relative to 1/√[query_size](ModelConfig::query_size); empty if all are 1.
    pub attention: Vec<f32>,
    /// Factor of the outputs of attention and FFN.
    pub residual: f32,
    /// Factor of the logits.
    pub logits: f32,
}

impl Default for Multipliers {
    fn default() -> Self {
        Self {
            attention: Vec::new(),
            residual: 1.0,
            logits: 1.0,
        }
    }
}

impl Multipliers {
    /// Returns the factor of `weight` in a model with the norm `query_key_norm`.
    fn factor(&self, query_key_norm: QueryKeyNorm, weight: Weight) -> f32 {
        // A norm cancels any factor of its input, so the factor goes into the norm's own weight.
        let has_norm = query_key_norm != QueryKeyNorm::None;
        match weight {
            Weight::FinalNorm | Weight::FinalNormBias => self.logits,
            Weight::Layer(layer, weight) => match weight {
                LayerWeight::Query | LayerWeight::QueryBias if !has_norm => self.score(layer),
                LayerWeight::QueryNorm | LayerWeight::QueryNormBias => self.score(layer),
                LayerWeight::Output
                | LayerWeight::OutputBias
                | LayerWeight::Down
                | LayerWeight::DownBias => self.residual,
                _ => 1.0,
            },
            _ => 1.0,
        }
    }

    fn score(&self, layer: usize) -> f32 {
        self.attention.get(layer).copied().unwrap_or(1.0)
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

/// Multi-head latent attention (DeepSeek-V2, §2.1): a position's keys and values are projections of one latent vector.
///
/// The key projection is applied to the queries instead, and the value projection to the weighted sum of the latent vectors, so the KV
/// cache has a single head. Each of its keys consists of a rotated part that all heads share, and the normalised latent vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatentAttention {
    /// Elements of a token's compressed query; `None` if queries are not compressed.
    pub query_rank: Option<usize>,
    /// Elements of the latent vector.
    pub rank: usize,
    /// Rotated elements of a head's queries and keys; they come first.
    pub rotary_size: usize,
    /// Other elements of a head's queries and keys.
    pub key_size: usize,
    /// Elements of a head's values.
    pub value_size: usize,
}

impl LatentAttention {
    /// ε of the norms of compressed queries and of the latent vector; configurations do not state it.
    pub const NORM_EPSILON: f32 = 1e-6;

    /// Returns the number of elements of a head in the KV cache.
    pub fn head_size(&self) -> usize {
        self.rotary_size + self.rank
    }

    /// Returns the number of elements of a head's queries and keys before the key projection is applied to the queries.
    pub fn query_size(&self) -> usize {
        self.rotary_size + self.key_size
    }
}

/// Configuration of a decoder.
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
    /// Sizes of latent attention; `None` if the model does not use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latent: Option<LatentAttention>,
    /// Number of FFN neurons per layer (d_ff), across all experts.
    pub ffn_size: usize,
    /// Experts of the FFNs; `None` in dense models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
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
    /// Norm of queries and keys.
    pub query_key_norm: QueryKeyNorm,
    /// Whether there is a norm before the head.
    pub final_norm: bool,
    /// Kind of the FFN.
    pub ffn: FfnKind,
    /// Activation function of the gate.
    pub activation: Activation,
    /// Soft caps of attention scores and logits.
    pub soft_caps: SoftCaps,
    /// Whether each head's softmax includes an attention sink: a score that has no value vector (gpt-oss).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub attention_sinks: bool,
    /// Factors that reading a weight of the checkpoint applies; neutral in a bundle, whose weights contain them.
    #[serde(skip)]
    pub multipliers: Multipliers,
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
        Ok(Self::parse_noting(bytes, path)?.0)
    }

    /// Like [`parse`](Self::parse), but also returns the keys that are ignored because the model's class in transformers
    /// ignores them too.
    pub(crate) fn parse_noting(
        bytes: &[u8],
        path: &Path,
    ) -> Result<(Self, Vec<String>), ModelError> {
        let map: serde_json::Map<String, serde_json::Value> =
            powerinfer_artifact::json::from_slice(bytes).map_err(|source| {
                powerinfer_artifact::ArtifactError::NotJson {
                    path: path.to_owned(),
                    source,
                }
            })?;
        let keys = Keys::new(path, &map);
        quantised::check(&keys, path)?;
        let dense = || kinds::check_dense(&keys, path);
        let family = families::of(&keys).or_else(|error| dense().and(Err(error)))?;
        let config = (family.describe)(&keys)?;
        if config.experts.is_none() {
            dense()?;
        }
        config.validate().map_err(|reason| keys.bad(reason))?;
        let ignored = keys.finish_as(families::keys_of_class(&keys).as_deref())?;
        Ok((config, ignored))
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
        if let Some(experts) = &self.experts {
            experts.validate()?;
            if experts.neurons() != self.ffn_size {
                return Err(format!(
                    "the experts have {} neurons, but the layers have {}",
                    experts.neurons(),
                    self.ffn_size
                ));
            }
        }
        if let Some((what, size, _)) = sizes
            .iter()
            .find(|(_, size, most)| !(1..=*most).contains(size))
        {
            return Err(format!("the {what} is {size}, which is not supported"));
        }
        if let Some(latent) = &self.latent {
            let sizes = [
                latent.rank,
                latent.rotary_size,
                latent.key_size,
                latent.value_size,
            ];
            let mut sizes = sizes.into_iter().chain(latent.query_rank);
            let is_possible = sizes.all(|size| (1..=MAX_HEAD_SIZE).contains(&size))
                && (self.head_size, self.kv_head_count) == (latent.head_size(), 1)
                && self
                    .rotary_tables()
                    .iter()
                    .all(|rotary| rotary.width() == latent.rotary_size)
                && !self.biases.query_key_value
                && self.query_key_norm == QueryKeyNorm::None;
            if !is_possible {
                return Err(format!(
                    "these sizes of latent attention are not supported: {latent:?}"
                ));
            }
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
            (heads, self.query_size(), "heads"),
            (heads, self.mixed_size() / heads, "heads"),
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
        let is_fit = |rotary: &Rotary| {
            (1..=self.head_size).contains(&rotary.width())
                && rotary.magnitude.is_finite()
                && rotary
                    .frequencies
                    .iter()
                    .all(|frequency| frequency.is_finite())
        };
        let are_fit = match &self.positions {
            Positions::Rotary(rotary) => is_fit(rotary),
            Positions::RotaryByLayer { tables, layers } => {
                let width = tables.first().map_or(0, Rotary::width);
                tables
                    .iter()
                    .all(|table| is_fit(table) && table.width() == width)
                    && layers.len() == self.layer_count
                    && layers.iter().flatten().all(|table| *table < tables.len())
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
        let has_limit = matches!(self.activation, Activation::ClampedSwish { .. });
        if has_limit != (self.ffn == FfnKind::ClampedGated) {
            return Err(format!(
                "the activation function {} does not fit the kind of the FFN",
                self.activation.name()
            ));
        }
        if let Activation::ClampedSwish { limit } = self.activation
            && !(limit.is_normal() && limit > 0.0)
        {
            return Err(format!(
                "the limit of the activation function is {limit}; it must be positive and finite"
            ));
        }
        let Multipliers {
            attention,
            residual,
            logits,
        } = &self.multipliers;
        let SoftCaps {
            attention: score_cap,
            logits: logit_cap,
        } = self.soft_caps;
        let is_positive = |number: &f32| number.is_normal() && *number > 0.0;
        if !(attention.iter().chain([residual, logits]))
            .chain(score_cap.iter().chain(&logit_cap))
            .all(is_positive)
        {
            return Err("a multiplier or a soft cap is not a positive number".to_owned());
        }
        Ok(())
    }

    /// Returns the number of parameters.
    pub fn parameters(&self) -> u64 {
        let weights = self.weights().into_iter();
        weights
            .map(|weight| self.size(weight, Experts::neurons))
            .sum()
    }

    /// Returns the number of parameters by which one token is multiplied. It counts only the experts that the token uses; it includes the
    /// head, but not the embedding.
    pub fn parameters_per_token(&self) -> u64 {
        let weights = self.weights().into_iter();
        let weights = weights.filter(|weight| !matches!(weight, Weight::Embedding | Weight::Head));
        let size = |weight| self.size(weight, Experts::neurons_per_token);
        weights.chain([Weight::Head]).map(size).sum()
    }

    /// Number of parameters of `weight`. In layers with experts, the FFN's matrices count as many neurons as `neurons` returns.
    fn size(&self, weight: Weight, neurons: fn(&Experts) -> usize) -> u64 {
        let size = self.shape(weight).iter().product::<usize>();
        let (Weight::Layer(layer, layer_weight), Some(experts)) = (weight, &self.experts) else {
            return size as u64;
        };
        let size = match (experts.dense_size(layer), layer_weight) {
            (dense, LayerWeight::Gate | LayerWeight::Up | LayerWeight::Down) => {
                dense.unwrap_or_else(|| neurons(experts)) * self.hidden_size
            }
            (Some(_), LayerWeight::Router | LayerWeight::SharedGate) => 0,
            _ => size,
        };
        size as u64
    }

    /// Returns rows and columns of a weight; a norm or a bias has one dimension.
    pub fn shape(&self, weight: Weight) -> Vec<usize> {
        let hidden = self.hidden_size;
        let queries = self.head_count * self.head_size;
        let keys = self.kv_head_count * self.head_size;
        let heads = self.head_count;
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
                | LayerWeight::AttentionOutputNorm
                | LayerWeight::FfnNorm
                | LayerWeight::FfnNormBias
                | LayerWeight::FfnOutputNorm
                | LayerWeight::OutputBias => vec![hidden],
                LayerWeight::DownBias => match &self.experts {
                    None => vec![hidden],
                    Some(experts) => vec![experts.blocks(), hidden],
                },
                LayerWeight::Sinks => vec![self.head_count],
                LayerWeight::QueryDown | LayerWeight::QueryDownNorm => {
                    let rank = self
                        .latent
                        .and_then(|latent| latent.query_rank)
                        .unwrap_or(0);
                    match weight {
                        LayerWeight::QueryDown => vec![rank, hidden],
                        _ => vec![rank],
                    }
                }
                LayerWeight::LatentNorm => vec![self.latent.map_or(0, |latent| latent.rank)],
                LayerWeight::LatentQuery => match self.latent {
                    Some(latent) => vec![heads * latent.rank, latent.key_size],
                    None => vec![0, 0],
                },
                LayerWeight::Query => match self.latent {
                    Some(latent) => {
                        let inputs = latent.query_rank.unwrap_or(hidden);
                        vec![heads * latent.query_size(), inputs]
                    }
                    None => vec![queries, hidden],
                },
                LayerWeight::Value if let Some(latent) = self.latent => {
                    vec![heads * latent.value_size, latent.rank]
                }
                LayerWeight::QueryBias => vec![queries],
                LayerWeight::Key | LayerWeight::Value => vec![keys, hidden],
                LayerWeight::KeyBias | LayerWeight::ValueBias => vec![keys],
                LayerWeight::QueryNorm | LayerWeight::QueryNormBias => {
                    vec![self.head_norm_size(queries)]
                }
                LayerWeight::KeyNorm | LayerWeight::KeyNormBias => vec![self.head_norm_size(keys)],
                LayerWeight::Output => vec![hidden, self.mixed_size()],
                LayerWeight::Router => {
                    vec![self.experts.as_ref().map_or(0, |found| found.count), hidden]
                }
                LayerWeight::RouterBias => {
                    vec![self.experts.as_ref().map_or(0, |found| found.count)]
                }
                LayerWeight::SharedGate => vec![1, hidden],
                LayerWeight::Gate | LayerWeight::Up => vec![self.ffn_size, hidden],
                LayerWeight::GateBias | LayerWeight::UpBias => vec![self.ffn_size],
                LayerWeight::Down => vec![hidden, self.ffn_size],
            },
        }
    }

    /// Returns the number of elements of a head's query; attention scores are divided by the square root of this number.
    pub fn query_size(&self) -> usize {
        self.latent
            .map_or(self.head_size, |latent| latent.query_size())
    }

    /// Returns the number of elements of a token's attention output, which the output projection reads.
    pub fn mixed_size(&self) -> usize {
        let size = self
            .latent
            .map_or(self.head_size, |latent| latent.value_size);
        self.head_count * size
    }

    /// Returns how many of a token's `all` elements a norm of queries or keys normalises together.
    fn head_norm_size(&self, all: usize) -> usize {
        match self.query_key_norm {
            QueryKeyNorm::AllHeads => all,
            QueryKeyNorm::None | QueryKeyNorm::PerHead => self.head_size,
        }
    }

    /// Returns the feature of the model that the GPU kernels do not support, so that it must run on the CPU; `None` if they
    /// support the model.
    pub fn device_obstacle(&self) -> Option<&'static str> {
        let experts = self.experts.as_ref();
        if experts.is_some_and(|experts| experts.reads_layer_input) {
            Some("routers that read the input of their layer")
        } else if self.block.norms_output() {
            Some("norms of the outputs of attention and FFN")
        } else if self.soft_caps.attention.is_some() {
            Some("soft caps of attention scores")
        } else if matches!(self.positions, Positions::RotaryByLayer { .. }) {
            Some("different position encodings in different layers")
        } else if self.query_key_norm == QueryKeyNorm::AllHeads {
            Some("norms of all queries of a token")
        } else {
            None
        }
    }

    /// Returns the feature of the model's attention that the GPU kernels do not support, so that attention must run on the CPU; `None`
    /// if they support it.
    pub fn attention_obstacle(&self) -> Option<&'static str> {
        self.latent.map(|_| "latent attention")
    }

    /// Returns the configuration with `experts` instead of dense FFNs.
    pub(crate) fn with_experts(self, experts: Experts) -> Self {
        Self {
            ffn_size: experts.neurons(),
            experts: Some(experts),
            ..self
        }
    }

    /// Returns the factor that reading `weight` of the checkpoint applies.
    pub(crate) fn factor(&self, weight: Weight) -> f32 {
        self.multipliers.factor(self.query_key_norm, weight)
    }

    /// Returns the distinct rotary embeddings.
    pub fn rotary_tables(&self) -> &[Rotary] {
        match &self.positions {
            Positions::Rotary(rotary) => std::slice::from_ref(rotary),
            Positions::RotaryByLayer { tables, .. } => tables,
            Positions::Learned { .. } | Positions::Alibi { .. } => &[],
        }
    }

    /// Returns the index of the layer's rotary embedding in [`rotary_tables`](Self::rotary_tables), if it has one.
    pub fn rotary_table(&self, layer: usize) -> Option<usize> {
        match &self.positions {
            Positions::Rotary(_) => Some(0),
            Positions::RotaryByLayer { layers, .. } => layers[layer],
            Positions::Learned { .. } | Positions::Alibi { .. } => None,
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

    /// Whether a token's first hidden state is its scaled row of the embedding: no positions are added and no projection follows.
    pub fn embeds_by_lookup(&self) -> bool {
        self.embedding_size == self.hidden_size
            && !matches!(self.positions, Positions::Learned { .. })
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
        let before = self.block != Block::OutputNorm;
        let own_norm = before && self.block != Block::ParallelSharedNorm;
        let after = self.block.norms_output();
        let Biases {
            query_key_value,
            attention_output,
            ffn,
            ..
        } = self.biases;
        let heads = self.query_key_norm != QueryKeyNorm::None;
        let experts = self.experts.as_ref();
        let router_bias = experts.is_some_and(|experts| experts.has_router_bias);
        let shared_gate = experts.is_some_and(|experts| experts.has_shared_gate);
        let latent = self.latent.is_some();
        let compressed = self
            .latent
            .is_some_and(|latent| latent.query_rank.is_some());
        [
            (before, LayerWeight::AttentionNorm),
            (before && biased_norm, LayerWeight::AttentionNormBias),
            (compressed, LayerWeight::QueryDown),
            (compressed, LayerWeight::QueryDownNorm),
            (true, LayerWeight::Query),
            (query_key_value, LayerWeight::QueryBias),
            (true, LayerWeight::Key),
            (query_key_value, LayerWeight::KeyBias),
            (latent, LayerWeight::LatentNorm),
            (latent, LayerWeight::LatentQuery),
            (true, LayerWeight::Value),
            (query_key_value, LayerWeight::ValueBias),
            (heads, LayerWeight::QueryNorm),
            (heads && biased_norm, LayerWeight::QueryNormBias),
            (heads, LayerWeight::KeyNorm),
            (heads && biased_norm, LayerWeight::KeyNormBias),
            (self.attention_sinks, LayerWeight::Sinks),
            (true, LayerWeight::Output),
            (attention_output, LayerWeight::OutputBias),
            (after, LayerWeight::AttentionOutputNorm),
            (own_norm, LayerWeight::FfnNorm),
            (own_norm && biased_norm, LayerWeight::FfnNormBias),
            (experts.is_some(), LayerWeight::Router),
            (router_bias, LayerWeight::RouterBias),
            (shared_gate, LayerWeight::SharedGate),
            (true, LayerWeight::Gate),
            (ffn, LayerWeight::GateBias),
            (self.is_gated(), LayerWeight::Up),
            (self.is_gated() && ffn, LayerWeight::UpBias),
            (true, LayerWeight::Down),
            (ffn, LayerWeight::DownBias),
            (after, LayerWeight::FfnOutputNorm),
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
