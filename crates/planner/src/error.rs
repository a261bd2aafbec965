//! What keeps a model from being placed, certified or simulated.

use std::path::PathBuf;

use powerinfer_artifact::{
    ArtifactError, ByteSize, Hint,
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

/// A model that cannot be placed, certified or simulated as asked.
#[derive(Debug, thiserror::Error)]
pub enum PlannerError {
    /// A policy that would skip nothing.
    #[error(
        "the activation of this model is never exactly zero, so the policy `exact` would skip nothing"
    )]
    NeverZero,
    /// A layer without what a policy needs.
    #[error("layer {layer} has no {what}, so the policy `{policy}` is not possible")]
    PolicyMissing {
        /// The first layer that lacks it.
        layer: usize,
        /// What it lacks.
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
    /// A policy that a model of this shape cannot have.
    #[error(
        "the policy `{policy}` is not possible here; this model can have {}",
        names(possible)
    )]
    PolicyOfShape {
        /// The policy.
        policy: Policy,
        /// Policies that it can have.
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
    /// A context that the model was not made for.
    #[error(
        "there is no room for {context} tokens of context; this model was made for 1 to {longest}"
    )]
    Context {
        /// Tokens asked for.
        context: usize,
        /// The model's longest context.
        longest: usize,
    },
    /// The free memory of this machine's graphics card is asked for and not known.
    #[error("the free memory of this machine's graphics card is not known: {reason}")]
    VramUnknown {
        /// The reason.
        reason: String,
    },
    /// Sizes whose sum does not fit in 64 bits.
    #[error("the memory of the GPUs adds up to more than this program can count")]
    VramSum,
    /// A machine that has no name here and no file.
    #[error("there is no machine called `{name}` and no such file; known are {}", hardware::NAMES.join(", "))]
    UnknownHardware {
        /// The name.
        name: String,
    },
    /// Predictors that were fitted to another profile's text.
    #[error(
        "the predictors in `{folder}` were made from another profile, which may have read the text that this one holds back to certify on"
    )]
    OtherProfile {
        /// The predictors.
        folder: PathBuf,
    },
    /// Input sparsity that is to be calibrated where nothing may be written.
    #[error("a dry run measures nothing, and input sparsity has to be calibrated")]
    DryRun,
    /// No text to calibrate input sparsity on.
    #[error("there is no text to calibrate input sparsity on")]
    NoCalibrationText,
    /// Too little text to choose thresholds on.
    #[error("choosing thresholds takes text that was held back, at least {needed} tokens of it")]
    NoHeldOutText {
        /// Tokens needed.
        needed: usize,
    },
    /// A bundle whose plan and figures differ in policies.
    #[error(
        "the bundle in `{folder}` follows other policies than it carries figures of; make it again from its model"
    )]
    OtherFigures {
        /// The bundle.
        folder: PathBuf,
    },
    /// A bundle that cannot be placed within other budgets.
    #[error("cannot place `{folder}` again: {source}")]
    Again {
        /// The bundle.
        folder: PathBuf,
        /// The reason.
        source: Box<SolveError>,
    },
    /// A certificate that was measured in longer windows than the context has room for.
    #[error(
        "the certificate was measured in windows of {window} tokens, and the bundle in `{folder}` was placed again with room for {context}"
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
        "a share of {share} hot neurons takes {} on the GPU in addition to {} of attention and the like, of {}",
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
    /// The user stopped it.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// A file that cannot be read or written.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// Hardware figures that cannot be.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    /// A bundle that cannot be packed, opened or changed.
    #[error(transparent)]
    Bundle(Box<BundleError>),
    /// A measurement that fails.
    #[error(transparent)]
    Eval(#[from] EvalError),
    /// An instruction set that is not here.
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
    /// A problem without a plan.
    #[error(transparent)]
    Solve(Box<SolveError>),
    /// Activation frequencies that no neurons can have.
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
    /// What can be done about it, where that takes a command or a flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::NeverZero => Some(Hint::OtherPolicy),
            Self::PolicyMissing { hint, .. } | Self::NoThresholds { hint, .. } => Some(*hint),
            Self::PerplexityBudget { .. } => Some(Hint::LargerPerplexityBudget),
            Self::VramUnknown { .. } => Some(Hint::GiveVramOrHardware),
            Self::OtherProfile { .. } => Some(Hint::ProfileOfPredictors),
            Self::DryRun => Some(Hint::NoDryRun),
            Self::NoCalibrationText | Self::NoHeldOutText { .. } => Some(Hint::MoreHeldOutText),
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
