//! Kernels on any number of threads.

use std::collections::BTreeSet;

use powerinfer_artifact::random::Random;
use powerinfer_tensor::{Format, pack};

use super::*;
use crate::{ffn::Active, input::InputBuffers};

#[test]
fn results_have_the_same_bits_on_any_number_of_threads() {
    let mut random = Random::new(1);
    let mut normal = |count: usize| {
        (0..count)
            .map(|_| random.normal() as f32)
            .collect::<Vec<_>>()
    };
    let (rows, columns, tokens) = (1031, 800, 3);
    let matrix = pack(Format::Q8_0, rows, columns, &normal(rows * columns));
    let (matrix, x, coefficients) = (matrix.as_view(), normal(tokens * columns), normal(rows));
    let listed: Vec<u32> = (0..rows as u32).collect();
    let run = |count| {
        let threads = Threads::new(Isa::SCALAR, count).unwrap();
        let mut out = [
            vec![0.0; rows],
            vec![0.0; rows],
            vec![0.0; columns],
            vec![0.0; tokens * rows],
        ];
        let mut buffers = [InputBuffers::default(), InputBuffers::default()];
        let [first, second] = &mut buffers;
        let one = Input::new(&threads, &x[..columns], columns, &matrix, first);
        let many = Input::new(&threads, &x[..], columns, &matrix, second);
        threads.gemv(&matrix, &one, &mut out[0]);
        threads.gemv_rows(&matrix, &listed, &one, &mut out[1]);
        threads.axpy_rows(&matrix, &listed, &coefficients, &mut out[2]);
        threads.gemm(&matrix, &many, &mut out[3]);
        out.concat()
            .into_iter()
            .map(f32::to_bits)
            .collect::<Vec<_>>()
    };
    assert!(
        matrix.rows() * matrix.row_bytes() >= WORTH_SPLITTING,
        "large enough to be shared"
    );
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(7));
}

#[test]
fn sums_of_several_tokens_have_the_bits_of_single_ones_whatever_each_part_lists() {
    let (rows, columns, tokens) = (1100, 1200, 6);
    let mut random = Random::new(2);
    let weights: Vec<f32> = (0..rows * columns)
        .map(|_| random.normal() as f32)
        .collect();
    // Parts have 256 rows: all listed, most, few, none, and a short one of which one token lists some.
    let shares = |token: usize| [1.0, 0.7, 0.02, 0.0, if token == 3 { 0.5 } else { 0.0 }];
    let active: Vec<Active> = (0..tokens)
        .map(|token| {
            let is_listed = |row: &u32| random.unit() < shares(token)[*row as usize / 256];
            let rows: Vec<u32> = (0..rows as u32).filter(is_listed).collect();
            let coefficients = rows.iter().map(|row| (*row as f32).sin()).collect();
            Active { rows, coefficients }
        })
        .collect();
    let union: BTreeSet<u32> = active.iter().flat_map(|a| a.rows.iter().copied()).collect();
    for format in Format::ALL {
        let matrix = pack(format, rows, columns, &weights);
        for (isa, count) in [
            (Isa::SCALAR, 2),
            (Isa::detect().unwrap(), 1),
            (Isa::detect().unwrap(), 3),
        ] {
            let threads = Threads::new(isa, count).unwrap();
            let mut single = vec![0.0; tokens * columns];
            for (active, out) in active.iter().zip(single.chunks_exact_mut(columns)) {
                threads.axpy_rows(&matrix.as_view(), &active.rows, &active.coefficients, out);
            }
            let mut all = vec![0.0; tokens * columns];
            let read = threads.axpy_rows_batch(&matrix.as_view(), &active, &mut all);
            assert_eq!(read, union.len(), "{format}, {isa}, {count} threads");
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(
                bits(&single),
                bits(&all),
                "{format}, {isa}, {count} threads"
            );
        }
    }
}
