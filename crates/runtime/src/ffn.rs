//! The FFN under a policy: gate, up and down of the selected neurons.
//!
//! ```text
//! h_i = act(gate_i · x) · (up_i · x)        out = Σ_{i selected} h_i · down_i
//! ```
//!
//! In a mixture of experts, `h_i` is also multiplied by the routing weight of the neuron's expert. Only neurons of the token's experts
//! can be selected.

mod batch;

use std::{
    cell::Cell,
    ops::Range,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

use powerinfer_bundle::Layout;
use powerinfer_kernels::Isa;
use powerinfer_model::{Activation, FfnKind};

use self::batch::Batch;
use crate::{
    Stage, Statistics, Threads,
    input::{Input, InputBuffers, Vector},
    linear::Linear,
    predictor::PredictionBuffers,
    router::{NeuronWeights, Router, Routes},
    scratch::ThreadBuffer,
    selector::Selector,
    threads::add,
};

/// A layer's FFN, borrowed for a forward pass. Neurons are sorted by activation frequency in all matrices.
#[derive(Clone, Copy)]
pub(crate) struct Ffn<'a> {
    pub(crate) gate: Linear<'a>,
    /// None if the FFN is not gated.
    pub(crate) up: Option<Linear<'a>>,
    /// Stored by input: row i is the contribution of neuron i per unit of `h_i`.
    pub(crate) down: Linear<'a>,
    pub(crate) kind: FfnKind,
    pub(crate) activation: Activation,
    /// Inputs of gate and up below this magnitude count as 0.
    pub(crate) input_threshold: f32,
    pub(crate) selector: Selector<'a>,
    /// In a mixture of experts, selects the experts whose neurons are computed.
    pub(crate) router: Option<Router<'a>>,
    /// Neurons of the hot prefix, whose sum is computed apart from that of the cold ones.
    pub(crate) hot_count: usize,
}

/// Vectors that an FFN reads, `[tokens, hidden]` each.
#[derive(Clone, Copy)]
pub(crate) struct FfnInputs<'a> {
    /// Input of gate and up.
    pub(crate) x: &'a [f32],
    /// Input of the predictor, if it is not `x`.
    pub(crate) predictor: Option<&'a [f32]>,
    /// Input of the router, if it is not `x`.
    pub(crate) router: Option<&'a [f32]>,
}

/// Rows of a list that a thread takes, or a multiple.
const LISTED_ROWS: usize = 8;

/// Neurons of a group, at most 64, whose rows are used for all tokens before the next group's, so that they are read
/// from memory once.
const GROUP: usize = 64;

/// Neurons that have slots at a time, a multiple of [`GROUP`]: for several tokens, slots of all neurons of a mixture would exceed the caches.
pub(crate) const SLOTTED_NEURONS: usize = 8192;

/// A neuron and a value of it: its activation, then its `h_i`.
type NeuronValue = (u32, f32);

/// Marks the end of a token's neurons in its slots for a group.
const NONE: NeuronValue = (u32::MAX, 0.0);

/// Buffers of an FFN that are reused from layer to layer.
#[derive(Debug, Default)]
pub(crate) struct FfnBuffers {
    pub(crate) prediction: PredictionBuffers,
    routes: Routes,
    /// The FFN's input, and that of its predictor if it differs.
    inputs: [InputBuffers; 2],
    /// Products of all neurons for all tokens, of matrices stored by input.
    gate_products: Vec<f32>,
    up_products: Vec<f32>,
    /// The computed neurons with their `h_i`, in slots of groups.
    slots: Vec<NeuronValue>,
    /// One entry per part of a token's slots: its length in the upper 32 bits, its number of computed neurons in the
    /// lower 32. The index is that of the part's first slot divided by [`LISTED_ROWS`].
    parts: Vec<AtomicU64>,
    /// The computed neurons of every token.
    active: Vec<Active>,
    /// Per token, the computed neurons with their `h_i`; filled if a list is put here.
    pub(crate) recorded: Option<Vec<Vec<NeuronValue>>>,
}

/// The computed neurons of a token, in ascending order, and the coefficients of their rows of down.
#[derive(Debug, Default, Clone)]
pub(crate) struct Active {
    pub(crate) rows: Vec<u32>,
    pub(crate) coefficients: Vec<f32>,
}

