//! One decoder layer, which can be loaded and run on its own, so that a model larger than memory can be
//! run layer by layer.

use std::collections::HashMap;

use candle_core::{D, Device, Result, Tensor};
use powerinfer_model::{
    Block, Checkpoint, LatentAttention, LayerWeight, ModelConfig, ModelError, Positions,
    QueryKeyNorm, Rotary, alibi_bias,
};
use rayon::prelude::*;

use crate::{
    FeedForward, FfnObservation, FfnObserver, Neurons,
    operations::{failed, linear, load_all, norm, soft_cap},
};

/// Decoder layer.
#[derive(Debug)]
pub struct Layer {
    index: usize,
    config: ModelConfig,
    weights: HashMap<LayerWeight, Tensor>,
    ffn: FeedForward,
}

impl Layer {
    /// Loads layer `index`.
    ///
    /// # Errors
    ///
    /// A weight cannot be read.
    pub fn load(checkpoint: &Checkpoint, index: usize) -> std::result::Result<Self, ModelError> {
        let weights = checkpoint.config().layer_weights().into_iter();
        let weights = weights.filter(|weight| !FeedForward::has(*weight));
        Ok(Self {
            index,
            config: checkpoint.config().clone(),
            weights: load_all(checkpoint, index, weights.collect())?,
            ffn: FeedForward::load(checkpoint, index)?,
        })
    }

    /// Runs the layer on a whole sequence `[tokens, hidden]`.
    ///
    /// # Errors
    ///
    /// The tensor library or the observer failed.
    pub fn forward(
        &self,
        hidden: &Tensor,
        observer: &mut dyn FfnObserver,
    ) -> std::result::Result<Tensor, ModelError> {
        self.run(hidden, observer).map_err(failed)
    }

    fn run(&self, input: &Tensor, observer: &mut dyn FfnObserver) -> Result<Tensor> {
        let hidden = input;
        let attention_norm = |x: &Tensor| {
            self.norm(
                x,
                LayerWeight::AttentionNorm,
                LayerWeight::AttentionNormBias,
            )
        };
        let ffn_norm = |x: &Tensor| self.norm(x, LayerWeight::FfnNorm, LayerWeight::FfnNormBias);
        let output_norm =
            |x: &Tensor, weight: LayerWeight| norm(&self.config, x, &self.weights[&weight], None);
        match self.config.block {
            Block::OutputNorm | Block::Sandwich => {
                let normed = if self.config.block.norms_input() {
                    attention_norm(hidden)?
                } else {
                    hidden.clone()
                };
                let attended =
                    output_norm(&self.attention(&normed)?, LayerWeight::AttentionOutputNorm)?;
                let hidden = (hidden + attended)?;
                let normed = if self.config.block.norms_input() {
                    ffn_norm(&hidden)?
                } else {
                    hidden.clone()
                };
                let output = self.ffn(input, &hidden, &normed, observer)?;
                &hidden + output_norm(&output, LayerWeight::FfnOutputNorm)?
            }
            Block::PreNorm => {
                let hidden = (hidden + self.attention(&attention_norm(hidden)?)?)?;
                &hidden + self.ffn(input, &hidden, &ffn_norm(&hidden)?, observer)?
            }
            Block::PostNorm => {
                let hidden = attention_norm(&(hidden + self.attention(hidden)?)?)?;
                ffn_norm(&(&hidden + self.ffn(input, &hidden, &hidden, observer)?)?)
            }
            Block::Parallel => {
                let attended = self.attention(&attention_norm(hidden)?)?;
                (hidden + attended)? + self.ffn(input, hidden, &ffn_norm(hidden)?, observer)?
            }
            Block::ParallelSharedNorm => {
                let normed = attention_norm(hidden)?;
                (hidden + self.attention(&normed)?)? + self.ffn(input, hidden, &normed, observer)?
            }
        }
    }

    /// Normalises `x` over its last dimension.
    fn norm(&self, x: &Tensor, weight: LayerWeight, bias: LayerWeight) -> Result<Tensor> {
        let bias = self.weights.get(&bias);
        norm(&self.config, x, &self.weights[&weight], bias)
    }

    /// `x · Wᵀ + b`.
    fn linear(&self, x: &Tensor, weight: LayerWeight, bias: LayerWeight) -> Result<Tensor> {
        linear(x, &self.weights[&weight], self.weights.get(&bias))
    }

