//! NEON: a block is eight registers of 4 lanes.

mod blocks;
mod integers;
mod spans;

use powerinfer_tensor::BLOCK;

use super::{Operation, Simd};

/// Proof that this processor has NEON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Neon(());

impl Neon {
    /// Detects the features at run time.
    pub(crate) fn detect() -> Option<Neon> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Neon(()))
    }
}

/// Registers of a block.
const REGISTERS: usize = BLOCK / 4;

impl Simd for Neon {
    #[inline]
    fn run<O: Operation>(self, operation: O) -> O::Output {
        #[target_feature(enable = "neon")]
        fn with_features<O: Operation>(simd: Neon, operation: O) -> O::Output {
            operation.run_simd(simd)
        }
        // SAFETY: the token proves the feature.
        unsafe { with_features(self, operation) }
    }

    #[inline(always)]
    fn prefetch<T>(self, _: &[T]) {
        // Stable Rust has no intrinsic for it.
    }

    #[inline(always)]
    fn prefetch_near<T>(self, _: &[T]) {}

    #[inline(always)]
    fn prefetch_ahead<T>(self, _: &[T]) {}
}
