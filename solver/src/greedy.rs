//! The greedy baseline: hottest neurons first, as long as they fit.

use crate::chain::{Chain, ON_CPU};

/// One more group of neurons of a layer.
struct Block {
    layer: usize,
    /// Index of the choice with this group.
    choice: usize,
    bytes: u64,
    /// Activation frequency per byte.
    density: f64,
}

/// Adds groups to a chain of [`impact`](crate::impact) in the order of activation frequency per byte and
/// skips those that do not fit. Returns the number of hot neurons per layer.
///
/// Keeps the capacity of the GPU, but not necessarily that of the CPU.
pub(crate) fn hot_counts(chain: &Chain) -> Vec<usize> {
    let mut blocks = Vec::new();
    for (layer, stage) in chain.stages.iter().enumerate() {
        let mut limit = f64::INFINITY;
        for (index, step) in stage.choices[ON_CPU].windows(2).enumerate() {
            let bytes = step[1].gpu_bytes - step[0].gpu_bytes;
            // Densities of a layer fall; the limit undoes rounding, which must not reorder its groups.
            limit = ((step[0].cost - step[1].cost) / bytes as f64).clamp(0.0, limit);
            blocks.push(Block {
                layer,
                choice: index + 1,
                bytes,
                density: limit,
            });
        }
    }
    // Stable, so blocks of equal density stay in the order of layers and groups.
    blocks.sort_by(|a, b| b.density.total_cmp(&a.density));
    let mut taken = vec![0; chain.stages.len()];
    let pinned = chain
        .stages
        .iter()
        .map(|stage| stage.choices[ON_CPU][0].gpu_bytes);
    let mut left = chain.capacities[0].saturating_sub(pinned.sum());
    for block in blocks {
        if taken[block.layer] + 1 == block.choice && block.bytes <= left {
            taken[block.layer] = block.choice;
            left -= block.bytes;
        }
    }
    let stages = chain.stages.iter().zip(taken);
    stages
        .map(|(stage, choice)| stage.choices[ON_CPU][choice].tag as usize)
        .collect()
}
