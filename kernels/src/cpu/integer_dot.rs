//! Products of quantised rows with int8 vectors, row by row: integer dot products per block, scaled in float.

use half::f16;

use super::dot::{row_of, store};
use super::rows::{KRow, KWeights, Row};
use super::{Operation, PREFETCH_ROWS, SPAN, Simd, scalar};
use crate::activations::{ActivationSpan, Vectors};
use powerinfer_tensor::BLOCK;
use powerinfer_tensor::{Matrix, MatrixData};

/// Rows that are multiplied with up to four vectors before the next four, so that they stay in L1.
const NEAR_ROWS: usize = 16;

/// `out[t, i] = matrix[rows[i]] · x[t]`, with `out` `[tokens, rows]`; without a list, all rows.
pub(crate) struct IntegerGemv<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) rows: Option<&'a [u32]>,
    pub(crate) x: Vectors<'a>,
    pub(crate) out: &'a mut [f32],
}

impl Operation for IntegerGemv<'_> {
    type Output = ();

    fn run_scalar(self) {
        let outputs = self.out.len() / self.x.count;
        for (index, out) in self.out.iter_mut().enumerate() {
            let (token, index) = (index / outputs, index % outputs);
            let row = row_of(self.rows, index);
            *out = scalar::integer_dot_row(self.matrix, row, self.x.get(token));
        }
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        let blocks = self.matrix.blocks();
        match self.matrix.data() {
            MatrixData::Q8_0 { quants, scales } => {
                let quants: &[[i8; BLOCK]] = quants.as_chunks().0;
                self.multiply(
                    simd,
                    Planes {
                        quants,
                        scales,
                        blocks,
                    },
                );
            }
            MatrixData::Q4K {
                quants,
                scales,
                factors,
            } => {
                let rows = KWeights::new(quants, scales, factors, self.matrix.columns());
                self.multiply(simd, rows);
            }
            MatrixData::Q4_0 { quants, scales } => {
                let quants: &[[u8; BLOCK / 2]] = quants.as_chunks().0;
                self.multiply(
                    simd,
                    Planes {
                        quants,
                        scales,
                        blocks,
                    },
                );
            }
            _ => unreachable!("integer arithmetic needs quantised weights"),
        }
    }
}

impl IntegerGemv<'_> {
    /// Multiplies row by row, up to four vectors at a time.
    ///
    /// One row at a time: several rows in parallel would share the loads of `x`, but each is a memory stream that the hardware
    /// prefetcher has to detect.
    #[inline(always)]
    fn multiply<S: Simd, R: IntegerRows>(self, simd: S, rows: R) {
        let Self { x, out, .. } = self;
        let tokens = x.count;
        let outputs = out.len() / tokens;
        let row = |index| row_of(self.rows, index);
        let last = outputs.saturating_sub(1);
        for index in 0..PREFETCH_ROWS.min(last) {
            rows.prefetch(simd, row(index));
        }
        let own_and_next = |index| {
            let (own, ahead) = (row(index), row(last.min(index + PREFETCH_ROWS)));
            let is_stream = R::IS_STREAM && ahead == own + PREFETCH_ROWS;
            (own, (!is_stream).then_some(ahead))
        };
        if tokens == 1 {
            // Apart, since short rows take less time than the choice of a tile.
            for (index, out) in out.iter_mut().enumerate() {
                let (own, next) = own_and_next(index);
                [*out] = rows.dot(simd, own, next, [x.get(0)]);
            }
            return;
        }
        let tile = R::tile_tokens::<S>();
        for start in (0..outputs).step_by(NEAR_ROWS) {
            for first in (0..tokens).step_by(tile) {
                for index in start..outputs.min(start + NEAR_ROWS) {
                    let (own, next) = own_and_next(index);
                    let next = next.filter(|_| first == 0);
                    let out = &mut out[first * outputs + index..];
                    match tile.min(tokens - first) {
                        1 => {
                            let products = rows.dot(simd, own, next, tile_of::<1>(x, first));
                            store(products, out, outputs);
                        }
                        2 => {
                            let products = rows.dot(simd, own, next, tile_of::<2>(x, first));
                            store(products, out, outputs);
                        }
                        3 => {
                            let products = rows.dot(simd, own, next, tile_of::<3>(x, first));
                            store(products, out, outputs);
                        }
                        _ => {
                            let products = rows.dot(simd, own, next, tile_of::<4>(x, first));
                            store(products, out, outputs);
                        }
                    }
                }
            }
        }
    }
}

