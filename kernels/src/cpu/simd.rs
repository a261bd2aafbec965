//! The operations that an instruction set provides. A value of a type that implements [`Simd`] proves that the processor
//! has the instructions, so that the methods are safe.
#![cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    expect(
        dead_code,
        reason = "without vector instructions only the scalar code runs"
    )
)]

use half::{bf16, f16};
use powerinfer_tensor::BLOCK;

use super::{KScales, Operation, SPAN};
use crate::activations::ActivationSpan;

/// An instruction set.
pub(crate) trait Simd: IntegerOps {
    /// Runs `operation` in a function with the target features of this instruction set.
    fn run<O: Operation>(self, operation: O) -> O::Output;

    /// Prefetches the cache lines of `values`.
    ///
    /// Hardware prefetchers restart at every jump and page, and rows are short: without software prefetch, listed rows are
    /// read at half the bandwidth.
    fn prefetch<T>(self, values: &[T]);
    /// The same, past L2 into L1, which must hold all that is prefetched.
    fn prefetch_near<T>(self, values: &[T]);
    /// Prefetches cache lines a fixed distance after `values`, which are read as a stream.
    fn prefetch_ahead<T>(self, values: &[T]);
}

/// Operations on blocks of 32 columns, and on single registers. Lane `i` of a block is column `i`.
pub(crate) trait BlockOps: Copy {
    /// One register of `f32`.
    type Vector: Copy;
    /// 32 lanes of `f32`, in as many registers as they need.
    type Block: Copy;
    /// Lanes of a register.
    const LANES: usize;
    /// Rows of a GEMM tile, 3 or 6: what the registers hold with four tokens.
    const TILE_ROWS: usize;

    /// Every lane `value`.
    fn splat(self, value: f32) -> Self::Block;
    /// Loads 32 `f32`.
    fn load(self, values: &[f32; BLOCK]) -> Self::Block;
    /// Loads and widens 32 `f16`.
    fn load_f16(self, values: &[f16; BLOCK]) -> Self::Block;
    /// Loads 32 `f32` from four places.
    fn load_parts(self, parts: [&[f32; 8]; 4]) -> Self::Block;
    /// Loads and widens 32 `f16` from four places.
    fn load_f16_parts(self, parts: [&[f16; 8]; 4]) -> Self::Block;
    /// Loads and widens 32 `i8` from four places.
    fn load_q8_parts(self, parts: [&[i8; 8]; 4]) -> Self::Block;
    /// Loads and widens 32 `bf16`.
    fn load_bf16(self, values: &[bf16; BLOCK]) -> Self::Block;
    /// Loads and widens 32 `i8`.
    fn load_q8(self, quants: &[i8; BLOCK]) -> Self::Block;
    /// `(nibble - 8) * scale` for 32 nibbles: the low nibbles of all bytes, then the high ones.
    fn load_q4_scaled(self, quants: &[u8; BLOCK / 2], scale: f32) -> Self::Block;
    /// `nibble * scale - minimum` for 32 nibbles, with a single rounding if the product is exact.
    fn load_q4_k(self, quants: &[u8; BLOCK / 2], scale: f32, minimum: f32) -> Self::Block;
    /// Stores 32 `f32`.
    fn store(self, block: Self::Block, out: &mut [f32; BLOCK]);
    /// `a * b`.
    fn multiply(self, a: Self::Block, b: Self::Block) -> Self::Block;
    /// `a * b + c`, fused.
    fn multiply_add(self, a: Self::Block, b: Self::Block, c: Self::Block) -> Self::Block;
    /// The larger of `a` and `b`.
    fn maximum(self, a: Self::Block, b: Self::Block) -> Self::Block;
    /// Adds the bits of `power`, shifted left by the width of the mantissa, to the bits of `value`.
    fn add_exponent(self, value: Self::Block, power: Self::Block) -> Self::Block;
    /// `value`, or 0 if `x` is less than `bound`.
    fn zero_below(self, x: Self::Block, bound: f32, value: Self::Block) -> Self::Block;
    /// Tree sum: adds the upper half of the lanes to the lower half until one is left.
    fn sum(self, block: Self::Block) -> f32;
    /// [`Self::sum`] of four blocks, with the same bits.
    fn sum_four(self, blocks: [Self::Block; 4]) -> [f32; 4];

