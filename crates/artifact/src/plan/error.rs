//! What is wrong with a plan.

use super::Device;
use crate::{ByteSize, Hint};

/// A plan that contradicts itself or breaks its promise; made by hand, or damaged.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// Layer entries are not 0, 1, 2, ….
    #[error(
        "entry {position} of the plan's layers is for layer {layer}; layers must be listed in order"
    )]
    LayerOrder {
        /// Position in the list.
        position: usize,
        /// Index it carries.
        layer: usize,
    },
    /// A layer with more hot neurons than neurons.
    #[error("layer {layer} has {hot_count} hot neurons of {neuron_count}")]
    TooManyHot {
        /// The layer.
        layer: usize,
        /// Hot neurons planned.
        hot_count: usize,
        /// Neurons there are.
        neuron_count: usize,
    },
    /// A share, time or objective that is no number, or out of range.
    #[error("`{field}` of the plan is {value}")]
    Figure {
        /// Name of the figure, with its layer where it has one.
        field: String,
        /// What was found.
        value: f64,
    },
    /// Lines or layers that do not add up to the figure that stands for them.
    #[error("`{what}` is {stated} bytes but its parts add up to {found}")]
    DoesNotAddUp {
        /// The figure.
        what: String,
        /// Its value.
        stated: u64,
        /// The sum of the parts.
        found: u128,
    },
    /// A part on a GPU that the budget does not have.
    #[error("the plan uses GPU {gpu} but its budget has {count}, numbered from 0")]
    NoSuchGpu {
        /// The GPU.
        gpu: usize,
        /// GPUs in the budget.
        count: usize,
    },
    /// Layers of one GPU that are not a range.
    #[error("the layers of a GPU are not one contiguous range")]
    GpuOrder,
    /// One use of memory listed twice.
    #[error("the plan has two lines `{name}` for {device} memory")]
    TwoLines {
        /// The line.
        name: String,
        /// Whose memory.
        device: Device,
    },
    /// More memory used than allowed.
    #[error("the plan needs {needed} of {device} memory but its budget is {budget}", needed = ByteSize(*needed), budget = ByteSize(*budget))]
    OverBudget {
        /// Whose memory.
        device: Device,
        /// Bytes used.
        needed: u64,
        /// Bytes allowed.
        budget: u64,
    },
}

impl PlanError {
    /// Remedy that takes a command or a flag.
    pub fn hint(&self) -> Option<Hint> {
        Some(match self {
            Self::OverBudget { .. } => Hint::LargerBudget,
            _ => Hint::PlaceAgain,
        })
    }
}
