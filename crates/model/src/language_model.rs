//! Interface of a language model to generation and evaluation, independent of the engine.

use crate::{ModelConfig, ModelError};

/// Decoder with one growing sequence.
pub trait LanguageModel {
    /// Returns the model's configuration.
    fn config(&self) -> &ModelConfig;

    /// Appends `tokens` to the sequence and returns the logits after each of them, `[tokens, vocabulary]`.
    ///
    /// # Errors
    ///
    /// A token is outside the vocabulary, the context is full, or the engine fails; the sequence is then
    /// unchanged.
    fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError>;

    /// Appends `tokens`, which must not be empty, and returns the logits after the last one, `[vocabulary]`.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    fn forward_last(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        let logits = self.forward(tokens)?;
        Ok(logits[logits.len() - self.config().vocabulary_size..].to_vec())
    }

    /// Clears the sequence.
    fn reset(&mut self);

    /// Returns the length of the sequence in tokens.
    fn position(&self) -> usize;
}

/// Refuses logits that are NaN or infinite.
///
/// # Errors
///
/// [`ModelError::LogitsNotFinite`].
pub fn check_finite(logits: &[f32]) -> Result<(), ModelError> {
    // Without an early exit vectors compare them.
    let are_finite = |all, logit: &f32| all & (logit.abs() < f32::INFINITY);
    if logits.iter().fold(true, are_finite) {
        Ok(())
    } else {
        Err(ModelError::LogitsNotFinite)
    }
}

/// Returns the token with the largest logit; the lowest id among equals.
pub fn greedy_token(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as u32
}

/// Returns `ln Σ exp(logits)` in float64: a token's log probability is its logit less this.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits
        .iter()
        .map(|logit| (f64::from(*logit) - largest).exp())
        .sum();
    largest + sum.ln()
}