thread_local! {
    /// Neurons of a token that a thread computes, and their products.
    static LISTED: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
    static ROWS: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
    static PRODUCTS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Rows that were read of gate and up.
#[derive(Default)]
struct RowsRead {
    gate: AtomicUsize,
    up: AtomicUsize,
}

impl RowsRead {
    fn add(&self, gate: usize, up: usize) {
        self.gate.fetch_add(gate, Ordering::Relaxed);
        self.up.fetch_add(up, Ordering::Relaxed);
    }
}

/// Products of one token that have been computed already.
#[derive(Clone, Copy)]
struct Known<'a> {
    /// Neuron of the first product.
    first: usize,
    products: &'a [f32],
}

impl FfnBuffers {
    /// The neurons of `neurons` that were predicted for `token` in the last pass.
    pub(crate) fn predicted(&self, token: usize, neurons: usize) -> Vec<u32> {
        self.prediction.masks.listed(token, neurons)
    }

    /// Appends the computed neurons to `recorded`, if that is filled.
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
    /// Removes all neurons, and makes room for `most`.
    pub(crate) fn clear(&mut self, most: usize) {
        self.rows.clear();
        self.rows.reserve_exact(most);
        self.coefficients.clear();
        self.coefficients.reserve_exact(most);
    }

    /// Appends neurons and their `h_i`.
    pub(crate) fn extend(&mut self, computed: &[NeuronValue]) {
        self.rows.extend(computed.iter().map(|neuron| neuron.0));
        let values = computed.iter().map(|neuron| neuron.1);
        self.coefficients.extend(values);
    }
}

