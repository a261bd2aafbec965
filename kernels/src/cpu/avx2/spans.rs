//! Spans of 16 blocks, one lane per block.

use std::arch::x86_64::*;

use half::f16;
use powerinfer_tensor::BLOCK;

use super::{Avx2, sum_of_eight};
use crate::activations::ActivationSpan;
use crate::cpu::simd::{BlockOps, IntegerOps, SpanOps};
use crate::cpu::{KScales, SPAN};

impl Avx2 {
    /// Dot products of at most 16 blocks of unsigned nibbles with those of each vector.
    #[inline(always)]
    fn dot_nibble_blocks<const T: usize>(
        self,
        blocks: &[[u8; BLOCK / 2]],
        x: [&ActivationSpan; T],
    ) -> [[__m256i; 2]; T] {
        let mut sums = [[self.zero(); 2]; T];
        for (half, blocks) in blocks.chunks(SPAN / 2).enumerate() {
            // SAFETY: the token proves the features; the loads take two blocks of nibbles, or one, and two half blocks of x.
            unsafe {
                let mut nibbles = [[self.zero(); 2]; SPAN / 4];
                // Fixed indices, so that the registers of fewer blocks are not stored either.
                for (pair, nibbles) in nibbles.iter_mut().enumerate() {
                    let rest = blocks.get(2 * pair..).unwrap_or(&[]);
                    let bytes = match (rest.first_chunk::<2>(), rest) {
                        (Some(both), _) => _mm256_loadu_si256(both.as_ptr().cast()),
                        (_, [last]) => {
                            _mm256_zextsi128_si256(_mm_loadu_si128(last.as_ptr().cast()))
                        }
                        _ => continue,
                    };
                    *nibbles = split_nibbles(bytes);
                }
                for (x, sums) in x.iter().zip(&mut sums) {
                    let (x, _) = x.half_blocks.as_chunks::<32>();
                    let mut products = [self.zero(); SPAN / 4];
                    for (pair, (product, [low, high])) in
                        products.iter_mut().zip(nibbles).enumerate()
                    {
                        // x holds columns 0 to 15 of four blocks, then columns 16 to 31.
                        let place = half * 8 + pair / 2 * 4 + pair % 2;
                        let first = _mm256_loadu_si256(x[place].as_ptr().cast());
                        let second = _mm256_loadu_si256(x[place + 2].as_ptr().cast());
                        *product = sum_pairs(_mm256_add_epi16(
                            _mm256_maddubs_epi16(low, first),
                            _mm256_maddubs_epi16(high, second),
                        ));
                    }
                    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
                    sums[half] = _mm256_permutevar8x32_epi32(sum_fours(products), order);
                }
            }
        }
        sums
    }

    /// Every bit 0.
    #[inline(always)]
    fn zero(self) -> __m256i {
        // SAFETY: the token proves the features.
        unsafe { _mm256_setzero_si256() }
    }

    /// Dot products of at most 16 blocks of `i8` with those of `x`.
    #[inline(always)]
    fn dot_blocks(self, blocks: &[[i8; BLOCK]], x: &ActivationSpan) -> [__m256; 2] {
        let mut lanes = [self.splat_vector(0.0); 2];
        let parts = blocks
            .chunks(SPAN / 2)
            .zip(x.quants.as_chunks::<{ BLOCK * SPAN / 2 }>().0);
        for ((blocks, x), lanes) in parts.zip(&mut lanes) {
            let x_blocks = x.as_chunks::<BLOCK>().0;
            // SAFETY: the token proves the features; the loads take a block each.
            unsafe {
                let mut products = [self.zero(); SPAN / 2];
                // Fixed indices, so that the registers of fewer blocks are not stored either.
                for (index, (product, x)) in products.iter_mut().zip(x_blocks).enumerate() {
                    let Some(weights) = blocks.get(index) else {
                        continue;
                    };
                    let weights = _mm256_loadu_si256(weights.as_ptr().cast());
                    let x = _mm256_loadu_si256(x.as_ptr().cast());
                    // The signs move to x: unsigned times signed products fit into 16 bits in pairs.
                    let unsigned = _mm256_abs_epi8(weights);
                    *product =
                        sum_pairs(_mm256_maddubs_epi16(unsigned, _mm256_sign_epi8(x, weights)));
                }
                let [a, b, c, d, e, f, g, h] = products;
                // Sums of 128 bits, then of the two in a register.
                let (low, high) = (sum_fours([a, b, c, d]), sum_fours([e, f, g, h]));
                let sums = _mm256_add_epi32(
                    _mm256_permute2x128_si256(low, high, 0x20),
                    _mm256_permute2x128_si256(low, high, 0x31),
                );
                *lanes = _mm256_cvtepi32_ps(sums);
            }
        }
        lanes
    }
}

