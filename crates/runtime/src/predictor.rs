//! Prediction of the active neurons of all tokens of a batch by a trained or calculated predictor.

use std::{cell::Cell, ops::Range};

use powerinfer_kernels::{Arithmetic, Isa, QuantisedActivations, relative_axpy_cost};
use powerinfer_tensor::{BLOCK, Matrix, f16};

use crate::{
    ActivationFormat, Statistics, Threads,
    input::{Input, InputBuffers},
    masks::{Masks, WORD, pack_decisions},
    scratch::ThreadBuffer,
};

/// Hidden units whose rows a thread reads for all tokens before the next ones, if sums need no scales: their
/// stripes stay in the second-level cache.
const UNITS_PER_BLOCK: usize = 256;

/// Logits of all tokens that a thread computes together, about: they stay in the cache too.
const LOGITS_PER_STEP: usize = 16384;

/// Mask words whose columns kernels process together, or a multiple.
const WORDS_PER_STEP: usize = 128 / WORD;

thread_local! {
    static SUMS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static LOGITS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// A layer's predictor, `logits = B · relu(A · x) + b`, or without ReLU.
#[derive(Clone, Copy)]
pub(crate) struct Predictor<'a> {
    /// `[rank, hidden]`.
    pub(crate) a: Matrix<'a>,
    /// `Bᵀ [rank, neurons]`: row j has the weights of hidden unit j.
    pub(crate) units: Matrix<'a>,
    /// Per block of units, the scale of each neuron's sum, `[blocks, neurons]`; empty for no scaling.
    pub(crate) scales: &'a [f32],
    pub(crate) bias: &'a [f32],
    /// Logit from which a neuron is predicted active.
    pub(crate) threshold: f32,
    /// Whether the predictor is linear, without ReLU.
    pub(crate) is_linear: bool,
}

/// The predicted neurons of some tokens, and buffers that are reused from layer to layer.
#[derive(Debug, Default)]
pub(crate) struct PredictionBuffers {
    input: InputBuffers,
    /// Hidden units of the predictor, `[tokens, rank]`.
    hidden_units: Vec<f32>,
    /// Hidden units rounded to 8 bits, if sums are computed in whole numbers.
    rounded: QuantisedActivations,
    active_units: ActiveUnits,
    /// Signs of the inputs, token by token.
    pub(crate) signs: Vec<u64>,
    pub(crate) masks: Masks,
}

/// The hidden units that are not 0 and their values, in lists: for every block of units one list per token, or one
/// for all tokens.
#[derive(Debug, Default)]
struct ActiveUnits {
    tokens: usize,
    /// Tokens that share a list: 1, or all if they have most units in common. A unit that is inactive for one of them
    /// has the value 0.
    tokens_per_list: usize,
    units: Vec<u32>,
    /// `[tokens_per_list, units]` of every list; empty if values are rounded.
    values: Vec<f32>,
    /// Lists per block and token if values are rounded: 1 (positive units) or 2 (positive, then negative units).
    signs: usize,
    /// Rounded magnitudes, 1 to 127, of all units, and a scale per list, which has the sign of its units.
    rounded: Vec<u8>,
    scales: Vec<f32>,
    /// Where lists start in `units`, and where the last one ends.
    bounds: Vec<usize>,
    /// Units that are active for any token.
    union: usize,
}

