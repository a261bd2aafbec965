//! Element types of GGUF tensors, and their dequantisation to f32.
//!
//! Operations and their order are those of ggml, so that results are bit-identical.

use powerinfer_tensor::{Format, bf16, f16};

use crate::mxfp4;

/// Element type: elements are stored in blocks along a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Encoding {
    /// Name in ggml.
    pub(super) name: &'static str,
    /// Elements per block.
    pub(super) block_length: usize,
    /// Bytes per block.
    pub(super) block_bytes: usize,
    /// Dequantises blocks; `None` if the type is known but not supported.
    pub(super) decode: Option<Decode>,
}

/// Dequantises whole blocks into as many values as they hold.
pub(super) type Decode = fn(&[u8], &mut [f32]);

/// Number of 32-bit integers in the original PowerInfer's files. It forked ggml before 16 to 18, there 8-, 16- and 32-bit
/// integers, were given to formats of weights, and integers moved to 24 to 26.
pub(super) const ORIGINAL_I32: u32 = 18;

impl Encoding {
    /// Returns the encoding with type `id` in a file of the original PowerInfer. The numbers of today's ggml are known too.
    pub(super) fn from_original_id(id: u32) -> Result<Self, String> {
        Self::from_id(if (16..=ORIGINAL_I32).contains(&id) {
            id + 8
        } else {
            id
        })
    }

    /// Returns the encoding with ggml's type `id`.
    pub(super) fn from_id(id: u32) -> Result<Self, String> {
        let (name, block_length, block_bytes, decode): (_, _, _, Option<Decode>) = match id {
            0 => ("F32", 1, 4, Some(decode_f32)),
            1 => ("F16", 1, 2, Some(decode_f16)),
            2 => ("Q4_0", 32, 18, Some(decode_q4_0)),
            3 => ("Q4_1", 32, 20, Some(decode_q4_1)),
            6 => ("Q5_0", 32, 22, Some(decode_q5_0)),
            7 => ("Q5_1", 32, 24, Some(decode_q5_1)),
            8 => ("Q8_0", 32, 34, Some(decode_q8_0)),
            9 => ("Q8_1", 32, 36, None),
            10 => ("Q2_K", 256, 84, Some(decode_q2_k)),
            11 => ("Q3_K", 256, 110, Some(decode_q3_k)),
            12 => ("Q4_K", 256, 144, Some(decode_q4_k)),
            13 => ("Q5_K", 256, 176, Some(decode_q5_k)),
            14 => ("Q6_K", 256, 210, Some(decode_q6_k)),
            15 => ("Q8_K", 256, 292, None),
            16 => ("IQ2_XXS", 256, 66, None),
            17 => ("IQ2_XS", 256, 74, None),
            18 => ("IQ3_XXS", 256, 98, None),
            19 => ("IQ1_S", 256, 50, None),
            20 => ("IQ4_NL", 32, 18, Some(decode_iq4_nl)),
            21 => ("IQ3_S", 256, 110, None),
            22 => ("IQ2_S", 256, 82, None),
            23 => ("IQ4_XS", 256, 136, Some(decode_iq4_xs)),
            24 => ("I8", 1, 1, None),
            25 => ("I16", 1, 2, None),
            26 => ("I32", 1, 4, None),
            27 => ("I64", 1, 8, None),
            28 => ("F64", 1, 8, None),
            29 => ("IQ1_M", 256, 56, None),
            30 => ("BF16", 1, 2, Some(decode_bf16)),
            34 => ("TQ1_0", 256, 54, None),
            35 => ("TQ2_0", 256, 66, None),
            39 => ("MXFP4", 32, 17, Some(decode_mxfp4)),
            40 => ("NVFP4", 64, 36, None),
            41 => ("Q1_0", 128, 18, None),
            42 => ("Q2_0", 64, 18, None),
            4 | 5 | 31..=33 | 36..=38 => {
                return Err(format!("its type {id} was removed from the format"));
            }
            other => return Err(format!("its type {other} is unknown")),
        };
        Ok(Self {
            name,
            block_length,
            block_bytes,
            decode,
        })
    }
}

