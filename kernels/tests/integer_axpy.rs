//! Axpy of four-bit weights with integer arithmetic: the bits of scalar code on every instruction set, those of single tokens
//! for batches, and close to arithmetic in `f64`.

#[path = "support/matrices.rs"]
mod matrices;
#[path = "support/noise.rs"]
mod noise;

use std::ops::Range;

use matrices::{assert_same, matrix, simd_sets};
use noise::noise;
use powerinfer_kernels::Isa;
use powerinfer_tensor::{Format, OwnedMatrix};

const NIBBLES: [Format; 2] = [Format::Q4K, Format::Q4_0];

fn axpy(
    isa: Isa,
    matrix: &OwnedMatrix,
    rows: &[u32],
    coefficients: &[f32],
    columns: Range<usize>,
) -> Vec<f32> {
    let mut out = noise(30, columns.len());
    isa.axpy_rows_integer(
        &matrix.as_view(),
        rows,
        coefficients,
        &[],
        columns,
        &mut out,
    );
    out
}

/// Shapes around the boundaries of lines, spans and groups.
const SHAPES: [(usize, usize); 12] = [
    (1, 0),
    (1, 1),
    (3, 32),
    (4, 100),
    (5, 127),
    (33, 129),
    (70, 544),
    (130, 63),
    (128, 64),
    (257, 160),
    (9, 1056),
    (140, 1100),
];

#[test]
fn every_instruction_set_has_the_bits_of_scalar() {
    for format in NIBBLES {
        for (rows, columns) in SHAPES {
            let matrix = matrix(format, rows, columns);
            let listed: Vec<u32> = (0..rows as u32).filter(|row| row % 7 != 3).collect();
            let coefficients = noise(31, listed.len());
            for start in [0, 32, 96].into_iter().filter(|start| *start <= columns) {
                let expected = axpy(Isa::SCALAR, &matrix, &listed, &coefficients, start..columns);
                for isa in simd_sets() {
                    let found = axpy(isa, &matrix, &listed, &coefficients, start..columns);
                    let context = format!("{isa}, {format}, {rows} x {columns} from {start}");
                    assert_same(&found, &expected, &context);
                }
            }
        }
    }
}

#[test]
fn lists_may_be_empty_repeated_and_unsorted() {
    for format in NIBBLES {
        let matrix = matrix(format, 300, 96);
        for listed in [
            vec![],
            vec![299],
            vec![5; 5],
            vec![5; 300],
            vec![290, 1, 291, 2, 292, 3],
            (0..300).rev().collect(),
        ] {
            let coefficients = noise(32, listed.len());
            let expected = axpy(Isa::SCALAR, &matrix, &listed, &coefficients, 0..96);
            for isa in simd_sets() {
                let found = axpy(isa, &matrix, &listed, &coefficients, 0..96);
                assert_same(&found, &expected, &format!("{isa}, {format}, {listed:?}"));
            }
        }
    }
}

#[test]
fn batches_have_the_bits_of_single_tokens() {
    for format in NIBBLES {
        for (rows, columns) in SHAPES {
            let matrix = matrix(format, rows, columns);
            let listed: Vec<u32> = (0..rows as u32).filter(|row| row % 5 != 1).collect();
            for tokens in [1, 2, 7] {
                for start in [0, 32].into_iter().filter(|start| *start <= columns) {
                    let part = start..columns;
                    let coefficients = noise(33, listed.len() * tokens);
                    for isa in Isa::available() {
                        let context =
                            format!("{isa}, {format}, {rows} x {columns} from {start}, {tokens}");
                        let mut sums = noise(34, part.len() * tokens);
                        let mut out = noise(35, part.len() * tokens);
                        let (mut expected, mut expected_out) = (sums.clone(), out.clone());
                        let view = matrix.as_view();
                        let groups = || listed.chunk_by(|a, b| a / 128 == b / 128);
                        let count = groups().count() * part.len().min(1) * tokens;
                        let ends: Vec<bool> = (0..count).map(|index| index % 3 == 1).collect();
                        isa.axpy_rows_batch_integer(
                            &view,
                            &listed,
                            &coefficients,
                            part.clone(),
                            &ends,
                            &mut sums,
                            &mut out,
                        );
                        let width = part.len().max(1);
                        let outputs = expected.chunks_exact_mut(width);
                        let outputs = outputs.zip(expected_out.chunks_exact_mut(width));
                        let lists = coefficients.chunks_exact(listed.len().max(1));
                        for (token, ((sum, out), coefficients)) in outputs.zip(lists).enumerate() {
                            let mut first = 0;
                            for (index, rows) in groups().enumerate() {
                                let own = &coefficients[first..first + rows.len()];
                                let part = part.clone();
                                Isa::SCALAR.axpy_rows_integer(&view, rows, own, &[], part, sum);
                                first += rows.len();
                                if ends[index * tokens + token] {
                                    for (out, sum) in out.iter_mut().zip(sum.iter_mut()) {
                                        *out += std::mem::take(sum);
                                    }
                                }
                            }
                        }
                        assert_same(&sums, &expected, &context);
                        assert_same(&out, &expected_out, &context);
                    }
                }
            }
        }
    }
}

