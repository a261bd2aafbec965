//! Products of rows with one vector: all rows, or the listed ones.

use super::rows::{Row, Weights, with_weights};
use super::{Operation, SPAN, Simd, padded, scalar};
use crate::Matrix;
use crate::format::BLOCK;

/// `a · b`.
pub(crate) struct Dot<'a> {
    pub(crate) a: &'a [f32],
    pub(crate) b: &'a [f32],
}

impl Operation for Dot<'_> {
    type Output = f32;

    fn specify(self) -> f32 {
        scalar::dot(self.a, self.b)
    }

    #[inline(always)]
    fn translate<S: Simd>(self, simd: S) -> f32 {
        let row = super::rows::PlainWeights {
            values: self.a,
            columns: self.a.len(),
        };
        let [sum] = dots(simd, [row.row(0, 0..self.a.len())], self.b);
        sum
    }
}

/// `out[i] = matrix[rows[i]] · x`, where no list of rows means all rows.
pub(crate) struct Gemv<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) rows: Option<&'a [u32]>,
    pub(crate) x: &'a [f32],
    pub(crate) out: &'a mut [f32],
}

impl Gemv<'_> {
    /// The row that output `index` is the product of.
    #[inline(always)]
    fn row(rows: Option<&[u32]>, index: usize) -> usize {
        rows.map_or(index, |rows| rows[index] as usize)
    }
}

impl Operation for Gemv<'_> {
    type Output = ();

    fn specify(self) {
        for (index, out) in self.out.iter_mut().enumerate() {
            *out = scalar::dot_row(self.matrix, Self::row(self.rows, index), self.x);
        }
    }

    #[inline(always)]
    fn translate<S: Simd>(self, simd: S) {
        let row = |index| Self::row(self.rows, index);
        with_weights!(self.matrix, weights => match S::DOT_ROWS {
            4 => products::<S, _, 4>(simd, weights, row, self.x, self.out),
            _ => products::<S, _, 2>(simd, weights, row, self.x, self.out),
        });
    }
}

/// One product per entry of `out`, with the row that `row` names, `R` rows at a time.
#[inline(always)]
fn products<S: Simd, W: Weights, const R: usize>(
    simd: S,
    weights: W,
    row: impl Fn(usize) -> usize,
    x: &[f32],
    out: &mut [f32],
) {
    let (groups, singles) = out.as_chunks_mut::<R>();
    let first_single = groups.len() * R;
    for (group, out) in groups.iter_mut().enumerate() {
        let mut rows = [weights.row(row(group * R), 0..x.len()); R];
        for (index, entry) in rows.iter_mut().enumerate().skip(1) {
            *entry = weights.row(row(group * R + index), 0..x.len());
        }
        *out = dots(simd, rows, x);
    }
    for (index, out) in singles.iter_mut().enumerate() {
        [*out] = dots(
            simd,
            [weights.row(row(first_single + index), 0..x.len())],
            x,
        );
    }
}

/// The products of `R` rows with `x`, each summed as in the specification.
#[inline(always)]
fn dots<S: Simd, W: Row, const R: usize>(simd: S, rows: [W; R], x: &[f32]) -> [f32; R] {
    let (blocks, x_rest) = x.as_chunks::<BLOCK>();
    let mut sums = [simd.splat(0.0); R];
    let mut scales = [[1.0; SPAN]; R];
    for (span, x) in blocks.chunks(SPAN).enumerate() {
        let mut rows = rows;
        for (row, scales) in rows.iter_mut().zip(&mut scales) {
            *row = row.span(span * SPAN, x.len());
            row.scales(simd, scales);
        }
        for (block, x) in x.iter().enumerate() {
            let x = simd.load(x);
            for index in 0..R {
                let weights = rows[index].weights(simd, block, scales[index][block]);
                sums[index] = simd.multiply_add(weights, x, sums[index]);
            }
        }
    }
    if !x_rest.is_empty() {
        let x = simd.load(&padded(x_rest));
        for index in 0..R {
            let (numbers, scale) = rows[index].rest(simd, blocks.len());
            let weights = simd.multiply(numbers, simd.splat(scale));
            sums[index] = simd.multiply_add(weights, x, sums[index]);
        }
    }
    let mut out = [0.0; R];
    for index in 0..R {
        out[index] = simd.sum(sums[index]);
    }
    out
}
