//! Greedy completions.

use std::time::{Duration, Instant};

use powerinfer_model::{LanguageModel, greedy_token};
use powerinfer_text::{SpecialText, SpecialTokens, Tokenizer};

use crate::EvalError;

/// What a model wrote after a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The text.
    pub text: String,
    /// Its tokens, without the one that ended it.
    pub tokens: Vec<u32>,
    /// Time for generating, the prompt's own time not counted.
    pub decode: Duration,
}

/// Continues `prompt` greedily until the text ends, `max_tokens` are there or the context is
/// full; `prompt_done` runs between prompt and generation.
pub fn complete<Model: LanguageModel + ?Sized>(
    model: &mut Model,
    tokenizer: &Tokenizer,
    prompt: &str,
    max_tokens: usize,
    prompt_done: impl FnOnce(&mut Model),
) -> Result<Completion, EvalError> {
    let ids = tokenizer.encode(prompt, SpecialTokens::Add)?;
    let stops = [tokenizer.stop_ids(), &model.config().end_of_text].concat();
    let room = model.config().context_length.saturating_sub(ids.len());
    model.reset();
    let mut logits = model.forward_last(&ids)?;
    prompt_done(model);
    let started = Instant::now();
    let mut tokens = Vec::new();
    while tokens.len() < max_tokens.min(room) {
        let token = greedy_token(&logits);
        if stops.contains(&token) {
            break;
        }
        tokens.push(token);
        logits = model.forward_last(&[token])?;
    }
    let decode = started.elapsed();
    Ok(Completion {
        text: tokenizer.decode(&tokens, SpecialText::Skip)?,
        tokens,
        decode,
    })
}
