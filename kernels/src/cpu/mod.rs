//! The kernels on the CPU: the scalar specification, one generic translation of it into blocks
//! of 32 lanes, and the instruction sets that say what a block is.
//!
//! `dot`, `axpy` and `gemm` are written against [`Simd`]; `avx2`, `avx512` and `neon` implement
//! it. Everything generic is `#[inline(always)]`, so that it is compiled inside [`Simd::run`],
//! the one function per instruction set that has the target features. Closures cannot be, and
//! where the compiler does not inline one of its own accord, its instructions become calls: around
//! instructions, loops stand instead of `map`.
#![expect(
    unsafe_code,
    reason = "vector instructions exist only behind a processor check that the compiler cannot see"
)]

mod agreements;
mod attention;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
mod axpy;
mod dot;
mod gemm;
mod integer_axpy;
mod integer_dot;
mod integer_gemm;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
mod quantise;
mod rows;
mod scalar;
mod sum;

pub(crate) use agreements::Agreements;
pub use attention::exp2;
pub(crate) use attention::{Powers, Scores, WeightedValues};
pub(crate) use axpy::{Axpy, AxpyRows, AxpyRowsBatch};
pub(crate) use dot::{Dot, Gemv};
pub(crate) use gemm::Gemm;
pub(crate) use integer_axpy::{IntegerAxpy, IntegerAxpyBatch};
pub(crate) use integer_dot::IntegerGemv;
pub(crate) use integer_gemm::IntegerGemm;
pub(crate) use quantise::Quantise;
pub(crate) use sum::Sum;

use half::{bf16, f16};

use crate::activations::ActivationSpan;
use powerinfer_tensor::{BLOCK, SUPER_BLOCK};

/// Bytes that the product of a matrix of `columns` columns with many vectors, or sums of its rows, take
/// while they are computed, on each thread.
pub const fn kernel_scratch_bytes(columns: usize) -> usize {
    let (exact, integer, sums) = (
        gemm::BYTES,
        integer_gemm::bytes(columns),
        integer_axpy::bytes(columns),
    );
    let products = if exact > integer { exact } else { integer };
    if products > sums { products } else { sums }
}

/// Blocks that are gone through at once: as many scales fill the widest register.
pub(crate) const SPAN: usize = 16;
/// How many rows ahead memory is asked for: as long as a row takes, the memory answers later. One row is a
/// third slower where a file lies in small pages, and no faster in huge ones.
const AHEAD: usize = 8;
/// How many bytes ahead memory is asked for where rows are read as one stream: 256 to 1024 are as good, more are not.
const STREAM_AHEAD: usize = 512;
/// Columns of a span.
pub(crate) const SPAN_COLUMNS: usize = SPAN * BLOCK;
/// Blocks of four-bit weights whose bytes fill the widest register.
pub(crate) const GROUP: usize = 4;

/// One kernel with its arguments.
pub(crate) trait Operation {
    /// What the kernel returns.
    type Output;

    /// Runs the scalar specification.
    fn specify(self) -> Self::Output;

    /// Runs the translation; implementations are `#[inline(always)]`.
    fn translate<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set. A value exists only where the processor has it, so that methods are safe.
///
/// Lane `i` of a block is column `i` of a block of 32 columns.
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    expect(
        dead_code,
        reason = "without vector instructions only the scalar code runs"
    )
)]
pub(crate) trait Simd: Copy {
    /// One register.
    type Vector: Copy;
    /// 32 lanes, in as many registers as that takes.
    type Block: Copy;
    /// As many whole numbers of 32 bits as [`Self::Lanes`] has numbers.
    type Whole: Copy;
    /// What signed bytes of a panel are stored larger by.
    const PANEL_BIAS: i32;
    /// One number for each block of a span, in as many registers as that takes.
    type Lanes: Copy;
    /// Lanes of a register.
    const LANES: usize;
    /// Rows of a matrix-matrix tile, 3 or 6: what the registers hold with four tokens.
    const TILE_ROWS: usize;

    /// Runs `operation` where the compiler may use this instruction set.
    fn run<O: Operation>(self, operation: O) -> O::Output;

