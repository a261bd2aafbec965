//! CPU kernels: a scalar specification (`scalar`), and one generic implementation on blocks of 32 lanes.
//!
//! The generic kernels are written against [`Simd`], which `avx2`, `avx512` and `neon` implement. Everything generic is
//! `#[inline(always)]`, so that it is compiled inside [`Simd::run`], the one function per instruction set with its target
//! features. Closures cannot be marked so, and intrinsics in one that is not inlined become calls: if intrinsics are
//! used, loops stand instead of `map`.
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
mod norm;
mod quantise;
mod reader;
mod rows;
mod scalar;
mod simd;
mod sum;
mod unit_sums;

pub(crate) use crate::activations::{SPAN, SPAN_COLUMNS};
pub(crate) use agreements::SignAgreements;
pub use attention::exp2;
pub(crate) use attention::{Exp2MinusMax, Prefetch, PrefetchNextPosition, Scores, WeightedValues};
pub(crate) use axpy::{Axpy, AxpyRows, AxpyRowsBatch};
pub(crate) use dot::{Dot, Gemv};
pub(crate) use gemm::{Gemm, Pack};
pub(crate) use integer_axpy::{IntegerAxpy, IntegerAxpyBatch};
pub(crate) use integer_dot::IntegerGemv;
pub(crate) use integer_gemm::IntegerGemm;
pub(crate) use norm::Normalise;
pub(crate) use quantise::Quantise;
pub(crate) use simd::Simd;
pub(crate) use sum::{SumRows, SumWords};
pub(crate) use unit_sums::UnitSums;

use half::f16;

use powerinfer_tensor::{BLOCK, SUPER_BLOCK};

/// Largest scratch memory of a GEMM or a batched axpy on a matrix of `columns` columns, in bytes per thread; without the vectors
/// that [`Isa::gemm`](crate::Isa::gemm) packs.
pub const fn kernel_scratch_bytes(columns: usize) -> usize {
    let (float, integer, axpy) = (
        gemm::BYTES,
        integer_gemm::bytes(columns),
        integer_axpy::bytes(columns),
    );
    let gemm = if float > integer { float } else { integer };
    if gemm > axpy { gemm } else { axpy }
}

/// Prefetch distance in rows. A distance of one row is a third slower if the weights are mapped in 4 KiB pages.
const PREFETCH_ROWS: usize = 4;

/// A kernel with its arguments.
pub(crate) trait Operation {
    /// Result of the kernel.
    type Output;

    /// Runs the scalar specification.
    fn run_scalar(self) -> Self::Output;

    /// Runs the generic implementation, which is `#[inline(always)]`.
    fn run_simd<S: Simd>(self, simd: S) -> Self::Output;
}

/// Scales and minima of consecutive [`Format::Q4K`](powerinfer_tensor::Format::Q4K) blocks.
#[derive(Clone, Copy)]
pub(crate) struct KScales<'a> {
    /// `d` and `dmin` of the super-blocks that contain the blocks.
    supers: &'a [[f16; 2]],
    /// 6-bit scale and minimum of each block.
    factors: &'a [[u8; 2]],
    /// Index of the first block in its super-block.
    skipped: usize,
}

impl<'a> KScales<'a> {
    /// Scales and minima of a row.
    #[inline(always)]
    fn of_row(supers: &'a [[f16; 2]], factors: &'a [[u8; 2]]) -> Self {
        Self {
            supers,
            factors,
            skipped: 0,
        }
    }

    /// Scales and minima of the blocks `first..first + count`.
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

    /// Scale and minimum of block `block`, as in the scalar specification.
    #[inline(always)]
    fn get(self, block: usize) -> [f32; 2] {
        let [d, dmin] = self.supers[(self.skipped + block) / SUPER_BLOCK];
        let [scale, minimum] = self.factors[block];
        [
            d.to_f32() * f32::from(scale),
            dmin.to_f32() * f32::from(minimum),
        ]
    }

    /// Prefetches the scales.
    #[inline(always)]
    fn prefetch<S: Simd>(self, simd: S) {
        simd.prefetch_near(self.supers);
        simd.prefetch_near(self.factors);
    }
}

/// `values`, padded with zeros to a block.
#[inline(always)]
fn padded<T: Copy + Default>(values: &[T]) -> [T; BLOCK] {
    let mut block = [T::default(); BLOCK];
    block[..values.len()].copy_from_slice(values);
    block
}
