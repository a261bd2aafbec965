//! Splits kernels over threads. Rows are independent, and sums are split at fixed rows or by columns, so results do
//! not depend on the number of threads.

use std::{cell::Cell, ops::Range};

use powerinfer_bundle::memory::{BATCH_THREADS, PREFILL_BATCH};
use powerinfer_kernels::{AXPY_GROUP_ROWS, Arithmetic, Isa, relative_axpy_cost};
use powerinfer_pool::Pool;
use powerinfer_tensor::{BLOCK, Matrix};

use crate::{ActivationFormat, RuntimeError, ffn::Active, input::Input, scratch::ThreadBuffer};

/// Bytes of weights below which sharing costs more than it saves.
const WORTH_SPLITTING: usize = 64 << 10;
/// Bytes of a part, at least: starting one takes some 200 ns.
const PART_BYTES: usize = 32 << 10;
/// Parts per thread, at most, so that other threads can take over from a delayed one.
const PARTS_PER_THREAD: usize = 4;
/// Parts of one call, at most.
const MAX_PARTS: usize = 512;
/// Parts into which rows of a sum are divided whatever the number of threads, so that the order of additions is
/// fixed.
const SUM_PARTS: usize = 8;
/// Parts per thread of sums that are split by columns: half as long stripes are read a tenth slower.
const SUMS_PER_THREAD: usize = 1;
/// Rows that kernels process together, or a multiple.
const ROW_GROUP: usize = 8;

/// Bytes of rows that stay in the second-level cache while several tokens use them.
const CACHED_BYTES: usize = 256 << 10;

/// Rows that a GEMM processes together, or a multiple.
const GEMM_ROWS: usize = 48;

/// Columns that a thread takes of a sum over many tokens, or a multiple.
const STRIPE_COLUMNS: usize = 512;
/// Columns that a thread takes at most where tokens are processed one by one: rows are read a quarter faster in long
/// pieces.
const LONG_STRIPE_COLUMNS: usize = 2048;
/// Rows of a stripe that stay in the second-level cache: whole groups whose coefficients are rounded together.
const CHUNK_ROWS: usize = 2 * AXPY_GROUP_ROWS;

thread_local! {
    /// Partial sums of [`Threads::axpy_rows`], `[parts, columns]`.
    static PARTIAL_SUMS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Kernels that run on several threads.
#[derive(Debug)]
pub struct Threads {
    isa: Isa,
    activations: ActivationFormat,
    pool: Pool,
}

/// Work to share: `out`, and the bytes of weights that are read for it.
struct Work<'a, T> {
    out: &'a mut [T],
    bytes: usize,
    /// Parts are multiples of this number of values of `out`.
    step: usize,
    most_parts: usize,
}

impl Threads {
    /// Kernels of `isa` on `count` threads; 0 means 1.
    ///
    /// # Errors
    ///
    /// Fails where the system starts no more threads.
    pub fn new(isa: Isa, count: usize) -> Result<Self, RuntimeError> {
        let pool = Pool::new(count).map_err(|source| RuntimeError::Threads {
            threads: count,
            source,
        })?;
        Ok(Self {
            isa,
            activations: ActivationFormat::default(),
            pool,
        })
    }

    /// Sets the number format of the vectors that matrices are multiplied with.
    pub fn with_activations(self, activations: ActivationFormat) -> Self {
        Self {
            activations,
            ..self
        }
    }

    /// Number format of the vectors that matrices are multiplied with.
    pub fn activations(&self) -> ActivationFormat {
        self.activations
    }

    /// Instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Number of threads.
    pub fn count(&self) -> usize {
        self.pool.threads()
    }

    /// Sets `out`, one value per row of `row_bytes`: `kernel` computes a range of rows.
    fn by_rows<T: Send>(
        &self,
        out: &mut [T],
        row_bytes: usize,
        kernel: impl Fn(Range<usize>, &mut [T]) + Sync,
    ) {
        let work = Work {
            bytes: out.len() * row_bytes,
            step: ROW_GROUP,
            most_parts: PARTS_PER_THREAD * self.count(),
            out,
        };
        self.share_values(work, kernel);
    }

