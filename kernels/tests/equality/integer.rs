//! Integer arithmetic, with inputs quantised to int8.

use powerinfer_kernels::{Isa, QuantisedActivations};
use powerinfer_tensor::{Format, Matrix, MatrixData, OwnedMatrix, f16};
use proptest::prelude::*;

use crate::{
    gemv, lengths,
    matrices::{assert_same, matrix, simd_sets},
    noise::noise,
};

const QUANTISED: [Format; 3] = [Format::Q8_0, Format::Q4K, Format::Q4_0];

fn quantise(isa: Isa, x: &[f32], columns: usize) -> QuantisedActivations {
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
fn integer_gemv_has_the_bits_scalar_for_all_lengths_and_row_counts() {
    for format in QUANTISED {
        for columns in lengths() {
            let x = noise(20, columns);
            for rows in [0, 1, 2, 3, 4, 5, 9] {
                let matrix = matrix(format, rows, columns);
                let expected =
                    gemv_integer(Isa::SCALAR, &matrix, &quantise(Isa::SCALAR, &x, columns));
                for isa in simd_sets() {
                    assert_same(
                        &gemv_integer(isa, &matrix, &quantise(isa, &x, columns)),
                        &expected,
                        &format!("{isa}, {format}, {rows} x {columns}"),
                    );
                }
            }
        }
    }
}

#[test]
fn integer_gemv_is_within_the_quantisation_error_of_its_vector() {
    for format in QUANTISED {
        for columns in lengths().filter(|columns| *columns > 0) {
            let matrix = matrix(format, 4, columns);
            let x = noise(21, columns);
            let exact = gemv(Isa::SCALAR, &matrix, &x);
            let quantised = gemv_integer(Isa::SCALAR, &matrix, &quantise(Isa::SCALAR, &x, columns));
            let mut row = vec![0.0; columns];
            for (index, (exact, quantised)) in exact.iter().zip(quantised).enumerate() {
                matrix.as_view().dequantise_row(index, &mut row);
                // Half a scale per element, 1/254 of the largest magnitude of its block.
                let mut bound = 1e-5;
                for (row, x) in row.chunks(32).zip(x.chunks(32)) {
                    let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                    bound += row.iter().map(|w| w.abs()).sum::<f32>() * largest / 254.0;
                }
                assert!(
                    (exact - quantised).abs() <= bound,
                    "{exact} {quantised} {bound}"
                );
            }
        }
    }
}

#[test]
fn integer_gemv_of_listed_rows_has_the_bits_of_all_rows() {
    for format in QUANTISED {
        for columns in [1, 31, 64, 172, 257, 1056] {
            let matrix = matrix(format, 11, columns);
            let all: Vec<u32> = (0..11).collect();
            for isa in Isa::available() {
                let x = quantise(isa, &noise(22, columns), columns);
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
    // Both ends of the range of int8, which packing never produces.
    let columns = 1024;
    let x: Vec<f32> = (0..columns)
        .map(|i| if i % 3 == 0 { -1.0 } else { 1.0 })
        .collect();
    let bytes: Vec<i8> = (0..2 * columns)
        .map(|i| if i % 5 < 2 { 127 } else { -128 })
        .collect();
    let scales = vec![f16::ONE; 2 * columns / 32];
    let data = MatrixData::Q8_0 {
        quants: &bytes,
        scales: &scales,
    };
    let matrix = Matrix::new(2, columns, data).unwrap();
    for isa in Isa::available() {
        let mut out = [0.0; 2];
        isa.gemv_integer(&matrix, quantise(isa, &x, columns).vector(0), &mut out);
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
        let mut scalar = [0.0];
        let vector = quantise(Isa::SCALAR, &x, columns);
        Isa::SCALAR.gemv_integer(&matrix, vector.vector(0), &mut scalar);
        assert!((f64::from(scalar[0]) - expected).abs() <= 1e-5 * magnitude);
        for isa in simd_sets() {
            let mut out = [0.0];
            isa.gemv_integer(&matrix, vector.vector(0), &mut out);
            assert_same(&out, &scalar, isa.name());
            for tokens in [9, 33] {
                let mut many = vec![0.0; tokens];
                let repeated = quantise(isa, &x.repeat(tokens), columns);
                isa.gemm_integer(&matrix, &repeated, &mut many);
                assert_same(&many, &vec![scalar[0]; tokens], isa.name());
            }
        }
    }
}

#[test]
fn nan_propagates_to_every_output_and_tiny_values_are_flushed_to_zero() {
    for format in QUANTISED {
        let matrix = matrix(format, 3, 100);
        for isa in Isa::available() {
            for special in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = noise(23, 100);
                x[99] = special;
                let products = gemv_integer(isa, &matrix, &quantise(isa, &x, 100));
                assert!(
                    products.iter().all(|y| y.is_nan()),
                    "{isa}, {special}: {products:?}"
                );
            }
            for tiny in [0.0, -0.0, f32::MIN_POSITIVE, 1e-42, -1e-31] {
                let products = gemv_integer(isa, &matrix, &quantise(isa, &[tiny; 100], 100));
                assert_same(&products, &[0.0; 3], &format!("{isa}, {tiny}"));
            }
        }
    }
}

proptest! {
    #[test]
    fn quantisation_has_the_bits_scalar(
        x in prop::collection::vec(prop::num::f32::ANY, 1..600),
    ) {
        let matrix = matrix(Format::Q8_0, 2, x.len());
        let expected = gemv_integer(Isa::SCALAR, &matrix, &quantise(Isa::SCALAR, &x, x.len()));
        for isa in simd_sets() {
            assert_same(&gemv_integer(isa, &matrix, &quantise(isa, &x, x.len())), &expected, isa.name());
        }
    }
}

#[test]
fn integer_gemm_has_the_bits_of_gemv() {
    for format in QUANTISED {
        for (rows, columns, tokens) in [
            (0, 64, 3),
            (1, 33, 2),
            (5, 64, 7),
            (16, 512, 8),
            (17, 544, 9),
            (33, 1056, 16),
            (49, 257, 21),
            // From 32 tokens on rows are interleaved, whatever the instruction set.
            (16, 512, 32),
            (49, 257, 45),
        ] {
            let matrix = matrix(format, rows, columns);
            let x = noise(24, columns * tokens);
            for isa in Isa::available() {
                let mut out = vec![f32::NAN; rows * tokens];
                isa.gemm_integer(&matrix.as_view(), &quantise(isa, &x, columns), &mut out);
                for (token, x) in x.chunks_exact(columns).enumerate() {
                    let expected = gemv_integer(isa, &matrix, &quantise(isa, x, columns));
                    let context =
                        format!("{isa}, {format}, {rows} x {columns}, {token} of {tokens}");
                    assert_same(&out[token * rows..][..rows], &expected, &context);
                }
            }
        }
    }
}
