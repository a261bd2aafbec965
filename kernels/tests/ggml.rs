//! Packing rounds as ggml does.

use powerinfer_kernels::{Format, pack};

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
