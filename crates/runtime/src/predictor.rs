//! Prediction of the active neurons of all tokens of a batch: by a trained predictor, or by the signs of the gate
//! (SparseInfer, arXiv 2411.12692).

use std::{cell::Cell, ops::Range};

use powerinfer_kernels::{Arithmetic, Isa, relative_axpy_cost};
use powerinfer_tensor::{BLOCK, Matrix, SignMatrix, pack_signs};

use crate::{
    Statistics, Threads,
    input::{Input, InputBuffers},
    masks::{Masks, WORD, pack_decisions},
    scratch::ThreadBuffer,
};

/// Hidden units whose rows a thread reads for all tokens before the next ones, where sums need no scales: their
/// stripes stay in the second-level cache.
const UNITS_PER_BLOCK: usize = 256;

/// Logits of all tokens that a thread computes together, about: they stay in the cache too.
const LOGITS_PER_STEP: usize = 8192;

/// Mask words whose columns kernels process together, or a multiple.
const WORDS_PER_STEP: usize = 128 / WORD;

thread_local! {
    static SUMS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static LOGITS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// A layer's predictor, `logits = B · relu(A · x) + b`.
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
}

/// The signs of a layer's gate, and how many must agree with those of the input.
#[derive(Clone, Copy)]
pub(crate) struct SignBits<'a> {
    pub(crate) signs: SignMatrix<'a>,
    pub(crate) agreements: u32,
}

/// The predicted neurons of some tokens, and buffers that are reused from layer to layer.
#[derive(Debug, Default)]
pub(crate) struct PredictionBuffers {
    input: InputBuffers,
    /// Hidden units of the predictor, `[tokens, rank]`.
    hidden_units: Vec<f32>,
    active_units: ActiveUnits,
    /// Signs of the inputs, token by token.
    signs: Vec<u64>,
    pub(crate) masks: Masks,
}

/// The hidden units that are positive and their values, in lists: for every block of units one list per token, or one
/// for all tokens.
#[derive(Debug, Default)]
struct ActiveUnits {
    tokens: usize,
    /// Tokens that share a list: 1, or all where they have most units in common. A unit that is inactive for one of them
    /// has the value 0.
    tokens_per_list: usize,
    units: Vec<u32>,
    /// `[tokens_per_list, units]` of every list.
    values: Vec<f32>,
    /// Where lists start in `units`, and where the last one ends.
    bounds: Vec<usize>,
    /// Units that are active for any token.
    union: usize,
}

