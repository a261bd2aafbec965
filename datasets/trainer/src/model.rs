//! The demo model as a differentiable function.

use std::sync::Mutex;

use candle_core::{Device, Result, Tensor, Var};

use crate::{
    batch::Batch,
    ops::{
        attention::Attention,
        gated::{Activation, Activity, Gated, Penalty},
        rms_norm::rms_norm,
    },
};

pub(crate) const HIDDEN: usize = 192;
pub(crate) const LAYERS: usize = 6;
pub(crate) const HEADS: usize = 6;
pub(crate) const KV_HEADS: usize = 3;
pub(crate) const HEAD_SIZE: usize = 32;
pub(crate) const FFN: usize = 768;
pub(crate) const THETA: f32 = 10_000.0;
pub(crate) const CONTEXT: usize = 512;

/// One layer's parameters; matrices are `[out, in]`, as checkpoints store them.
pub(crate) struct Layer {
    pub(crate) attention_norm: Var,
    /// Query, key and value rows, one after the other.
    pub(crate) query_key_value: Var,
    pub(crate) output: Var,
    pub(crate) ffn_norm: Var,
    /// Gate rows, then up rows.
    pub(crate) gate_up: Var,
    pub(crate) down: Var,
}

/// All parameters; the head is the embedding matrix.
pub(crate) struct Model {
    pub(crate) activation: Activation,
    pub(crate) embedding: Var,
    pub(crate) layers: Vec<Layer>,
    pub(crate) final_norm: Var,
}

/// Normally distributed starting values from a seed.
struct Initialiser {
    random: powerinfer_artifact::random::Random,
}

impl Initialiser {
    fn matrix(&mut self, rows: usize, columns: usize, deviation: f64) -> Result<Var> {
        let values: Vec<f32> = (0..rows * columns)
            .map(|_| (self.random.normal() * deviation) as f32)
            .collect();
        Var::from_vec(values, (rows, columns), &Device::Cpu)
    }

    fn ones(&self) -> Result<Var> {
        Var::ones(HIDDEN, candle_core::DType::F32, &Device::Cpu)
    }
}

impl Model {
    /// A model with random parameters.
    pub(crate) fn new(vocabulary: usize, activation: Activation, seed: u64) -> Result<Self> {
        let mut start = Initialiser {
            random: powerinfer_artifact::random::Random::new(seed),
        };
        // Matrices that write to the residual stream start smaller by √(2·layers), as in GPT-2.
        let (read, write) = (
            1.0 / (HIDDEN as f64).sqrt(),
            0.5 / ((2 * LAYERS) as f64).sqrt(),
        );
        let heads = (HEADS + 2 * KV_HEADS) * HEAD_SIZE;
        let embedding = start.matrix(vocabulary, HIDDEN, 0.05)?;
        let layers = (0..LAYERS)
            .map(|_| {
                Ok(Layer {
                    attention_norm: start.ones()?,
                    query_key_value: start.matrix(heads, HIDDEN, read)?,
                    output: start.matrix(
                        HIDDEN,
                        HEADS * HEAD_SIZE,
                        write / ((HEADS * HEAD_SIZE) as f64).sqrt(),
                    )?,
                    ffn_norm: start.ones()?,
                    gate_up: start.matrix(2 * FFN, HIDDEN, read)?,
                    down: start.matrix(HIDDEN, FFN, write / (FFN as f64).sqrt())?,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            activation,
            embedding,
            layers,
            final_norm: start.ones()?,
        })
    }

    /// The layers' weight matrices, each with the rows of every matrix it stacks.
    pub(crate) fn matrices(&self) -> Vec<(&Var, Vec<usize>)> {
        let (heads, kv_heads) = (HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE);
        self.layers
            .iter()
            .flat_map(|layer| {
                [
                    (&layer.query_key_value, vec![heads, kv_heads, kv_heads]),
                    (&layer.output, vec![HIDDEN]),
                    (&layer.gate_up, vec![FFN, FFN]),
                    (&layer.down, vec![HIDDEN]),
                ]
            })
            .collect()
    }

    /// The norms' weights.
    pub(crate) fn norms(&self) -> Vec<Var> {
        let of_layer = |layer: &Layer| [layer.attention_norm.clone(), layer.ffn_norm.clone()];
        let mut norms: Vec<Var> = self.layers.iter().flat_map(of_layer).collect();
        norms.push(self.final_norm.clone());
        norms
    }

    /// Logits at every token of `batch`; `penalties` has λ per layer and band, `activity` counts per layer.
    pub(crate) fn logits(
        &self,
        batch: &Batch,
        penalties: &[Penalty],
        activity: &[Mutex<Activity>],
    ) -> Result<Tensor> {
        let attention = Attention {
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_size: HEAD_SIZE,
            theta: THETA,
            bounds: batch.bounds.clone(),
        };
        let tokens = Tensor::from_slice(&batch.tokens, batch.tokens.len(), &Device::Cpu)?;
        let mut hidden = self.embedding.index_select(&tokens, 0)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let normed = rms_norm(&hidden, &layer.attention_norm)?;
            let mixed = normed
                .matmul(&layer.query_key_value.t()?)?
                .apply_op1(attention.clone())?;
            hidden = (hidden + mixed.matmul(&layer.output.t()?)?)?;
            let normed = rms_norm(&hidden, &layer.ffn_norm)?;
            let gate_up = normed.matmul(&layer.gate_up.t()?)?;
            let gated = Gated {
                activation: self.activation,
                penalty: &penalties[index],
                activity: &activity[index],
            }
            .apply(&gate_up)?;
            hidden = (hidden + gated.matmul(&layer.down.t()?)?)?;
        }
        rms_norm(&hidden, &self.final_norm)?.matmul(&self.embedding.t()?)
    }
}