/// `T` vectors from `first` on.
#[inline(always)]
fn tile_of<const T: usize>(x: Vectors<'_>, first: usize) -> [&[ActivationSpan]; T] {
    std::array::from_fn(|token| x.get(first + token))
}

/// Rows of quants with scales.
trait IntegerRows: Copy {
    /// Whether consecutive rows are left to hardware prefetchers: 25% faster for int8, 20% slower for nibbles.
    const IS_STREAM: bool;

    /// Tokens that share the unpacked weights of a row, at most 4.
    fn tile_tokens<S: Simd>() -> usize {
        4
    }

    /// Prefetches row `row`.
    fn prefetch<S: Simd>(self, simd: S, row: usize);

    /// Dot products of row `row` with each vector, in the order of the scalar specification; prefetches the row `next`.
    fn dot<S: Simd, const T: usize>(
        self,
        simd: S,
        row: usize,
        next: Option<usize>,
        x: [&[ActivationSpan]; T],
    ) -> [f32; T];
}

/// A block of quants.
pub(super) trait IntegerQuants: Sized {
    /// As [`IntegerRows::IS_STREAM`].
    const IS_STREAM: bool;

    /// Dot products of at most [`SPAN`] blocks with those of each vector: exact integers.
    fn products<S: Simd, const T: usize>(
        simd: S,
        blocks: &[Self],
        x: [&ActivationSpan; T],
    ) -> [S::Lanes; T];
}

impl IntegerQuants for [i8; BLOCK] {
    const IS_STREAM: bool = true;

    #[inline(always)]
    fn products<S: Simd, const T: usize>(
        simd: S,
        blocks: &[Self],
        x: [&ActivationSpan; T],
    ) -> [S::Lanes; T] {
        simd.products_q8(blocks, x)
    }
}

impl IntegerQuants for [u8; BLOCK / 2] {
    const IS_STREAM: bool = false;

    #[inline(always)]
    fn products<S: Simd, const T: usize>(
        simd: S,
        blocks: &[Self],
        x: [&ActivationSpan; T],
    ) -> [S::Lanes; T] {
        simd.products_q4(blocks, x)
    }
}

/// Planes of quants and scales, `[rows, blocks]` each.
#[derive(Clone, Copy)]
struct Planes<'a, Q> {
    quants: &'a [Q],
    scales: &'a [f16],
    blocks: usize,
}

impl<'a, Q> Planes<'a, Q> {
    #[inline(always)]
    fn row(self, index: usize) -> (&'a [Q], &'a [f16]) {
        let row = index * self.blocks..(index + 1) * self.blocks;
        (&self.quants[row.clone()], &self.scales[row])
    }
}

impl<Q: IntegerQuants + Copy> IntegerRows for Planes<'_, Q> {
    const IS_STREAM: bool = Q::IS_STREAM;

    #[inline(always)]
    fn prefetch<S: Simd>(self, simd: S, row: usize) {
        let (quants, scales) = self.row(row);
        simd.prefetch(quants);
        simd.prefetch(scales);
    }

    #[inline(always)]
    fn dot<S: Simd, const T: usize>(
        self,
        simd: S,
        row: usize,
        next: Option<usize>,
        x: [&[ActivationSpan]; T],
    ) -> [f32; T] {
        let (quants, scales) = self.row(row);
        let next = next.map(|next| self.row(next));
        let mut sums = [simd.splat_lanes(0.0); T];
        let (whole, rest) = quants.as_chunks::<SPAN>();
        let (whole_scales, rest_scales) = scales.as_chunks::<SPAN>();
        // Whole spans apart, so that their length is known.
        for (span, (quants, scales)) in whole.iter().zip(whole_scales).enumerate() {
            if let Some((quants, scales)) = next {
                simd.prefetch(&quants.as_chunks::<SPAN>().0[span]);
                simd.prefetch(&scales.as_chunks::<SPAN>().0[span]);
            }
            add_span(simd, quants, scales, span_of(x, span), &mut sums);
        }
        if !rest.is_empty() {
            if let Some((quants, scales)) = next {
                simd.prefetch(quants.as_chunks::<SPAN>().1);
                simd.prefetch(scales.as_chunks::<SPAN>().1);
            }
            add_span(simd, rest, rest_scales, span_of(x, whole.len()), &mut sums);
        }
        sum_all(simd, sums)
    }
}

