//! What can go wrong with predictors.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, Hint, progress::Interrupted};
use powerinfer_import::ImportError;
use powerinfer_model::ModelError;
use powerinfer_profile::ProfileError;
use powerinfer_tensor::Format;

/// Predictors that cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum PredictorError {
    /// A target outside (0, 1].
    #[error(
        "a recall of {0} cannot be asked for; give a number above 0 and at most 1, such as 0.95"
    )]
    Recall(f64),
    /// Too few samples in the profile.
    #[error(
        "layer {layer} of the profile has {training} training and {held_out} held-out samples, at least {needed} of each are needed"
    )]
    TooFewSamples {
        /// The layer.
        layer: usize,
        /// Samples to learn from.
        training: usize,
        /// Samples to judge on.
        held_out: usize,
        /// Samples needed.
        needed: usize,
    },
    /// The loss is no number any more.
    #[error("training the predictor of layer {layer} diverged: its loss is no number any more")]
    Diverged {
        /// The layer.
        layer: usize,
    },
    /// Samples that are no numbers.
    #[error(
        "sample {token} of the {part} part of layer {layer} of the profile has a number that is NaN or infinite"
    )]
    NotFinite {
        /// The layer.
        layer: usize,
        /// The part of the samples.
        part: &'static str,
        /// The sample.
        token: usize,
    },
    /// A profile without samples of what imported predictors see.
    #[error(
        "the profile in `{path}` has no samples of hidden states before the FFN's norm, which imported predictors see"
    )]
    NoResiduals {
        /// The profile's folder.
        path: PathBuf,
    },
    /// Weights that a format cannot hold.
    #[error("the predictor of layer {layer} in `{path}` has weights beyond the range of {weights}")]
    OutOfRange {
        /// The predictors.
        path: PathBuf,
        /// The layer.
        layer: usize,
        /// The format.
        weights: Format,
    },
    /// The tensor library failed.
    #[error("training a predictor failed: {0}")]
    Candle(#[from] candle_core::Error),
    /// The predictors to import cannot be read.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// A weight of the model cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The profile cannot be read.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// A file cannot be read or written.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
}

impl PredictorError {
    /// Remedy that takes a command or a flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::TooFewSamples { .. } => Some(Hint::MoreTokens),
            Self::Diverged { .. } => Some(Hint::OtherSeed),
            Self::NotFinite { .. } | Self::NoResiduals { .. } => Some(Hint::ProfileAgain),
            Self::OutOfRange { .. } => Some(Hint::ImportAsF32),
            Self::Import(error) => error.hint(),
            Self::Model(error) => error.hint(),
            Self::Profile(error) => error.hint(),
            Self::Artifact(error) => error.hint(),
            Self::Recall(_) | Self::Candle(_) => None,
        }
    }
}

impl From<Interrupted> for PredictorError {
    fn from(interrupted: Interrupted) -> Self {
        Self::Artifact(interrupted.into())
    }
}
