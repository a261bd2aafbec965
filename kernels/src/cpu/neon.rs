//! NEON: a block is eight registers of 4 lanes.

use std::arch::aarch64::*;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::{KScales, Operation, SPAN, Simd};
use crate::activations::ActivationSpan;
use powerinfer_tensor::{BLOCK, SUPER_BLOCK};

/// Proof that this processor has NEON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Neon(());

impl Neon {
    /// Asks the processor.
    pub(crate) fn detect() -> Option<Neon> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Neon(()))
    }

    /// Reads 32 nibbles less `bias`.
    #[inline(always)]
    fn nibbles(self, quants: &[u8; BLOCK / 2], bias: i8) -> [float32x4_t; REGISTERS] {
        let mut block = self.splat(0.0);
        for (pair, quants) in quants.as_chunks::<8>().0.iter().enumerate() {
            // SAFETY: the token proves the feature; the load takes the 8 bytes.
            let (low, high) = unsafe {
                let bytes = vld1_u8(quants.as_ptr());
                let bias = vdup_n_s8(bias);
                let low = vreinterpret_s8_u8(vand_u8(bytes, vdup_n_u8(15)));
                let high = vreinterpret_s8_u8(vshr_n_u8::<4>(bytes));
                (
                    widen_bytes(vsub_s8(low, bias)),
                    widen_bytes(vsub_s8(high, bias)),
                )
            };
            block[2 * pair..][..2].copy_from_slice(&low);
            block[2 * pair + 4..][..2].copy_from_slice(&high);
        }
        block
    }

    /// The products of at most 16 blocks of nibbles less `bias` with those of `x`.
    #[inline(always)]
    fn multiply_nibbles(
        self,
        blocks: &[[u8; BLOCK / 2]],
        x: &ActivationSpan,
        bias: i8,
    ) -> <Self as Simd>::Lanes {
        let mut products = [0.0; SPAN];
        let x_blocks = x.quants.as_chunks::<BLOCK>().0;
        for ((nibbles, x), product) in blocks.iter().zip(x_blocks).zip(&mut products) {
            let x = x.as_chunks::<16>().0;
            // SAFETY: the token proves the feature; the loads take 16 bytes each.
            *product = unsafe {
                let bytes = vld1q_u8(nibbles.as_ptr());
                let bias = vdupq_n_s8(bias);
                let low = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
                let high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(bytes));
                let low = multiply_bytes(vsubq_s8(low, bias), vld1q_s8(x[0].as_ptr()));
                let high = multiply_bytes(vsubq_s8(high, bias), vld1q_s8(x[1].as_ptr()));
                vaddvq_s32(vaddq_s32(low, high)) as f32
            };
        }
        self.load_lanes(&products)
    }
}

/// Registers of a block.
const REGISTERS: usize = BLOCK / 4;

// The `unsafe` blocks below rest on two facts: a `Neon` exists only where `detect` found the
// feature, and loads and stores need no more than the memory that the references given to them
// span.
impl Simd for Neon {
    type Vector = float32x4_t;
    type Whole = [int32x4_t; SPAN / 4];
    const PANEL_BIAS: i32 = 0;
    type Lanes = [float32x4_t; SPAN / 4];
    type Block = [float32x4_t; REGISTERS];
    const LANES: usize = 4;
    const TILE_ROWS: usize = 6;

    #[inline]
    fn run<O: Operation>(self, operation: O) -> O::Output {
        #[target_feature(enable = "neon")]
        fn with_features<O: Operation>(simd: Neon, operation: O) -> O::Output {
            operation.translate(simd)
        }
        // SAFETY: the token proves the feature.
        unsafe { with_features(self, operation) }
    }

    #[inline(always)]
    fn prefetch<T>(self, _: &[T]) {
        // No instruction for it has a name in stable Rust.
    }

    #[inline(always)]
    fn prefetch_behind<T>(self, _: &[T]) {}

    #[inline(always)]
    fn splat(self, value: f32) -> [float32x4_t; REGISTERS] {
        // SAFETY: the token proves the feature.
        unsafe { [vdupq_n_f32(value); REGISTERS] }
    }

    #[inline(always)]
    fn load(self, values: &[f32; BLOCK]) -> [float32x4_t; REGISTERS] {
        let mut block = self.splat(0.0);
        for (register, values) in block.iter_mut().zip(values.as_chunks::<4>().0) {
            // SAFETY: the token proves the feature; the load takes the 4 values.
            *register = unsafe { vld1q_f32(values.as_ptr()) };
        }
        block
    }

