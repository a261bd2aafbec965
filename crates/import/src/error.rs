//! Errors of importing.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, Hint};
use powerinfer_model::ModelError;

/// Why a pickled checkpoint or predictors of the original PowerInfer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// A pickle that is damaged or holds more than tensors.
    #[error("`{path}` cannot be read as PyTorch weights: {reason}")]
    BadPickle {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Nothing that could be the predictors of the original PowerInfer.
    #[error(
        "there are no predictors of the original PowerInfer at `{path}`: {reason}; give a `*.powerinfer.gguf` file, or a folder with `model_0.pt`, `model_1.pt`, …"
    )]
    NoPredictors {
        /// What was asked for.
        path: PathBuf,
        /// What it is instead.
        reason: String,
    },
    /// Layers without a predictor.
    #[error(
        "`{path}` has no predictor of layer(s) {}; the original has one in every layer, download it again",
        missing.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    )]
    MissingPredictors {
        /// The file or folder.
        path: PathBuf,
        /// The layers.
        missing: Vec<usize>,
    },
    /// Predictors of a deeper model.
    #[error(
        "`{path}` has a predictor of layer {layer}, the model has {layers} layers; the predictors are another model's"
    )]
    PredictorsOfMoreLayers {
        /// The file or folder.
        path: PathBuf,
        /// The last layer with a predictor.
        layer: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// A matrix of a predictor that does not fit the model.
    #[error(
        "tensor `{tensor}` in `{path}` has shape {found:?}, the model needs {expected}; the predictors are another model's"
    )]
    PredictorShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape that would fit.
        expected: String,
        /// The shape there.
        found: Vec<usize>,
    },
    /// A tensor that predictors of the original do not have.
    #[error(
        "tensor `{tensor}` in `{path}` is left over: a predictor of the original PowerInfer is one `fc1.weight` and one `fc2.weight`; it would predict otherwise without it"
    )]
    PredictorLeftOver {
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
    /// Remedy that takes a command or a flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::Model(error) => error.hint(),
            Self::Artifact(error) => error.hint(),
            _ => None,
        }
    }
}