impl ActiveUnits {
    /// Lists the active units of `rounded [tokens, rank]`, in blocks of 32, token by token, negative ones separately
    /// if `has_negative`.
    fn list_rounded(&mut self, rounded: &QuantisedActivations, has_negative: bool) {
        let (tokens, rank) = (rounded.tokens(), rounded.columns());
        let blocks = rank.div_ceil(BLOCK);
        // The last block is listed in full before inactive units are dropped.
        let listed = if tokens == 1 { rank + BLOCK } else { 0 };
        self.clear(tokens, 1, listed, 0);
        let signs = if has_negative { &[1i8, -1][..] } else { &[1] };
        self.signs = signs.len();
        self.rounded.reserve_exact(self.units.capacity());
        self.scales.reserve_exact(blocks * tokens * self.signs);
        for block in 0..blocks {
            let mut is_active = [false; BLOCK];
            for token in 0..tokens {
                let (quants, scale) = rounded.vector(token).block(block);
                for sign in signs {
                    // Without branches: every unit is written, and an inactive one is overwritten by the next.
                    let mut end = self.units.len();
                    self.units.resize(end + BLOCK, 0);
                    self.rounded.resize(end + BLOCK, 0);
                    for (unit, quant) in quants.iter().enumerate() {
                        let is_listed = quant.signum() == *sign;
                        self.units[end] = (block * BLOCK + unit) as u32;
                        self.rounded[end] = quant.unsigned_abs();
                        is_active[unit] |= is_listed;
                        end += usize::from(is_listed);
                    }
                    self.units.truncate(end);
                    self.rounded.truncate(end);
                    self.scales.push(f32::from(*sign) * scale);
                    self.bounds.push(self.units.len());
                }
            }
            self.union += is_active.iter().filter(|is_active| **is_active).count();
        }
    }

    /// Removes all lists, and reserves memory.
    fn clear(&mut self, tokens: usize, tokens_per_list: usize, units: usize, values: usize) {
        (self.tokens, self.tokens_per_list, self.union) = (tokens, tokens_per_list, 0);
        self.units.clear();
        self.units.reserve_exact(units);
        self.values.clear();
        self.values.reserve_exact(values);
        self.rounded.clear();
        self.scales.clear();
        self.bounds.clear();
        self.bounds.push(0);
    }

    /// Lists the active units of `hidden_units [tokens, rank]`, whose rows are those of `units`, in blocks of `block`.
    fn list(&mut self, units: &Matrix<'_>, hidden_units: &[f32], block: usize) {
        let rank = units.rows();
        let tokens = hidden_units.len() / rank;
        let value = |unit: usize, token: usize| hidden_units[token * rank + unit];
        let is_active =
            |unit: usize, mut tokens: Range<usize>| tokens.any(|token| value(unit, token) != 0.0);
        let active = hidden_units.iter().filter(|value| **value != 0.0).count();
        let union = (0..rank).filter(|unit| is_active(*unit, 0..tokens)).count();
        let share = relative_axpy_cost(units.format(), tokens, Arithmetic::Float);
        let is_shared = active as f64 >= share * (tokens * union) as f64;
        // One token's lists take the memory of the longest, so that decoding allocates nothing.
        let (listed, values) = match (tokens, is_shared) {
            (1, _) => (rank, rank),
            (_, true) => (union, union * tokens),
            (_, false) => (active, active),
        };
        self.clear(tokens, if is_shared { tokens } else { 1 }, listed, values);
        self.union = union;
        for start in (0..rank).step_by(block) {
            for first in (0..tokens).step_by(self.tokens_per_list) {
                let tokens = first..first + self.tokens_per_list;
                let block = start..rank.min(start + block);
                let from = self.units.len();
                let active = block.filter(|unit| is_active(*unit, tokens.clone()));
                self.units.extend(active.map(|unit| unit as u32));
                for token in tokens {
                    let units = self.units[from..].iter();
                    self.values
                        .extend(units.map(|unit| value(*unit as usize, token)));
                }
                self.bounds.push(self.units.len());
            }
        }
    }

    fn blocks(&self) -> usize {
        (self.bounds.len() - 1) / (self.tokens / self.tokens_per_list)
    }

    /// Adds the weights of the active units of block `index`, times their values, to `out [tokens, columns]`.
    fn add(
        &self,
        isa: Isa,
        units: &Matrix<'_>,
        index: usize,
        columns: Range<usize>,
        out: &mut [f32],
    ) {
        let lists = self.tokens / self.tokens_per_list;
        let bounds = self.bounds[index * lists..].windows(2);
        let of_lists = out.chunks_exact_mut(self.tokens_per_list * columns.len());
        for (bounds, out) in bounds.zip(of_lists) {
            let rows = &self.units[bounds[0]..bounds[1]];
            let values =
                &self.values[bounds[0] * self.tokens_per_list..bounds[1] * self.tokens_per_list];
            match (rows.is_empty(), self.tokens_per_list) {
                (true, _) => {}
                (_, 1) => isa.axpy_rows(units, rows, values, columns.clone(), out),
                _ => isa.axpy_rows_batch(units, rows, values, columns.clone(), out),
            }
        }
    }
}

