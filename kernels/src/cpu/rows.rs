//! Weight formats as rows of blocks: the traits through which kernels read them.

use std::ops::Range;

use half::{bf16, f16};

use super::{KScales, SPAN, Simd, padded};
use powerinfer_tensor::{BLOCK, SUPER_BLOCK};

/// A matrix as a sequence of rows.
pub(super) trait Weights: Copy {
    /// A row, or a range of its columns.
    type Row: Row;

    /// Columns `columns` of row `index`; the range starts at a multiple of 32.
    fn row(self, index: usize, columns: Range<usize>) -> Self::Row;
}

/// Scales and minima of the blocks of a span: a weight is `quant * scale - minimum`.
#[derive(Clone, Copy)]
pub(super) struct Scales {
    pub(super) scales: [f32; SPAN],
    pub(super) minima: [f32; SPAN],
}

impl Scales {
    /// Scales of 1 and minima of 0.
    pub(super) const ONES: Self = Self {
        scales: [1.0; SPAN],
        minima: [0.0; SPAN],
    };
}

/// Consecutive columns of a row: whole blocks, then possibly a partial one.
pub(super) trait Row: Copy {
    /// The blocks `first..first + count`, all of them whole.
    fn span(self, first: usize, count: usize) -> Self;

    /// Prefetches the columns.
    fn prefetch<S: Simd>(self, simd: S);

    /// Widens the scales of the first blocks, at most [`SPAN`]; float formats have none.
    fn scales<S: Simd>(self, simd: S, out: &mut Scales);

    /// `sums[t] += weights * x[t]`, block by block of a span with these `scales`.
    #[inline(always)]
    fn multiply_add<S: Simd, const T: usize>(
        self,
        simd: S,
        x: [&[[f32; BLOCK]]; T],
        scales: &Scales,
        mut sums: [S::Block; T],
    ) -> [S::Block; T] {
        for (block, _) in x[0].iter().enumerate() {
            let weights = self.weights(simd, block, scales);
            for token in 0..T {
                sums[token] = simd.multiply_add(weights, simd.load(&x[token][block]), sums[token]);
            }
        }
        sums
    }

    /// Weights of whole block `block` of a span with these `scales`.
    fn weights<S: Simd>(self, simd: S, block: usize, scales: &Scales) -> S::Block;

    /// Weights of the partial block after the first `whole` blocks, padded with finite values.
    fn rest<S: Simd>(self, simd: S, whole: usize) -> S::Block;
}

/// A row of nibbles with scales.
pub(super) trait NibbleRow: Row {
    /// Whether blocks have minima.
    const HAS_MINIMA: bool;
    /// Bias of the nibbles.
    const BIAS: i32;

    /// Bytes of all blocks.
    fn bytes<'r>(self) -> &'r [u8]
    where
        Self: 'r;

    /// Scales and minima, if the format has any, of span `span`; the last span may be short.
    fn span_scales<S: Simd>(self, simd: S, span: usize) -> [S::Lanes; 2];

    /// Prefetches the scales.
    fn prefetch_scales<S: Simd>(self, simd: S);
}

/// Element of a float format.
pub(super) trait Float: Copy + Default {
    /// Loads and widens 32 elements.
    fn load<S: Simd>(simd: S, values: &[Self; BLOCK]) -> S::Block;
}

impl Float for f32 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, values: &[f32; BLOCK]) -> S::Block {
        simd.load(values)
    }
}

impl Float for f16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, values: &[f16; BLOCK]) -> S::Block {
        simd.load_f16(values)
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, values: &[bf16; BLOCK]) -> S::Block {
        simd.load_bf16(values)
    }
}

/// `[rows, columns]` elements of a float format.
#[derive(Clone, Copy)]
pub(super) struct FloatWeights<'a, T> {
    pub(super) values: &'a [T],
    pub(super) columns: usize,
}

