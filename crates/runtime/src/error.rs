//! What keeps a bundle from running.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, ByteSize, Hint, plan::Policy, progress::Interrupted};
use powerinfer_bundle::BundleError;
use powerinfer_kernels::{
    KernelError,
    cuda::{CudaUnavailable, DeviceError},
};
use powerinfer_model::ModelError;

/// A bundle that cannot be run as asked.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// A policy without what it needs.
    #[error(
        "the bundle in `{folder}` has no {what} for layer {layer}, which the policy `{policy}` needs"
    )]
    PolicyMissing {
        /// The bundle.
        folder: PathBuf,
        /// The first layer that lacks it.
        layer: usize,
        /// The policy.
        policy: Policy,
        /// What it needs.
        what: &'static str,
        /// The remedy.
        hint: Hint,
    },
    /// A plan that accounts for other memory than running takes.
    #[error("the plan in `{folder}` has {planned} bytes for `{line}`, but running takes {held}")]
    OtherMemory {
        /// The bundle.
        folder: PathBuf,
        /// The line of the plan.
        line: &'static str,
        /// What it says.
        planned: u64,
        /// What is held.
        held: u64,
    },
    /// The KV cache finds no room.
    #[error(
            "there is no memory for the KV cache of {tokens} tokens, {} in all",
        ByteSize(*bytes)
    )]
    NoRoom {
        /// Tokens that the plan makes room for.
        tokens: usize,
        /// Bytes of all layers.
        bytes: u64,
    },
    /// A batch of nothing, or one whose sequences have not got a token each.
    #[error(
        "a batch has {sequences} sequences and {tokens} tokens; give one token for each of at least one sequence"
    )]
    BatchSize {
        /// Sequences given.
        sequences: usize,
        /// Tokens given.
        tokens: usize,
    },
    /// A sequence of a batch that cannot go on, or finds no room.
    #[error("sequence {sequence} of the batch: {source}")]
    InBatch {
        /// Its number, from 0 on.
        sequence: usize,
        /// The reason.
        source: Box<RuntimeError>,
    },
    /// A token that the model cannot take.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A prompt cache of something that computes other numbers.
    #[error("the prompt cache `{path}` is of other {what}: {found}; expected {expected}")]
    OtherPromptCache {
        /// The file.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// What the file is of.
        found: String,
        /// What runs.
        expected: String,
    },
    /// The worker threads could not be started.
    #[error("cannot start {threads} threads: {source}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// The reason.
        source: std::io::Error,
    },
    /// A sampling setting out of its range.
    #[error("`--{setting}` is {value}; {expected}")]
    Sampling {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: f32,
        /// What it may be.
        expected: &'static str,
    },
    /// A layer whose place the GPU's kernels cannot take.
    #[error(
        "the plan in `{folder}` puts {what} of layer {layer} on the GPU, which no GPU kernel supports"
    )]
    OnDevice {
        /// The bundle.
        folder: PathBuf,
        /// The layer.
        layer: usize,
        /// What it is.
        what: &'static str,
        /// The remedy.
        hint: Hint,
    },
    /// More on the GPU than the plan has room for.
    #[error(
            "running takes {} of the GPU's memory, but the plan has a budget of {}",
        ByteSize(*held), ByteSize(*budget)
    )]
    OverBudget {
        /// Bytes that are taken.
        held: u64,
        /// Bytes that the plan has.
        budget: u64,
    },
    /// A GPU was asked for and there is none.
    #[error("no GPU can be used: {0}")]
    NoGpu(CudaUnavailable),
    /// A GPU was asked for and the plan has no use for it.
    #[error("the plan puts nothing on a GPU")]
    NothingOnGpu,
    /// More of the GPU's memory is taken than the plan has for it.
    #[error(
        "{} of the GPU's memory are taken, but the plan has a budget of {}",
        ByteSize(*taken), ByteSize(*budget)
    )]
    TakesMore {
        /// Bytes taken, as the driver reports them.
        taken: u64,
        /// Bytes of the budget.
        budget: u64,
    },
    /// The user stopped it.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// Something that only the CPU does.
    #[error("{what} is not supported on a GPU")]
    CpuOnly {
        /// What.
        what: &'static str,
    },
    /// The GPU fails.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The instruction set asked for is not here.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The bundle cannot be opened.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// A file of the bundle cannot be read.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
}

impl RuntimeError {
    /// Remedy that takes a command or a flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::PolicyMissing { hint, .. } | Self::OnDevice { hint, .. } => Some(*hint),
            Self::OtherMemory { .. } => Some(Hint::PlaceAgain),
            Self::NoRoom { .. } => Some(Hint::ShorterContext),
            Self::OtherPromptCache { .. } => Some(Hint::OtherPromptCache),
            Self::OverBudget { .. } => Some(Hint::MoreVramOrShorterContext),
            Self::CpuOnly { .. } | Self::NoGpu(_) => Some(Hint::RunOnCpu),
            Self::NothingOnGpu => Some(Hint::PlaceOnGpu),
            Self::TakesMore { .. } => Some(Hint::SmallerVram),
            Self::InBatch { source, .. } => source.hint(),
            Self::Device(DeviceError::OutOfMemory { .. }) => Some(Hint::LessVram),
            Self::Bundle(error) => error.hint(),
            Self::Model(error) => error.hint(),
            Self::Artifact(error) => error.hint(),
            _ => None,
        }
    }
}
