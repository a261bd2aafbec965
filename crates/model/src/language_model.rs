//! What a language model is to generation and evaluation, whichever engine runs it.

use crate::{ModelConfig, ModelError};

/// A decoder over one growing sequence.
pub trait LanguageModel {
    /// Sizes and constants.
    fn config(&self) -> &ModelConfig;

    /// Appends `tokens` to the sequence; returns the logits at each of them, `[tokens, vocabulary]`.
    ///
    /// Fails on a token outside the vocabulary and when the context is full; the sequence is
    /// then as before.
    fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError>;

    /// Appends `tokens`; returns the logits at the last of them alone, `[vocabulary]`.
    ///
    /// `tokens` must not be empty.
    fn forward_last(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        let logits = self.forward(tokens)?;
        Ok(logits[logits.len() - self.config().vocabulary_size..].to_vec())
    }

    /// Forgets the sequence.
    fn reset(&mut self);

    /// Tokens in the sequence.
    fn position(&self) -> usize;
}

/// The token of the largest logit; the lowest id among equals.
pub fn greedy_token(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as u32
}
