//! The baseline: hottest first, as long as it fits.

use crate::{program::Program, relaxation::Block};

/// Takes `blocks` in order, skipping those that do not fit. Never exceeds the capacity, but may
/// stay below what the CPU's memory demands.
pub(crate) fn fill(program: &Program, blocks: &[Block]) -> Vec<usize> {
    let mut choice = vec![0; program.layers.len()];
    let mut left = program.capacity;
    for block in blocks {
        if choice[block.layer] + 1 == block.level && block.bytes <= left {
            choice[block.layer] = block.level;
            left -= block.bytes;
        }
    }
    choice
}
