//! Quantisation of vectors to int8.

use super::{Operation, SPAN, SPAN_COLUMNS, Simd, padded};
use crate::QuantisedActivations;
use crate::activations::{ActivationSpan, NIBBLE_GROUP, int8_scale};
use powerinfer_tensor::BLOCK;

/// `out` = the vectors of `columns` elements in `x`, quantised to int8.
pub(crate) struct Quantise<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) columns: usize,
    pub(crate) out: &'a mut QuantisedActivations,
}

impl<'a> Quantise<'a> {
    /// The spans of all vectors, each with its values; the last span of a vector may have fewer values.
    #[inline(always)]
    fn spans(self) -> impl Iterator<Item = (&'a [f32], &'a mut ActivationSpan)> {
        let Self { x, columns, out } = self;
        // Without columns the number of vectors is undefined; it counts as one.
        (out.tokens, out.columns) = (x.len().checked_div(columns).unwrap_or(1), columns);
        let spans = columns.div_ceil(SPAN_COLUMNS);
        out.spans.resize(out.tokens * spans, ActivationSpan::ZERO);
        let vectors = x.chunks_exact(columns.max(1));
        vectors
            .flat_map(|x| x.chunks(SPAN_COLUMNS))
            .zip(&mut out.spans)
    }
}

impl Operation for Quantise<'_> {
    type Output = ();

    fn run_scalar(self) {
        for (x, span) in self.spans() {
            *span = ActivationSpan::ZERO;
            for (block, values) in x.chunks(BLOCK).enumerate() {
                span.set(block, &padded(values));
            }
        }
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        for (x, span) in self.spans() {
            if let Ok(x) = x.try_into() {
                quantise_span(simd, x, span);
            } else {
                let mut padded = [0.0; SPAN_COLUMNS];
                padded[..x.len()].copy_from_slice(x);
                quantise_span(simd, &padded, span);
            }
        }
    }
}

/// Quantises `x` into `span`.
#[inline(always)]
fn quantise_span<S: Simd>(simd: S, x: &[f32; SPAN_COLUMNS], span: &mut ActivationSpan) {
    let halves = x.as_chunks::<SPAN>().0;
    let mut largest = [0u32; SPAN];
    for block in 0..SPAN {
        let low = simd.magnitude_bits(simd.load_lanes(&halves[2 * block]));
        let high = simd.magnitude_bits(simd.load_lanes(&halves[2 * block + 1]));
        let mut bytes = [0; 64];
        simd.store_bytes(simd.max_i32(low, high), &mut bytes);
        let mut most = 0;
        for word in bytes.as_chunks().0 {
            most = u32::from_ne_bytes(*word).max(most);
        }
        largest[block] = most;
    }
    let mut inverses = [0.0; SPAN];
    for block in 0..SPAN {
        (span.scales[block], inverses[block]) = int8_scale(largest[block]);
    }
    let quants = span.quants.as_chunks_mut::<{ BLOCK / 2 }>().0;
    let half_blocks = span.half_blocks.as_chunks_mut::<{ BLOCK / 2 }>().0;
    for block in 0..SPAN {
        let inverse = simd.splat_lanes(inverses[block]);
        let low = simd.quantise_lanes(simd.load_lanes(&halves[2 * block]), inverse);
        let high = simd.quantise_lanes(simd.load_lanes(&halves[2 * block + 1]), inverse);
        span.sums[block] = simd.sum_lanes(simd.to_f32_lanes(simd.add_i32(low, high))) as i32;
        let (low, high) = (
            bytemuck::cast(simd.low_bytes(low)),
            bytemuck::cast(simd.low_bytes(high)),
        );
        (quants[2 * block], quants[2 * block + 1]) = (low, high);
        let first = block / NIBBLE_GROUP * 2 * NIBBLE_GROUP + block % NIBBLE_GROUP;
        (half_blocks[first], half_blocks[first + NIBBLE_GROUP]) = (low, high);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;

    #[test]
    fn all_instruction_sets_quantise_to_the_same_bits() {
        let special = [
            0.0,
            -0.0,
            1e-31,
            -1e-38,
            f32::NAN,
            f32::INFINITY,
            3e38,
            -1.5,
        ];
        for columns in [1, 15, 32, 33, 511, 512, 513, 1100] {
            for with_special in [false, true] {
                // Magnitudes from 1e-6 to 1, so that halves are rounded too.
                let value = |index: usize| {
                    let magnitude = 0.1f32.powi((index / 64) as i32 % 7);
                    ((index * 37 % 255) as f32 / 254.0 - 0.25) * magnitude
                };
                let mut x: Vec<f32> = (0..3 * columns).map(value).collect();
                if with_special {
                    let every_seventh = x.iter_mut().step_by(7);
                    every_seventh
                        .zip(special.iter().cycle())
                        .for_each(|(x, special)| *x = *special);
                }
                let bits = |isa: Isa| {
                    let mut out = QuantisedActivations::default();
                    // The earlier contents do not matter.
                    isa.quantise(&[f32::NAN; 5000], 1000, &mut out);
                    isa.quantise(&x, columns, &mut out);
                    let span = |span: &ActivationSpan| {
                        let scales = span.scales.map(f32::to_bits);
                        (span.quants, span.half_blocks, scales, span.sums)
                    };
                    out.spans.iter().map(span).collect::<Vec<_>>()
                };
                let expected = bits(Isa::SCALAR);
                assert_eq!(expected.len(), 3 * columns.div_ceil(SPAN_COLUMNS));
                for isa in Isa::available() {
                    assert!(bits(isa) == expected, "{isa}, {columns} columns");
                }
            }
        }
    }
}
