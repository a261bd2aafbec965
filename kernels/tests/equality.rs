//! Every instruction set gives the bits of the scalar specification, and every kernel the bits of
//! the others; the specification itself is close to arithmetic in `f64`.

#[path = "support/matrices.rs"]
mod matrices;
#[path = "support/noise.rs"]
mod noise;

use matrices::{assert_same, matrix, translations};
use noise::noise;
use powerinfer_kernels::{Isa, QuantisedActivations};
use powerinfer_tensor::{Format, OwnedMatrix, SignMatrix, pack, pack_signs};
use proptest::prelude::*;

/// Lengths around every block, register and span boundary.
fn lengths() -> impl Iterator<Item = usize> {
    (0..=100).chain([127, 128, 172, 257, 511, 512, 513, 544, 1000, 1056])
}

fn gemv(isa: Isa, matrix: &OwnedMatrix, x: &[f32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; matrix.as_view().rows()];
    isa.gemv(&matrix.as_view(), x, &mut out);
    out
}

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
                // A chain of at most 33 blocks and 5 halvings, half an ULP each.
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
                for isa in translations() {
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
                assert_same(
                    &gemm(isa, &matrix, &x, tokens),
                    &expected,
                    &format!("{isa}, {format}, {rows} x {columns} for {tokens} tokens"),
                );
            }
        }
    }
}

