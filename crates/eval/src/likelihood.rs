//! Likelihood of a text under a model.

use std::ops::AddAssign;

use powerinfer_model::{LanguageModel, log_sum_exp};
use powerinfer_text::{SpecialTokens, Tokenizer};

use crate::EvalError;

/// Negative log-likelihood of some tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Likelihood {
    /// Σ −ln p, in nats.
    pub negative_log: f64,
    /// Number of tokens.
    pub tokens: u64,
}

impl Likelihood {
    /// Perplexity per token: `exp` of the mean.
    pub fn perplexity(&self) -> f64 {
        (self.negative_log / self.tokens.max(1) as f64).exp()
    }

    /// Perplexity per word of a text with `words` words: comparable between tokenizers.
    pub fn word_perplexity(&self, words: u64) -> f64 {
        (self.negative_log / words.max(1) as f64).exp()
    }

    /// Bits per byte of a text with `bytes` bytes.
    pub fn bits_per_byte(&self, bytes: u64) -> f64 {
        self.negative_log / std::f64::consts::LN_2 / bytes.max(1) as f64
    }
}

impl AddAssign for Likelihood {
    fn add_assign(&mut self, other: Self) {
        self.negative_log += other.negative_log;
        self.tokens += other.tokens;
    }
}

/// Likelihood of `continuation` and of the end-of-text token after it, given `prompt`.
///
/// The sequence begins with the tokenizer's special tokens. The whole text must fit the context.
///
/// # Errors
///
/// Fails with [`EvalError::Boundary`] if the prompt's tokens are not a prefix of the text's, and if the model fails.
pub fn continuation_likelihood<Model: LanguageModel + ?Sized>(
    model: &mut Model,
    tokenizer: &Tokenizer,
    prompt: &str,
    continuation: &str,
) -> Result<Likelihood, EvalError> {
    let given = tokenizer.encode(prompt, SpecialTokens::Add)?;
    let mut ids = tokenizer.encode(&format!("{prompt}{continuation}"), SpecialTokens::Add)?;
    if !ids.starts_with(&given) || given.is_empty() {
        return Err(EvalError::Boundary {
            prompt: prompt.to_owned(),
        });
    }
    ids.extend(tokenizer.eos().map(|end| end.id));
    likelihood_from(model, &ids, given.len())
}

/// Likelihood of `ids[first..]` given the tokens before; `first` is at least 1.
pub(crate) fn likelihood_from<Model: LanguageModel + ?Sized>(
    model: &mut Model,
    ids: &[u32],
    first: usize,
) -> Result<Likelihood, EvalError> {
    model.reset();
    let logits = model.forward(&ids[..ids.len() - 1])?;
    let vocabulary = model.config().vocabulary_size;
    let mut total = Likelihood::default();
    for (row, target) in logits
        .chunks_exact(vocabulary)
        .zip(&ids[1..])
        .skip(first - 1)
    {
        total += Likelihood {
            negative_log: negative_log_probability(row, *target),
            tokens: 1,
        };
    }
    Ok(total)
}

/// `−ln softmax(logits)[target]`, in float64.
pub(crate) fn negative_log_probability(logits: &[f32], target: u32) -> f64 {
    log_sum_exp(logits) - f64::from(logits[target as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_sum_to_one() {
        let logits = [1.0f32, -2.0, 300.0, 299.0];
        let sum: f64 = (0..4)
            .map(|target| (-negative_log_probability(&logits, target)).exp())
            .sum();
        assert!((sum - 1.0).abs() < 1e-12);
    }

    #[test]
    fn perplexity_of_equal_probabilities_is_their_number() {
        let likelihood = Likelihood {
            negative_log: 3.0 * 7f64.ln(),
            tokens: 3,
        };
        assert!((likelihood.perplexity() - 7.0).abs() < 1e-9);
        assert!((likelihood.word_perplexity(1) - 343.0).abs() < 1e-6);
        let bits = 3.0 * 7f64.log2();
        assert!((likelihood.bits_per_byte(6) - bits / 6.0).abs() < 1e-9);
    }
}
