//! Borrowed weight matrices: shape, and the planes that hold the rows.

use std::ops::Range;

use half::{bf16, f16};

use crate::format::{BLOCK, SUPER_BLOCK};
use crate::{Format, TensorError};

/// Borrowed row-major weight matrix `[rows, columns]`.
///
/// Plain formats have one plane of `rows * columns` values. Quantised formats have two or three planes,
/// quants and scales, in blocks of 32 along the row. A row whose length is not a multiple of 32 is padded
/// to whole blocks; the padding never affects a result as long as its scale is finite.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    rows: usize,
    columns: usize,
    data: MatrixData<'a>,
}

/// Planes of a matrix, one variant per [`Format`]. A row has `blocks = ⌈columns / 32⌉` and
/// `super_blocks = ⌈blocks / 8⌉`.
#[derive(Debug, Clone, Copy)]
pub enum MatrixData<'a> {
    /// `[rows, columns]`.
    F32(&'a [f32]),
    /// `[rows, columns]`.
    F16(&'a [f16]),
    /// `[rows, columns]`.
    Bf16(&'a [bf16]),
    /// A weight is `quant * scale`.
    Q8_0 {
        /// `[rows, blocks, 32]`.
        quants: &'a [i8],
        /// `[rows, blocks]`.
        scales: &'a [f16],
    },
    /// A weight is `d * scale * nibble - dmin * minimum`, rounded once.
    Q4K {
        /// `[rows, blocks, 16]`, as in `Q4_0`.
        quants: &'a [u8],
        /// `[rows, super_blocks]`: `d` and `dmin`.
        scales: &'a [[f16; 2]],
        /// `[rows, blocks]`: scale and minimum, at most 63 each.
        factors: &'a [[u8; 2]],
    },
    /// A weight is `(nibble - 8) * scale`.
    Q4_0 {
        /// `[rows, blocks, 16]`: byte `j` of a block holds column `j` in its low nibble and
        /// column `j + 16` in its high nibble.
        quants: &'a [u8],
        /// `[rows, blocks]`.
        scales: &'a [f16],
    },
}

impl MatrixData<'_> {
    /// Format of the planes.
    #[inline]
    pub fn format(&self) -> Format {
        match self {
            MatrixData::F32(_) => Format::F32,
            MatrixData::F16(_) => Format::F16,
            MatrixData::Bf16(_) => Format::Bf16,
            MatrixData::Q8_0 { .. } => Format::Q8_0,
            MatrixData::Q4K { .. } => Format::Q4K,
            MatrixData::Q4_0 { .. } => Format::Q4_0,
        }
    }
}

impl<'a> Matrix<'a> {
    /// Matrix of the given shape over `data`.
    ///
    /// # Errors
    ///
    /// Returns [`TensorError::PlaneLength`] if the length of a plane does not fit the shape.
    pub fn new(rows: usize, columns: usize, data: MatrixData<'a>) -> Result<Self, TensorError> {
        let format = data.format();
        let blocks = columns.div_ceil(BLOCK);
        let check = |plane, found: usize, per_row: usize| match rows.checked_mul(per_row) {
            Some(expected) if expected == found => Ok(()),
            expected => Err(TensorError::PlaneLength {
                format,
                plane,
                rows,
                columns,
                expected: expected.unwrap_or(usize::MAX),
                found,
            }),
        };
        match data {
            MatrixData::F32(values) => check("values", values.len(), columns)?,
            MatrixData::F16(values) => check("values", values.len(), columns)?,
            MatrixData::Bf16(values) => check("values", values.len(), columns)?,
            MatrixData::Q8_0 { quants, scales } => {
                check("quants", quants.len(), blocks * BLOCK)?;
                check("scales", scales.len(), blocks)?;
            }
            MatrixData::Q4K {
                quants,
                scales,
                factors,
            } => {
                check("quants", quants.len(), blocks * (BLOCK / 2))?;
                check("scales", scales.len(), blocks.div_ceil(SUPER_BLOCK))?;
                check("factors", factors.len(), blocks)?;
            }
            MatrixData::Q4_0 { quants, scales } => {
                check("quants", quants.len(), blocks * (BLOCK / 2))?;
                check("scales", scales.len(), blocks)?;
            }
        }
        Ok(Matrix {
            rows,
            columns,
            data,
        })
    }

    /// Number of rows.
    #[inline]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns, padding not counted.
    #[inline]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The planes.
    #[inline]
    pub fn data(&self) -> MatrixData<'a> {
        self.data
    }

    /// Number format.
    #[inline]
    pub fn format(&self) -> Format {
        self.data.format()
    }

    /// Size in bytes of one row, all planes together.
    pub fn row_bytes(&self) -> usize {
        self.format().row_bytes(self.columns)
    }

    /// Rows `range` as a matrix over the same memory.
    ///
    /// # Panics
    ///
    /// Panics if the range does not lie within the rows.
    pub fn rows_range(&self, range: Range<usize>) -> Matrix<'a> {
        assert!(
            range.start <= range.end && range.end <= self.rows,
            "rows {range:?} of a matrix of {}",
            self.rows
        );
        let of = |per_row: usize| range.start * per_row..range.end * per_row;
        let blocks = self.blocks();
        let data = match self.data {
            MatrixData::F32(values) => MatrixData::F32(&values[of(self.columns)]),
            MatrixData::F16(values) => MatrixData::F16(&values[of(self.columns)]),
            MatrixData::Bf16(values) => MatrixData::Bf16(&values[of(self.columns)]),
            MatrixData::Q8_0 { quants, scales } => MatrixData::Q8_0 {
                quants: &quants[of(blocks * BLOCK)],
                scales: &scales[of(blocks)],
            },
            MatrixData::Q4K {
                quants,
                scales,
                factors,
            } => MatrixData::Q4K {
                quants: &quants[of(blocks * (BLOCK / 2))],
                scales: &scales[of(blocks.div_ceil(SUPER_BLOCK))],
                factors: &factors[of(blocks)],
            },
            MatrixData::Q4_0 { quants, scales } => MatrixData::Q4_0 {
                quants: &quants[of(blocks * (BLOCK / 2))],
                scales: &scales[of(blocks)],
            },
        };
        Matrix {
            rows: range.len(),
            columns: self.columns,
            data,
        }
    }

    /// Writes row `row` to `out`, which holds `columns` entries. Exact in every format but `q4_k`, which
    /// rounds once.
    ///
    /// # Panics
    ///
    /// Panics if the row does not exist or `out` has another length.
    pub fn dequantise_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of a matrix of {}", self.rows);
        assert_eq!(out.len(), self.columns, "one entry per column");
        for (block, out) in out.chunks_mut(BLOCK).enumerate() {
            let weights = self.block(row, block).weights();
            out.copy_from_slice(&weights[..out.len()]);
        }
    }

    /// Number of blocks of 32 that cover a row.
    #[inline]
    pub fn blocks(&self) -> usize {
        self.columns.div_ceil(BLOCK)
    }

    /// Dequantises block `block` of row `row`; unscaled values past the last column are zero.
    ///
    /// # Panics
    ///
    /// Panics if the row or the block does not exist.
    pub fn block(&self, row: usize, block: usize) -> Block {
        let mut unscaled = [0.0; BLOCK];
        let start = block * BLOCK;
        let width = BLOCK.min(self.columns - start);
        let position = row * self.blocks() + block;
        let (scale, minimum) = match self.data {
            MatrixData::F32(values) => {
                let values = &values[row * self.columns + start..][..width];
                unscaled[..width].copy_from_slice(values);
                (1.0, 0.0)
            }
            MatrixData::F16(values) => {
                let values = &values[row * self.columns + start..][..width];
                for (out, value) in unscaled.iter_mut().zip(values) {
                    *out = value.to_f32();
                }
                (1.0, 0.0)
            }
            MatrixData::Bf16(values) => {
                let values = &values[row * self.columns + start..][..width];
                for (out, value) in unscaled.iter_mut().zip(values) {
                    *out = value.to_f32();
                }
                (1.0, 0.0)
            }
            MatrixData::Q8_0 { quants, scales } => {
                let quants = &quants[position * BLOCK..][..width];
                for (out, quant) in unscaled.iter_mut().zip(quants) {
                    *out = f32::from(*quant);
                }
                (scales[position].to_f32(), 0.0)
            }
            MatrixData::Q4K {
                quants,
                scales,
                factors,
            } => {
                let quants = &quants[position * (BLOCK / 2)..][..BLOCK / 2];
                for (column, out) in unscaled[..width].iter_mut().enumerate() {
                    *out = f32::from(nibble(quants, column));
                }
                let super_blocks = self.blocks().div_ceil(SUPER_BLOCK);
                let [d, dmin] = scales[row * super_blocks + block / SUPER_BLOCK].map(f16::to_f32);
                let [scale, minimum] = factors[position].map(f32::from);
                // 11 bits times 8: exact.
                (d * scale, dmin * minimum)
            }
            MatrixData::Q4_0 { quants, scales } => {
                let quants = &quants[position * (BLOCK / 2)..][..BLOCK / 2];
                for (column, out) in unscaled[..width].iter_mut().enumerate() {
                    *out = f32::from(nibble(quants, column)) - 8.0;
                }
                (scales[position].to_f32(), 0.0)
            }
        };
        Block {
            unscaled,
            scale,
            minimum,
        }
    }
}

/// Block of a row: a weight is `unscaled * scale - minimum`.
pub struct Block {
    /// Numbers before scaling.
    pub unscaled: [f32; BLOCK],
    /// 1 in the plain formats.
    pub scale: f32,
    /// 0 in most formats.
    pub minimum: f32,
}

impl Block {
    /// Weights; unspecified past the last column.
    pub fn weights(&self) -> [f32; BLOCK] {
        // A quant of at most 8 bits times a scale of 11 fits in 24, and so does one of 4 bits times
        // a scale of 19: only the difference is rounded.
        self.unscaled.map(|value| value * self.scale - self.minimum)
    }
}

/// Four bits of column `column` of a block.
fn nibble(quants: &[u8], column: usize) -> u8 {
    let byte = quants[column % (BLOCK / 2)];
    if column < BLOCK / 2 {
        byte & 15
    } else {
        byte >> 4
    }
}
