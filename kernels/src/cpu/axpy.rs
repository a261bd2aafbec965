//! Weighted sums of rows, added to a vector: all columns, or the share of one thread.

use std::ops::Range;

use super::rows::{Row, Weights, with_weights};
use super::{AHEAD, Operation, SPAN, Simd, padded, scalar};
use crate::Matrix;
use crate::format::BLOCK;

/// Rows added per pass over `out`.
const ROWS: usize = 4;

/// `y += alpha * x`.
pub(crate) struct Axpy<'a> {
    pub(crate) alpha: f32,
    pub(crate) x: &'a [f32],
    pub(crate) y: &'a mut [f32],
}

impl Operation for Axpy<'_> {
    type Output = ();

    fn specify(self) {
        scalar::axpy(self.alpha, self.x, self.y);
    }

    #[inline(always)]
    fn translate<S: Simd>(self, simd: S) {
        let row = super::rows::PlainWeights {
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

    fn specify(self) {
        for (&row, &coefficient) in self.rows.iter().zip(self.coefficients) {
            let columns = self.columns.clone();
            scalar::axpy_row(self.matrix, row as usize, coefficient, columns, self.out);
        }
    }

    #[inline(always)]
    fn translate<S: Simd>(self, simd: S) {
        with_weights!(self.matrix, weights => {
            let row = |index: u32| weights.row(index as usize, self.columns.clone());
            let (groups, singles) = self.rows.as_chunks::<ROWS>();
            let (coefficients, single_coefficients) = self.coefficients.as_chunks::<ROWS>();
            let last = groups.len().saturating_sub(1);
            for (index, &coefficients) in coefficients.iter().enumerate() {
                let [a, b, c, d] = groups[index];
                let [e, f, g, h] = groups[last.min(index + AHEAD / ROWS)];
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

/// Adds `R` rows times their coefficients to `out`, in this order for each column; asks for the `next`
/// ones meanwhile.
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
    let mut factors = [[0.0; SPAN]; R];
    for index in 0..R {
        factors[index] = [coefficients[index]; SPAN];
    }
    for (span, out) in blocks.chunks_mut(SPAN).enumerate() {
        let mut rows = rows;
        for index in 0..R {
            next[index].span(span * SPAN, out.len()).prefetch(simd);
            rows[index] = rows[index].span(span * SPAN, out.len());
            if W::SCALED {
                rows[index].scales(simd, &mut factors[index]);
                for factor in &mut factors[index] {
                    *factor *= coefficients[index];
                }
            }
        }
        for (block, out) in out.iter_mut().enumerate() {
            let mut sum = simd.load(out);
            for index in 0..R {
                let numbers = rows[index].numbers(simd, block);
                sum = simd.multiply_add(simd.splat(factors[index][block]), numbers, sum);
            }
            simd.store(sum, out);
        }
    }
    if !out_rest.is_empty() {
        let mut block = padded(out_rest);
        let mut sum = simd.load(&block);
        for index in 0..R {
            let (numbers, scale) = rows[index].rest(simd, whole);
            sum = simd.multiply_add(simd.splat(coefficients[index] * scale), numbers, sum);
        }
        simd.store(sum, &mut block);
        out_rest.copy_from_slice(&block[..out_rest.len()]);
    }
}
