//! Integer operations on 64 bytes, one register.

use std::arch::x86_64::*;

use super::{Avx512, avx2};
use crate::cpu::simd::IntegerOps;

impl<const VNNI: bool> Avx512<VNNI> {
    /// Adds the dot product of four unsigned with four signed bytes to every lane of `sums`.
    ///
    /// Without VNNI, the sum of two adjacent products must fit into 16 bits.
    #[inline(always)]
    pub(super) fn dot_bytes(self, sums: __m512i, unsigned: __m512i, signed: __m512i) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe {
            if VNNI {
                _mm512_dpbusd_epi32(sums, unsigned, signed)
            } else {
                let pairs = _mm512_maddubs_epi16(unsigned, signed);
                let fours = _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
                _mm512_add_epi32(sums, fours)
            }
        }
    }

    /// [`Self::dot_bytes`] for signed `a`, and signed `b` other than -128. With VNNI, `a` is biased by 128.
    #[inline(always)]
    pub(super) fn dot_signed(self, sums: __m512i, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe {
            if VNNI {
                self.dot_bytes(sums, _mm512_xor_si512(a, _mm512_set1_epi8(-128)), b)
            } else {
                // The signs move to `b`: unsigned times signed products fit into 16 bits in pairs.
                let negative = _mm512_movepi8_mask(a);
                let b = _mm512_mask_sub_epi8(b, negative, _mm512_setzero_si512(), b);
                self.dot_bytes(sums, _mm512_abs_epi8(a), b)
            }
        }
    }
}

/// Masks of every odd byte, and of every odd 16-bit word.
const ODD_BYTES: u64 = 0xaaaa_aaaa_aaaa_aaaa;
const ODD_WORDS: u32 = 0xaaaa_aaaa;

// SAFETY of the `unsafe` blocks below: an `Avx512` exists only where `detect` found AVX-512 F, BW, DQ, VL, and VNNI if `VNNI`, and unaligned loads and
// stores stay within the references that are passed to them.
impl<const VNNI: bool> IntegerOps for Avx512<VNNI> {
    type Integers = __m512i;
    const PANEL_BIAS: i32 = if VNNI { 128 } else { 0 };

    #[inline(always)]
    fn splat_i32(self, value: i32) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe { _mm512_set1_epi32(value) }
    }

    #[inline(always)]
    fn load_bytes(self, bytes: &[u8; 64]) -> __m512i {
        // SAFETY: the token proves the features; the load takes the 64 bytes.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store_bytes(self, whole: __m512i, out: &mut [u8; 64]) {
        // SAFETY: the token proves the features; the store fills the 64 bytes.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), whole) }
    }

    #[inline(always)]
    fn transpose_words(self, rows: [&[u8; 16]; 4]) -> [[u8; 16]; 4] {
        avx2::transpose_words(rows)
    }

    #[inline(always)]
    fn interleave_bytes(self, [a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
        // SAFETY: the token proves the features.
        unsafe {
            let (ab, cd) = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
            let (ab_high, cd_high) = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
            [
                _mm512_unpacklo_epi16(ab, cd),
                _mm512_unpackhi_epi16(ab, cd),
                _mm512_unpacklo_epi16(ab_high, cd_high),
                _mm512_unpackhi_epi16(ab_high, cd_high),
            ]
        }
    }

    #[inline(always)]
    fn nibbles(self, bytes: __m512i) -> [__m512i; 2] {
        // SAFETY: the token proves the features.
        unsafe {
            let mask = _mm512_set1_epi8(15);
            [
                _mm512_and_si512(bytes, mask),
                _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask),
            ]
        }
    }

    #[inline(always)]
    fn broadcast_words(self, words: &[u32; 4]) -> __m512i {
        // SAFETY: the token proves the features; the load takes the 4 words.
        unsafe {
            let order = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            let words = _mm_loadu_si128(words.as_ptr().cast());
            _mm512_permutexvar_epi32(order, _mm512_castsi128_si512(words))
        }
    }

    #[inline(always)]
    fn dot(self, sums: __m512i, bytes: __m512i, x: __m512i) -> __m512i {
        if VNNI {
            self.dot_bytes(sums, bytes, x)
        } else {
            self.dot_signed(sums, bytes, x)
        }
    }

    #[inline(always)]
    fn dot_unsigned(self, sums: __m512i, unsigned: __m512i, x: __m512i) -> __m512i {
        self.dot_bytes(sums, unsigned, x)
    }

    #[inline(always)]
    fn transpose_quarters(self, [a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
        // SAFETY: the token proves the features.
        unsafe {
            let (ab, cd) = (
                _mm512_shuffle_i32x4::<0x44>(a, b),
                _mm512_shuffle_i32x4::<0x44>(c, d),
            );
            let (ab_high, cd_high) = (
                _mm512_shuffle_i32x4::<0xee>(a, b),
                _mm512_shuffle_i32x4::<0xee>(c, d),
            );
            [
                _mm512_shuffle_i32x4::<0x88>(ab, cd),
                _mm512_shuffle_i32x4::<0xdd>(ab, cd),
                _mm512_shuffle_i32x4::<0x88>(ab_high, cd_high),
                _mm512_shuffle_i32x4::<0xdd>(ab_high, cd_high),
            ]
        }
    }

    #[inline(always)]
    fn magnitude_bits(self, lanes: __m512) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe { _mm512_and_si512(_mm512_castps_si512(lanes), _mm512_set1_epi32(i32::MAX)) }
    }

    #[inline(always)]
    fn max_i32(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe { _mm512_max_epi32(a, b) }
    }

    #[inline(always)]
    fn add_i32(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    fn quantise_lanes(self, values: __m512, inverses: __m512) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe {
            let is_some = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(inverses, _mm512_setzero_ps());
            _mm512_maskz_cvtps_epi32(is_some, _mm512_mul_ps(values, inverses))
        }
    }

    #[inline(always)]
    fn pack_bytes(self, [a, b, c, d]: [__m512i; 4]) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe {
            let low = _mm512_mask_blend_epi8(ODD_BYTES, a, _mm512_slli_epi32::<8>(b));
            let high = _mm512_mask_blend_epi8(ODD_BYTES, c, _mm512_slli_epi32::<8>(d));
            _mm512_mask_blend_epi16(ODD_WORDS, low, _mm512_slli_epi32::<16>(high))
        }
    }

    #[inline(always)]
    fn low_bytes(self, whole: __m512i) -> [u8; 16] {
        let mut bytes = [0; 16];
        // SAFETY: the token proves the features; the store fills the 16 bytes.
        unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(whole)) };
        bytes
    }

    #[inline(always)]
    fn quarter_bytes(self, whole: __m512i) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe { _mm512_shuffle_epi8(whole, _mm512_set1_epi32(0x0c08_0400)) }
    }

    #[inline(always)]
    fn broadcast_quarters(self, values: &[f32; 4]) -> __m512 {
        // SAFETY: the token proves the features; the load takes the 4 values.
        unsafe { _mm512_broadcast_f32x4(_mm_loadu_ps(values.as_ptr())) }
    }

    #[inline(always)]
    fn to_f32_lanes(self, whole: __m512i) -> __m512 {
        // SAFETY: the token proves the features.
        unsafe { _mm512_cvtepi32_ps(whole) }
    }
}
