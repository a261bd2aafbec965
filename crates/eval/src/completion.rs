//! Completion of prompts.

use std::time::{Duration, Instant};

use powerinfer_model::LanguageModel;
use powerinfer_runtime::{Generation, OneText, Sampler, StopConditions, Text};
use powerinfer_text::{SpecialText, SpecialTokens, StreamDecoder, Tokenizer};

use crate::EvalError;

/// Generated continuation of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The text.
    pub text: String,
    /// Its tokens, without the one that ended it.
    pub tokens: Vec<u32>,
    /// Decode time, without the prompt's.
    pub decode: Duration,
}

/// Limits of a completion that the model does not end itself.
#[derive(Debug, Clone, Copy)]
pub struct Ends<'a> {
    /// Most tokens generated.
    pub max_tokens: usize,
    /// Most tokens of prompt and completion together.
    pub context: usize,
    /// Texts that end the completion.
    pub texts: &'a [&'a str],
}

/// Continues `prompt` with the tokens that `sampler` chooses, until the text ends; `prompt_done` runs between prefill and
/// decoding.
///
/// # Errors
///
/// Fails with [`EvalError::PromptLength`] if the prompt has no tokens or more than the context, and if the model fails.
pub fn complete<Model: LanguageModel + ?Sized>(
    model: &mut Model,
    tokenizer: &Tokenizer,
    prompt: &str,
    ends: Ends<'_>,
    sampler: Sampler,
    prompt_done: impl FnOnce(&mut Model),
) -> Result<Completion, EvalError> {
    let ids = tokenizer.encode(prompt, SpecialTokens::Add)?;
    if ids.is_empty() || ids.len() > ends.context {
        return Err(EvalError::PromptLength {
            tokens: ids.len(),
            room: ends.context,
        });
    }
    let stop = StopConditions {
        max_tokens: ends.max_tokens.min(ends.context - ids.len()),
        stop_tokens: [tokenizer.stop_ids(), &model.config().end_of_text]
            .concat()
            .into(),
        vocabulary: tokenizer.vocabulary_size(),
    };
    let mut passes = OneText::new(model, ends.context);
    let (mut session, mut generated) = ((), Text::new(sampler, stop));
    let (mut generation, _) =
        Generation::start(&mut passes, &mut session, &mut generated, &ids, || false)?;
    prompt_done(generation.passes().model());
    let started = Instant::now();
    let (mut tokens, mut text) = (Vec::new(), String::new());
    let mut stream = StreamDecoder::after(tokenizer, &ids, SpecialText::Skip)?;
    for token in &mut generation {
        let token = token?;
        if token.is_stop {
            break;
        }
        let token = token.id;
        tokens.push(token);
        if !ends.texts.is_empty()
            && let Some(piece) = stream.push(token)?
        {
            text += &piece;
            if ends.texts.iter().any(|end| text.contains(end)) {
                break;
            }
        }
    }
    let decode = started.elapsed();
    Ok(Completion {
        text: tokenizer.decode_after(&ids, &tokens, SpecialText::Skip)?,
        tokens,
        decode,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use powerinfer_model::{Checkpoint, ModelConfig, ModelError};

    use super::*;
    use crate::fidelity::{Windows, fidelity};

    /// A model that gives one token probability 1 after any text.
    struct Certain {
        config: ModelConfig,
        token: u32,
        position: usize,
    }

    impl LanguageModel for Certain {
        fn config(&self) -> &ModelConfig {
            &self.config
        }

        fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
            self.position += tokens.len();
            let mut row = vec![-1e4; self.config.vocabulary_size];
            row[self.token as usize] = 1e4;
            Ok(row.repeat(tokens.len()))
        }

        fn reset(&mut self) {
            self.position = 0;
        }

        fn position(&self) -> usize {
            self.position
        }
    }

    #[test]
    fn a_model_that_only_ends_generates_nothing() {
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        let tokenizer =
            Tokenizer::from_directory(&goldens.join("tokenizers/tok-sp-legacy")).unwrap();
        let checkpoint = Checkpoint::open(&goldens.join("models/llama-silu")).unwrap();
        let mut config = checkpoint.config().clone();
        config.vocabulary_size = tokenizer.vocabulary_size();
        let mut model = Certain {
            token: tokenizer.eos().unwrap().id,
            config,
            position: 0,
        };
        let ends = Ends {
            max_tokens: 50,
            context: 100,
            texts: &[],
        };
        let prompt = "def f(x):\n";
        let sampler = Sampler::greedy();
        let found = complete(&mut model, &tokenizer, prompt, ends, sampler, |_| ()).unwrap();
        assert_eq!((found.text.as_str(), found.tokens.len()), ("", 0));
        // Compared with another such model, all figures are finite.
        let texts = [tokenizer.encode("a b c d", SpecialTokens::Add).unwrap()];
        let windows = Windows {
            length: 8,
            stride: 4,
        };
        let mut other = Certain {
            token: texts[0][1],
            config: model.config.clone(),
            position: 0,
        };
        let found = fidelity(&mut model, &mut other, &texts, windows, |_| {
            Ok::<_, EvalError>(())
        })
        .unwrap();
        assert_eq!(found.top1_agreement(), 0.0);
        assert!(found.mean_divergence().value > 1e4);
        assert!(found.perplexity_rise().low.is_finite());
    }
}