/// Returns ggml's type of matrices in `format`; `None` for `q4_k`, whose layout differs.
pub(super) fn type_of(format: Format) -> Option<u32> {
    match format {
        Format::F32 => Some(0),
        Format::F16 => Some(1),
        Format::Q4_0 => Some(2),
        Format::Q8_0 => Some(8),
        Format::Bf16 => Some(30),
        Format::Q4K => None,
    }
}

/// Applies `decode` to every block of `BYTES` bytes with `LENGTH` values.
fn each_block<const BYTES: usize, const LENGTH: usize>(
    bytes: &[u8],
    values: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; LENGTH]),
) {
    let (blocks, _) = bytes.as_chunks::<BYTES>();
    let (values, _) = values.as_chunks_mut::<LENGTH>();
    for (block, values) in blocks.iter().zip(values) {
        decode(block, values);
    }
}

/// Reads the f16 at byte `offset`.
fn f16_at(block: &[u8], offset: usize) -> f32 {
    f16::from_le_bytes([block[offset], block[offset + 1]]).to_f32()
}

fn decode_f32(bytes: &[u8], values: &mut [f32]) {
    each_block(bytes, values, |block, values| {
        *values = [f32::from_le_bytes(*block)];
    });
}

fn decode_f16(bytes: &[u8], values: &mut [f32]) {
    each_block(bytes, values, |block, values| {
        *values = [f16::from_le_bytes(*block).to_f32()];
    });
}

fn decode_bf16(bytes: &[u8], values: &mut [f32]) {
    each_block(bytes, values, |block, values| {
        *values = [bf16::from_le_bytes(*block).to_f32()];
    });
}

// Blocks of 32. A byte of 4-bit values holds element `index` in its low nibble and element `index + 16` in its
// high one.

/// MXFP4: exponent of the scale; 4-bit floating-point numbers.
fn decode_mxfp4(bytes: &[u8], values: &mut [f32]) {
    each_block::<17, 32>(bytes, values, |block, values| {
        let scale = mxfp4::scale(block[0]);
        for (index, packed) in block[1..].iter().enumerate() {
            values[index] = mxfp4::VALUES[usize::from(packed & 15)] * scale;
            values[index + 16] = mxfp4::VALUES[usize::from(packed >> 4)] * scale;
        }
    });
}

/// Q4_0: scale; 4-bit values minus 8.
fn decode_q4_0(bytes: &[u8], values: &mut [f32]) {
    each_block::<18, 32>(bytes, values, |block, values| {
        let scale = f16_at(block, 0);
        for (index, packed) in block[2..].iter().enumerate() {
            values[index] = f32::from((packed & 15) as i8 - 8) * scale;
            values[index + 16] = f32::from((packed >> 4) as i8 - 8) * scale;
        }
    });
}

/// Q4_1: scale and minimum; 4-bit values.
fn decode_q4_1(bytes: &[u8], values: &mut [f32]) {
    each_block::<20, 32>(bytes, values, |block, values| {
        let (scale, minimum) = (f16_at(block, 0), f16_at(block, 2));
        for (index, packed) in block[4..].iter().enumerate() {
            values[index] = f32::from(packed & 15) * scale + minimum;
            values[index + 16] = f32::from(packed >> 4) * scale + minimum;
        }
    });
}

/// Returns bit 4 of element `index`, from the four bytes at `place`.
fn fifth_bit(block: &[u8], place: usize, index: usize) -> u8 {
    (block[place + index / 8] >> (index % 8) & 1) << 4
}

/// Q5_0: scale; high bits; low 4 bits; values minus 16.
fn decode_q5_0(bytes: &[u8], values: &mut [f32]) {
    each_block::<22, 32>(bytes, values, |block, values| {
        let scale = f16_at(block, 0);
        for (index, packed) in block[6..].iter().enumerate() {
            let lower = packed & 15 | fifth_bit(block, 2, index);
            let upper = packed >> 4 | fifth_bit(block, 2, index + 16);
            values[index] = f32::from(lower as i8 - 16) * scale;
            values[index + 16] = f32::from(upper as i8 - 16) * scale;
        }
    });
}

