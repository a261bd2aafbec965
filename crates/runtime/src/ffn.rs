//! The FFN under a policy: which neurons are computed is decided here and nowhere else.

use std::ops::Range;

use powerinfer_artifact::{TensorFile, plan::Policy};
use powerinfer_bundle::StoredLinear;
use powerinfer_kernels::Matrix;
use powerinfer_model::{Activation, FfnKind};

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

/// A matrix and its bias, borrowed for a forward pass.
#[derive(Clone, Copy)]
pub(crate) struct Linear<'a> {
    pub(crate) matrix: Matrix<'a>,
    pub(crate) bias: Option<&'a [f32]>,
}

impl<'a> Linear<'a> {
    /// The matrix that `stored` says lies in `file`.
    pub(crate) fn of(stored: &'a StoredLinear, file: &'a TensorFile) -> Self {
        Self {
            matrix: stored.matrix.view(file),
            bias: stored.bias.as_deref(),
        }
    }

    /// Bytes that one row and its bias take.
    fn row_bytes(&self) -> usize {
        self.matrix.row_bytes() + self.bias.map_or(0, |_| size_of::<f32>())
    }

    /// Adds the biases of the rows from `first` on to their products.
    fn add_bias(&self, first: usize, products: &mut [f32]) {
        if let Some(bias) = self.bias {
            let bias = &bias[first..];
            products
                .iter_mut()
                .zip(bias)
                .for_each(|(x, bias)| *x += bias);
        }
    }

    /// Adds the biases of `rows` to their products.
    fn add_bias_of(&self, rows: &[u32], products: &mut [f32]) {
        if let Some(bias) = self.bias {
            for (product, row) in products.iter_mut().zip(rows) {
                *product += bias[*row as usize];
            }
        }
    }
}

