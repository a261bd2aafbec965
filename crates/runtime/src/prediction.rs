//! Prediction which neurons fire, for all tokens of a batch at once: by a predictor, or by signs.

use std::ops::Range;

use powerinfer_kernels::{Arithmetic, Isa, relative_axpy_cost};
use powerinfer_tensor::{BLOCK, Matrix, SignMatrix, pack_signs};

use crate::{
    Statistics, Threads,
    input::Input,
    masks::{Masks, WORD, pack_decisions},
};

/// Units whose rows a thread goes through for all tokens before the next ones', where sums need no
/// scales: pieces of so many stay in the second-level cache.
const UNITS_AT_ONCE: usize = 256;

/// Logits that a thread sums up at once, of all tokens together, about: they stay in the cache too.
const LOGITS_AT_ONCE: usize = 8192;

/// Words of a mask whose columns kernels take at once, or a multiple.
const WORDS_AT_ONCE: usize = 128 / WORD;

/// A layer's predictor.
#[derive(Clone, Copy)]
pub(crate) struct Predictor<'a> {
    pub(crate) a: Matrix<'a>,
    /// Row j is what unit j of the hidden layer says of every neuron.
    pub(crate) units: Matrix<'a>,
    /// Per block of units, what that is to be multiplied by for each neuron; empty for by nothing.
    pub(crate) scales: &'a [f32],
    pub(crate) bias: &'a [f32],
    pub(crate) threshold: f32,
}

/// Signs of a layer's gate.
#[derive(Clone, Copy)]
pub(crate) struct SignBits<'a> {
    pub(crate) signs: SignMatrix<'a>,
    pub(crate) agreements: u32,
}

/// Who is predicted, and memory that is used again from layer to layer.
#[derive(Debug, Default)]
pub(crate) struct Prediction {
    /// The predictor's hidden layer, `[tokens, rank]`.
    middle: Vec<f32>,
    living: Living,
    /// Signs of the inputs, token by token.
    signs: Vec<u64>,
    pub(crate) masks: Masks,
}

/// The units of the hidden layer that relu leaves alive and their values, in lists: of every block of
/// units one for each token, or one for all.
#[derive(Debug, Default)]
struct Living {
    tokens: usize,
    /// Tokens that have a list together: 1, or all where they share most units. What is dead for one
    /// of them has the value 0.
    together: usize,
    units: Vec<u32>,
    /// Of every list `[together, units]`.
    values: Vec<f32>,
    /// Where lists start in `units`, and where the last one ends.
    bounds: Vec<usize>,
    /// Units that are alive for any token.
    united: usize,
}

