//! Float arithmetic.

use powerinfer_kernels::{Isa, PackedActivations};
use powerinfer_tensor::{Format, OwnedMatrix, pack};
use proptest::prelude::*;

use crate::{
    gemv, lengths,
    matrices::{assert_same, matrix, simd_sets},
    noise::noise,
};

fn gemv_rows(isa: Isa, matrix: &OwnedMatrix, rows: &[u32], x: &[f32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows.len()];
    isa.gemv_rows(&matrix.as_view(), rows, x, &mut out);
    out
}

fn gemm(isa: Isa, matrix: &OwnedMatrix, x: &[f32], tokens: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; matrix.as_view().rows() * tokens];
    isa.gemm(&matrix.as_view(), x, tokens, &mut out);
    out
}

fn gemm_packed(isa: Isa, matrix: &OwnedMatrix, x: &[f32], tokens: usize) -> Vec<f32> {
    let matrix = matrix.as_view();
    let mut out = vec![f32::NAN; matrix.rows() * tokens];
    let mut packed = PackedActivations::default();
    // Again into the same memory, after other vectors.
    isa.pack(&noise(9, 9 * 40), 40, &mut packed);
    isa.pack(x, matrix.columns(), &mut packed);
    isa.gemm_packed(&matrix, x, &packed, &mut out);
    out
}

fn axpy_rows(
    isa: Isa,
    matrix: &OwnedMatrix,
    rows: &[u32],
    coefficients: &[f32],
    start: &[f32],
) -> Vec<f32> {
    let mut out = start.to_vec();
    isa.axpy_rows(
        &matrix.as_view(),
        rows,
        coefficients,
        0..start.len(),
        &mut out,
    );
    out
}

#[test]
fn the_specification_is_close_to_f64_of_the_dequantised_weights() {
    for format in Format::ALL {
        for columns in lengths() {
            let matrix = matrix(format, 3, columns);
            let x = noise(1, columns);
            let mut weights = vec![0.0; columns];
            let mut sums = vec![0.0f64; columns];
            for (row, found) in gemv(Isa::SCALAR, &matrix, &x).into_iter().enumerate() {
                matrix.as_view().dequantise_row(row, &mut weights);
                let terms = weights
                    .iter()
                    .zip(&x)
                    .map(|(w, x)| f64::from(*w) * f64::from(*x));
                let (sum, magnitude) = terms.fold((0.0, 0.0), |(sum, magnitude), term| {
                    (sum + term, magnitude + term.abs())
                });
                // At most 33 fused multiply-adds and 5 additions, half an ULP each.
                let bound = magnitude * 38.0 * f64::from(f32::EPSILON) / 2.0;
                assert!(
                    (f64::from(found) - sum).abs() <= bound,
                    "{format}, {columns} columns: {found}, expected {sum}"
                );
                for (sum, weight) in sums.iter_mut().zip(&weights) {
                    *sum += f64::from(x.first().copied().unwrap_or(0.0)) * f64::from(*weight);
                }
            }
            let coefficients = [x.first().copied().unwrap_or(0.0); 3];
            let found = axpy_rows(
                Isa::SCALAR,
                &matrix,
                &[0, 1, 2],
                &coefficients,
                &vec![0.0; columns],
            );
            for (found, sum) in found.iter().zip(sums) {
                assert!((f64::from(*found) - sum).abs() <= 6.0 * f64::from(f32::EPSILON));
            }
        }
    }
}

#[test]
fn gemv_has_the_bits_of_scalar_for_all_lengths_and_odd_row_counts() {
    for format in Format::ALL {
        for columns in lengths() {
            let x = noise(2, columns);
            for rows in [0, 1, 2, 3, 4, 5, 9] {
                let matrix = matrix(format, rows, columns);
                let expected = gemv(Isa::SCALAR, &matrix, &x);
                for isa in simd_sets() {
                    assert_same(
                        &gemv(isa, &matrix, &x),
                        &expected,
                        &format!("{isa}, {format}, {rows} x {columns}"),
                    );
                }
            }
        }
    }
}

