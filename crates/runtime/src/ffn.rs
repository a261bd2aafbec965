//! The FFN under a policy: which neurons are computed is decided here and nowhere else.

use std::ops::Range;

use powerinfer_artifact::plan::Policy;
use powerinfer_kernels::Matrix;
use powerinfer_model::Activation;

use crate::{Statistics, Threads};

/// Which policy each layer follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyChoice {
    /// The one its plan says.
    #[default]
    Planned,
    /// This one.
    Forced(Policy),
}

/// A layer's FFN, borrowed for a forward pass; rows of all matrices are neurons, hottest first.
pub(crate) struct Ffn<'a> {
    pub(crate) gate: Matrix<'a>,
    pub(crate) up: Matrix<'a>,
    /// Transposed: row i is what neuron i adds to the hidden state.
    pub(crate) down: Matrix<'a>,
    pub(crate) activation: Activation,
    pub(crate) policy: Policy,
    /// Needed by [`Policy::Predicted`].
    pub(crate) predictor: Option<Predictor<'a>>,
    /// Neurons of the first side; the rest are the second's.
    pub(crate) hot_count: usize,
}

/// A layer's predictor, borrowed for a forward pass.
pub(crate) struct Predictor<'a> {
    pub(crate) a: Matrix<'a>,
    pub(crate) b: Matrix<'a>,
    pub(crate) bias: &'a [f32],
    pub(crate) threshold: f32,
}

/// Memory that is used again from layer to layer.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    middle: Vec<f32>,
    logits: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    rows: Vec<u32>,
    partial: Vec<f32>,
}

