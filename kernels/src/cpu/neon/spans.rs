//! Spans of 16 blocks, one lane per block.

use std::arch::aarch64::*;

use half::f16;
use half::slice::HalfFloatSliceExt;
use powerinfer_tensor::{BLOCK, SUPER_BLOCK};

use super::Neon;
use crate::activations::ActivationSpan;
use crate::cpu::simd::{BlockOps, SpanOps};
use crate::cpu::{KScales, SPAN};

impl Neon {
    /// Dot products of at most 16 blocks of nibbles less `bias` with those of `x`.
    #[inline(always)]
    fn dot_nibble_blocks(
        self,
        blocks: &[[u8; BLOCK / 2]],
        x: &ActivationSpan,
        bias: i8,
    ) -> <Self as SpanOps>::Lanes {
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

    /// Dot products of at most 16 blocks of `i8` with those of `x`.
    #[inline(always)]
    fn dot_blocks(self, blocks: &[[i8; BLOCK]], x: &ActivationSpan) -> <Self as SpanOps>::Lanes {
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
}

// SAFETY of the `unsafe` blocks below: an `Neon` exists only where `detect` found the feature, and unaligned loads and
// stores stay within the references that are passed to them.
impl SpanOps for Neon {
    type Lanes = [float32x4_t; SPAN / 4];

    #[inline(always)]
    fn widen(self, scales: &[f16], out: &mut [f32; SPAN]) {
        scales.convert_to_f32_slice(&mut out[..scales.len()]);
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
        for (lanes, x) in lanes.iter_mut().zip(x) {
            *lanes = self.dot_nibble_blocks(blocks, x, 8);
        }
        lanes
    }

    #[inline(always)]
    fn products_q4_k<const T: usize>(
        self,
        blocks: &[[u8; BLOCK / 2]],
        x: [&ActivationSpan; T],
    ) -> [Self::Lanes; T] {
        let mut lanes = [self.splat_lanes(0.0); T];
        for (lanes, x) in lanes.iter_mut().zip(x) {
            *lanes = self.dot_nibble_blocks(blocks, x, 0);
        }
        lanes
    }

    #[inline(always)]
    fn block_sums(self, x: &ActivationSpan) -> Self::Lanes {
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

/// Dot products of 16 signed bytes in four partial sums, in unspecified order.
///
/// # Safety
///
/// The processor has NEON.
#[inline(always)]
unsafe fn multiply_bytes(a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the caller guarantees the feature.
    unsafe {
        let low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
        vpadalq_s16(vpaddlq_s16(low), vmull_high_s8(a, b))
    }
}