/// Whole blocks of a row, and its partial last block.
#[derive(Clone, Copy)]
pub(super) struct FloatRow<'a, T> {
    blocks: &'a [[T; BLOCK]],
    rest: &'a [T],
}

impl<'a, T: Float> Weights for FloatWeights<'a, T> {
    type Row = FloatRow<'a, T>;

    #[inline(always)]
    fn row(self, index: usize, columns: Range<usize>) -> FloatRow<'a, T> {
        let row = &self.values[index * self.columns..][..self.columns];
        let (blocks, rest) = row[columns].as_chunks();
        FloatRow { blocks, rest }
    }
}

impl<T: Float> Row for FloatRow<'_, T> {
    #[inline(always)]
    fn span(self, first: usize, count: usize) -> Self {
        FloatRow {
            blocks: &self.blocks[first..first + count],
            rest: &[],
        }
    }

    #[inline(always)]
    fn prefetch<S: Simd>(self, simd: S) {
        // Sums are a fifth faster than by way of L2; of rows above 8 KB, too long for L1, some are a tenth slower.
        simd.prefetch_near(self.blocks);
    }

    #[inline(always)]
    fn scales<S: Simd>(self, _: S, _: &mut Scales) {}

    #[inline(always)]
    fn multiply_add<S: Simd, const N: usize>(
        self,
        simd: S,
        mut x: [&[[f32; BLOCK]]; N],
        _: &Scales,
        mut sums: [S::Block; N],
    ) -> [S::Block; N] {
        if N == 1 {
            // Zipped, so that bounds checks are eliminated.
            for (block, x) in self.blocks.iter().zip(x[0]) {
                sums[0] = simd.multiply_add(T::load(simd, block), simd.load(x), sums[0]);
            }
            return sums;
        }
        for x in &mut x {
            *x = &x[..self.blocks.len()];
        }
        for (index, block) in self.blocks.iter().enumerate() {
            let weights = T::load(simd, block);
            for token in 0..N {
                sums[token] = simd.multiply_add(weights, simd.load(&x[token][index]), sums[token]);
            }
        }
        sums
    }

    #[inline(always)]
    fn weights<S: Simd>(self, simd: S, block: usize, _: &Scales) -> S::Block {
        T::load(simd, &self.blocks[block])
    }

    #[inline(always)]
    fn rest<S: Simd>(self, simd: S, _: usize) -> S::Block {
        T::load(simd, &padded(self.rest))
    }
}

/// A block of 32 quants that share a scale.
pub(super) trait Quants {
    /// Loads and dequantises the block.
    fn weights<S: Simd>(&self, simd: S, scale: f32) -> S::Block;
}

impl Quants for [i8; BLOCK] {
    #[inline(always)]
    fn weights<S: Simd>(&self, simd: S, scale: f32) -> S::Block {
        simd.multiply(simd.load_q8(self), simd.splat(scale))
    }
}

impl Quants for [u8; BLOCK / 2] {
    #[inline(always)]
    fn weights<S: Simd>(&self, simd: S, scale: f32) -> S::Block {
        simd.load_q4_scaled(self, scale)
    }
}

/// The planes of a format with one scale per block, `[rows, blocks]` each; also a row of them.
pub(super) struct Quantised<'a, Q> {
    quants: &'a [Q],
    scales: &'a [f16],
    /// Blocks per row.
    blocks: usize,
}

impl<Q> Clone for Quantised<'_, Q> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<Q> Copy for Quantised<'_, Q> {}

impl<'a, T, const BYTES: usize> Quantised<'a, [T; BYTES]> {
    /// The planes of a matrix of `columns` columns.
    #[inline(always)]
    pub(super) fn new(quants: &'a [T], scales: &'a [f16], columns: usize) -> Self {
        Quantised {
            quants: quants.as_chunks().0,
            scales,
            blocks: columns.div_ceil(BLOCK),
        }
    }
}

