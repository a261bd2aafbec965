//! What the tests of kernels share.

use powerinfer_kernels::{Format, Isa, OwnedMatrix, pack};

/// Numbers between -1 and 1, the same for the same seed.
pub(crate) fn noise(seed: u64, length: usize) -> Vec<f32> {
    let mut state = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// A matrix of [`noise`].
pub(crate) fn matrix(format: Format, rows: usize, columns: usize) -> OwnedMatrix {
    let seed = (rows * 10_000 + columns) as u64;
    pack(format, rows, columns, &noise(seed, rows * columns))
}

/// The instruction sets that this processor has, without the scalar code.
pub(crate) fn translations() -> Vec<Isa> {
    let mut available = Isa::available();
    available.retain(|isa| *isa != Isa::SCALAR);
    available
}

/// Same bits, except that all NaNs are one.
#[track_caller]
pub(crate) fn assert_same(found: &[f32], expected: &[f32], context: &str) {
    assert_eq!(found.len(), expected.len(), "{context}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()),
            "{context}: entry {index} is {found}, expected {expected}"
        );
    }
}
