//! Pseudo-random values.

/// Values between -1 and 1, determined by the seed.
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