    /// Returns queries, keys and values of latent attention before rotation, `[heads, tokens, …]`; each head has its own.
    fn latent_projections(&self, x: &Tensor, latent: &LatentAttention) -> Result<[Tensor; 3]> {
        let (tokens, heads) = (x.dim(0)?, self.config.head_count);
        let config = ModelConfig {
            norm_epsilon: LatentAttention::NORM_EPSILON,
            ..self.config.clone()
        };
        let weight = |weight| &self.weights[&weight];
        let compressed = match latent.query_rank {
            None => x.clone(),
            Some(_) => {
                let down = linear(x, weight(LayerWeight::QueryDown), None)?;
                norm(&config, &down, weight(LayerWeight::QueryDownNorm), None)?
            }
        };
        let query = linear(&compressed, weight(LayerWeight::Query), None)?;
        let query = query.reshape((tokens, heads, latent.query_size()))?;
        let shared = linear(x, weight(LayerWeight::Key), None)?;
        let rotary = shared.narrow(1, 0, latent.rotary_size)?;
        let vector = shared.narrow(1, latent.rotary_size, latent.rank)?;
        let vector = norm(&config, &vector, weight(LayerWeight::LatentNorm), None)?;
        let vector = vector.broadcast_left(heads)?.contiguous()?;
        // [heads, rank, key] and [heads, value, rank]
        let keys = weight(LayerWeight::LatentQuery);
        let keys = keys.reshape((heads, latent.rank, latent.key_size))?;
        let values = weight(LayerWeight::Value);
        let values = values.reshape((heads, latent.value_size, latent.rank))?;
        let rotary = rotary.broadcast_left(heads)?.contiguous()?;
        let key = Tensor::cat(&[&rotary, &vector.matmul(&keys)?], D::Minus1)?;
        let value = vector.matmul(&values.transpose(1, 2)?.contiguous()?)?;
        Ok([query.transpose(0, 1)?.contiguous()?, key, value])
    }

    /// Causal grouped-query attention.
    fn attention(&self, x: &Tensor) -> Result<Tensor> {
        let head_count = self.config.head_count;
        let tokens = x.dim(0)?;
        let [mut query, mut key, value] = match &self.config.latent {
            Some(latent) => self.latent_projections(x, latent)?,
            None => self.projections(x)?,
        };
        if let Some(table) = self.config.rotary_table(self.index) {
            let rotary = &self.config.rotary_tables()[table];
            (query, key) = (rotate(rotary, &query)?, rotate(rotary, &key)?);
        }
        // Each key/value head serves `group` consecutive query heads.
        let kv_head_count = key.dim(0)?;
        let group = head_count / kv_head_count;
        let scale = 1.0 / (self.config.query_size() as f64).sqrt();
        let query = (query.reshape((kv_head_count, group * tokens, ()))? * scale)?;
        let scores = query
            .matmul(&key.t()?)?
            .reshape((head_count, tokens, tokens))?;
        let scores = match &self.config.positions {
            Positions::Alibi { slopes } => {
                scores.broadcast_add(&(alibi(slopes, tokens)? * scale)?)?
            }
            _ => scores,
        };
        let scores = soft_cap(self.config.soft_caps.attention, scores)?;
        let window = self.config.attention_windows[self.index];
        let weights = causal_softmax(&scores, window, self.weights.get(&LayerWeight::Sinks))?;
        let weights = weights.reshape((kv_head_count, group * tokens, tokens))?;
        let mixed = weights.matmul(&value)?.reshape((head_count, tokens, ()))?;
        let mixed = mixed.transpose(0, 1)?.reshape((tokens, ()))?;
        self.linear(&mixed, LayerWeight::Output, LayerWeight::OutputBias)
    }

    /// Returns queries, keys and values before rotation, `[heads, tokens, head_size]`.
    fn projections(&self, x: &Tensor) -> Result<[Tensor; 3]> {
        let ModelConfig {
            head_count,
            kv_head_count,
            head_size,
            ..
        } = self.config;
        let tokens = x.dim(0)?;
        // [heads, tokens, head_size]
        let heads = |projected: Tensor, heads: usize| -> Result<Tensor> {
            projected
                .reshape((tokens, heads, head_size))?
                .transpose(0, 1)?
                .contiguous()
        };
        let query_norm =
            |x: &Tensor| self.norm(x, LayerWeight::QueryNorm, LayerWeight::QueryNormBias);
        let key_norm = |x: &Tensor| self.norm(x, LayerWeight::KeyNorm, LayerWeight::KeyNormBias);
        let mut query = self.linear(x, LayerWeight::Query, LayerWeight::QueryBias)?;
        let mut key = self.linear(x, LayerWeight::Key, LayerWeight::KeyBias)?;
        if self.config.query_key_norm == QueryKeyNorm::AllHeads {
            (query, key) = (query_norm(&query)?, key_norm(&key)?);
        }
        let value = self.linear(x, LayerWeight::Value, LayerWeight::ValueBias)?;
        let mut query = heads(query, head_count)?;
        let mut key = heads(key, kv_head_count)?;
        let value = heads(value, kv_head_count)?;
        if self.config.query_key_norm == QueryKeyNorm::PerHead {
            (query, key) = (query_norm(&query)?, key_norm(&key)?);
        }
        Ok([query, key, value])
    }