impl Living {
    /// Lists what is alive in `middle [tokens, rank]`, to be multiplied with the rows of `units`, in
    /// blocks of `block`.
    fn list(&mut self, units: &Matrix<'_>, middle: &[f32], block: usize) {
        let rank = units.rows();
        let tokens = middle.len() / rank;
        let value = |unit: usize, token: usize| match middle[token * rank + unit] {
            value if value > 0.0 => value,
            _ => 0.0,
        };
        let is_alive =
            |unit: usize, mut tokens: Range<usize>| tokens.any(|token| value(unit, token) > 0.0);
        let alive = middle.iter().filter(|value| **value > 0.0).count();
        self.united = (0..rank).filter(|unit| is_alive(*unit, 0..tokens)).count();
        let share = relative_axpy_cost(units.format(), tokens, Arithmetic::Float);
        let is_shared = alive as f64 >= share * (tokens * self.united) as f64;
        let (listed, values) = match is_shared {
            true => (self.united, self.united * tokens),
            false => (alive, alive),
        };
        self.tokens = tokens;
        self.together = if is_shared { tokens } else { 1 };
        self.units.clear();
        self.units.reserve_exact(listed);
        self.values.clear();
        self.values.reserve_exact(values);
        self.bounds.clear();
        self.bounds.push(0);
        for start in (0..rank).step_by(block) {
            for first in (0..tokens).step_by(self.together) {
                let tokens = first..first + self.together;
                let block = start..rank.min(start + block);
                let from = self.units.len();
                let alive = block.filter(|unit| is_alive(*unit, tokens.clone()));
                self.units.extend(alive.map(|unit| unit as u32));
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
        (self.bounds.len() - 1) / (self.tokens / self.together)
    }

    /// Adds to `out [tokens, columns]` what the living units of block `index` say of `columns`.
    fn add(
        &self,
        isa: Isa,
        units: &Matrix<'_>,
        index: usize,
        columns: Range<usize>,
        out: &mut [f32],
    ) {
        let lists = self.tokens / self.together;
        let bounds = self.bounds[index * lists..].windows(2);
        let of_lists = out.chunks_exact_mut(self.together * columns.len());
        for (bounds, out) in bounds.zip(of_lists) {
            let rows = &self.units[bounds[0]..bounds[1]];
            let values = &self.values[bounds[0] * self.together..bounds[1] * self.together];
            match (rows.is_empty(), self.together) {
                (true, _) => {}
                (_, 1) => isa.axpy_rows(units, rows, values, columns.clone(), out),
                _ => isa.axpy_rows_batch(units, rows, values, columns.clone(), out),
            }
        }
    }
}

impl Predictor<'_> {
    /// `B · relu(A · x) + b`, compared with the threshold, for every token of `x [tokens, hidden]`,
    /// each with the bits of one alone. Of B only the columns of units are read that relu leaves alive
    /// for any of them.
    pub(crate) fn predict(
        &self,
        threads: &Threads,
        x: &[f32],
        predicted: &mut Prediction,
        statistics: &mut Statistics,
    ) {
        let (rank, neurons) = (self.a.rows(), self.bias.len());
        let x = Input::new(threads, x, self.a.columns(), &self.a);
        let tokens = x.tokens();
        let Prediction {
            middle,
            living,
            masks,
            ..
        } = &mut *predicted;
        middle.clear();
        middle.resize(tokens * rank, 0.0);
        threads.gemm(&self.a, &x, middle);
        let block = match self.scales.is_empty() {
            true => UNITS_AT_ONCE,
            false => BLOCK,
        };
        living.list(&self.units, middle, block);
        let words = masks.reset(neurons, tokens);
        let bytes = living.values.len() * self.units.row_bytes();
        threads.by_column_groups(words, tokens, bytes, |part, words| {
            let steps = LOGITS_AT_ONCE / (WORDS_AT_ONCE * WORD) / tokens;
            let words_at_once = WORDS_AT_ONCE * steps.max(1);
            let (mut sums, mut logits) = (Vec::new(), Vec::new());
            let starts = part.step_by(words_at_once);
            for (start, words) in starts.zip(words.chunks_mut(words_at_once * tokens)) {
                let first = start * WORD;
                let columns = first..neurons.min(first + words.len() / tokens * WORD);
                let width = columns.len();
                self.sum_up(threads.isa(), living, columns, &mut sums, &mut logits);
                for (token, logits) in logits.chunks_exact(width).enumerate() {
                    let words = words[token..].iter_mut().step_by(tokens);
                    for (word, logits) in words.zip(logits.chunks(WORD)) {
                        *word = pack_decisions(logits, |logit| logit >= self.threshold);
                    }
                }
            }
        });
        statistics.bytes_read += (rank * self.a.row_bytes()
            + living.united * self.units.row_bytes()
            + size_of_val(self.bias)
            + size_of_val(self.scales)) as u64;
        // What one token needs is kept for the next layer; a batch's would stand beside all that its FFN
        // takes.
        if tokens > 1 {
            (*middle, *living) = Default::default();
        }
    }

    /// Fills `logits` with those of the neurons `columns`, `[tokens, columns]`.
    fn sum_up(
        &self,
        isa: Isa,
        living: &Living,
        columns: Range<usize>,
        sums: &mut Vec<f32>,
        logits: &mut Vec<f32>,
    ) {
        let (neurons, width) = (self.bias.len(), columns.len());
        logits.clear();
        for _ in 0..living.tokens {
            logits.extend_from_slice(&self.bias[columns.clone()]);
        }
        for block in 0..living.blocks() {
            if self.scales.is_empty() {
                living.add(isa, &self.units, block, columns.clone(), logits);
                continue;
            }
            sums.clear();
            sums.resize(logits.len(), 0.0);
            living.add(isa, &self.units, block, columns.clone(), sums);
            let scales = &self.scales[block * neurons..][columns.clone()];
            let sums = sums.chunks_exact(width);
            for (logits, sums) in logits.chunks_exact_mut(width).zip(sums) {
                for ((logit, sum), scale) in logits.iter_mut().zip(sums).zip(scales) {
                    *logit += sum * scale;
                }
            }
        }
    }
}

impl SignBits<'_> {
    /// Counts, for every gate and every token of `x [tokens, hidden]`, the signs that agree.
    pub(crate) fn predict(
        &self,
        threads: &Threads,
        x: &[f32],
        predicted: &mut Prediction,
        statistics: &mut Statistics,
    ) {
        let size = self.signs.columns();
        let (rows, tokens) = (self.signs.rows(), x.len() / size);
        let Prediction { signs, masks, .. } = predicted;
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

    /// Who is predicted of every token.
    fn listed(predicted: &Prediction, neurons: usize, tokens: usize) -> Vec<Vec<u32>> {
        let list = |token| {
            let mut rows = Vec::new();
            predicted.masks.list(token, 0..neurons, &mut rows);
            rows
        };
        (0..tokens).map(list).collect()
    }

    /// Whom a predictor predicts of what its hidden layer says of one token: block by block, as it is
    /// defined.
    fn defined(isa: Isa, predictor: &Predictor<'_>, middle: &[f32]) -> Vec<u32> {
        let mut logits = predictor.bias.to_vec();
        let neurons = logits.len();
        let block = match predictor.scales.is_empty() {
            true => middle.len(),
            false => BLOCK,
        };
        for (index, middle) in middle.chunks(block).enumerate() {
            let mut sums = match predictor.scales.is_empty() {
                true => logits.clone(),
                false => vec![0.0; neurons],
            };
            let first = (index * block) as u32;
            let living = (first..).zip(middle).filter(|(_, value)| **value > 0.0);
            let (rows, values): (Vec<u32>, Vec<f32>) = living.unzip();
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
        fn a_batch_predicts_whom_its_tokens_predict_alone(
            format in prop::sample::select(vec![Format::F32, Format::Bf16, Format::Q8_0, Format::Q4_0]),
            hidden in 1usize..100, rank in 1usize..400, neurons in 1usize..400,
            tokens in 1usize..64, threads in 1usize..4, lean in -1.5f32..1.5, seed: u64,
        ) {
            let mut random = Random::new(seed);
            let mut normal = |count: usize| -> Vec<f32> {
                (0..count).map(|_| random.normal() as f32).collect()
            };
            // Few or many units live, for all inputs have one direction in common.
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
            let mut predicted = Prediction::default();
            let mut predict = |x: &[f32]| {
                let mut statistics = Statistics::default();
                predictor.predict(&threads, x, &mut predicted, &mut statistics);
                (listed(&predicted, neurons, x.len() / hidden), statistics.bytes_read)
            };
            // What does not depend on the units that live.
            let fixed = rank * predictor.a.row_bytes() + 4 * (bias.len() + scales.len());
            let read = |middle: &[f32]| {
                let lives = |unit: &usize| middle.iter().skip(*unit).step_by(rank).any(|v| *v > 0.0);
                (fixed + (0..rank).filter(lives).count() * predictor.units.row_bytes()) as u64
            };
            let mut middle = vec![0.0; tokens * rank];
            threads.gemm(&predictor.a, &Input::new(&threads, &x[..], hidden, &predictor.a), &mut middle);
            let (together, bytes_read) = predict(&x);
            prop_assert_eq!(bytes_read, read(&middle));
            let tokens = x.chunks_exact(hidden).zip(middle.chunks_exact(rank));
            for ((x, middle), together) in tokens.zip(together) {
                let (alone, bytes_read) = predict(x);
                prop_assert_eq!(&alone[0], &together);
                prop_assert_eq!(together, defined(threads.isa(), &predictor, middle));
                prop_assert_eq!(bytes_read, read(middle));
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
            let mut predicted = Prediction::default();
            let mut predict = |x: &[f32]| {
                let mut statistics = Statistics::default();
                signs.predict(&threads, x, &mut predicted, &mut statistics);
                assert_eq!(statistics.bytes_read, bytes.len() as u64);
                listed(&predicted, neurons, x.len() / hidden)
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