#[test]
fn listed_rows_have_the_bits_of_all_rows() {
    for format in Format::ALL {
        for columns in [0, 1, 31, 64, 172, 257, 1056] {
            let matrix = matrix(format, 11, columns);
            let x = noise(3, columns);
            let all: Vec<u32> = (0..11).collect();
            for isa in Isa::available() {
                let context = format!("{isa}, {format}, {columns} columns");
                let expected = gemv(isa, &matrix, &x);
                for rows in [&[][..], &[10], &[7, 0, 7], &[1, 3, 4, 8, 9], &all] {
                    let expected: Vec<f32> =
                        rows.iter().map(|row| expected[*row as usize]).collect();
                    assert_same(&gemv_rows(isa, &matrix, rows, &x), &expected, &context);
                }
            }
        }
    }
}

#[test]
fn a_split_of_the_rows_does_not_change_a_row() {
    for format in Format::ALL {
        let matrix = matrix(format, 23, 172);
        let x = noise(4, 172);
        for isa in Isa::available() {
            let expected = gemv(isa, &matrix, &x);
            for split in 0..=23 {
                let mut out = vec![f32::NAN; 23];
                let (first, second) = out.split_at_mut(split);
                isa.gemv(&matrix.as_view().rows_range(0..split), &x, first);
                isa.gemv(&matrix.as_view().rows_range(split..23), &x, second);
                assert_same(
                    &out,
                    &expected,
                    &format!("{isa}, {format}, split at {split}"),
                );
            }
        }
    }
}

#[test]
fn gemm_has_the_bits_of_gemv() {
    for format in Format::ALL {
        for (rows, columns, tokens) in [
            (0, 64, 3),
            (5, 0, 3),
            (3, 64, 0),
            (1, 1, 1),
            (1, 33, 2),
            (5, 64, 4),
            (7, 172, 5),
            (24, 512, 3),
            (25, 544, 9),
            (49, 257, 7),
            (6, 1056, 65),
            (2, 100, 131),
            (29, 2087, 14),
        ] {
            let matrix = matrix(format, rows, columns);
            let x = noise(5, tokens * columns);
            let mut expected = vec![f32::NAN; rows * tokens];
            for token in 0..tokens {
                let x = &x[token * columns..][..columns];
                for (row, value) in gemv(Isa::SCALAR, &matrix, x).into_iter().enumerate() {
                    expected[token * rows + row] = value;
                }
            }
            for isa in Isa::available() {
                let context = format!("{isa}, {format}, {rows} x {columns} for {tokens} tokens");
                assert_same(&gemm(isa, &matrix, &x, tokens), &expected, &context);
                if columns > 0 {
                    let packed = gemm_packed(isa, &matrix, &x, tokens);
                    assert_same(&packed, &expected, &context);
                }
            }
        }
    }
}

#[test]
fn quantised_weights_give_the_bits_of_their_dequantised_values() {
    for format in Format::ALL {
        let packed = matrix(format, 6, 257);
        let mut values = vec![0.0; 6 * 257];
        for (row, values) in values.chunks_exact_mut(257).enumerate() {
            packed.as_view().dequantise_row(row, values);
        }
        let plain = pack(Format::F32, 6, 257, &values);
        let x = noise(6, 257);
        for isa in Isa::available() {
            assert_same(
                &gemv(isa, &packed, &x),
                &gemv(isa, &plain, &x),
                &format!("{isa}, {format}"),
            );
        }
    }
}

#[test]
fn axpy_rows_has_the_bits_of_scalar_for_all_lengths_and_row_counts() {
    for format in Format::ALL {
        for columns in lengths() {
            let matrix = matrix(format, 9, columns);
            let start = noise(7, columns);
            for rows in [
                &[][..],
                &[4],
                &[8, 2, 2],
                &[0, 3, 5, 6],
                &[8, 7, 6, 5, 4, 3, 2, 1, 0],
            ] {
                let coefficients = noise(8, rows.len());
                let expected = axpy_rows(Isa::SCALAR, &matrix, rows, &coefficients, &start);
                for isa in simd_sets() {
                    assert_same(
                        &axpy_rows(isa, &matrix, rows, &coefficients, &start),
                        &expected,
                        &format!("{isa}, {format}, {columns} columns, rows {rows:?}"),
                    );
                }
            }
        }
    }
}