    /// Computes the FFN for `x`, the norm of `residual`, and calls the observer; `input` is the layer's input.
    fn ffn(
        &self,
        input: &Tensor,
        residual: &Tensor,
        x: &Tensor,
        observer: &mut dyn FfnObserver,
    ) -> Result<Tensor> {
        let Neurons {
            activation,
            product,
            routing,
            ..
        } = self.ffn.neurons(x, input)?;
        let observation = FfnObservation {
            layer: self.index,
            residual,
            input: x,
            activation: &activation,
            product: &product,
            routing: routing.as_deref(),
        };
        let product = observer.observe(&observation)?.unwrap_or(product);
        self.ffn.down(&product, routing.as_deref())
    }

    /// Computes [`FeedForward::contribution_norms`] of the layer's FFN.
    ///
    /// # Errors
    ///
    /// The tensor library failed.
    pub fn contribution_norms(&self) -> std::result::Result<Vec<f32>, ModelError> {
        self.ffn.contribution_norms()
    }
}

/// Applies the rotary embedding to `heads [heads, tokens, head_size]` from position 0.
fn rotate(rotary: &Rotary, heads: &Tensor) -> Result<Tensor> {
    let (tokens, size) = (heads.dim(1)?, heads.dim(2)?);
    let pairs = rotary.frequencies.len();
    let angles = (0..tokens)
        .flat_map(|position| {
            rotary
                .frequencies
                .iter()
                .map(move |frequency| (position as f64 * frequency) as f32)
        })
        .collect();
    let angles = Tensor::from_vec(angles, (tokens, pairs), &Device::Cpu)?;
    let magnitude = f64::from(rotary.magnitude);
    let (cosine, sine) = ((angles.cos()? * magnitude)?, (angles.sin()? * magnitude)?);
    let first = heads.narrow(D::Minus1, 0, pairs)?;
    let second = heads.narrow(D::Minus1, pairs, pairs)?;
    let mut rotated = vec![
        (first.broadcast_mul(&cosine)? - second.broadcast_mul(&sine)?)?,
        (first.broadcast_mul(&sine)? + second.broadcast_mul(&cosine)?)?,
    ];
    if 2 * pairs < size {
        rotated.push(heads.narrow(D::Minus1, 2 * pairs, size - 2 * pairs)?);
    }
    Tensor::cat(&rotated, D::Minus1)
}

/// ALiBi bias of each key position: `[heads, 1, tokens]`.
fn alibi(slopes: &[f32], tokens: usize) -> Result<Tensor> {
    let biases = slopes
        .iter()
        .flat_map(|slope| (0..tokens).map(move |key| alibi_bias(*slope, key)))
        .collect();
    Tensor::from_vec(biases, (slopes.len(), 1, tokens), &Device::Cpu)
}

/// Softmax of `scores [heads, tokens, tokens]` over the keys that each query sees: its own and earlier ones, within the window. Other keys
/// get the weight 0. If there are `sinks [heads]`, each head's sink is an additional score without a key.
fn causal_softmax(
    scores: &Tensor,
    window: Option<usize>,
    sinks: Option<&Tensor>,
) -> Result<Tensor> {
    let (heads, tokens, _) = scores.dims3()?;
    let sinks = sinks.map(|sinks| sinks.to_vec1::<f32>()).transpose()?;
    let mut weights = scores.flatten_all()?.to_vec1::<f32>()?;
    let rows = weights.par_chunks_mut(tokens.max(1)).enumerate();
    rows.for_each(|(row, weights)| {
        let (head, query) = (row / tokens, row % tokens);
        let first = window.map_or(0, |window| (query + 1).saturating_sub(window));
        weights[..first].fill(0.0);
        weights[query + 1..].fill(0.0);
        let visible = &mut weights[first..=query];
        let sink = sinks
            .as_ref()
            .map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
        let largest = visible.iter().copied().fold(sink, f32::max);
        let mut sum = (sink - largest).exp();
        for weight in &mut *visible {
            *weight = (*weight - largest).exp();
            sum += *weight;
        }
        visible.iter_mut().for_each(|weight| *weight /= sum);
    });
    Tensor::from_vec(weights, (heads, tokens, tokens), &Device::Cpu)
}
