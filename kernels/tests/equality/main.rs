//! Every instruction set gives the bits of the scalar specification, GEMM those of GEMV, batches those of single tokens; and
//! the specification is close to arithmetic in `f64`.

mod float;
mod integer;
mod signs;

#[path = "../support/matrices.rs"]
mod matrices;
#[path = "../support/noise.rs"]
mod noise;

use powerinfer_kernels::Isa;
use powerinfer_tensor::OwnedMatrix;

/// Lengths around every block, register and span boundary.
fn lengths() -> impl Iterator<Item = usize> {
    let all = (0..=100).chain([127, 128, 172, 257, 511, 512, 513, 544, 1000, 1056]);
    // Miri takes hours for all of them.
    all.filter(|length| !cfg!(miri) || [0, 1, 31, 33, 257].contains(length))
}

fn gemv(isa: Isa, matrix: &OwnedMatrix, x: &[f32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; matrix.as_view().rows()];
    isa.gemv(&matrix.as_view(), x, &mut out);
    out
}
