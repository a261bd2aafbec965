//! What can go wrong when a checkpoint is made.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, Hint, progress::Interrupted};
use powerinfer_kernels::KernelError;
use powerinfer_model::ModelError;

/// A checkpoint that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// No shape of this name.
    #[error(
        "no shape is called `{name}`; known are {known}, or give a folder with a `config.json`"
    )]
    UnknownShape {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// The configuration asks for something that cannot be made.
    #[error("{reason}")]
    Unsuited {
        /// What, and what to do.
        reason: String,
    },
    /// Sparsity and skew contradict each other.
    #[error(
        "no power law leaves {zeros:.1} % zeros and has {skew:.1} % of the neurons carry 80 % of the activations; with this sparsity the skew can be from {lowest:.1} % to {highest:.1} %"
    )]
    Impossible {
        /// Zeros asked for, in percent.
        zeros: f64,
        /// Skew asked for, in percent.
        skew: f64,
        /// Smallest skew there is, in percent.
        lowest: f64,
        /// Largest skew there is, in percent.
        highest: f64,
    },
    /// The folder is there already.
    #[error("`{path}` exists already")]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// A gate of low rank, where a second ReLU decides which neurons are active too.
    #[error(
        "where up has a ReLU too, a gate of low rank does not predict which neurons are active"
    )]
    LowRankGate,
    /// The user asked to stop.
    #[error("interrupted; run the same command again to start over")]
    Interrupted,
    /// The kernels do not run here.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The configuration cannot be read, or the checkpoint made cannot be opened.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A file cannot be written.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
}

impl SynthError {
    /// Remedy that takes a command or a flag.
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
