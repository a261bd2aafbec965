//! Errors of planning, certification and simulation.

use std::path::PathBuf;

use powerinfer_artifact::{
    ArtifactError, ByteSize, Hint, Shard, counted,
    hardware::{self, HardwareError},
    plan::Policy,
    progress::Interrupted,
};
use powerinfer_bundle::BundleError;
use powerinfer_eval::{EvalError, format::percent};
use powerinfer_kernels::KernelError;
use powerinfer_model::ModelError;
use powerinfer_profile::ProfileError;
use powerinfer_runtime::RuntimeError;
use powerinfer_solver::SolveError;
use powerinfer_synth::SynthError;
use powerinfer_text::TextError;

/// Error of planning, certification or simulation.
#[derive(Debug, thiserror::Error)]
pub enum PlannerError {
    /// A policy that skips zeros, for an activation that is never exactly zero.
    #[error(
        "the policy `{0}` skips neurons whose activation is zero, but this model's activations are never exactly zero"
    )]
    NeverZero(Policy),
    /// A layer that lacks what the policy needs.
    #[error("layer {layer} has no {what}, so the policy `{policy}` is not possible")]
    PolicyMissing {
        /// The first layer that lacks it.
        layer: usize,
        /// Name of the missing part.
        what: &'static str,
        /// The policy.
        policy: Policy,
        /// The remedy.
        hint: Hint,
    },
    /// A policy beyond the perplexity budget.
    #[error("the policy `{policy}` is not possible for layer {layer} within the perplexity budget")]
    PerplexityBudget {
        /// The layer.
        layer: usize,
        /// The policy.
        policy: Policy,
    },
    /// A policy that is not possible for a model of this shape.
    #[error(
        "the policy `{policy}` is not possible here; this model can have {}",
        names(possible)
    )]
    PolicyOfShape {
        /// The policy.
        policy: Policy,
        /// Possible policies.
        possible: Vec<Policy>,
    },
    /// A pin of a layer that the model does not have.
    #[error("layer {layer} is pinned; the model has layers 0 to {last}")]
    PinnedLayer {
        /// The layer.
        layer: usize,
        /// The model's last layer.
        last: usize,
    },
    /// A part that is pinned to both devices.
    #[error("the same part is pinned to both devices; pin it to one of them")]
    PinnedTwice,
    /// Attention that is pinned to the GPU but has no GPU kernels.
    #[error("attention cannot be pinned to the GPU: the GPU kernels do not support {0}")]
    AttentionOnGpu(&'static str),
    /// Input sparsity for a model whose attention does not support it.
    #[error("`--input-sparsity` does not support {0}")]
    InputSparsity(&'static str),
    /// A context length outside the model's range.
    #[error("the model supports contexts of 1 to {longest} tokens, not {context}")]
    Context {
        /// Tokens asked for.
        context: usize,
        /// The model's longest context.
        longest: usize,
    },
    /// The free memory of this machine's GPU is asked for and not known.
    #[error("the free memory of this machine's GPU is not known: {reason}")]
    VramUnknown {
        /// The reason.
        reason: String,
    },
    /// Sizes whose sum does not fit in 64 bits.
    #[error("the sum of the GPUs' memory does not fit in 64 bits")]
    VramSum,
    /// Neither a known machine nor a file.
    #[error("there is no machine called `{name}` and no such file; known are {}", hardware::NAMES.join(", "))]
    UnknownHardware {
        /// The name.
        name: String,
    },
    /// Predictors made from another profile.
    #[error(
        "the predictors in `{folder}` were made from another profile, whose text may include the held-out text of this one"
    )]
    OtherProfile {
        /// The predictors.
        folder: PathBuf,
    },
    /// Input sparsity in a dry run, which cannot calibrate it.
    #[error("a dry run measures nothing, and input sparsity has to be calibrated")]
    DryRun,
    /// No text to calibrate input sparsity on.
    #[error("there is no text to calibrate input sparsity on")]
    NoCalibrationText,
    /// Too little held-out text to choose thresholds.
    #[error("choosing thresholds needs at least {needed} tokens of held-out text")]
    NoHeldOutText {
        /// Tokens needed.
        needed: usize,
        /// The remedy.
        hint: Hint,
    },
    /// A bundle whose plan and placement inputs differ in policies.
    #[error(
        "the plan of the bundle in `{folder}` has other policies than its placement inputs; make it again from its model"
    )]
    OtherFigures {
        /// The bundle.
        folder: PathBuf,
    },
    /// A bundle that cannot be placed within other budgets.
    #[error("cannot re-plan `{folder}`: {source}")]
    Again {
        /// The bundle.
        folder: PathBuf,
        /// The reason.
        source: Box<SolveError>,
    },
    /// A shard of a certificate without windows.
    #[error("shard {shard} has no text: the certificate has only {}; use fewer shards", counted(*windows, "window"))]
    EmptyShard {
        /// The shard.
        shard: Shard,
        /// Windows of all shards.
        windows: usize,
    },
    /// A certificate that was measured in longer windows than the context has room for.
    #[error(
        "the certificate was measured in windows of {window} tokens, and the bundle in `{folder}` was re-planned with room for {context}"
    )]
    ShortContext {
        /// Tokens of a window.
        window: u64,
        /// The bundle.
        folder: PathBuf,
        /// Tokens of context.
        context: u64,
    },
    /// More hot neurons than the VRAM has room for.
    #[error(
        "hot neurons at a share of {share} take {} on the GPU; with {} of other parts they exceed the budget of {}",
        ByteSize(*hot), ByteSize(*dense), ByteSize(*budget)
    )]
    HotShare {
        /// Share of hot neurons.
        share: f64,
        /// Bytes of hot neurons.
        hot: u64,
        /// Bytes of everything else on the GPU.
        dense: u64,
        /// Bytes of the budget.
        budget: u64,
    },
    /// A layer without thresholds for a setting of a sweep.
    #[error("layer {layer} of `{folder}` has no thresholds, so `{setting}` is not possible")]
    NoThresholds {
        /// The layer.
        layer: usize,
        /// The bundle.
        folder: PathBuf,
        /// The setting.
        setting: String,
        /// The remedy.
        hint: Hint,
    },
    /// A setting of a sweep beyond the calibrated thresholds.
    #[error(
        "thresholds of layer {layer} of `{folder}` are calibrated from {} to {}; give a setting between for `{setting}`",
        percent(*low), percent(*high)
    )]
    ThresholdRange {
        /// The layer.
        layer: usize,
        /// The bundle.
        folder: PathBuf,
        /// The setting.
        setting: String,
        /// Smallest calibrated setting, as a share.
        low: f64,
        /// Largest calibrated setting, as a share.
        high: f64,
    },
    /// A temporary file that cannot be written.
    #[error("cannot write a temporary file: {0}")]
    Temporary(std::io::Error),
    /// Interrupted by the user.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// A file that cannot be read or written.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// Invalid hardware values.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    /// A bundle that cannot be packed, opened or changed.
    #[error(transparent)]
    Bundle(Box<BundleError>),
    /// A measurement that fails.
    #[error(transparent)]
    Eval(#[from] EvalError),
    /// An instruction set that this CPU lacks.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A model that cannot be used.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A profile that cannot be used.
    #[error(transparent)]
    Profile(Box<ProfileError>),
    /// A bundle that cannot be run.
    #[error(transparent)]
    Runtime(Box<RuntimeError>),
    /// A placement problem without a solution.
    #[error(transparent)]
    Solve(Box<SolveError>),
    /// A sparsity and a skew that no power law has.
    #[error(transparent)]
    Synth(#[from] SynthError),
    /// A tokenizer that cannot be used.
    #[error(transparent)]
    Text(#[from] TextError),
}

/// Boxes the errors that are large.
macro_rules! boxed {
    ($($variant:ident($error:ty)),*) => {$(
        impl From<$error> for PlannerError {
            fn from(error: $error) -> Self {
                Self::$variant(Box::new(error))
            }
        }
    )*};
}

boxed!(
    Bundle(BundleError),
    Profile(ProfileError),
    Runtime(RuntimeError),
    Solve(SolveError)
);

fn names(policies: &[Policy]) -> String {
    let names: Vec<String> = policies.iter().map(Policy::to_string).collect();
    names.join(", ")
}

impl PlannerError {
    /// Remedy that takes a command or a flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::NeverZero(_) => Some(Hint::ThresholdPolicy),
            Self::PolicyMissing { hint, .. }
            | Self::NoThresholds { hint, .. }
            | Self::NoHeldOutText { hint, .. } => Some(*hint),
            Self::PerplexityBudget { .. } => Some(Hint::LargerPerplexityBudget),
            Self::VramUnknown { .. } => Some(Hint::GiveVramOrHardware),
            Self::OtherProfile { .. } => Some(Hint::ProfileOfPredictors),
            Self::DryRun => Some(Hint::NoDryRun),
            Self::NoCalibrationText => Some(Hint::MoreHeldOutText),
            Self::ShortContext { .. } => Some(Hint::LongerContext),
            Self::HotShare { .. } => Some(Hint::FewerHotNeurons),
            Self::Artifact(error) => error.hint(),
            Self::Hardware(error) => error.hint(),
            Self::Bundle(error) => error.hint(),
            Self::Eval(error) => error.hint(),
            Self::Model(error) => error.hint(),
            Self::Profile(error) => error.hint(),
            Self::Runtime(error) => error.hint(),
            Self::Solve(error) => error.hint(),
            Self::Again { source, .. } => source.hint(),
            Self::Synth(error) => error.hint(),
            _ => None,
        }
    }
}
