//! One decoder layer, loaded and run on its own, so that a model larger than memory can be
//! streamed through it; and the two ends of the model.

use candle_core::{D, Device, Result, Tensor};
use candle_nn::ops::softmax_last_dim;
use powerinfer_model::{Activation, Checkpoint, LayerWeight, ModelConfig, ModelError, Weight};

use crate::{FfnObservation, FfnTap};

/// candle's errors as ours.
pub(crate) fn failed(error: candle_core::Error) -> ModelError {
    ModelError::Reference(error.to_string())
}

/// Reads a weight as a float32 tensor.
fn load(checkpoint: &Checkpoint, weight: Weight) -> std::result::Result<Tensor, ModelError> {
    let values = checkpoint.read(weight)?;
    Tensor::from_vec(values, checkpoint.config().shape(weight), &Device::Cpu).map_err(failed)
}

/// `x · w / √(mean(x²) + ε)` over the last dimension.
fn rms_norm(x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor> {
    let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean_square + f64::from(epsilon))?.sqrt()?)?
        .broadcast_mul(weight)
}

/// The weights of one decoder layer.
#[derive(Debug)]
pub struct Layer {
    index: usize,
    config: ModelConfig,
    attention_norm: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    ffn_norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

impl Layer {
    /// Loads layer `index`.
    pub fn load(checkpoint: &Checkpoint, index: usize) -> std::result::Result<Self, ModelError> {
        let load = |weight| load(checkpoint, Weight::Layer(index, weight));
        Ok(Self {
            index,
            config: checkpoint.config().clone(),
            attention_norm: load(LayerWeight::AttentionNorm)?,
            query: load(LayerWeight::Query)?,
            key: load(LayerWeight::Key)?,
            value: load(LayerWeight::Value)?,
            output: load(LayerWeight::Output)?,
            ffn_norm: load(LayerWeight::FfnNorm)?,
            gate: load(LayerWeight::Gate)?,
            up: load(LayerWeight::Up)?,
            down: load(LayerWeight::Down)?,
        })
    }

    /// Runs one sequence, `[tokens, hidden]`, from its first position.
    pub fn forward(
        &self,
        hidden: &Tensor,
        tap: &mut dyn FfnTap,
    ) -> std::result::Result<Tensor, ModelError> {
        self.run(hidden, tap).map_err(failed)
    }

    fn run(&self, hidden: &Tensor, tap: &mut dyn FfnTap) -> Result<Tensor> {
        let epsilon = self.config.norm_epsilon;
        let attended = self.attention(&rms_norm(hidden, &self.attention_norm, epsilon)?)?;
        let hidden = (hidden + attended)?;
        let mixed = self.ffn(&rms_norm(&hidden, &self.ffn_norm, epsilon)?, tap)?;
        hidden + mixed
    }

    /// Causal grouped-query attention with rotary positions.
    fn attention(&self, x: &Tensor) -> Result<Tensor> {
        let ModelConfig {
            head_count,
            kv_head_count,
            head_size,
            ..
        } = self.config;
        let tokens = x.dim(0)?;
        // [heads, tokens, head_size]
        let project = |weight: &Tensor, heads: usize| -> Result<Tensor> {
            x.matmul(&weight.t()?)?
                .reshape((tokens, heads, head_size))?
                .transpose(0, 1)?
                .contiguous()
        };
        let (cosine, sine) = self.rotation(tokens)?;
        let rotate = |heads: Tensor| -> Result<Tensor> {
            let half = head_size / 2;
            let (first, second) = (
                heads.narrow(D::Minus1, 0, half)?,
                heads.narrow(D::Minus1, half, half)?,
            );
            let turned = [
                (first.broadcast_mul(&cosine)? - second.broadcast_mul(&sine)?)?,
                (first.broadcast_mul(&sine)? + second.broadcast_mul(&cosine)?)?,
            ];
            Tensor::cat(&turned, D::Minus1)
        };
        let query = rotate(project(&self.query, head_count)?)?;
        let key = rotate(project(&self.key, kv_head_count)?)?;
        let value = project(&self.value, kv_head_count)?;
        // Every key and value head serves `group` query heads side by side.
        let group = head_count / kv_head_count;
        let query = query.reshape((kv_head_count, group * tokens, head_size))?;
        let scores = (query.matmul(&key.t()?)? * (1.0 / (head_size as f64).sqrt()))?;
        let scores = scores
            .reshape((head_count, tokens, tokens))?
            .broadcast_add(&causal_mask(tokens)?)?;
        let weights =
            softmax_last_dim(&scores)?.reshape((kv_head_count, group * tokens, tokens))?;
        let mixed = weights
            .matmul(&value)?
            .reshape((head_count, tokens, head_size))?;
        let mixed = mixed
            .transpose(0, 1)?
            .reshape((tokens, head_count * head_size))?;
        mixed.matmul(&self.output.t()?)
    }

