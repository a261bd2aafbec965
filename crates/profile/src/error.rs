//! Errors of making, reading and merging profiles.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, Hint, Shard, counted, progress::Interrupted};
use powerinfer_kernels::cuda::DeviceError;
use powerinfer_model::ModelError;

/// A profile that cannot be made, read or merged.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The folder contains no profile.
    #[error("there is no profile in `{path}`")]
    Missing {
        /// The folder.
        path: PathBuf,
    },
    /// The calibration text has no tokens.
    #[error("the calibration text has no tokens")]
    NoTokens,
    /// The calibration text is too short.
    #[error(
        "the calibration text has {}, of which {held_out} are held out, but {needed} held-out tokens are needed: give at least {total} in all",
        counted(tokens, "token")
    )]
    TooShort {
        /// Tokens of the text.
        tokens: usize,
        /// Tokens of the held-out part.
        held_out: usize,
        /// Tokens that must at least be held out.
        needed: usize,
        /// Tokens that the text must have so that enough are held out.
        total: usize,
    },
    /// A shard has no sequences.
    #[error(
        "shard {shard} has no text: the text has only {}; use fewer shards or more text",
        counted(sequences, "sequence")
    )]
    EmptyShard {
        /// The shard.
        shard: Shard,
        /// Sequences of all shards.
        sequences: usize,
    },
    /// There are no profiles to merge.
    #[error("no profiles to merge")]
    NothingToMerge,
    /// The profiles cannot be combined.
    #[error("`{path}` cannot be merged: {reason}")]
    NotMergeable {
        /// The profile.
        path: PathBuf,
        /// The cause and the remedy.
        reason: String,
    },
    /// The activations of a layer are NaN or infinite.
    #[error("layer {layer} of the model produces NaN or infinite values; its weights are damaged")]
    NotFinite {
        /// The layer.
        layer: usize,
    },
    /// The table of neurons is invalid.
    #[error("`{path}` is not a valid table of neurons: {reason}; make the profile again")]
    Table {
        /// The file.
        path: PathBuf,
        /// The defect.
        reason: String,
    },
    /// The device failed.
    #[error("{source}")]
    OnDevice {
        /// The failure.
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