impl<'a, Q: Quants> Weights for Quantised<'a, Q> {
    type Row = Quantised<'a, Q>;

    #[inline(always)]
    fn row(self, index: usize, columns: Range<usize>) -> Quantised<'a, Q> {
        let blocks = columns.start / BLOCK..columns.end.div_ceil(BLOCK);
        let row = index * self.blocks..(index + 1) * self.blocks;
        Quantised {
            quants: &self.quants[row.clone()][blocks.clone()],
            scales: &self.scales[row][blocks.clone()],
            blocks: blocks.len(),
        }
    }
}

impl<Q: Quants> Row for Quantised<'_, Q> {
    #[inline(always)]
    fn span(self, first: usize, count: usize) -> Self {
        Quantised {
            quants: &self.quants[first..first + count],
            scales: &self.scales[first..first + count],
            blocks: count,
        }
    }

    #[inline(always)]
    fn prefetch<S: Simd>(self, simd: S) {
        simd.prefetch(self.quants);
        simd.prefetch(self.scales);
    }

    #[inline(always)]
    fn scales<S: Simd>(self, simd: S, out: &mut Scales) {
        simd.widen(&self.scales[..self.scales.len().min(SPAN)], &mut out.scales);
    }

    #[inline(always)]
    fn weights<S: Simd>(self, simd: S, block: usize, scales: &Scales) -> S::Block {
        self.quants[block].weights(simd, scales.scales[block])
    }

    #[inline(always)]
    fn rest<S: Simd>(self, simd: S, whole: usize) -> S::Block {
        self.quants[whole].weights(simd, self.scales[whole].to_f32())
    }
}

impl NibbleRow for Quantised<'_, [u8; BLOCK / 2]> {
    const HAS_MINIMA: bool = false;
    const BIAS: i32 = 8;

    #[inline(always)]
    fn bytes<'r>(self) -> &'r [u8]
    where
        Self: 'r,
    {
        self.quants.as_flattened()
    }

    #[inline(always)]
    fn span_scales<S: Simd>(self, simd: S, span: usize) -> [S::Lanes; 2] {
        let scales = &self.scales[span * SPAN..];
        [simd.widen_lanes(&scales[..scales.len().min(SPAN)]); 2]
    }

    #[inline(always)]
    fn prefetch_scales<S: Simd>(self, simd: S) {
        simd.prefetch(self.scales);
    }
}

/// The planes of [`Format::Q4K`](powerinfer_tensor::Format::Q4K).
#[derive(Clone, Copy)]
pub(super) struct KWeights<'a> {
    quants: &'a [[u8; BLOCK / 2]],
    supers: &'a [[f16; 2]],
    factors: &'a [[u8; 2]],
    /// Blocks per row.
    blocks: usize,
}

impl<'a> KWeights<'a> {
    /// The planes of a matrix of `columns` columns.
    #[inline(always)]
    pub(super) fn new(
        quants: &'a [u8],
        supers: &'a [[f16; 2]],
        factors: &'a [[u8; 2]],
        columns: usize,
    ) -> Self {
        Self {
            quants: quants.as_chunks().0,
            supers,
            factors,
            blocks: columns.div_ceil(BLOCK),
        }
    }

    /// All blocks of row `index`.
    #[inline(always)]
    pub(super) fn whole_row(self, index: usize) -> KRow<'a> {
        let super_blocks = self.blocks.div_ceil(SUPER_BLOCK);
        let of_row = index * self.blocks..(index + 1) * self.blocks;
        KRow {
            quants: &self.quants[of_row.clone()],
            scales: KScales::of_row(
                &self.supers[index * super_blocks..(index + 1) * super_blocks],
                &self.factors[of_row],
            ),
        }
    }
}

/// Consecutive blocks of a row.
#[derive(Clone, Copy)]
pub(super) struct KRow<'a> {
    pub(super) quants: &'a [[u8; BLOCK / 2]],
    pub(super) scales: KScales<'a>,
}

