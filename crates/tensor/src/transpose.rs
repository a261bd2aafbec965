//! Exact transposes: a product with a vector that is mostly zeros reads a column of the matrix, a row of the
//! transpose, only for the non-zero entries.

use half::f16;

use crate::format::BLOCK;
use crate::pack::OwnedData;
use crate::{Format, Matrix, OwnedMatrix, bf16};

/// Transpose of a matrix. With `u` for its numbers and `s` for its scales,
/// `matrix[i] · x = Σ_b s[b, i] · Σ_{j in block b} u[j, i] · x[j]`, blocks being 32 columns of the
/// matrix; in plain formats there is one block of all columns, and `s` is 1.
#[derive(Debug, Clone, PartialEq)]
pub struct Transposed {
    /// `[columns, rows]`: the unscaled numbers, in the matrix's own format.
    pub units: OwnedMatrix,
    /// `[blocks, rows]`; empty for plain formats.
    pub scales: Vec<f32>,
}

/// Transposes the rows `order` of `matrix`, in this order, without rounding.
///
/// # Panics
///
/// Panics if the format [has minima](Format::has_minima), which no sum of rows would include, or if a row
/// does not exist.
pub fn transpose(matrix: &Matrix<'_>, order: &[u32]) -> Transposed {
    let format = matrix.format();
    assert!(!format.has_minima(), "{format} is not transposed");
    let (rows, columns) = (order.len(), matrix.columns());
    let blocks = columns.div_ceil(BLOCK);
    let mut numbers = vec![0.0; columns * rows];
    let mut scales = vec![0.0; blocks * rows];
    for (place, row) in order.iter().enumerate() {
        for block in 0..blocks {
            let of_row = matrix.block(*row as usize, block);
            scales[block * rows + place] = of_row.scale;
            for (column, quant) in (block * BLOCK..columns).zip(of_row.unscaled) {
                numbers[column * rows + place] = quant;
            }
        }
    }
    let data = match format {
        Format::F32 => OwnedData::F32(numbers),
        Format::F16 => OwnedData::F16(numbers.into_iter().map(f16::from_f32).collect()),
        Format::Bf16 => OwnedData::Bf16(numbers.into_iter().map(bf16::from_f32).collect()),
        Format::Q8_0 => OwnedData::Q8_0 {
            quants: padded_rows(&numbers, rows)
                .flatten()
                .map(|quant| quant as i8)
                .collect(),
            scales: vec![f16::ONE; columns * rows.div_ceil(BLOCK)],
        },
        Format::Q4K => unreachable!("formats with minima were refused"),
        Format::Q4_0 => OwnedData::Q4_0 {
            quants: padded_rows(&numbers, rows)
                .flat_map(|block| {
                    let nibble = |index: usize| (block[index] + 8.0) as u8;
                    std::array::from_fn::<u8, { BLOCK / 2 }, _>(|index| {
                        nibble(index) | nibble(index + BLOCK / 2) << 4
                    })
                })
                .collect(),
            scales: vec![f16::ONE; columns * rows.div_ceil(BLOCK)],
        },
    };
    Transposed {
        units: OwnedMatrix {
            rows: columns,
            columns: rows,
            data,
        },
        scales: match format {
            Format::F32 | Format::F16 | Format::Bf16 => Vec::new(),
            Format::Q8_0 | Format::Q4K | Format::Q4_0 => scales,
        },
    }
}

/// Blocks of rows of `width` numbers, the last of each row padded with zeros.
fn padded_rows(numbers: &[f32], width: usize) -> impl Iterator<Item = [f32; BLOCK]> + '_ {
    numbers.chunks(width.max(1)).flat_map(|row| {
        row.chunks(BLOCK).map(|values| {
            let mut block = [0.0; BLOCK];
            block[..values.len()].copy_from_slice(values);
            block
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pack;

    #[test]
    fn a_transpose_has_the_same_numbers_in_every_format_without_minima() {
        for format in Format::ALL
            .into_iter()
            .filter(|format| !format.has_minima())
        {
            for (rows, columns) in [(1, 1), (5, 24), (33, 40), (70, 100), (0, 3)] {
                let values: Vec<f32> = (0..rows * columns)
                    .map(|i| ((i * 7919) % 211) as f32 / 100.0 - 1.0)
                    .collect();
                let matrix = pack(format, rows, columns, &values);
                let order: Vec<u32> = (0..rows as u32).rev().collect();
                let Transposed { units, scales } = transpose(&matrix.as_view(), &order);
                let units = units.as_view();
                assert_eq!((units.rows(), units.columns()), (columns, rows));
                assert_eq!(units.format(), format);
                let matrix = matrix.as_view();
                let expected: Vec<Vec<f32>> = order
                    .iter()
                    .map(|row| {
                        let mut expected = vec![0.0; columns];
                        matrix.dequantise_row(*row as usize, &mut expected);
                        expected
                    })
                    .collect();
                let mut unit = vec![0.0; rows];
                for column in 0..columns {
                    units.dequantise_row(column, &mut unit);
                    for (place, expected) in expected.iter().enumerate() {
                        let scale = if scales.is_empty() {
                            1.0
                        } else {
                            scales[column / BLOCK * rows + place]
                        };
                        assert_eq!(unit[place] * scale, expected[column]);
                    }
                }
            }
        }
    }
}
