//! The FFN under a policy: gate, up and down of the neurons that it chooses.

use std::ops::Range;

use powerinfer_artifact::plan::Policy;
use powerinfer_bundle::Layout;
use powerinfer_model::{Activation, FfnKind};

use crate::{
    Stage, Statistics, Threads,
    choice::{Choice, Foreseen},
    linear::{Linear, masked},
};

/// Which policy each layer follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyChoice {
    /// The one its plan says.
    #[default]
    Planned,
    /// This one.
    Forced(Policy),
}

/// A layer's FFN, borrowed for a forward pass; neurons are hottest first in all matrices.
pub(crate) struct Ffn<'a> {
    pub(crate) gate: Linear<'a>,
    /// Where the FFN is gated.
    pub(crate) up: Option<Linear<'a>>,
    /// By input: row i is what neuron i adds to the hidden state.
    pub(crate) down: Linear<'a>,
    pub(crate) kind: FfnKind,
    pub(crate) activation: Activation,
    /// Inputs of gate and up that are smaller count as 0.
    pub(crate) input_threshold: f32,
    /// Who is computed.
    pub(crate) choice: Choice<'a>,
    /// Neurons of the first side; the rest are the second's.
    pub(crate) hot_count: usize,
}

/// Memory that is used again from layer to layer.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    foreseen: Foreseen,
    /// Products of all neurons, where they come from a matrix by input.
    whole_gate: Vec<f32>,
    whole_up: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    rows: Vec<u32>,
    partial: Vec<f32>,
    /// Per token, the neurons that were computed and what their rows of down were multiplied by;
    /// filled where somebody has put a list here.
    pub(crate) recorded: Option<Vec<Vec<(u32, f32)>>>,
}

impl Scratch {
    /// Remembers what was computed of a token, where that is asked for.
    fn record(&mut self, token: usize) {
        if let Some(recorded) = &mut self.recorded {
            recorded.resize(recorded.len().max(token + 1), Vec::new());
            let values = self.gate.iter().copied();
            recorded[token].extend(self.rows.iter().copied().zip(values));
        }
    }
}

