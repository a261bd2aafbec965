//! A predictor: `logits = B · relu(A · x) + b`, or `B · A · x + b` if linear.
//!
//! The bias is an addition to the published `B · relu(A · x)`: without it the network spends rank on the activation frequency
//! of each neuron.

use powerinfer_artifact::{
    predictor_file::{BIAS, PredictorInput},
    random::Random,
};
use powerinfer_kernels::Isa;
use powerinfer_tensor::{Format, OwnedMatrix, pack};

use crate::calibrate::Predicts;

/// A predictor in its stored format, which the runtime computes with.
pub(crate) struct Network {
    pub(crate) rank: usize,
    /// Whether the network is linear, without ReLU.
    pub(crate) is_linear: bool,
    /// Optimiser steps of training.
    pub(crate) steps: usize,
    pub(crate) input: PredictorInput,
    pub(crate) a: OwnedMatrix,
    pub(crate) b: OwnedMatrix,
    /// `[neurons, 1]`.
    pub(crate) bias: OwnedMatrix,
}

/// A network in `f32`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Weights {
    pub(crate) rank: usize,
    /// Whether the network is linear, without ReLU.
    pub(crate) is_linear: bool,
    /// `[rank, hidden]`.
    pub(crate) a: Vec<f32>,
    /// `[neurons, rank]`.
    pub(crate) b: Vec<f32>,
    /// `[neurons]`.
    pub(crate) bias: Vec<f32>,
}

impl Weights {
    /// Random weights for `hidden` inputs, with a given bias per neuron.
    pub(crate) fn random(hidden: usize, bias: Vec<f32>, rank: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut normal = |rows: usize, columns: usize| -> Vec<f32> {
            let deviation = 1.0 / (columns as f64).sqrt();
            let values = (0..rows * columns).map(|_| (random.normal() * deviation) as f32);
            values.collect()
        };
        Self {
            rank,
            is_linear: false,
            a: normal(rank, hidden),
            b: normal(bias.len(), rank),
            bias,
        }
    }

    /// Changes the rank: removes the hidden units with the smallest weights, or adds units with random inputs and zero
    /// outputs, which leave the function unchanged.
    pub(crate) fn at_rank(&self, rank: usize, seed: u64) -> Self {
        let hidden = self.a.len() / self.rank;
        let neurons = self.bias.len();
        let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>();
        let weight = |unit: usize| {
            let row = &self.a[unit * hidden..][..hidden];
            let column = self.b.iter().skip(unit).step_by(self.rank);
            square(&mut row.iter().copied()) * square(&mut column.copied())
        };
        let mut units: Vec<usize> = (0..self.rank).collect();
        units.sort_by(|x, y| weight(*y).total_cmp(&weight(*x)));
        units.truncate(rank);
        let mut random = Random::new(seed);
        let deviation = 1.0 / (hidden as f64).sqrt();
        let mut a: Vec<f32> = units
            .iter()
            .flat_map(|unit| &self.a[unit * hidden..][..hidden])
            .copied()
            .collect();
        a.resize_with(rank * hidden, || (random.normal() * deviation) as f32);
        let mut b = vec![0.0; neurons * rank];
        for (neuron, row) in b.chunks_exact_mut(rank).enumerate() {
            for (out, unit) in row.iter_mut().zip(&units) {
                *out = self.b[neuron * self.rank + unit];
            }
        }
        Self {
            rank,
            is_linear: self.is_linear,
            a,
            b,
            bias: self.bias.clone(),
        }
    }

    /// Quantises or converts the network, trained for `steps`, to `format`.
    pub(crate) fn pack(&self, format: Format, steps: usize) -> Network {
        let (hidden, neurons) = (self.a.len() / self.rank, self.bias.len());
        Network {
            rank: self.rank,
            is_linear: self.is_linear,
            steps,
            input: PredictorInput::Normed,
            a: pack(format, self.rank, hidden, &self.a),
            b: pack(format, neurons, self.rank, &self.b),
            bias: pack(BIAS, neurons, 1, &self.bias),
        }
    }
}

impl Network {
    /// Bytes of A, B and the bias.
    pub(crate) fn bytes(&self) -> usize {
        let matrices = [&self.a, &self.b, &self.bias].map(OwnedMatrix::as_view);
        let bytes = matrices
            .iter()
            .map(|matrix| matrix.rows() * matrix.row_bytes());
        bytes.sum()
    }
}

impl Predicts for Network {
    fn input(&self) -> PredictorInput {
        self.input
    }

    /// Computed as in the runtime.
    fn logits(&self, isa: Isa, x: &[f32], logits: &mut [f32]) {
        let mut hidden_units = vec![0.0; self.rank];
        isa.gemv(&self.a.as_view(), x, &mut hidden_units);
        if !self.is_linear {
            hidden_units
                .iter_mut()
                .for_each(|value| *value = value.max(0.0));
        }
        isa.gemv(&self.b.as_view(), &hidden_units, logits);
        let bias = self.bias.as_view();
        for (neuron, logit) in logits.iter_mut().enumerate() {
            let mut one = [0.0];
            bias.dequantise_row(neuron, &mut one);
            *logit += one[0];
        }
    }
}
