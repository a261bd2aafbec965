//! What keeps a bundle from running.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, ByteSize, plan::Policy, progress::Interrupted};
use powerinfer_bundle::BundleError;
use powerinfer_kernels::{
    KernelError,
    cuda::{DeviceError, NoCard},
};
use powerinfer_model::ModelError;

/// A bundle that cannot be run as asked.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// A policy without what it needs.
    #[error(
        "the bundle in `{folder}` has no {what} for layer {layer}, so `--policy {policy}` cannot run; {instead}"
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
        /// What to do.
        instead: &'static str,
    },
    /// A plan that accounts for other memory than running takes.
    #[error(
        "the plan in `{folder}` has {planned} bytes for `{line}`, but running takes {held}; run `powerinfer place` again instead of editing the plan"
    )]
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
        "there is no memory for the KV cache of {tokens} tokens, {} in all; place the bundle again with a shorter `--context`",
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
    #[error(
        "the prompt cache `{path}` is of other {what}: {found}; here it is {expected}; delete it, or name another file by `--prompt-cache`"
    )]
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
        "the plan in `{folder}` puts {what} of layer {layer} on the GPU, whose kernels read none; {hint}"
    )]
    OnDevice {
        /// The bundle.
        folder: PathBuf,
        /// The layer.
        layer: usize,
        /// What it is.
        what: &'static str,
        /// What to do.
        hint: &'static str,
    },
    /// More on the GPU than the plan has room for.
    #[error(
        "running takes {} of the GPU's memory, but the plan has a budget of {}; place the bundle again with a larger `--vram` or a shorter `--context`",
        ByteSize(*held), ByteSize(*budget)
    )]
    OverBudget {
        /// Bytes that are taken.
        held: u64,
        /// Bytes that the plan has.
        budget: u64,
    },
    /// A GPU was asked for and there is none.
    #[error("no GPU can be used: {0}; `--device cpu` runs without one")]
    NoGpu(NoCard),
    /// A GPU was asked for and the plan has no use for it.
    #[error(
        "the plan puts nothing on a GPU; place the bundle again with `--vram`, or leave `--device` out"
    )]
    NothingOnGpu,
    /// More of the GPU's memory is taken than the plan has for it.
    #[error(
        "{} of the GPU's memory are taken, but the plan has a budget of {}; place the bundle again with a smaller `--vram`",
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
    #[error("{what} is not to be had on a GPU yet; run it with `--device cpu`")]
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
