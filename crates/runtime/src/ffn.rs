//! The FFN under a policy: gate, up and down of the neurons that it chooses.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

use powerinfer_artifact::plan::Policy;
use powerinfer_bundle::{Layout, memory::PREFILL_BATCH};
use powerinfer_kernels::Isa;
use powerinfer_model::{Activation, FfnKind};

use crate::{
    Stage, Statistics, Threads,
    choice::Choice,
    input::{Input, Vector},
    linear::Linear,
    prediction::Prediction,
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

/// Rows that a thread takes of a list, or a multiple.
const ROWS_AT_ONCE: usize = 8;

/// Neurons of a group, at most 64, whose rows are gone through for all tokens before the next group's, so that they
/// are read from memory once.
const GROUP: usize = 64;

/// Memory that is used again from layer to layer.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    predicted: Prediction,
    /// Products of all neurons for all tokens, where they come from a matrix by input.
    whole_gate: Vec<f32>,
    whole_up: Vec<f32>,
    /// Neurons that are computed and what their rows of down are multiplied by, in places of groups.
    places: Vec<(u32, f32)>,
    rows: Vec<u32>,
    /// The same, token by token.
    active: Vec<Active>,
    partial: Vec<f32>,
    /// Per token, the neurons that were computed and what their rows of down were multiplied by;
    /// filled where somebody has put a list here.
    pub(crate) recorded: Option<Vec<Vec<(u32, f32)>>>,
}

/// The neurons that are computed of a token, in ascending order, and what their rows of down are
/// multiplied by.
#[derive(Debug, Default, Clone)]
pub(crate) struct Active {
    pub(crate) rows: Vec<u32>,
    pub(crate) coefficients: Vec<f32>,
}

/// Marks the end of what a group has of a token.
const NONE: (u32, f32) = (u32::MAX, 0.0);

/// Rows that were read of gate and up.
#[derive(Default)]
struct Read {
    gate: AtomicUsize,
    up: AtomicUsize,
}

impl Read {
    fn add(&self, gate: usize, up: usize) {
        self.gate.fetch_add(gate, Ordering::Relaxed);
        self.up.fetch_add(up, Ordering::Relaxed);
    }
}

/// Memory of a thread.
#[derive(Default)]
struct Work {
    /// Neurons to look at.
    rows: Vec<u32>,
    /// Products with rows of one token.
    products: Vec<f32>,
    /// Products of a group for all tokens.
    all: Vec<f32>,
}

/// Products of one token that are there already, with biases or without as they were asked for.
#[derive(Clone, Copy)]
struct Known<'a> {
    /// Of neurons from this one on.
    first: usize,
    products: &'a [f32],
}

impl Scratch {
    /// The neurons that were predicted of `token` in the last pass, of `neurons` there are.
    pub(crate) fn predicted(&self, token: usize, neurons: usize) -> Vec<u32> {
        let mut listed = Vec::new();
        self.predicted.masks.list(token, 0..neurons, &mut listed);
        listed
    }

    /// Remembers what was computed, where that is asked for.
    fn record(&mut self) {
        if let Some(recorded) = &mut self.recorded {
            recorded.resize(recorded.len().max(self.active.len()), Vec::new());
            for (recorded, active) in recorded.iter_mut().zip(&self.active) {
                let values = active.coefficients.iter().copied();
                recorded.extend(active.rows.iter().copied().zip(values));
            }
        }
    }
}

impl Active {
    /// Takes over what groups have.
    fn fill<'a>(&mut self, computed: impl Iterator<Item = &'a (u32, f32)> + Clone) {
        let count = computed.clone().count();
        self.rows.clear();
        self.rows.reserve_exact(count);
        self.coefficients.clear();
        self.coefficients.reserve_exact(count);
        for (row, coefficient) in computed {
            self.rows.push(*row);
            self.coefficients.push(*coefficient);
        }
    }
}

