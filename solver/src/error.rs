//! Errors of the solver.

use powerinfer_artifact::{ByteSize, Hint, hardware::HardwareError, plan::Device};

/// Invalid input of [`decide`](crate::decide) and [`place`](crate::place), or a budget that is too small.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SolveError {
    /// A model without layers.
    #[error("the model has no layers; profile it again")]
    NoLayers,
    /// A layer without neurons.
    #[error("layer {layer} has no neurons; profile the model again")]
    NoNeurons {
        /// Index of the layer.
        layer: usize,
    },
    /// An activation frequency that is not between 0 and 1.
    #[error(
        "layer {layer}: neuron {neuron} is active with frequency {value}, which is not between 0 and 1; profile the model again"
    )]
    Frequency {
        /// Index of the layer.
        layer: usize,
        /// Position in the layer's list.
        neuron: usize,
        /// The frequency.
        value: f64,
    },
    /// Activation frequencies that are not in falling order.
    #[error(
        "layer {layer}: neuron {neuron} is more active than the one before it; list neurons hottest first"
    )]
    NotSorted {
        /// Index of the layer.
        layer: usize,
        /// Position of the first neuron out of order.
        neuron: usize,
    },
    /// Neurons of 0 bytes.
    #[error("layer {layer}: a neuron has 0 bytes; check the model's dimensions")]
    NeuronBytes {
        /// Index of the layer.
        layer: usize,
    },
    /// Work that is negative, infinite or not a number.
    #[error(
        "layer {layer}: a token cannot read {value} bytes or rows of it; give a number of 0 or more"
    )]
    Work {
        /// Index of the layer.
        layer: usize,
        /// The number of bytes, rows or sums.
        value: f64,
    },
    /// Groups of 0 neurons.
    #[error("neurons cannot be placed in groups of 0; use {default}", default = crate::GROUP_SIZE)]
    GroupSize,
    /// Sizes whose sum does not fit in 64 bits.
    #[error(
        "the sizes add up to {total} bytes at layer {layer}, which exceeds 64 bits; check the model's dimensions"
    )]
    TooLarge {
        /// Index of the layer at which the sum overflows.
        layer: usize,
        /// The sum up to this layer.
        total: u128,
    },
    /// A VRAM budget for a machine without a GPU.
    #[error("{} of VRAM may be used but `{hardware}` has no GPU; describe one, take a named machine such as `rtx4090`, or allow 0", ByteSize(*.vram_bytes))]
    NoGpu {
        /// The VRAM budget.
        vram_bytes: u64,
        /// Name of the machine.
        hardware: String,
    },
    /// Parts pinned to the GPU of a machine without one, or with a VRAM budget of 0.
    #[error("parts are pinned to the GPU, but `{hardware}` has no GPU that may be used")]
    PinnedToNoGpu {
        /// Name of the machine.
        hardware: String,
    },
    /// The objective `impact` with a budget for several GPUs.
    #[error("the objective `impact` supports one GPU and the budget is for {gpus}")]
    ImpactGpus {
        /// Number of GPUs in the budget.
        gpus: usize,
    },
    /// Parts pinned to GPUs that no split of the layers among the GPUs has room for.
    #[error("no split of the layers among the GPUs has room for what is pinned to them")]
    PinnedToGpus,
    /// A solver that is not part of this build.
    #[error(
        "this program was built without the solver `{backend}`; build it with `--features {backend}`"
    )]
    NoBackend {
        /// The solver.
        backend: crate::Backend,
    },
    /// More groups or candidates than a layer may have.
    #[error(
        "layer {layer} has {groups} groups of neurons, more than this program can place; use larger groups"
    )]
    TooManyGroups {
        /// Index of the layer.
        layer: usize,
        /// Its number of groups.
        groups: usize,
    },
    /// Invalid hardware values.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    /// A budget that is too small for the parts that have to be on a device.
    #[error("`{line}` ({}) does not fit: {device} memory is {}, and {} is the least that works", ByteSize(*.line_bytes), ByteSize(*.budget), typed(*.needed))]
    TooSmall {
        /// The device.
        device: Device,
        /// Its budget in bytes.
        budget: u64,
        /// First line of the memory account that does not fit.
        line: String,
        /// Bytes of that line.
        line_bytes: u64,
        /// Smallest sufficient budget in bytes, with the budget of the other device unchanged.
        needed: u64,
    },
}

impl SolveError {
    /// Remedy that takes a command or a flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::PinnedToNoGpu { .. } | Self::PinnedToGpus => Some(Hint::AllowVramOrUnpin),
            Self::ImpactGpus { .. } => Some(Hint::LatencyObjective),
            Self::Hardware(error) => error.hint(),
            Self::TooSmall {
                device: Device::Cpu,
                ..
            } => Some(Hint::AllowRam),
            Self::TooSmall {
                device: Device::Gpu,
                ..
            } => Some(Hint::AllowVram),
            _ => None,
        }
    }
}

/// `bytes` rounded
fn typed(bytes: u64) -> String {
    match bytes.div_ceil(1 << 20) {
        0..=1 => format!("`{}K`", bytes.div_ceil(1 << 10)),
        mebibytes => format!("`{mebibytes}M`"),
    }
}
