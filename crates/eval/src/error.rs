//! What can go wrong while measuring.

use std::path::PathBuf;

use powerinfer_artifact::Hint;
use powerinfer_model::ModelError;
use powerinfer_text::TextError;

/// A measurement that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// A prompt whose tokens are no prefix of the whole text's tokens: what follows it cannot be
    /// scored token by token.
    #[error(
        "the tokens of the prompt `{prompt}` are not a prefix of those of the whole text; end the prompt at a token boundary"
    )]
    Boundary {
        /// The prompt.
        prompt: String,
    },
    /// A prompt that has no tokens, or no room.
    #[error("the prompt has {tokens} tokens, and there is room for 1 to {room}")]
    PromptLength {
        /// Its tokens.
        tokens: usize,
        /// Tokens there is room for.
        room: usize,
    },
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
        /// What is wrong.
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
    /// No sandbox for a Python interpreter.
    #[error("`{python}` is not run: {reason}")]
    NoSandbox {
        /// The program.
        python: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The model cannot be run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The text cannot be tokenised.
    #[error(transparent)]
    Text(#[from] TextError),
}

impl EvalError {
    /// Remedy that takes a command or a flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::Busy { .. } => Some(Hint::WaitOrOtherFile),
            Self::OtherContent { .. } => Some(Hint::OtherFile),
            Self::NoSandbox { .. } => Some(Hint::EmbeddedPython),
            Self::Model(error) => error.hint(),
            _ => None,
        }
    }
}
