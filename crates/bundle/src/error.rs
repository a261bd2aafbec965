//! What can go wrong with a bundle.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, Hint, plan::PlanError, progress::Interrupted};
use powerinfer_model::ModelError;

/// A bundle that cannot be made or opened.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// There is no bundle at this place.
    #[error("there is no bundle in `{path}`")]
    Missing {
        /// The folder.
        path: PathBuf,
    },
    /// A plan that contradicts itself or its bundle.
    #[error("the plan in `{path}` cannot be used: {source}")]
    Plan {
        /// The plan's file.
        path: PathBuf,
        /// The contradiction.
        source: PlanError,
    },
    /// A plan for other dimensions than the bundle's.
    #[error("the plan in `{path}` is for {found}, the bundle has {expected}")]
    PlanShape {
        /// The plan's file.
        path: PathBuf,
        /// Layers and neurons of the bundle.
        expected: String,
        /// Layers and neurons of the plan.
        found: String,
    },
    /// A bundle without what placing it again takes.
    #[error(
        "the bundle in `{folder}` does not carry the activation frequencies that placing it again takes"
    )]
    PlacedForGood {
        /// The bundle.
        folder: PathBuf,
    },
    /// A neuron order that is none.
    #[error(
        "the order of neurons of layer {layer} in `{path}` is not a permutation; make the profile or bundle again"
    )]
    NotAPermutation {
        /// The file.
        path: PathBuf,
        /// The layer.
        layer: usize,
    },
    /// The model cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A file cannot be read or written.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
}

impl BundleError {
    /// Remedy that takes a command or a flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::Missing { .. } => Some(Hint::MakeBundle),
            Self::Plan { source, .. } => source.hint(),
            Self::PlanShape { .. } => Some(Hint::PlaceAgain),
            Self::PlacedForGood { .. } => Some(Hint::MakeBundleAgain),
            Self::Model(error) => error.hint(),
            Self::Artifact(error) => error.hint(),
            Self::NotAPermutation { .. } => None,
        }
    }
}

impl From<Interrupted> for BundleError {
    fn from(interrupted: Interrupted) -> Self {
        Self::Artifact(interrupted.into())
    }
}
