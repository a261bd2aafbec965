//! Spans of 16 blocks, one lane per block.

use std::arch::x86_64::*;

use half::f16;
use powerinfer_tensor::BLOCK;

use super::{Avx512, avx2};
use crate::activations::ActivationSpan;
use crate::cpu::simd::{IntegerOps, SpanOps};
use crate::cpu::{KScales, SPAN};

impl<const VNNI: bool> Avx512<VNNI> {
    /// Dot products of at most 16 blocks of unsigned nibbles with those of each vector.
    #[inline(always)]
    fn dot_nibble_blocks<const T: usize>(
        self,
        blocks: &[[u8; BLOCK / 2]],
        x: [&ActivationSpan; T],
    ) -> [__m512i; T] {
        // SAFETY: the token proves the features; x is 8 registers long.
        unsafe {
            let mut products = [[_mm512_setzero_si512(); 4]; T];
            for index in 0..4 {
                let bytes = match blocks.get(4 * index..4 * index + 4) {
                    Some(whole) => _mm512_loadu_si512(whole.as_ptr().cast()),
                    None => load_bytes(blocks.get(4 * index..).unwrap_or_default()),
                };
                let [low, high] = self.nibbles(bytes);
                for (products, x) in products.iter_mut().zip(x) {
                    let x = x.half_blocks.as_chunks::<64>().0;
                    let first = _mm512_loadu_si512(x[2 * index].as_ptr().cast());
                    let second = _mm512_loadu_si512(x[2 * index + 1].as_ptr().cast());
                    products[index] = self.dot_bytes(products[index], low, first);
                    products[index] = self.dot_bytes(products[index], high, second);
                }
            }
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let mut sums = [_mm512_setzero_si512(); T];
            for (sums, products) in sums.iter_mut().zip(products) {
                *sums = _mm512_permutexvar_epi32(order, self.sum_quarters(products));
            }
            sums
        }
    }

    /// Products of the bytes of at most `2 R` blocks with those of each vector, four added in each lane, 64 bytes a register.
    #[inline(always)]
    fn dot_byte_blocks<const R: usize, const T: usize>(
        self,
        blocks: &[[i8; BLOCK]],
        x: [&ActivationSpan; T],
    ) -> [[__m512i; 8]; T] {
        // SAFETY: the token proves the features; x is 8 registers long.
        unsafe {
            let mut products = [[_mm512_setzero_si512(); 8]; T];
            for index in 0..R {
                let weights = match blocks.get(2 * index..2 * index + 2) {
                    Some(whole) => _mm512_loadu_si512(whole.as_ptr().cast()),
                    None => load_bytes(blocks.get(2 * index..).unwrap_or_default()),
                };
                for (products, x) in products.iter_mut().zip(x) {
                    let x = x.quants.as_chunks::<64>().0;
                    let x = _mm512_loadu_si512(x[index].as_ptr().cast());
                    products[index] = self.dot_signed(products[index], weights, x);
                }
            }
            products
        }
    }

    /// Sums the lanes of each 128-bit quarter of four registers: quarter q of register r becomes lane `4 q + r`.
    #[inline(always)]
    fn sum_quarters(self, r: [__m512i; 4]) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe {
            let [mut a, mut b] = [r[0], r[2]];
            for (a, b) in [(&mut a, r[1]), (&mut b, r[3])] {
                let (low, high) = (_mm512_unpacklo_epi32(*a, b), _mm512_unpackhi_epi32(*a, b));
                *a = _mm512_add_epi32(low, high);
            }
            let (low, high) = (_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
            _mm512_add_epi32(low, high)
        }
    }
}

/// Loads at most 64 bytes; the rest is zero.
///
/// # Safety
///
/// The processor has AVX-512 BW.
#[inline(always)]
unsafe fn load_bytes<T: bytemuck::Pod>(values: &[T]) -> __m512i {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    if bytes.is_empty() {
        // A masked load of no bytes from the dangling address of an empty slice is valid, but takes hundreds of cycles.
        // SAFETY: as below.
        return unsafe { _mm512_setzero_si512() };
    }
    let lanes = u64::MAX.checked_shr(64 - bytes.len() as u32).unwrap_or(0);
    // SAFETY: the caller guarantees the features; no more lanes are read than there are bytes.
    unsafe { _mm512_maskz_loadu_epi8(lanes, bytes.as_ptr().cast()) }
}

// SAFETY of the `unsafe` blocks below: an `Avx512` exists only where `detect` found AVX-512 F, BW, DQ, VL, and VNNI if `VNNI`, and unaligned loads and
// stores stay within the references that are passed to them.
impl<const VNNI: bool> SpanOps for Avx512<VNNI> {
    type Lanes = __m512;

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
    fn products_q8<const T: usize>(
        self,
        blocks: &[[i8; BLOCK]],
        x: [&ActivationSpan; T],
    ) -> [__m512; T] {
        // Half a span needs half the registers; rows of small models are that short.
        let products = match blocks.len() > SPAN / 2 {
            true => self.dot_byte_blocks::<8, T>(blocks, x),
            false => self.dot_byte_blocks::<4, T>(blocks, x),
        };
        // SAFETY: the token proves the features; the load takes the 16 sums.
        unsafe {
            let mut lanes = [_mm512_setzero_ps(); T];
            for token in 0..T {
                let [a, b, c, d, e, f, g, h] = products[token];
                let low = self.sum_quarters([a, b, c, d]);
                let high = if blocks.len() > SPAN / 2 {
                    self.sum_quarters([e, f, g, h])
                } else {
                    _mm512_setzero_si512()
                };
                // A block has two quarters.
                let sums = _mm512_add_epi32(
                    _mm512_shuffle_i32x4(low, high, 0b10_00_10_00),
                    _mm512_shuffle_i32x4(low, high, 0b11_01_11_01),
                );
                let order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
                let mut sums = _mm512_permutexvar_epi32(order, sums);
                if VNNI {
                    // Subtracts the bias: 128 times the sum of x.
                    let x_sums = _mm512_loadu_si512(x[token].sums.as_ptr().cast());
                    sums = _mm512_sub_epi32(sums, _mm512_slli_epi32(x_sums, 7));
                }
                lanes[token] = _mm512_cvtepi32_ps(sums);
            }
            lanes
        }
    }

