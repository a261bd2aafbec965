//! Kernels on any number of threads.

use powerinfer_artifact::random::Random;
use powerinfer_tensor::{Format, pack};

use super::*;
use crate::input::InputBuffers;

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
