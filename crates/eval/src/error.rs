//! Errors of measurements.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, Hint, progress::Interrupted};
use powerinfer_bundle::BundleError;
use powerinfer_model::ModelError;
use powerinfer_runtime::RuntimeError;
use powerinfer_text::TextError;

/// A measurement that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// A prompt whose tokens are not a prefix of the whole text's, so that its continuation cannot be scored.
    #[error(
        "the tokens of the prompt `{prompt}` are not a prefix of those of the whole text; end the prompt at a token boundary"
    )]
    Boundary {
        /// The prompt.
        prompt: String,
    },
    /// A prompt without tokens, or longer than the context.
    #[error("the prompt has {tokens} tokens, and there is room for 1 to {room}")]
    PromptLength {
        /// Its tokens.
        tokens: usize,
        /// Most tokens.
        room: usize,
    },
    /// Memory for the read bandwidth that cannot be had.
    #[error("cannot allocate memory to measure the read bandwidth: {0}")]
    Probe(std::io::Error),
    /// A data file that cannot be read.
    #[error("cannot read `{path}`: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file that cannot be written.
    #[error("cannot write `{path}`: {source}")]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A line of a data file that is not what it should be.
    #[error("`{path}`, line {line}: {reason}")]
    Data {
        /// The file.
        path: PathBuf,
        /// The line, from 1 on.
        line: usize,
        /// Reason.
        reason: String,
    },
    /// A file of rows that another run has open.
    #[error("cannot write `{path}`: another run has it open")]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// A file with other content than rows of this run.
    #[error("`{path}`, line {line}: {reason}")]
    OtherContent {
        /// The file.
        path: PathBuf,
        /// The line, from 1 on.
        line: usize,
        /// The difference.
        reason: String,
    },
    /// A file of rows that is not merged with the others.
    #[error("cannot merge `{path}`: {reason}")]
    NotMergeable {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// An artifact that cannot be written.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// No sandbox for Python programs.
    #[error("generated functions cannot be judged: {reason}")]
    NoSandbox {
        /// Why not.
        reason: String,
    },
    /// A result that should equal another one before it is timed.
    #[error("the result differs from {expected}: {difference}, so nothing is timed")]
    ResultDiffers {
        /// Expected value.
        expected: &'static str,
        /// Top-1 agreement and largest difference of logits.
        difference: String,
    },
    /// A sequence of a batch whose logits differ from those of the same sequence alone.
    #[error(
        "sequence {sequence} of a batch of {batch} has other logits than alone, so nothing is timed"
    )]
    BatchDiffers {
        /// The sequence, from 0 on.
        sequence: usize,
        /// Sequences in the batch.
        batch: usize,
    },
    /// Logits that are not finite, or too large for probabilities.
    #[error(
        "the model's logits are not finite or too large, so there are no probabilities to compare"
    )]
    NoProbabilities,
    /// A context of a sweep that is too short or too long.
    #[error("a context of {context} tokens is outside {least} to {most}")]
    ContextOutOfRange {
        /// Tokens asked for.
        context: usize,
        /// Fewest tokens: one more than are decoded.
        least: usize,
        /// Most tokens: those that the bundle has room for.
        most: usize,
    },
    /// Two equal points of a sweep's grid.
    #[error(
        "the grid has a point twice, `{setting}` with a batch of {batch} and a context of {context}; leave equal values out"
    )]
    EqualPoints {
        /// The policy setting.
        setting: String,
        /// Sequences that decode together.
        batch: usize,
        /// Tokens of each.
        context: usize,
    },
    /// A figure of a sweep's row that is not finite.
    #[error("a figure of this point is not finite")]
    FigureNotFinite,
    /// The user asked to stop.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// The model cannot be run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The bundle cannot be opened.
    #[error(transparent)]
    Bundle(Box<BundleError>),
    /// The bundle cannot be run.
    #[error(transparent)]
    Runtime(Box<RuntimeError>),
    /// The text cannot be tokenised.
    #[error(transparent)]
    Text(#[from] TextError),
}

impl EvalError {
    /// Remedy that takes a command or a flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::Probe(_) => Some(Hint::SmallerProbe),
            Self::Busy { .. } => Some(Hint::WaitOrOtherFile),
            Self::OtherContent { .. } => Some(Hint::OtherFile),
            Self::NoSandbox { .. } => Some(Hint::InstallPython),
            Self::ContextOutOfRange { .. } => Some(Hint::OtherContext),
            Self::Model(error) => error.hint(),
            Self::Bundle(error) => error.hint(),
            Self::Runtime(error) => error.hint(),
            _ => None,
        }
    }
}

impl From<BundleError> for EvalError {
    fn from(error: BundleError) -> Self {
        Self::Bundle(Box::new(error))
    }
}

impl From<RuntimeError> for EvalError {
    fn from(error: RuntimeError) -> Self {
        Self::Runtime(Box::new(error))
    }
}
