//! Vectors rounded to bytes: what products with quantised weights read.

use crate::cpu::{GROUP, SPAN, SPAN_COLUMNS};
use powerinfer_tensor::BLOCK;

/// Some vectors, each in blocks of 32 numbers that share a scale: a number is about
/// `quant * scale`, with quants between -127 and 127.
///
/// Made by [`Isa::quantise`](crate::Isa::quantise) and used again from product to product; the
/// memory stays. The error of a number is at most half a scale, 1/254 of the largest magnitude of
/// its block. A block that holds a NaN or an infinity has the scale NaN, so that every product it
/// is part of is NaN; one whose numbers are all below 1e-30 counts as zeros.
#[derive(Debug, Clone, Default)]
pub struct QuantisedActivations {
    pub(crate) tokens: usize,
    pub(crate) columns: usize,
    /// `[tokens, spans]`.
    pub(crate) spans: Vec<ActivationSpan>,
}

impl QuantisedActivations {
    /// Number of vectors.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Numbers of a vector.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes of a vector of `columns` numbers.
    pub fn vector_bytes(columns: usize) -> usize {
        columns.div_ceil(SPAN_COLUMNS) * size_of::<ActivationSpan>()
    }

    /// Vector `token`.
    pub fn vector(&self, token: usize) -> QuantisedVector<'_> {
        QuantisedVector {
            columns: self.columns,
            spans: self.token(token),
        }
    }

    /// The spans of vector `token`.
    pub(crate) fn token(&self, token: usize) -> &[ActivationSpan] {
        let spans = self.columns.div_ceil(SPAN_COLUMNS);
        &self.spans[token * spans..][..spans]
    }
}

/// One vector of [`QuantisedActivations`].
#[derive(Debug, Clone, Copy)]
pub struct QuantisedVector<'a> {
    pub(crate) columns: usize,
    pub(crate) spans: &'a [ActivationSpan],
}

/// Sixteen blocks of a vector, zeros where it has fewer.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct ActivationSpan {
    /// The blocks one after the other.
    pub(crate) quants: [i8; SPAN_COLUMNS],
    /// The same with the first halves of every four blocks before their second halves: as the low
    /// and the high nibbles of four-bit weights lie.
    pub(crate) halves: [i8; SPAN_COLUMNS],
    /// One a block.
    pub(crate) scales: [f32; SPAN],
    /// Sums of the quants, one a block.
    pub(crate) sums: [i32; SPAN],
}

impl ActivationSpan {
    pub(crate) const ZERO: Self = Self {
        quants: [0; SPAN_COLUMNS],
        halves: [0; SPAN_COLUMNS],
        scales: [0.0; SPAN],
        sums: [0; SPAN],
    };

    /// Rounds block `block`; `values` holds zeros past the last number.
    #[inline(always)]
    pub(crate) fn set(&mut self, block: usize, values: &[f32; BLOCK]) {
        // Bits of magnitudes are ordered as the magnitudes are, and those of NaNs come last.
        let mut largest = 0;
        for value in values {
            largest = largest.max(value.to_bits() & 0x7fff_ffff);
        }
        let (scale, inverse) = rounding(largest);
        self.scales[block] = scale;
        let mut quants = [0; BLOCK];
        for (quant, value) in quants.iter_mut().zip(values) {
            *quant = round(*value, inverse);
        }
        let mut sum = 0;
        for quant in quants {
            sum += i32::from(quant);
        }
        self.sums[block] = sum;
        self.quants[block * BLOCK..][..BLOCK].copy_from_slice(&quants);
        let (first, second) = quants.split_at(BLOCK / 2);
        let place = block / GROUP * GROUP * BLOCK + block % GROUP * (BLOCK / 2);
        self.halves[place..][..BLOCK / 2].copy_from_slice(first);
        self.halves[place + GROUP * BLOCK / 2..][..BLOCK / 2].copy_from_slice(second);
    }
}

/// What numbers are rounded with whose largest magnitude has these bits: what a whole number stands for,
/// and what numbers are multiplied by before.
#[inline(always)]
pub(crate) fn rounding(largest: u32) -> (f32, f32) {
    // Without a branch around the divisions, so that several numbers go through them together.
    let largest = f32::from_bits(largest);
    let (scale, inverse) = (largest / 127.0, 127.0 / largest);
    let is_some = largest.is_finite() && largest >= 1e-30;
    let none = if largest.is_finite() { 0.0 } else { f32::NAN };
    match is_some {
        true => (scale, inverse),
        false => (none, 0.0),
    }
}

/// A number as a whole one between -127 and 127.
#[inline(always)]
pub(crate) fn round(value: f32, inverse: f32) -> i8 {
    // One that is no number would spoil the rest; its scale tells of it already.
    let value = if inverse == 0.0 { 0.0 } else { value * inverse };
    // Adding 1.5 * 2^23 leaves the nearest whole number, ties to even, in the last byte.
    (value + 12_582_912.0).to_bits() as u8 as i8
}
