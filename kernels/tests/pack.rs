//! What packing keeps of a number, and what it refuses.

use powerinfer_kernels::{Format, KernelError, Matrix, MatrixData, OwnedMatrix, bf16, f16, pack};
use proptest::prelude::*;

fn unpack(matrix: &OwnedMatrix) -> Vec<f32> {
    let view = matrix.as_view();
    let mut values = vec![0.0; view.rows() * view.columns()];
    if view.columns() > 0 {
        for (row, out) in values.chunks_exact_mut(view.columns()).enumerate() {
            view.dequantise_row(row, out);
        }
    }
    values
}

/// The largest error that rounding to `format` may make in this block.
fn bound(format: Format, block: &[f32]) -> f32 {
    let largest = block.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    // Half a step of the quants, plus what rounding the scale to 11 bits does to the largest one.
    // A subnormal `f16` scale is off by up to 2^-25 for each of its quants.
    let scaled = |step: f32, quant: f32| step + largest / 1024.0 + quant * 2f32.powi(-25);
    match format {
        Format::F32 => 0.0,
        Format::F16 => largest / 2048.0 + 2f32.powi(-25),
        Format::Bf16 => largest / 256.0,
        Format::Q8_0 => scaled(largest / 127.0 / 2.0 * 1.001, 127.0),
        // The far end of the range has nibble 15 where it would need 16.
        Format::Q4_0 => scaled(largest / 8.0 * 1.001, 8.0),
    }
}

proptest! {
    #[test]
    fn packing_keeps_every_number_within_the_bound_of_its_block(
        rows in 0..4usize,
        columns in 0..100usize,
        magnitude in -3..4i32,
        seed in prop::collection::vec(-1.0..1.0f32, 400),
    ) {
        let values: Vec<f32> = seed[..rows * columns]
            .iter()
            .map(|x| x * 10f32.powi(magnitude))
            .collect();
        for format in Format::ALL {
            let packed = pack(format, rows, columns, &values);
            prop_assert_eq!(packed.as_view().format(), format);
            let unpacked = unpack(&packed);
            for (values, unpacked) in values.chunks(columns.max(1)).zip(unpacked.chunks(columns.max(1))) {
                for (values, unpacked) in values.chunks(32).zip(unpacked.chunks(32)) {
                    let bound = bound(format, values);
                    for (value, unpacked) in values.iter().zip(unpacked) {
                        prop_assert!((value - unpacked).abs() <= bound, "{format}: {value} became {unpacked}");
                    }
                }
            }
        }
    }
}

#[test]
fn quants_scales_and_nibbles_stand_where_ggml_puts_them() {
    let mut block = [0.0; 32];
    block[0] = -8.0;
    block[1] = 3.0;
    block[16] = 7.0;
    let packed = pack(Format::Q4_0, 1, 32, &block);
    let MatrixData::Q4_0 { quants, scales } = packed.as_view().data() else {
        panic!("packed as q4_0");
    };
    assert_eq!(scales, [f16::ONE]);
    assert_eq!(quants[..3], [0xf0, 0x8b, 0x88]);

    block[0] = -127.0;
    block[1] = 2.5;
    let packed = pack(Format::Q8_0, 1, 32, &block);
    let MatrixData::Q8_0 { quants, scales } = packed.as_view().data() else {
        panic!("packed as q8_0");
    };
    assert_eq!(scales, [f16::ONE]);
    assert_eq!(quants[..3], [-127, 3, 0]);
    assert_eq!(quants[16], 7);
}

#[test]
fn a_partial_block_is_padded_with_zeros() {
    let packed = pack(Format::Q4_0, 2, 33, &[1.0; 66]);
    let MatrixData::Q4_0 { quants, scales } = packed.as_view().data() else {
        panic!("packed as q4_0");
    };
    assert_eq!((quants.len(), scales.len()), (2 * 2 * 16, 2 * 2));
    assert_eq!(quants[16..18], [0x80, 0x88]);
    assert_eq!(unpack(&packed), [1.0; 66]);
}

#[test]
fn zeros_stay_zeros_in_every_format() {
    for format in Format::ALL {
        assert_eq!(unpack(&pack(format, 3, 70, &[0.0; 210])), [0.0; 210]);
    }
}

#[test]
fn a_range_of_rows_sees_the_same_weights() {
    let values: Vec<f32> = (0..7 * 45).map(|i| (i as f32).sin()).collect();
    for format in Format::ALL {
        let packed = pack(format, 7, 45, &values);
        let part = packed.as_view().rows_range(2..5);
        assert_eq!((part.rows(), part.columns()), (3, 45));
        let (mut expected, mut found) = ([0.0; 45], [0.0; 45]);
        for row in 0..3 {
            packed.as_view().dequantise_row(2 + row, &mut expected);
            part.dequantise_row(row, &mut found);
            assert_eq!(expected, found);
        }
        assert_eq!(packed.as_view().rows_range(7..7).rows(), 0);
    }
}

#[test]
fn planes_of_the_wrong_length_are_named() {
    let error = |data| Matrix::new(2, 33, data).unwrap_err().to_string();
    assert_eq!(
        error(MatrixData::Q8_0 {
            quants: &[0; 128],
            scales: &[f16::ZERO; 3],
        }),
        "q8_0 matrix of 2 x 33: `scales` holds 3 entries, expected 4"
    );
    assert_eq!(
        error(MatrixData::Bf16(&[bf16::ZERO; 64])),
        "bf16 matrix of 2 x 33: `values` holds 64 entries, expected 66"
    );
    assert_eq!(
        error(MatrixData::Q4_0 {
            quants: &[],
            scales: &[],
        }),
        "q4_0 matrix of 2 x 33: `quants` holds 0 entries, expected 64"
    );
    assert!(matches!(
        Matrix::new(usize::MAX, 3, MatrixData::F32(&[0.0; 3])),
        Err(KernelError::PlaneLength {
            expected: usize::MAX,
            ..
        })
    ));
}
