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
        let [product] = dot(simd, row, None, [self.b]);
        product
    }
}

/// `out[t, i] = matrix[rows[i]] · x[t]`, with `out` `[tokens, rows]`; without a list, all rows.
pub(crate) struct Gemv<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) rows: Option<&'a [u32]>,
    /// `[tokens, columns]`.
    pub(crate) x: &'a [f32],
    pub(crate) tokens: usize,
    pub(crate) out: &'a mut [f32],
}

impl Operation for Gemv<'_> {
    type Output = ();

    fn run_scalar(self) {
        let (columns, outputs) = (self.matrix.columns(), self.out.len() / self.tokens);
        for (index, out) in self.out.iter_mut().enumerate() {
            let (token, index) = (index / outputs, index % outputs);
            let x = &self.x[token * columns..][..columns];
            *out = scalar::dot_row(self.matrix, row_of(self.rows, index), x);
        }
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        let Self { x, tokens, out, .. } = self;
        let (columns, outputs) = (self.matrix.columns(), out.len() / tokens);
        let row = |index| row_of(self.rows, index);
        let last = outputs.saturating_sub(1);
        let tile = if S::TILE_ROWS == 6 { 4 } else { 2 };
        // One row at a time: several rows in parallel would share the loads of `x`, but each is a memory stream that the
        // hardware prefetcher has to detect. It follows consecutive rows by itself; listed rows are prefetched.
        with_weights!(self.matrix, weights => for index in 0..outputs {
            let (own, ahead) = (row(index), row(last.min(index + PREFETCH_ROWS)));
            let own = weights.row(own, 0..columns);
            let is_stream = ahead == row(index) + PREFETCH_ROWS;
            let mut next = (!is_stream).then(|| weights.row(ahead, 0..columns));
            if tokens == 1 {
                // Apart, since short rows take less time than the choice of a tile.
                [out[index]] = dot(simd, own, next, [x]);
                continue;
            }
            // A row is dequantised once for all vectors of a tile.
            for first in (0..tokens).step_by(tile) {
                let (x, out) = (&x[first * columns..], &mut out[first * outputs + index..]);
                match tile.min(tokens - first) {
                    1 => store(dot(simd, own, next, vectors::<_, 1>(x, columns)), out, outputs),
                    2 => store(dot(simd, own, next, vectors::<_, 2>(x, columns)), out, outputs),
                    3 => store(dot(simd, own, next, vectors::<_, 3>(x, columns)), out, outputs),
                    _ => store(dot(simd, own, next, vectors::<_, 4>(x, columns)), out, outputs),
                }
                next = None;
            }
        });
    }
}

/// Row of output `index`.
#[inline(always)]
pub(super) fn row_of(rows: Option<&[u32]>, index: usize) -> usize {
    rows.map_or(index, |rows| rows[index] as usize)
}

/// The first `T` vectors of `x`, `length` values each.
#[inline(always)]
pub(super) fn vectors<V, const T: usize>(x: &[V], length: usize) -> [&[V]; T] {
    let mut vectors = [x; T];
    for (token, vector) in vectors.iter_mut().enumerate() {
        *vector = &x[token * length..][..length];
    }
    vectors
}

/// Stores the products of a row, one every `outputs` values.
#[inline(always)]
pub(super) fn store<const T: usize>(products: [f32; T], out: &mut [f32], outputs: usize) {
    for (token, product) in products.into_iter().enumerate() {
        out[token * outputs] = product;
    }
}

/// Dot products of a row with each vector, in the order of the scalar specification; prefetches the row `next`.
#[inline(always)]
fn dot<S: Simd, W: Row, const T: usize>(
    simd: S,
    row: W,
    next: Option<W>,
    x: [&[f32]; T],
) -> [f32; T] {
    let mut blocks = [[].as_slice(); T];
    let mut rests = [[].as_slice(); T];
    for token in 0..T {
        (blocks[token], rests[token]) = x[token].as_chunks::<BLOCK>();
    }
    let whole = blocks[0].len();
    let mut sums = [simd.splat(0.0); T];
    let mut scales = Scales::ONES;
    for first in (0..whole).step_by(SPAN) {
        let count = SPAN.min(whole - first);
        if let Some(next) = next {
            next.span(first, count).prefetch(simd);
        }
        let row = row.span(first, count);
        row.scales(simd, &mut scales);
        let mut of_span = blocks;
        for blocks in &mut of_span {
            *blocks = &blocks[first..first + count];
        }
        sums = row.multiply_add(simd, of_span, &scales, sums);
    }
    if !rests[0].is_empty() {
        let weights = row.rest(simd, whole);
        for (sum, rest) in sums.iter_mut().zip(rests) {
            *sum = simd.multiply_add(weights, simd.load(&padded(rest)), *sum);
        }
    }
    let mut products = [0.0; T];
    for (product, sum) in products.iter_mut().zip(sums) {
        *product = simd.sum(sum);
    }
    products
}