#[test]
fn quantised_products_have_the_bits_of_their_dequantised_weights() {
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
                for isa in translations() {
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
fn a_zero_coefficient_is_as_good_as_a_row_left_out() {
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
fn nan_and_infinity_come_out_where_scalar_lets_them_out() {
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
                for isa in translations() {
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
fn nan_and_infinity_in_weights_spoil_their_own_row_only() {
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
fn vectors_off_by_one_element_give_the_same_bits() {
    for format in Format::ALL {
        let matrix = matrix(format, 6, 172);
        let x = noise(18, 173);
        let expected = gemv(Isa::SCALAR, &matrix, &x[1..]);
        for isa in translations() {
            assert_same(
                &gemv(isa, &matrix, &x[1..]),
                &expected,
                &format!("{isa}, {format}"),
            );
        }
    }
}

#[test]
fn plain_vectors_have_the_bits_of_a_matrix_of_one_row() {
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
fn a_row_that_does_not_exist_is_refused() {
    let isa = Isa::detect().expect("no override in tests");
    gemv_rows(isa, &matrix(Format::Q8_0, 3, 64), &[0, 3], &[0.0; 64]);
}

#[test]
#[should_panic(expected = "columns start with a block")]
fn columns_that_start_inside_a_block_are_refused() {
    let matrix = matrix(Format::Q8_0, 3, 64);
    Isa::SCALAR.axpy_rows(&matrix.as_view(), &[0], &[1.0], 16..32, &mut [0.0; 16]);
}

fn any_format() -> impl Strategy<Value = Format> {
    prop::sample::select(&Format::ALL[..])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_numbers_of_any_magnitude_give_the_bits_of_scalar(
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
        for isa in translations() {
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

proptest! {
    #[test]
    fn agreements_are_those_of_the_numbers(
        columns in 1usize..300, rows in 0usize..9, seed in any::<u64>(),
    ) {
        let weights = noise(seed, rows * columns);
        let x = noise(seed ^ 1, columns);
        let bytes: Vec<u8> = weights
            .chunks(columns)
            .flat_map(pack_signs)
            .flat_map(u64::to_le_bytes)
            .collect();
        let signs = SignMatrix::new(&bytes, rows, columns).unwrap();
        prop_assert_eq!(signs.rows(), rows);
        let expected: Vec<u32> = weights
            .chunks(columns)
            .map(|row| {
                let agree = |(a, b): (&f32, &f32)| a.is_sign_negative() == b.is_sign_negative();
                row.iter().zip(&x).filter(|pair| agree(*pair)).count() as u32
            })
            .collect();
        for isa in Isa::available() {
            let mut found = vec![u32::MAX; rows];
            isa.sign_agreements(&signs, &pack_signs(&x), &mut found);
            prop_assert_eq!(&found, &expected, "{}", isa);
        }
        prop_assert!(SignMatrix::new(&bytes, rows + 1, columns).is_err());
    }
}

const QUANTISED: [Format; 3] = [Format::Q8_0, Format::Q4K, Format::Q4_0];

fn rounded(isa: Isa, x: &[f32], columns: usize) -> QuantisedActivations {
    let mut activations = QuantisedActivations::default();
    isa.quantise(x, columns, &mut activations);
    activations
}

fn gemv_integer(isa: Isa, matrix: &OwnedMatrix, x: &QuantisedActivations) -> Vec<f32> {
    let mut out = vec![f32::NAN; matrix.as_view().rows()];
    isa.gemv_integer(&matrix.as_view(), x.vector(0), &mut out);
    out
}

#[test]
fn products_in_whole_numbers_have_the_bits_of_scalar_for_all_lengths_and_row_counts() {
    for format in QUANTISED {
        for columns in lengths() {
            let x = noise(20, columns);
            for rows in [0, 1, 2, 3, 4, 5, 9] {
                let matrix = matrix(format, rows, columns);
                let expected =
                    gemv_integer(Isa::SCALAR, &matrix, &rounded(Isa::SCALAR, &x, columns));
                for isa in translations() {
                    assert_same(
                        &gemv_integer(isa, &matrix, &rounded(isa, &x, columns)),
                        &expected,
                        &format!("{isa}, {format}, {rows} x {columns}"),
                    );
                }
            }
        }
    }
}

#[test]
fn products_in_whole_numbers_are_within_the_rounding_of_their_vector() {
    for format in QUANTISED {
        for columns in lengths().filter(|columns| *columns > 0) {
            let matrix = matrix(format, 4, columns);
            let x = noise(21, columns);
            let exact = gemv(Isa::SCALAR, &matrix, &x);
            let rounded = gemv_integer(Isa::SCALAR, &matrix, &rounded(Isa::SCALAR, &x, columns));
            let mut row = vec![0.0; columns];
            for (index, (exact, rounded)) in exact.iter().zip(rounded).enumerate() {
                matrix.as_view().dequantise_row(index, &mut row);
                // Half a step of each number, which is a 127th of its block's largest.
                let mut bound = 1e-5;
                for (row, x) in row.chunks(32).zip(x.chunks(32)) {
                    let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                    bound += row.iter().map(|w| w.abs()).sum::<f32>() * largest / 254.0;
                }
                assert!(
                    (exact - rounded).abs() <= bound,
                    "{exact} {rounded} {bound}"
                );
            }
        }
    }
}

#[test]
fn listed_rows_in_whole_numbers_have_the_bits_of_all_rows() {
    for format in QUANTISED {
        for columns in [1, 31, 64, 172, 257, 1056] {
            let matrix = matrix(format, 11, columns);
            let all: Vec<u32> = (0..11).collect();
            for isa in Isa::available() {
                let x = rounded(isa, &noise(22, columns), columns);
                let expected = gemv_integer(isa, &matrix, &x);
                for rows in [&[][..], &[10], &[7, 0, 7], &[1, 3, 4, 8, 9], &all] {
                    let expected: Vec<f32> =
                        rows.iter().map(|row| expected[*row as usize]).collect();
                    let mut out = vec![f32::NAN; rows.len()];
                    isa.gemv_rows_integer(&matrix.as_view(), rows, x.vector(0), &mut out);
                    assert_same(
                        &out,
                        &expected,
                        &format!("{isa}, {format}, {columns} columns"),
                    );
                }
            }
        }
    }
}

#[test]
fn extreme_quants_and_activations_do_not_overflow() {
    // The far ends of both ranges, which packing never makes together.
    let columns = 1024;
    let x: Vec<f32> = (0..columns)
        .map(|i| if i % 3 == 0 { -1.0 } else { 1.0 })
        .collect();
    let bytes: Vec<i8> = (0..2 * columns)
        .map(|i| if i % 5 < 2 { 127 } else { -128 })
        .collect();
    let scales = vec![powerinfer_tensor::f16::ONE; 2 * columns / 32];
    let data = powerinfer_tensor::MatrixData::Q8_0 {
        quants: &bytes,
        scales: &scales,
    };
    let matrix = powerinfer_tensor::Matrix::new(2, columns, data).unwrap();
    for isa in Isa::available() {
        let mut out = [0.0; 2];
        isa.gemv_integer(&matrix, rounded(isa, &x, columns).vector(0), &mut out);
        for (row, out) in out.iter().enumerate() {
            let row = &bytes[row * columns..][..columns];
            let expected: f64 = row
                .iter()
                .zip(&x)
                .map(|(w, x)| f64::from(*w) * f64::from(*x))
                .sum();
            assert!(
                (f64::from(*out) - expected).abs() < 1.0,
                "{isa}: {out} {expected}"
            );
        }
    }
}

#[test]
fn extreme_scales_and_minima_do_not_overflow() {
    use powerinfer_tensor::{Matrix, MatrixData, f16};
    let columns = 1024 + 40;
    let blocks = 34;
    for (sign, minimum) in [(1.0, 0), (-1.0, 0), (1.0, 63), (-1.0, 63), (1.0, 255)] {
        let x: Vec<f32> = (0..columns)
            .map(|i| if i % 7 == 0 { -sign } else { sign })
            .collect();
        let quants: Vec<u8> = (0..blocks * 16)
            .map(|i| if i % 3 == 0 { 0xf0 } else { 0xff })
            .collect();
        let data = MatrixData::Q4K {
            quants: &quants,
            scales: &[[f16::from_f32(0.5), f16::MAX]; 5],
            factors: &vec![[63, minimum]; blocks],
        };
        let matrix = Matrix::new(1, columns, data).unwrap();
        let mut row = vec![0.0; columns];
        matrix.dequantise_row(0, &mut row);
        let terms = row
            .iter()
            .zip(&x)
            .map(|(w, x)| f64::from(*w) * f64::from(*x));
        let expected: f64 = terms.sum();
        let magnitude: f64 = row.iter().map(|w| f64::from(w.abs())).sum();
        let mut of_scalar = [0.0];
        let vector = rounded(Isa::SCALAR, &x, columns);
        Isa::SCALAR.gemv_integer(&matrix, vector.vector(0), &mut of_scalar);
        assert!((f64::from(of_scalar[0]) - expected).abs() <= 1e-5 * magnitude);
        for isa in translations() {
            let mut out = [0.0];
            isa.gemv_integer(&matrix, vector.vector(0), &mut out);
            assert_same(&out, &of_scalar, isa.name());
            let mut many = [0.0; 9];
            let nine = rounded(isa, &x.repeat(9), columns);
            isa.gemm_integer(&matrix, &nine, &mut many);
            assert_same(&many, &[of_scalar[0]; 9], isa.name());
        }
    }
}

#[test]
fn what_is_no_number_spoils_every_product_and_what_is_next_to_nothing_counts_as_nothing() {
    for format in QUANTISED {
        let matrix = matrix(format, 3, 100);
        for isa in Isa::available() {
            for special in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = noise(23, 100);
                x[99] = special;
                let products = gemv_integer(isa, &matrix, &rounded(isa, &x, 100));
                assert!(
                    products.iter().all(|y| y.is_nan()),
                    "{isa}, {special}: {products:?}"
                );
            }
            for tiny in [0.0, -0.0, f32::MIN_POSITIVE, 1e-42, -1e-31] {
                let products = gemv_integer(isa, &matrix, &rounded(isa, &[tiny; 100], 100));
                assert_same(&products, &[0.0; 3], &format!("{isa}, {tiny}"));
            }
        }
    }
}

proptest! {
    #[test]
    fn rounding_has_the_bits_of_scalar(
        x in prop::collection::vec(prop::num::f32::ANY, 1..600),
    ) {
        let matrix = matrix(Format::Q8_0, 2, x.len());
        let expected = gemv_integer(Isa::SCALAR, &matrix, &rounded(Isa::SCALAR, &x, x.len()));
        for isa in translations() {
            assert_same(&gemv_integer(isa, &matrix, &rounded(isa, &x, x.len())), &expected, isa.name());
        }
    }
}

#[test]
fn gemm_in_whole_numbers_has_the_bits_of_gemv() {
    for format in QUANTISED {
        for (rows, columns, tokens) in [
            (0, 64, 3),
            (1, 33, 2),
            (5, 64, 7),
            (16, 512, 8),
            (17, 544, 9),
            (33, 1056, 16),
            (49, 257, 21),
        ] {
            let matrix = matrix(format, rows, columns);
            let x = noise(24, columns * tokens);
            for isa in Isa::available() {
                let mut out = vec![f32::NAN; rows * tokens];
                isa.gemm_integer(&matrix.as_view(), &rounded(isa, &x, columns), &mut out);
                for (token, x) in x.chunks_exact(columns).enumerate() {
                    let expected = gemv_integer(isa, &matrix, &rounded(isa, x, columns));
                    let context =
                        format!("{isa}, {format}, {rows} x {columns}, {token} of {tokens}");
                    assert_same(&out[token * rows..][..rows], &expected, &context);
                }
            }
        }
    }
}

#[test]
fn sums_for_many_tokens_have_the_bits_of_one_at_a_time() {
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
