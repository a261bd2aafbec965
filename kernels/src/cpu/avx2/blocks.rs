//! Blocks of 32 columns.

use std::arch::x86_64::*;

use half::{bf16, f16};
use powerinfer_tensor::BLOCK;

use super::{Avx2, REGISTERS, sum_of_eight};
use crate::cpu::simd::BlockOps;

impl Avx2 {
    /// Loads and widens 32 nibbles, less `bias`.
    #[inline(always)]
    fn load_nibbles(self, quants: &[u8; BLOCK / 2], bias: i32) -> [__m256; REGISTERS] {
        let mut block = self.splat(0.0);
        for (register, quants) in quants.as_chunks::<8>().0.iter().enumerate() {
            // SAFETY: the token proves the features; the load takes the 8 bytes.
            unsafe {
                let bias = _mm256_set1_epi32(bias);
                let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(quants.as_ptr().cast()));
                let low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
                let high = _mm256_srli_epi32(bytes, 4);
                block[register] = _mm256_cvtepi32_ps(_mm256_sub_epi32(low, bias));
                block[register + 2] = _mm256_cvtepi32_ps(_mm256_sub_epi32(high, bias));
            }
        }
        block
    }
}

// SAFETY of the `unsafe` blocks below: an `Avx2` exists only where `detect` found AVX2, FMA, F16C and POPCNT, and unaligned loads and
// stores stay within the references that are passed to them.
impl BlockOps for Avx2 {
    type Vector = __m256;
    type Block = [__m256; REGISTERS];
    const LANES: usize = 8;
    const TILE_ROWS: usize = 3;

    #[inline(always)]
    fn splat(self, value: f32) -> [__m256; REGISTERS] {
        // SAFETY: the token proves the features.
        unsafe { [_mm256_set1_ps(value); REGISTERS] }
    }

    #[inline(always)]
    fn load(self, values: &[f32; BLOCK]) -> [__m256; REGISTERS] {
        self.load_parts(parts(values))
    }

    #[inline(always)]
    fn load_f16(self, values: &[f16; BLOCK]) -> [__m256; REGISTERS] {
        self.load_f16_parts(parts(values))
    }

    #[inline(always)]
    fn load_parts(self, parts: [&[f32; 8]; 4]) -> [__m256; REGISTERS] {
        let mut block = self.splat(0.0);
        for (register, part) in block.iter_mut().zip(parts) {
            // SAFETY: the token proves the features; the load takes the 8 values of a part.
            *register = unsafe { _mm256_loadu_ps(part.as_ptr()) };
        }
        block
    }

    #[inline(always)]
    fn load_f16_parts(self, parts: [&[f16; 8]; 4]) -> [__m256; REGISTERS] {
        let mut block = self.splat(0.0);
        for (register, part) in block.iter_mut().zip(parts) {
            // SAFETY: the token proves the features; the load takes the 8 values of a part.
            *register = unsafe { _mm256_cvtph_ps(_mm_loadu_si128(part.as_ptr().cast())) };
        }
        block
    }

    #[inline(always)]
    fn load_q8_parts(self, parts: [&[i8; 8]; 4]) -> [__m256; REGISTERS] {
        let mut block = self.splat(0.0);
        for (register, part) in block.iter_mut().zip(parts) {
            // SAFETY: the token proves the features; the load takes the 8 bytes of a part.
            *register = unsafe {
                let bytes = _mm_loadl_epi64(part.as_ptr().cast());
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
            };
        }
        block
    }

