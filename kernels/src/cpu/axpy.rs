//! `y += Σ a_i · row_i` over listed rows (axpy per row), for one token or a batch, over a range of columns.

use std::ops::Range;

use super::rows::{Row, Scales, Weights, with_weights};
use super::{Operation, PREFETCH_ROWS, SPAN, Simd, padded, scalar};
use powerinfer_tensor::BLOCK;
use powerinfer_tensor::Matrix;

/// Rows per pass over `out`.
const ROWS: usize = 4;

/// `y += alpha * x`.
pub(crate) struct Axpy<'a> {
    pub(crate) alpha: f32,
    pub(crate) x: &'a [f32],
    pub(crate) y: &'a mut [f32],
}

impl Operation for Axpy<'_> {
    type Output = ();

    fn run_scalar(self) {
        scalar::axpy(self.alpha, self.x, self.y);
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        let row = super::rows::FloatWeights {
            values: self.x,
            columns: self.x.len(),
        };
        let row = row.row(0, 0..self.x.len());
        add_rows(simd, [row], [row], [self.alpha], self.y);
    }
}

/// `out[c] += Σ_i coefficients[i] * matrix[rows[i], columns.start + c]`.
pub(crate) struct AxpyRows<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) rows: &'a [u32],
    pub(crate) coefficients: &'a [f32],
    pub(crate) columns: Range<usize>,
    pub(crate) out: &'a mut [f32],
}

impl Operation for AxpyRows<'_> {
    type Output = ();

    fn run_scalar(self) {
        for (&row, &coefficient) in self.rows.iter().zip(self.coefficients) {
            let columns = self.columns.clone();
            scalar::axpy_row(self.matrix, row as usize, coefficient, columns, self.out);
        }
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        with_weights!(self.matrix, weights => {
            let row = |index: u32| weights.row(index as usize, self.columns.clone());
            if !self.matrix.format().is_quantised() {
                // Float formats need little arithmetic: one row at a time is a single memory stream.
                let last = self.rows.len().saturating_sub(1);
                for (index, (&own, &coefficient)) in self.rows.iter().zip(self.coefficients).enumerate() {
                    let next = row(self.rows[last.min(index + PREFETCH_ROWS / 2)]);
                    add_rows(simd, [row(own)], [next], [coefficient], self.out);
                }
                return;
            }
            let (groups, singles) = self.rows.as_chunks::<ROWS>();
            let (coefficients, single_coefficients) = self.coefficients.as_chunks::<ROWS>();
            let last = groups.len().saturating_sub(1);
            for (index, &coefficients) in coefficients.iter().enumerate() {
                let [a, b, c, d] = groups[index];
                let [e, f, g, h] = groups[last.min(index + PREFETCH_ROWS / ROWS)];
                let rows = [row(a), row(b), row(c), row(d)];
                let next = [row(e), row(f), row(g), row(h)];
                add_rows(simd, rows, next, coefficients, self.out);
            }
            for (&single, &coefficient) in singles.iter().zip(single_coefficients) {
                let row = row(single);
                add_rows(simd, [row], [row], [coefficient], self.out);
            }
        });
    }
}

