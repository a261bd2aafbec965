//! Errors of plans.

use super::Device;
use crate::{ByteSize, Hint};

/// Inconsistency in a plan, which was edited or damaged.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The layer entries are not numbered 0, 1, 2, ….
    #[error(
        "entry {position} of the plan's layers is for layer {layer}; layers must be listed in order"
    )]
    LayerOrder {
        /// Position in the list.
        position: usize,
        /// Index in the entry.
        layer: usize,
    },
    /// A layer has more hot neurons than neurons.
    #[error("layer {layer} has {hot_count} hot neurons of {neuron_count}")]
    TooManyHot {
        /// The layer.
        layer: usize,
        /// Number of hot neurons.
        hot_count: usize,
        /// Number of neurons.
        neuron_count: usize,
    },
    /// A share, time or objective is not a number or out of range.
    #[error("`{field}` of the plan is {value}")]
    InvalidValue {
        /// Path of the field.
        field: String,
        /// Its value.
        value: f64,
    },
    /// A total differs from the sum of its terms.
    #[error("`{what}` is {stated} but its terms add up to {found}")]
    SumMismatch {
        /// Name of the total.
        what: String,
        /// Value in the plan.
        stated: u64,
        /// Sum of the terms.
        found: u128,
    },
    /// A layer, line or head is on a GPU that the budget does not have.
    #[error("the plan uses GPU {gpu} but its budget has {count}, numbered from 0")]
    NoSuchGpu {
        /// Index of the GPU.
        gpu: usize,
        /// Number of GPUs in the budget.
        count: usize,
    },
    /// The layers of a GPU are not a contiguous range.
    #[error("the layers of a GPU are not one contiguous range")]
    GpusNotContiguous,
    /// A purpose is listed twice for one device.
    #[error("the plan has two lines `{name}` for {device} memory")]
    DuplicateLine {
        /// Name of the line.
        name: String,
        /// Device of the memory.
        device: Device,
    },
    /// The plan uses more memory than its budget.
    #[error("the plan needs {needed} of {device} memory but its budget is {budget}", needed = ByteSize(*needed), budget = ByteSize(*budget))]
    OverBudget {
        /// Device of the memory.
        device: Device,
        /// Bytes used.
        needed: u64,
        /// Bytes allowed.
        budget: u64,
    },
}

impl PlanError {
    /// Returns the remedy, a command.
    pub fn hint(&self) -> Option<Hint> {
        Some(match self {
            Self::OverBudget { .. } => Hint::LargerBudget,
            _ => Hint::PlaceAgain,
        })
    }
}
