//! GEMV of quantised rows with an int8 vector: integer dot products per block, scaled in float.

use half::f16;

use super::rows::{KRow, KWeights, Row};
use super::{Operation, PREFETCH_ROWS, SPAN, Simd, scalar};
use crate::activations::ActivationSpan;
use powerinfer_tensor::BLOCK;
use powerinfer_tensor::{Matrix, MatrixData};

/// `out[i] = matrix[rows[i]] · x`; without a list, all rows.
pub(crate) struct IntegerGemv<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) rows: Option<&'a [u32]>,
    pub(crate) x: &'a [ActivationSpan],
    pub(crate) out: &'a mut [f32],
}

impl IntegerGemv<'_> {
    /// Row of output `index`.
    #[inline(always)]
    fn row(rows: Option<&[u32]>, index: usize) -> usize {
        rows.map_or(index, |rows| rows[index] as usize)
    }
}

impl Operation for IntegerGemv<'_> {
    type Output = ();

    fn run_scalar(self) {
        for (index, out) in self.out.iter_mut().enumerate() {
            *out = scalar::integer_dot_row(self.matrix, Self::row(self.rows, index), self.x);
        }
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        let blocks = self.matrix.blocks();
        let row = |index| Self::row(self.rows, index);
        match self.matrix.data() {
            MatrixData::Q8_0 { quants, scales } => {
                let planes = Planes::<[i8; BLOCK]>::new(quants.as_chunks().0, scales, blocks);
                products(simd, planes, row, self.x, self.out);
            }
            MatrixData::Q4K {
                quants,
                scales,
                factors,
            } => {
                let columns = self.matrix.columns();
                let weights = KWeights::new(quants, scales, factors, columns);
                let last = self.out.len().saturating_sub(1);
                for (index, out) in self.out.iter_mut().enumerate() {
                    let next = weights.whole_row(row(last.min(index + PREFETCH_ROWS)));
                    *out = dot_q4_k(simd, weights.whole_row(row(index)), next, self.x);
                }
            }
            MatrixData::Q4_0 { quants, scales } => {
                let planes = Planes::<[u8; BLOCK / 2]>::new(quants.as_chunks().0, scales, blocks);
                products(simd, planes, row, self.x, self.out);
            }
            _ => unreachable!("integer arithmetic needs quantised weights"),
        }
    }
}

/// A block of quants.
pub(super) trait IntegerQuants: Sized {
    /// Whether consecutive rows are left to hardware prefetchers: a quarter faster for int8, a fifth slower for nibbles.
    const IS_STREAM: bool;

    /// Dot products of at most [`SPAN`] blocks with those of `x`: exact integers.
    fn products<S: Simd>(simd: S, blocks: &[Self], x: &ActivationSpan) -> S::Lanes;
}

impl IntegerQuants for [i8; BLOCK] {
    const IS_STREAM: bool = true;

    #[inline(always)]
    fn products<S: Simd>(simd: S, blocks: &[Self], x: &ActivationSpan) -> S::Lanes {
        simd.products_q8(blocks, x)
    }
}

impl IntegerQuants for [u8; BLOCK / 2] {
    const IS_STREAM: bool = false;

    #[inline(always)]
    fn products<S: Simd>(simd: S, blocks: &[Self], x: &ActivationSpan) -> S::Lanes {
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
    fn new(quants: &'a [Q], scales: &'a [f16], blocks: usize) -> Self {
        Self {
            quants,
            scales,
            blocks,
        }
    }

    #[inline(always)]
    fn row(&self, index: usize) -> (&'a [Q], &'a [f16]) {
        let row = index * self.blocks..(index + 1) * self.blocks;
        (&self.quants[row.clone()], &self.scales[row])
    }
}

/// GEMV with the row `row(index)` for every output.
///
/// One row at a time: several rows in parallel would share the loads of `x`, but each is a memory stream that the hardware
/// prefetcher has to detect.
#[inline(always)]
fn products<S: Simd, Q: IntegerQuants>(
    simd: S,
    planes: Planes<'_, Q>,
    row: impl Fn(usize) -> usize,
    x: &[ActivationSpan],
    out: &mut [f32],
) {
    let last = out.len().saturating_sub(1);
    for (quants, scales) in (0..PREFETCH_ROWS.min(last)).map(|index| planes.row(row(index))) {
        simd.prefetch(quants);
        simd.prefetch(scales);
    }
    for (index, out) in out.iter_mut().enumerate() {
        let (own, ahead) = (row(index), row(last.min(index + PREFETCH_ROWS)));
        let is_stream = Q::IS_STREAM && ahead == own + PREFETCH_ROWS;
        *out = dot(simd, planes.row(own), planes.row(ahead), is_stream, x);
    }
}

/// Dot product of a row with `x`, in the order of the scalar specification; prefetches the row `next` except in
/// a stream.
#[inline(always)]
fn dot<S: Simd, Q: IntegerQuants>(
    simd: S,
    (quants, scales): (&[Q], &[f16]),
    (next_quants, next_scales): (&[Q], &[f16]),
    is_stream: bool,
    x: &[ActivationSpan],
) -> f32 {
    let mut sums = simd.splat_lanes(0.0);
    let spans = quants.chunks(SPAN).zip(scales.chunks(SPAN));
    let next = next_quants.chunks(SPAN).zip(next_scales.chunks(SPAN));
    for (((quants, scales), (next_quants, next_scales)), x) in spans.zip(next).zip(x) {
        if !(Q::IS_STREAM && is_stream) {
            simd.prefetch(next_quants);
            simd.prefetch(next_scales);
        }
        let products = Q::products(simd, quants, x);
        let scales = simd.multiply_lanes(simd.widen_lanes(scales), simd.load_lanes(&x.scales));
        sums = simd.multiply_add_lanes(products, scales, sums);
    }
    simd.sum_lanes(sums)
}

/// The same of a row with minima.
#[inline(always)]
fn dot_q4_k<S: Simd>(simd: S, row: KRow<'_>, next: KRow<'_>, x: &[ActivationSpan]) -> f32 {
    let mut sums = simd.splat_lanes(0.0);
    let blocks = row.quants.len();
    for (first, x) in (0..blocks).step_by(SPAN).zip(x) {
        let count = SPAN.min(blocks - first);
        next.span(first, count).prefetch(simd);
        let row = row.span(first, count);
        let products = simd.products_q4_k(row.quants, x);
        let [scales, minima] = simd.widen_q4_k(&row.scales);
        let minima = simd.multiply_lanes(minima, simd.block_sums(x));
        let products = simd.multiply_subtract_lanes(products, scales, minima);
        sums = simd.multiply_add_lanes(products, simd.load_lanes(&x.scales), sums);
    }
    simd.sum_lanes(sums)
}
