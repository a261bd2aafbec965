//! Errors of exports.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, Hint, progress::Interrupted};
use powerinfer_bundle::BundleError;
use powerinfer_model::ModelError;
use powerinfer_tensor::Format;

/// Error of an export.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// A format that the target does not have.
    #[error("{target} has no weights in {format}, only in {supported}")]
    Format {
        /// The target.
        target: &'static str,
        /// The format.
        format: Format,
        /// Formats of the target.
        supported: &'static str,
    },
    /// A weight is beyond the numbers of the format.
    #[error("tensor `{tensor}` has the value {value}, beyond the range of {format}")]
    Beyond {
        /// The tensor.
        tensor: String,
        /// The value.
        value: f32,
        /// The format.
        format: Format,
    },
    /// The original PowerInfer's engine cannot run the model.
    #[error("`{path}` cannot be exported for the original PowerInfer: {reason}")]
    NotForOriginal {
        /// The bundle.
        path: PathBuf,
        /// Unsupported feature.
        reason: String,
    },
    /// The model has no experts to place.
    #[error("`{path}` is not a mixture of experts, so there are no experts to place")]
    NotOfExperts {
        /// The bundle.
        path: PathBuf,
    },
    /// The predictor of a layer has no counterpart.
    #[error(
        "the predictor of layer {layer} cannot be exported for the original PowerInfer: {reason}"
    )]
    Predictor {
        /// The layer.
        layer: usize,
        /// Unsupported feature.
        reason: String,
        /// The remedy, if it takes a command.
        hint: Option<Hint>,
    },
    /// A file is not an index of neurons on the GPU.
    #[error("`{path}` is not an index of neurons on the GPU: {reason}")]
    Index {
        /// The file.
        path: PathBuf,
        /// Reason.
        reason: String,
    },
    /// A checkpoint cannot be read or represented.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A bundle cannot be read.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// A file cannot be read or written.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// The user stopped the export.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
}

impl ExportError {
    /// Returns the remedy, if it is a command or flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::Format { .. } | Self::Beyond { .. } => Some(Hint::OtherFormat),
            Self::NotForOriginal { .. } => Some(Hint::ExportGguf),
            Self::Predictor { hint, .. } => *hint,
            Self::Model(error) => error.hint(),
            Self::Bundle(error) => error.hint(),
            Self::Artifact(error) => error.hint(),
            _ => None,
        }
    }
}