    #[inline(always)]
    fn load_bf16(self, values: &[bf16; BLOCK]) -> [__m256; REGISTERS] {
        let mut block = self.splat(0.0);
        for (register, values) in block.iter_mut().zip(values.as_chunks::<8>().0) {
            // SAFETY: the token proves the features; the load takes the 8 values.
            *register = unsafe {
                let halves = _mm_loadu_si128(values.as_ptr().cast());
                // A bf16 is the upper half of an f32.
                _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16))
            };
        }
        block
    }

    #[inline(always)]
    fn load_q8(self, quants: &[i8; BLOCK]) -> [__m256; REGISTERS] {
        self.load_q8_parts(parts(quants))
    }

    #[inline(always)]
    fn load_q4_scaled(self, quants: &[u8; BLOCK / 2], scale: f32) -> [__m256; REGISTERS] {
        let mut block = self.load_nibbles(quants, 8);
        for register in &mut block {
            // SAFETY: the token proves the features.
            *register = unsafe { _mm256_mul_ps(*register, _mm256_set1_ps(scale)) };
        }
        block
    }

    #[inline(always)]
    fn load_q4_k(self, quants: &[u8; BLOCK / 2], scale: f32, minimum: f32) -> [__m256; REGISTERS] {
        let mut block = self.load_nibbles(quants, 0);
        for register in &mut block {
            // SAFETY: the token proves the features.
            *register = unsafe {
                let (scale, minimum) = (_mm256_set1_ps(scale), _mm256_set1_ps(minimum));
                _mm256_fmsub_ps(*register, scale, minimum)
            };
        }
        block
    }

    #[inline(always)]
    fn store(self, block: [__m256; REGISTERS], out: &mut [f32; BLOCK]) {
        for (register, out) in block.into_iter().zip(out.as_chunks_mut::<8>().0) {
            // SAFETY: the token proves the features; the store fills the 8 values.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), register) };
        }
    }

    #[inline(always)]
    fn multiply(self, mut a: [__m256; REGISTERS], b: [__m256; REGISTERS]) -> [__m256; REGISTERS] {
        for (a, b) in a.iter_mut().zip(b) {
            // SAFETY: the token proves the features.
            *a = unsafe { _mm256_mul_ps(*a, b) };
        }
        a
    }

    #[inline(always)]
    fn multiply_add(
        self,
        a: [__m256; REGISTERS],
        b: [__m256; REGISTERS],
        mut c: [__m256; REGISTERS],
    ) -> [__m256; REGISTERS] {
        for ((a, b), c) in a.into_iter().zip(b).zip(&mut c) {
            // SAFETY: the token proves the features.
            *c = unsafe { _mm256_fmadd_ps(a, b, *c) };
        }
        c
    }

    #[inline(always)]
    fn maximum(self, mut a: [__m256; REGISTERS], b: [__m256; REGISTERS]) -> [__m256; REGISTERS] {
        for (a, b) in a.iter_mut().zip(b) {
            // SAFETY: the token proves the features.
            *a = unsafe { _mm256_max_ps(*a, b) };
        }
        a
    }

    #[inline(always)]
    fn add_exponent(
        self,
        mut value: [__m256; REGISTERS],
        power: [__m256; REGISTERS],
    ) -> [__m256; REGISTERS] {
        for (value, power) in value.iter_mut().zip(power) {
            // SAFETY: the token proves the features.
            *value = unsafe {
                let power = _mm256_slli_epi32::<23>(_mm256_castps_si256(power));
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(*value), power))
            };
        }
        value
    }

    #[inline(always)]
    fn zero_below(
        self,
        x: [__m256; REGISTERS],
        bound: f32,
        mut value: [__m256; REGISTERS],
    ) -> [__m256; REGISTERS] {
        for (value, x) in value.iter_mut().zip(x) {
            // SAFETY: the token proves the features.
            *value = unsafe {
                let is_kept = _mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(bound));
                _mm256_and_ps(is_kept, *value)
            };
        }
        value
    }

    #[inline(always)]
    fn sum(self, block: [__m256; REGISTERS]) -> f32 {
        // SAFETY: the token proves the features.
        unsafe {
            sum_of_eight(_mm256_add_ps(
                _mm256_add_ps(block[0], block[2]),
                _mm256_add_ps(block[1], block[3]),
            ))
        }
    }

    #[inline(always)]
    fn sum_four(self, [a, b, c, d]: [Self::Block; 4]) -> [f32; 4] {
        [self.sum(a), self.sum(b), self.sum(c), self.sum(d)]
    }

    #[inline(always)]
    fn splat_vector(self, value: f32) -> __m256 {
        // SAFETY: the token proves the features.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    fn load_vector(self, values: &[f32]) -> __m256 {
        let values = &values[..Self::LANES];
        // SAFETY: the token proves the features; the slice is 8 long.
        unsafe { _mm256_loadu_ps(values.as_ptr()) }
    }

    #[inline(always)]
    fn store_vector(self, vector: __m256, out: &mut [f32]) {
        let out = &mut out[..Self::LANES];
        // SAFETY: the token proves the features; the slice is 8 long.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), vector) }
    }

    #[inline(always)]
    fn multiply_add_vector(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: the token proves the features.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
}

/// The four registers of a block.
#[inline(always)]
fn parts<T>(values: &[T; BLOCK]) -> [&[T; 8]; REGISTERS] {
    let (parts, _) = values.as_chunks::<8>();
    [&parts[0], &parts[1], &parts[2], &parts[3]]
}