impl Predictor<'_> {
    /// Bytes that are read whatever hidden units are active.
    pub(crate) fn shared_bytes(&self) -> usize {
        let a = self.a.rows() * self.a.row_bytes();
        a + size_of_val(self.bias) + size_of_val(self.scales)
    }

    /// Bytes that are read of the row of an active hidden unit.
    pub(crate) fn unit_bytes(&self, threads: &Threads) -> usize {
        match self.is_rounded(threads) {
            // The scales of the matrix itself are 1, and not read.
            true => self.units.row_bytes() - size_of::<f16>() * self.units.blocks(),
            false => self.units.row_bytes(),
        }
    }

    /// Whether hidden units are rounded, and their rows summed in whole numbers.
    fn is_rounded(&self, threads: &Threads) -> bool {
        !self.scales.is_empty() && threads.activations() == ActivationFormat::Int8
    }

    /// Sets the masks of all vectors of `x`: neurons whose logit reaches the threshold. Only the columns of B whose hidden units are
    /// active for some token are read; a token's mask does not depend on batching.
    pub(crate) fn predict(
        &self,
        threads: &Threads,
        x: &Input<'_>,
        buffers: &mut PredictionBuffers,
        statistics: &mut Statistics,
    ) {
        let (rank, neurons) = (self.a.rows(), self.bias.len());
        let PredictionBuffers {
            input,
            hidden_units,
            rounded,
            active_units,
            masks,
            ..
        } = &mut *buffers;
        let tokens = x.tokens();
        hidden_units.resize(tokens * rank, 0.0);
        let own;
        let x = if x.suits(&self.a, threads.activations()) {
            x
        } else {
            own = Input::new(threads, x.exact(), self.a.columns(), &self.a, input);
            &own
        };
        let words = masks.reset(neurons, tokens);
        let (isa, unit_bytes) = (threads.isa(), self.unit_bytes(threads));
        if tokens == 1 {
            let (rounded, listed) = (&mut *rounded, &mut *active_units);
            // The number of active units is not yet known when the job is divided among threads.
            let bytes = rank * unit_bytes;
            threads.gemv_each_then(
                &[&self.a],
                x,
                hidden_units,
                move |hidden_units| {
                    self.list_units(threads, hidden_units, rounded, listed);
                    &*listed
                },
                (words, bytes),
                |part, words, active_units| self.decide(isa, active_units, part, words),
            );
        } else {
            threads.gemm(&self.a, x, hidden_units);
            self.list_units(threads, hidden_units, rounded, active_units);
            let bytes = active_units.units.len() * active_units.tokens_per_list * unit_bytes;
            threads.by_column_groups(words, tokens, bytes, |part, words| {
                self.decide(isa, active_units, part, words);
            });
        }
        let bytes_read = self.shared_bytes() + active_units.union * unit_bytes;
        statistics.bytes_read += bytes_read as u64;
        // One token's buffers are kept for the next layer; a batch's would add to the memory of its FFN.
        if tokens > 1 {
            (*hidden_units, *rounded, *active_units) = Default::default();
        }
    }

    /// Lists the active units of `hidden_units [tokens, rank]`, to which ReLU has not been applied.
    fn list_units(
        &self,
        threads: &Threads,
        hidden_units: &mut [f32],
        rounded: &mut QuantisedActivations,
        active_units: &mut ActiveUnits,
    ) {
        for unit in &mut *hidden_units {
            // NaN becomes 0, with or without ReLU.
            let passes = *unit > 0.0 || (self.is_linear && *unit < 0.0);
            *unit = if passes { *unit } else { 0.0 };
        }
        if self.is_rounded(threads) {
            threads.isa().quantise(hidden_units, self.a.rows(), rounded);
            active_units.list_rounded(rounded, self.is_linear);
        } else {
            let block = if self.scales.is_empty() {
                UNITS_PER_BLOCK
            } else {
                BLOCK
            };
            active_units.list(&self.units, hidden_units, block);
        }
    }

    /// Sets the mask words in the range `part` for all tokens, `[words, tokens]`.
    fn decide(&self, isa: Isa, active_units: &ActiveUnits, part: Range<usize>, words: &mut [u64]) {
        let (neurons, tokens) = (self.bias.len(), active_units.tokens);
        let most = (LOGITS_PER_STEP / WORD / tokens).max(WORDS_PER_STEP);
        let steps = part.len().div_ceil(most).max(1);
        let words_per_step = part.len().div_ceil(steps).next_multiple_of(WORDS_PER_STEP);
        let starts = part.step_by(words_per_step);
        for (start, words) in starts.zip(words.chunks_mut(words_per_step * tokens)) {
            let first = start * WORD;
            let columns = first..neurons.min(first + words.len() / tokens * WORD);
            let width = columns.len();
            ThreadBuffer(&LOGITS).empty(|logits| {
                self.logits(isa, active_units, columns, logits);
                for (token, logits) in logits.chunks_exact(width).enumerate() {
                    let words = words[token..].iter_mut().step_by(tokens);
                    for (word, logits) in words.zip(logits.chunks(WORD)) {
                        *word = pack_decisions(logits, |logit| logit >= self.threshold);
                    }
                }
            });
        }
    }

    /// Sets `logits [tokens, columns]` to those of the neurons `columns`.
    fn logits(
        &self,
        isa: Isa,
        active_units: &ActiveUnits,
        columns: Range<usize>,
        logits: &mut Vec<f32>,
    ) {
        let (neurons, width) = (self.bias.len(), columns.len());
        logits.clear();
        for _ in 0..active_units.tokens {
            logits.extend_from_slice(&self.bias[columns.clone()]);
        }
        if !active_units.scales.is_empty() {
            return self.add_rounded(isa, active_units, columns, logits);
        }
        for block in 0..active_units.blocks() {
            if self.scales.is_empty() {
                active_units.add(isa, &self.units, block, columns.clone(), logits);
                continue;
            }
            ThreadBuffer(&SUMS).zeroed(logits.len(), |sums| {
                active_units.add(isa, &self.units, block, columns.clone(), sums);
                let scales = &self.scales[block * neurons..][columns.clone()];
                let sums = sums.chunks_exact(width);
                for (logits, sums) in logits.chunks_exact_mut(width).zip(sums) {
                    for ((logit, sum), scale) in logits.iter_mut().zip(sums).zip(scales) {
                        *logit += sum * scale;
                    }
                }
            });
        }
    }

    /// Adds the sums of the active units, whose values are rounded, to `logits [tokens, columns]`.
    fn add_rounded(
        &self,
        isa: Isa,
        active_units: &ActiveUnits,
        columns: Range<usize>,
        logits: &mut [f32],
    ) {
        let ActiveUnits {
            tokens,
            units,
            signs,
            rounded,
            scales,
            bounds,
            ..
        } = active_units;
        let list = |index: usize| match bounds.get(index..index + 2) {
            Some(bounds) => bounds[0]..bounds[1],
            None => 0..0,
        };
        let add =
            |rows: Range<usize>, next: Range<usize>, block: usize, scale: f32, out: &mut [f32]| {
                let scales = &self.scales[block * self.bias.len()..][columns.clone()];
                let (rows, values, next) = (&units[rows.clone()], &rounded[rows], &units[next]);
                isa.add_units(
                    &self.units,
                    rows,
                    values,
                    next,
                    columns.clone(),
                    scale,
                    scales,
                    out,
                );
            };
        add(0..0, list(0), 0, 0.0, &mut logits[..columns.len()]);
        for (index, scale) in scales.iter().enumerate() {
            let (block, token) = (index / signs / tokens, index / signs % tokens);
            let out = &mut logits[token * columns.len()..][..columns.len()];
            add(list(index), list(index + 1), block, *scale, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::random::Random;
    use powerinfer_tensor::{Format, pack};
    use proptest::prelude::*;

    use super::*;

    /// The neurons that a predictor predicts from the hidden units of one token, block by block, by definition.
    fn defined(threads: &Threads, predictor: &Predictor<'_>, hidden_units: &[f32]) -> Vec<u32> {
        let isa = threads.isa();
        let mut logits = predictor.bias.to_vec();
        let neurons = logits.len();
        let block = if predictor.scales.is_empty() {
            hidden_units.len()
        } else {
            BLOCK
        };
        let is_rounded = predictor.is_rounded(threads);
        for (index, hidden_units) in hidden_units.chunks(block).enumerate() {
            let mut sums = if predictor.scales.is_empty() {
                logits.clone()
            } else {
                vec![0.0; neurons]
            };
            let first = (index * block) as u32;
            let units = activated(predictor, hidden_units);
            let (values, scale) = if is_rounded {
                whole_numbers(isa, &units)
            } else {
                (units, 1.0)
            };
            // Rounded negative units are added after the positive ones.
            let parts = match is_rounded && predictor.is_linear {
                true => vec![1.0, -1.0],
                false => vec![0.0],
            };
            for sign in parts {
                let is_in = |value: f32| value != 0.0 && (sign == 0.0 || value.signum() == sign);
                let active_units = (first..).zip(&values).filter(|(_, value)| is_in(**value));
                let (rows, values): (Vec<u32>, Vec<f32>) = active_units.unzip();
                if is_rounded {
                    sums.fill(0.0);
                }
                isa.axpy_rows(&predictor.units, &rows, &values, 0..neurons, &mut sums);
                let scales = predictor.scales.get(index * neurons..);
                match scales.filter(|scales| !scales.is_empty()) {
                    None => logits.clone_from(&sums),
                    Some(scales) => {
                        let sums = sums.iter().zip(scales);
                        let logits = logits.iter_mut().zip(sums);
                        for (logit, (sum, unit_scale)) in logits {
                            let scale = scale * unit_scale;
                            *logit = if is_rounded {
                                scale.mul_add(*sum, *logit)
                            } else {
                                *logit + sum * scale
                            };
                        }
                    }
                }
            }
        }
        let logits = (0..).zip(logits);
        let reached = logits.filter(|(_, logit)| *logit >= predictor.threshold);
        reached.map(|(neuron, _)| neuron).collect()
    }

    /// Hidden units after ReLU, if the predictor has one.
    fn activated(predictor: &Predictor<'_>, hidden_units: &[f32]) -> Vec<f32> {
        let lowest = if predictor.is_linear { f32::MIN } else { 0.0 };
        hidden_units.iter().map(|unit| unit.max(lowest)).collect()
    }

    /// A block of values rounded to 8 bits, and their scale.
    fn whole_numbers(isa: Isa, values: &[f32]) -> (Vec<f32>, f32) {
        let mut rounded = QuantisedActivations::default();
        isa.quantise(values, values.len(), &mut rounded);
        let (quants, scale) = rounded.vector(0).block(0);
        let quants = quants[..values.len()].iter();
        (quants.map(|quant| f32::from(*quant)).collect(), scale)
    }

    proptest! {
        #[test]
        fn a_batch_predicts_the_neurons_of_its_tokens_alone(
            format in prop::sample::select(vec![Format::F32, Format::Bf16, Format::Q8_0, Format::Q4_0]),
            hidden in 1usize..100, rank in 1usize..400, neurons in 1usize..400,
            tokens in 1usize..64, threads in 1usize..4, lean in -1.5f32..1.5, seed: u64, is_linear: bool,
            activations in prop::sample::select(vec![ActivationFormat::Int8, ActivationFormat::F32]),
        ) {
            let mut random = Random::new(seed);
            let mut normal = |count: usize| -> Vec<f32> {
                (0..count).map(|_| random.normal() as f32).collect()
            };
            // Few or many units are active, as all inputs have one direction in common.
            let direction = normal(hidden);
            let mut x = normal(tokens * hidden);
            for (x, direction) in x.iter_mut().zip(direction.iter().cycle()) {
                *x += lean * direction;
            }
            let mut a = normal(rank * hidden);
            for (a, direction) in a.iter_mut().zip(direction.iter().cycle()) {
                *a += 0.3 * direction;
            }
            let blocks = if format.is_quantised() { rank.div_ceil(BLOCK) } else { 0 };
            let (a, units) = (pack(format, rank, hidden, &a), normal(rank * neurons));
            let (units, bias) = (pack(format, rank, neurons, &units), normal(neurons));
            // The numbers of quantised units have no scales of their own.
            let ones = |format| match format {
                Format::Q8_0 => Some(127.0),
                Format::Q4_0 => Some(-8.0),
                _ => None,
            };
            let units = match ones(format) {
                None => units,
                Some(largest) => {
                    let mut whole: Vec<f32> = normal(rank * neurons);
                    whole.iter_mut().for_each(|number| *number = (*number * 2.0).round().clamp(-7.0, 7.0));
                    for row in whole.chunks_mut(neurons) {
                        row.chunks_mut(BLOCK).for_each(|block| block[0] = largest);
                    }
                    pack(format, rank, neurons, &whole)
                }
            };
            let scales = normal(blocks * neurons);
            let predictor = Predictor {
                a: a.as_view(),
                units: units.as_view(),
                scales: &scales,
                bias: &bias,
                threshold: 0.1,
                is_linear,
            };
            let threads = Threads::new(Isa::detect().unwrap(), threads).unwrap().with_activations(activations);
            let mut buffers = PredictionBuffers::default();
            let mut predict = |x: &[f32]| {
                let mut statistics = Statistics::default();
                // Prepared for a matrix that may have another format than the predictor's.
                let mut prepared = InputBuffers::default();
                let prepared = Input::new(&threads, x, hidden, &predictor.units, &mut prepared);
                predictor.predict(&threads, &prepared, &mut buffers, &mut statistics);
                let tokens = 0..x.len() / hidden;
                let listed = tokens.map(|token| buffers.masks.listed(token, neurons));
                (listed.collect::<Vec<_>>(), statistics.bytes_read)
            };
            // Bytes that do not depend on the active units.
            let fixed = rank * predictor.a.row_bytes() + 4 * (bias.len() + scales.len());
            let is_rounded = predictor.is_rounded(&threads);
            let unit_bytes = if is_rounded { predictor.units.row_bytes() - 2 * neurons.div_ceil(BLOCK) } else { predictor.units.row_bytes() };
            let read = |hidden_units: &[f32]| {
                let values: Vec<f32> = hidden_units.chunks(rank).flat_map(|units| units.chunks(BLOCK)).flat_map(|units| {
                    let units = activated(&predictor, units);
                    if is_rounded { whole_numbers(threads.isa(), &units).0 } else { units }
                }).collect();
                let is_active = |unit: &usize| values.iter().skip(*unit).step_by(rank).any(|v| *v != 0.0);
                (fixed + (0..rank).filter(is_active).count() * unit_bytes) as u64
            };
            let mut hidden_units = vec![0.0; tokens * rank];
            let mut input = InputBuffers::default();
            threads.gemm(&predictor.a, &Input::new(&threads, &x[..], hidden, &predictor.a, &mut input), &mut hidden_units);
            let (together, bytes_read) = predict(&x);
            prop_assert_eq!(bytes_read, read(&hidden_units));
            let tokens = x.chunks_exact(hidden).zip(hidden_units.chunks_exact(rank));
            for ((x, hidden_units), together) in tokens.zip(together) {
                let (alone, bytes_read) = predict(x);
                prop_assert_eq!(&alone[0], &together);
                prop_assert_eq!(together, defined(&threads, &predictor, hidden_units));
                prop_assert_eq!(bytes_read, read(hidden_units));
            }
        }
    }
}