    /// Every lane of a register `value`.
    fn splat_vector(self, value: f32) -> Self::Vector;
    /// Loads a register from the front of `values`.
    fn load_vector(self, values: &[f32]) -> Self::Vector;
    /// Stores a register to the front of `out`.
    fn store_vector(self, vector: Self::Vector, out: &mut [f32]);
    /// `a * b + c`, fused.
    fn multiply_add_vector(self, a: Self::Vector, b: Self::Vector, c: Self::Vector)
    -> Self::Vector;
}

/// Operations on spans of up to [`SPAN`] blocks, with one lane per block.
pub(crate) trait SpanOps: BlockOps {
    /// One `f32` per block of a span, in as many registers as they need.
    type Lanes: Copy;

    /// Widens at most [`SPAN`] scales into the front of `out`; the rest of `out` is unspecified.
    fn widen(self, scales: &[f16], out: &mut [f32; SPAN]);
    /// Widens at most [`SPAN`] scales; zero in the remaining lanes.
    fn widen_lanes(self, scales: &[f16]) -> Self::Lanes;
    /// Scales and minima of at most [`SPAN`] Q4_K blocks, exact; zero in the remaining lanes.
    fn widen_q4_k(self, scales: &KScales<'_>) -> [Self::Lanes; 2];
    /// Dot products of at most [`SPAN`] blocks of `i8` with those of each vector: exact integers; zero in the remaining lanes.
    fn products_q8<const T: usize>(
        self,
        blocks: &[[i8; BLOCK]],
        x: [&ActivationSpan; T],
    ) -> [Self::Lanes; T];
    /// Dot products of at most [`SPAN`] blocks of nibbles less 8, as [`Self::products_q8`].
    fn products_q4<const T: usize>(
        self,
        blocks: &[[u8; BLOCK / 2]],
        x: [&ActivationSpan; T],
    ) -> [Self::Lanes; T];
    /// Dot products of at most [`SPAN`] blocks of unsigned nibbles, as [`Self::products_q8`].
    fn products_q4_k<const T: usize>(
        self,
        blocks: &[[u8; BLOCK / 2]],
        x: [&ActivationSpan; T],
    ) -> [Self::Lanes; T];
    /// Sum of the quants of each block of `x`.
    fn block_sums(self, x: &ActivationSpan) -> Self::Lanes;
    /// Every lane `value`.
    fn splat_lanes(self, value: f32) -> Self::Lanes;
    /// Loads one value per lane.
    fn load_lanes(self, values: &[f32; SPAN]) -> Self::Lanes;
    /// Stores one value per lane.
    fn store_lanes(self, lanes: Self::Lanes, out: &mut [f32; SPAN]);
    /// `a + b`.
    fn add_lanes(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `a * b`.
    fn multiply_lanes(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `a * b + c`, fused.
    fn multiply_add_lanes(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes;
    /// `a * b - c`, fused.
    fn multiply_subtract_lanes(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes)
    -> Self::Lanes;
    /// Tree sum: adds the upper half of the lanes to the lower half until one is left.
    fn sum_lanes(self, lanes: Self::Lanes) -> f32;
}

/// Integer operations on 64 bytes: 16 words of 32 bits, in four quarters of four words.
pub(crate) trait IntegerOps: SpanOps {
    /// 16 words of 32 bits, in as many registers as they need.
    type Integers: Copy;
    /// Bias with which signed bytes are stored in a GEMM panel.
    const PANEL_BIAS: i32;

    /// Every word `value`.
    fn splat_i32(self, value: i32) -> Self::Integers;
    /// Loads 64 bytes.
    fn load_bytes(self, bytes: &[u8; 64]) -> Self::Integers;
    /// Stores 64 bytes.
    fn store_bytes(self, integers: Self::Integers, out: &mut [u8; 64]);
    /// Transposes a 4 × 4 matrix of words of four bytes.
    fn transpose_words(self, rows: [&[u8; 16]; 4]) -> [[u8; 16]; 4];
    /// Interleaves the bytes of four rows: byte `4 r + t` of quarter `q` of row `i` becomes byte `i` of word `t` of quarter
    /// `q` of result `r`.
    fn interleave_bytes(self, rows: [Self::Integers; 4]) -> [Self::Integers; 4];
    /// The low nibble of every byte, and the high nibble.
    fn nibbles(self, bytes: Self::Integers) -> [Self::Integers; 2];
    /// Word `q` of `words` in every word of quarter `q`.
    fn broadcast_words(self, words: &[u32; 4]) -> Self::Integers;
    /// Adds to every word of `sums` the dot product of its four bytes, biased by [`Self::PANEL_BIAS`], with the signed bytes
    /// of `x`, none of them -128.
    fn dot(self, sums: Self::Integers, bytes: Self::Integers, x: Self::Integers) -> Self::Integers;
    /// As [`Self::dot`], for unsigned bytes of at most 127, without bias; `x` may be -128.
    fn dot_unsigned(
        self,
        sums: Self::Integers,
        unsigned: Self::Integers,
        x: Self::Integers,
    ) -> Self::Integers;
    /// Adds [`Self::dot_unsigned`] of each of up to 8 registers to `sums`; `nibbles` are at most 15.
    #[inline(always)]
    fn dot_nibbles<const N: usize>(
        self,
        sums: Self::Integers,
        nibbles: [Self::Integers; N],
        x: [Self::Integers; N],
    ) -> Self::Integers {
        let both = nibbles.into_iter().zip(x);
        both.fold(sums, |sums, (nibbles, x)| {
            self.dot_unsigned(sums, nibbles, x)
        })
    }
    /// For each vector of `x`, adds [`Self::dot_unsigned`] of `nibbles` and the vector's first `N` registers to the vector's entry in
    /// `totals`; `nibbles` are at most 15.
    #[inline(always)]
    fn add_nibble_products<const N: usize>(
        self,
        nibbles: [&[u8; 64]; N],
        x: &[[[u8; 64]; 8]],
        totals: &mut [[u8; 64]],
    ) {
        let mut loaded = [self.splat_i32(0); N];
        for (loaded, nibbles) in loaded.iter_mut().zip(nibbles) {
            *loaded = self.load_bytes(nibbles);
        }
        for (x, total) in x.iter().zip(totals) {
            let mut sum = self.load_bytes(total);
            for (nibbles, x) in loaded.into_iter().zip(x) {
                sum = self.dot_unsigned(sum, nibbles, self.load_bytes(x));
            }
            self.store_bytes(sum, total);
        }
    }
    /// Transposes a 4 × 4 matrix of quarters: quarter `q` of result `r` is quarter `r` of operand `q`.
    fn transpose_quarters(self, four: [Self::Integers; 4]) -> [Self::Integers; 4];
    /// Bits of `|lanes|`, which sort like the magnitudes, NaN last.
    fn magnitude_bits(self, lanes: Self::Lanes) -> Self::Integers;
    /// The larger of `a` and `b`, both non-negative.
    fn max_i32(self, a: Self::Integers, b: Self::Integers) -> Self::Integers;
    /// `a + b`.
    fn add_i32(self, a: Self::Integers, b: Self::Integers) -> Self::Integers;
    /// `values * inverses`, at most 127 in magnitude, rounded to the nearest integer, ties to even; 0 if the inverse is 0.
    fn quantise_lanes(self, values: Self::Lanes, inverses: Self::Lanes) -> Self::Integers;
    /// Packs the lowest bytes of the words of four operands: byte `i` of a word comes from operand `i`.
    fn pack_bytes(self, four: [Self::Integers; 4]) -> Self::Integers;
    /// The lowest byte of every word.
    fn low_bytes(self, integers: Self::Integers) -> [u8; 16];
    /// The lowest bytes of the four words of a quarter, in every word of the quarter.
    fn quarter_bytes(self, integers: Self::Integers) -> Self::Integers;
    /// Four values repeated in every quarter.
    fn broadcast_quarters(self, values: &[f32; 4]) -> Self::Lanes;
    /// Converts integers below 2^24 to `f32`.
    fn to_f32_lanes(self, integers: Self::Integers) -> Self::Lanes;
}