// SAFETY of the `unsafe` blocks below: an `Avx2` exists only where `detect` found AVX2, FMA, F16C and POPCNT, and unaligned loads and
// stores stay within the references that are passed to them.
impl SpanOps for Avx2 {
    type Lanes = [__m256; 2];

    #[inline(always)]
    fn widen(self, scales: &[f16], out: &mut [f32; SPAN]) {
        let mut padded = [f16::ZERO; SPAN];
        let scales = match <&[f16; SPAN]>::try_from(scales) {
            Ok(whole) => whole,
            Err(_) => {
                padded[..scales.len()].copy_from_slice(scales);
                &padded
            }
        };
        for (scales, out) in scales
            .as_chunks::<8>()
            .0
            .iter()
            .zip(out.as_chunks_mut::<8>().0)
        {
            // SAFETY: the token proves the features; load and store take 8 values each.
            unsafe {
                let half = _mm_loadu_si128(scales.as_ptr().cast());
                _mm256_storeu_ps(out.as_mut_ptr(), _mm256_cvtph_ps(half));
            }
        }
    }

    #[inline(always)]
    fn products_q8<const T: usize>(
        self,
        blocks: &[[i8; BLOCK]],
        x: [&ActivationSpan; T],
    ) -> [Self::Lanes; T] {
        let mut lanes = [self.splat_lanes(0.0); T];
        for (lanes, x) in lanes.iter_mut().zip(x) {
            *lanes = self.dot_blocks(blocks, x);
        }
        lanes
    }

    #[inline(always)]
    fn products_q4<const T: usize>(
        self,
        blocks: &[[u8; BLOCK / 2]],
        x: [&ActivationSpan; T],
    ) -> [Self::Lanes; T] {
        let mut lanes = [self.splat_lanes(0.0); T];
        let sums = self.dot_nibble_blocks(blocks, x);
        for ((lanes, sums), x) in lanes.iter_mut().zip(sums).zip(x) {
            for ((lanes, sums), x_sums) in lanes.iter_mut().zip(sums).zip(x.sums.as_chunks::<8>().0)
            {
                // SAFETY: the token proves the features; the load takes the 8 sums.
                *lanes = unsafe {
                    // Nibbles are biased by 8.
                    let bias = _mm256_slli_epi32(_mm256_loadu_si256(x_sums.as_ptr().cast()), 3);
                    _mm256_cvtepi32_ps(_mm256_sub_epi32(sums, bias))
                };
            }
        }
        lanes
    }

    #[inline(always)]
    fn products_q4_k<const T: usize>(
        self,
        blocks: &[[u8; BLOCK / 2]],
        x: [&ActivationSpan; T],
    ) -> [Self::Lanes; T] {
        self.dot_nibble_blocks(blocks, x)
            .map(|sums| self.to_f32_lanes(sums))
    }

    #[inline(always)]
    fn block_sums(self, x: &ActivationSpan) -> [__m256; 2] {
        let mut lanes = [self.splat_vector(0.0); 2];
        for (lanes, sums) in lanes.iter_mut().zip(x.sums.as_chunks::<8>().0) {
            // SAFETY: the token proves the features; the load takes the 8 sums.
            *lanes = unsafe { _mm256_cvtepi32_ps(_mm256_loadu_si256(sums.as_ptr().cast())) };
        }
        lanes
    }