    #[inline(always)]
    fn products_q4<const T: usize>(
        self,
        blocks: &[[u8; BLOCK / 2]],
        x: [&ActivationSpan; T],
    ) -> [__m512; T] {
        let mut lanes = [self.splat_lanes(0.0); T];
        let sums = self.dot_nibble_blocks(blocks, x);
        for ((lanes, sums), x) in lanes.iter_mut().zip(sums).zip(x) {
            // SAFETY: the token proves the features; the load takes the 16 sums.
            *lanes = unsafe {
                // Nibbles are biased by 8.
                let x_sums = _mm512_loadu_si512(x.sums.as_ptr().cast());
                _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_slli_epi32(x_sums, 3)))
            };
        }
        lanes
    }

    #[inline(always)]
    fn products_q4_k<const T: usize>(
        self,
        blocks: &[[u8; BLOCK / 2]],
        x: [&ActivationSpan; T],
    ) -> [__m512; T] {
        let mut lanes = [self.splat_lanes(0.0); T];
        for (lanes, sums) in lanes.iter_mut().zip(self.dot_nibble_blocks(blocks, x)) {
            *lanes = self.to_f32_lanes(sums);
        }
        lanes
    }

    #[inline(always)]
    fn block_sums(self, x: &ActivationSpan) -> __m512 {
        // SAFETY: the token proves the features; the load takes the 16 sums.
        unsafe { _mm512_cvtepi32_ps(_mm512_loadu_si512(x.sums.as_ptr().cast())) }
    }

    #[inline(always)]
    fn widen_q4_k(self, scales: &KScales<'_>) -> [__m512; 2] {
        let values = 2 * scales.supers.len();
        let blocks = scales.factors.len();
        assert!(values <= 8 && blocks <= SPAN, "at most one span");
        // SAFETY: the token proves the features; no more lanes are read than there are values.
        unsafe {
            let lanes = ((1u32 << values) - 1) as u8;
            let supers = _mm_maskz_loadu_epi16(lanes, scales.supers.as_ptr().cast());
            let supers = _mm512_castps256_ps512(_mm256_cvtph_ps(supers));
            let lanes = ((1u32 << blocks) - 1) as u16;
            let pairs = _mm256_maskz_loadu_epi16(lanes, scales.factors.as_ptr().cast());
            // The index of a block's d is twice the index of its super-block.
            let order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let blocks = _mm512_add_epi32(order, _mm512_set1_epi32(scales.skipped as i32));
            let d = _mm512_slli_epi32(_mm512_srli_epi32(blocks, 3), 1);
            let dmin = _mm512_or_si512(d, _mm512_set1_epi32(1));
            let wide = |bytes| _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(bytes));
            let scales = wide(_mm256_and_si256(pairs, _mm256_set1_epi16(255)));
            let minima = wide(_mm256_srli_epi16(pairs, 8));
            [
                _mm512_mul_ps(_mm512_permutexvar_ps(d, supers), scales),
                _mm512_mul_ps(_mm512_permutexvar_ps(dmin, supers), minima),
            ]
        }
    }

    #[inline(always)]
    fn multiply_subtract_lanes(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the token proves the features.
        unsafe { _mm512_fmsub_ps(a, b, c) }
    }

    #[inline(always)]
    fn widen_lanes(self, scales: &[f16]) -> __m512 {
        // SAFETY: the token proves the features; no more lanes are read than there are scales.
        unsafe {
            let half = match <&[f16; SPAN]>::try_from(scales) {
                Ok(whole) => _mm256_loadu_si256(whole.as_ptr().cast()),
                Err(_) => {
                    let lanes = ((1u32 << scales.len()) - 1) as u16;
                    _mm256_maskz_loadu_epi16(lanes, scales.as_ptr().cast())
                }
            };
            _mm512_cvtph_ps(half)
        }
    }

    #[inline(always)]
    fn splat_lanes(self, value: f32) -> __m512 {
        // SAFETY: the token proves the features.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn load_lanes(self, values: &[f32; SPAN]) -> __m512 {
        // SAFETY: the token proves the features; the load takes the 16 values.
        unsafe { _mm512_loadu_ps(values.as_ptr()) }
    }

    #[inline(always)]
    fn multiply_lanes(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves the features.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn multiply_add_lanes(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the token proves the features.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn store_lanes(self, lanes: __m512, out: &mut [f32; SPAN]) {
        // SAFETY: the token proves the features; the store fills the 16 values.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), lanes) }
    }

    #[inline(always)]
    fn add_lanes(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves the features.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sum_lanes(self, lanes: __m512) -> f32 {
        // SAFETY: the token proves the features.
        unsafe {
            let low = _mm512_castps512_ps256(lanes);
            avx2::sum_of_eight(_mm256_add_ps(low, _mm512_extractf32x8_ps(lanes, 1)))
        }
    }
}