    /// Asks for the cache lines of `values`, which are to be read soon.
    ///
    /// Rows are short for the processor's own guesses, which begin anew at every jump and at every
    /// page: unasked, listed rows come at half the speed of memory.
    fn prefetch<T>(self, values: &[T]);
    /// Asks for the cache lines that lie a little behind `values`, of which a stream of them comes soon.
    fn prefetch_behind<T>(self, values: &[T]);
    /// Every lane `value`.
    fn splat(self, value: f32) -> Self::Block;
    /// Reads 32 numbers.
    fn load(self, values: &[f32; BLOCK]) -> Self::Block;
    /// Reads and widens 32 numbers.
    fn load_f16(self, values: &[f16; BLOCK]) -> Self::Block;
    /// Reads and widens 32 numbers.
    fn load_bf16(self, values: &[bf16; BLOCK]) -> Self::Block;
    /// Reads and widens 32 signed bytes.
    fn load_q8(self, quants: &[i8; BLOCK]) -> Self::Block;
    /// Reads 32 biased nibbles times `scale`: the low ones of all bytes, then the high ones.
    fn load_q4_scaled(self, quants: &[u8; BLOCK / 2], scale: f32) -> Self::Block;
    /// Reads 32 nibbles as they are, times `scale` less `minimum`, rounded once where the product is
    /// exact.
    fn load_q4_k(self, quants: &[u8; BLOCK / 2], scale: f32, minimum: f32) -> Self::Block;
    /// Writes 32 numbers.
    fn store(self, block: Self::Block, out: &mut [f32; BLOCK]);
    /// `a * b`.
    fn multiply(self, a: Self::Block, b: Self::Block) -> Self::Block;
    /// `a * b + c`, rounded once.
    fn multiply_add(self, a: Self::Block, b: Self::Block, c: Self::Block) -> Self::Block;
    /// The larger of `a` and `b`.
    fn maximum(self, a: Self::Block, b: Self::Block) -> Self::Block;
    /// Adds the bits of `power`, shifted left past the mantissa, to the bits of `value`.
    fn add_exponent(self, value: Self::Block, power: Self::Block) -> Self::Block;
    /// `value`, but 0 where `x` is less than `bound`.
    fn zero_below(self, x: Self::Block, bound: f32, value: Self::Block) -> Self::Block;
    /// Adds the upper half of the lanes to the lower half until one is left.
    fn sum(self, block: Self::Block) -> f32;
    /// The same of four blocks, with the same bits.
    fn sum_four(self, blocks: [Self::Block; 4]) -> [f32; 4];

    /// Widens at most [`SPAN`] scales into the front of `out`; the rest of `out` is undefined.
    fn widen(self, scales: &[f16], out: &mut [f32; SPAN]);

    /// Every lane of a register `value`.
    fn splat_vector(self, value: f32) -> Self::Vector;
    /// Reads a register from the front of `values`.
    fn load_vector(self, values: &[f32]) -> Self::Vector;
    /// Writes a register to the front of `out`.
    fn store_vector(self, vector: Self::Vector, out: &mut [f32]);
    /// `a * b + c`, rounded once.
    fn multiply_add_vector(self, a: Self::Vector, b: Self::Vector, c: Self::Vector)
    -> Self::Vector;

