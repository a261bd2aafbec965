//! Completions of prompts.

use std::time::{Duration, Instant};

use powerinfer_model::LanguageModel;
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

/// Where a completion ends, if the model does not end it.
#[derive(Debug, Clone, Copy)]
pub struct Ends<'a> {
    /// Tokens that it may have.
    pub max_tokens: usize,
    /// Tokens that prompt and completion have room for together.
    pub context: usize,
    /// Texts behind which nothing counts.
    pub texts: &'a [&'a str],
}

/// Continues `prompt` with the tokens that `choose` takes by their logits, until the text ends; `prompt_done` runs
/// between prompt and generation.
///
/// Fails for a prompt that has no room, or no tokens.
pub fn complete<Model: LanguageModel + ?Sized>(
    model: &mut Model,
    tokenizer: &Tokenizer,
    prompt: &str,
    ends: Ends<'_>,
    mut choose: impl FnMut(&[f32]) -> u32,
    prompt_done: impl FnOnce(&mut Model),
) -> Result<Completion, EvalError> {
    let ids = tokenizer.encode(prompt, SpecialTokens::Add)?;
    if ids.is_empty() || ids.len() > ends.context {
        return Err(EvalError::PromptLength {
            tokens: ids.len(),
            room: ends.context,
        });
    }
    let stops = [tokenizer.stop_ids(), &model.config().end_of_text].concat();
    let room = ends.context - ids.len();
    // Rows of the head beyond the tokenizer's vocabulary are padding and mean nothing.
    let known = tokenizer.vocabulary_size();
    model.reset();
    let mut logits = model.forward_last(&ids)?;
    prompt_done(model);
    let started = Instant::now();
    let (mut tokens, mut text) = (Vec::new(), String::new());
    let mut stream = tokenizer.decode_stream(SpecialText::Skip);
    while tokens.len() < ends.max_tokens.min(room) {
        let token = choose(&logits[..known.min(logits.len())]);
        if stops.contains(&token) {
            break;
        }
        tokens.push(token);
        if !ends.texts.is_empty()
            && let Some(piece) = stream.push(token)?
        {
            text += &piece;
            if ends.texts.iter().any(|end| text.contains(end)) {
                break;
            }
        }
        logits = model.forward_last(&[token])?;
    }
    let decode = started.elapsed();
    Ok(Completion {
        text: tokenizer.decode(&tokens, SpecialText::Skip)?,
        tokens,
        decode,
    })
}
