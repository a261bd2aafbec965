//! Dense and sparse kernels over slices: GEMV, GEMM, axpy and attention on float and quantised weights, on the CPU and, in
//! [`cuda`], on the GPU.
//!
//! An [`Isa`] proves that the processor has an instruction set, and has the kernels as methods. Weights are a
//! [`Matrix`](powerinfer_tensor::Matrix); inputs are `f32`, or for quantised weights [`QuantisedActivations`] in int8.
//!
//! The scalar code defines the order of operations. With `f32`, a dot product is 32 partial sums, one per column of a
//! block, each a chain of fused multiply-adds over the blocks, then their tree sum; with int8, it is an integer per block,
//! scaled into 16 partial sums, then their tree sum. All instruction sets and kernels keep this order, so that results
//! depend neither on them nor on how threads share the rows. Threads are up to the caller.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.
mod activations;
mod attention;
mod cpu;
pub mod cuda;
mod error;
mod isa;
mod operations;

pub use activations::{PackedActivations, QuantisedActivations, QuantisedVector};
pub use cpu::{exp2, kernel_scratch_bytes};
pub use error::KernelError;
pub use isa::Isa;
pub use operations::{AXPY_GROUP_ROWS, Arithmetic, Norm, relative_axpy_cost, relative_gemm_cost};