impl<'a> Weights for KWeights<'a> {
    type Row = KRow<'a>;

    #[inline(always)]
    fn row(self, index: usize, columns: Range<usize>) -> KRow<'a> {
        let blocks = columns.start / BLOCK..columns.end.div_ceil(BLOCK);
        self.whole_row(index).span(blocks.start, blocks.len())
    }
}

impl Row for KRow<'_> {
    #[inline(always)]
    fn span(self, first: usize, count: usize) -> Self {
        KRow {
            quants: &self.quants[first..first + count],
            scales: self.scales.part(first, count),
        }
    }

    #[inline(always)]
    fn prefetch<S: Simd>(self, simd: S) {
        // With three planes, half as fast by way of L2.
        simd.prefetch_near(self.quants);
        self.scales.prefetch(simd);
    }

    #[inline(always)]
    fn scales<S: Simd>(self, simd: S, out: &mut Scales) {
        let first = self.scales.part(0, self.quants.len().min(SPAN));
        let [scales, minima] = simd.widen_q4_k(&first);
        simd.store_lanes(scales, &mut out.scales);
        simd.store_lanes(minima, &mut out.minima);
    }

    #[inline(always)]
    fn weights<S: Simd>(self, simd: S, block: usize, scales: &Scales) -> S::Block {
        simd.load_q4_k(
            &self.quants[block],
            scales.scales[block],
            scales.minima[block],
        )
    }

    #[inline(always)]
    fn rest<S: Simd>(self, simd: S, whole: usize) -> S::Block {
        let [scale, minimum] = self.scales.get(whole);
        simd.load_q4_k(&self.quants[whole], scale, minimum)
    }
}

impl NibbleRow for KRow<'_> {
    const HAS_MINIMA: bool = true;
    const BIAS: i32 = 0;

    #[inline(always)]
    fn bytes<'r>(self) -> &'r [u8]
    where
        Self: 'r,
    {
        self.quants.as_flattened()
    }

    #[inline(always)]
    fn span_scales<S: Simd>(self, simd: S, span: usize) -> [S::Lanes; 2] {
        let first = span * SPAN;
        let count = SPAN.min(self.quants.len() - first);
        simd.widen_q4_k(&self.scales.part(first, count))
    }

    #[inline(always)]
    fn prefetch_scales<S: Simd>(self, simd: S) {
        self.scales.prefetch(simd);
    }
}

/// Runs `$body` with `$weights` bound to the [`Weights`] of `$matrix`, once per format.
macro_rules! with_weights {
    ($matrix:expr, $weights:ident => $body:expr) => {{
        let columns = $matrix.columns();
        match $matrix.data() {
            powerinfer_tensor::MatrixData::F32(values) => {
                let $weights = $crate::cpu::rows::FloatWeights { values, columns };
                $body
            }
            powerinfer_tensor::MatrixData::F16(values) => {
                let $weights = $crate::cpu::rows::FloatWeights { values, columns };
                $body
            }
            powerinfer_tensor::MatrixData::Bf16(values) => {
                let $weights = $crate::cpu::rows::FloatWeights { values, columns };
                $body
            }
            powerinfer_tensor::MatrixData::Q8_0 { quants, scales } => {
                let $weights =
                    $crate::cpu::rows::Quantised::<[i8; 32]>::new(quants, scales, columns);
                $body
            }
            powerinfer_tensor::MatrixData::Q4K {
                quants,
                scales,
                factors,
            } => {
                let $weights = $crate::cpu::rows::KWeights::new(quants, scales, factors, columns);
                $body
            }
            powerinfer_tensor::MatrixData::Q4_0 { quants, scales } => {
                let $weights =
                    $crate::cpu::rows::Quantised::<[u8; 16]>::new(quants, scales, columns);
                $body
            }
        }
    }};
}

pub(super) use with_weights;
