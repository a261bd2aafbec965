//! Why a problem has no plan, or is no problem.

use powerinfer_artifact::{ByteSize, Hint, hardware::HardwareError, plan::Device};

/// What is wrong with the input of [`place`](crate::place), or which budget is too small for it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SolveError {
    /// A model without layers.
    #[error("the model has no layers; profile it again")]
    NoLayers,
    /// A layer without neurons.
    #[error("layer {layer} has no neurons; profile the model again")]
    NoNeurons {
        /// The layer.
        layer: usize,
    },
    /// A frequency that is no share.
    #[error(
        "layer {layer}: neuron {neuron} is active with frequency {value}, which is not between 0 and 1; profile the model again"
    )]
    Frequency {
        /// The layer.
        layer: usize,
        /// Position in the layer's list.
        neuron: usize,
        /// What was found.
        value: f64,
    },
    /// Neurons that are not listed hottest first.
    #[error(
        "layer {layer}: neuron {neuron} is more active than the one before it; list neurons hottest first"
    )]
    NotSorted {
        /// The layer.
        layer: usize,
        /// Position of the first neuron out of order.
        neuron: usize,
    },
    /// A neuron that occupies nothing.
    #[error("layer {layer}: a neuron of 0 bytes cannot be; check the model's dimensions")]
    NeuronBytes {
        /// The layer.
        layer: usize,
    },
    /// Work that is negative, infinite or not a number.
    #[error(
        "layer {layer}: a token cannot read {value} bytes or rows of it; give a number of 0 or more"
    )]
    Work {
        /// The layer.
        layer: usize,
        /// What was found.
        value: f64,
    },
    /// Groups of no neurons.
    #[error("neurons cannot be placed in groups of 0; use {default}", default = crate::GROUP_SIZE)]
    GroupSize,
    /// Sizes whose sum does not fit in 64 bits.
    #[error(
        "the sizes add up to {total} bytes at layer {layer}, more than this program can count; check the model's dimensions"
    )]
    TooLarge {
        /// The layer at which the sum ran over.
        layer: usize,
        /// The sum so far.
        total: u128,
    },
    /// VRAM to use, but no GPU to use it on.
    #[error("{} of VRAM may be used but `{hardware}` has no GPU; describe one, take a named machine such as `rtx4090`, or allow `0G`", ByteSize(*.vram_bytes))]
    NoGpu {
        /// The VRAM budget.
        vram_bytes: u64,
        /// Name of the machine.
        hardware: String,
    },
    /// Parts pinned to a GPU that is not there, or may not be used.
    #[error("parts are pinned to the GPU, but `{hardware}` has none that may be used")]
    PinnedToNoGpu {
        /// Name of the machine.
        hardware: String,
    },
    /// The paper's objective with several GPUs.
    #[error("the objective `impact` knows one GPU and the budget is for {gpus}")]
    ImpactGpus {
        /// GPUs in the budget.
        gpus: usize,
    },
    /// Parts pinned to GPUs in a way that no ranges of layers allow.
    #[error("no split of the layers among the GPUs has room for what is pinned to them")]
    PinnedToGpus,
    /// A solver that this program was built without.
    #[error(
        "this program was built without the solver `{backend}`; build it with `--features {backend}`"
    )]
    NoBackend {
        /// The solver.
        backend: crate::Backend,
    },
    /// More than a layer's choices can tell apart.
    #[error(
        "layer {layer} has {groups} groups of neurons, more than this program can place; use larger groups"
    )]
    TooManyGroups {
        /// The layer.
        layer: usize,
        /// Its groups.
        groups: usize,
    },
    /// Hardware figures that cannot be.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    /// A budget that cannot hold what must be there.
    #[error("`{line}` ({}) does not fit: {device} memory is {} and {} is the least that works; allow {}", ByteSize(*.line_bytes), ByteSize(*.budget), ByteSize(*.needed), typed(*.needed))]
    TooSmall {
        /// Whose memory.
        device: Device,
        /// Bytes allowed.
        budget: u64,
        /// First line that does not fit after those before it.
        line: String,
        /// Bytes of that line.
        line_bytes: u64,
        /// Smallest budget with which there is a plan, the other one unchanged.
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