    /// Calls `kernel` with ranges of `work.out` and their values, on all threads where that pays.
    fn share_values<T: Send>(
        &self,
        work: Work<'_, T>,
        kernel: impl Fn(Range<usize>, &mut [T]) + Sync,
    ) {
        let length = work.out.len();
        let steps = length.div_ceil(work.step);
        let parts = (work.bytes / PART_BYTES)
            .min(work.most_parts)
            .min(steps)
            .min(MAX_PARTS);
        if self.count() == 1 || work.bytes < WORTH_SPLITTING || parts < 2 {
            return kernel(0..length, work.out);
        }
        let mut bounds = [0; MAX_PARTS + 1];
        for (part, bound) in bounds[..=parts].iter_mut().enumerate() {
            *bound = (part * steps / parts * work.step).min(length);
        }
        self.pool
            .run_chunks(work.out, &bounds[..=parts], &|first, out: &mut [T]| {
                kernel(first..first + out.len(), out);
            });
    }

    /// Calls `act` with the index and the values of every chunk of `chunk` values of `out`, on all threads where
    /// `bytes` of work are worth sharing; at most [`BATCH_THREADS`] chunks at a time.
    pub(crate) fn by_chunks(
        &self,
        out: &mut [f32],
        chunk: usize,
        bytes: usize,
        act: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let work = Work {
            bytes,
            step: chunk,
            most_parts: self.most_parts(),
            out,
        };
        self.share_values(work, |values, out| {
            for (index, out) in (values.start / chunk..).zip(out.chunks_mut(chunk)) {
                act(index, out);
            }
        });
    }

    /// Parts of work for which a thread takes buffers, at most.
    fn most_parts(&self) -> usize {
        match self.count() {
            count if count > BATCH_THREADS => BATCH_THREADS,
            count => PARTS_PER_THREAD * count,
        }
    }

    /// Copies bytes, on all threads where that pays.
    pub(crate) fn copy(&self, to: &mut [u8], from: &[u8]) {
        self.by_rows(to, 1, |range, to| to.copy_from_slice(&from[range]));
    }

    /// `out[i] = matrix[i] · x` for all rows.
    pub(crate) fn gemv(&self, matrix: &Matrix<'_>, x: &Input<'_>, out: &mut [f32]) {
        assert_eq!(out.len(), matrix.rows(), "one output per row");
        let x = x.vector(0);
        self.by_rows(out, matrix.row_bytes(), |rows, out| {
            x.gemv(self.isa, &matrix.rows_range(rows), out);
        });
    }

    /// `out[i] = matrix[rows[i]] · x`.
    pub(crate) fn gemv_rows(
        &self,
        matrix: &Matrix<'_>,
        rows: &[u32],
        x: &Input<'_>,
        out: &mut [f32],
    ) {
        assert_eq!(out.len(), rows.len(), "one output per listed row");
        let x = x.vector(0);
        self.by_rows(out, matrix.row_bytes(), |listed, out| {
            x.gemv_rows(self.isa, matrix, &rows[listed], out);
        });
    }

    /// Calls `act` with ranges of rows, multiples of `step` except for the last, and `width` slots per row; a row
    /// takes up to `row_bytes`.
    pub(crate) fn by_row_groups<T: Send>(
        &self,
        places: &mut [T],
        width: usize,
        step: usize,
        row_bytes: usize,
        act: impl Fn(Range<usize>, &mut [T]) + Sync,
    ) {
        let work = Work {
            bytes: places.len() / width.max(1) * row_bytes,
            step: step * width,
            most_parts: PARTS_PER_THREAD * self.count(),
            out: places,
        };
        self.share_values(work, |part, places| {
            act(part.start / width..part.end / width, places);
        });
    }

    /// Calls `act` with ranges of column groups and `tokens` slots per group, for sums that read `bytes` in all.
    pub(crate) fn by_column_groups<T: Send>(
        &self,
        places: &mut [T],
        tokens: usize,
        bytes: usize,
        act: impl Fn(Range<usize>, &mut [T]) + Sync,
    ) {
        let work = Work {
            bytes,
            step: tokens,
            most_parts: match tokens {
                1 => SUMS_PER_THREAD * self.count(),
                _ => self.most_parts(),
            },
            out: places,
        };
        self.share_values(work, |part, places| {
            act(part.start / tokens..part.end / tokens, places);
        });
    }