    /// The products of at most [`SPAN`] blocks of signed bytes with those of `x`: exact, zero where
    /// there are fewer.
    fn products_q8(self, blocks: &[[i8; BLOCK]], x: &ActivationSpan) -> Self::Lanes;
    /// The same of blocks of biased nibbles.
    fn products_q4(self, blocks: &[[u8; BLOCK / 2]], x: &ActivationSpan) -> Self::Lanes;
    /// The same of blocks of nibbles as they are.
    fn products_q4_k(self, blocks: &[[u8; BLOCK / 2]], x: &ActivationSpan) -> Self::Lanes;
    /// The sums of the quants of the blocks of `x`.
    fn sums_of(self, x: &ActivationSpan) -> Self::Lanes;
    /// Widens at most [`SPAN`] scales; zero where there are fewer.
    fn widen_lanes(self, scales: &[f16]) -> Self::Lanes;
    /// The scales and the minima of at most [`SPAN`] blocks, exact; zero where there are fewer.
    fn widen_q4_k(self, scales: &KScales<'_>) -> [Self::Lanes; 2];
    /// Every lane `value`.
    fn splat_lanes(self, value: f32) -> Self::Lanes;
    /// Reads one number a lane.
    fn load_lanes(self, values: &[f32; SPAN]) -> Self::Lanes;
    /// Writes one number a lane.
    fn store_lanes(self, lanes: Self::Lanes, out: &mut [f32; SPAN]);
    /// `a + b`.
    fn add_lanes(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `a * b`.
    fn multiply_lanes(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `a * b + c`, rounded once.
    fn multiply_add_lanes(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes;
    /// `a * b - c`, rounded once.
    fn multiply_subtract_lanes(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes)
    -> Self::Lanes;
    /// Every lane `value`.
    fn splat_whole(self, value: i32) -> Self::Whole;
    /// Reads 64 bytes, quarters of 16.
    fn load_whole(self, bytes: &[u8; 64]) -> Self::Whole;
    /// Writes 64 bytes.
    fn store_whole(self, whole: Self::Whole, out: &mut [u8; 64]);
    /// Puts words of four bytes of four rows side by side: word `w` of row `r` becomes word `r` of `w`.
    fn transpose_words(self, rows: [&[u8; 16]; 4]) -> [[u8; 16]; 4];
    /// Puts the bytes of four rows side by side: byte `4 r + t` of quarter `q` of row `i` becomes byte
    /// `i` of word `t` of quarter `q` of `r`.
    fn interleave(self, rows: [Self::Whole; 4]) -> [Self::Whole; 4];
    /// The low four bits of every byte, and the high ones.
    fn nibbles(self, bytes: Self::Whole) -> [Self::Whole; 2];
    /// Word `q` in every word of quarter `q`.
    fn spread_words(self, words: &[u32; 4]) -> Self::Whole;
    /// Adds the products of every four bytes, larger than their numbers by [`Self::PANEL_BIAS`], with
    /// those of `x`, none of them -128, to their lane of `sums`.
    fn dot(self, sums: Self::Whole, bytes: Self::Whole, x: Self::Whole) -> Self::Whole;
    /// The same of bytes up to 15 as they are.
    fn dot_nibbles(self, sums: Self::Whole, nibbles: Self::Whole, x: Self::Whole) -> Self::Whole;
    /// The bits of magnitudes, which are ordered as these are; those of NaNs come last.
    fn magnitudes(self, lanes: Self::Lanes) -> Self::Whole;
    /// The larger of `a` and `b`, neither of them negative.
    fn larger_whole(self, a: Self::Whole, b: Self::Whole) -> Self::Whole;
    /// `a + b`.
    fn add_whole(self, a: Self::Whole, b: Self::Whole) -> Self::Whole;
    /// The whole numbers nearest to `values * inverses`, ties to even, at most 127; 0 where the inverse
    /// is.
    fn round_lanes(self, values: Self::Lanes, inverses: Self::Lanes) -> Self::Whole;
    /// Byte `i` of every word is the lowest one of that word of `i`.
    fn join_bytes(self, four: [Self::Whole; 4]) -> Self::Whole;
    /// The lowest bytes of all words.
    fn narrow(self, whole: Self::Whole) -> [u8; 16];
    /// Four numbers in every quarter.
    fn repeat(self, values: &[f32; 4]) -> Self::Lanes;
    /// Whole numbers below 2^24 as numbers.
    fn lanes_of(self, whole: Self::Whole) -> Self::Lanes;

    /// Adds the upper half of the lanes to the lower half until one is left.
    fn sum_lanes(self, lanes: Self::Lanes) -> f32;
}

/// What makes the weights of some blocks of [`Format::Q4K`](powerinfer_tensor::Format::Q4K) out of their nibbles.
#[derive(Clone, Copy)]
pub(crate) struct KScales<'a> {
    /// `d` and `dmin` of all super-blocks that the blocks are of.
    supers: &'a [[f16; 2]],
    /// Scale and minimum, one pair a block.
    factors: &'a [[u8; 2]],
    /// Blocks of the first super-block that come before the first block.
    skipped: usize,
}

impl<'a> KScales<'a> {
    /// Those of all blocks of a row.
    #[inline(always)]
    fn of_row(supers: &'a [[f16; 2]], factors: &'a [[u8; 2]]) -> Self {
        Self {
            supers,
            factors,
            skipped: 0,
        }
    }

    /// Those of the blocks `first..first + count`.
    #[inline(always)]
    fn part(self, first: usize, count: usize) -> Self {
        let start = self.skipped + first;
        let supers = start / SUPER_BLOCK..(start + count).div_ceil(SUPER_BLOCK);
        Self {
            supers: &self.supers[supers],
            factors: &self.factors[first..first + count],
            skipped: start % SUPER_BLOCK,
        }
    }

    /// Scale and minimum of block `block`, as the specification has them.
    #[inline(always)]
    fn one(self, block: usize) -> [f32; 2] {
        let [d, dmin] = self.supers[(self.skipped + block) / SUPER_BLOCK];
        let [scale, minimum] = self.factors[block];
        [
            d.to_f32() * f32::from(scale),
            dmin.to_f32() * f32::from(minimum),
        ]
    }

    /// Asks for its memory.
    #[inline(always)]
    fn prefetch<S: Simd>(self, simd: S) {
        simd.prefetch(self.supers);
        simd.prefetch(self.factors);
    }
}

/// `values` followed by zeros.
#[inline(always)]
fn padded<T: Copy + Default>(values: &[T]) -> [T; BLOCK] {
    let mut block = [T::default(); BLOCK];
    block[..values.len()].copy_from_slice(values);
    block
}
