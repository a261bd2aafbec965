//! Random matrices, and comparisons of results.

use powerinfer_kernels::Isa;
use powerinfer_tensor::{Format, OwnedMatrix, pack};

use crate::noise::noise;

/// A matrix of [`noise`].
pub(crate) fn matrix(format: Format, rows: usize, columns: usize) -> OwnedMatrix {
    let seed = (rows * 10_000 + columns) as u64;
    pack(format, rows, columns, &noise(seed, rows * columns))
}

/// The instruction sets of this processor, without the scalar code.
pub(crate) fn simd_sets() -> Vec<Isa> {
    let mut available = Isa::available();
    available.retain(|isa| *isa != Isa::SCALAR);
    available
}

/// Asserts equal bits; all NaNs are equal.
#[track_caller]
pub(crate) fn assert_same(found: &[f32], expected: &[f32], context: &str) {
    assert_eq!(found.len(), expected.len(), "{context}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()),
            "{context}: element {index} is {found}, expected {expected}"
        );
    }
}
