//! Errors of the stages.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, Hint, progress::Interrupted};
use powerinfer_corpus::{CorpusError, Skipped};
use powerinfer_kernels::KernelError;
use powerinfer_planner::PlannerError;
use powerinfer_predictor::PredictorError;
use powerinfer_profile::ProfileError;
use powerinfer_text::TextError;

/// Number of skipped files that an error lists.
const LISTED: usize = 5;

/// A failed stage.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// No text was given to calibrate on.
    #[error("no calibration text for `{model}`, which should be like what the model will see")]
    NoCalibrationText {
        /// Name of the model.
        model: String,
    },

    /// No text was given to evaluate on.
    #[error("no text to judge by, which should be text that the profile has not seen")]
    NoHeldOutText,

    /// Nothing at the paths can be used as text.
    #[error("{}", no_text(paths, skipped))]
    UnusableText {
        /// Paths that were given.
        paths: Vec<PathBuf>,
        /// Why files and records were skipped.
        skipped: Vec<Skipped>,
    },

    /// A path does not exist.
    #[error("`{}` does not exist", path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },

    /// The folder has a profile of another model, which is not replaced: models of the same name share a work folder.
    #[error("`{}` is a profile of another model ({model})", folder.display())]
    OtherModel {
        /// Folder of the profile.
        folder: PathBuf,
        /// The other model.
        model: String,
    },

    /// The user interrupted the work.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),

    /// Text cannot be read.
    #[error(transparent)]
    Corpus(#[from] CorpusError),

    /// A file of the model cannot be read.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),

    /// The tokenizer cannot be read.
    #[error(transparent)]
    Text(#[from] TextError),

    /// This CPU is not supported.
    #[error(transparent)]
    Kernel(#[from] KernelError),

    /// The profile cannot be made.
    #[error(transparent)]
    Profile(#[from] ProfileError),

    /// The predictors cannot be made.
    #[error(transparent)]
    Predictor(#[from] PredictorError),

    /// The plan, the bundle or its certificate cannot be made.
    #[error(transparent)]
    Planner(#[from] PlannerError),
}

impl PipelineError {
    /// The remedy, if it takes a command or an option.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::NoCalibrationText { .. } | Self::NoHeldOutText | Self::UnusableText { .. } => {
                Some(Hint::GiveText)
            }
            Self::Missing { .. } => Some(Hint::GivePath),
            Self::OtherModel { .. } => Some(Hint::OtherFolder),
            Self::Interrupted(_) | Self::Corpus(_) | Self::Text(_) | Self::Kernel(_) => None,
            Self::Artifact(error) => error.hint(),
            Self::Profile(error) => error.hint(),
            Self::Predictor(error) => error.hint(),
            Self::Planner(error) => error.hint(),
        }
    }
}

fn no_text(paths: &[PathBuf], skipped: &[Skipped]) -> String {
    if let [only] = skipped {
        return only.to_string();
    }
    let paths: Vec<String> = paths
        .iter()
        .map(|path| format!("`{}`", path.display()))
        .collect();
    let mut lines = vec![format!("there is no text in {}", paths.join(", "))];
    lines.extend(skipped.iter().take(LISTED).map(ToString::to_string));
    if skipped.len() > LISTED {
        lines.push(format!("and {} more", skipped.len() - LISTED));
    }
    lines.join("\n  ")
}