    /// Cosines and sines of the rotary angles, `[tokens, head_size / 2]` each.
    fn rotation(&self, tokens: usize) -> Result<(Tensor, Tensor)> {
        let half = self.config.head_size / 2;
        let theta = f64::from(self.config.rope_theta);
        let mut angles = Vec::with_capacity(tokens * half);
        for position in 0..tokens {
            for pair in 0..half {
                let frequency = theta.powf(-(pair as f64) / half as f64);
                angles.push((position as f64 * frequency) as f32);
            }
        }
        let angles = Tensor::from_vec(angles, (tokens, half), &Device::Cpu)?;
        Ok((angles.cos()?, angles.sin()?))
    }

    /// The gated FFN: `down · (act(gate·x) ⊙ up·x)`.
    fn ffn(&self, x: &Tensor, tap: &mut dyn FfnTap) -> Result<Tensor> {
        let gate = x.matmul(&self.gate.t()?)?;
        let activation = match self.config.activation {
            Activation::Relu => gate.relu()?,
            Activation::Silu => gate.silu()?,
        };
        let product = (&activation * x.matmul(&self.up.t()?)?)?;
        let observation = FfnObservation {
            layer: self.index,
            input: x,
            activation: &activation,
            product: &product,
        };
        let replaced = tap.tap(&observation)?;
        replaced.unwrap_or(product).matmul(&self.down.t()?)
    }

    /// L2 norm of every neuron's column of the down projection, `[ffn]`: what a unit of its
    /// activation contributes.
    pub fn contribution_norms(&self) -> std::result::Result<Vec<f32>, ModelError> {
        let norms = self
            .down
            .sqr()
            .and_then(|square| square.sum(0)?.sqrt()?.to_vec1());
        norms.map_err(failed)
    }
}

/// 0 where a query may look, −∞ at later positions: `[tokens, tokens]`.
fn causal_mask(tokens: usize) -> Result<Tensor> {
    let mask = (0..tokens * tokens)
        .map(|index| {
            if index % tokens > index / tokens {
                f32::NEG_INFINITY
            } else {
                0.0
            }
        })
        .collect();
    Tensor::from_vec(mask, (tokens, tokens), &Device::Cpu)
}

/// What stands before the first layer and after the last.
#[derive(Debug)]
pub struct Ends {
    config: ModelConfig,
    embedding: Tensor,
    final_norm: Tensor,
    head: Tensor,
}

impl Ends {
    /// Loads embedding, final norm and head.
    pub fn load(checkpoint: &Checkpoint) -> std::result::Result<Self, ModelError> {
        let config = checkpoint.config().clone();
        let embedding = load(checkpoint, Weight::Embedding)?;
        let head = if config.tied_embeddings {
            embedding.clone()
        } else {
            load(checkpoint, Weight::Head)?
        };
        Ok(Self {
            embedding,
            head,
            final_norm: load(checkpoint, Weight::FinalNorm)?,
            config,
        })
    }

    /// Embeds a sequence: `[tokens, hidden]`.
    pub fn embed(&self, tokens: &[u32]) -> std::result::Result<Tensor, ModelError> {
        if let Some(token) = tokens
            .iter()
            .find(|token| **token as usize >= self.config.vocabulary_size)
        {
            return Err(ModelError::TokenOutside {
                token: *token,
                vocabulary: self.config.vocabulary_size,
            });
        }
        let ids = Tensor::from_slice(tokens, tokens.len(), &Device::Cpu).map_err(failed)?;
        self.embedding.index_select(&ids, 0).map_err(failed)
    }

    /// Logits from the last layer's output: `[tokens, vocabulary]`.
    pub fn logits(&self, hidden: &Tensor) -> std::result::Result<Tensor, ModelError> {
        rms_norm(hidden, &self.final_norm, self.config.norm_epsilon)
            .and_then(|normed| normed.matmul(&self.head.t()?))
            .map_err(failed)
    }
}
