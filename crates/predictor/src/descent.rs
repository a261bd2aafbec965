//! AdamW steps on `logits = B · relu(A · x) + b`, or without ReLU.
//!
//! Blocks of neurons run through the whole step in parallel: logits, their gradient, the gradient of B's rows, and the update
//! of the rows. So the logits of a batch are never in memory all together, and a block stays in the cache. Sums over blocks
//! are taken in order, so that results do not depend on the number of threads.

use candle_core::{Device, Result, Tensor};
use rayon::prelude::*;

use crate::{
    loss::{self, Labels},
    network::Weights,
};

/// Neurons per block.
const BLOCK: usize = 512;
/// Parameters per task when A is updated.
const PIECE: usize = 1 << 15;

const BETA1: f32 = 0.9;
const BETA2: f32 = 0.99;
const EPSILON: f32 = 1e-8;
const WEIGHT_DECAY: f32 = 1e-3;

/// Inputs of a batch, `[tokens, hidden]`, and its labels.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) inputs: Tensor,
    pub(crate) labels: Labels,
}

impl Batch {
    /// Number of tokens.
    fn tokens(&self) -> usize {
        self.inputs.dims()[0]
    }
}

/// A network in training.
pub(crate) struct Descent {
    hidden: usize,
    rank: usize,
    is_linear: bool,
    neurons: usize,
    /// `[rank, hidden]`.
    a: Parameters,
    blocks: Vec<Block>,
    steps: i32,
}

/// Parameters of consecutive neurons.
struct Block {
    first: usize,
    /// `[neurons, rank]`.
    b: Parameters,
    bias: Parameters,
}

/// Parameters with the moments of AdamW.
struct Parameters {
    values: Vec<f32>,
    mean: Vec<f32>,
    square: Vec<f32>,
}

/// Step size of AdamW.
#[derive(Clone, Copy)]
struct Stride {
    learning_rate: f32,
    /// Bias corrections of the moments.
    mean_scale: f32,
    square_scale: f32,
}

impl Parameters {
    fn new(values: &[f32]) -> Self {
        Self {
            values: values.to_vec(),
            mean: vec![0.0; values.len()],
            square: vec![0.0; values.len()],
        }
    }

    fn step(&mut self, gradient: &[f32], stride: Stride) {
        let pieces = self.values.par_chunks_mut(PIECE);
        let pieces = pieces.zip(self.mean.par_chunks_mut(PIECE));
        let pieces = pieces.zip(self.square.par_chunks_mut(PIECE));
        let pieces = pieces.zip(gradient.par_chunks(PIECE));
        pieces.for_each(|(((values, mean), square), gradient)| {
            for (((value, mean), square), g) in
                values.iter_mut().zip(mean).zip(square).zip(gradient)
            {
                *mean = BETA1 * *mean + (1.0 - BETA1) * g;
                *square = BETA2 * *square + (1.0 - BETA2) * g * g;
                let direction =
                    *mean * stride.mean_scale / ((*square * stride.square_scale).sqrt() + EPSILON);
                *value -= stride.learning_rate * (direction + WEIGHT_DECAY * *value);
            }
        });
    }
}

impl Descent {
    pub(crate) fn new(start: &Weights) -> Self {
        let Weights {
            rank,
            is_linear,
            a,
            b,
            bias,
        } = start;
        let (rank, is_linear) = (*rank, *is_linear);
        let blocks = b.chunks(BLOCK * rank).zip(bias.chunks(BLOCK)).enumerate();
        Self {
            hidden: a.len() / rank,
            rank,
            is_linear,
            neurons: bias.len(),
            a: Parameters::new(a),
            blocks: blocks
                .map(|(index, (b, bias))| Block {
                    first: index * BLOCK,
                    b: Parameters::new(b),
                    bias: Parameters::new(bias),
                })
                .collect(),
            steps: 0,
        }
    }

    /// The current network.
    pub(crate) fn weights(&self) -> Weights {
        let of_blocks = |part: fn(&Block) -> &Parameters| {
            let values = self.blocks.iter().map(part);
            values.flat_map(|part| &part.values).copied().collect()
        };
        Weights {
            rank: self.rank,
            is_linear: self.is_linear,
            a: self.a.values.clone(),
            b: of_blocks(|block| &block.b),
            bias: of_blocks(|block| &block.bias),
        }
    }

    /// `relu(A · x)` or `A · x`, `[tokens, rank]`.
    fn hidden_units(&self, batch: &Batch) -> Result<Tensor> {
        let a = matrix(&self.a.values, self.rank, self.hidden)?;
        let units = batch.inputs.matmul(&a.t()?)?;
        match self.is_linear {
            true => Ok(units),
            false => units.relu(),
        }
    }

    /// Mean loss over a batch.
    pub(crate) fn loss(&self, batch: &Batch) -> Result<f64> {
        let hidden_units = self.hidden_units(batch)?;
        let sums = self.blocks.par_iter().map(|block| {
            let logits = values(&block.logits(&hidden_units)?)?;
            Ok(loss::sum(
                &batch.labels,
                block.first,
                block.neurons(),
                &logits,
            ))
        });
        let sums: Vec<f64> = sums.collect::<Result<_>>()?;
        Ok(sums.iter().sum::<f64>() / (batch.tokens() * self.neurons) as f64)
    }

