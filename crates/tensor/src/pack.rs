//! Packing of `f32` rows into a format, and the matrix that owns the result.

use half::{bf16, f16};

use crate::format::{BLOCK, SUPER_BLOCK};
use crate::pack_q4_k::{SuperBlock, pack_super_block, unpack_ggml};
use crate::{Format, Matrix, MatrixData};

/// Packs `values`, `[rows, columns]` row-major, into `format`.
///
/// Rounds as ggml does, bit for bit. `Q8_0`: the scale is the largest magnitude over 127, quants
/// are rounded to nearest, halves away from zero. `Q4_0`: the scale is the number of largest
/// magnitude over -8, so that it becomes nibble 0. Quants are computed with the `f32` scale, which
/// is then stored as `f16`. `F16` and `Bf16` round to nearest, ties to even; beyond 65504, `F16` is
/// infinite. In the quantised formats a NaN
/// becomes the smallest quant or zero, and scales saturate to what `f16` can hold. `Q4K` differs from
/// ggml's bits: after the same search for scales and minima, their neighbours are tried, too.
///
/// # Panics
///
/// Panics if `values` does not hold `rows * columns` numbers.
pub fn pack(format: Format, rows: usize, columns: usize, values: &[f32]) -> OwnedMatrix {
    assert_eq!(
        Some(values.len()),
        rows.checked_mul(columns),
        "values of a matrix of {rows} x {columns}"
    );
    let data = match format {
        Format::F32 => OwnedData::F32(values.to_vec()),
        Format::F16 => OwnedData::F16(values.iter().copied().map(f16::from_f32).collect()),
        Format::Bf16 => OwnedData::Bf16(values.iter().copied().map(bf16::from_f32).collect()),
        Format::Q8_0 => {
            let mut quants = Vec::with_capacity(rows * columns.next_multiple_of(BLOCK));
            let scales = pack_blocks(columns, values, |block| {
                let (packed, scale) = pack_q8_0(block);
                quants.extend(packed);
                scale
            });
            OwnedData::Q8_0 { quants, scales }
        }
        Format::Q4K => {
            let mut planes = Q4KPlanes::with_capacity(rows, columns);
            for row in values.chunks(columns.max(1)) {
                for part in row.chunks(SUPER_BLOCK * BLOCK) {
                    planes.push(&pack_super_block(part), part.len());
                }
            }
            planes.into_data()
        }
        Format::Q4_0 => {
            let mut quants = Vec::with_capacity(rows * columns.next_multiple_of(BLOCK) / 2);
            let scales = pack_blocks(columns, values, |block| {
                let (packed, scale) = pack_q4_0(block);
                quants.extend(packed);
                scale
            });
            OwnedData::Q4_0 { quants, scales }
        }
    };
    OwnedMatrix {
        rows,
        columns,
        data,
    }
}

/// Converts ggml's blocks of Q4_K to a matrix `[rows, columns]` of the same numbers.
///
/// # Panics
///
/// Panics if `columns` is not a multiple of 256, or if `blocks` does not hold 144 bytes for every 256 numbers.
pub fn repack_q4_k(rows: usize, columns: usize, blocks: &[u8]) -> OwnedMatrix {
    let (blocks, rest) = blocks.as_chunks();
    assert!(
        rest.is_empty() && columns.is_multiple_of(SUPER_BLOCK * BLOCK),
        "whole super-blocks"
    );
    let expected = rows.checked_mul(columns / (SUPER_BLOCK * BLOCK));
    assert_eq!(Some(blocks.len()), expected, "blocks of {rows} x {columns}");
    let mut planes = Q4KPlanes::with_capacity(rows, columns);
    for block in blocks {
        planes.push(&unpack_ggml(block), SUPER_BLOCK * BLOCK);
    }
    OwnedMatrix {
        rows,
        columns,
        data: planes.into_data(),
    }
}

/// Planes of a `Q4K` matrix under construction.
struct Q4KPlanes {
    quants: Vec<u8>,
    scales: Vec<[f16; 2]>,
    factors: Vec<[u8; 2]>,
}

impl Q4KPlanes {
    fn with_capacity(rows: usize, columns: usize) -> Self {
        let blocks = rows * columns.div_ceil(BLOCK);
        Self {
            quants: Vec::with_capacity(blocks * BLOCK / 2),
            scales: Vec::new(),
            factors: Vec::with_capacity(blocks),
        }
    }

