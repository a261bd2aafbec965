//! MXFP4, the OCP microscaling format of gpt-oss's experts: blocks of 32 four-bit floating-point numbers (E2M1), each block with a
//! power of two as its scale (E8M0).

use rayon::prelude::*;

/// Number of elements in a block.
pub(crate) const BLOCK_LENGTH: usize = 32;

/// Values of the 16 codes.
pub(crate) const VALUES: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// Scale encoded by `exponent`: 2^(exponent − 127); infinity for 255, although the format defines it as NaN.
pub(crate) fn scale(exponent: u8) -> f32 {
    2f64.powi(i32::from(exponent) - 127) as f32
}

/// Dequantises blocks whose bytes each hold two neighbouring elements, the first in the low nibble; `exponents` has one per block.
pub(crate) fn dequantise(bytes: &[u8], exponents: &[u8]) -> Vec<f32> {
    // Blocks that one thread dequantises.
    const BLOCKS: usize = 1 << 11;
    let mut values = vec![0.0; 2 * bytes.len()];
    let parts = values.par_chunks_mut(BLOCKS * BLOCK_LENGTH);
    let stored = bytes.par_chunks(BLOCKS * BLOCK_LENGTH / 2);
    let parts = parts.zip(stored).zip(exponents.par_chunks(BLOCKS));
    parts.for_each(|((values, bytes), exponents)| {
        let blocks = bytes.chunks_exact(BLOCK_LENGTH / 2).zip(exponents);
        for (values, (block, exponent)) in values.chunks_exact_mut(BLOCK_LENGTH).zip(blocks) {
            let scale = scale(*exponent);
            let codes = block.iter().flat_map(|byte| [byte & 15, byte >> 4]);
            for (value, code) in values.iter_mut().zip(codes) {
                *value = VALUES[usize::from(code)] * scale;
            }
        }
    });
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_sign_exponent_and_mantissa() {
        for (code, value) in (0u8..).zip(VALUES) {
            let (exponent, mantissa) = (code >> 1 & 3, f32::from(code & 1));
            let magnitude = match exponent {
                0 => 0.5 * mantissa,
                exponent => (1.0 + 0.5 * mantissa) * 2f32.powi(i32::from(exponent) - 1),
            };
            assert_eq!(value.abs(), magnitude);
            assert_eq!(value.is_sign_negative(), code & 8 != 0);
        }
        assert_eq!(
            [scale(127), scale(130), scale(0)],
            [1.0, 8.0, 2f32.powi(-127)]
        );
        assert!(scale(255).is_infinite());
    }

    #[test]
    fn the_low_nibble_is_first() {
        let mut bytes = [0; 32];
        (bytes[0], bytes[16]) = (0x72, 0x0f);
        let values = dequantise(&bytes, &[128, 126]);
        assert_eq!(values[..3], [2.0, 12.0, 0.0]);
        assert_eq!((values[32], values.len()), (-3.0, 64));
    }
}
