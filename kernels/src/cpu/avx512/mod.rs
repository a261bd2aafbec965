//! AVX-512: a block is two registers of 16 lanes.

mod blocks;
mod integers;
mod spans;

use super::{Operation, Simd, avx2};

/// Proof that this processor has AVX-512 F, BW, DQ and VL, and VNNI if `VNNI`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Avx512<const VNNI: bool>(());

impl<const VNNI: bool> Avx512<VNNI> {
    /// Detects the features at run time.
    pub(crate) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("popcnt")
            && (!VNNI || is_x86_feature_detected!("avx512vnni"));
        found.then_some(Avx512(()))
    }
}

impl<const VNNI: bool> Simd for Avx512<VNNI> {
    #[inline]
    fn run<O: Operation>(self, operation: O) -> O::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,popcnt")]
        fn with_features<S: Simd, O: Operation>(simd: S, operation: O) -> O::Output {
            operation.run_simd(simd)
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,popcnt")]
        #[target_feature(enable = "avx512vnni")]
        fn with_vnni<S: Simd, O: Operation>(simd: S, operation: O) -> O::Output {
            operation.run_simd(simd)
        }
        // SAFETY: the token proves the features.
        unsafe {
            if VNNI {
                with_vnni(self, operation)
            } else {
                with_features(self, operation)
            }
        }
    }

    #[inline(always)]
    fn prefetch<T>(self, values: &[T]) {
        avx2::prefetch(values);
    }

    #[inline(always)]
    fn prefetch_near<T>(self, values: &[T]) {
        avx2::prefetch_near(values);
    }

    #[inline(always)]
    fn prefetch_ahead<T>(self, values: &[T]) {
        avx2::prefetch_ahead(values);
    }
}
