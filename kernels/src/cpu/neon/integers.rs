//! Integer operations on 64 bytes, four registers.

use std::arch::aarch64::*;

use super::Neon;
use crate::cpu::SPAN;
use crate::cpu::simd::{IntegerOps, SpanOps};

// SAFETY of the `unsafe` blocks below: an `Neon` exists only where `detect` found the feature, and unaligned loads and
// stores stay within the references that are passed to them.
impl IntegerOps for Neon {
    type Integers = [int32x4_t; SPAN / 4];
    const PANEL_BIAS: i32 = 0;

    #[inline(always)]
    fn splat_i32(self, value: i32) -> Self::Integers {
        // SAFETY: the token proves the feature.
        unsafe { [vdupq_n_s32(value); SPAN / 4] }
    }

    #[inline(always)]
    fn load_bytes(self, bytes: &[u8; 64]) -> Self::Integers {
        let mut whole = self.splat_i32(0);
        for (quarter, bytes) in whole.iter_mut().zip(bytes.as_chunks::<16>().0) {
            // SAFETY: the token proves the feature; the load takes the 16 bytes.
            *quarter = unsafe { vreinterpretq_s32_u8(vld1q_u8(bytes.as_ptr())) };
        }
        whole
    }

    #[inline(always)]
    fn store_bytes(self, whole: Self::Integers, out: &mut [u8; 64]) {
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
    fn interleave_bytes(self, rows: [Self::Integers; 4]) -> [Self::Integers; 4] {
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
    fn nibbles(self, bytes: Self::Integers) -> [Self::Integers; 2] {
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
    fn broadcast_words(self, words: &[u32; 4]) -> Self::Integers {
        let mut whole = self.splat_i32(0);
        for (quarter, word) in whole.iter_mut().zip(words) {
            // SAFETY: the token proves the feature.
            *quarter = unsafe { vdupq_n_s32(*word as i32) };
        }
        whole
    }

    #[inline(always)]
    fn dot(
        self,
        mut sums: Self::Integers,
        bytes: Self::Integers,
        x: Self::Integers,
    ) -> Self::Integers {
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
    fn dot_unsigned(
        self,
        sums: Self::Integers,
        unsigned: Self::Integers,
        x: Self::Integers,
    ) -> Self::Integers {
        self.dot(sums, unsigned, x)
    }

    #[inline(always)]
    fn transpose_quarters(self, [a, b, c, d]: [Self::Integers; 4]) -> [Self::Integers; 4] {
        let mut transposed = [a; 4];
        for (index, transposed) in transposed.iter_mut().enumerate() {
            *transposed = [a[index], b[index], c[index], d[index]];
        }
        transposed
    }

    #[inline(always)]
    fn magnitude_bits(self, lanes: Self::Lanes) -> Self::Integers {
        let mut bits = self.splat_i32(0);
        for (bits, lanes) in bits.iter_mut().zip(lanes) {
            // SAFETY: the token proves the feature.
            *bits = unsafe { vreinterpretq_s32_f32(vabsq_f32(lanes)) };
        }
        bits
    }

    #[inline(always)]
    fn max_i32(self, mut a: Self::Integers, b: Self::Integers) -> Self::Integers {
        for (a, b) in a.iter_mut().zip(b) {
            // SAFETY: the token proves the feature.
            *a = unsafe { vmaxq_s32(*a, b) };
        }
        a
    }

    #[inline(always)]
    fn add_i32(self, mut a: Self::Integers, b: Self::Integers) -> Self::Integers {
        for (a, b) in a.iter_mut().zip(b) {
            // SAFETY: the token proves the feature.
            *a = unsafe { vaddq_s32(*a, b) };
        }
        a
    }

    #[inline(always)]
    fn quantise_lanes(self, values: Self::Lanes, inverses: Self::Lanes) -> Self::Integers {
        let mut rounded = self.splat_i32(0);
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
    fn pack_bytes(self, [a, b, c, d]: [Self::Integers; 4]) -> Self::Integers {
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
    fn low_bytes(self, whole: Self::Integers) -> [u8; 16] {
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
    fn quarter_bytes(self, mut whole: Self::Integers) -> Self::Integers {
        for quarter in &mut whole {
            // SAFETY: the token proves the feature.
            *quarter = unsafe {
                let order = vreinterpretq_u8_u32(vdupq_n_u32(0x0c08_0400));
                vreinterpretq_s32_s8(vqtbl1q_s8(vreinterpretq_s8_s32(*quarter), order))
            };
        }
        whole
    }

    #[inline(always)]
    fn broadcast_quarters(self, values: &[f32; 4]) -> Self::Lanes {
        // SAFETY: the token proves the feature; the load takes the 4 values.
        unsafe { [vld1q_f32(values.as_ptr()); 4] }
    }

    #[inline(always)]
    fn to_f32_lanes(self, whole: Self::Integers) -> Self::Lanes {
        let mut lanes = self.splat_lanes(0.0);
        for (lanes, whole) in lanes.iter_mut().zip(whole) {
            // SAFETY: the token proves the feature.
            *lanes = unsafe { vcvtq_f32_s32(whole) };
        }
        lanes
    }
}