impl Ffn<'_> {
    /// Adds the FFN's output for some tokens, `x [tokens, hidden]`, to `hidden`, with the bits of
    /// one token at a time; whatever foresees sees `foreseen_from`, as long as `x`.
    ///
    /// Together the tokens of a prompt wake nearly every neuron, so gate and up go through all
    /// of them at once. Foreseen tokens go one by one: their policy must not depend on company. So
    /// do those of matrices by input, each of which reads other rows.
    pub(crate) fn run_batch(
        &self,
        threads: &Threads,
        x: &[f32],
        foreseen_from: &[f32],
        hidden: &mut [f32],
        scratch: &mut Scratch,
        statistics: &mut Statistics,
    ) {
        let size = self.gate.inputs();
        let tokens = x.len() / size;
        let x = &masked(x, self.input_threshold);
        for constant in [self.down.bias, self.choice.offset()].into_iter().flatten() {
            for hidden in hidden.chunks_exact_mut(size) {
                add(hidden, constant);
            }
            statistics.bytes_read += size_of_val(constant) as u64;
        }
        let is_by_input = |linear: &Linear<'_>| linear.layout == Layout::ByInput;
        let by_input = is_by_input(&self.gate) || self.up.as_ref().is_some_and(is_by_input);
        if tokens == 1 || by_input || self.choice.foresees() {
            let inputs = x.chunks_exact(size).zip(foreseen_from.chunks_exact(size));
            let inputs = inputs.zip(hidden.chunks_exact_mut(size));
            for (token, ((x, foreseen_from), hidden)) in inputs.enumerate() {
                self.run(
                    threads,
                    token,
                    x,
                    foreseen_from,
                    hidden,
                    scratch,
                    statistics,
                );
            }
            return;
        }
        let neurons = self.gate.outputs();
        statistics.neurons += (tokens * neurons) as u64;
        for side in [0..self.hot_count, self.hot_count..neurons] {
            if side.is_empty() {
                continue;
            }
            let mut read = 0;
            let mut all = |linear: &Linear<'_>| {
                let product = linear.product_of_rows(threads, x, side.clone());
                read += product.bytes_read;
                product.values
            };
            let gates = all(&self.gate);
            let ups = self.up.as_ref().map(all);
            statistics.bytes_read += read as u64;
            statistics.mark(Stage::GateUp);
            for (token, hidden) in hidden.chunks_exact_mut(size).enumerate() {
                scratch.gate.clear();
                scratch.rows.clear();
                for index in 0..side.len() {
                    let (place, neuron) = (token * side.len() + index, side.start + index);
                    let activation = self.activation.apply(gates[place]);
                    if !self.choice.passes_gate(neuron, activation) {
                        continue;
                    }
                    let up = ups.as_ref().map(|ups| ups[place]);
                    let product = self.product(activation, up);
                    if let Some(coefficient) = self.choice.coefficient(neuron, product) {
                        scratch.rows.push(neuron as u32);
                        scratch.gate.push(coefficient);
                    }
                }
                let read = self.add_down(threads, token, hidden, scratch, statistics);
                statistics.bytes_read += read as u64;
            }
            statistics.mark(Stage::Down);
        }
    }

    /// What a neuron multiplies its row of down by: its activation, its up product if it has one.
    fn product(&self, activation: f32, up: Option<f32>) -> f32 {
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
    #[allow(clippy::too_many_arguments)] // each is another thing that a pass reads or leaves
    fn run(
        &self,
        threads: &Threads,
        token: usize,
        x: &[f32],
        foreseen_from: &[f32],
        hidden: &mut [f32],
        scratch: &mut Scratch,
        statistics: &mut Statistics,
    ) {
        let neurons = self.gate.outputs();
        statistics.neurons += neurons as u64;
        let mut whole = |linear: &Linear<'_>, products: &mut Vec<f32>| {
            if linear.layout == Layout::ByInput {
                let product = linear.product(threads, x, self.input_threshold);
                statistics.bytes_read += product.bytes_read as u64;
                *products = product.values;
            }
        };
        whole(&self.gate, &mut scratch.whole_gate);
        if let Some(up) = &self.up {
            whole(up, &mut scratch.whole_up);
        }
        if self.choice.foresees() {
            statistics.mark(Stage::GateUp);
            let foreseen = &mut scratch.foreseen;
            self.choice
                .foresee(threads, foreseen_from, foreseen, statistics);
            statistics.mark(Stage::Foreseeing);
        }
        for side in [0..self.hot_count, self.hot_count..neurons] {
            if !side.is_empty() {
                let read = self.side(threads, x, side, scratch);
                statistics.bytes_read += read as u64;
                statistics.mark(Stage::GateUp);
                let read = self.add_down(threads, token, hidden, scratch, statistics);
                statistics.bytes_read += read as u64;
                statistics.mark(Stage::Down);
            }
        }
    }

    /// Leaves the neurons of `side` that are computed in `scratch.rows` and what their rows of down
    /// are multiplied by in `scratch.gate`; returns the bytes read.
    fn side(
        &self,
        threads: &Threads,
        x: &[f32],
        side: Range<usize>,
        scratch: &mut Scratch,
    ) -> usize {
        let Scratch {
            foreseen,
            whole_gate,
            whole_up,
            gate,
            up,
            rows,
            ..
        } = scratch;
        rows.clear();
        if self.choice.foresees() {
            foreseen.list(side.clone(), rows);
        } else {
            rows.extend(side.start as u32..side.end as u32);
        }
        // Gate first: of a neuron that it leaves silent, the rest need not be read.
        gate.resize(rows.len(), 0.0);
        let mut read = match self.gate.layout {
            Layout::ByInput => take(whole_gate, rows, gate),
            Layout::ByOutput if rows.len() == side.len() => {
                threads.gemv(&self.gate.matrix.rows_range(side.clone()), x, gate);
                self.gate.add_bias(side.start, gate);
                rows.len() * self.gate.row_bytes()
            }
            Layout::ByOutput => products_of(&self.gate, threads, rows, x, gate),
        };
        keep(rows, gate, |neuron, gate| {
            let activation = self.activation.apply(gate);
            let passes = self.choice.passes_gate(neuron, activation);
            passes.then_some(activation)
        });
        if let Some(linear) = &self.up {
            up.resize(rows.len(), 0.0);
            read += match linear.layout {
                Layout::ByInput => take(whole_up, rows, up),
                Layout::ByOutput => products_of(linear, threads, rows, x, up),
            };
            gate.iter_mut()
                .zip(up)
                .for_each(|(gate, up)| *gate = self.product(*gate, Some(*up)));
        }
        keep(rows, gate, |neuron, product| {
            self.choice.coefficient(neuron, product)
        });
        read
    }

    /// Adds what the neurons in `scratch.rows` contribute to `hidden`; returns the bytes read.
    fn add_down(
        &self,
        threads: &Threads,
        token: usize,
        hidden: &mut [f32],
        scratch: &mut Scratch,
        statistics: &mut Statistics,
    ) -> usize {
        scratch.record(token);
        let Scratch {
            gate,
            rows,
            partial,
            ..
        } = scratch;
        partial.clear();
        partial.resize(hidden.len(), 0.0);
        threads.axpy_rows(&self.down.matrix, rows, gate, partial);
        add(hidden, partial);
        statistics.neurons_computed += rows.len() as u64;
        rows.len() * self.down.matrix.row_bytes()
    }
}

/// Computes the outputs `rows` of a matrix by output; returns the bytes read.
fn products_of(
    linear: &Linear<'_>,
    threads: &Threads,
    rows: &[u32],
    x: &[f32],
    out: &mut [f32],
) -> usize {
    threads.gemv_rows(&linear.matrix, rows, x, out);
    linear.add_bias_of(rows, out);
    rows.len() * linear.row_bytes()
}

/// Takes the products of `rows` from those of all neurons, which read nothing more.
fn take(whole: &[f32], rows: &[u32], out: &mut [f32]) -> usize {
    for (out, row) in out.iter_mut().zip(rows) {
        *out = whole[*row as usize];
    }
    0
}

/// Replaces the values of rows by what `change` makes of them, and drops those that it drops.
pub(crate) fn keep(
    rows: &mut Vec<u32>,
    values: &mut Vec<f32>,
    mut change: impl FnMut(usize, f32) -> Option<f32>,
) {
    let mut kept = 0;
    for index in 0..rows.len() {
        if let Some(value) = change(rows[index] as usize, values[index]) {
            (rows[kept], values[kept]) = (rows[index], value);
            kept += 1;
        }
    }
    rows.truncate(kept);
    values.truncate(kept);
}

/// Adds `x` to `sum`.
pub(crate) fn add(sum: &mut [f32], x: &[f32]) {
    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
}
