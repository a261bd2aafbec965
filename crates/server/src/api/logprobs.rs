//! Log probabilities in both shapes of OpenAI's API.

use powerinfer_text::Tokenizer;
use serde_json::{Map, Value, json};

use crate::{choice::TokenScore, scheduler::Score};

/// Lists of the legacy shape, one entry per token.
#[derive(Debug, Default)]
pub(crate) struct LegacyLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f64>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
}

impl LegacyLogprobs {
    /// Adds a prompt whose tokens begin at `offsets`; its first token has no probability.
    pub(crate) fn push_prompt(
        &mut self,
        tokenizer: &Tokenizer,
        ids: &[u32],
        offsets: &[usize],
        scores: &[Score],
    ) {
        let scores = std::iter::once(None).chain(scores.iter().map(Some));
        for ((id, offset), score) in ids.iter().zip(offsets).zip(scores) {
            self.push(tokenizer, *id, *offset, score);
        }
    }

    /// Adds generated tokens of a text that begins at `start`, in characters.
    pub(crate) fn push_generated(
        &mut self,
        tokenizer: &Tokenizer,
        start: usize,
        scores: &[TokenScore],
    ) {
        for token in scores {
            let score = &token.score;
            self.push(tokenizer, score.id, start + token.offset, Some(score));
        }
    }

    fn push(&mut self, tokenizer: &Tokenizer, id: u32, offset: usize, score: Option<&Score>) {
        self.tokens.push(token_text(tokenizer, id));
        self.text_offset.push(offset);
        self.token_logprobs
            .push(score.map(|score| finite(score.logprob)));
        self.top_logprobs.push(score.map(|score| {
            let mut top = Map::new();
            let own = [(score.id, score.logprob)];
            // The largest first; of tokens with the same text the one with the larger probability counts.
            for (id, logprob) in score.top.iter().chain(&own) {
                top.entry(token_text(tokenizer, *id))
                    .or_insert_with(|| json!(finite(*logprob)));
            }
            top
        }));
    }

    /// The lists, as JSON.
    pub(crate) fn into_json(self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        })
    }
}

/// The shape of chat completions: an entry per token, stop tokens left out.
pub(crate) fn chat_logprobs(tokenizer: &Tokenizer, scores: &[TokenScore]) -> Value {
    let entry = |id: u32, logprob: f64| {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        json!({ "token": String::from_utf8_lossy(&bytes), "logprob": finite(logprob), "bytes": bytes })
    };
    let tokens = scores.iter().filter(|token| !token.is_stop);
    let content: Vec<Value> = tokens
        .map(|TokenScore { score, .. }| {
            let mut own = entry(score.id, score.logprob);
            let top = score.top.iter().map(|(id, logprob)| entry(*id, *logprob));
            own["top_logprobs"] = top.collect();
            own
        })
        .collect();
    json!({ "content": content, "refusal": null })
}

/// The text of a token; one that is not valid UTF-8 is written as its bytes, as OpenAI does.
fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    String::from_utf8(bytes).unwrap_or_else(|error| {
        let bytes = error.into_bytes();
        let hex = bytes.iter().map(|byte| format!("\\x{byte:02x}"));
        format!("bytes:{}", hex.collect::<String>())
    })
}

/// A probability of 0 as OpenAI writes it, since JSON has no infinity.
fn finite(logprob: f64) -> f64 {
    logprob.max(-9999.0)
}
