//! What can go wrong while measuring.

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
    /// The model cannot be run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The text cannot be tokenised.
    #[error(transparent)]
    Text(#[from] TextError),
}
