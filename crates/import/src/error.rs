//! Errors of imports.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, Hint, numbered};
use powerinfer_model::ModelError;

/// Error of reading a pickled checkpoint or predictors of the original PowerInfer.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The pickle is damaged or contains more than tensors.
    #[error("`{path}` cannot be read as PyTorch weights: {reason}")]
    BadPickle {
        /// The file.
        path: PathBuf,
        /// Description of the problem.
        reason: String,
    },
    /// The path contains no predictors of the original PowerInfer.
    #[error(
        "there are no predictors of the original PowerInfer at `{path}`: {reason}; give a `*.powerinfer.gguf` file, a folder with `model_0.pt`, `model_1.pt`, …, or a checkpoint that contains predictors"
    )]
    NoPredictors {
        /// The path given.
        path: PathBuf,
        /// Description of the value that was found.
        reason: String,
    },
    /// Some layers have no predictor.
    #[error(
        "`{path}` has no predictor of {}; the original has one in every layer, download it again",
        numbered("layer", missing)
    )]
    MissingPredictors {
        /// The file or folder.
        path: PathBuf,
        /// Layers without predictor.
        missing: Vec<usize>,
    },
    /// The predictors are for a model with more layers.
    #[error(
        "`{path}` has a predictor of layer {layer}, the model has {layers} layers; the predictors are another model's"
    )]
    PredictorsOfMoreLayers {
        /// The file or folder.
        path: PathBuf,
        /// The last layer with a predictor.
        layer: usize,
        /// Number of layers of the model.
        layers: usize,
    },
    /// A matrix does not fit the model.
    #[error(
        "tensor `{tensor}` in `{path}` has shape {found:?}, the model needs {expected}; the predictors are another model's"
    )]
    PredictorShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Shape that would fit.
        expected: String,
        /// Shape in the file.
        found: Vec<usize>,
    },
    /// A tensor does not belong to a predictor of the original.
    #[error(
        "tensor `{tensor}` in `{path}` is not part of a predictor of the original PowerInfer, which has one `fc1.weight` and one `fc2.weight`; ignoring it would change the predictions"
    )]
    UnusedPredictorTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A checkpoint or a tensor cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A file cannot be read.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
}

impl ImportError {
    /// Returns the remedy, if it is a command or flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::Model(error) => error.hint(),
            Self::Artifact(error) => error.hint(),
            _ => None,
        }
    }
}
