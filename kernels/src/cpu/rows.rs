//! The formats as rows of blocks: what a kernel needs to know of a format.

use std::ops::Range;

use half::{bf16, f16};

use super::{SPAN, Simd, padded};
use crate::format::BLOCK;

/// The rows of a matrix.
pub(super) trait Weights: Copy {
    /// One row, or a part of one.
    type Row: Row;

    /// The columns `columns` of row `index`; the range starts at a multiple of 32.
    fn row(self, index: usize, columns: Range<usize>) -> Self::Row;
}

/// A part of a row: whole blocks, then perhaps a shorter one, the rest.
pub(super) trait Row: Copy {
    /// The blocks `first..first + count`, all of them whole.
    fn span(self, first: usize, count: usize) -> Self;

    /// Asks for its memory.
    fn prefetch<S: Simd>(self, simd: S);

    /// Widens the scales of the first blocks, at most [`SPAN`] of them; nothing where a
    /// format has none.
    fn scales<S: Simd>(self, simd: S, out: &mut [f32; SPAN]);

    /// The numbers of whole block `block`, times `scale` where the format has scales.
    fn weights<S: Simd>(self, simd: S, block: usize, scale: f32) -> S::Block;

    /// What follows the first `whole` blocks: a last block, padded, and its scale (1 where the
    /// format has none). The padding holds zeros or finite numbers.
    fn rest<S: Simd>(self, simd: S, whole: usize) -> (S::Block, f32);
}

/// A number that stands for itself.
pub(super) trait Plain: Copy + Default {
    /// Reads 32 of them.
    fn load<S: Simd>(simd: S, values: &[Self; BLOCK]) -> S::Block;
}

impl Plain for f32 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, values: &[f32; BLOCK]) -> S::Block {
        simd.load(values)
    }
}

impl Plain for f16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, values: &[f16; BLOCK]) -> S::Block {
        simd.load_f16(values)
    }
}

impl Plain for bf16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, values: &[bf16; BLOCK]) -> S::Block {
        simd.load_bf16(values)
    }
}

/// `[rows, columns]` plain numbers.
#[derive(Clone, Copy)]
pub(super) struct PlainWeights<'a, T> {
    pub(super) values: &'a [T],
    pub(super) columns: usize,
}

/// Whole blocks of plain numbers, and what is left of the row.
#[derive(Clone, Copy)]
pub(super) struct PlainRow<'a, T> {
    blocks: &'a [[T; BLOCK]],
    rest: &'a [T],
}

impl<'a, T: Plain> Weights for PlainWeights<'a, T> {
    type Row = PlainRow<'a, T>;

    #[inline(always)]
    fn row(self, index: usize, columns: Range<usize>) -> PlainRow<'a, T> {
        let row = &self.values[index * self.columns..][..self.columns];
        let (blocks, rest) = row[columns].as_chunks();
        PlainRow { blocks, rest }
    }
}

impl<T: Plain> Row for PlainRow<'_, T> {
    #[inline(always)]
    fn span(self, first: usize, count: usize) -> Self {
        PlainRow {
            blocks: &self.blocks[first..first + count],
            rest: &[],
        }
    }

    #[inline(always)]
    fn prefetch<S: Simd>(self, simd: S) {
        simd.prefetch(self.blocks);
    }

    #[inline(always)]
    fn scales<S: Simd>(self, _: S, _: &mut [f32; SPAN]) {}

    #[inline(always)]
    fn weights<S: Simd>(self, simd: S, block: usize, _: f32) -> S::Block {
        T::load(simd, &self.blocks[block])
    }

    #[inline(always)]
    fn rest<S: Simd>(self, simd: S, _: usize) -> (S::Block, f32) {
        (T::load(simd, &padded(self.rest)), 1.0)
    }
}

/// A block of 32 numbers that share a scale.
pub(super) trait Quants {
    /// Reads the unscaled numbers.
    fn numbers<S: Simd>(&self, simd: S) -> S::Block;
    /// Reads the numbers times `scale`.
    fn weights<S: Simd>(&self, simd: S, scale: f32) -> S::Block;
}

impl Quants for [i8; BLOCK] {
    #[inline(always)]
    fn numbers<S: Simd>(&self, simd: S) -> S::Block {
        simd.load_q8(self)
    }

    #[inline(always)]
    fn weights<S: Simd>(&self, simd: S, scale: f32) -> S::Block {
        simd.multiply(simd.load_q8(self), simd.splat(scale))
    }
}

impl Quants for [u8; BLOCK / 2] {
    #[inline(always)]
    fn numbers<S: Simd>(&self, simd: S) -> S::Block {
        simd.load_q4(self)
    }

    #[inline(always)]
    fn weights<S: Simd>(&self, simd: S, scale: f32) -> S::Block {
        simd.load_q4_scaled(self, scale)
    }
}

/// Two planes: `[rows, blocks]` quants and as many scales; also one row of them.
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
    fn scales<S: Simd>(self, simd: S, out: &mut [f32; SPAN]) {
        simd.widen(&self.scales[..self.scales.len().min(SPAN)], out);
    }

    #[inline(always)]
    fn weights<S: Simd>(self, simd: S, block: usize, scale: f32) -> S::Block {
        self.quants[block].weights(simd, scale)
    }

    #[inline(always)]
    fn rest<S: Simd>(self, simd: S, whole: usize) -> (S::Block, f32) {
        (
            self.quants[whole].numbers(simd),
            self.scales[whole].to_f32(),
        )
    }
}

/// Runs `$body` with `$weights` bound to the [`Weights`] of `$matrix`, once per format.
macro_rules! with_weights {
    ($matrix:expr, $weights:ident => $body:expr) => {{
        let columns = $matrix.columns();
        match $matrix.data() {
            $crate::MatrixData::F32(values) => {
                let $weights = $crate::cpu::rows::PlainWeights { values, columns };
                $body
            }
            $crate::MatrixData::F16(values) => {
                let $weights = $crate::cpu::rows::PlainWeights { values, columns };
                $body
            }
            $crate::MatrixData::Bf16(values) => {
                let $weights = $crate::cpu::rows::PlainWeights { values, columns };
                $body
            }
            $crate::MatrixData::Q8_0 { quants, scales } => {
                let $weights =
                    $crate::cpu::rows::Quantised::<[i8; 32]>::new(quants, scales, columns);
                $body
            }
            $crate::MatrixData::Q4_0 { quants, scales } => {
                let $weights =
                    $crate::cpu::rows::Quantised::<[u8; 16]>::new(quants, scales, columns);
                $body
            }
        }
    }};
}

pub(super) use with_weights;
