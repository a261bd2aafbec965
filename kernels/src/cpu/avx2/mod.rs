//! AVX2 with FMA: a block is four registers of 8 lanes.

mod blocks;
mod integers;
mod spans;

use std::arch::x86_64::*;

use powerinfer_tensor::BLOCK;

use super::{Operation, Simd};

/// Proof that this processor has AVX2, FMA, F16C and POPCNT.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// Detects the features at run time.
    pub(crate) fn detect() -> Option<Avx2> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("popcnt");
        found.then_some(Avx2(()))
    }
}

/// Registers of a block.
const REGISTERS: usize = BLOCK / 8;

impl Simd for Avx2 {
    #[inline]
    fn run<O: Operation>(self, operation: O) -> O::Output {
        #[target_feature(enable = "avx2,fma,f16c,popcnt")]
        fn with_features<O: Operation>(simd: Avx2, operation: O) -> O::Output {
            operation.run_simd(simd)
        }
        // SAFETY: the token proves the features.
        unsafe { with_features(self, operation) }
    }

    #[inline(always)]
    fn prefetch<T>(self, values: &[T]) {
        prefetch(values);
    }

    #[inline(always)]
    fn prefetch_near<T>(self, values: &[T]) {
        prefetch_near(values);
    }

    #[inline(always)]
    fn prefetch_ahead<T>(self, values: &[T]) {
        prefetch_ahead(values);
    }
}

/// Transposes a 4 × 4 matrix of words, with SSE2.
#[inline(always)]
pub(super) fn transpose_words(rows: [&[u8; 16]; 4]) -> [[u8; 16]; 4] {
    // SAFETY: the loads take the 16 bytes of the arrays.
    unsafe {
        let [a, b, c, d] = rows.map(|row| _mm_loadu_si128(row.as_ptr().cast()));
        let (low_ab, low_cd) = (_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d));
        let (high_ab, high_cd) = (_mm_unpackhi_epi32(a, b), _mm_unpackhi_epi32(c, d));
        bytemuck::cast([
            _mm_unpacklo_epi64(low_ab, low_cd),
            _mm_unpackhi_epi64(low_ab, low_cd),
            _mm_unpacklo_epi64(high_ab, high_cd),
            _mm_unpackhi_epi64(high_ab, high_cd),
        ])
    }
}

/// Distance of the prefetch in a stream, in bytes: a page, where hardware prefetchers stop.
const PREFETCH_BYTES: usize = 4096;
/// Bytes of a cache line.
const LINE: usize = 64;

/// Prefetches the cache lines of `values` into L2, which tracks more outstanding lines than L1.
#[inline(always)]
pub(super) fn prefetch<T>(values: &[T]) {
    prefetch_lines::<T, _MM_HINT_T1>(values);
}

/// Prefetches the cache lines of `values` into L1 alone.
#[inline(always)]
pub(super) fn prefetch_near<T>(values: &[T]) {
    prefetch_lines::<T, _MM_HINT_NTA>(values);
}

#[inline(always)]
fn prefetch_lines<T, const HINT: i32>(values: &[T]) {
    let (first, size) = (values.as_ptr().cast::<i8>(), size_of_val(values));
    for offset in (0..size).step_by(LINE) {
        prefetch_line::<HINT>(first.wrapping_add(offset));
    }
    // Unaligned values span one more line. Of others the last line is prefetched again, which is a twentieth faster than not to:
    // processors drop prefetches when too many lines are outstanding.
    prefetch_line::<HINT>(first.wrapping_add(size.saturating_sub(1)));
}

/// Prefetches the cache lines [`PREFETCH_BYTES`] after those of `values`.
#[inline(always)]
pub(super) fn prefetch_ahead<T>(values: &[T]) {
    let first = values.as_ptr().cast::<i8>().wrapping_add(PREFETCH_BYTES);
    for offset in (0..size_of_val(values)).step_by(LINE) {
        prefetch_line::<_MM_HINT_T1>(first.wrapping_add(offset));
    }
}

/// Prefetches one cache line.
#[inline(always)]
fn prefetch_line<const HINT: i32>(address: *const i8) {
    // SAFETY: part of every x86-64; a prefetch of any address is harmless.
    unsafe { _mm_prefetch::<HINT>(address) };
}

/// The last three steps of a tree sum.
///
/// # Safety
///
/// The processor has AVX.
#[inline(always)]
pub(super) unsafe fn sum_of_eight(eight: __m256) -> f32 {
    // SAFETY: the caller guarantees the features.
    unsafe {
        let four = _mm_add_ps(
            _mm256_castps256_ps128(eight),
            _mm256_extractf128_ps(eight, 1),
        );
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
}
