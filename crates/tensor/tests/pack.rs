//! Precision of packing, and the numbers that it refuses.

use powerinfer_tensor::{
    Format, Matrix, MatrixData, OwnedMatrix, TensorError, bf16, f16, pack, repack_q4_k,
};
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

/// The largest error that rounding to `format` may make in this block of `row`.
fn bound(format: Format, block: &[f32], row: &[f32]) -> f32 {
    let largest = block.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    // Half a step of the quants, plus what rounding the scale to 11 bits does to the largest one.
    // A subnormal `f16` scale is off by up to 2^-25 for each of its quants.
    let scaled = |step: f32, quant: f32| step + largest / 1024.0 + quant * 2f32.powi(-25);
    match format {
        Format::F32 => 0.0,
        Format::F16 => largest / 2048.0 + 2f32.powi(-25),
        Format::Bf16 => largest / 256.0,
        Format::Q8_0 => scaled(largest / 127.0 / 2.0 * 1.001, 127.0),
        // Half a step and what fewer bits of its scale and its minimum make of it, both of which are
        // parts of the largest in the super-block; and what is left out for the sake of the others.
        Format::Q4K => {
            let end = |of: fn(f32, f32) -> f32| row.iter().copied().fold(0.0, of);
            (end(f32::max) - end(f32::min)) / 15.0
        }
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
                let row = values;
                for (values, unpacked) in values.chunks(32).zip(unpacked.chunks(32)) {
                    let bound = bound(format, values, row);
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
fn scales_and_minima_stand_in_planes_of_their_own() {
    // Steps of 1 from 0, of 2 from -30 and of 1 from -63, in rows of nine blocks.
    let mut row = vec![0.0; 9 * 32];
    for column in 0..32 {
        let number = (column % 16) as f32;
        row[column] = number;
        row[32 + column] = 2.0 * number - 30.0;
        row[7 * 32 + column] = number - 63.0;
        // The largest step, 63 times what steps are multiples of.
        row[6 * 32 + column] = 63.0 * (number - 1.0);
        row[8 * 32 + column] = 63.0 * number;
    }
    let packed = pack(Format::Q4K, 2, 288, &row.repeat(2));
    assert_eq!(unpack(&packed), row.repeat(2));
    let MatrixData::Q4K {
        quants,
        scales,
        factors,
    } = packed.as_view().data()
    else {
        panic!("packed as q4_k");
    };
    assert_eq!((quants.len(), scales.len(), factors.len()), (288, 4, 18));
    assert_eq!(
        quants[..3],
        [0x00, 0x11, 0x22],
        "columns 0 and 16, 1 and 17"
    );
    assert_eq!(scales[0], [f16::ONE; 2]);
    assert_eq!(factors[..2], [[1, 0], [2, 30]]);
    assert_eq!(factors[6..8], [[63, 63], [1, 63]]);
    assert_eq!((scales[1][0], factors[8]), (f16::ONE, [63, 0]));
}

#[test]
fn blocks_of_ggml_keep_their_numbers() {
    // 31 and 32 in six bits, in the first four blocks and in the last four.
    let mut block = [0u8; 144];
    block[..4].copy_from_slice(&[0x00, 0x3c, 0x00, 0x40]); // 1 and 2
    block[4] = 31 | 0b10 << 6; // scale of block 0, upper bits of that of block 4
    block[8] = 32 | 0b01 << 6; // minimum of block 0, upper bits of that of block 4
    block[12] = 0xf3; // lower bits of scale and minimum of block 4
    block[16] = 0x5a; // first numbers of blocks 0 and 1
    block[80] = 0x0c; // of blocks 4 and 5
    let packed = repack_q4_k(1, 256, &block);
    let row = unpack(&packed);
    assert_eq!(row[0], 31.0 * 10.0 - 2.0 * 32.0);
    assert_eq!(row[1], -2.0 * 32.0);
    assert_eq!(row[32], 0.0, "block 1 has neither scale nor minimum");
    assert_eq!(row[128], (32 + 3) as f32 * 12.0 - 2.0 * (16 + 15) as f32);
}

#[test]
fn numbers_beyond_every_scale_are_packed_all_the_same() {
    let values = [
        f32::MAX,
        f32::MIN,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        1e-9,
        -1e-9,
        f32::MIN_POSITIVE / 2.0,
    ];
    for length in 1..=values.len() {
        for start in 0..values.len() {
            let row: Vec<f32> = (0..300)
                .map(|i| values[start + i % length - (start + i % length) / 8 * 8])
                .collect();
            let unpacked = unpack(&pack(Format::Q4K, 1, 300, &row));
            assert!(unpacked.iter().all(|x| x.is_finite()), "{row:?}");
        }
    }
}

#[test]
fn numbers_below_the_limit_stay_finite_and_others_are_found() {
    for format in Format::ALL {
        let limit = format.limit();
        let below = f32::from_bits(limit.to_bits() - 1);
        for sign in [1.0, -1.0] {
            let mut row = vec![0.5; 3000];
            row[1500] = sign * below;
            assert_eq!(format.first_beyond(&row), None, "{format}");
            let unpacked = unpack(&pack(format, 1, 3000, &row));
            let error = (unpacked[1500] - row[1500]).abs();
            assert!(error <= below / 8.0, "{format}: {}", unpacked[1500]);
            for beyond in [sign * limit, sign * f32::INFINITY, f32::NAN] {
                row[2047] = beyond;
                row[2048] = beyond;
                assert_eq!(format.first_beyond(&row), Some(2047), "{format}");
            }
        }
    }
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
    assert_eq!(
        error(MatrixData::Q4K {
            quants: &[0; 64],
            scales: &[[f16::ZERO; 2]; 2],
            factors: &[[0; 2]; 3],
        }),
        "q4_k matrix of 2 x 33: `factors` holds 3 entries, expected 4"
    );
    assert!(matches!(
        Matrix::new(usize::MAX, 3, MatrixData::F32(&[0.0; 3])),
        Err(TensorError::PlaneLength {
            expected: usize::MAX,
            ..
        })
    ));
}