#[test]
fn a_split_of_the_columns_does_not_change_a_column() {
    for format in Format::ALL {
        for columns in [1, 40, 172, 1000, 1056] {
            let matrix = matrix(format, 7, columns);
            let rows = [6, 0, 1, 3, 4];
            let coefficients = noise(9, rows.len());
            let start = noise(10, columns);
            for isa in Isa::available() {
                let expected = axpy_rows(isa, &matrix, &rows, &coefficients, &start);
                for split in (0..=columns).step_by(32) {
                    let mut out = start.clone();
                    let (first, second) = out.split_at_mut(split);
                    let view = matrix.as_view();
                    isa.axpy_rows(&view, &rows, &coefficients, 0..split, first);
                    isa.axpy_rows(&view, &rows, &coefficients, split..columns, second);
                    assert_same(
                        &out,
                        &expected,
                        &format!("{isa}, {format}, split at {split}"),
                    );
                }
                // A range may also end inside a block.
                let part = columns.div_ceil(2);
                let mut out = start[..part].to_vec();
                isa.axpy_rows(&matrix.as_view(), &rows, &coefficients, 0..part, &mut out);
                assert_same(&out, &expected[..part], &format!("{isa}, {format}, part"));
            }
        }
    }
}

#[test]
fn omitting_a_row_equals_a_zero_coefficient() {
    for format in Format::ALL {
        let matrix = matrix(format, 12, 172);
        let all: Vec<u32> = (0..12).collect();
        let active: Vec<u32> = vec![1, 2, 6, 11];
        let start = noise(11, 172);
        let mut coefficients = vec![0.0; 12];
        let active_coefficients = noise(12, active.len());
        for (row, coefficient) in active.iter().zip(&active_coefficients) {
            coefficients[*row as usize] = *coefficient;
        }
        for isa in Isa::available() {
            assert_same(
                &axpy_rows(isa, &matrix, &all, &coefficients, &start),
                &axpy_rows(isa, &matrix, &active, &active_coefficients, &start),
                &format!("{isa}, {format}"),
            );
        }
    }
}

#[test]
fn nan_and_infinity_propagate_as_in_scalar_code() {
    for format in Format::ALL {
        for special in [
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MIN_POSITIVE / 8.0,
        ] {
            for (columns, position) in [(40, 0), (40, 39), (172, 64), (600, 555)] {
                let context = format!("{format}, {special} at {position} of {columns}");
                let matrix = matrix(format, 5, columns);
                let mut x = noise(13, columns);
                x[position] = special;
                let rows = [0, 1, 2, 3, 4];
                let mut coefficients = noise(14, 5);
                coefficients[position % 5] = special;
                let finite = noise(15, columns);

                let product = gemv(Isa::SCALAR, &matrix, &x);
                let sum = axpy_rows(Isa::SCALAR, &matrix, &rows, &coefficients, &finite);
                assert_eq!(product.iter().all(|y| y.is_finite()), special.is_finite());
                for isa in simd_sets() {
                    assert_same(&gemv(isa, &matrix, &x), &product, &context);
                    assert_same(
                        &gemm(isa, &matrix, &[&x[..], &finite].concat(), 2)[..1],
                        &product[..1],
                        &context,
                    );
                    assert_same(
                        &axpy_rows(isa, &matrix, &rows, &coefficients, &finite),
                        &sum,
                        &context,
                    );
                }
            }
        }
    }
}

#[test]
fn nan_and_infinity_in_weights_affect_only_their_row() {
    for format in [Format::F32, Format::F16, Format::Bf16] {
        for special in [f32::NAN, f32::INFINITY] {
            let mut values = noise(16, 3 * 45);
            values[45 + 44] = special;
            let matrix = pack(format, 3, 45, &values);
            for isa in Isa::available() {
                let product = gemv(isa, &matrix, &noise(17, 45));
                assert_eq!(
                    product.iter().map(|y| y.is_finite()).collect::<Vec<_>>(),
                    [true, false, true]
                );
            }
        }
    }
}

#[test]
fn unaligned_vectors_give_the_same_bits() {
    for format in Format::ALL {
        let matrix = matrix(format, 6, 172);
        let x = noise(18, 173);
        let expected = gemv(Isa::SCALAR, &matrix, &x[1..]);
        for isa in simd_sets() {
            assert_same(
                &gemv(isa, &matrix, &x[1..]),
                &expected,
                &format!("{isa}, {format}"),
            );
        }
    }
}

