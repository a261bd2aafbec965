//! What is wrong with a plan.

use super::Device;
use crate::ByteSize;

/// A plan that contradicts itself or breaks its promise; made by hand, or damaged.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// Layer entries are not 0, 1, 2, ….
    #[error(
        "plan entry {position} is for layer {layer}; layers must be listed in order, run `powerinfer place` again"
    )]
    LayerOrder {
        /// Position in the list.
        position: usize,
        /// Index it carries.
        layer: usize,
    },
    /// A layer with more hot neurons than neurons.
    #[error(
        "layer {layer} has {hot_count} hot neurons of {neuron_count}; lower `hot_count` or run `powerinfer place` again"
    )]
    TooManyHot {
        /// The layer.
        layer: usize,
        /// Hot neurons planned.
        hot_count: usize,
        /// Neurons there are.
        neuron_count: usize,
    },
    /// A share, time or objective that is no number, or out of range.
    #[error("`{field}` is {value}; run `powerinfer place` again")]
    Figure {
        /// Name of the figure, with its layer where it has one.
        field: String,
        /// What was found.
        value: f64,
    },
    /// Lines or layers that do not add up to the figure that stands for them.
    #[error(
        "`{what}` is {stated} bytes but its parts add up to {found}; run `powerinfer place` again instead of editing the plan"
    )]
    DoesNotAddUp {
        /// The figure.
        what: String,
        /// Its value.
        stated: u64,
        /// The sum of the parts.
        found: u128,
    },
    /// A part on a GPU that the budget does not have.
    #[error(
        "a part is on GPU {gpu} but the budget has {count}, counted from 0; run `powerinfer place` again"
    )]
    NoSuchGpu {
        /// The GPU.
        gpu: usize,
        /// GPUs in the budget.
        count: usize,
    },
    /// Layers of one GPU that are not a range.
    #[error("the layers are not dealt out to the GPUs in ranges; run `powerinfer place` again")]
    GpuOrder,
    /// One use of memory listed twice.
    #[error(
        "the plan has two lines `{name}` for {device} memory; run `powerinfer place` again instead of editing the plan"
    )]
    TwoLines {
        /// The line.
        name: String,
        /// Whose memory.
        device: Device,
    },
    /// More memory used than allowed.
    #[error("the plan needs {needed} of {device} memory but its budget is {budget}; run `powerinfer place` with a larger budget, or again with this one", needed = ByteSize(*needed), budget = ByteSize(*budget))]
    OverBudget {
        /// Whose memory.
        device: Device,
        /// Bytes used.
        needed: u64,
        /// Bytes allowed.
        budget: u64,
    },
}