/// Q5_1: scale and minimum; high bits; low 4 bits.
fn decode_q5_1(bytes: &[u8], values: &mut [f32]) {
    each_block::<24, 32>(bytes, values, |block, values| {
        let (scale, minimum) = (f16_at(block, 0), f16_at(block, 2));
        for (index, packed) in block[8..].iter().enumerate() {
            let lower = packed & 15 | fifth_bit(block, 4, index);
            let upper = packed >> 4 | fifth_bit(block, 4, index + 16);
            values[index] = f32::from(lower) * scale + minimum;
            values[index + 16] = f32::from(upper) * scale + minimum;
        }
    });
}

/// Q8_0: scale; 8-bit values.
fn decode_q8_0(bytes: &[u8], values: &mut [f32]) {
    each_block::<34, 32>(bytes, values, |block, values| {
        let scale = f16_at(block, 0);
        for (value, byte) in values.iter_mut().zip(&block[2..]) {
            *value = f32::from(*byte as i8) * scale;
        }
    });
}

/// Codebook of IQ4.
const IQ4_VALUES: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Dequantises 32 values from 16 bytes of IQ4.
fn decode_iq4(scale: f32, bytes: &[u8], values: &mut [f32]) {
    for (index, packed) in bytes.iter().enumerate() {
        values[index] = scale * f32::from(IQ4_VALUES[usize::from(packed & 15)]);
        values[index + 16] = scale * f32::from(IQ4_VALUES[usize::from(packed >> 4)]);
    }
}

/// IQ4_NL: scale; 4-bit codebook indices.
fn decode_iq4_nl(bytes: &[u8], values: &mut [f32]) {
    each_block::<18, 32>(bytes, values, |block, values| {
        decode_iq4(f16_at(block, 0), &block[2..], values);
    });
}

// Super-blocks of 256, in groups of 16 or 32 with their own scales. Bits of elements at a distance of 32, 64 or
// 128 share a byte.

/// IQ4_XS: scale; high 2 bits of eight group scales, then their low 4 bits; values as in IQ4_NL.
fn decode_iq4_xs(bytes: &[u8], values: &mut [f32]) {
    each_block::<136, 256>(bytes, values, |block, values| {
        let scale = f16_at(block, 0);
        let upper_bits = u16::from_le_bytes([block[2], block[3]]);
        for (group, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let lower = block[4 + group / 2] >> (4 * (group % 2)) & 15;
            let upper = (upper_bits >> (2 * group) & 3) as u8;
            let group_scale = scale * f32::from((lower | upper << 4) as i8 - 32);
            decode_iq4(group_scale, &block[8 + 16 * group..][..16], values);
        }
    });
}

/// Q2_K: 4-bit scale and minimum per group of 16; 2-bit values; scales of both.
fn decode_q2_k(bytes: &[u8], values: &mut [f32]) {
    each_block::<84, 256>(bytes, values, |block, values| {
        let (scale, minimum) = (f16_at(block, 80), f16_at(block, 82));
        for (group, values) in values.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let group_scale = scale * f32::from(block[group] & 15);
            let group_minimum = minimum * f32::from(block[group] >> 4);
            let start = 32 * (group / 8) + 16 * (group % 2);
            let shift = 2 * (group / 2 % 4);
            for (value, packed) in values.iter_mut().zip(&block[16 + start..]) {
                *value = group_scale * f32::from(packed >> shift & 3) - group_minimum;
            }
        }
    });
}

/// Q3_K: high bits; low 2 bits; packed 6-bit scales per group of 16; their scale.
fn decode_q3_k(bytes: &[u8], values: &mut [f32]) {
    each_block::<110, 256>(bytes, values, |block, values| {
        let (third_bits, low_bits, scales) = (&block[..32], &block[32..96], &block[96..108]);
        let scale = f16_at(block, 108);
        for (group, values) in values.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let lower = scales[group % 8] >> (4 * (group / 8)) & 15;
            let upper = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
            let group_scale = scale * f32::from((lower | upper << 4) as i8 - 32);
            let column = 16 * (group % 2);
            let low_bits = &low_bits[32 * (group / 8) + column..];
            let shift = 2 * (group / 2 % 4);
            let elements = low_bits.iter().zip(&third_bits[column..]);
            for (value, (low, third)) in values.iter_mut().zip(elements) {
                let number = low >> shift & 3 | (third >> (group / 2) & 1) << 2;
                *value = group_scale * f32::from(number as i8 - 4);
            }
        }
    });
}