impl Ffn<'_> {
    /// Adds the FFN's output for some tokens, `x [tokens, hidden]`, to `hidden`, with the bits of
    /// one token at a time.
    ///
    /// Together the tokens of a prompt wake nearly every neuron, so gate and up go through all
    /// of them at once. Predicted tokens go one by one: their policy must not depend on company.
    pub(crate) fn run_batch(
        &self,
        threads: &Threads,
        x: &[f32],
        hidden: &mut [f32],
        scratch: &mut Scratch,
        statistics: &mut Statistics,
    ) {
        let size = self.gate.columns();
        let tokens = x.len() / size;
        if tokens == 1 || self.policy == Policy::Predicted {
            for (x, hidden) in x.chunks_exact(size).zip(hidden.chunks_exact_mut(size)) {
                self.run(threads, x, hidden, scratch, statistics);
            }
            return;
        }
        let neurons = self.gate.rows();
        statistics.neurons += (tokens * neurons) as u64;
        for side in [0..self.hot_count, self.hot_count..neurons] {
            if side.is_empty() {
                continue;
            }
            let (mut gates, mut ups) = (
                vec![0.0; tokens * side.len()],
                vec![0.0; tokens * side.len()],
            );
            threads.gemm(&self.gate.rows_range(side.clone()), x, tokens, &mut gates);
            threads.gemm(&self.up.rows_range(side.clone()), x, tokens, &mut ups);
            let mut read = side.len() * (self.gate.row_bytes() + self.up.row_bytes());
            let per_token = gates
                .chunks_exact(side.len())
                .zip(ups.chunks_exact(side.len()));
            for ((gates, ups), hidden) in per_token.zip(hidden.chunks_exact_mut(size)) {
                let Scratch {
                    gate,
                    rows,
                    partial,
                    ..
                } = scratch;
                gate.clear();
                rows.clear();
                for (index, (value, up)) in gates.iter().zip(ups).enumerate() {
                    let value = self.activation.apply(*value);
                    if value != 0.0 || self.policy == Policy::Dense {
                        rows.push((side.start + index) as u32);
                        gate.push(value * up);
                    }
                }
                partial.clear();
                partial.resize(size, 0.0);
                threads.axpy_rows(&self.down, rows, gate, partial);
                hidden
                    .iter_mut()
                    .zip(partial)
                    .for_each(|(hidden, partial)| *hidden += *partial);
                read += rows.len() * self.down.row_bytes();
                statistics.neurons_computed += rows.len() as u64;
            }
            statistics.bytes_read += read as u64;
        }
    }

    /// Adds the FFN's output for one token `x` to `hidden`.
    ///
    /// The hot and the cold side each run gate, activation, up and down on their own neurons;
    /// their sums of d_model numbers are merged once.
    fn run(
        &self,
        threads: &Threads,
        x: &[f32],
        hidden: &mut [f32],
        scratch: &mut Scratch,
        statistics: &mut Statistics,
    ) {
        let neurons = self.gate.rows();
        statistics.neurons += neurons as u64;
        let predictor = self
            .predictor
            .as_ref()
            .filter(|_| self.policy == Policy::Predicted);
        if let Some(predictor) = predictor {
            predictor.run(threads, x, scratch, statistics);
        }
        for side in [0..self.hot_count, self.hot_count..neurons] {
            if side.is_empty() {
                continue;
            }
            scratch.partial.clear();
            scratch.partial.resize(hidden.len(), 0.0);
            self.side(
                threads,
                x,
                side,
                predictor.map(|predictor| predictor.threshold),
                scratch,
                statistics,
            );
            hidden
                .iter_mut()
                .zip(&scratch.partial)
                .for_each(|(hidden, partial)| *hidden += partial);
        }
    }

    /// Adds what the neurons of `side` contribute to `scratch.partial`.
    fn side(
        &self,
        threads: &Threads,
        x: &[f32],
        side: Range<usize>,
        threshold: Option<f32>,
        scratch: &mut Scratch,
        statistics: &mut Statistics,
    ) {
        let Scratch {
            gate,
            up,
            rows,
            partial,
            logits,
            ..
        } = scratch;
        rows.clear();
        rows.extend(side.start as u32..side.end as u32);
        if let Some(threshold) = threshold {
            rows.retain(|row| logits[*row as usize] >= threshold);
        }
        // Gate first: for a ReLU a neuron whose gate is silent contributes exactly nothing, so
        // the other two thirds of its weights need not be read.
        gate.resize(rows.len(), 0.0);
        if rows.len() == side.len() {
            threads.gemv(&self.gate.rows_range(side), x, gate);
        } else {
            threads.gemv_rows(&self.gate, rows, x, gate);
        }
        let mut read = rows.len() * self.gate.row_bytes();
        gate.iter_mut()
            .for_each(|gate| *gate = self.activation.apply(*gate));
        if self.policy != Policy::Dense {
            let mut alive = gate.iter().map(|gate| *gate != 0.0);
            rows.retain(|_| alive.next().unwrap_or(false));
            gate.retain(|gate| *gate != 0.0);
        }
        up.resize(rows.len(), 0.0);
        threads.gemv_rows(&self.up, rows, x, up);
        gate.iter_mut().zip(up).for_each(|(gate, up)| *gate *= *up);
        threads.axpy_rows(&self.down, rows, gate, partial);
        read += rows.len() * (self.up.row_bytes() + self.down.row_bytes());
        statistics.neurons_computed += rows.len() as u64;
        statistics.bytes_read += read as u64;
    }
}

impl Predictor<'_> {
    /// Leaves a logit per neuron in `scratch.logits`: `B · relu(A · x) + b`.
    fn run(
        &self,
        threads: &Threads,
        x: &[f32],
        scratch: &mut Scratch,
        statistics: &mut Statistics,
    ) {
        let Scratch { middle, logits, .. } = scratch;
        middle.resize(self.a.rows(), 0.0);
        threads.gemv(&self.a, x, middle);
        middle.iter_mut().for_each(|value| *value = value.max(0.0));
        logits.resize(self.b.rows(), 0.0);
        threads.gemv(&self.b, middle, logits);
        logits
            .iter_mut()
            .zip(self.bias)
            .for_each(|(logit, bias)| *logit += *bias);
        let [a, b] = [&self.a, &self.b].map(|matrix| matrix.rows() * matrix.row_bytes());
        statistics.bytes_read += (a + b + size_of_val(self.bias)) as u64;
    }
}