    /// `out += Σ_i coefficients[i] · matrix[rows[i]]`, rows in ascending order.
    ///
    /// Threads share rows, not columns, as whole rows are read faster than pieces: each part of the rows is summed by
    /// itself, and the partial sums are added in order.
    pub(crate) fn axpy_rows(
        &self,
        matrix: &Matrix<'_>,
        rows: &[u32],
        coefficients: &[f32],
        out: &mut [f32],
    ) {
        let (columns, part_rows) = (out.len(), part_rows(matrix));
        let parts = matrix.rows().div_ceil(part_rows);
        if parts <= 1 || columns == 0 {
            return self.add_rows(matrix, rows, coefficients, 0..columns, out);
        }
        let of_part = |part: usize| of_part(rows, part, part_rows);
        // With more threads than parts, several share one.
        let pieces = self.count().div_ceil(parts);
        let step = match columns.is_multiple_of(BLOCK * pieces) {
            true => columns / pieces,
            false => columns,
        };
        ThreadBuffer(&PARTIAL_SUMS).zeroed(parts * columns, |sums| {
            let work = Work {
                out: &mut *sums,
                bytes: rows.len() * matrix.row_bytes(),
                step,
                most_parts: parts * pieces,
            };
            self.share_values(work, |values, sums| {
                for (start, sum) in values.step_by(step).zip(sums.chunks_mut(step)) {
                    let listed = of_part(start / columns);
                    let first = start % columns;
                    let (rows, coefficients) = (&rows[listed.clone()], &coefficients[listed]);
                    self.add_rows(matrix, rows, coefficients, first..first + sum.len(), sum);
                }
            });
            for (part, sums) in sums.chunks_exact(columns).enumerate() {
                if !of_part(part).is_empty() {
                    add(out, sums);
                }
            }
        });
    }

    /// Arithmetic of sums of rows of `matrix`.
    fn sum_product(&self, matrix: &Matrix<'_>) -> Arithmetic {
        match self.activations {
            ActivationFormat::Int8 if matrix.format().has_nibbles() => Arithmetic::Integer,
            _ => Arithmetic::Float,
        }
    }

    /// `out[c] += Σ_i coefficients[i] · matrix[rows[i], columns.start + c]`, on the calling thread.
    fn add_rows(
        &self,
        matrix: &Matrix<'_>,
        rows: &[u32],
        coefficients: &[f32],
        columns: Range<usize>,
        out: &mut [f32],
    ) {
        let isa = self.isa;
        match self.sum_product(matrix) {
            Arithmetic::Integer => isa.axpy_rows_integer(matrix, rows, coefficients, columns, out),
            Arithmetic::Float => isa.axpy_rows(matrix, rows, coefficients, columns, out),
        }
    }

    /// `out[t] += Σ_i coefficients[t][i] · matrix[rows[t][i]]` for every token t of `out [tokens, columns]`,
    /// bit-identical to [`Self::axpy_rows`]; returns the number of distinct rows.
    pub(crate) fn axpy_rows_batch(
        &self,
        matrix: &Matrix<'_>,
        active: &[Active],
        out: &mut [f32],
    ) -> usize {
        if let [one] = active {
            self.axpy_rows(matrix, &one.rows, &one.coefficients, out);
            return one.rows.len();
        }
        let part_rows = part_rows(matrix);
        let parts = matrix.rows().div_ceil(part_rows);
        let mut needed = 0;
        for part in 0..parts {
            let listed = active.iter().map(|active| {
                let part = of_part(&active.rows, part, part_rows);
                Listed {
                    rows: &active.rows[part.clone()],
                    coefficients: &active.coefficients[part],
                }
            });
            let listed: Vec<Listed<'_>> = listed.collect();
            needed += self.axpy_part_batch(matrix, &listed, parts == 1, out);
        }
        needed
    }

