//! Errors of loading and running a bundle.

use std::path::PathBuf;

use powerinfer_artifact::{
    ArtifactError, ByteSize, Hint, counted, plan::Policy, progress::Interrupted,
};
use powerinfer_bundle::BundleError;
use powerinfer_kernels::{
    KernelError,
    cuda::{CudaUnavailable, DeviceError},
};
use powerinfer_model::ModelError;

/// A bundle that cannot be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// The bundle lacks what a policy needs.
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
        /// The missing part.
        what: &'static str,
        /// The remedy.
        hint: Hint,
    },
    /// The plan accounts for other memory than running takes.
    #[error("the plan in `{folder}` has {planned} bytes for `{line}`, but running takes {held}")]
    OtherMemory {
        /// The bundle.
        folder: PathBuf,
        /// The line of the plan.
        line: &'static str,
        /// Bytes in the plan.
        planned: u64,
        /// Bytes that running takes.
        held: u64,
    },
    /// Memory for the KV cache is missing.
    #[error(
            "there is no memory for the KV cache of {tokens} tokens, {} in all",
        ByteSize(*bytes)
    )]
    NoRoom {
        /// Tokens of the plan's context.
        tokens: usize,
        /// Bytes of all layers.
        bytes: u64,
    },
    /// A batch is empty, or does not have one token per session.
    #[error(
        "a batch has {sessions} sessions and {tokens} tokens; give one token for each of at least one session, and no \
         more than fit a pass"
    )]
    BatchSize {
        /// Number of sessions.
        sessions: usize,
        /// Number of tokens.
        tokens: usize,
    },
    /// A session of a batch fails.
    #[error("session {session} of the batch: {source}")]
    InBatch {
        /// Index of the session.
        session: usize,
        /// The reason.
        source: Box<RuntimeError>,
    },
    /// The session belongs to another runtime.
    #[error("the session belongs to another model, bundle or device; make one with `new_session`")]
    OtherSession,
    /// A token is outside the vocabulary, or the context is full.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The prompt cache belongs to another model, bundle or policy.
    #[error("the prompt cache `{path}` is of other {what}: {found}; expected {expected}")]
    OtherPromptCache {
        /// The file.
        path: PathBuf,
        /// Setting that differs.
        what: &'static str,
        /// Value in the file.
        found: String,
        /// Value of the model.
        expected: String,
    },
    /// A text is to be continued that has no token to run.
    #[error(
        "the text has no pending token: run its prompt first; a text that has stopped cannot be continued"
    )]
    NoPending,

    /// Logits of a pass that computed none are asked for.
    #[error("the last pass computed no logits; ask for them")]
    NoLogits,

    /// No token can continue a text.
    #[error("{reason}")]
    NoToken {
        /// Reason, from the constraint of the text.
        reason: String,
    },

    /// Verification has changed the policy of layers, so the session mixes results of two policies.
    #[error("the prompt cache was not written: {} fell back from the plan's policy", counted(*.layers, "layer"))]
    FellBack {
        /// Number of layers.
        layers: usize,
    },
    /// The worker threads could not be started.
    #[error("cannot start {threads} threads: {source}")]
    Threads {
        /// Number of threads.
        threads: usize,
        /// The reason.
        source: std::io::Error,
    },
    /// A sampling setting is out of range.
    #[error("the sampling setting `{setting}` is {value}; {expected}")]
    Sampling {
        /// The setting's name in `generation_config.json`.
        setting: &'static str,
        /// Its value.
        value: f32,
        /// The valid range.
        expected: &'static str,
    },
    /// The plan puts a part on the GPU that no GPU kernel supports.
    #[error(
        "the plan in `{folder}` puts {what} of layer {layer} on the GPU, which no GPU kernel supports"
    )]
    OnDevice {
        /// The bundle.
        folder: PathBuf,
        /// The layer.
        layer: usize,
        /// The part.
        what: &'static str,
        /// The remedy.
        hint: Hint,
    },
    /// The GPU holds more than the plan accounts for.
    #[error(
            "running takes {} of the GPU's memory, but the plan has a budget of {}",
        ByteSize(*held), ByteSize(*budget)
    )]
    OverBudget {
        /// Bytes on the GPU.
        held: u64,
        /// Bytes of the plan's budget.
        budget: u64,
    },
    /// A GPU was requested and none is available.
    #[error("no GPU can be used: {0}")]
    NoGpu(CudaUnavailable),
    /// The plan is for several GPUs.
    #[error("the plan is for {gpus} GPUs, and a bundle runs on one")]
    SeveralGpus {
        /// Number of GPUs of the plan.
        gpus: usize,
    },
    /// A GPU was requested and the plan does not use one.
    #[error("the plan puts nothing on a GPU")]
    NothingOnGpu,
    /// More of the GPU's memory is in use than the plan's budget.
    #[error(
        "{} of the GPU's memory are taken, but the plan has a budget of {}",
        ByteSize(*taken), ByteSize(*budget)
    )]
    TakesMore {
        /// Bytes in use, as the driver reports them.
        taken: u64,
        /// Bytes of the budget.
        budget: u64,
    },
    /// The user has interrupted it.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// The GPU fails.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The requested instruction set is not available.
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
            Self::NoGpu(_) => Some(Hint::RunOnCpu),
            Self::SeveralGpus { .. } => Some(Hint::PlaceOnOneGpu),
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