/// Adds the products of a span, at most [`SPAN`] blocks, with each vector.
#[inline(always)]
fn add_span<S: Simd, Q: IntegerQuants, const T: usize>(
    simd: S,
    quants: &[Q],
    scales: &[f16],
    x: [&ActivationSpan; T],
    sums: &mut [S::Lanes; T],
) {
    let products = Q::products(simd, quants, x);
    let scales = simd.widen_lanes(scales);
    for token in 0..T {
        let scales = simd.multiply_lanes(scales, simd.load_lanes(&x[token].scales));
        sums[token] = simd.multiply_add_lanes(products[token], scales, sums[token]);
    }
}

impl IntegerRows for KWeights<'_> {
    const IS_STREAM: bool = false;

    /// With minima, products of several tokens need more registers than AVX2 has.
    #[inline(always)]
    fn tile_tokens<S: Simd>() -> usize {
        if S::TILE_ROWS == 6 { 4 } else { 1 }
    }

    #[inline(always)]
    fn prefetch<S: Simd>(self, simd: S, row: usize) {
        self.whole_row(row).prefetch(simd);
    }

    #[inline(always)]
    fn dot<S: Simd, const T: usize>(
        self,
        simd: S,
        row: usize,
        next: Option<usize>,
        x: [&[ActivationSpan]; T],
    ) -> [f32; T] {
        let next = next.map(|next| self.whole_row(next));
        let row = self.whole_row(row);
        let mut sums = [simd.splat_lanes(0.0); T];
        let blocks = row.quants.len();
        for span in 0..blocks.div_ceil(SPAN) {
            add_k_span(simd, row, next, span, x, &mut sums);
        }
        sum_all(simd, sums)
    }
}

/// Adds the products of a span of blocks with each vector; prefetches that of the row `next`.
#[inline(always)]
fn add_k_span<S: Simd, const T: usize>(
    simd: S,
    row: KRow<'_>,
    next: Option<KRow<'_>>,
    span: usize,
    x: [&[ActivationSpan]; T],
    sums: &mut [S::Lanes; T],
) {
    let count = SPAN.min(row.quants.len() - span * SPAN);
    if let Some(next) = next {
        next.span(span * SPAN, count).prefetch(simd);
    }
    let row = row.span(span * SPAN, count);
    let x = span_of(x, span);
    let products = match <&[_; SPAN]>::try_from(row.quants) {
        // A known length, so that loops over it are unrolled.
        Ok(whole) => simd.products_q4_k(whole, x),
        Err(_) => simd.products_q4_k(row.quants, x),
    };
    let [scales, minima] = simd.widen_q4_k(&row.scales);
    for token in 0..T {
        let minima = simd.multiply_lanes(minima, simd.block_sums(x[token]));
        let products = simd.multiply_subtract_lanes(products[token], scales, minima);
        let x_scales = simd.load_lanes(&x[token].scales);
        sums[token] = simd.multiply_add_lanes(products, x_scales, sums[token]);
    }
}

/// Span `span` of each vector.
#[inline(always)]
fn span_of<const T: usize>(x: [&[ActivationSpan]; T], span: usize) -> [&ActivationSpan; T] {
    let mut spans = [&x[0][span]; T];
    for (of_token, x) in spans.iter_mut().zip(x) {
        *of_token = &x[span];
    }
    spans
}

/// The tree sum of each.
#[inline(always)]
fn sum_all<S: Simd, const T: usize>(simd: S, lanes: [S::Lanes; T]) -> [f32; T] {
    let mut sums = [0.0; T];
    for (sum, lanes) in sums.iter_mut().zip(lanes) {
        *sum = simd.sum_lanes(lanes);
    }
    sums
}