/// A layer's FFN, borrowed for a forward pass; rows of all matrices are neurons, hottest first.
pub(crate) struct Ffn<'a> {
    pub(crate) gate: Linear<'a>,
    /// Where the FFN is gated.
    pub(crate) up: Option<Linear<'a>>,
    /// Transposed: row i is what neuron i adds to the hidden state.
    pub(crate) down: Linear<'a>,
    pub(crate) kind: FfnKind,
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
    /// one token at a time; the predictor sees `foreseen_from`, as long as `x`.
    ///
    /// Together the tokens of a prompt wake nearly every neuron, so gate and up go through all
    /// of them at once. Predicted tokens go one by one: their policy must not depend on company.
    pub(crate) fn run_batch(
        &self,
        threads: &Threads,
        x: &[f32],
        foreseen_from: &[f32],
        hidden: &mut [f32],
        scratch: &mut Scratch,
        statistics: &mut Statistics,
    ) {
        let size = self.gate.matrix.columns();
        let tokens = x.len() / size;
        if let Some(bias) = self.down.bias {
            for hidden in hidden.chunks_exact_mut(size) {
                hidden.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
            }
            statistics.bytes_read += size_of_val(bias) as u64;
        }
        if tokens == 1 || self.policy == Policy::Predicted {
            let inputs = x.chunks_exact(size).zip(foreseen_from.chunks_exact(size));
            for ((x, foreseen_from), hidden) in inputs.zip(hidden.chunks_exact_mut(size)) {
                self.run(threads, x, foreseen_from, hidden, scratch, statistics);
            }
            return;
        }
        let neurons = self.gate.matrix.rows();
        statistics.neurons += (tokens * neurons) as u64;
        for side in [0..self.hot_count, self.hot_count..neurons] {
            if side.is_empty() {
                continue;
            }
            let mut read = 0;
            let mut all = |linear: &Linear<'_>| {
                let mut products = vec![0.0; tokens * side.len()];
                let rows = linear.matrix.rows_range(side.clone());
                threads.gemm(&rows, x, tokens, &mut products);
                for products in products.chunks_exact_mut(side.len()) {
                    linear.add_bias(side.start, products);
                }
                read += side.len() * linear.row_bytes();
                products
            };
            let gates = all(&self.gate);
            let ups = self.up.as_ref().map(all);
            for (token, hidden) in hidden.chunks_exact_mut(size).enumerate() {
                let Scratch {
                    gate,
                    rows,
                    partial,
                    ..
                } = scratch;
                gate.clear();
                rows.clear();
                for index in 0..side.len() {
                    let place = token * side.len() + index;
                    let up = ups.as_ref().map(|ups| ups[place]);
                    let value = self.neuron(self.activation.apply(gates[place]), up);
                    if value != 0.0 || self.policy == Policy::Dense {
                        rows.push((side.start + index) as u32);
                        gate.push(value);
                    }
                }
                partial.clear();
                partial.resize(size, 0.0);
                threads.axpy_rows(&self.down.matrix, rows, gate, partial);
                hidden
                    .iter_mut()
                    .zip(partial)
                    .for_each(|(hidden, partial)| *hidden += *partial);
                read += rows.len() * self.down.matrix.row_bytes();
                statistics.neurons_computed += rows.len() as u64;
            }
            statistics.bytes_read += read as u64;
        }
    }

    /// What a neuron multiplies its row of down by: its activation, its up product if it has one.
    fn neuron(&self, activation: f32, up: Option<f32>) -> f32 {
        match (self.kind, up) {
            (FfnKind::DoublyGated, Some(up)) => activation * self.activation.apply(up),
            (_, Some(up)) => activation * up,
            (_, None) => activation,
        }
    }

    /// Adds the FFN's output for one token `x`, foreseen from `foreseen_from`, to `hidden`.
    ///
    /// The hot and the cold side each run gate, activation, up and down on their own neurons;
    /// their sums of d_model numbers are merged once.
    fn run(
        &self,
        threads: &Threads,
        x: &[f32],
        foreseen_from: &[f32],
        hidden: &mut [f32],
        scratch: &mut Scratch,
        statistics: &mut Statistics,
    ) {
        let neurons = self.gate.matrix.rows();
        statistics.neurons += neurons as u64;
        let predictor = self
            .predictor
            .as_ref()
            .filter(|_| self.policy == Policy::Predicted);
        if let Some(predictor) = predictor {
            predictor.run(threads, foreseen_from, scratch, statistics);
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
        // Gate first: a neuron whose gate is exactly zero contributes exactly nothing, so the
        // rest of its weights need not be read.
        gate.resize(rows.len(), 0.0);
        if rows.len() == side.len() {
            threads.gemv(&self.gate.matrix.rows_range(side.clone()), x, gate);
            self.gate.add_bias(side.start, gate);
        } else {
            threads.gemv_rows(&self.gate.matrix, rows, x, gate);
            self.gate.add_bias_of(rows, gate);
        }
        let mut read = rows.len() * self.gate.row_bytes();
        gate.iter_mut()
            .for_each(|gate| *gate = self.activation.apply(*gate));
        self.drop_silent(rows, gate);
        if let Some(linear) = &self.up {
            up.resize(rows.len(), 0.0);
            threads.gemv_rows(&linear.matrix, rows, x, up);
            linear.add_bias_of(rows, up);
            read += rows.len() * linear.row_bytes();
            gate.iter_mut()
                .zip(up)
                .for_each(|(gate, up)| *gate = self.neuron(*gate, Some(*up)));
            self.drop_silent(rows, gate);
        }
        threads.axpy_rows(&self.down.matrix, rows, gate, partial);
        read += rows.len() * self.down.matrix.row_bytes();
        statistics.neurons_computed += rows.len() as u64;
        statistics.bytes_read += read as u64;
    }

    /// Keeps the rows whose value is not exactly zero, unless everything is to be computed.
    fn drop_silent(&self, rows: &mut Vec<u32>, values: &mut Vec<f32>) {
        if self.policy == Policy::Dense {
            return;
        }
        let mut alive = values.iter().map(|value| *value != 0.0);
        rows.retain(|_| alive.next().unwrap_or(false));
        values.retain(|value| *value != 0.0);
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