impl Ffn<'_> {
    /// Adds the FFN's output for some tokens, `x [tokens, hidden]`, to `hidden`, with the bits of
    /// one token at a time; whatever predicts sees `predictor_input`, as long as `x`.
    ///
    /// The hot and the cold side each run gate, activation, up and down on their own neurons; their
    /// sums of d_model numbers are merged once. Whom a policy chooses for a token does not depend on
    /// company: tokens share the reading of rows, and nothing else.
    pub(crate) fn run_batch(
        &self,
        threads: &Threads,
        x: &[f32],
        predictor_input: &[f32],
        hidden: &mut [f32],
        scratch: &mut Scratch,
        statistics: &mut Statistics,
    ) {
        let (size, neurons) = (self.gate.inputs(), self.gate.outputs());
        let tokens = x.len() / size;
        let x = self.gate.input(threads, x, self.input_threshold);
        for constant in [self.down.bias, self.choice.offset()].into_iter().flatten() {
            for hidden in hidden.chunks_exact_mut(size) {
                add(hidden, constant);
            }
            statistics.bytes_read += size_of_val(constant) as u64;
        }
        statistics.neurons += (tokens * neurons) as u64;
        statistics.neurons_passed += neurons as u64;
        let mut whole = |linear: &Linear<'_>, products: &mut Vec<f32>| {
            if linear.layout == Layout::ByInput {
                let product = linear.product(threads, &x, self.input_threshold);
                statistics.bytes_read += product.bytes_read as u64;
                *products = product.values;
            }
        };
        whole(&self.gate, &mut scratch.whole_gate);
        if let Some(up) = &self.up {
            whole(up, &mut scratch.whole_up);
        }
        if self.choice.predicts() {
            statistics.mark(Stage::GateUp);
            let predicted = &mut scratch.predicted;
            self.choice
                .predict(threads, tokens, predictor_input, predicted, statistics);
            statistics.mark(Stage::Prediction);
        }
        for side in [0..self.hot_count, self.hot_count..neurons] {
            if side.is_empty() {
                continue;
            }
            let read = match tokens {
                1 => self.of_one(threads, &x, side, scratch),
                _ => self.of_many(threads, &x, side, scratch),
            };
            statistics.bytes_read += read as u64;
            statistics.mark(Stage::GateUp);
            let read = self.add_down(threads, hidden, scratch, statistics);
            statistics.bytes_read += read as u64;
            statistics.mark(Stage::Down);
        }
    }

    /// What the neurons behind the hot ones add for some tokens with the inputs `x`, `[tokens, hidden]`; where
    /// neurons are predicted, `mask` says which of each token, 32 a word.
    pub(crate) fn cold_sum(
        &self,
        threads: &Threads,
        x: &[f32],
        mask: Option<&[u32]>,
        scratch: &mut Scratch,
        statistics: &mut Statistics,
    ) -> Vec<f32> {
        let neurons = self.gate.outputs();
        let mut sum = vec![0.0; x.len()];
        let x = self.gate.input(threads, x, self.input_threshold);
        if let Some(mask) = mask {
            let masks = &mut scratch.predicted.masks;
            masks.set_words(neurons, x.tokens(), mask);
        }
        let side = self.hot_count..neurons;
        let read = match x.tokens() {
            1 => self.of_one(threads, &x, side, scratch),
            _ => self.of_many(threads, &x, side, scratch),
        };
        statistics.bytes_read += read as u64;
        let read = self.add_down(threads, &mut sum, scratch, statistics);
        statistics.bytes_read += read as u64;
        sum
    }

    /// Which neurons are predicted of each token, 32 a word.
    pub(crate) fn predicted(
        &self,
        threads: &Threads,
        predictor_input: &[f32],
        scratch: &mut Scratch,
        statistics: &mut Statistics,
    ) -> Vec<u32> {
        let predicted = &mut scratch.predicted;
        let tokens = predictor_input.len() / self.gate.inputs();
        self.choice
            .predict(threads, tokens, predictor_input, predicted, statistics);
        predicted.masks.halves(self.gate.outputs())
    }

    /// Finds the neurons of `side` that are computed of the only token; returns the bytes read.
    fn of_one(
        &self,
        threads: &Threads,
        x: &Input<'_>,
        side: Range<usize>,
        scratch: &mut Scratch,
    ) -> usize {
        let Scratch {
            rows,
            places,
            predicted,
            active,
            whole_gate,
            whole_up,
            ..
        } = scratch;
        rows.clear();
        match self.choice.predicts() {
            true => predicted.masks.list(0, side, rows),
            false => rows.extend(side.start as u32..side.end as u32),
        }
        let places = first(places, rows.len());
        let (read, rows) = (Read::default(), &*rows);
        let (whole_gate, whole_up) = (known(&self.gate, whole_gate), known_up(self, whole_up));
        threads.by_row_groups(places, 1, ROWS_AT_ONCE, self.row_bytes(), |part, places| {
            let (mut work, isa, x) = (Work::default(), threads.isa(), x.vector(0));
            let rows = &rows[part];
            let passed = self.pass_gate(isa, x, rows, whole_gate, &mut work.products, places);
            self.finish(isa, x, whole_up, passed, &mut work, places);
            read.add(rows.len(), passed);
        });
        active.resize_with(1, Active::default);
        active[0].fill(places.iter().filter(|place| place.0 != NONE.0));
        self.bytes_of(&read)
    }

    /// Finds the neurons of `side` that are computed of each token; returns the bytes read.
    fn of_many(
        &self,
        threads: &Threads,
        x: &Input<'_>,
        side: Range<usize>,
        scratch: &mut Scratch,
    ) -> usize {
        let (tokens, neurons) = (x.tokens(), self.gate.outputs());
        let Scratch {
            places,
            predicted,
            active,
            whole_gate,
            whole_up,
            ..
        } = scratch;
        let masks = self.choice.predicts().then_some(&predicted.masks);
        let places = first(places, side.len() * tokens);
        let (read, isa) = (Read::default(), threads.isa());
        let bytes = self.row_bytes() * tokens;
        let of_token = |whole: &'_ [f32], token: usize| token * neurons..whole.len();
        // Products with all rows of a group, whoever asked for them, cost less where many are asked for.
        let all_cheaper = |linear: &Linear<'_>, asked: usize, of: usize| {
            linear.layout == Layout::ByOutput
                && asked as f64 >= x.relative_gemm_cost(&linear.matrix) * of as f64
        };
        threads.by_row_groups(places, tokens, GROUP, bytes, |part, places| {
            let mut work = Work::default();
            for (start, places) in part.step_by(GROUP).zip(places.chunks_mut(GROUP * tokens)) {
                let width = places.len() / tokens;
                let group = side.start + start..side.start + start + width;
                let every = 1u64
                    .checked_shl(width as u32)
                    .map_or(u64::MAX, |bit| bit - 1);
                let bit = |row: u32| 1u64 << (row as usize - group.start);
                let asked = match masks {
                    Some(masks) => masks.count(group.clone()),
                    None => places.len(),
                };
                let mut all = std::mem::take(&mut work.all);
                let at_once = all_cheaper(&self.gate, asked, places.len());
                if at_once {
                    all.resize(places.len(), 0.0);
                    x.multiply_all(isa, &self.gate.matrix.rows_range(group.clone()), &mut all);
                }
                let mut rows = std::mem::take(&mut work.rows);
                let (mut looked_at, mut passed, mut counts) = (0u64, 0u64, [0; PREFILL_BATCH]);
                for (token, places) in places.chunks_exact_mut(width).enumerate() {
                    rows.clear();
                    match masks {
                        Some(masks) => masks.list(token, group.clone(), &mut rows),
                        None => rows.extend(group.start as u32..group.end as u32),
                    }
                    let gates = match at_once {
                        true => Some(Known {
                            first: group.start,
                            products: &all[token * width..][..width],
                        }),
                        false => whole_gate
                            .get(of_token(whole_gate, token))
                            .and_then(|whole| known(&self.gate, whole)),
                    };
                    let (x, products) = (x.vector(token), &mut work.products);
                    let count = self.pass_gate(isa, x, &rows, gates, products, places);
                    counts[token] = count;
                    looked_at |= rows.iter().fold(0, |bits, row| bits | bit(*row));
                    passed |= places[..count]
                        .iter()
                        .fold(0, |bits, place| bits | bit(place.0));
                }
                work.rows = rows;
                if at_once {
                    looked_at = every;
                }
                let asked = counts.iter().sum();
                let up = self.up.as_ref();
                let up = up.filter(|up| all_cheaper(up, asked, places.len()));
                if let Some(up) = up {
                    passed = every;
                    all.resize(places.len(), 0.0);
                    x.multiply_all(isa, &up.matrix.rows_range(group.clone()), &mut all);
                }
                for (token, places) in places.chunks_exact_mut(width).enumerate() {
                    let ups = match up {
                        Some(_) => Some(Known {
                            first: group.start,
                            products: &all[token * width..][..width],
                        }),
                        None => whole_up
                            .get(of_token(whole_up, token))
                            .and_then(|whole| known_up(self, whole)),
                    };
                    self.finish(isa, x.vector(token), ups, counts[token], &mut work, places);
                }
                work.all = all;
                read.add(
                    looked_at.count_ones() as usize,
                    passed.count_ones() as usize,
                );
            }
        });
        active.resize_with(tokens, Active::default);
        for (token, active) in active.iter_mut().enumerate() {
            let groups = places.chunks(GROUP * tokens);
            active.fill(groups.flat_map(|places| {
                let width = places.len() / tokens;
                let places = places[token * width..][..width].iter();
                places.take_while(|place| place.0 != NONE.0)
            }));
        }
        self.bytes_of(&read)
    }
    /// What a neuron multiplies its row of down by: its activation, its up product if it has one.
    fn product(&self, activation: f32, up: Option<f32>) -> f32 {
        match (self.kind, up) {
            (FfnKind::DoublyGated, Some(up)) => activation * self.activation.apply(up),
            (_, Some(up)) => activation * up,
            (_, None) => activation,
        }
    }

    /// Finds those of `rows` that pass the gate for one token; puts them with their activations to the
    /// front of `places` and returns how many they are.
    ///
    /// Gate first: of a neuron that it leaves silent, the rest need not be read.
    fn pass_gate(
        &self,
        isa: Isa,
        x: Vector<'_>,
        rows: &[u32],
        known: Option<Known<'_>>,
        products: &mut Vec<f32>,
        places: &mut [(u32, f32)],
    ) -> usize {
        multiply(&self.gate, isa, x, rows, known, products);
        let mut passed = 0;
        for (row, gate) in rows.iter().zip(&*products) {
            let activation = self.activation.apply(*gate);
            if self.choice.passes_gate(*row as usize, activation) {
                places[passed] = (*row, activation);
                passed += 1;
            }
        }
        passed
    }

    /// Makes of the neurons of one token that passed the gate, the first `passed` of `places`, those that
    /// are computed, and what their rows of down are multiplied by; all other places are [`NONE`] then.
    fn finish(
        &self,
        isa: Isa,
        x: Vector<'_>,
        known: Option<Known<'_>>,
        passed: usize,
        work: &mut Work,
        places: &mut [(u32, f32)],
    ) {
        if let Some(up) = &self.up {
            let Work { rows, products, .. } = work;
            rows.clear();
            rows.extend(places[..passed].iter().map(|place| place.0));
            multiply(up, isa, x, rows, known, products);
            for (place, up) in places.iter_mut().zip(&*products) {
                place.1 = self.product(place.1, Some(*up));
            }
        }
        let mut computed = 0;
        for index in 0..passed {
            let (row, product) = places[index];
            if let Some(coefficient) = self.choice.coefficient(row as usize, product) {
                places[computed] = (row, coefficient);
                computed += 1;
            }
        }
        places[computed..].fill(NONE);
    }

    /// Bytes of a neuron's rows of gate and up, as far as they lie by output.
    fn row_bytes(&self) -> usize {
        let of = |linear: &Linear<'_>| match linear.layout {
            Layout::ByOutput => linear.row_bytes(),
            Layout::ByInput => 0,
        };
        of(&self.gate) + self.up.as_ref().map_or(0, of)
    }

    fn bytes_of(&self, read: &Read) -> usize {
        let of = |linear: &Linear<'_>, rows: &AtomicUsize| match linear.layout {
            Layout::ByOutput => rows.load(Ordering::Relaxed) * linear.row_bytes(),
            Layout::ByInput => 0,
        };
        let up = self.up.as_ref().map_or(0, |up| of(up, &read.up));
        of(&self.gate, &read.gate) + up
    }

    /// Adds what the neurons in `scratch.active` contribute to `hidden`; returns the bytes read.
    fn add_down(
        &self,
        threads: &Threads,
        hidden: &mut [f32],
        scratch: &mut Scratch,
        statistics: &mut Statistics,
    ) -> usize {
        scratch.record();
        let Scratch {
            active, partial, ..
        } = scratch;
        partial.clear();
        partial.resize(hidden.len(), 0.0);
        let rows = threads.sums_of_rows(&self.down.matrix, active, partial);
        add(hidden, partial);
        let computed: usize = active.iter().map(|active| active.rows.len()).sum();
        statistics.neurons_computed += computed as u64;
        statistics.neurons_in_union += rows as u64;
        rows * self.down.matrix.row_bytes()
    }
}