    /// [`Self::axpy_rows_batch`] for one part of the rows, which is summed by itself unless `is_only`.
    fn axpy_part_batch(
        &self,
        matrix: &Matrix<'_>,
        active: &[Listed<'_>],
        is_only: bool,
        out: &mut [f32],
    ) -> usize {
        let (tokens, columns) = (active.len(), matrix.columns());
        let union = union(active, matrix.rows());
        let listed: usize = active.iter().map(|active| active.rows.len()).sum();
        // Where tokens share most rows, all rows are added for every token, with coefficient 0 where a token lacks
        // one.
        let product = self.sum_product(matrix);
        let share = relative_axpy_cost(matrix.format(), tokens, product);
        let is_dense = listed as f64 >= share * (tokens * union.len()) as f64;
        let most = match is_dense {
            // The sums of a stripe stay in the cache: the fewer tokens, the longer the stripe.
            true => STRIPE_COLUMNS * (PREFILL_BATCH / tokens).max(1),
            false => LONG_STRIPE_COLUMNS,
        };
        let stripe_columns = columns
            .div_ceil(self.count())
            .next_multiple_of(STRIPE_COLUMNS)
            .min(most);
        let coefficients = match is_dense {
            true => spread(active, &union),
            false => Vec::new(),
        };
        // Stripes of columns, each `[tokens, columns of the stripe]`.
        let mut stripes = vec![0.0; out.len()];
        let starts = || (0..columns).step_by(stripe_columns);
        if is_only {
            for (start, stripe) in starts().zip(stripes.chunks_mut(stripe_columns * tokens)) {
                let width = stripe.len() / tokens;
                let rows = out
                    .chunks_exact(columns)
                    .zip(stripe.chunks_exact_mut(width));
                rows.for_each(|(out, stripe)| stripe.copy_from_slice(&out[start..start + width]));
            }
        }
        let work = Work {
            out: &mut stripes,
            bytes: listed * matrix.row_bytes(),
            step: stripe_columns * tokens,
            most_parts: self.most_parts(),
        };
        self.share_values(work, |values, out| {
            let starts = (values.start / tokens..).step_by(stripe_columns);
            for (start, stripe) in starts.zip(out.chunks_mut(stripe_columns * tokens)) {
                let width = stripe.len() / tokens;
                let part = start..start + width;
                if is_dense {
                    let isa = self.isa;
                    match product {
                        Arithmetic::Integer => {
                            isa.axpy_rows_batch_integer(
                                matrix,
                                &union,
                                &coefficients,
                                part,
                                stripe,
                            );
                        }
                        Arithmetic::Float => {
                            isa.axpy_rows_batch(matrix, &union, &coefficients, part, stripe);
                        }
                    }
                    continue;
                }
                // Tokens share few rows. Rows of a chunk stay in the cache until every token has added its own.
                let mut left: Vec<usize> = vec![0; tokens];
                let chunk = |row: &u32| *row as usize / CHUNK_ROWS;
                for chunk in union.chunk_by(|a, b| chunk(a) == chunk(b)) {
                    let end = chunk[chunk.len() - 1];
                    let of_tokens = active.iter().zip(&mut left);
                    for ((active, left), out) in of_tokens.zip(stripe.chunks_exact_mut(width)) {
                        let rows = &active.rows[*left..];
                        let count = rows.partition_point(|row| *row <= end);
                        let coefficients = &active.coefficients[*left..][..count];
                        let part = part.clone();
                        self.add_rows(matrix, &rows[..count], coefficients, part, out);
                        *left += count;
                    }
                }
            }
        });
        for (start, stripe) in starts().zip(stripes.chunks(stripe_columns * tokens)) {
            let width = stripe.len() / tokens;
            let rows = out
                .chunks_exact_mut(columns)
                .zip(stripe.chunks_exact(width));
            for ((out, stripe), active) in rows.zip(active) {
                let out = &mut out[start..start + width];
                match is_only {
                    true => out.copy_from_slice(stripe),
                    false if active.rows.is_empty() => {}
                    false => add(out, stripe),
                }
            }
        }
        union.len()
    }

    /// `out[t, r] = matrix[r] · x[t]` for all vectors of `x`.
    pub(crate) fn gemm(&self, matrix: &Matrix<'_>, x: &Input<'_>, out: &mut [f32]) {
        let tokens = x.tokens();
        if tokens == 1 {
            return self.gemv(matrix, x, out);
        }
        if tokens == 0 {
            return;
        }
        let rows = matrix.rows();
        // A GEMM of few tokens takes longer than GEMVs, as dequantising rows costs as much as some products; the rows
        // of a group are in the cache for all tokens but the first.
        let is_dense = x.relative_gemm_cost(matrix) <= 1.0;
        let group_rows = match is_dense {
            true => GEMM_ROWS,
            false => (CACHED_BYTES / (ROW_GROUP * matrix.row_bytes()).max(1)).max(1) * ROW_GROUP,
        };
        // Groups of rows, each `[tokens, rows of the group]`.
        let mut groups = vec![0.0; rows * tokens];
        let work = Work {
            out: &mut groups,
            // A row is used for every token.
            bytes: rows * matrix.row_bytes() * tokens,
            step: group_rows * tokens,
            most_parts: self.most_parts(),
        };
        self.share_values(work, |values, out| {
            let starts = (values.start / tokens..).step_by(group_rows);
            for (start, out) in starts.zip(out.chunks_mut(group_rows * tokens)) {
                let width = out.len() / tokens;
                let group = matrix.rows_range(start..start + width);
                if is_dense {
                    x.gemm(self.isa, &group, out);
                    continue;
                }
                for (token, out) in out.chunks_exact_mut(width).enumerate() {
                    x.vector(token).gemv(self.isa, &group, out);
                }
            }
        });
        let starts = (0..rows).step_by(group_rows);
        for (start, group) in starts.zip(groups.chunks(group_rows * tokens)) {
            let width = group.len() / tokens;
            for (out, group) in out.chunks_exact_mut(rows).zip(group.chunks_exact(width)) {
                out[start..start + width].copy_from_slice(group);
            }
        }
    }
}

/// Rows below `count` that any token lists, in ascending order.
fn union(active: &[Listed<'_>], count: usize) -> Vec<u32> {
    let mut is_listed = vec![false; count];
    for row in active.iter().flat_map(|active| active.rows) {
        is_listed[*row as usize] = true;
    }
    let rows = (0..count as u32).zip(is_listed);
    rows.filter_map(|(row, is_listed)| is_listed.then_some(row))
        .collect()
}

/// Rows of a token in ascending order, and their coefficients.
struct Listed<'a> {
    rows: &'a [u32],
    coefficients: &'a [f32],
}

/// Rows of one part of a sum over rows of `matrix`.
fn part_rows(matrix: &Matrix<'_>) -> usize {
    let rows = matrix.rows().div_ceil(SUM_PARTS).max(1);
    rows.next_multiple_of(CHUNK_ROWS)
}

/// Range of the ascending `rows` that belong to part `part`.
fn of_part(rows: &[u32], part: usize, part_rows: usize) -> Range<usize> {
    let before = |end: usize| rows.partition_point(|row| (*row as usize) < end);
    before(part * part_rows)..before((part + 1) * part_rows)
}

/// Coefficients of all rows of `union` for every token, 0 where a token lacks one: `[tokens, union]`.
fn spread(active: &[Listed<'_>], union: &[u32]) -> Vec<f32> {
    let mut coefficients = vec![0.0; active.len() * union.len()];
    for (active, out) in active
        .iter()
        .zip(coefficients.chunks_exact_mut(union.len().max(1)))
    {
        let mut place = 0;
        for (row, coefficient) in active.rows.iter().zip(active.coefficients) {
            while union[place] != *row {
                place += 1;
            }
            out[place] = *coefficient;
        }
    }
    coefficients
}

/// `sum += x`.
pub(crate) fn add(sum: &mut [f32], x: &[f32]) {
    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::random::Random;
    use powerinfer_tensor::{Format, pack};

    use super::*;
    use crate::input::InputBuffers;

    #[test]
    fn results_have_the_same_bits_on_any_number_of_threads() {
        let mut random = Random::new(1);
        let mut normal = |count: usize| {
            (0..count)
                .map(|_| random.normal() as f32)
                .collect::<Vec<_>>()
        };
        let (rows, columns, tokens) = (1031, 800, 3);
        let matrix = pack(Format::Q8_0, rows, columns, &normal(rows * columns));
        let (matrix, x, coefficients) = (matrix.as_view(), normal(tokens * columns), normal(rows));
        let listed: Vec<u32> = (0..rows as u32).collect();
        let run = |count| {
            let threads = Threads::new(Isa::SCALAR, count).unwrap();
            let mut out = [
                vec![0.0; rows],
                vec![0.0; rows],
                vec![0.0; columns],
                vec![0.0; tokens * rows],
            ];
            let mut buffers = [InputBuffers::default(), InputBuffers::default()];
            let [first, second] = &mut buffers;
            let one = Input::new(&threads, &x[..columns], columns, &matrix, first);
            let many = Input::new(&threads, &x[..], columns, &matrix, second);
            threads.gemv(&matrix, &one, &mut out[0]);
            threads.gemv_rows(&matrix, &listed, &one, &mut out[1]);
            threads.axpy_rows(&matrix, &listed, &coefficients, &mut out[2]);
            threads.gemm(&matrix, &many, &mut out[3]);
            out.concat()
                .into_iter()
                .map(f32::to_bits)
                .collect::<Vec<_>>()
        };
        assert!(
            matrix.rows() * matrix.row_bytes() >= WORTH_SPLITTING,
            "large enough to be shared"
        );
        assert_eq!(run(1), run(2));
        assert_eq!(run(1), run(7));
    }
}
