//! AVX-512: a block is two registers of 16 lanes.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{KScales, Operation, SPAN, Simd, avx2};
use crate::activations::ActivationSpan;
use powerinfer_tensor::BLOCK;

/// Proof that this processor has AVX-512 F, BW, DQ and VL, and VNNI where `VNNI` says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Avx512<const VNNI: bool>(());

impl<const VNNI: bool> Avx512<VNNI> {
    /// Asks the processor.
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

    /// Adds the products of every four unsigned bytes with as many signed ones to a lane of `sums`.
    ///
    /// Without VNNI, no two products of neighbours may exceed 16 bits.
    #[inline(always)]
    fn dot_bytes(self, sums: __m512i, unsigned: __m512i, signed: __m512i) -> __m512i {
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

    /// The same of signed bytes with signed ones that are not -128; with VNNI those of `a` count as
    /// 128 larger.
    #[inline(always)]
    fn dot_signed(self, sums: __m512i, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe {
            if VNNI {
                self.dot_bytes(sums, _mm512_xor_si512(a, _mm512_set1_epi8(-128)), b)
            } else {
                // The signs of `a` go to `b`, so that no pair of products exceeds 16 bits.
                let negative = _mm512_movepi8_mask(a);
                let b = _mm512_mask_sub_epi8(b, negative, _mm512_setzero_si512(), b);
                self.dot_bytes(sums, _mm512_abs_epi8(a), b)
            }
        }
    }

    /// The weights of 32 nibbles: sixteen nibbles, sixteen lanes.
    #[inline(always)]
    fn look_up(self, quants: &[u8; BLOCK / 2], weights: __m512) -> [__m512; 2] {
        // SAFETY: the token proves the features; the load takes the 16 bytes of the array.
        unsafe {
            // A permutation takes no notice of the bits above an index.
            let low = _mm512_cvtepu8_epi32(_mm_loadu_si128(quants.as_ptr().cast()));
            let high = _mm512_srli_epi32(low, 4);
            [
                _mm512_permutexvar_ps(low, weights),
                _mm512_permutexvar_ps(high, weights),
            ]
        }
    }

    /// The products of at most 16 blocks of nibbles as they are with those of `x`.
    #[inline(always)]
    fn multiply_nibbles(self, blocks: &[[u8; BLOCK / 2]], x: &ActivationSpan) -> __m512i {
        let x_halves = x.halves.as_chunks::<64>().0;
        // SAFETY: the token proves the features; x is 8 registers long.
        unsafe {
            let mut products = [_mm512_setzero_si512(); 4];
            for (index, product) in products.iter_mut().enumerate() {
                let bytes = match blocks.get(4 * index..4 * index + 4) {
                    Some(whole) => _mm512_loadu_si512(whole.as_ptr().cast()),
                    None => load_bytes(blocks.get(4 * index..).unwrap_or_default()),
                };
                let mask = _mm512_set1_epi8(15);
                let low = _mm512_and_si512(bytes, mask);
                let high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
                let first = _mm512_loadu_si512(x_halves[2 * index].as_ptr().cast());
                let second = _mm512_loadu_si512(x_halves[2 * index + 1].as_ptr().cast());
                *product = self.dot_bytes(self.dot_bytes(*product, low, first), high, second);
            }
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_permutexvar_epi32(order, self.sum_quarters(products))
        }
    }

    /// Adds up the lanes of every quarter of four registers: quarter q of register r becomes lane
    /// `4 q + r`.
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

/// Every other byte of a register, and every other pair of bytes.
const ODD_BYTES: u64 = 0xaaaa_aaaa_aaaa_aaaa;
const ODD_WORDS: u32 = 0xaaaa_aaaa;

/// Reads at most 64 bytes; zero where there are fewer.
///
/// # Safety
///
/// The processor has AVX-512 BW.
#[inline(always)]
unsafe fn load_bytes<T: bytemuck::Pod>(values: &[T]) -> __m512i {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    if bytes.is_empty() {
        // Nothing lies at the place of an empty slice. To read none of it is right, but takes the processor
        // hundreds of cycles to find out.
        // SAFETY: as below.
        return unsafe { _mm512_setzero_si512() };
    }
    let lanes = u64::MAX.checked_shr(64 - bytes.len() as u32).unwrap_or(0);
    // SAFETY: the caller vouches for the features; no more lanes are read than there are bytes.
    unsafe { _mm512_maskz_loadu_epi8(lanes, bytes.as_ptr().cast()) }
}

// The `unsafe` blocks below rest on two facts: an `Avx512` exists only where `detect` found every
// feature that the instructions need, and unaligned loads and stores need no more than the
// memory that the references given to them span.
impl<const VNNI: bool> Simd for Avx512<VNNI> {
    type Vector = __m512;
    type Whole = __m512i;
    const PANEL_BIAS: i32 = if VNNI { 128 } else { 0 };
    type Lanes = __m512;
    type Block = [__m512; 2];
    const LANES: usize = 16;
    const TILE_ROWS: usize = 6;

    #[inline]
    fn run<O: Operation>(self, operation: O) -> O::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,popcnt")]
        fn with_features<S: Simd, O: Operation>(simd: S, operation: O) -> O::Output {
            operation.translate(simd)
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,popcnt")]
        #[target_feature(enable = "avx512vnni")]
        fn with_vnni<S: Simd, O: Operation>(simd: S, operation: O) -> O::Output {
            operation.translate(simd)
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
    fn prefetch_behind<T>(self, values: &[T]) {
        avx2::prefetch_behind(values);
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
            self.look_up(quants, _mm512_mul_ps(nibbles, _mm512_set1_ps(scale)))
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
            self.look_up(quants, _mm512_fmsub_ps(nibbles, scale, minimum))
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
            // Eight of a block in each half, then four of one in each quarter.
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

    #[inline(always)]
    fn products_q8(self, blocks: &[[i8; BLOCK]], x: &ActivationSpan) -> __m512 {
        let x_quants = x.quants.as_chunks::<64>().0;
        // SAFETY: the token proves the features; x is 8 registers long.
        unsafe {
            let mut products = [_mm512_setzero_si512(); 8];
            for (index, product) in products.iter_mut().enumerate() {
                let weights = match blocks.get(2 * index..2 * index + 2) {
                    Some(whole) => _mm512_loadu_si512(whole.as_ptr().cast()),
                    None => load_bytes(blocks.get(2 * index..).unwrap_or_default()),
                };
                let x = _mm512_loadu_si512(x_quants[index].as_ptr().cast());
                *product = self.dot_signed(*product, weights, x);
            }
            let [a, b, c, d, e, f, g, h] = products;
            let (low, high) = (
                self.sum_quarters([a, b, c, d]),
                self.sum_quarters([e, f, g, h]),
            );
            // Two quarters are one block.
            let sums = _mm512_add_epi32(
                _mm512_shuffle_i32x4(low, high, 0b10_00_10_00),
                _mm512_shuffle_i32x4(low, high, 0b11_01_11_01),
            );
            let order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
            let mut sums = _mm512_permutexvar_epi32(order, sums);
            if VNNI {
                // Takes off what the bias adds, 128 times the sum of x.
                let x_sums = _mm512_loadu_si512(x.sums.as_ptr().cast());
                sums = _mm512_sub_epi32(sums, _mm512_slli_epi32(x_sums, 7));
            }
            _mm512_cvtepi32_ps(sums)
        }
    }

    #[inline(always)]
    fn products_q4(self, blocks: &[[u8; BLOCK / 2]], x: &ActivationSpan) -> __m512 {
        let sums = self.multiply_nibbles(blocks, x);
        // SAFETY: the token proves the features; the load takes the 16 sums.
        unsafe {
            // A nibble is 8 more than its weight.
            let x_sums = _mm512_loadu_si512(x.sums.as_ptr().cast());
            _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_slli_epi32(x_sums, 3)))
        }
    }

    #[inline(always)]
    fn products_q4_k(self, blocks: &[[u8; BLOCK / 2]], x: &ActivationSpan) -> __m512 {
        // SAFETY: the token proves the features.
        unsafe { _mm512_cvtepi32_ps(self.multiply_nibbles(blocks, x)) }
    }

    #[inline(always)]
    fn sums_of(self, x: &ActivationSpan) -> __m512 {
        // SAFETY: the token proves the features; the load takes the 16 sums.
        unsafe { _mm512_cvtepi32_ps(_mm512_loadu_si512(x.sums.as_ptr().cast())) }
    }

    #[inline(always)]
    fn widen_q4_k(self, scales: &KScales<'_>) -> [__m512; 2] {
        let numbers = 2 * scales.supers.len();
        let blocks = scales.factors.len();
        assert!(numbers <= 8 && blocks <= SPAN, "those of a span");
        // SAFETY: the token proves the features; no more lanes are read than there are numbers.
        unsafe {
            let lanes = ((1u32 << numbers) - 1) as u8;
            let supers = _mm_maskz_loadu_epi16(lanes, scales.supers.as_ptr().cast());
            let supers = _mm512_castps256_ps512(_mm256_cvtph_ps(supers));
            let lanes = ((1u32 << blocks) - 1) as u16;
            let pairs = _mm256_maskz_loadu_epi16(lanes, scales.factors.as_ptr().cast());
            // The place of a block's d is twice the number of its super-block.
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
    fn splat_whole(self, value: i32) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe { _mm512_set1_epi32(value) }
    }

    #[inline(always)]
    fn load_whole(self, bytes: &[u8; 64]) -> __m512i {
        // SAFETY: the token proves the features; the load takes the 64 bytes.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store_whole(self, whole: __m512i, out: &mut [u8; 64]) {
        // SAFETY: the token proves the features; the store fills the 64 bytes.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), whole) }
    }

    #[inline(always)]
    fn transpose_words(self, rows: [&[u8; 16]; 4]) -> [[u8; 16]; 4] {
        avx2::transpose_words(rows)
    }

    #[inline(always)]
    fn interleave(self, [a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
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
    fn spread_words(self, words: &[u32; 4]) -> __m512i {
        // SAFETY: the token proves the features; the load takes the 4 words.
        unsafe {
            let order = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            let words = _mm_loadu_si128(words.as_ptr().cast());
            _mm512_permutexvar_epi32(order, _mm512_castsi128_si512(words))
        }
    }

    #[inline(always)]
    fn dot(self, sums: __m512i, bytes: __m512i, x: __m512i) -> __m512i {
        match VNNI {
            true => self.dot_bytes(sums, bytes, x),
            false => self.dot_signed(sums, bytes, x),
        }
    }

    #[inline(always)]
    fn dot_nibbles(self, sums: __m512i, nibbles: __m512i, x: __m512i) -> __m512i {
        self.dot_bytes(sums, nibbles, x)
    }

    #[inline(always)]
    fn magnitudes(self, lanes: __m512) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe { _mm512_and_si512(_mm512_castps_si512(lanes), _mm512_set1_epi32(i32::MAX)) }
    }

    #[inline(always)]
    fn larger_whole(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe { _mm512_max_epi32(a, b) }
    }

    #[inline(always)]
    fn add_whole(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    fn round_lanes(self, values: __m512, inverses: __m512) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe {
            let is_some = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(inverses, _mm512_setzero_ps());
            _mm512_maskz_cvtps_epi32(is_some, _mm512_mul_ps(values, inverses))
        }
    }

    #[inline(always)]
    fn join_bytes(self, [a, b, c, d]: [__m512i; 4]) -> __m512i {
        // SAFETY: the token proves the features.
        unsafe {
            let low = _mm512_mask_blend_epi8(ODD_BYTES, a, _mm512_slli_epi32::<8>(b));
            let high = _mm512_mask_blend_epi8(ODD_BYTES, c, _mm512_slli_epi32::<8>(d));
            _mm512_mask_blend_epi16(ODD_WORDS, low, _mm512_slli_epi32::<16>(high))
        }
    }

    #[inline(always)]
    fn narrow(self, whole: __m512i) -> [u8; 16] {
        let mut bytes = [0; 16];
        // SAFETY: the token proves the features; the store fills the 16 bytes.
        unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(whole)) };
        bytes
    }

    #[inline(always)]
    fn repeat(self, values: &[f32; 4]) -> __m512 {
        // SAFETY: the token proves the features; the load takes the 4 values.
        unsafe { _mm512_broadcast_f32x4(_mm_loadu_ps(values.as_ptr())) }
    }

    #[inline(always)]
    fn lanes_of(self, whole: __m512i) -> __m512 {
        // SAFETY: the token proves the features.
        unsafe { _mm512_cvtepi32_ps(whole) }
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
