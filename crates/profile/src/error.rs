//! What can go wrong with a profile.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, Hint, progress::Interrupted};
use powerinfer_kernels::cuda::DeviceError;
use powerinfer_model::ModelError;

use crate::calibration::Shard;

/// A profile that cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// There is no profile at this place.
    #[error("there is no profile in `{path}`")]
    Missing {
        /// The folder.
        path: PathBuf,
    },
    /// Calibration text without a token.
    #[error("the calibration text has no tokens")]
    NoTokens,
    /// Too little text to hold some of it out.
    #[error(
        "the calibration text makes {sequences} sequence(s); at least {needed} are needed to hold some out"
    )]
    TooShort {
        /// Sequences there.
        sequences: usize,
        /// Sequences needed.
        needed: usize,
    },
    /// A shard without a sequence.
    #[error(
        "shard {shard} would have no text, since there are only {sequences} sequences; take fewer shards or more text"
    )]
    EmptyShard {
        /// The shard.
        shard: Shard,
        /// Sequences to be shared.
        sequences: usize,
    },
    /// Nothing to merge.
    #[error("there is nothing to merge; name the profiles")]
    NothingToMerge,
    /// Profiles that do not add up.
    #[error("`{path}` cannot be merged: {reason}")]
    NotMergeable {
        /// The profile.
        path: PathBuf,
        /// Why, and what to do.
        reason: String,
    },
    /// The activations of a layer are not numbers.
    #[error("layer {layer} of the model gives values that are not finite; its weights are damaged")]
    NotFinite {
        /// The layer.
        layer: usize,
    },
    /// The table of neurons is not what it should be.
    #[error("`{path}` is not a valid table of neurons: {reason}; make the profile again")]
    Table {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A device cannot go on.
    #[error("{source}")]
    OnDevice {
        /// Why.
        source: DeviceError,
    },
    /// The model cannot be read or run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A file cannot be read or written.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
}

impl ProfileError {
    /// Remedy that takes a command or a flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::Missing { .. } => Some(Hint::Profile),
            Self::NoTokens => Some(Hint::GiveText),
            Self::TooShort { .. } => Some(Hint::MoreText),
            Self::OnDevice { .. } => Some(Hint::ResumeOnCpu),
            Self::Model(error) => error.hint(),
            Self::Artifact(error) => error.hint(),
            _ => None,
        }
    }
}

impl From<Interrupted> for ProfileError {
    fn from(interrupted: Interrupted) -> Self {
        Self::Artifact(interrupted.into())
    }
}

impl From<candle_core::Error> for ProfileError {
    fn from(error: candle_core::Error) -> Self {
        Self::Model(ModelError::Reference(error.to_string()))
    }
}

impl From<DeviceError> for ProfileError {
    fn from(source: DeviceError) -> Self {
        Self::OnDevice { source }
    }
}