/// Unpacks the 6-bit scale and minimum of `group` from the twelve bytes of eight groups.
fn scale_and_minimum(packed: &[u8], group: usize) -> (f32, f32) {
    let (scale, minimum) = if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        // The low 4 bits share a byte; the high 2 are above the 6 bits of the first groups.
        (
            packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
            packed[group + 4] >> 4 | packed[group] >> 6 << 4,
        )
    };
    (f32::from(scale), f32::from(minimum))
}

/// Q4_K: scales of the scales and minima; scale and minimum per group of 32; 4-bit values.
fn decode_q4_k(bytes: &[u8], values: &mut [f32]) {
    each_block::<144, 256>(bytes, values, |block, values| {
        let (scale, minimum) = (f16_at(block, 0), f16_at(block, 2));
        for (group, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (own_scale, own_minimum) = scale_and_minimum(&block[4..16], group);
            let (group_scale, group_minimum) = (scale * own_scale, minimum * own_minimum);
            let packed = &block[16 + 32 * (group / 2)..];
            for (value, packed) in values.iter_mut().zip(packed) {
                let number = packed >> (4 * (group % 2)) & 15;
                *value = group_scale * f32::from(number) - group_minimum;
            }
        }
    });
}

/// Q5_K: as Q4_K, with the high bits before the low 4 bits.
fn decode_q5_k(bytes: &[u8], values: &mut [f32]) {
    each_block::<176, 256>(bytes, values, |block, values| {
        let (scale, minimum) = (f16_at(block, 0), f16_at(block, 2));
        for (group, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (own_scale, own_minimum) = scale_and_minimum(&block[4..16], group);
            let (group_scale, group_minimum) = (scale * own_scale, minimum * own_minimum);
            let elements = block[48 + 32 * (group / 2)..].iter().zip(&block[16..48]);
            for (value, (packed, fifth)) in values.iter_mut().zip(elements) {
                let number = packed >> (4 * (group % 2)) & 15 | (fifth >> group & 1) << 4;
                *value = group_scale * f32::from(number) - group_minimum;
            }
        }
    });
}

/// Q6_K: low 4 bits; high 2 bits; 8-bit scale per group of 16; their scale.
fn decode_q6_k(bytes: &[u8], values: &mut [f32]) {
    each_block::<210, 256>(bytes, values, |block, values| {
        let (low_bits, high_bits, scales) = (&block[..128], &block[128..192], &block[192..208]);
        let scale = f16_at(block, 208);
        for (group, values) in values.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let group_scale = scale * f32::from(scales[group] as i8);
            let (row, quarter, column) = (group / 8, group / 2 % 4, 16 * (group % 2));
            let low_bits = &low_bits[64 * row + 32 * (quarter % 2) + column..];
            let high_bits = &high_bits[32 * row + column..];
            let elements = low_bits.iter().zip(high_bits);
            for (value, (low, high)) in values.iter_mut().zip(elements) {
                let low = low >> (4 * (quarter / 2)) & 15;
                let number = low | (high >> (2 * quarter) & 3) << 4;
                *value = group_scale * f32::from(number as i8 - 32);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_decoder_fills_whole_blocks_of_its_encoding() {
        for id in 0..100 {
            let Ok(encoding) = Encoding::from_id(id) else {
                continue;
            };
            let Some(decode) = encoding.decode else {
                continue;
            };
            let mut values = vec![f32::NAN; 3 * encoding.block_length];
            decode(&vec![0; 3 * encoding.block_bytes], &mut values);
            let unset = values.iter().filter(|value| value.is_nan()).count();
            assert_eq!(unset, 0, "{}", encoding.name);
        }
    }

    #[test]
    fn removed_and_unknown_types_are_refused() {
        for id in [4, 5, 31, 32, 33, 36, 37, 38] {
            let message = Encoding::from_id(id).unwrap_err();
            assert!(message.contains("removed"), "{message}");
        }
        for id in [43, 999, u32::MAX] {
            let message = Encoding::from_id(id).unwrap_err();
            assert!(message.contains("unknown"), "{message}");
        }
    }
}