    #[inline(always)]
    fn load_f16(self, values: &[f16; BLOCK]) -> [float32x4_t; REGISTERS] {
        let mut numbers = [0.0; BLOCK];
        // Uses the conversion instruction where the processor has it.
        values.convert_to_f32_slice(&mut numbers);
        self.load(&numbers)
    }

    #[inline(always)]
    fn load_bf16(self, values: &[bf16; BLOCK]) -> [float32x4_t; REGISTERS] {
        let mut block = self.splat(0.0);
        for (register, values) in block.iter_mut().zip(values.as_chunks::<4>().0) {
            // SAFETY: the token proves the feature; the load takes the 4 values.
            *register = unsafe {
                // A bf16 is the upper half of an f32.
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(values.as_ptr().cast())))
            };
        }
        block
    }

    #[inline(always)]
    fn load_q8(self, quants: &[i8; BLOCK]) -> [float32x4_t; REGISTERS] {
        let mut block = self.splat(0.0);
        for (pair, quants) in quants.as_chunks::<8>().0.iter().enumerate() {
            // SAFETY: the token proves the feature; the load takes the 8 bytes.
            let [low, high] = unsafe { widen_bytes(vld1_s8(quants.as_ptr())) };
            block[2 * pair] = low;
            block[2 * pair + 1] = high;
        }
        block
    }

    #[inline(always)]
    fn load_q4_scaled(self, quants: &[u8; BLOCK / 2], scale: f32) -> [float32x4_t; REGISTERS] {
        self.multiply(self.nibbles(quants, 8), self.splat(scale))
    }

    #[inline(always)]
    fn load_q4_k(
        self,
        quants: &[u8; BLOCK / 2],
        scale: f32,
        minimum: f32,
    ) -> [float32x4_t; REGISTERS] {
        // `-minimum` is exact, so that the sum is the difference.
        let (scale, minimum) = (self.splat(scale), self.splat(-minimum));
        self.multiply_add(self.nibbles(quants, 0), scale, minimum)
    }

    #[inline(always)]
    fn store(self, block: [float32x4_t; REGISTERS], out: &mut [f32; BLOCK]) {
        for (register, out) in block.into_iter().zip(out.as_chunks_mut::<4>().0) {
            // SAFETY: the token proves the feature; the store fills the 4 values.
            unsafe { vst1q_f32(out.as_mut_ptr(), register) };
        }
    }

    #[inline(always)]
    fn multiply(
        self,
        mut a: [float32x4_t; REGISTERS],
        b: [float32x4_t; REGISTERS],
    ) -> [float32x4_t; REGISTERS] {
        for (a, b) in a.iter_mut().zip(b) {
            // SAFETY: the token proves the feature.
            *a = unsafe { vmulq_f32(*a, b) };
        }
        a
    }

    #[inline(always)]
    fn multiply_add(
        self,
        a: [float32x4_t; REGISTERS],
        b: [float32x4_t; REGISTERS],
        mut c: [float32x4_t; REGISTERS],
    ) -> [float32x4_t; REGISTERS] {
        for ((a, b), c) in a.into_iter().zip(b).zip(&mut c) {
            *c = self.multiply_add_vector(a, b, *c);
        }
        c
    }

    #[inline(always)]
    fn maximum(
        self,
        mut a: [float32x4_t; REGISTERS],
        b: [float32x4_t; REGISTERS],
    ) -> [float32x4_t; REGISTERS] {
        for (a, b) in a.iter_mut().zip(b) {
            // SAFETY: the token proves the feature.
            *a = unsafe { vmaxnmq_f32(*a, b) };
        }
        a
    }

    #[inline(always)]
    fn add_exponent(
        self,
        mut value: [float32x4_t; REGISTERS],
        power: [float32x4_t; REGISTERS],
    ) -> [float32x4_t; REGISTERS] {
        for (value, power) in value.iter_mut().zip(power) {
            // SAFETY: the token proves the feature.
            *value = unsafe {
                let power = vshlq_n_u32::<23>(vreinterpretq_u32_f32(power));
                vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(*value), power))
            };
        }
        value
    }

    #[inline(always)]
    fn zero_below(
        self,
        x: [float32x4_t; REGISTERS],
        bound: f32,
        mut value: [float32x4_t; REGISTERS],
    ) -> [float32x4_t; REGISTERS] {
        for (value, x) in value.iter_mut().zip(x) {
            // SAFETY: the token proves the feature.
            *value = unsafe {
                let is_below = vcltq_f32(x, vdupq_n_f32(bound));
                vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(*value), is_below))
            };
        }
        value
    }

    #[inline(always)]
    fn sum(self, b: [float32x4_t; REGISTERS]) -> f32 {
        // SAFETY: the token proves the feature.
        unsafe {
            // 32 lanes to 16, to 8, to 4.
            let sixteen = [
                vaddq_f32(b[0], b[4]),
                vaddq_f32(b[1], b[5]),
                vaddq_f32(b[2], b[6]),
                vaddq_f32(b[3], b[7]),
            ];
            let eight = [
                vaddq_f32(sixteen[0], sixteen[2]),
                vaddq_f32(sixteen[1], sixteen[3]),
            ];
            let four = vaddq_f32(eight[0], eight[1]);
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }

    #[inline(always)]
    fn sum_four(self, [a, b, c, d]: [Self::Block; 4]) -> [f32; 4] {
        [self.sum(a), self.sum(b), self.sum(c), self.sum(d)]
    }

    #[inline(always)]
    fn widen(self, scales: &[f16], out: &mut [f32; SPAN]) {
        scales.convert_to_f32_slice(&mut out[..scales.len()]);
    }

    #[inline(always)]
    fn splat_vector(self, value: f32) -> float32x4_t {
        // SAFETY: the token proves the features.
        unsafe { vdupq_n_f32(value) }
    }

    #[inline(always)]
    fn load_vector(self, values: &[f32]) -> float32x4_t {
        let values = &values[..Self::LANES];
        // SAFETY: the token proves the feature; the slice is 4 long.
        unsafe { vld1q_f32(values.as_ptr()) }
    }

    #[inline(always)]
    fn store_vector(self, vector: float32x4_t, out: &mut [f32]) {
        let out = &mut out[..Self::LANES];
        // SAFETY: the token proves the feature; the slice is 4 long.
        unsafe { vst1q_f32(out.as_mut_ptr(), vector) }
    }

    #[inline(always)]
    fn multiply_add_vector(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: the token proves the feature.
        unsafe { vfmaq_f32(c, a, b) }
    }

    #[inline(always)]
    fn products_q8(self, blocks: &[[i8; BLOCK]], x: &ActivationSpan) -> Self::Lanes {
        let mut products = [0.0; SPAN];
        let x_blocks = x.quants.as_chunks::<BLOCK>().0;
        for ((weights, x), product) in blocks.iter().zip(x_blocks).zip(&mut products) {
            let (weights, x) = (weights.as_chunks::<16>().0, x.as_chunks::<16>().0);
            // SAFETY: the token proves the feature; the loads take 16 bytes each.
            *product = unsafe {
                let low = multiply_bytes(vld1q_s8(weights[0].as_ptr()), vld1q_s8(x[0].as_ptr()));
                let high = multiply_bytes(vld1q_s8(weights[1].as_ptr()), vld1q_s8(x[1].as_ptr()));
                vaddvq_s32(vaddq_s32(low, high)) as f32
            };
        }
        self.load_lanes(&products)
    }

    #[inline(always)]
    fn products_q4(self, blocks: &[[u8; BLOCK / 2]], x: &ActivationSpan) -> Self::Lanes {
        self.multiply_nibbles(blocks, x, 8)
    }

    #[inline(always)]
    fn products_q4_k(self, blocks: &[[u8; BLOCK / 2]], x: &ActivationSpan) -> Self::Lanes {
        self.multiply_nibbles(blocks, x, 0)
    }

    #[inline(always)]
    fn sums_of(self, x: &ActivationSpan) -> Self::Lanes {
        let mut lanes = self.splat_lanes(0.0);
        for (lanes, sums) in lanes.iter_mut().zip(x.sums.as_chunks::<4>().0) {
            // SAFETY: the token proves the feature; the load takes the 4 sums.
            *lanes = unsafe { vcvtq_f32_s32(vld1q_s32(sums.as_ptr())) };
        }
        lanes
    }

    #[inline(always)]
    fn widen_q4_k(self, scales: &KScales<'_>) -> [Self::Lanes; 2] {
        let mut supers = [f16::ZERO; 8];
        let given = scales.supers.as_flattened();
        supers[..given.len()].copy_from_slice(given);
        let mut wide = [0.0; 8];
        supers.convert_to_f32_slice(&mut wide);
        let mut padded = [[0; 2]; SPAN];
        padded[..scales.factors.len()].copy_from_slice(scales.factors);
        let mut own = [[0.0; SPAN]; 2];
        for block in 0..SPAN {
            let super_block = (scales.skipped + block) / SUPER_BLOCK;
            own[0][block] = wide[2 * super_block];
            own[1][block] = wide[2 * super_block + 1];
        }
        let mut lanes = [self.load_lanes(&own[0]), self.load_lanes(&own[1])];
        for (half, factors) in padded.as_chunks::<8>().0.iter().enumerate() {
            // SAFETY: the token proves the feature; the load takes the 8 pairs.
            let pairs = unsafe { vld2_u8(factors.as_flattened().as_ptr()) };
            for (lanes, bytes) in lanes.iter_mut().zip([pairs.0, pairs.1]) {
                // SAFETY: the token proves the feature.
                unsafe {
                    let words = vmovl_u8(bytes);
                    let low = vcvtq_f32_u32(vmovl_u16(vget_low_u16(words)));
                    let high = vcvtq_f32_u32(vmovl_u16(vget_high_u16(words)));
                    lanes[2 * half] = vmulq_f32(lanes[2 * half], low);
                    lanes[2 * half + 1] = vmulq_f32(lanes[2 * half + 1], high);
                }
            }
        }
        lanes
    }

    #[inline(always)]
    fn multiply_subtract_lanes(
        self,
        a: Self::Lanes,
        b: Self::Lanes,
        mut c: Self::Lanes,
    ) -> Self::Lanes {
        for ((a, b), c) in a.into_iter().zip(b).zip(&mut c) {
            // SAFETY: the token proves the feature.
            *c = unsafe { vfmaq_f32(vnegq_f32(*c), a, b) };
        }
        c
    }

    #[inline(always)]
    fn widen_lanes(self, scales: &[f16]) -> Self::Lanes {
        let mut wide = [0.0; SPAN];
        self.widen(scales, &mut wide);
        self.load_lanes(&wide)
    }

    #[inline(always)]
    fn splat_lanes(self, value: f32) -> Self::Lanes {
        // SAFETY: the token proves the feature.
        unsafe { [vdupq_n_f32(value); SPAN / 4] }
    }

    #[inline(always)]
    fn load_lanes(self, values: &[f32; SPAN]) -> Self::Lanes {
        let mut lanes = self.splat_lanes(0.0);
        for (lanes, values) in lanes.iter_mut().zip(values.as_chunks::<4>().0) {
            // SAFETY: the token proves the feature; the load takes the 4 values.
            *lanes = unsafe { vld1q_f32(values.as_ptr()) };
        }
        lanes
    }

    #[inline(always)]
    fn multiply_lanes(self, mut a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        for (a, b) in a.iter_mut().zip(b) {
            // SAFETY: the token proves the feature.
            *a = unsafe { vmulq_f32(*a, b) };
        }
        a
    }

    #[inline(always)]
    fn multiply_add_lanes(self, a: Self::Lanes, b: Self::Lanes, mut c: Self::Lanes) -> Self::Lanes {
        for ((a, b), c) in a.into_iter().zip(b).zip(&mut c) {
            *c = self.multiply_add_vector(a, b, *c);
        }
        c
    }

    #[inline(always)]
    fn store_lanes(self, lanes: Self::Lanes, out: &mut [f32; SPAN]) {
        for (lanes, out) in lanes.into_iter().zip(out.as_chunks_mut::<4>().0) {
            self.store_vector(lanes, out);
        }
    }

    #[inline(always)]
    fn add_lanes(self, mut a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        for (a, b) in a.iter_mut().zip(b) {
            // SAFETY: the token proves the feature.
            *a = unsafe { vaddq_f32(*a, b) };
        }
        a
    }

    #[inline(always)]
    fn splat_whole(self, value: i32) -> Self::Whole {
        // SAFETY: the token proves the feature.
        unsafe { [vdupq_n_s32(value); SPAN / 4] }
    }

    #[inline(always)]
    fn load_whole(self, bytes: &[u8; 64]) -> Self::Whole {
        let mut whole = self.splat_whole(0);
        for (quarter, bytes) in whole.iter_mut().zip(bytes.as_chunks::<16>().0) {
            // SAFETY: the token proves the feature; the load takes the 16 bytes.
            *quarter = unsafe { vreinterpretq_s32_u8(vld1q_u8(bytes.as_ptr())) };
        }
        whole
    }

    #[inline(always)]
    fn store_whole(self, whole: Self::Whole, out: &mut [u8; 64]) {
        for (quarter, out) in whole.into_iter().zip(out.as_chunks_mut::<16>().0) {
            // SAFETY: the token proves the feature; the store fills the 16 bytes.
            unsafe { vst1q_u8(out.as_mut_ptr(), vreinterpretq_u8_s32(quarter)) }
        }
    }

    #[inline(always)]
    fn transpose_words(self, rows: [&[u8; 16]; 4]) -> [[u8; 16]; 4] {
        let words = rows.map(|row| bytemuck::cast::<_, [u32; 4]>(*row));
        let column = |index: usize| words.map(|row| row[index]);
        bytemuck::cast([column(0), column(1), column(2), column(3)])
    }

    #[inline(always)]
    fn interleave(self, rows: [Self::Whole; 4]) -> [Self::Whole; 4] {
        let mut words = rows;
        for quarter in 0..4 {
            // SAFETY: the token proves the feature.
            unsafe {
                let a = vreinterpretq_u8_s32(rows[0][quarter]);
                let b = vreinterpretq_u8_s32(rows[1][quarter]);
                let c = vreinterpretq_u8_s32(rows[2][quarter]);
                let d = vreinterpretq_u8_s32(rows[3][quarter]);
                let ab = vreinterpretq_u16_u8(vzip1q_u8(a, b));
                let ab_high = vreinterpretq_u16_u8(vzip2q_u8(a, b));
                let cd = vreinterpretq_u16_u8(vzip1q_u8(c, d));
                let cd_high = vreinterpretq_u16_u8(vzip2q_u8(c, d));
                words[0][quarter] = vreinterpretq_s32_u16(vzip1q_u16(ab, cd));
                words[1][quarter] = vreinterpretq_s32_u16(vzip2q_u16(ab, cd));
                words[2][quarter] = vreinterpretq_s32_u16(vzip1q_u16(ab_high, cd_high));
                words[3][quarter] = vreinterpretq_s32_u16(vzip2q_u16(ab_high, cd_high));
            }
        }
        words
    }

    #[inline(always)]
    fn nibbles(self, bytes: Self::Whole) -> [Self::Whole; 2] {
        let mut nibbles = [bytes; 2];
        for (quarter, bytes) in bytes.into_iter().enumerate() {
            // SAFETY: the token proves the feature.
            unsafe {
                let bytes = vreinterpretq_u8_s32(bytes);
                nibbles[0][quarter] = vreinterpretq_s32_u8(vandq_u8(bytes, vdupq_n_u8(15)));
                nibbles[1][quarter] = vreinterpretq_s32_u8(vshrq_n_u8::<4>(bytes));
            }
        }
        nibbles
    }

    #[inline(always)]
    fn spread_words(self, words: &[u32; 4]) -> Self::Whole {
        let mut whole = self.splat_whole(0);
        for (quarter, word) in whole.iter_mut().zip(words) {
            // SAFETY: the token proves the feature.
            *quarter = unsafe { vdupq_n_s32(*word as i32) };
        }
        whole
    }

    #[inline(always)]
    fn dot(self, mut sums: Self::Whole, bytes: Self::Whole, x: Self::Whole) -> Self::Whole {
        for (sums, (bytes, x)) in sums.iter_mut().zip(bytes.into_iter().zip(x)) {
            // SAFETY: the token proves the feature.
            unsafe {
                let (bytes, x) = (vreinterpretq_s8_s32(bytes), vreinterpretq_s8_s32(x));
                let low = vpaddlq_s16(vmull_s8(vget_low_s8(bytes), vget_low_s8(x)));
                let high = vpaddlq_s16(vmull_high_s8(bytes, x));
                *sums = vaddq_s32(*sums, vpaddq_s32(low, high));
            }
        }
        sums
    }

    #[inline(always)]
    fn dot_nibbles(self, sums: Self::Whole, nibbles: Self::Whole, x: Self::Whole) -> Self::Whole {
        self.dot(sums, nibbles, x)
    }

    #[inline(always)]
    fn magnitudes(self, lanes: Self::Lanes) -> Self::Whole {
        let mut bits = self.splat_whole(0);
        for (bits, lanes) in bits.iter_mut().zip(lanes) {
            // SAFETY: the token proves the feature.
            *bits = unsafe { vreinterpretq_s32_f32(vabsq_f32(lanes)) };
        }
        bits
    }

    #[inline(always)]
    fn larger_whole(self, mut a: Self::Whole, b: Self::Whole) -> Self::Whole {
        for (a, b) in a.iter_mut().zip(b) {
            // SAFETY: the token proves the feature.
            *a = unsafe { vmaxq_s32(*a, b) };
        }
        a
    }

    #[inline(always)]
    fn add_whole(self, mut a: Self::Whole, b: Self::Whole) -> Self::Whole {
        for (a, b) in a.iter_mut().zip(b) {
            // SAFETY: the token proves the feature.
            *a = unsafe { vaddq_s32(*a, b) };
        }
        a
    }

    #[inline(always)]
    fn round_lanes(self, values: Self::Lanes, inverses: Self::Lanes) -> Self::Whole {
        let mut rounded = self.splat_whole(0);
        for (rounded, (value, inverse)) in rounded.iter_mut().zip(values.into_iter().zip(inverses))
        {
            // SAFETY: the token proves the feature.
            *rounded = unsafe {
                let is_none = vceqzq_f32(inverse);
                let whole = vcvtnq_s32_f32(vmulq_f32(value, inverse));
                vbicq_s32(whole, vreinterpretq_s32_u32(is_none))
            };
        }
        rounded
    }

    #[inline(always)]
    fn join_bytes(self, [a, b, c, d]: [Self::Whole; 4]) -> Self::Whole {
        let mut joined = a;
        for (index, joined) in joined.iter_mut().enumerate() {
            // SAFETY: the token proves the feature.
            *joined = unsafe {
                let low = vsliq_n_s32::<8>(a[index], b[index]);
                let high = vsliq_n_s32::<8>(c[index], d[index]);
                vsliq_n_s32::<16>(low, high)
            };
        }
        joined
    }

    #[inline(always)]
    fn narrow(self, whole: Self::Whole) -> [u8; 16] {
        let mut bytes = [0; 16];
        // SAFETY: the token proves the feature; the store fills the 16 bytes.
        unsafe {
            let [a, b, c, d] = whole;
            let low = vmovn_s16(vcombine_s16(vmovn_s32(a), vmovn_s32(b)));
            let high = vmovn_s16(vcombine_s16(vmovn_s32(c), vmovn_s32(d)));
            let all = vreinterpretq_u8_s8(vcombine_s8(low, high));
            vst1q_u8(bytes.as_mut_ptr(), all);
        }
        bytes
    }

    #[inline(always)]
    fn repeat(self, values: &[f32; 4]) -> Self::Lanes {
        // SAFETY: the token proves the feature; the load takes the 4 values.
        unsafe { [vld1q_f32(values.as_ptr()); 4] }
    }

    #[inline(always)]
    fn lanes_of(self, whole: Self::Whole) -> Self::Lanes {
        let mut lanes = self.splat_lanes(0.0);
        for (lanes, whole) in lanes.iter_mut().zip(whole) {
            // SAFETY: the token proves the feature.
            *lanes = unsafe { vcvtq_f32_s32(whole) };
        }
        lanes
    }

    #[inline(always)]
    fn sum_lanes(self, lanes: Self::Lanes) -> f32 {
        // SAFETY: the token proves the feature.
        unsafe {
            let eight = [vaddq_f32(lanes[0], lanes[2]), vaddq_f32(lanes[1], lanes[3])];
            let four = vaddq_f32(eight[0], eight[1]);
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }
}

/// Sums of the products of every four of sixteen signed bytes, in whatever order.
///
/// # Safety
///
/// The processor has NEON.
#[inline(always)]
unsafe fn multiply_bytes(a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the caller vouches for the feature.
    unsafe {
        let low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
        vpadalq_s16(vpaddlq_s16(low), vmull_high_s8(a, b))
    }
}

/// Eight signed bytes as numbers.
///
/// # Safety
///
/// The processor has NEON.
#[inline(always)]
unsafe fn widen_bytes(bytes: int8x8_t) -> [float32x4_t; 2] {
    // SAFETY: the caller vouches for the feature.
    unsafe {
        let words = vmovl_s8(bytes);
        [
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))),
            vcvtq_f32_s32(vmovl_s16(vget_high_s16(words))),
        ]
    }
}
