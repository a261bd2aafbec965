//! Sparse and dense kernels over slices: matrix-vector products, row sums and small
//! matrix-matrix products on plain and quantised weights.
//!
//! A [`Matrix`] borrows row-major weights in one of the [`Format`]s; an [`Isa`] is the proof that
//! this processor has an instruction set, and carries the kernels as methods. What weights are
//! multiplied with is `f32`, weights being dequantised in registers, or for quantised weights
//! [`QuantisedActivations`]: bytes that share a scale by 32.
//!
//! Every product of a row with a vector is defined once, by the scalar code. With `f32` it is 32
//! running sums, one per column of a block of 32, each a chain of fused multiply-adds from the
//! first block to the last, added up by halving; with bytes it is a whole number per block, times
//! both scales, in 16 running sums of blocks. All instruction sets keep this order, so results do
//! not depend on the instruction set, on the kernel that computed a row, or on how threads share
//! the rows.
//! Threads themselves are the caller's business.

mod activations;
mod attention;
mod cpu;
pub mod cuda;
pub mod environment;
mod error;
mod isa;
mod operations;

pub use activations::{QuantisedActivations, QuantisedVector};
pub use cpu::{exp2, kernel_scratch_bytes};
pub use error::KernelError;
pub use isa::Isa;
pub use operations::{AXPY_GROUP_ROWS, Arithmetic, relative_axpy_cost, relative_gemm_cost};
