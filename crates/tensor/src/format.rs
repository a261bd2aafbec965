//! Number formats of weight matrices.

use std::fmt;
use std::str::FromStr;

use crate::TensorError;

/// Columns in one block: the unit of quantisation, and of every kernel's inner loop.
pub const BLOCK: usize = 32;

/// Blocks of a super-block, whose scales and minima share an `f16` each in [`Format::Q4K`].
pub const SUPER_BLOCK: usize = 8;

/// Number format of a weight matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Format {
    /// IEEE single precision, 4 bytes per weight.
    F32,
    /// IEEE half precision, 2 bytes per weight.
    F16,
    /// The upper half of a single-precision number, 2 bytes per weight.
    Bf16,
    /// Blocks of 32 signed bytes with one `f16` scale: 34 bytes per block.
    Q8_0,
    /// Blocks of 32 four-bit numbers with a scale and a minimum of six bits each, multiples of two `f16`
    /// that eight blocks share: 148 bytes per eight blocks. Represents the same numbers as ggml's Q4_K.
    Q4K,
    /// Blocks of 32 four-bit numbers, biased by 8, with one `f16` scale: 18 bytes per block.
    Q4_0,
}

impl Format {
    /// Every format, widest first.
    pub const ALL: [Format; 6] = [
        Format::F32,
        Format::F16,
        Format::Bf16,
        Format::Q8_0,
        Format::Q4K,
        Format::Q4_0,
    ];

    /// Name in files, on the command line and in messages.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "f32",
            Format::F16 => "f16",
            Format::Bf16 => "bf16",
            Format::Q8_0 => "q8_0",
            Format::Q4K => "q4_k",
            Format::Q4_0 => "q4_0",
        }
    }

    /// Whether 32 weights share a scale; such a matrix has several planes.
    pub fn is_quantised(self) -> bool {
        matches!(self, Format::Q8_0 | Format::Q4K | Format::Q4_0)
    }

    /// Whether numbers have four bits.
    pub fn has_nibbles(self) -> bool {
        matches!(self, Format::Q4K | Format::Q4_0)
    }

    /// Whether blocks have a scale and a minimum, so that a weight is `number * scale - minimum`.
    pub fn has_minima(self) -> bool {
        self == Format::Q4K
    }

    /// Size in bytes of one row, all planes together, padding included.
    pub fn row_bytes(self, columns: usize) -> usize {
        match self {
            Format::F32 => columns * 4,
            Format::F16 | Format::Bf16 => columns * 2,
            Format::Q8_0 => columns.div_ceil(BLOCK) * (BLOCK + 2),
            Format::Q4K => {
                let blocks = columns.div_ceil(BLOCK);
                blocks * (BLOCK / 2 + 2) + blocks.div_ceil(SUPER_BLOCK) * 4
            }
            Format::Q4_0 => columns.div_ceil(BLOCK) * (BLOCK / 2 + 2),
        }
    }

    /// Magnitude from which on a weight becomes infinite or another number.
    pub fn limit(self) -> f32 {
        // Halfway between the largest `f16` and the next power of two, which rounds to infinity.
        const F16: f32 = 65520.0;
        match self {
            Format::F32 => f32::INFINITY,
            Format::F16 => F16,
            // As above, of the upper half of an `f32`.
            Format::Bf16 => f32::from_bits(0x7f7f_8000),
            // The largest quant has the magnitude 127, or 8.
            Format::Q8_0 => F16 * 127.0,
            Format::Q4_0 => F16 * 8.0,
            // The largest factor of a minimum is 63.
            Format::Q4K => 65504.0 * 63.0,
        }
    }

    /// Index of the first of `values` that the format cannot represent: a NaN, or one not below its [limit](Self::limit).
    pub fn first_beyond(self, values: &[f32]) -> Option<usize> {
        // Chunks without an early exit are compared by vectors.
        const CHUNK: usize = 1024;
        let limit = self.limit();
        let is_below = |value: &f32| value.abs() < limit;
        let chunk = values
            .chunks(CHUNK)
            .position(|chunk| !chunk.iter().fold(true, |all, value| all & is_below(value)))?;
        let within = values[chunk * CHUNK..]
            .iter()
            .position(|value| !is_below(value));
        within.map(|index| chunk * CHUNK + index)
    }

    /// All names, for messages.
    pub fn names() -> String {
        Format::ALL.map(Format::name).join(", ")
    }
}

impl fmt::Display for Format {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl FromStr for Format {
    type Err = TensorError;

    fn from_str(name: &str) -> Result<Self, TensorError> {
        Format::ALL
            .into_iter()
            .find(|format| format.name() == name)
            .ok_or_else(|| TensorError::UnknownFormat {
                name: name.to_owned(),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_unknown_ones_are_listed() {
        for format in Format::ALL {
            assert_eq!(format.to_string().parse(), Ok(format));
        }
        let message = "q5_0".parse::<Format>().unwrap_err().to_string();
        assert_eq!(
            message,
            "unknown weight format `q5_0`, expected one of f32, f16, bf16, q8_0, q4_k, q4_0"
        );
    }

    #[test]
    fn the_last_block_of_a_row_is_stored_whole() {
        assert_eq!(Format::F32.row_bytes(33), 132);
        assert_eq!(Format::F16.row_bytes(33), 66);
        assert_eq!(Format::Bf16.row_bytes(33), 66);
        assert_eq!(Format::Q8_0.row_bytes(33), 68);
        assert_eq!(Format::Q4K.row_bytes(33), 40);
        assert_eq!(Format::Q4K.row_bytes(4096), 4096 * 37 / 64); // 4.625 bits a weight
        assert_eq!(Format::Q4K.row_bytes(5504), 172 * 18 + 22 * 4);
        assert_eq!(Format::Q4_0.row_bytes(33), 36);
        assert!(Format::ALL.iter().all(|format| format.row_bytes(0) == 0));
    }
}