impl Ffn<'_> {
    /// Adds the FFN's output for `inputs` to `hidden [tokens, hidden]`.
    ///
    /// The hot and the cold neurons are summed apart, each from gate to down, and merged once. Neuron selection and
    /// results do not depend on batching: tokens share the reading of rows and nothing else.
    pub(crate) fn add_output(
        &self,
        threads: &Threads,
        inputs: FfnInputs<'_>,
        hidden: &mut [f32],
        buffers: &mut FfnBuffers,
        statistics: &mut Statistics,
    ) {
        let FfnInputs {
            x,
            predictor: predictor_input,
            router: router_input,
        } = inputs;
        let (size, neurons) = (self.gate.inputs(), self.gate.outputs());
        let tokens = x.len() / size;
        if let Some(router) = &self.router {
            statistics.mark(Stage::GateUp);
            let read = router.route(threads, router_input.unwrap_or(x), &mut buffers.routes);
            statistics.bytes_read += read as u64;
            statistics.mark(Stage::Prediction);
        }
        let mut inputs = std::mem::take(&mut buffers.inputs);
        let [input, other] = &mut inputs;
        let x = self.gate.input(threads, x, self.input_threshold, input);
        let constants = [self.down.bias, self.selector.offset()];
        for constant in constants.into_iter().flatten() {
            let read = match &self.router {
                // Each block has a separate bias.
                Some(router) if constant.len() > size => {
                    router.add_biases(&buffers.routes, constant, hidden)
                }
                _ => {
                    for hidden in hidden.chunks_exact_mut(size) {
                        add(hidden, constant);
                    }
                    size_of_val(constant)
                }
            };
            statistics.bytes_read += read as u64;
        }
        statistics.neurons += (tokens * neurons) as u64;
        statistics.neurons_per_pass += neurons as u64;
        let mut of_all = |linear: &Linear<'_>, products: &mut Vec<f32>| {
            if linear.layout == Layout::ByInput {
                let read = linear.product(threads, &x, self.input_threshold, products);
                statistics.bytes_read += read as u64;
            }
        };
        of_all(&self.gate, &mut buffers.gate_products);
        if let Some(up) = &self.up {
            of_all(up, &mut buffers.up_products);
        }
        if self.selector.predicts() {
            statistics.mark(Stage::GateUp);
            let prediction = &mut buffers.prediction;
            let read = predictor_input.map(|read| self.gate.input(threads, read, 0.0, other));
            let read = read.as_ref().unwrap_or(&x);
            self.selector.predict(threads, read, prediction, statistics);
            statistics.mark(Stage::Prediction);
        }
        if let Some(router) = &self.router {
            let masks = &mut buffers.prediction.masks;
            router.mask(&mut buffers.routes, masks, self.selector.predicts());
        }
        for neurons in [0..self.hot_count, self.hot_count..neurons] {
            if !neurons.is_empty() {
                self.add_neurons(threads, &x, neurons, hidden, buffers, statistics);
            }
        }
        buffers.inputs = inputs;
    }

    /// Sum of the cold neurons for `x [tokens, hidden]`. `mask`, 32 neurons per word, has the neurons that a predictor and a router
    /// leave for each token; `weights`, `[tokens, blocks]`, are routing weights in a mixture of experts. If `on_device` is given, a bit per
    /// neuron, the cold neurons are instead the neurons of selected experts that have no bit set in it.
    #[expect(
        clippy::too_many_arguments,
        reason = "results of the device and state of the host"
    )]
    pub(crate) fn cold_sum(
        &self,
        threads: &Threads,
        x: &[f32],
        mask: Option<&[u32]>,
        weights: Option<Vec<f32>>,
        on_device: Option<&[u64]>,
        buffers: &mut FfnBuffers,
        statistics: &mut Statistics,
    ) -> Vec<f32> {
        let neurons = self.gate.outputs();
        let mut sum = vec![0.0; x.len()];
        let mut inputs = std::mem::take(&mut buffers.inputs);
        let input = &mut inputs[0];
        let x = self.gate.input(threads, x, self.input_threshold, input);
        if let Some(mask) = mask {
            let masks = &mut buffers.prediction.masks;
            masks.set_words(neurons, x.tokens(), mask);
        }
        if let (Some(router), Some(weights)) = (&self.router, weights) {
            router.set_weights(weights, &mut buffers.routes);
        }
        let mut cold = self.hot_count..neurons;
        if let (Some(router), Some(on_device)) = (&self.router, on_device) {
            let masks = &mut buffers.prediction.masks;
            router.mask(&mut buffers.routes, masks, false);
            masks.remove(on_device);
            cold.start = 0;
        }
        self.add_neurons(threads, &x, cold, &mut sum, buffers, statistics);
        buffers.inputs = inputs;
        sum
    }

    /// Masks of the predicted neurons, 32 a word, one mask per token.
    pub(crate) fn predicted_words(
        &self,
        threads: &Threads,
        predictor_input: &[f32],
        buffers: &mut FfnBuffers,
        statistics: &mut Statistics,
    ) -> Vec<u32> {
        let FfnBuffers {
            prediction, inputs, ..
        } = buffers;
        let read = self
            .gate
            .input(threads, predictor_input, 0.0, &mut inputs[0]);
        self.selector
            .predict(threads, &read, prediction, statistics);
        prediction.masks.words32(self.gate.outputs())
    }

    /// Adds the contributions of the selected ones of `neurons` to `hidden`.
    fn add_neurons(
        &self,
        threads: &Threads,
        x: &Input<'_>,
        neurons: Range<usize>,
        hidden: &mut [f32],
        buffers: &mut FfnBuffers,
        statistics: &mut Statistics,
    ) {
        let read = match x.tokens() {
            1 => self.gate_up_of_one(threads, x, neurons, buffers),
            _ => self.gate_up_of_batch(threads, x, neurons, buffers),
        };
        statistics.bytes_read += read as u64;
        statistics.mark(Stage::GateUp);
        statistics.bytes_read += self.add_down(threads, hidden, buffers, statistics) as u64;
        statistics.mark(Stage::Down);
    }

    /// Whether masks limit which neurons are computed.
    fn is_masked(&self) -> bool {
        self.selector.predicts() || self.router.is_some()
    }

    /// Computes gate and up of `neurons` for a single token; returns the bytes read.
    fn gate_up_of_one(
        &self,
        threads: &Threads,
        x: &Input<'_>,
        neurons: Range<usize>,
        buffers: &mut FfnBuffers,
    ) -> usize {
        let FfnBuffers {
            slots,
            parts,
            prediction,
            routes,
            active,
            gate_products,
            up_products,
            ..
        } = buffers;
        let most = neurons.len();
        let masks = self.is_masked().then_some(&prediction.masks);
        let weights = self.router.as_ref().map(|router| router.weights(routes, 0));
        let count = masks.map_or(most, |masks| masks.count(neurons.clone()));
        let (slots, read) = (first(slots, count, most), RowsRead::default());
        parts.resize_with(most / LISTED_ROWS + 1, AtomicU64::default);
        let gates = known(&self.gate, gate_products);
        let ups = self.up.as_ref().and_then(|up| known(up, up_products));
        threads.by_row_groups(slots, 1, LISTED_ROWS, self.row_bytes(), |part, slots| {
            let (isa, x) = (threads.isa(), x.vector(0));
            ThreadBuffer(&LISTED).empty(|rows| {
                match masks {
                    Some(masks) => masks.list_some(0, neurons.clone(), part.clone(), rows),
                    None => rows.extend(part.clone().map(|row| (neurons.start + row) as u32)),
                }
                let passed = self.gate_stage(isa, x, rows, gates, slots);
                let computed = self.up_stage(isa, x, ups, weights, passed, slots);
                let lengths = (part.len() as u64) << 32 | computed as u64;
                parts[part.start / LISTED_ROWS].store(lengths, Ordering::Relaxed);
                read.add(rows.len(), passed);
            });
        });
        active.resize_with(1, Active::default);
        active[0].clear(most);
        let mut start = 0;
        while start < count {
            let lengths = parts[start / LISTED_ROWS].load(Ordering::Relaxed);
            let (length, computed) = ((lengths >> 32) as usize, lengths as u32 as usize);
            active[0].extend(&slots[start..][..computed]);
            start += length;
        }
        self.bytes_of(&read)
    }

    /// Computes gate and up of `neurons` for several tokens, group by group; returns the bytes read.
    fn gate_up_of_batch(
        &self,
        threads: &Threads,
        x: &Input<'_>,
        neurons: Range<usize>,
        buffers: &mut FfnBuffers,
    ) -> usize {
        let FfnBuffers {
            slots,
            prediction,
            routes,
            active,
            gate_products,
            up_products,
            ..
        } = buffers;
        let tokens = x.tokens();
        let batch = Batch {
            ffn: self,
            isa: threads.isa(),
            x,
            masks: self.is_masked().then_some(&prediction.masks),
            routes,
            gate_products,
            up_products,
        };
        let read = RowsRead::default();
        let bytes = self.row_bytes() * tokens;
        active.resize_with(tokens, Active::default);
        let most = match &self.router {
            Some(router) => neurons.len().min(router.experts.most_neurons_per_token()),
            None => neurons.len(),
        };
        for active in active.iter_mut() {
            active.clear(most);
        }
        for first_neuron in neurons.clone().step_by(SLOTTED_NEURONS) {
            let count = SLOTTED_NEURONS.min(neurons.end - first_neuron) * tokens;
            let slots = first(slots, count, count);
            threads.by_row_groups(slots, tokens, GROUP, bytes, |part, slots| {
                for (start, slots) in part.step_by(GROUP).zip(slots.chunks_mut(GROUP * tokens)) {
                    let first = first_neuron + start;
                    batch.gate_up(first..first + slots.len() / tokens, slots, &read);
                }
            });
            let bytes = size_of_val(slots);
            threads.by_chunks(active, 1, bytes, |token, active| {
                let computed = slots.chunks(GROUP * tokens).filter_map(|slots| {
                    let width = slots.len() / tokens;
                    let slots = &slots[token * width..][..width];
                    slots.split(|slot| slot.0 == NONE.0).next()
                });
                computed.for_each(|computed| active[0].extend(computed));
            });
        }
        self.bytes_of(&read)
    }

    /// Moves the neurons of `rows` that pass the gate for one token, with their activations, to the front of `slots`;
    /// returns their number. The remaining weights of the others need not be read.
    fn gate_stage(
        &self,
        isa: Isa,
        x: Vector<'_>,
        rows: &[u32],
        known: Option<Known<'_>>,
        slots: &mut [NeuronValue],
    ) -> usize {
        ThreadBuffer(&PRODUCTS).empty(|products| {
            gemv_rows(&self.gate, isa, x, rows, known, products);
            let mut passed = 0;
            for (row, gate) in rows.iter().zip(&*products) {
                let activation = self.activation.apply(*gate);
                if self.selector.passes_gate(*row as usize, activation) {
                    slots[passed] = (*row, activation);
                    passed += 1;
                }
            }
            passed
        })
    }

    /// Replaces the first `passed` of `slots`, neurons of one token that passed the gate, by the selected ones and their
    /// `h_i`, multiplied by `weights`; the slot after them, if any, becomes [`NONE`]. Returns the number of selected ones.
    fn up_stage(
        &self,
        isa: Isa,
        x: Vector<'_>,
        known: Option<Known<'_>>,
        weights: Option<NeuronWeights<'_>>,
        passed: usize,
        slots: &mut [NeuronValue],
    ) -> usize {
        if let Some(up) = &self.up {
            ThreadBuffer(&ROWS).empty(|rows| {
                rows.extend(slots[..passed].iter().map(|slot| slot.0));
                ThreadBuffer(&PRODUCTS).empty(|products| {
                    gemv_rows(up, isa, x, rows, known, products);
                    for (slot, up) in slots.iter_mut().zip(&*products) {
                        slot.1 *= self.kind.up_factor(self.activation, *up);
                    }
                });
            });
        }
        let mut computed = 0;
        for index in 0..passed {
            let (row, mut product) = slots[index];
            if let Some(weights) = &weights {
                product *= weights.of(row);
            }
            if let Some(coefficient) = self.selector.coefficient(row as usize, product) {
                slots[computed] = (row, coefficient);
                computed += 1;
            }
        }
        if let Some(end) = slots.get_mut(computed) {
            *end = NONE;
        }
        computed
    }

    /// Bytes of a neuron's rows of gate and up, if these are stored by output.
    fn row_bytes(&self) -> usize {
        let of = |linear: &Linear<'_>| match linear.layout {
            Layout::ByOutput => linear.row_bytes(),
            Layout::ByInput => 0,
        };
        of(&self.gate) + self.up.as_ref().map_or(0, of)
    }

    /// Bytes of the rows that were read of gate and up.
    fn bytes_of(&self, read: &RowsRead) -> usize {
        let of = |linear: &Linear<'_>, rows: &AtomicUsize| match linear.layout {
            Layout::ByOutput => rows.load(Ordering::Relaxed) * linear.row_bytes(),
            Layout::ByInput => 0,
        };
        let up = self.up.as_ref().map_or(0, |up| of(up, &read.up));
        of(&self.gate, &read.gate) + up
    }

    /// Adds the contributions of the neurons in `buffers.active` to `hidden`; returns the bytes read.
    fn add_down(
        &self,
        threads: &Threads,
        hidden: &mut [f32],
        buffers: &mut FfnBuffers,
        statistics: &mut Statistics,
    ) -> usize {
        buffers.record();
        let active = &buffers.active;
        let rows = threads.add_rows_of_batch(&self.down.matrix, active, hidden);
        let computed: usize = active.iter().map(|active| active.rows.len()).sum();
        statistics.neurons_computed += computed as u64;
        statistics.neurons_in_union += rows as u64;
        rows * self.down.matrix.row_bytes()
    }
}

