//! AVX-512: a block is two registers of 16 lanes.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Operation, SPAN, Simd, avx2};
use crate::format::BLOCK;

/// Proof that this processor has AVX-512 F, BW, DQ and VL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// Asks the processor.
    pub(crate) fn detect() -> Option<Avx512> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("popcnt");
        found.then_some(Avx512(()))
    }
}

// The `unsafe` blocks below rest on two facts: an `Avx512` exists only where `detect` found every
// feature that the instructions need, and unaligned loads and stores need no more than the
// memory that the references given to them span.
impl Simd for Avx512 {
    type Vector = __m512;
    type Block = [__m512; 2];
    const LANES: usize = 16;
    const DOT_ROWS: usize = 4;
    const TILE_ROWS: usize = 6;

    #[inline]
    fn run<O: Operation>(self, operation: O) -> O::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,popcnt")]
        fn with_features<O: Operation>(simd: Avx512, operation: O) -> O::Output {
            operation.translate(simd)
        }
        // SAFETY: the token proves the features.
        unsafe { with_features(self, operation) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> [__m512; 2] {
        // SAFETY: the token proves the features.
        unsafe { [_mm512_set1_ps(value); 2] }
    }

    #[inline(always)]
    fn load(self, values: &[f32; BLOCK]) -> [__m512; 2] {
        let start = values.as_ptr();
        // SAFETY: the token proves the features; both halves lie within the array.
        unsafe { [_mm512_loadu_ps(start), _mm512_loadu_ps(start.add(16))] }
    }

    #[inline(always)]
    fn load_bf16(self, values: &[bf16; BLOCK]) -> [__m512; 2] {
        let start = values.as_ptr();
        // SAFETY: the token proves the features; both halves lie within the array.
        unsafe {
            // A bf16 is the upper half of an f32.
            let low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(start.cast()));
            let high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(start.add(16).cast()));
            [
                _mm512_castsi512_ps(_mm512_slli_epi32(low, 16)),
                _mm512_castsi512_ps(_mm512_slli_epi32(high, 16)),
            ]
        }
    }

    #[inline(always)]
    fn load_f16(self, values: &[f16; BLOCK]) -> [__m512; 2] {
        let start = values.as_ptr();
        // SAFETY: the token proves the features; both halves lie within the array.
        unsafe {
            [
                _mm512_cvtph_ps(_mm256_loadu_si256(start.cast())),
                _mm512_cvtph_ps(_mm256_loadu_si256(start.add(16).cast())),
            ]
        }
    }

    #[inline(always)]
    fn load_q8(self, quants: &[i8; BLOCK]) -> [__m512; 2] {
        let start = quants.as_ptr();
        // SAFETY: the token proves the features; both halves lie within the array.
        unsafe {
            let low = _mm512_cvtepi8_epi32(_mm_loadu_si128(start.cast()));
            let high = _mm512_cvtepi8_epi32(_mm_loadu_si128(start.add(16).cast()));
            [_mm512_cvtepi32_ps(low), _mm512_cvtepi32_ps(high)]
        }
    }

    #[inline(always)]
    fn load_q4(self, quants: &[u8; BLOCK / 2]) -> [__m512; 2] {
        self.load_q4_scaled(quants, 1.0)
    }

    #[inline(always)]
    fn load_q4_scaled(self, quants: &[u8; BLOCK / 2], scale: f32) -> [__m512; 2] {
        // SAFETY: the token proves the features; the load takes the 16 bytes of the array.
        unsafe {
            // Sixteen nibbles, sixteen lanes: a permutation looks weights up, and takes no notice
            // of the bits above an index.
            let nibbles = _mm512_setr_ps(
                -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0,
                7.0,
            );
            let weights = _mm512_mul_ps(nibbles, _mm512_set1_ps(scale));
            let low = _mm512_cvtepu8_epi32(_mm_loadu_si128(quants.as_ptr().cast()));
            let high = _mm512_srli_epi32(low, 4);
            [
                _mm512_permutexvar_ps(low, weights),
                _mm512_permutexvar_ps(high, weights),
            ]
        }
    }

    #[inline(always)]
    fn store(self, block: [__m512; 2], out: &mut [f32; BLOCK]) {
        let start = out.as_mut_ptr();
        // SAFETY: the token proves the features; both halves lie within the array.
        unsafe {
            _mm512_storeu_ps(start, block[0]);
            _mm512_storeu_ps(start.add(16), block[1]);
        }
    }

    #[inline(always)]
    fn multiply(self, a: [__m512; 2], b: [__m512; 2]) -> [__m512; 2] {
        // SAFETY: the token proves the features.
        unsafe { [_mm512_mul_ps(a[0], b[0]), _mm512_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn multiply_add(self, a: [__m512; 2], b: [__m512; 2], c: [__m512; 2]) -> [__m512; 2] {
        // SAFETY: the token proves the features.
        unsafe {
            [
                _mm512_fmadd_ps(a[0], b[0], c[0]),
                _mm512_fmadd_ps(a[1], b[1], c[1]),
            ]
        }
    }

    #[inline(always)]
    fn maximum(self, a: [__m512; 2], b: [__m512; 2]) -> [__m512; 2] {
        // SAFETY: the token proves the features.
        unsafe { [_mm512_max_ps(a[0], b[0]), _mm512_max_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn add_exponent(self, mut value: [__m512; 2], power: [__m512; 2]) -> [__m512; 2] {
        for (value, power) in value.iter_mut().zip(power) {
            // SAFETY: the token proves the features.
            *value = unsafe {
                let power = _mm512_slli_epi32::<23>(_mm512_castps_si512(power));
                _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(*value), power))
            };
        }
        value
    }

    #[inline(always)]
    fn zero_below(self, x: [__m512; 2], bound: f32, mut value: [__m512; 2]) -> [__m512; 2] {
        for (value, x) in value.iter_mut().zip(x) {
            // SAFETY: the token proves the features.
            *value = unsafe {
                let is_kept = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(bound));
                _mm512_maskz_mov_ps(is_kept, *value)
            };
        }
        value
    }

    #[inline(always)]
    fn sum(self, block: [__m512; 2]) -> f32 {
        // SAFETY: the token proves the features.
        unsafe {
            let sixteen = _mm512_add_ps(block[0], block[1]);
            let eight = _mm256_add_ps(
                _mm512_castps512_ps256(sixteen),
                _mm512_extractf32x8_ps(sixteen, 1),
            );
            avx2::sum_of_eight(eight)
        }
    }

    #[inline(always)]
    fn widen(self, scales: &[f16], out: &mut [f32; SPAN]) {
        let lanes = ((1u32 << scales.len()) - 1) as u16;
        // SAFETY: the token proves the features; the load takes as many lanes as the slice is
        // long, and the store fills the array.
        unsafe {
            let half = _mm256_maskz_loadu_epi16(lanes, scales.as_ptr().cast());
            _mm512_storeu_ps(out.as_mut_ptr(), _mm512_cvtph_ps(half));
        }
    }

    #[inline(always)]
    fn load_vector(self, values: &[f32]) -> __m512 {
        let values = &values[..Self::LANES];
        // SAFETY: the token proves the features; the slice is 16 long.
        unsafe { _mm512_loadu_ps(values.as_ptr()) }
    }

    #[inline(always)]
    fn store_vector(self, vector: __m512, out: &mut [f32]) {
        let out = &mut out[..Self::LANES];
        // SAFETY: the token proves the features; the slice is 16 long.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), vector) }
    }

    #[inline(always)]
    fn multiply_add_vector(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the token proves the features.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
}
