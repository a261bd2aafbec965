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
/// Columns that a thread takes at most if tokens are processed one by one: rows are read a quarter faster in long
/// pieces.
const LONG_STRIPE_COLUMNS: usize = 2048;
/// Columns that a thread takes at least if rows are read once.
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
    /// Each part of the rows is summed separately, and the partial sums are added in order. Few threads share the columns of
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
        let of_part = |part: usize| listed_in(rows, &(part * part_rows..(part + 1) * part_rows));
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
        let step = if columns.is_multiple_of(BLOCK * pieces) {
            columns / pieces
        } else {
            columns
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
        let (product, part_rows) = (self.sum_product(matrix), part_rows(matrix));
        let starts = (0..matrix.rows()).step_by(part_rows);
        let parts =
            starts.map(|start| Part::new(active, start..matrix.rows().min(start + part_rows)));
        let mut parts: Vec<Part<'_>> = parts.collect();
        let listed: usize = parts.iter().map(|part| part.listed).sum();
        self.by_chunks(&mut parts, 1, listed * size_of::<f32>(), |_, parts| {
            parts[0].prepare(matrix, product);
        });
        let is_only = parts.len() == 1;
        parts.retain(|part| part.listed > 0);
        for parts in parts.chunk_by(|a, b| a.is_dense == b.is_dense) {
            self.add_parts(matrix, parts, is_only, out);
        }
        parts.iter().map(|part| part.union.len()).sum()
    }

    /// Adds the sums of `parts`, which are all dense or none, to `out [tokens, columns]`; each part is summed separately
    /// unless it `is_only`.
    fn add_parts(&self, matrix: &Matrix<'_>, parts: &[Part<'_>], is_only: bool, out: &mut [f32]) {
        let columns = matrix.columns();
        let tokens = out.len() / columns.max(1);
        let most = match parts[0].is_dense {
            // The sums of a stripe stay in the cache: the fewer tokens, the longer the stripe.
            true => STRIPE_COLUMNS * (PREFILL_BATCH / tokens).max(1),
            false => LONG_STRIPE_COLUMNS,
        };
        let stripe_columns = columns
            .div_ceil(self.count())
            .next_multiple_of(STRIPE_COLUMNS)
            .min(most);
        let listed: usize = parts.iter().map(|part| part.listed).sum();
        // Stripes of columns, each `[tokens, columns of the stripe]`.
        let mut stripes = vec![0.0; out.len()];
        let work = Work {
            out: &mut stripes,
            bytes: listed * matrix.row_bytes(),
            step: stripe_columns * tokens,
            most_parts: self.most_parts(),
        };
        let before = &*out;
        self.share_values(work, |values, stripes| {
            let starts = (values.start / tokens..).step_by(stripe_columns);
            for (start, stripe) in starts.zip(stripes.chunks_mut(stripe_columns * tokens)) {
                let width = stripe.len() / tokens;
                let before = before.chunks_exact(columns);
                for (stripe, before) in stripe.chunks_exact_mut(width).zip(before) {
                    stripe.copy_from_slice(&before[start..start + width]);
                }
                if is_only {
                    self.add_part(matrix, &parts[0], start..start + width, stripe);
                    continue;
                }
                ThreadBuffer(&PARTIAL_SUMS).zeroed(stripe.len(), |sums| {
                    for part in parts {
                        sums.fill(0.0);
                        self.add_part(matrix, part, start..start + width, sums);
                        let tokens = stripe.chunks_exact_mut(width).zip(sums.chunks_exact(width));
                        for ((stripe, sum), listed) in tokens.zip(&part.tokens) {
                            if !listed.rows.is_empty() {
                                add(stripe, sum);
                            }
                        }
                    }
                });
            }
        });
        let bytes = size_of_val(out);
        self.by_chunks(out, columns, bytes, |token, out| {
            for start in (0..columns).step_by(stripe_columns) {
                let width = stripe_columns.min(columns - start);
                let stripe = &stripes[start * tokens + token * width..][..width];
                out[start..start + width].copy_from_slice(stripe);
            }
        });
    }

    /// Adds the sums of `part` over `columns` to `out [tokens, columns]`, on the calling thread.
    fn add_part(
        &self,
        matrix: &Matrix<'_>,
        part: &Part<'_>,
        columns: Range<usize>,
        out: &mut [f32],
    ) {
        let (isa, rows, coefficients) = (self.isa, &part.union, &part.coefficients);
        match self.sum_product(matrix) {
            Arithmetic::Integer if part.is_dense => {
                return isa.axpy_rows_batch_integer(matrix, rows, coefficients, columns, out);
            }
            Arithmetic::Float if part.is_dense => {
                return isa.axpy_rows_batch(matrix, rows, coefficients, columns, out);
            }
            _ => {}
        }
        // Tokens share few rows. Rows of a chunk stay in the cache until every token has added its own.
        let mut left: Vec<usize> = vec![0; part.tokens.len()];
        let chunk = |row: &u32| *row as usize / CHUNK_ROWS;
        for chunk in part.union.chunk_by(|a, b| chunk(a) == chunk(b)) {
            let end = chunk[chunk.len() - 1];
            let tokens = part.tokens.iter().zip(&mut left);
            for ((listed, left), out) in tokens.zip(out.chunks_exact_mut(columns.len())) {
                let rows = &listed.rows[*left..];
                let count = rows.partition_point(|row| *row <= end);
                let coefficients = &listed.coefficients[*left..][..count];
                self.add_rows(
                    matrix,
                    &rows[..count],
                    coefficients,
                    &[],
                    columns.clone(),
                    out,
                );
                *left += count;
            }
        }
    }
}

