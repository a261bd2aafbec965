//! Blocks of 32 columns.

use std::arch::x86_64::*;

use half::{bf16, f16};
use powerinfer_tensor::BLOCK;

use super::{Avx512, avx2};
use crate::cpu::simd::BlockOps;

impl<const VNNI: bool> Avx512<VNNI> {
    /// Looks up 32 nibbles in a table of 16 weights.
    #[inline(always)]
    fn dequantise_nibbles(self, quants: &[u8; BLOCK / 2], weights: __m512) -> [__m512; 2] {
        // SAFETY: the token proves the features; the load takes the 16 bytes of the array.
        unsafe {
            // The permutation ignores the bits above the index.
            let low = _mm512_cvtepu8_epi32(_mm_loadu_si128(quants.as_ptr().cast()));
            let high = _mm512_srli_epi32(low, 4);
            [
                _mm512_permutexvar_ps(low, weights),
                _mm512_permutexvar_ps(high, weights),
            ]
        }
    }
}

// SAFETY of the `unsafe` blocks below: an `Avx512` exists only where `detect` found AVX-512 F, BW, DQ, VL, and VNNI if `VNNI`, and unaligned loads and
// stores stay within the references that are passed to them.
impl<const VNNI: bool> BlockOps for Avx512<VNNI> {
    type Vector = __m512;
    type Block = [__m512; 2];
    const LANES: usize = 16;
    const TILE_ROWS: usize = 6;

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
    fn load_parts(self, [a, b, c, d]: [&[f32; 8]; 4]) -> [__m512; 2] {
        let two = |low: &[f32; 8], high: &[f32; 8]| {
            // SAFETY: the token proves the features; a load takes the 8 values of a part.
            unsafe {
                let low = _mm512_castps256_ps512(_mm256_loadu_ps(low.as_ptr()));
                _mm512_insertf32x8::<1>(low, _mm256_loadu_ps(high.as_ptr()))
            }
        };
        [two(a, b), two(c, d)]
    }

    #[inline(always)]
    fn load_f16_parts(self, [a, b, c, d]: [&[f16; 8]; 4]) -> [__m512; 2] {
        let two = |low: &[f16; 8], high: &[f16; 8]| {
            // SAFETY: the token proves the features; a load takes the 8 values of a part.
            unsafe {
                let low = _mm_loadu_si128(low.as_ptr().cast());
                let high = _mm_loadu_si128(high.as_ptr().cast());
                _mm512_cvtph_ps(_mm256_set_m128i(high, low))
            }
        };
        [two(a, b), two(c, d)]
    }

    #[inline(always)]
    fn load_q8_parts(self, [a, b, c, d]: [&[i8; 8]; 4]) -> [__m512; 2] {
        let two = |low: &[i8; 8], high: &[i8; 8]| {
            // SAFETY: the token proves the features; a load takes the 8 bytes of a part.
            unsafe {
                let low = _mm_loadl_epi64(low.as_ptr().cast());
                let high = _mm_loadl_epi64(high.as_ptr().cast());
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_unpacklo_epi64(low, high)))
            }
        };
        [two(a, b), two(c, d)]
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
    fn load_q4_scaled(self, quants: &[u8; BLOCK / 2], scale: f32) -> [__m512; 2] {
        // SAFETY: the token proves the features.
        unsafe {
            let nibbles = _mm512_setr_ps(
                -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0,
                7.0,
            );
            self.dequantise_nibbles(quants, _mm512_mul_ps(nibbles, _mm512_set1_ps(scale)))
        }
    }

    #[inline(always)]
    fn load_q4_k(self, quants: &[u8; BLOCK / 2], scale: f32, minimum: f32) -> [__m512; 2] {
        // SAFETY: the token proves the features.
        unsafe {
            let nibbles = _mm512_setr_ps(
                0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0,
                15.0,
            );
            let (scale, minimum) = (_mm512_set1_ps(scale), _mm512_set1_ps(minimum));
            self.dequantise_nibbles(quants, _mm512_fmsub_ps(nibbles, scale, minimum))
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
    fn sum_four(self, blocks: [[__m512; 2]; 4]) -> [f32; 4] {
        // SAFETY: the token proves the features.
        unsafe {
            let mut sixteen = [_mm512_setzero_ps(); 4];
            for (sixteen, block) in sixteen.iter_mut().zip(blocks) {
                *sixteen = _mm512_add_ps(block[0], block[1]);
            }
            // Eight partial sums of a block in each half, then four in each quarter.
            let mut eights = [_mm512_setzero_ps(); 2];
            for (eights, pair) in eights.iter_mut().zip(sixteen.as_chunks::<2>().0) {
                let low = _mm512_shuffle_f32x4::<0x44>(pair[0], pair[1]);
                let high = _mm512_shuffle_f32x4::<0xee>(pair[0], pair[1]);
                *eights = _mm512_add_ps(low, high);
            }
            let low = _mm512_shuffle_f32x4::<0x88>(eights[0], eights[1]);
            let high = _mm512_shuffle_f32x4::<0xdd>(eights[0], eights[1]);
            let fours = _mm512_add_ps(low, high);
            let twos = _mm512_add_ps(fours, _mm512_permute_ps::<0x4e>(fours));
            let ones = _mm512_add_ps(twos, _mm512_permute_ps::<0xb1>(twos));
            let sums = _mm512_maskz_compress_ps(0x1111, ones);
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), _mm512_castps512_ps128(sums));
            out
        }
    }

    #[inline(always)]
    fn splat_vector(self, value: f32) -> __m512 {
        // SAFETY: the token proves the features.
        unsafe { _mm512_set1_ps(value) }
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