    /// Appends the blocks that hold the first `columns` numbers of `super_block`.
    fn push(&mut self, super_block: &SuperBlock, columns: usize) {
        let blocks = columns.div_ceil(BLOCK);
        self.scales.push(super_block.scales);
        self.factors.extend(&super_block.factors[..blocks]);
        for numbers in &super_block.numbers[..blocks] {
            let (low, high) = numbers.split_at(BLOCK / 2);
            let bytes = low.iter().zip(high).map(|(low, high)| low | high << 4);
            self.quants.extend(bytes);
        }
    }

    fn into_data(self) -> OwnedData {
        OwnedData::Q4K {
            quants: self.quants,
            scales: self.scales,
            factors: self.factors,
        }
    }
}

/// Weight matrix that owns its planes; kernels take the borrowed [`OwnedMatrix::as_view`].
#[derive(Debug, Clone, PartialEq)]
pub struct OwnedMatrix {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) data: OwnedData,
}

/// Planes of [`MatrixData`], owned.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum OwnedData {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    Q8_0 {
        quants: Vec<i8>,
        scales: Vec<f16>,
    },
    Q4K {
        quants: Vec<u8>,
        scales: Vec<[f16; 2]>,
        factors: Vec<[u8; 2]>,
    },
    Q4_0 {
        quants: Vec<u8>,
        scales: Vec<f16>,
    },
}

impl OwnedMatrix {
    /// Index of the first row of a `Q4K` matrix that has a scale which is not finite.
    pub fn row_with_damaged_scale(&self) -> Option<usize> {
        let OwnedData::Q4K { scales, .. } = &self.data else {
            return None;
        };
        let per_row = scales.len() / self.rows.max(1);
        let damaged = scales
            .iter()
            .position(|pair| !pair.iter().all(|scale| scale.is_finite()));
        damaged.map(|index| index / per_row.max(1))
    }

    /// Borrows the matrix.
    #[expect(clippy::missing_panics_doc, reason = "planes are packed for the shape")]
    pub fn as_view(&self) -> Matrix<'_> {
        let data = match &self.data {
            OwnedData::F32(values) => MatrixData::F32(values),
            OwnedData::F16(values) => MatrixData::F16(values),
            OwnedData::Bf16(values) => MatrixData::Bf16(values),
            OwnedData::Q8_0 { quants, scales } => MatrixData::Q8_0 { quants, scales },
            OwnedData::Q4K {
                quants,
                scales,
                factors,
            } => MatrixData::Q4K {
                quants,
                scales,
                factors,
            },
            OwnedData::Q4_0 { quants, scales } => MatrixData::Q4_0 { quants, scales },
        };
        Matrix::new(self.rows, self.columns, data).expect("planes were packed for this shape")
    }
}

/// Calls `pack` with every block of every row, the last one padded with zeros; returns the scales.
fn pack_blocks(
    columns: usize,
    values: &[f32],
    mut pack: impl FnMut(&[f32; BLOCK]) -> f32,
) -> Vec<f16> {
    let mut scales = Vec::new();
    // Without columns there is no row to cut into blocks, and `chunks` refuses a length of zero.
    for row in values.chunks(columns.max(1)) {
        for values in row.chunks(BLOCK) {
            let mut block = [0.0; BLOCK];
            block[..values.len()].copy_from_slice(values);
            scales.push(f16::from_f32(pack(&block)));
        }
    }
    scales
}

/// Quants and scale of a block.
pub(crate) fn pack_q8_0(block: &[f32; BLOCK]) -> ([i8; BLOCK], f32) {
    let largest = block.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let scale = largest / 127.0;
    let inverse = inverse_of(scale);
    (block.map(|x| (x * inverse).round() as i8), scale)
}

/// Nibbles and scale of a block.
fn pack_q4_0(block: &[f32; BLOCK]) -> ([u8; BLOCK / 2], f32) {
    let mut extreme = 0.0f32;
    for &x in block {
        // The first of equal magnitudes wins, so the comparison is strict.
        if x.abs() > extreme.abs() {
            extreme = x;
        }
    }
    let scale = extreme / -8.0;
    let inverse = inverse_of(scale);
    let nibble = |x: f32| ((x * inverse + 8.5) as u8).min(15);
    let mut bytes = [0; BLOCK / 2];
    for (column, byte) in bytes.iter_mut().enumerate() {
        *byte = nibble(block[column]) | nibble(block[column + BLOCK / 2]) << 4;
    }
    (bytes, scale)
}

/// Factor by which ggml multiplies instead of dividing: zero for a block of zeros.
fn inverse_of(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}