/// Rows of a token in ascending order, and their coefficients.
struct Listed<'a> {
    rows: &'a [u32],
    coefficients: &'a [f32],
}

/// A part of the rows of a sum for several tokens.
struct Part<'a> {
    rows: Range<usize>,
    tokens: Vec<Listed<'a>>,
    /// Rows of all tokens.
    listed: usize,
    /// Rows that any token lists, in ascending order.
    union: Vec<u32>,
    /// Whether all rows of the union are added for every token, as tokens share most of them.
    is_dense: bool,
    /// If it is dense, the coefficients `[tokens, union]`, 0 if a token lacks a row.
    coefficients: Vec<f32>,
}

impl<'a> Part<'a> {
    fn new(active: &'a [Active], rows: Range<usize>) -> Self {
        let tokens = active.iter().map(|active| {
            let part = listed_in(&active.rows, &rows);
            Listed {
                rows: &active.rows[part.clone()],
                coefficients: &active.coefficients[part],
            }
        });
        let tokens: Vec<Listed<'_>> = tokens.collect();
        Self {
            listed: tokens.iter().map(|listed| listed.rows.len()).sum(),
            rows,
            tokens,
            union: Vec::new(),
            is_dense: false,
            coefficients: Vec::new(),
        }
    }

    /// Sets the union, and if that is `dense` the coefficients.
    fn prepare(&mut self, matrix: &Matrix<'_>, product: Arithmetic) {
        let (first, count) = (self.rows.start, self.rows.len());
        let mut is_listed = vec![false; count];
        let mut missing = count;
        for listed in &self.tokens {
            for row in listed.rows {
                let is_listed = &mut is_listed[*row as usize - first];
                missing -= usize::from(!*is_listed);
                *is_listed = true;
            }
            if missing == 0 {
                break;
            }
        }
        let rows = (first as u32..).zip(&is_listed);
        self.union
            .extend(rows.filter_map(|(row, is_listed)| is_listed.then_some(row)));
        let (tokens, union) = (self.tokens.len(), &self.union);
        let share = relative_axpy_cost(matrix.format(), tokens, product);
        self.is_dense = self.listed as f64 >= share * (tokens * union.len()) as f64;
        if !self.is_dense || union.is_empty() {
            return;
        }
        self.coefficients.resize(tokens * union.len(), 0.0);
        let coefficients = self.coefficients.chunks_exact_mut(union.len());
        for (listed, out) in self.tokens.iter().zip(coefficients) {
            let mut place = 0;
            for (row, coefficient) in listed.rows.iter().zip(listed.coefficients) {
                match missing {
                    0 => place = *row as usize - first,
                    _ => {
                        place += union[place..]
                            .iter()
                            .take_while(|other| *other < row)
                            .count()
                    }
                }
                out[place] = *coefficient;
            }
        }
    }
}

/// Rows of one part of a sum over rows of `matrix`.
fn part_rows(matrix: &Matrix<'_>) -> usize {
    let rows = matrix.rows().div_ceil(SUM_PARTS).max(1);
    rows.next_multiple_of(CHUNK_ROWS)
}

/// Range of those of the ascending `rows` that are in `part`.
fn listed_in(rows: &[u32], part: &Range<usize>) -> Range<usize> {
    let before = |end: usize| rows.partition_point(|row| (*row as usize) < end);
    before(part.start)..before(part.end)
}
