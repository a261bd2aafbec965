//! AVX2 with FMA: a block is four registers of 8 lanes.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{KScales, Operation, SPAN, STREAM_AHEAD, Simd};
use crate::activations::ActivationSpan;
use powerinfer_tensor::BLOCK;

/// Proof that this processor has AVX2, FMA, F16C and POPCNT.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// Asks the processor.
    pub(crate) fn detect() -> Option<Avx2> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("popcnt");
        found.then_some(Avx2(()))
    }

    /// Reads 32 nibbles less `bias`.
    #[inline(always)]
    fn nibbles(self, quants: &[u8; BLOCK / 2], bias: i32) -> [__m256; REGISTERS] {
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

    /// The products of at most 16 blocks of nibbles as they are with those of `x`.
    #[inline(always)]
    fn multiply_nibbles(self, blocks: &[[u8; BLOCK / 2]], x: &ActivationSpan) -> [__m256i; 2] {
        // SAFETY: the token proves the features; the loads take two blocks of nibbles, or one.
        unsafe {
            let mut products = [_mm256_setzero_si256(); SPAN / 2];
            let (pairs, rest) = blocks.as_chunks::<2>();
            for (pair, (both, product)) in pairs.iter().zip(&mut products).enumerate() {
                let bytes = _mm256_loadu_si256(both.as_ptr().cast());
                *product = multiply_nibbles(bytes, x, pair);
            }
            if let [last] = rest {
                let bytes = _mm256_zextsi128_si256(_mm_loadu_si128(last.as_ptr().cast()));
                products[pairs.len()] = multiply_nibbles(bytes, x, pairs.len());
            }
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let (halves, _) = products.as_chunks::<4>();
            [
                _mm256_permutevar8x32_epi32(sum_fours(halves[0]), order),
                _mm256_permutevar8x32_epi32(sum_fours(halves[1]), order),
            ]
        }
    }
}

/// Puts words of four rows side by side, with instructions that every x86-64 processor has.
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

/// Registers of a block.
const REGISTERS: usize = BLOCK / 8;

// The `unsafe` blocks below rest on two facts: an `Avx2` exists only where `detect` found every
// feature that the instructions need, and unaligned loads and stores need no more than the
// memory that the references given to them span.
impl Simd for Avx2 {
    type Vector = __m256;
    type Whole = [__m256i; 2];
    const PANEL_BIAS: i32 = 0;
    type Lanes = [__m256; 2];
    type Block = [__m256; REGISTERS];
    const LANES: usize = 8;
    const TILE_ROWS: usize = 3;

    #[inline]
    fn run<O: Operation>(self, operation: O) -> O::Output {
        #[target_feature(enable = "avx2,fma,f16c,popcnt")]
        fn with_features<O: Operation>(simd: Avx2, operation: O) -> O::Output {
            operation.translate(simd)
        }
        // SAFETY: the token proves the features.
        unsafe { with_features(self, operation) }
    }

    #[inline(always)]
    fn prefetch<T>(self, values: &[T]) {
        prefetch(values);
    }

    #[inline(always)]
    fn prefetch_behind<T>(self, values: &[T]) {
        prefetch_behind(values);
    }

    #[inline(always)]
    fn splat(self, value: f32) -> [__m256; REGISTERS] {
        // SAFETY: the token proves the features.
        unsafe { [_mm256_set1_ps(value); REGISTERS] }
    }

    #[inline(always)]
    fn load(self, values: &[f32; BLOCK]) -> [__m256; REGISTERS] {
        let mut block = self.splat(0.0);
        for (register, values) in block.iter_mut().zip(values.as_chunks::<8>().0) {
            // SAFETY: the token proves the features; the load takes the 8 values.
            *register = unsafe { _mm256_loadu_ps(values.as_ptr()) };
        }
        block
    }