    /// Takes a step on a batch; returns `false` if the gradient is not finite.
    pub(crate) fn step(&mut self, batch: &Batch, learning_rate: f64) -> Result<bool> {
        self.steps += 1;
        let correction = |beta: f32| 1.0 / (1.0 - beta.powi(self.steps));
        let stride = Stride {
            learning_rate: learning_rate as f32,
            mean_scale: correction(BETA1),
            square_scale: correction(BETA2),
        };
        let scale = 1.0 / (batch.tokens() * self.neurons) as f32;
        let hidden_units = self.hidden_units(batch)?;
        let blocks = self.blocks.par_iter_mut();
        let gradients = blocks.map(|block| block.step(&hidden_units, &batch.labels, scale, stride));
        let gradients: Vec<Vec<f32>> = gradients.collect::<Result<_>>()?;
        // Gradient of the input of ReLU: passes where the value was positive.
        let mut hidden_gradient = vec![0.0; batch.tokens() * self.rank];
        for gradient in &gradients {
            for (sum, gradient) in hidden_gradient.iter_mut().zip(gradient) {
                *sum += gradient;
            }
        }
        if !self.is_linear {
            for (gradient, value) in hidden_gradient.iter_mut().zip(values(&hidden_units)?) {
                *gradient = if value > 0.0 { *gradient } else { 0.0 };
            }
        }
        let is_finite = hidden_gradient.iter().sum::<f32>().is_finite();
        let hidden_gradient =
            Tensor::from_vec(hidden_gradient, hidden_units.shape(), &Device::Cpu)?;
        let of_a = hidden_gradient.t()?.matmul(&batch.inputs)?;
        self.a.step(&values(&of_a)?, stride);
        Ok(is_finite)
    }
}

impl Block {
    fn neurons(&self) -> usize {
        self.bias.values.len()
    }

    /// `[tokens, neurons]`.
    fn logits(&self, hidden_units: &Tensor) -> Result<Tensor> {
        let rank = hidden_units.dims()[1];
        let b = matrix(&self.b.values, self.neurons(), rank)?;
        let bias = matrix(&self.bias.values, 1, self.neurons())?;
        hidden_units.matmul(&b.t()?)?.broadcast_add(&bias)
    }

    /// Updates the block; returns its contribution, before the update, to the gradient of `hidden_units`.
    fn step(
        &mut self,
        hidden_units: &Tensor,
        labels: &Labels,
        scale: f32,
        stride: Stride,
    ) -> Result<Vec<f32>> {
        let (neurons, rank) = (self.neurons(), hidden_units.dims()[1]);
        let mut gradient = values(&self.logits(hidden_units)?)?;
        loss::gradient(labels, self.first, neurons, scale, &mut gradient);
        let mut of_bias = vec![0.0; neurons];
        for row in gradient.chunks_exact(neurons) {
            for (sum, gradient) in of_bias.iter_mut().zip(row) {
                *sum += gradient;
            }
        }
        let gradient = Tensor::from_vec(gradient, (hidden_units.dims()[0], neurons), &Device::Cpu)?;
        let b = matrix(&self.b.values, neurons, rank)?;
        let hidden_gradient = values(&gradient.matmul(&b)?)?;
        let of_b = values(&gradient.t()?.matmul(hidden_units)?)?;
        self.b.step(&of_b, stride);
        self.bias.step(&of_bias, stride);
        Ok(hidden_gradient)
    }
}

pub(crate) fn matrix(values: &[f32], rows: usize, columns: usize) -> Result<Tensor> {
    Tensor::from_slice(values, (rows, columns), &Device::Cpu)
}

pub(crate) fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        loss::MissCost,
        planted::{EASY, Planted, planted},
    };

    #[test]
    fn the_first_step_descends_along_every_parameter() {
        // More neurons than one block, but not whole blocks.
        let shape = Planted {
            hidden: 8,
            neurons: 600,
            tokens: [40, 0],
            ..EASY
        };
        let samples = planted(shape, 3).training;
        let tokens: Vec<usize> = (0..samples.tokens()).collect();
        let inputs: Vec<f32> = tokens.iter().flat_map(|t| samples.input(*t)).collect();
        let mut labels = Labels::default();
        for token in &tokens {
            labels.add(&samples, *token, MissCost::ByContribution(3.0));
        }
        let batch = Batch {
            inputs: matrix(&inputs, tokens.len(), shape.hidden).unwrap(),
            labels,
        };
        let parameters = |count: usize, scale: f32| -> Vec<f32> {
            let each = (0..count).map(|n| scale * ((n * 7919 % 101) as f32 / 50.0 - 1.0));
            each.collect()
        };
        for is_linear in [false, true] {
            let before = [
                parameters(3 * 8, 0.5),
                parameters(600 * 3, 0.5),
                parameters(600, 1.0),
            ];
            let network = |[a, b, bias]: [Vec<f32>; 3]| {
                Descent::new(&Weights {
                    rank: 3,
                    is_linear,
                    a,
                    b,
                    bias,
                })
            };
            let mut descent = network(before.clone());
            let learning_rate = 1e-3;
            assert!(descent.step(&batch, learning_rate).unwrap());
            let Weights { a, b, bias, .. } = descent.weights();
            let after = [a, b, bias];
            let mut compared = 0;
            for (part, stride) in [(0, 1), (1, 97), (2, 53)] {
                for index in (0..before[part].len()).step_by(stride) {
                    let loss = |change: f32| {
                        let mut weights = before.clone();
                        weights[part][index] += change;
                        network(weights).loss(&batch).unwrap()
                    };
                    let slope = (loss(1e-2) - loss(-1e-2)) / 2e-2;
                    if slope.abs() < 1e-7 {
                        continue; // below rounding
                    }
                    compared += 1;
                    // The first step of AdamW has the size of the learning rate.
                    let decay = WEIGHT_DECAY * before[part][index];
                    let moved = (after[part][index] - before[part][index]) / learning_rate as f32;
                    let expected = -(slope.signum() as f32) - decay;
                    assert!(
                        (moved - expected).abs() < 0.02,
                        "{part} {index}: {moved} {slope}"
                    );
                }
            }
            assert!(compared > 40, "{compared}");
        }
    }
}