impl ActiveUnits {
    /// Lists the active units of `hidden_units [tokens, rank]`, whose rows are those of `units`, in blocks of `block`.
    fn list(&mut self, units: &Matrix<'_>, hidden_units: &[f32], block: usize) {
        let rank = units.rows();
        let tokens = hidden_units.len() / rank;
        let value = |unit: usize, token: usize| match hidden_units[token * rank + unit] {
            value if value > 0.0 => value,
            _ => 0.0,
        };
        let is_active =
            |unit: usize, mut tokens: Range<usize>| tokens.any(|token| value(unit, token) > 0.0);
        let active = hidden_units.iter().filter(|value| **value > 0.0).count();
        self.union = (0..rank).filter(|unit| is_active(*unit, 0..tokens)).count();
        let share = relative_axpy_cost(units.format(), tokens, Arithmetic::Float);
        let is_shared = active as f64 >= share * (tokens * self.union) as f64;
        let (listed, values) = match is_shared {
            true => (self.union, self.union * tokens),
            false => (active, active),
        };
        self.tokens = tokens;
        self.tokens_per_list = if is_shared { tokens } else { 1 };
        // One token's lists take the memory of the longest, so that decoding allocates nothing.
        let (listed, values) = if tokens == 1 {
            (rank, rank)
        } else {
            (listed, values)
        };
        self.units.clear();
        self.units.reserve_exact(listed);
        self.values.clear();
        self.values.reserve_exact(values);
        self.bounds.clear();
        self.bounds.push(0);
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
    /// Sets the masks of all tokens of `x [tokens, hidden]`: neurons whose logit reaches the threshold. Of B only the
    /// columns of hidden units are read that are active for any token; a token's mask does not depend on batching.
    pub(crate) fn predict(
        &self,
        threads: &Threads,
        x: &[f32],
        buffers: &mut PredictionBuffers,
        statistics: &mut Statistics,
    ) {
        let (rank, neurons) = (self.a.rows(), self.bias.len());
        let PredictionBuffers {
            input,
            hidden_units,
            active_units,
            masks,
            ..
        } = &mut *buffers;
        let x = Input::new(threads, x, self.a.columns(), &self.a, input);
        let tokens = x.tokens();
        hidden_units.clear();
        hidden_units.resize(tokens * rank, 0.0);
        threads.gemm(&self.a, &x, hidden_units);
        let block = match self.scales.is_empty() {
            true => UNITS_PER_BLOCK,
            false => BLOCK,
        };
        active_units.list(&self.units, hidden_units, block);
        let words = masks.reset(neurons, tokens);
        let bytes = active_units.values.len() * self.units.row_bytes();
        threads.by_column_groups(words, tokens, bytes, |part, words| {
            let steps = LOGITS_PER_STEP / (WORDS_PER_STEP * WORD) / tokens;
            let words_per_step = WORDS_PER_STEP * steps.max(1);
            let starts = part.step_by(words_per_step);
            for (start, words) in starts.zip(words.chunks_mut(words_per_step * tokens)) {
                let first = start * WORD;
                let columns = first..neurons.min(first + words.len() / tokens * WORD);
                let width = columns.len();
                ThreadBuffer(&LOGITS).empty(|logits| {
                    self.logits(threads.isa(), active_units, columns, logits);
                    for (token, logits) in logits.chunks_exact(width).enumerate() {
                        let words = words[token..].iter_mut().step_by(tokens);
                        for (word, logits) in words.zip(logits.chunks(WORD)) {
                            *word = pack_decisions(logits, |logit| logit >= self.threshold);
                        }
                    }
                });
            }
        });
        statistics.bytes_read += (rank * self.a.row_bytes()
            + active_units.union * self.units.row_bytes()
            + size_of_val(self.bias)
            + size_of_val(self.scales)) as u64;
        // One token's buffers are kept for the next layer; a batch's would add to the memory of its FFN.
        if tokens > 1 {
            (*hidden_units, *active_units) = Default::default();
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
}

impl SignBits<'_> {
    /// Sets the masks of all tokens of `x [tokens, hidden]`: neurons of whose gate enough signs agree with the input's.
    pub(crate) fn predict(
        &self,
        threads: &Threads,
        x: &[f32],
        buffers: &mut PredictionBuffers,
        statistics: &mut Statistics,
    ) {
        let size = self.signs.columns();
        let (rows, tokens) = (self.signs.rows(), x.len() / size);
        let PredictionBuffers { signs, masks, .. } = buffers;
        signs.clear();
        signs.extend(x.chunks_exact(size).flat_map(pack_signs));
        let signs = signs.chunks_exact(size.div_ceil(WORD));
        let words = masks.reset(rows, tokens);
        let bytes = WORD * SignMatrix::row_bytes(size) * tokens;
        threads.by_row_groups(words, tokens, 1, bytes, |part, words| {
            let mut agreements = [0; WORD];
            for (index, words) in part.zip(words.chunks_exact_mut(tokens)) {
                let rows = index * WORD..rows.min((index + 1) * WORD);
                let agreements = &mut agreements[..rows.len()];
                let group = self.signs.rows_range(rows);
                for (x, word) in signs.clone().zip(words) {
                    threads.isa().sign_agreements(&group, x, agreements);
                    *word = pack_decisions(agreements, |count| count >= self.agreements);
                }
            }
        });
        statistics.bytes_read += self.signs.bytes() as u64;
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::random::Random;
    use powerinfer_tensor::{Format, pack};
    use proptest::prelude::*;

    use super::*;

    /// The predicted neurons of every token.
    fn listed(buffers: &PredictionBuffers, neurons: usize, tokens: usize) -> Vec<Vec<u32>> {
        let list = |token| {
            let mut rows = Vec::new();
            buffers.masks.list(token, 0..neurons, &mut rows);
            rows
        };
        (0..tokens).map(list).collect()
    }

    /// The neurons that a predictor predicts from the hidden units of one token, block by block, by definition.
    fn defined(isa: Isa, predictor: &Predictor<'_>, hidden_units: &[f32]) -> Vec<u32> {
        let mut logits = predictor.bias.to_vec();
        let neurons = logits.len();
        let block = match predictor.scales.is_empty() {
            true => hidden_units.len(),
            false => BLOCK,
        };
        for (index, hidden_units) in hidden_units.chunks(block).enumerate() {
            let mut sums = match predictor.scales.is_empty() {
                true => logits.clone(),
                false => vec![0.0; neurons],
            };
            let first = (index * block) as u32;
            let active_units = (first..)
                .zip(hidden_units)
                .filter(|(_, value)| **value > 0.0);
            let (rows, values): (Vec<u32>, Vec<f32>) = active_units.unzip();
            isa.axpy_rows(&predictor.units, &rows, &values, 0..neurons, &mut sums);
            let scales = predictor.scales.get(index * neurons..);
            match scales.filter(|scales| !scales.is_empty()) {
                None => logits = sums,
                Some(scales) => {
                    let sums = sums.iter().zip(scales);
                    let logits = logits.iter_mut().zip(sums);
                    logits.for_each(|(logit, (sum, scale))| *logit += sum * scale);
                }
            }
        }
        let logits = (0..).zip(logits);
        let reached = logits.filter(|(_, logit)| *logit >= predictor.threshold);
        reached.map(|(neuron, _)| neuron).collect()
    }

    proptest! {
        #[test]
        fn a_batch_predicts_the_neurons_of_its_tokens_alone(
            format in prop::sample::select(vec![Format::F32, Format::Bf16, Format::Q8_0, Format::Q4_0]),
            hidden in 1usize..100, rank in 1usize..400, neurons in 1usize..400,
            tokens in 1usize..64, threads in 1usize..4, lean in -1.5f32..1.5, seed: u64,
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
            let scales = normal(blocks * neurons);
            let predictor = Predictor {
                a: a.as_view(),
                units: units.as_view(),
                scales: &scales,
                bias: &bias,
                threshold: 0.1,
            };
            let threads = Threads::new(Isa::detect().unwrap(), threads).unwrap();
            let mut buffers = PredictionBuffers::default();
            let mut predict = |x: &[f32]| {
                let mut statistics = Statistics::default();
                predictor.predict(&threads, x, &mut buffers, &mut statistics);
                (listed(&buffers, neurons, x.len() / hidden), statistics.bytes_read)
            };
            // Bytes that do not depend on the active units.
            let fixed = rank * predictor.a.row_bytes() + 4 * (bias.len() + scales.len());
            let read = |hidden_units: &[f32]| {
                let is_active = |unit: &usize| hidden_units.iter().skip(*unit).step_by(rank).any(|v| *v > 0.0);
                (fixed + (0..rank).filter(is_active).count() * predictor.units.row_bytes()) as u64
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
                prop_assert_eq!(together, defined(threads.isa(), &predictor, hidden_units));
                prop_assert_eq!(bytes_read, read(hidden_units));
            }
        }

        #[test]
        fn signs_are_counted_for_a_batch_as_for_its_tokens_alone(
            hidden in 1usize..200, neurons in 1usize..900, tokens in 1usize..20,
            threads in 1usize..4, seed: u64,
        ) {
            let mut random = Random::new(seed);
            let mut normal = |count: usize| -> Vec<f32> {
                (0..count).map(|_| random.normal() as f32).collect()
            };
            let (gate, x) = (normal(neurons * hidden), normal(tokens * hidden));
            let words = gate.chunks(hidden).flat_map(pack_signs);
            let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
            let agreements = hidden as u32 / 2 + 1;
            let signs = SignMatrix::new(&bytes, neurons, hidden).unwrap();
            let signs = SignBits { signs, agreements };
            let threads = Threads::new(Isa::detect().unwrap(), threads).unwrap();
            let mut buffers = PredictionBuffers::default();
            let mut predict = |x: &[f32]| {
                let mut statistics = Statistics::default();
                signs.predict(&threads, x, &mut buffers, &mut statistics);
                assert_eq!(statistics.bytes_read, bytes.len() as u64);
                listed(&buffers, neurons, x.len() / hidden)
            };
            let together = predict(&x);
            for (x, found) in x.chunks_exact(hidden).zip(together) {
                let agree = |gate: &[f32]| {
                    let pairs = gate.iter().zip(x);
                    let agree = pairs.filter(|(w, x)| w.is_sign_negative() == x.is_sign_negative());
                    agree.count() as u32 >= agreements
                };
                let rows = (0..neurons as u32).zip(gate.chunks_exact(hidden));
                let want: Vec<u32> = rows.filter(|row| agree(row.1)).map(|row| row.0).collect();
                prop_assert_eq!(&found, &want);
                prop_assert_eq!(&predict(x)[0], &want);
            }
        }
    }
}