/// Adds `R` rows times their coefficients to `out`, row by row in each column; prefetches the `next` rows.
#[inline(always)]
fn add_rows<S: Simd, W: Row, const R: usize>(
    simd: S,
    rows: [W; R],
    next: [W; R],
    coefficients: [f32; R],
    out: &mut [f32],
) {
    let (blocks, out_rest) = out.as_chunks_mut::<BLOCK>();
    let whole = blocks.len();
    let mut factors = [simd.splat(0.0); R];
    for index in 0..R {
        factors[index] = simd.splat(coefficients[index]);
    }
    let mut scales = [Scales::ONES; R];
    for (span, out) in blocks.chunks_mut(SPAN).enumerate() {
        let mut rows = rows;
        for index in 0..R {
            next[index].span(span * SPAN, out.len()).prefetch(simd);
            rows[index] = rows[index].span(span * SPAN, out.len());
            rows[index].scales(simd, &mut scales[index]);
        }
        for (block, out) in out.iter_mut().enumerate() {
            let mut sum = simd.load(out);
            for index in 0..R {
                let weights = rows[index].weights(simd, block, &scales[index]);
                sum = simd.multiply_add(factors[index], weights, sum);
            }
            simd.store(sum, out);
        }
    }
    if !out_rest.is_empty() {
        let mut block = padded(out_rest);
        let mut sum = simd.load(&block);
        for index in 0..R {
            let weights = rows[index].rest(simd, whole);
            sum = simd.multiply_add(factors[index], weights, sum);
        }
        simd.store(sum, &mut block);
        out_rest.copy_from_slice(&block[..out_rest.len()]);
    }
}

/// `out[t, c] += Σ_i coefficients[t, i] * matrix[rows[i], columns.start + c]`.
pub(crate) struct AxpyRowsBatch<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) rows: &'a [u32],
    /// `[tokens, rows]`.
    pub(crate) coefficients: &'a [f32],
    pub(crate) columns: Range<usize>,
    /// `[tokens, columns]`.
    pub(crate) out: &'a mut [f32],
}

/// Rows per panel of dequantised weights.
const PANEL_ROWS: usize = 32;
/// Columns per panel; the panel fits into L1.
const PANEL_COLUMNS: usize = 4 * BLOCK;
/// Registers of a row per tile of tokens.
const TILE_REGISTERS: usize = 4;

impl Operation for AxpyRowsBatch<'_> {
    type Output = ();

    fn run_scalar(self) {
        let tokens = self.coefficients.chunks_exact(self.rows.len().max(1));
        for (coefficients, out) in tokens.zip(self.out.chunks_exact_mut(self.columns.len().max(1)))
        {
            AxpyRows {
                matrix: self.matrix,
                rows: self.rows,
                coefficients,
                columns: self.columns.clone(),
                out,
            }
            .run_scalar();
        }
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        match S::TILE_ROWS {
            6 => axpy_tokens::<S, 6>(simd, self),
            _ => axpy_tokens::<S, 3>(simd, self),
        }
    }
}

/// Batched axpy; `T` tokens share each load of the panel.
///
/// ```text
/// for 128 columns, for 32 rows:           panel   [row, column]
///   for T tokens, for four registers:     tile    [token, register]
/// ```
#[inline(always)]
fn axpy_tokens<S: Simd, const T: usize>(simd: S, sum: AxpyRowsBatch<'_>) {
    let AxpyRowsBatch {
        matrix,
        rows,
        coefficients,
        columns,
        out,
    } = sum;
    let (width, count) = (columns.len(), rows.len());
    if width == 0 || count == 0 {
        return;
    }
    let tokens = out.len() / width;
    let mut panel = [[[0.0f32; BLOCK]; PANEL_COLUMNS / BLOCK]; PANEL_ROWS];
    // Sums of the panel's columns, with the tokens padded to whole tiles.
    let mut sums = vec![[[0.0f32; BLOCK]; PANEL_COLUMNS / BLOCK]; tokens.next_multiple_of(T)];
    for first in (0..width).step_by(PANEL_COLUMNS) {
        let part = first..width.min(first + PANEL_COLUMNS);
        let lengths = 0..part.len();
        for (sums, out) in sums.iter_mut().zip(out.chunks_exact(width)) {
            sums.as_flattened_mut()[lengths.clone()].copy_from_slice(&out[part.clone()]);
        }
        let of_matrix = columns.start + part.start..columns.start + part.end;
        let of_next = of_matrix.end..columns.end.min(of_matrix.end + PANEL_COLUMNS);
        for start in (0..count).step_by(PANEL_ROWS) {
            let of_panel = start..count.min(start + PANEL_ROWS);
            with_weights!(matrix, weights => for (index, panel) in of_panel.clone().zip(&mut panel) {
                let row = |index: usize, part| weights.row(rows[index] as usize, part);
                dequantise(simd, row(index, of_matrix.clone()), part.len(), panel);
                // Prefetch the next panel.
                let next = index + PANEL_ROWS;
                if next < count {
                    row(next, of_matrix.clone()).prefetch(simd);
                } else if of_next.end > of_next.start {
                    row(next % PANEL_ROWS % count, of_next.clone()).prefetch(simd);
                }
            });
            for (tile, sums) in sums.chunks_exact_mut(T).enumerate() {
                let mut factors = [[].as_slice(); T];
                for (index, factors) in factors.iter_mut().enumerate() {
                    // A partial tile repeats its last token; those sums are discarded.
                    let token = (tile * T + index).min(tokens - 1);
                    *factors = &coefficients[token * count..][of_panel.clone()];
                }
                add_panel::<S, T>(simd, &panel[..of_panel.len()], factors, sums);
            }
        }
        for (sums, out) in sums.iter().zip(out.chunks_exact_mut(width)) {
            out[part.clone()].copy_from_slice(&sums.as_flattened()[lengths.clone()]);
        }
    }
}