/// The first `count` of `slots`, with undefined values; there is memory for `most`.
fn first(slots: &mut Vec<NeuronValue>, count: usize, most: usize) -> &mut [NeuronValue] {
    if slots.len() < most {
        slots.clear();
        slots.reserve_exact(most);
        slots.resize(most, NONE);
    }
    &mut slots[..count]
}

/// Sets `products` to those of `rows` of `linear` with one token's input, biases added; they may be known.
fn gemv_rows(
    linear: &Linear<'_>,
    isa: Isa,
    x: Vector<'_>,
    rows: &[u32],
    known: Option<Known<'_>>,
    products: &mut Vec<f32>,
) {
    match known {
        Some(Known {
            first,
            products: known,
        }) => {
            products.extend(rows.iter().map(|row| known[*row as usize - first]));
        }
        None => {
            products.resize(rows.len(), 0.0);
            x.gemv_rows(isa, &linear.matrix, rows, products);
        }
    }
    // The products of matrices stored by input have their biases already.
    if linear.layout == Layout::ByOutput {
        linear.add_bias_of(rows, products);
    }
}

/// One token's products with all rows, if `linear` is stored by input.
fn known<'a>(linear: &Linear<'_>, products: &'a [f32]) -> Option<Known<'a>> {
    (linear.layout == Layout::ByInput).then_some(Known { first: 0, products })
}
