//! Blocks of 32 columns.

use std::arch::aarch64::*;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use powerinfer_tensor::BLOCK;

use super::{Neon, REGISTERS};
use crate::cpu::simd::BlockOps;

impl Neon {
    /// Loads and widens 32 nibbles, less `bias`.
    #[inline(always)]
    fn load_nibbles(self, quants: &[u8; BLOCK / 2], bias: i8) -> [float32x4_t; REGISTERS] {
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
}

// SAFETY of the `unsafe` blocks below: an `Neon` exists only where `detect` found the feature, and unaligned loads and
// stores stay within the references that are passed to them.
impl BlockOps for Neon {
    type Vector = float32x4_t;
    type Block = [float32x4_t; REGISTERS];
    const LANES: usize = 4;
    const TILE_ROWS: usize = 6;

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
        let mut wide = [0.0; BLOCK];
        // Uses the conversion instruction if the processor has it.
        values.convert_to_f32_slice(&mut wide);
        self.load(&wide)
    }

    #[inline(always)]
    fn load_parts(self, parts: [&[f32; 8]; 4]) -> [float32x4_t; REGISTERS] {
        let mut block = self.splat(0.0);
        for (registers, part) in block.as_chunks_mut::<2>().0.iter_mut().zip(parts) {
            let (fours, _) = part.as_chunks::<4>();
            // SAFETY: the token proves the feature; a load takes 4 values.
            *registers = unsafe { [vld1q_f32(fours[0].as_ptr()), vld1q_f32(fours[1].as_ptr())] };
        }
        block
    }

    #[inline(always)]
    fn load_f16_parts(self, parts: [&[f16; 8]; 4]) -> [float32x4_t; REGISTERS] {
        let mut values = [f16::ZERO; BLOCK];
        for (values, part) in values.as_chunks_mut::<8>().0.iter_mut().zip(parts) {
            *values = *part;
        }
        self.load_f16(&values)
    }

    #[inline(always)]
    fn load_q8_parts(self, parts: [&[i8; 8]; 4]) -> [float32x4_t; REGISTERS] {
        let mut block = self.splat(0.0);
        for (registers, part) in block.as_chunks_mut::<2>().0.iter_mut().zip(parts) {
            // SAFETY: the token proves the feature; the load takes the 8 bytes.
            *registers = unsafe { widen_bytes(vld1_s8(part.as_ptr())) };
        }
        block
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
        self.multiply(self.load_nibbles(quants, 8), self.splat(scale))
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
        self.multiply_add(self.load_nibbles(quants, 0), scale, minimum)
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
}

/// Widens eight signed bytes to `f32`.
///
/// # Safety
///
/// The processor has NEON.
#[inline(always)]
unsafe fn widen_bytes(bytes: int8x8_t) -> [float32x4_t; 2] {
    // SAFETY: the caller guarantees the feature.
    unsafe {
        let words = vmovl_s8(bytes);
        [
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))),
            vcvtq_f32_s32(vmovl_s16(vget_high_s16(words))),
        ]
    }
}
