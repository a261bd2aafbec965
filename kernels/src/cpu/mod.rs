//! The kernels on the CPU: the scalar specification, one generic translation of it into blocks
//! of 32 lanes, and the instruction sets that say what a block is.
//!
//! `dot`, `axpy` and `gemm` are written against [`Simd`]; `avx2`, `avx512` and `neon` implement
//! it. Everything generic is `#[inline(always)]`, so that it is compiled inside [`Simd::run`],
//! the one function per instruction set that has the target features.
#![allow(
    unsafe_code,
    reason = "vector instructions exist only behind a processor check that the compiler cannot see"
)]

mod agreements;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
mod axpy;
mod dot;
mod gemm;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
mod rows;
mod scalar;
mod sum;

pub(crate) use agreements::Agreements;
pub(crate) use axpy::{Axpy, AxpyRows};
pub(crate) use dot::{Dot, Gemv};
pub use gemm::GEMM_BYTES;
pub(crate) use gemm::Gemm;
pub(crate) use sum::Sum;

use half::{bf16, f16};

use crate::format::BLOCK;

/// Blocks whose scales are widened to `f32` at once.
const SPAN: usize = 16;

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
    allow(
        dead_code,
        reason = "without vector instructions only the scalar code runs"
    )
)]
pub(crate) trait Simd: Copy {
    /// One register.
    type Vector: Copy;
    /// 32 lanes, in as many registers as that takes.
    type Block: Copy;
    /// Lanes of a register.
    const LANES: usize;
    /// Rows that a matrix-vector product reads at a time, 2 or 4: what the registers hold.
    const DOT_ROWS: usize;
    /// Rows of a matrix-matrix tile, 3 or 6: what the registers hold with four tokens.
    const TILE_ROWS: usize;

    /// Runs `operation` where the compiler may use this instruction set.
    fn run<O: Operation>(self, operation: O) -> O::Output;

    /// Every lane `value`.
    fn splat(self, value: f32) -> Self::Block;
    /// Reads 32 numbers.
    fn load(self, values: &[f32; BLOCK]) -> Self::Block;
    /// Reads and widens 32 numbers.
    fn load_bf16(self, values: &[bf16; BLOCK]) -> Self::Block;
    /// Reads and widens 32 signed bytes.
    fn load_q8(self, quants: &[i8; BLOCK]) -> Self::Block;
    /// Reads and widens 32 biased nibbles: the low ones of all bytes, then the high ones.
    fn load_q4(self, quants: &[u8; BLOCK / 2]) -> Self::Block;
    /// `load_q4` times `scale`.
    fn load_q4_scaled(self, quants: &[u8; BLOCK / 2], scale: f32) -> Self::Block;
    /// Writes 32 numbers.
    fn store(self, block: Self::Block, out: &mut [f32; BLOCK]);
    /// `a * b`.
    fn multiply(self, a: Self::Block, b: Self::Block) -> Self::Block;
    /// `a * b + c`, rounded once.
    fn multiply_add(self, a: Self::Block, b: Self::Block, c: Self::Block) -> Self::Block;
    /// Adds the upper half of the lanes to the lower half until one is left.
    fn sum(self, block: Self::Block) -> f32;

    /// Widens at most [`SPAN`] scales into the front of `out`; the rest of `out` is undefined.
    fn widen(self, scales: &[f16], out: &mut [f32; SPAN]);

    /// Reads a register from the front of `values`.
    fn load_vector(self, values: &[f32]) -> Self::Vector;
    /// Writes a register to the front of `out`.
    fn store_vector(self, vector: Self::Vector, out: &mut [f32]);
    /// `a * b + c`, rounded once.
    fn multiply_add_vector(self, a: Self::Vector, b: Self::Vector, c: Self::Vector)
    -> Self::Vector;
}

/// `values` followed by zeros.
#[inline(always)]
fn padded<T: Copy + Default>(values: &[T]) -> [T; BLOCK] {
    let mut block = [T::default(); BLOCK];
    block[..values.len()].copy_from_slice(values);
    block
}