#[test]
fn dot_and_axpy_have_the_bits_of_a_matrix_with_one_row() {
    for length in lengths() {
        let (a, b) = (noise(19, length), noise(20, length));
        let row = pack(Format::F32, 1, length, &a);
        let expected = axpy_rows(Isa::SCALAR, &row, &[0], &[0.3], &b);
        for isa in Isa::available() {
            assert_same(&[isa.dot(&a, &b)], &gemv(Isa::SCALAR, &row, &b), "dot");
            let mut y = b.clone();
            isa.axpy(0.3, &a, &mut y);
            assert_same(&y, &expected, "axpy");
        }
    }
}

#[test]
#[should_panic(expected = "row 3 of a matrix of 3")]
fn a_row_that_does_not_exist_panics() {
    let isa = Isa::detect().expect("no override in tests");
    gemv_rows(isa, &matrix(Format::Q8_0, 3, 64), &[0, 3], &[0.0; 64]);
}

#[test]
#[should_panic(expected = "columns start with a block")]
fn columns_that_start_inside_a_block_panic() {
    let matrix = matrix(Format::Q8_0, 3, 64);
    Isa::SCALAR.axpy_rows(&matrix.as_view(), &[0], &[1.0], 16..32, &mut [0.0; 16]);
}

fn any_format() -> impl Strategy<Value = Format> {
    prop::sample::select(&Format::ALL[..])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_values_give_the_bits_of_scalar(
        format in any_format(),
        rows in 1..7usize,
        columns in 1..80usize,
        tokens in 1..6usize,
        values in prop::collection::vec(prop::num::f32::ANY, 7 * 80),
        x in prop::collection::vec(prop::num::f32::ANY, 6 * 80),
    ) {
        let matrix = pack(format, rows, columns, &values[..rows * columns]);
        let x = &x[..tokens * columns];
        let listed: Vec<u32> = (0..rows as u32).rev().step_by(2).collect();
        let coefficients = &values[..listed.len()];
        for isa in simd_sets() {
            let context = format!("{isa}, {format}");
            let one = &x[..columns];
            assert_same(&gemv(isa, &matrix, one), &gemv(Isa::SCALAR, &matrix, one), &context);
            assert_same(
                &gemv_rows(isa, &matrix, &listed, one),
                &gemv_rows(Isa::SCALAR, &matrix, &listed, one),
                &context,
            );
            assert_same(
                &gemm(isa, &matrix, x, tokens),
                &gemm(Isa::SCALAR, &matrix, x, tokens),
                &context,
            );
            assert_same(
                &axpy_rows(isa, &matrix, &listed, coefficients, one),
                &axpy_rows(Isa::SCALAR, &matrix, &listed, coefficients, one),
                &context,
            );
        }
    }
}

#[test]
fn batched_axpy_has_the_bits_of_one_token_at_a_time() {
    for format in Format::ALL {
        for (rows, columns, tokens) in [
            (1, 1, 1),
            (5, 40, 2),
            (33, 128, 6),
            (70, 300, 7),
            (40, 513, 13),
        ] {
            let matrix = matrix(format, rows, columns);
            let listed: Vec<u32> = (0..rows as u32).filter(|row| row % 5 != 3).collect();
            let coefficients = noise(40, listed.len() * tokens);
            for start in [0, 32, 128, 288]
                .into_iter()
                .filter(|start| *start < columns)
            {
                let part = start..columns;
                for isa in Isa::available() {
                    let mut out = noise(41, part.len() * tokens);
                    let mut expected = out.clone();
                    isa.axpy_rows_batch(
                        &matrix.as_view(),
                        &listed,
                        &coefficients,
                        part.clone(),
                        &mut out,
                    );
                    for (out, coefficients) in expected
                        .chunks_exact_mut(part.len())
                        .zip(coefficients.chunks_exact(listed.len()))
                    {
                        let part = part.clone();
                        Isa::SCALAR.axpy_rows(&matrix.as_view(), &listed, coefficients, part, out);
                    }
                    let context =
                        format!("{isa}, {format}, {rows} x {columns} from {start} for {tokens}");
                    assert_same(&out, &expected, &context);
                }
            }
        }
    }
}
