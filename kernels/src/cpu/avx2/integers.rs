//! Integer operations on 64 bytes, two registers.

use std::arch::x86_64::*;

use super::{Avx2, spans::sum_pairs, transpose_words};
use crate::cpu::simd::IntegerOps;

// SAFETY of the `unsafe` blocks below: an `Avx2` exists only where `detect` found AVX2, FMA, F16C and POPCNT, and unaligned loads and
// stores stay within the references that are passed to them.
impl IntegerOps for Avx2 {
    type Integers = [__m256i; 2];
    const PANEL_BIAS: i32 = 0;

    #[inline(always)]
    fn splat_i32(self, value: i32) -> [__m256i; 2] {
        // SAFETY: the token proves the features.
        unsafe { [_mm256_set1_epi32(value); 2] }
    }

    #[inline(always)]
    fn load_bytes(self, bytes: &[u8; 64]) -> [__m256i; 2] {
        let (halves, _) = bytes.as_chunks::<32>();
        // SAFETY: the token proves the features; the loads take 32 bytes each.
        unsafe {
            [
                _mm256_loadu_si256(halves[0].as_ptr().cast()),
                _mm256_loadu_si256(halves[1].as_ptr().cast()),
            ]
        }
    }

    #[inline(always)]
    fn store_bytes(self, whole: [__m256i; 2], out: &mut [u8; 64]) {
        for (half, out) in whole.into_iter().zip(out.as_chunks_mut::<32>().0) {
            // SAFETY: the token proves the features; the store fills the 32 bytes.
            unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), half) }
        }
    }

    #[inline(always)]
    fn transpose_words(self, rows: [&[u8; 16]; 4]) -> [[u8; 16]; 4] {
        transpose_words(rows)
    }

    #[inline(always)]
    fn interleave_bytes(self, rows: [[__m256i; 2]; 4]) -> [[__m256i; 2]; 4] {
        let mut words = rows;
        for half in 0..2 {
            let [a, b, c, d] = [rows[0][half], rows[1][half], rows[2][half], rows[3][half]];
            // SAFETY: the token proves the features.
            let of_half = unsafe {
                let (ab, cd) = (_mm256_unpacklo_epi8(a, b), _mm256_unpacklo_epi8(c, d));
                let (ab_high, cd_high) = (_mm256_unpackhi_epi8(a, b), _mm256_unpackhi_epi8(c, d));
                [
                    _mm256_unpacklo_epi16(ab, cd),
                    _mm256_unpackhi_epi16(ab, cd),
                    _mm256_unpacklo_epi16(ab_high, cd_high),
                    _mm256_unpackhi_epi16(ab_high, cd_high),
                ]
            };
            for (words, of_half) in words.iter_mut().zip(of_half) {
                words[half] = of_half;
            }
        }
        words
    }

    #[inline(always)]
    fn nibbles(self, bytes: [__m256i; 2]) -> [[__m256i; 2]; 2] {
        // SAFETY: the token proves the features.
        unsafe {
            let mask = _mm256_set1_epi8(15);
            let mut nibbles = [bytes; 2];
            for half in 0..2 {
                nibbles[0][half] = _mm256_and_si256(bytes[half], mask);
                nibbles[1][half] = _mm256_and_si256(_mm256_srli_epi16(bytes[half], 4), mask);
            }
            nibbles
        }
    }

    #[inline(always)]
    fn broadcast_words(self, words: &[u32; 4]) -> [__m256i; 2] {
        // SAFETY: the token proves the features; the load takes the 4 words.
        unsafe {
            let words = _mm256_broadcastsi128_si256(_mm_loadu_si128(words.as_ptr().cast()));
            let first = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
            let second = _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3);
            [
                _mm256_permutevar8x32_epi32(words, first),
                _mm256_permutevar8x32_epi32(words, second),
            ]
        }
    }

    #[inline(always)]
    fn dot(self, mut sums: [__m256i; 2], bytes: [__m256i; 2], x: [__m256i; 2]) -> [__m256i; 2] {
        for (sums, (bytes, x)) in sums.iter_mut().zip(bytes.into_iter().zip(x)) {
            // SAFETY: the token proves the features.
            unsafe {
                // The signs move to x: unsigned times signed products fit into 16 bits in pairs.
                let pairs =
                    _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(x, bytes));
                *sums = _mm256_add_epi32(*sums, sum_pairs(pairs));
            }
        }
        sums
    }

    #[inline(always)]
    fn dot_unsigned(
        self,
        mut sums: [__m256i; 2],
        unsigned: [__m256i; 2],
        x: [__m256i; 2],
    ) -> [__m256i; 2] {
        for (sums, (unsigned, x)) in sums.iter_mut().zip(unsigned.into_iter().zip(x)) {
            // SAFETY: the token proves the features.
            unsafe {
                let pairs = _mm256_maddubs_epi16(unsigned, x);
                *sums = _mm256_add_epi32(*sums, sum_pairs(pairs));
            }
        }
        sums
    }

    #[inline(always)]
    fn dot_nibbles<const N: usize>(
        self,
        mut sums: [__m256i; 2],
        nibbles: [[__m256i; 2]; N],
        x: [[__m256i; 2]; N],
    ) -> [__m256i; 2] {
        // A pair of products is at most 15 · 2 · 128 in magnitude, so the sum of 8 pairs fits into 16 bits.
        const { assert!(N <= 8) };
        for (half, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the token proves the features.
            unsafe {
                let mut pairs = _mm256_setzero_si256();
                for index in 0..N {
                    let products = _mm256_maddubs_epi16(nibbles[index][half], x[index][half]);
                    pairs = _mm256_add_epi16(pairs, products);
                }
                *sums = _mm256_add_epi32(*sums, sum_pairs(pairs));
            }
        }
        sums
    }

    #[inline(always)]
    fn add_nibble_products<const N: usize>(
        self,
        nibbles: [&[u8; 64]; N],
        x: &[[[u8; 64]; 8]],
        totals: &mut [[u8; 64]],
    ) {
        // At most 8, as in `dot_nibbles`. One half at a time, because the registers hold only half of eight operands.
        const { assert!(N <= 8) };
        for half in 0..2 {
            let of_half = |bytes: &[u8; 64]| bytes.as_chunks::<32>().0[half].as_ptr().cast();
            // SAFETY: the token proves the features; loads and stores take the 32 bytes of a half.
            unsafe {
                let mut loaded = [_mm256_setzero_si256(); N];
                for (loaded, nibbles) in loaded.iter_mut().zip(nibbles) {
                    *loaded = _mm256_loadu_si256(of_half(nibbles));
                }
                for (x, total) in x.iter().zip(&mut *totals) {
                    let first = _mm256_loadu_si256(of_half(&x[0]));
                    let mut pairs = _mm256_maddubs_epi16(loaded[0], first);
                    for index in 1..N {
                        let x = _mm256_loadu_si256(of_half(&x[index]));
                        let products = _mm256_maddubs_epi16(loaded[index], x);
                        pairs = _mm256_add_epi16(pairs, products);
                    }
                    let sum = _mm256_loadu_si256(of_half(total));
                    let sum = _mm256_add_epi32(sum, sum_pairs(pairs));
                    let total = total.as_chunks_mut::<32>().0[half].as_mut_ptr();
                    _mm256_storeu_si256(total.cast(), sum);
                }
            }
        }
    }

    #[inline(always)]
    fn transpose_quarters(self, [a, b, c, d]: [[__m256i; 2]; 4]) -> [[__m256i; 2]; 4] {
        let mut transposed = [a, b, c, d];
        for half in 0..2 {
            // SAFETY: the token proves the features.
            unsafe {
                let (a, b, c, d) = (a[half], b[half], c[half], d[half]);
                transposed[2 * half] = [
                    _mm256_permute2x128_si256::<0x20>(a, b),
                    _mm256_permute2x128_si256::<0x20>(c, d),
                ];
                transposed[2 * half + 1] = [
                    _mm256_permute2x128_si256::<0x31>(a, b),
                    _mm256_permute2x128_si256::<0x31>(c, d),
                ];
            }
        }
        transposed
    }

    #[inline(always)]
    fn magnitude_bits(self, lanes: [__m256; 2]) -> [__m256i; 2] {
        let mut bits = self.splat_i32(0);
        for (bits, lanes) in bits.iter_mut().zip(lanes) {
            // SAFETY: the token proves the features.
            *bits = unsafe {
                _mm256_and_si256(_mm256_castps_si256(lanes), _mm256_set1_epi32(i32::MAX))
            };
        }
        bits
    }

    #[inline(always)]
    fn max_i32(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: the token proves the features.
        unsafe { [_mm256_max_epi32(a[0], b[0]), _mm256_max_epi32(a[1], b[1])] }
    }

    #[inline(always)]
    fn add_i32(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: the token proves the features.
        unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
    }

    #[inline(always)]
    fn quantise_lanes(self, values: [__m256; 2], inverses: [__m256; 2]) -> [__m256i; 2] {
        let mut rounded = self.splat_i32(0);
        for (rounded, (value, inverse)) in rounded.iter_mut().zip(values.into_iter().zip(inverses))
        {
            // SAFETY: the token proves the features.
            *rounded = unsafe {
                let is_some = _mm256_cmp_ps::<_CMP_NEQ_UQ>(inverse, _mm256_setzero_ps());
                let value = _mm256_and_ps(is_some, _mm256_mul_ps(value, inverse));
                _mm256_cvtps_epi32(value)
            };
        }
        rounded
    }

    #[inline(always)]
    fn pack_bytes(self, [a, b, c, d]: [[__m256i; 2]; 4]) -> [__m256i; 2] {
        let mut joined = a;
        for half in 0..2 {
            // SAFETY: the token proves the features.
            joined[half] = unsafe {
                let odd = _mm256_set1_epi16(-256);
                let low = _mm256_blendv_epi8(a[half], _mm256_slli_epi32::<8>(b[half]), odd);
                let high = _mm256_blendv_epi8(c[half], _mm256_slli_epi32::<8>(d[half]), odd);
                _mm256_blend_epi16::<0b1010_1010>(low, _mm256_slli_epi32::<16>(high))
            };
        }
        joined
    }

    #[inline(always)]
    fn low_bytes(self, whole: [__m256i; 2]) -> [u8; 16] {
        let mut bytes = [0; 16];
        // SAFETY: the token proves the features; the store fills the 16 bytes.
        unsafe {
            let lowest = _mm256_set1_epi32(255);
            let [first, second] = whole;
            let pairs = _mm256_packus_epi32(
                _mm256_and_si256(first, lowest),
                _mm256_and_si256(second, lowest),
            );
            let pairs = _mm256_permute4x64_epi64::<0b11_01_10_00>(pairs);
            let (low, high) = (
                _mm256_castsi256_si128(pairs),
                _mm256_extracti128_si256::<1>(pairs),
            );
            _mm_storeu_si128(bytes.as_mut_ptr().cast(), _mm_packus_epi16(low, high));
        }
        bytes
    }

    #[inline(always)]
    fn quarter_bytes(self, mut whole: [__m256i; 2]) -> [__m256i; 2] {
        for half in &mut whole {
            // SAFETY: the token proves the features.
            *half = unsafe { _mm256_shuffle_epi8(*half, _mm256_set1_epi32(0x0c08_0400)) };
        }
        whole
    }

    #[inline(always)]
    fn broadcast_quarters(self, values: &[f32; 4]) -> [__m256; 2] {
        // SAFETY: the token proves the features; the load takes the 4 values.
        unsafe {
            let four = _mm_loadu_ps(values.as_ptr());
            [_mm256_set_m128(four, four); 2]
        }
    }

    #[inline(always)]
    fn to_f32_lanes(self, whole: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: the token proves the features.
        unsafe { [_mm256_cvtepi32_ps(whole[0]), _mm256_cvtepi32_ps(whole[1])] }
    }
}
