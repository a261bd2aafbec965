//! GEMV over all rows or listed ones, and dot products.

use super::rows::{Row, Scales, Weights, with_weights};
use super::{Operation, PREFETCH_ROWS, SPAN, Simd, padded, scalar};
use powerinfer_tensor::BLOCK;
use powerinfer_tensor::Matrix;

/// `a · b`.
pub(crate) struct Dot<'a> {
    pub(crate) a: &'a [f32],
    pub(crate) b: &'a [f32],
}

impl Operation for Dot<'_> {
    type Output = f32;

    fn run_scalar(self) -> f32 {
        scalar::dot(self.a, self.b)
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) -> f32 {
        let row = super::rows::FloatWeights {
            values: self.a,
            columns: self.a.len(),
        };
        let row = row.row(0, 0..self.a.len());
        dot(simd, row, None, self.b)
    }
}

/// `out[i] = matrix[rows[i]] · x`; without a list, all rows.
pub(crate) struct Gemv<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) rows: Option<&'a [u32]>,
    pub(crate) x: &'a [f32],
    pub(crate) out: &'a mut [f32],
}

impl Gemv<'_> {
    /// Row of output `index`.
    #[inline(always)]
    fn row(rows: Option<&[u32]>, index: usize) -> usize {
        rows.map_or(index, |rows| rows[index] as usize)
    }
}

impl Operation for Gemv<'_> {
    type Output = ();

    fn run_scalar(self) {
        for (index, out) in self.out.iter_mut().enumerate() {
            *out = scalar::dot_row(self.matrix, Self::row(self.rows, index), self.x);
        }
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        let row = |index| Self::row(self.rows, index);
        let columns = 0..self.x.len();
        let last = self.out.len().saturating_sub(1);
        // One row at a time: several rows in parallel would share the loads of `x`, but each is a memory stream that the
        // hardware prefetcher has to detect. It follows consecutive rows by itself; listed rows are prefetched.
        with_weights!(self.matrix, weights => for (index, out) in self.out.iter_mut().enumerate() {
            let (own, ahead) = (row(index), row(last.min(index + PREFETCH_ROWS)));
            let next = (ahead != own + PREFETCH_ROWS).then(|| weights.row(ahead, columns.clone()));
            *out = dot(simd, weights.row(own, columns.clone()), next, self.x);
        });
    }
}

/// Dot product of a row with `x`, in the order of the scalar specification; prefetches the row `next`.
#[inline(always)]
fn dot<S: Simd, W: Row>(simd: S, row: W, next: Option<W>, x: &[f32]) -> f32 {
    let (blocks, x_rest) = x.as_chunks::<BLOCK>();
    let mut sum = simd.splat(0.0);
    let mut scales = Scales::ONES;
    for (span, x) in blocks.chunks(SPAN).enumerate() {
        if let Some(next) = next {
            next.span(span * SPAN, x.len()).prefetch(simd);
        }
        let row = row.span(span * SPAN, x.len());
        row.scales(simd, &mut scales);
        sum = row.multiply_add(simd, x, &scales, sum);
    }
    if !x_rest.is_empty() {
        let weights = row.rest(simd, blocks.len());
        sum = simd.multiply_add(weights, simd.load(&padded(x_rest)), sum);
    }
    simd.sum(sum)
}
