//! Errors of making predictors.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, ByteSize, Hint, Shard, progress::Interrupted};
use powerinfer_import::ImportError;
use powerinfer_model::ModelError;
use powerinfer_profile::ProfileError;
use powerinfer_tensor::Format;

/// Predictors that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PredictorError {
    /// A target recall is not in (0, 1].
    #[error("invalid target recall {0}; give a value above 0 and at most 1, such as 0.95")]
    Recall(f64),
    /// The byte budget is too small for any predictor.
    #[error(
        "predictors of this model take at least {} ({bytes} per layer), but their budget is {}",
        ByteSize(bytes.0 * *layers as u64), ByteSize(budget.0 * *layers as u64)
    )]
    OverBudget {
        /// Bytes of the smallest predictor of a layer.
        bytes: ByteSize,
        /// Budget of a layer's predictor.
        budget: ByteSize,
        /// Layers of the model.
        layers: usize,
    },
    /// The profile has too few samples.
    #[error(
        "layer {layer} of the profile has {training} training and {held_out} held-out samples, at least {needed} of each are needed"
    )]
    TooFewSamples {
        /// The layer.
        layer: usize,
        /// Training samples.
        training: usize,
        /// Held-out samples.
        held_out: usize,
        /// Required samples of each part.
        needed: usize,
    },
    /// There are more shards than layers.
    #[error("shard {shard} has no layers, since the model has {layers}; train fewer shards")]
    EmptyShard {
        /// The shard.
        shard: Shard,
        /// Layers of the model.
        layers: usize,
    },
    /// There are no predictors to merge.
    #[error("no predictors to merge")]
    NothingToMerge,
    /// The predictors cannot be put together.
    #[error("`{path}` cannot be merged: {reason}")]
    NotMergeable {
        /// The predictors.
        path: PathBuf,
        /// The cause and the remedy.
        reason: String,
    },
    /// The loss became NaN or infinite.
    #[error("training the predictor of layer {layer} diverged: its loss is NaN or infinite")]
    Diverged {
        /// The layer.
        layer: usize,
    },
    /// A sample is NaN or infinite.
    #[error(
        "sample {token} of the {part} part of layer {layer} of the profile has a NaN or infinite value"
    )]
    NotFinite {
        /// The layer.
        layer: usize,
        /// Part of the samples.
        part: &'static str,
        /// Index of the sample.
        token: usize,
    },
    /// The profile lacks the inputs of imported predictors.
    #[error(
        "the profile in `{path}` has no samples of hidden states before the FFN's norm, the input of imported predictors"
    )]
    NoResiduals {
        /// Folder of the profile.
        path: PathBuf,
    },
    /// Weights exceed the range of their format.
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
            Self::OverBudget { .. } => Some(Hint::LargerPredictors),
            Self::TooFewSamples { .. } => Some(Hint::MoreTokens),
            Self::Diverged { .. } => Some(Hint::OtherSeed),
            Self::NotFinite { .. } | Self::NoResiduals { .. } => Some(Hint::ProfileAgain),
            Self::OutOfRange { .. } => Some(Hint::ImportAsF32),
            Self::Import(error) => error.hint(),
            Self::Model(error) => error.hint(),
            Self::Profile(error) => error.hint(),
            Self::Artifact(error) => error.hint(),
            Self::Recall(_)
            | Self::EmptyShard { .. }
            | Self::NothingToMerge
            | Self::NotMergeable { .. }
            | Self::Candle(_) => None,
        }
    }
}

impl From<Interrupted> for PredictorError {
    fn from(interrupted: Interrupted) -> Self {
        Self::Artifact(interrupted.into())
    }
}