#[test]
fn results_are_close_to_f64_and_do_not_depend_on_zero_coefficients() {
    for format in NIBBLES {
        let (rows, columns) = (600, 64);
        let matrix = matrix(format, rows, columns);
        let all: Vec<u32> = (0..rows as u32).collect();
        let coefficients: Vec<f32> = noise(35, rows)
            .iter()
            .map(|x| if x.abs() > 0.4 { 0.0 } else { x * 10.0 })
            .collect();
        let (listed, some): (Vec<u32>, Vec<f32>) = all
            .iter()
            .zip(&coefficients)
            .filter(|(_, x)| **x != 0.0)
            .unzip();
        let mut expected: Vec<f64> = noise(30, columns).iter().map(|x| f64::from(*x)).collect();
        let mut row = vec![0.0; columns];
        for (index, x) in listed.iter().zip(&some) {
            matrix.as_view().dequantise_row(*index as usize, &mut row);
            for (sum, weight) in expected.iter_mut().zip(&row) {
                *sum += f64::from(*x) * f64::from(*weight);
            }
        }
        // Half a quantisation step of the largest factor, 1/254 of it, times the largest quant: with weights up to 1, 1/254
        // of the largest coefficient per row, twice that for unsigned quants.
        let bound = 2.0 * 4.0 / 254.0 * listed.len() as f64;
        for isa in Isa::available() {
            let found = axpy(isa, &matrix, &listed, &some, 0..columns);
            let mut error = 0.0;
            for (found, expected) in found.iter().zip(&expected) {
                let difference = (f64::from(*found) - expected).abs();
                assert!(
                    difference < bound,
                    "{isa}, {format}: {found} {expected} {bound}"
                );
                error += difference * difference;
            }
            // Errors are independent, so that they grow with the square root of the rows.
            let error = (error / columns as f64).sqrt();
            assert!(error < bound / 12.0, "{isa}, {format}: {error} of {bound}");
            let whole = axpy(isa, &matrix, &all, &coefficients, 0..columns);
            assert_same(&whole, &found, isa.name());
        }
    }
}

#[test]
fn nan_propagates_and_denormals_are_flushed() {
    for format in NIBBLES {
        let matrix = matrix(format, 6, 40);
        for isa in Isa::available() {
            for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let coefficients = [1.0, special, 0.0, 1.0, 1.0, 1.0];
                let found = axpy(isa, &matrix, &[0, 1, 2, 3, 4, 5], &coefficients, 0..40);
                assert!(
                    found.iter().all(|x| x.is_nan()),
                    "{isa}, {format}, {special}: {found:?}"
                );
            }
            let found = axpy(isa, &matrix, &[0, 3], &[0.0, 1e-42], 0..40);
            let start = noise(30, 40);
            let is_near = found.iter().zip(&start).all(|(a, b)| (a - b).abs() < 1e-30);
            assert!(is_near, "{isa}, {format}: denormals are flushed to zero");
        }
    }
}
