//! Packing rounds as ggml does, or better.

use powerinfer_tensor::{Format, pack};

const ROWS: usize = 5;
const COLUMNS: usize = 512;

fn numbers(file: &[u8]) -> Vec<f32> {
    let numbers: Vec<f32> = file
        .as_chunks()
        .0
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect();
    assert_eq!(numbers.len(), ROWS * COLUMNS);
    numbers
}

fn assert_same_bits_as_ggml(format: Format, golden: &[u8]) {
    let source = numbers(include_bytes!("fixtures/source.f32"));
    let packed = pack(format, ROWS, COLUMNS, &source);
    let mut row = vec![0.0; COLUMNS];
    for (index, golden) in numbers(golden).chunks_exact(COLUMNS).enumerate() {
        packed.as_view().dequantise_row(index, &mut row);
        for (column, (ours, golden)) in row.iter().zip(golden).enumerate() {
            assert_eq!(
                ours.to_bits(),
                golden.to_bits(),
                "{format}, row {index}, column {column}: {ours} for ggml's {golden}"
            );
        }
    }
}

#[test]
fn q8_0_has_the_bits_of_ggml() {
    assert_same_bits_as_ggml(Format::Q8_0, include_bytes!("fixtures/q8_0.f32"));
}

#[test]
fn q4_0_has_the_bits_of_ggml() {
    assert_same_bits_as_ggml(Format::Q4_0, include_bytes!("fixtures/q4_0.f32"));
}

#[test]
fn q4_k_is_as_near_as_that_of_ggml() {
    let source = numbers(include_bytes!("fixtures/source.f32"));
    let golden = numbers(include_bytes!("fixtures/q4_k.f32"));
    let packed = pack(Format::Q4K, ROWS, COLUMNS, &source);
    let error = |found: &[f32], wanted: &[f32]| -> f64 {
        let squares = found
            .iter()
            .zip(wanted)
            .map(|(a, b)| f64::from(a - b).powi(2));
        (squares.sum::<f64>() / wanted.len() as f64).sqrt()
    };
    let mut unpacked = vec![0.0; ROWS * COLUMNS];
    for (index, row) in unpacked.chunks_exact_mut(COLUMNS).enumerate() {
        packed.as_view().dequantise_row(index, row);
    }
    let rows = |numbers: &[f32]| -> Vec<f64> {
        let rows = numbers.chunks(COLUMNS).zip(source.chunks(COLUMNS));
        rows.map(|(row, source)| error(row, source)).collect()
    };
    let all = (error(&unpacked, &source), error(&golden, &source));
    let pairs = rows(&unpacked).into_iter().zip(rows(&golden));
    for (ours, theirs) in pairs.chain([all]) {
        eprintln!("{ours} for ggml's {theirs}: {}", ours / theirs);
    }
    let pairs = rows(&unpacked).into_iter().zip(rows(&golden));
    for (ours, theirs) in pairs.chain([all]) {
        assert!(ours <= 1.02 * theirs, "{ours} for ggml's {theirs}");
    }
}