/// The first `count` of `places`, with whatever was there before.
fn first(places: &mut Vec<(u32, f32)>, count: usize) -> &mut [(u32, f32)] {
    if places.len() < count {
        places.resize(count, NONE);
    }
    &mut places[..count]
}

/// Products of `rows` of `linear` with one token's input, biases added; some may be known.
fn multiply(
    linear: &Linear<'_>,
    isa: Isa,
    x: Vector<'_>,
    rows: &[u32],
    known: Option<Known<'_>>,
    products: &mut Vec<f32>,
) {
    products.clear();
    match known {
        Some(Known {
            first,
            products: known,
        }) => {
            products.extend(rows.iter().map(|row| known[*row as usize - first]));
        }
        None => {
            products.resize(rows.len(), 0.0);
            x.multiply_rows(isa, &linear.matrix, rows, products);
        }
    }
    // Matrices by input were multiplied as a whole, with their biases.
    if linear.layout == Layout::ByOutput {
        linear.add_bias_of(rows, products);
    }
}

/// Products with all rows of one token, where `linear` lies by input.
fn known<'a>(linear: &Linear<'_>, products: &'a [f32]) -> Option<Known<'a>> {
    (linear.layout == Layout::ByInput).then_some(Known { first: 0, products })
}

/// The same of up.
fn known_up<'a>(ffn: &Ffn<'_>, products: &'a [f32]) -> Option<Known<'a>> {
    ffn.up.as_ref().and_then(|up| known(up, products))
}

/// Adds `x` to `sum`.
pub(crate) fn add(sum: &mut [f32], x: &[f32]) {
    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
}
