//! What keeps a bundle from running.

use std::path::PathBuf;

use powerinfer_artifact::ArtifactError;
use powerinfer_bundle::BundleError;
use powerinfer_kernels::KernelError;

/// A bundle that cannot be run as asked.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// The predicted policy without predictors.
    #[error(
        "the bundle in `{folder}` has no predictor for layer {layer}, so `--policy predicted` cannot run; use `exact` or `dense`, or train predictors and place again"
    )]
    NoPredictor {
        /// The bundle.
        folder: PathBuf,
        /// The first layer without one.
        layer: usize,
    },
    /// The worker threads could not be started.
    #[error("cannot start {threads} threads: {source}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// The reason.
        source: rayon::ThreadPoolBuildError,
    },
    /// A sampling setting out of its range.
    #[error("`--{setting}` is {value}; {expected}")]
    Sampling {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: f32,
        /// What it may be.
        expected: &'static str,
    },
    /// The instruction set asked for is not here.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The bundle cannot be opened.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// A file of the bundle cannot be read.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
}