    #[inline(always)]
    fn widen_q4_k(self, scales: &KScales<'_>) -> [[__m256; 2]; 2] {
        let mut supers = [[f16::ZERO; 2]; 4];
        match <&[[f16; 2]; 2]>::try_from(scales.supers) {
            Ok(two) => supers[..2].copy_from_slice(two),
            Err(_) => supers[..scales.supers.len()].copy_from_slice(scales.supers),
        }
        let mut padded = [[0; 2]; SPAN];
        let factors = match <&[[u8; 2]; SPAN]>::try_from(scales.factors) {
            Ok(whole) => whole,
            Err(_) => {
                padded[..scales.factors.len()].copy_from_slice(scales.factors);
                &padded
            }
        };
        let mut wide = [[self.splat_vector(0.0); 2]; 2];
        // SAFETY: the token proves the features; the loads take four super-blocks and eight blocks.
        unsafe {
            let supers = _mm256_cvtph_ps(_mm_loadu_si128(supers.as_ptr().cast()));
            let order = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            for (half, factors) in factors.as_chunks::<8>().0.iter().enumerate() {
                let pairs = _mm256_cvtepu16_epi32(_mm_loadu_si128(factors.as_ptr().cast()));
                // The index of a block's d is twice the index of its super-block.
                let first = _mm256_set1_epi32((scales.skipped + 8 * half) as i32);
                let blocks = _mm256_add_epi32(order, first);
                let d = _mm256_slli_epi32(_mm256_srli_epi32(blocks, 3), 1);
                let dmin = _mm256_or_si256(d, _mm256_set1_epi32(1));
                let scales = _mm256_and_si256(pairs, _mm256_set1_epi32(255));
                let minima = _mm256_srli_epi32(pairs, 8);
                for (part, (place, values)) in [(d, scales), (dmin, minima)].into_iter().enumerate()
                {
                    wide[part][half] = _mm256_mul_ps(
                        _mm256_permutevar8x32_ps(supers, place),
                        _mm256_cvtepi32_ps(values),
                    );
                }
            }
        }
        wide
    }

    #[inline(always)]
    fn multiply_subtract_lanes(
        self,
        a: [__m256; 2],
        b: [__m256; 2],
        c: [__m256; 2],
    ) -> [__m256; 2] {
        // SAFETY: the token proves the features.
        unsafe {
            [
                _mm256_fmsub_ps(a[0], b[0], c[0]),
                _mm256_fmsub_ps(a[1], b[1], c[1]),
            ]
        }
    }

    #[inline(always)]
    fn widen_lanes(self, scales: &[f16]) -> [__m256; 2] {
        let mut wide = [0.0; SPAN];
        self.widen(scales, &mut wide);
        self.load_lanes(&wide)
    }

    #[inline(always)]
    fn splat_lanes(self, value: f32) -> [__m256; 2] {
        // SAFETY: the token proves the features.
        unsafe { [_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    fn load_lanes(self, values: &[f32; SPAN]) -> [__m256; 2] {
        [self.load_vector(values), self.load_vector(&values[8..])]
    }

    #[inline(always)]
    fn multiply_lanes(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: the token proves the features.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn multiply_add_lanes(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        [
            self.multiply_add_vector(a[0], b[0], c[0]),
            self.multiply_add_vector(a[1], b[1], c[1]),
        ]
    }

    #[inline(always)]
    fn store_lanes(self, lanes: [__m256; 2], out: &mut [f32; SPAN]) {
        self.store_vector(lanes[0], out);
        self.store_vector(lanes[1], &mut out[8..]);
    }

    #[inline(always)]
    fn add_lanes(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: the token proves the features.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn sum_lanes(self, lanes: [__m256; 2]) -> f32 {
        // SAFETY: the token proves the features.
        unsafe { sum_of_eight(_mm256_add_ps(lanes[0], lanes[1])) }
    }
}

/// The low nibbles of all bytes, and the high ones.
///
/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn split_nibbles(bytes: __m256i) -> [__m256i; 2] {
    // SAFETY: the caller guarantees the features.
    unsafe {
        let mask = _mm256_set1_epi8(15);
        [
            _mm256_and_si256(bytes, mask),
            _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask),
        ]
    }
}

/// Adds adjacent 16-bit lanes.
///
/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn sum_pairs(pairs: __m256i) -> __m256i {
    // SAFETY: the caller guarantees the features.
    unsafe { _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)) }
}

/// Sums the lanes of each 128-bit half of four registers: half h of register r becomes lane `4 h + r`.
///
/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn sum_fours(r: [__m256i; 4]) -> __m256i {
    // SAFETY: the caller guarantees the features.
    unsafe { _mm256_hadd_epi32(_mm256_hadd_epi32(r[0], r[1]), _mm256_hadd_epi32(r[2], r[3])) }
}
