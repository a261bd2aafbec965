//! Errors of making, opening and changing bundles.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, Hint, plan::PlanError, progress::Interrupted};
use powerinfer_model::ModelError;
use powerinfer_tensor::Format;

/// Error of making, opening or changing a bundle.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// The folder contains no bundle.
    #[error("there is no bundle in `{path}`")]
    Missing {
        /// The folder.
        path: PathBuf,
    },
    /// The plan is inconsistent or does not fit the bundle.
    #[error("the plan in `{path}` cannot be used: {source}")]
    Plan {
        /// Path of the plan.
        path: PathBuf,
        /// The inconsistency.
        source: PlanError,
    },
    /// The plan is for other dimensions than the bundle's.
    #[error("the plan in `{path}` is for {found}, the bundle has {expected}")]
    PlanShape {
        /// Path of the plan.
        path: PathBuf,
        /// Layers and neurons of the bundle.
        expected: String,
        /// Layers and neurons of the plan.
        found: String,
    },
    /// The bundle has no placement inputs, so it cannot be re-planned.
    #[error("the bundle in `{folder}` has no activation frequencies, which re-planning needs")]
    NoPlacementInputs {
        /// Folder of the bundle.
        folder: PathBuf,
    },
    /// The order of a layer's neurons is not a permutation.
    #[error(
        "the order of neurons of layer {layer} in `{path}` is not a permutation; make the profile or bundle again"
    )]
    NotAPermutation {
        /// The file.
        path: PathBuf,
        /// The layer.
        layer: usize,
    },
    /// A weight is not finite, or beyond its format.
    #[error("`{tensor}` has the value {value:e} in row {row}, column {column}: {}", beyond(*value, *format))]
    Beyond {
        /// The tensor of the bundle.
        tensor: String,
        /// Its row: of FFN matrices, the checkpoint's neuron.
        row: usize,
        /// Column of the value.
        column: usize,
        /// The value.
        value: f32,
        /// Format of the tensor.
        format: Format,
    },
    /// A scale of a GGUF file's blocks is not finite.
    #[error("`{tensor}` has a scale that is not finite in row {row}; the file is damaged")]
    DamagedScale {
        /// The tensor of the bundle.
        tensor: String,
        /// Its row, of the checkpoint.
        row: usize,
    },
    /// The configuration in a manifest contradicts itself.
    #[error("the configuration in `{path}` is invalid: {reason}; make the bundle again")]
    Configuration {
        /// The manifest.
        path: PathBuf,
        /// The contradiction.
        reason: String,
    },
    /// A file that is not part of the bundle.
    #[error("`{path}` is not named in the bundle's manifest; remove it")]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// The model cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A file cannot be read or written.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
}

fn beyond(value: f32, format: Format) -> String {
    if value.is_finite() {
        format!(
            "`{format}` represents magnitudes below {:e}",
            format.limit()
        )
    } else {
        "the checkpoint is damaged".to_owned()
    }
}

impl BundleError {
    /// Returns the remedy, if it is a command or flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::Missing { .. } => Some(Hint::MakeBundle),
            Self::Plan { source, .. } => source.hint(),
            Self::PlanShape { .. } => Some(Hint::PlaceAgain),
            Self::NoPlacementInputs { .. } => Some(Hint::MakeBundleAgain),
            Self::Model(error) => error.hint(),
            Self::Artifact(error) => error.hint(),
            Self::Beyond { value, .. } if value.is_finite() => Some(Hint::WiderFormat),
            Self::NotAPermutation { .. }
            | Self::Beyond { .. }
            | Self::DamagedScale { .. }
            | Self::Configuration { .. }
            | Self::Foreign { .. } => None,
        }
    }
}

impl From<Interrupted> for BundleError {
    fn from(interrupted: Interrupted) -> Self {
        Self::Artifact(interrupted.into())
    }
}