/// Dequantises the columns of a panel of one row.
#[inline(always)]
fn dequantise<S: Simd, W: Row>(
    simd: S,
    row: W,
    columns: usize,
    out: &mut [[f32; BLOCK]; PANEL_COLUMNS / BLOCK],
) {
    let whole = columns / BLOCK;
    let mut scales = Scales::ONES;
    row.scales(simd, &mut scales);
    for (block, out) in out[..whole].iter_mut().enumerate() {
        simd.store(row.weights(simd, block, &scales), out);
    }
    if !columns.is_multiple_of(BLOCK) {
        simd.store(row.rest(simd, whole), &mut out[whole]);
    }
}

/// Adds the panel's rows times `factors`, one per row and token, to the sums of `T` tokens.
#[inline(always)]
fn add_panel<S: Simd, const T: usize>(
    simd: S,
    panel: &[[[f32; BLOCK]; PANEL_COLUMNS / BLOCK]],
    mut factors: [&[f32]; T],
    sums: &mut [[[f32; BLOCK]; PANEL_COLUMNS / BLOCK]],
) {
    // Slices of one length, so that bounds checks are eliminated.
    for factors in &mut factors {
        *factors = &factors[..panel.len()];
    }
    let step = TILE_REGISTERS * S::LANES;
    for start in (0..PANEL_COLUMNS).step_by(step) {
        let mut tile = [[simd.load_vector(&[0.0; BLOCK]); TILE_REGISTERS]; T];
        for token in 0..T {
            let sums = &sums[token].as_flattened()[start..start + step];
            for register in 0..TILE_REGISTERS {
                tile[token][register] = simd.load_vector(&sums[register * S::LANES..]);
            }
        }
        for index in 0..panel.len() {
            let row = &panel[index].as_flattened()[start..start + step];
            // One register of weights at a time: with four, a tile of 12 sums does not fit into 16 registers.
            let mut row_factors = [simd.splat_vector(0.0); T];
            for token in 0..T {
                row_factors[token] = simd.splat_vector(factors[token][index]);
            }
            for register in 0..TILE_REGISTERS {
                let weights = simd.load_vector(&row[register * S::LANES..]);
                for token in 0..T {
                    let sum = tile[token][register];
                    tile[token][register] =
                        simd.multiply_add_vector(row_factors[token], weights, sum);
                }
            }
        }
        for token in 0..T {
            let sums = &mut sums[token].as_flattened_mut()[start..start + step];
            for register in 0..TILE_REGISTERS {
                simd.store_vector(tile[token][register], &mut sums[register * S::LANES..]);
            }
        }
    }
}
