//! Sums of a predictor's hidden units: the bits of scalar code on every instruction set and for every range of columns, and the
//! sums of their definition.

#[path = "support/matrices.rs"]
mod matrices;
#[path = "support/noise.rs"]
mod noise;

use std::ops::Range;

use matrices::{assert_same, matrix, simd_sets};
use noise::noise;
use powerinfer_kernels::Isa;
use powerinfer_tensor::{Format, Matrix, MatrixData, OwnedMatrix, f16};

const FORMATS: [Format; 2] = [Format::Q8_0, Format::Q4_0];
const SCALE: f32 = 0.3;

/// Columns around the boundaries of blocks and lines.
const COLUMNS: [usize; 12] = [1, 31, 32, 63, 64, 65, 96, 127, 128, 160, 257, 700];

/// Values from 0 to 127.
fn values(rows: usize) -> Vec<u8> {
    (0..rows).map(|row| (row * 53 % 128) as u8).collect()
}

fn scales(columns: usize) -> Vec<f32> {
    noise(41, columns)
}

fn add_units(isa: Isa, units: &Matrix<'_>, rows: &[u32], columns: Range<usize>) -> Vec<f32> {
    let mut out = noise(40, units.columns())[columns.clone()].to_vec();
    let scales = &scales(units.columns())[columns.clone()];
    let values = values(rows.len());
    isa.add_units(units, rows, &values, rows, columns, SCALE, scales, &mut out);
    out
}

#[test]
fn every_instruction_set_has_the_bits_of_scalar_in_every_range_of_columns() {
    for format in FORMATS {
        for columns in COLUMNS {
            for count in [0, 1, 2, 3, 4, 5, 17, 32] {
                let units: OwnedMatrix = matrix(format, 64, columns);
                let units = units.as_view();
                let rows: Vec<u32> = (0..count).map(|row| 2 * row + row % 2).collect();
                let all = add_units(Isa::SCALAR, &units, &rows, 0..columns);
                for isa in simd_sets() {
                    for start in (0..columns).step_by(64) {
                        for end in [columns, columns.min(start + 100)] {
                            let found = add_units(isa, &units, &rows, start..end);
                            let what =
                                format!("{isa} {format} {count} rows, {start}..{end} of {columns}");
                            assert_same(&found, &all[start..end], &what);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn the_sums_are_those_of_the_definition() {
    for format in FORMATS {
        let columns = 300;
        let units = matrix(format, 40, columns);
        let units = units.as_view();
        let rows: Vec<u32> = (0..32).map(|row| row + row / 4).collect();
        let found = add_units(Isa::SCALAR, &units, &rows, 0..columns);
        let (start, scales) = (noise(40, columns), scales(columns));
        for (column, found) in found.into_iter().enumerate() {
            let term = |(row, value): (&u32, u8)| {
                let block = units.block(*row as usize, column / 32);
                i32::from(value) * block.unscaled[column % 32] as i32
            };
            let sum: i32 = rows.iter().zip(values(32)).map(term).sum();
            let scale = SCALE * scales[column];
            assert_eq!(found, scale.mul_add(sum as f32, start[column]));
        }
    }
}

#[test]
fn extreme_numbers_do_not_overflow() {
    let (rows, columns) = (32, 192);
    let ones = vec![f16::ONE; rows * columns / 32];
    for byte in [i8::MIN, i8::MAX] {
        let bytes = vec![byte; rows * columns];
        let units = MatrixData::Q8_0 {
            quants: &bytes,
            scales: &ones,
        };
        let units = Matrix::new(rows, columns, units).unwrap();
        let listed: Vec<u32> = (0..rows as u32).collect();
        for isa in Isa::available() {
            let mut out = vec![0.0; columns];
            let scales = vec![1.0; columns];
            isa.add_units(
                &units,
                &listed,
                &[127; 32],
                &[],
                0..columns,
                1.0,
                &scales,
                &mut out,
            );
            assert_eq!(out, vec![32.0 * 127.0 * f32::from(byte); columns], "{isa}");
        }
    }
}
