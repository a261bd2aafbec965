//! Errors of making a checkpoint.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, Hint, progress::Interrupted};
use powerinfer_kernels::KernelError;
use powerinfer_model::ModelError;

/// Error of making a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// The shape is neither built in nor a folder.
    #[error(
        "no shape is called `{name}`; known are {known}, or give a folder with a `config.json`"
    )]
    UnknownShape {
        /// Name given.
        name: String,
        /// Built-in names.
        known: String,
    },
    /// The configuration has a feature that is not supported.
    #[error("{reason}")]
    Unsupported {
        /// The feature, and the remedy.
        reason: String,
    },
    /// No power law has the given sparsity and skew.
    #[error(
        "no power law has {zeros:.1}% zeros and {skew:.1}% of the neurons carrying 80% of the activations; with this sparsity the skew can be from {lowest:.1}% to {highest:.1}%"
    )]
    NoPowerLaw {
        /// Requested share of zeros, in percent.
        zeros: f64,
        /// Requested skew, in percent.
        skew: f64,
        /// Smallest possible skew, in percent.
        lowest: f64,
        /// Largest possible skew, in percent.
        highest: f64,
    },
    /// The folder exists already.
    #[error("`{path}` exists already")]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// A low-rank gate does not determine the active neurons, since up has a ReLU too.
    #[error(
        "the predictor rank is not supported for models with a ReLU on up: a low-rank gate does not predict which neurons are active"
    )]
    LowRankGate,
    /// The user interrupted the work.
    #[error("interrupted; run the same command again to start over")]
    Interrupted,
    /// The kernels do not support this machine.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The configuration cannot be read, or the new checkpoint cannot be opened.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A file cannot be written.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
}

impl SynthError {
    /// Returns the remedy, if it is a command or flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::Exists { .. } => Some(Hint::OtherFolder),
            Self::LowRankGate => Some(Hint::NoPredictorRank),
            Self::Model(error) => error.hint(),
            Self::Artifact(error) => error.hint(),
            _ => None,
        }
    }
}

impl From<Interrupted> for SynthError {
    fn from(_: Interrupted) -> Self {
        Self::Interrupted
    }
}
