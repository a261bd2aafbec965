//! Sums of rows on several threads: the `down` projection, for one token and for several.

use std::{cell::Cell, ops::Range};

use crate::memory::PREFILL_BATCH;
use powerinfer_kernels::{AXPY_GROUP_ROWS, Arithmetic, relative_axpy_cost};
use powerinfer_tensor::{BLOCK, Matrix};

use super::{Threads, Work, add};
use crate::{ActivationFormat, ffn::Active, scratch::ThreadBuffer};

/// Parts into which rows of a sum are divided whatever the number of threads, so that the order of additions is
/// fixed.
const SUM_PARTS: usize = 8;
/// Columns that a thread takes of a sum over many tokens, or a multiple.
const STRIPE_COLUMNS: usize = 512;
/// Columns that a thread takes at most where tokens are processed one by one: rows are read a quarter faster in long
/// pieces.
const LONG_STRIPE_COLUMNS: usize = 2048;
/// Columns that a thread takes at least where rows are read once.
const LEAST_STRIPE_COLUMNS: usize = 1024;
/// Rows of a stripe that stay in the second-level cache: whole groups whose coefficients are rounded together.
const CHUNK_ROWS: usize = 2 * AXPY_GROUP_ROWS;

thread_local! {
    /// Partial sums of [`Threads::axpy_rows`], `[parts, columns]`.
    static PARTIAL_SUMS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

impl Threads {
    /// `out += Σ_i coefficients[i] · matrix[rows[i]]`, rows in ascending order.
    ///
    /// Each part of the rows is summed by itself, and the partial sums are added in order. Few threads share the columns of
    /// integer sums, so that no sums pass from one to the other; others share parts, as whole rows are read faster.
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
            return self.add_rows(matrix, rows, coefficients, &[], 0..columns, out);
        }
        let of_part = |part: usize| of_part(rows, part, part_rows);
        let stripe = columns
            .div_ceil(self.count())
            .next_multiple_of(STRIPE_COLUMNS);
        // Sums of floats and of most rows are bound by memory, which reads whole rows faster.
        let by_columns = self.sum_product(matrix) == Arithmetic::Integer
            && stripe >= LEAST_STRIPE_COLUMNS
            && rows.len() < matrix.rows() / 2;
        if self.count() == 1 || by_columns {
            let work = Work {
                out,
                bytes: rows.len() * matrix.row_bytes(),
                step: stripe,
                most_parts: self.count(),
            };
            return self.share_values(work, |values, out| {
                for listed in (0..parts).map(of_part).filter(|listed| !listed.is_empty()) {
                    ThreadBuffer(&PARTIAL_SUMS).zeroed(out.len(), |sum| {
                        let next = &rows[listed.end..];
                        let (rows, coefficients) = (&rows[listed.clone()], &coefficients[listed]);
                        self.add_rows(matrix, rows, coefficients, next, values.clone(), sum);
                        add(out, sum);
                    });
                }
            });
        }
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
                    self.add_rows(
                        matrix,
                        rows,
                        coefficients,
                        &[],
                        first..first + sum.len(),
                        sum,
                    );
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

    /// `out[c] += Σ_i coefficients[i] · matrix[rows[i], columns.start + c]`, on the calling thread, which reads the rows
    /// `next` afterwards.
    fn add_rows(
        &self,
        matrix: &Matrix<'_>,
        rows: &[u32],
        coefficients: &[f32],
        next: &[u32],
        columns: Range<usize>,
        out: &mut [f32],
    ) {
        let isa = self.isa;
        match self.sum_product(matrix) {
            Arithmetic::Integer => {
                isa.axpy_rows_integer(matrix, rows, coefficients, next, columns, out);
            }
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
                        self.add_rows(matrix, &rows[..count], coefficients, &[], part, out);
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