    #[inline(always)]
    fn load_f16(self, values: &[f16; BLOCK]) -> [__m256; REGISTERS] {
        let mut block = self.splat(0.0);
        for (register, values) in block.iter_mut().zip(values.as_chunks::<8>().0) {
            // SAFETY: the token proves the features; the load takes the 8 values.
            *register = unsafe { _mm256_cvtph_ps(_mm_loadu_si128(values.as_ptr().cast())) };
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
        let mut block = self.splat(0.0);
        for (register, quants) in block.iter_mut().zip(quants.as_chunks::<8>().0) {
            // SAFETY: the token proves the features; the load takes the 8 bytes.
            *register = unsafe {
                let bytes = _mm_loadl_epi64(quants.as_ptr().cast());
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
            };
        }
        block
    }

    #[inline(always)]
    fn load_q4_scaled(self, quants: &[u8; BLOCK / 2], scale: f32) -> [__m256; REGISTERS] {
        let mut block = self.nibbles(quants, 8);
        for register in &mut block {
            // SAFETY: the token proves the features.
            *register = unsafe { _mm256_mul_ps(*register, _mm256_set1_ps(scale)) };
        }
        block
    }

    #[inline(always)]
    fn load_q4_k(self, quants: &[u8; BLOCK / 2], scale: f32, minimum: f32) -> [__m256; REGISTERS] {
        let mut block = self.nibbles(quants, 0);
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

    #[inline(always)]
    fn products_q8(self, blocks: &[[i8; BLOCK]], x: &ActivationSpan) -> [__m256; 2] {
        let x_blocks = x.quants.as_chunks::<BLOCK>().0;
        // SAFETY: the token proves the features; the loads take a block each.
        unsafe {
            let mut products = [_mm256_setzero_si256(); SPAN];
            for ((weights, x), product) in blocks.iter().zip(x_blocks).zip(&mut products) {
                let weights = _mm256_loadu_si256(weights.as_ptr().cast());
                let x = _mm256_loadu_si256(x.as_ptr().cast());
                // The signs of weights go to x, so that no pair of products exceeds 16 bits.
                let unsigned = _mm256_abs_epi8(weights);
                *product = sum_pairs(_mm256_maddubs_epi16(unsigned, _mm256_sign_epi8(x, weights)));
            }
            let mut lanes = [_mm256_setzero_ps(); 2];
            let (halves, _) = products.as_chunks::<8>();
            for (lanes, [a, b, c, d, e, f, g, h]) in lanes.iter_mut().zip(halves) {
                // Sums within halves of registers, then of the two halves.
                let (low, high) = (sum_fours([*a, *b, *c, *d]), sum_fours([*e, *f, *g, *h]));
                let sums = _mm256_add_epi32(
                    _mm256_permute2x128_si256(low, high, 0x20),
                    _mm256_permute2x128_si256(low, high, 0x31),
                );
                *lanes = _mm256_cvtepi32_ps(sums);
            }
            lanes
        }
    }

    #[inline(always)]
    fn products_q4(self, blocks: &[[u8; BLOCK / 2]], x: &ActivationSpan) -> [__m256; 2] {
        let mut lanes = [self.splat_vector(0.0); 2];
        let sums = self.multiply_nibbles(blocks, x);
        for ((lanes, sums), x_sums) in lanes.iter_mut().zip(sums).zip(x.sums.as_chunks::<8>().0) {
            // SAFETY: the token proves the features; the load takes the 8 sums.
            *lanes = unsafe {
                // A nibble is 8 more than its weight.
                let bias = _mm256_slli_epi32(_mm256_loadu_si256(x_sums.as_ptr().cast()), 3);
                _mm256_cvtepi32_ps(_mm256_sub_epi32(sums, bias))
            };
        }
        lanes
    }

    #[inline(always)]
    fn products_q4_k(self, blocks: &[[u8; BLOCK / 2]], x: &ActivationSpan) -> [__m256; 2] {
        self.lanes_of(self.multiply_nibbles(blocks, x))
    }

    #[inline(always)]
    fn sums_of(self, x: &ActivationSpan) -> [__m256; 2] {
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
                // The place of a block's d is twice the number of its super-block.
                let first = _mm256_set1_epi32((scales.skipped + 8 * half) as i32);
                let blocks = _mm256_add_epi32(order, first);
                let d = _mm256_slli_epi32(_mm256_srli_epi32(blocks, 3), 1);
                let dmin = _mm256_or_si256(d, _mm256_set1_epi32(1));
                let scales = _mm256_and_si256(pairs, _mm256_set1_epi32(255));
                let minima = _mm256_srli_epi32(pairs, 8);
                for (part, (place, numbers)) in
                    [(d, scales), (dmin, minima)].into_iter().enumerate()
                {
                    wide[part][half] = _mm256_mul_ps(
                        _mm256_permutevar8x32_ps(supers, place),
                        _mm256_cvtepi32_ps(numbers),
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
    fn splat_whole(self, value: i32) -> [__m256i; 2] {
        // SAFETY: the token proves the features.
        unsafe { [_mm256_set1_epi32(value); 2] }
    }

    #[inline(always)]
    fn load_whole(self, bytes: &[u8; 64]) -> [__m256i; 2] {
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
    fn store_whole(self, whole: [__m256i; 2], out: &mut [u8; 64]) {
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
    fn interleave(self, rows: [[__m256i; 2]; 4]) -> [[__m256i; 2]; 4] {
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
    fn spread_words(self, words: &[u32; 4]) -> [__m256i; 2] {
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
                // The signs of the bytes go to x, so that no pair of products exceeds 16 bits.
                let pairs =
                    _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(x, bytes));
                *sums = _mm256_add_epi32(*sums, sum_pairs(pairs));
            }
        }
        sums
    }

    #[inline(always)]
    fn dot_nibbles(
        self,
        mut sums: [__m256i; 2],
        nibbles: [__m256i; 2],
        x: [__m256i; 2],
    ) -> [__m256i; 2] {
        for (sums, (nibbles, x)) in sums.iter_mut().zip(nibbles.into_iter().zip(x)) {
            // SAFETY: the token proves the features.
            unsafe {
                let pairs = _mm256_maddubs_epi16(nibbles, x);
                *sums = _mm256_add_epi32(*sums, sum_pairs(pairs));
            }
        }
        sums
    }

    #[inline(always)]
    fn magnitudes(self, lanes: [__m256; 2]) -> [__m256i; 2] {
        let mut bits = self.splat_whole(0);
        for (bits, lanes) in bits.iter_mut().zip(lanes) {
            // SAFETY: the token proves the features.
            *bits = unsafe {
                _mm256_and_si256(_mm256_castps_si256(lanes), _mm256_set1_epi32(i32::MAX))
            };
        }
        bits
    }

    #[inline(always)]
    fn larger_whole(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: the token proves the features.
        unsafe { [_mm256_max_epi32(a[0], b[0]), _mm256_max_epi32(a[1], b[1])] }
    }

    #[inline(always)]
    fn add_whole(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: the token proves the features.
        unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
    }

    #[inline(always)]
    fn round_lanes(self, values: [__m256; 2], inverses: [__m256; 2]) -> [__m256i; 2] {
        let mut rounded = self.splat_whole(0);
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
    fn join_bytes(self, [a, b, c, d]: [[__m256i; 2]; 4]) -> [__m256i; 2] {
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
    fn narrow(self, whole: [__m256i; 2]) -> [u8; 16] {
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
    fn repeat(self, values: &[f32; 4]) -> [__m256; 2] {
        // SAFETY: the token proves the features; the load takes the 4 values.
        unsafe {
            let four = _mm_loadu_ps(values.as_ptr());
            [_mm256_set_m128(four, four); 2]
        }
    }

    #[inline(always)]
    fn lanes_of(self, whole: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: the token proves the features.
        unsafe { [_mm256_cvtepi32_ps(whole[0]), _mm256_cvtepi32_ps(whole[1])] }
    }

    #[inline(always)]
    fn sum_lanes(self, lanes: [__m256; 2]) -> f32 {
        // SAFETY: the token proves the features.
        unsafe { sum_of_eight(_mm256_add_ps(lanes[0], lanes[1])) }
    }
}

/// The products of pair `pair` of blocks of nibbles with those of `x`, each block in one half.
///
/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn multiply_nibbles(bytes: __m256i, x: &ActivationSpan, pair: usize) -> __m256i {
    let (x_halves, _) = x.halves.as_chunks::<32>();
    // First halves of four blocks, then second halves: half registers of x go by fours.
    let place = pair / 2 * 4 + pair % 2;
    // SAFETY: the caller vouches for the features; the loads take two halves of blocks each.
    unsafe {
        let mask = _mm256_set1_epi8(15);
        let low = _mm256_and_si256(bytes, mask);
        let high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
        let first = _mm256_loadu_si256(x_halves[place].as_ptr().cast());
        let second = _mm256_loadu_si256(x_halves[place + 2].as_ptr().cast());
        sum_pairs(_mm256_add_epi16(
            _mm256_maddubs_epi16(low, first),
            _mm256_maddubs_epi16(high, second),
        ))
    }
}

/// Adds neighbours of 16 bits.
///
/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn sum_pairs(pairs: __m256i) -> __m256i {
    // SAFETY: the caller vouches for the features.
    unsafe { _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)) }
}

/// Adds up the lanes of each half of four registers: half h of register r becomes lane `4 h + r`.
///
/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn sum_fours(r: [__m256i; 4]) -> __m256i {
    // SAFETY: the caller vouches for the features.
    unsafe { _mm256_hadd_epi32(_mm256_hadd_epi32(r[0], r[1]), _mm256_hadd_epi32(r[2], r[3])) }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Asks for the cache lines of `values`, to where there is room for more of them on their way than in
/// the first-level cache.
#[inline(always)]
pub(super) fn prefetch<T>(values: &[T]) {
    let (first, size) = (values.as_ptr().cast::<i8>(), size_of_val(values));
    for offset in (0..size).step_by(LINE) {
        ask(first.wrapping_add(offset));
    }
    // Where values do not begin with a line, they end in one more.
    ask(first.wrapping_add(size.saturating_sub(1)));
}

/// Asks for the cache lines that lie [`STREAM_AHEAD`] bytes behind those of `values`.
#[inline(always)]
pub(super) fn prefetch_behind<T>(values: &[T]) {
    let first = values.as_ptr().cast::<i8>().wrapping_add(STREAM_AHEAD);
    for offset in (0..size_of_val(values)).step_by(LINE) {
        ask(first.wrapping_add(offset));
    }
}

/// Asks for a cache line.
#[inline(always)]
fn ask(place: *const i8) {
    // SAFETY: every x86-64 has the instruction, and it never fails, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(place) };
}

/// The last three halvings of a sum.
///
/// # Safety
///
/// The processor has AVX.
#[inline(always)]
pub(super) unsafe fn sum_of_eight(eight: __m256) -> f32 {
    // SAFETY: the caller vouches for the features.
    unsafe {
        let four = _mm_add_ps(
            _mm256_castps256_ps128(eight),
            _mm256_extractf128_ps(eight, 1),
        );
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
}
