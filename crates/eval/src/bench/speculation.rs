//! Time of speculative decoding of given texts, beside that of decoding token by token.
//!
//! Every token is followed by that of the text, whichever the model samples, so any model decodes the text as if it had
//! written it: proposals and their acceptance are those of the text, times and active neurons those of the model.

use std::{collections::BTreeMap, path::Path, time::Instant};

use powerinfer_model::ModelError;
use powerinfer_runtime::{
    Decoder, Runtime, Sampler, SamplingSettings, Speculation, SpeculationCounts, Statistics,
    StopConditions, generate,
};
use powerinfer_text::{SpecialTokens, Tokenizer};
use serde::Serialize;

use super::{Bench, measure::Spread};
use crate::{EvalError, data_file};

/// A prompt and the text that follows it.
#[derive(Debug)]
pub struct Completion {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
}

impl Completion {
    /// Number of tokens after the prompt.
    pub fn token_count(&self) -> usize {
        self.tokens.len()
    }

    /// Reads JSON lines with the fields `prompt` and `completion`.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read or has none, and if a text is empty or has more than `most` tokens.
    pub fn read(path: &Path, tokenizer: &Tokenizer, most: usize) -> Result<Vec<Self>, EvalError> {
        let rows = data_file::read(path)?;
        let read = rows.iter().map(|row| {
            let prompt = row.text("prompt")?;
            let whole = prompt.clone() + &row.text("completion")?;
            let encode = |text: &str| tokenizer.encode(text, SpecialTokens::Add);
            let (mut prompt, mut tokens) = (encode(&prompt)?, encode(&whole)?);
            // A token may span the end of the prompt.
            let common = prompt.iter().zip(&tokens).take_while(|(a, b)| a == b);
            prompt.truncate(common.count());
            match (prompt.is_empty(), tokens.len()) {
                (true, _) => Err(row.wrong("`prompt` has no tokens")),
                (_, count) if count == prompt.len() => Err(row.wrong("`completion` has no tokens")),
                (_, count) if count > most => Err(row.wrong(format!(
                    "prompt and completion have {count} tokens, and the context has room for {most}"
                ))),
                _ => {
                    let tokens = tokens.split_off(prompt.len());
                    Ok(Self { prompt, tokens })
                }
            }
        });
        read.collect()
    }
}

/// Time of completions, token by token and with proposals.
#[derive(Debug, Serialize)]
pub struct SpeculationTimes {
    /// Number of completions.
    pub completions: usize,
    /// Their tokens.
    pub tokens: usize,
    /// Tokens per second, one token after the other.
    pub plain: Spread,
    /// Tokens per second with proposals.
    pub speculative: Spread,
    /// The latter relative to the former, repeat by repeat.
    pub speedup: Spread,
    /// Tokens proposed, of the last repeat.
    pub proposed: u64,
    /// Those that were accepted.
    pub accepted: u64,
    /// Passes with proposals, by their number of tokens, and of one token; of all repeats.
    pub passes: Vec<PassTime>,
}

/// Passes of one length.
#[derive(Debug, Serialize)]
pub struct PassTime {
    /// Tokens of a pass.
    pub tokens: usize,
    /// Number of passes.
    pub passes: usize,
    /// Mean time of a pass.
    pub microseconds: f64,
    /// Share of the FFN neurons that a token computes.
    pub neurons_of_a_token: f64,
    /// Share of the FFN neurons that a pass computes for at least one of its tokens.
    pub neurons_of_any: f64,
}

/// Times every completion token by token and with proposals, in turn, as often as set.
///
/// # Errors
///
/// Fails with [`EvalError::ResultDiffers`] if the model samples other tokens with proposals than without, and if the model
/// fails or the user asks to stop.
pub fn time_speculation(
    bench: &Bench<'_>,
    model: &mut Runtime,
    completions: &[Completion],
) -> Result<SpeculationTimes, EvalError> {
    let tokens: usize = completions.iter().map(Completion::token_count).sum();
    let mut passes = BTreeMap::new();
    let [mut plain, mut speculative] = [Vec::new(), Vec::new()];
    let mut counts = SpeculationCounts::default();
    for _ in 0..bench.repeats {
        let mut seconds = [0.0; 2];
        counts = SpeculationCounts::default();
        for completion in completions {
            let one_by_one = decode(bench, model, completion, None, &mut passes)?;
            let proposals = Some(Speculation::new(&completion.prompt));
            let proposed = decode(bench, model, completion, proposals, &mut passes)?;
            let same = one_by_one.sampled.iter().zip(&proposed.sampled);
            let same = same.filter(|(a, b)| a == b).count();
            if same < completion.tokens.len() {
                return Err(EvalError::ResultDiffers {
                    expected: "decoding token by token",
                    difference: format!("{same} of {} tokens are equal", completion.tokens.len()),
                });
            }
            seconds[0] += one_by_one.seconds;
            seconds[1] += proposed.seconds;
            counts.proposed += proposed.counts.proposed;
            counts.accepted += proposed.counts.accepted;
        }
        plain.push(tokens as f64 / seconds[0]);
        speculative.push(tokens as f64 / seconds[1]);
    }
    let speedup = plain.iter().zip(&speculative).map(|(a, b)| b / a);
    Ok(SpeculationTimes {
        completions: completions.len(),
        tokens,
        speedup: Spread::of(speedup.collect()),
        plain: Spread::of(plain),
        speculative: Spread::of(speculative),
        proposed: counts.proposed,
        accepted: counts.accepted,
        passes: passes.into_iter().map(PassTotal::mean).collect(),
    })
}

/// Sums over passes of one length.
#[derive(Default)]
struct PassTotal {
    passes: usize,
    seconds: f64,
    statistics: Statistics,
}

impl PassTotal {
    fn mean((tokens, total): (usize, Self)) -> PassTime {
        PassTime {
            tokens,
            passes: total.passes,
            microseconds: total.seconds / total.passes as f64 * 1e6,
            neurons_of_a_token: total.statistics.computed_share(),
            neurons_of_any: total.statistics.union_share(),
        }
    }
}

/// A completion that was decoded.
struct Decoded {
    /// Time after the prompt.
    seconds: f64,
    /// What the model sampled in the place of each token.
    sampled: Vec<u32>,
    counts: SpeculationCounts,
}

fn decode(
    bench: &Bench<'_>,
    model: &mut Runtime,
    completion: &Completion,
    speculation: Option<Speculation>,
    passes: &mut BTreeMap<usize, PassTotal>,
) -> Result<Decoded, EvalError> {
    let mut sampler = Sampler::new(SamplingSettings::default())?;
    let stop = StopConditions {
        max_tokens: completion.tokens.len(),
        stop_tokens: &[],
        vocabulary: usize::MAX,
    };
    let mut given = GivenText {
        model,
        text: &completion.tokens,
        sampled: Vec::new(),
        passes,
    };
    let (mut generation, _) =
        generate(&mut given, &mut sampler, &completion.prompt, stop, || false)?;
    if let Some(speculation) = speculation {
        generation.speculate(speculation);
    }
    let mut seconds = 0.0;
    loop {
        bench.progress.advance(0)?;
        let started = Instant::now();
        let token = generation.next();
        seconds += started.elapsed().as_secs_f64();
        match token {
            Some(token) => token?,
            None => break,
        };
        bench.progress.advance(1)?;
    }
    let counts = generation.speculation().map(Speculation::counts);
    Ok(Decoded {
        seconds,
        counts: counts.unwrap_or_default(),
        sampled: given.sampled,
    })
}

/// A model that goes on with a text, whatever it samples.
struct GivenText<'a> {
    model: &'a mut Runtime,
    text: &'a [u32],
    sampled: Vec<u32>,
    passes: &'a mut BTreeMap<usize, PassTotal>,
}

impl GivenText<'_> {
    /// Runs a pass of `tokens`, which counts after the prompt.
    fn run(
        &mut self,
        tokens: &[u32],
        pass: impl FnOnce(&mut Runtime) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        self.model.take_statistics();
        let started = Instant::now();
        pass(self.model)?;
        if !self.sampled.is_empty() {
            let total = self.passes.entry(tokens.len()).or_default();
            total.seconds += started.elapsed().as_secs_f64();
            total.statistics += self.model.take_statistics();
            total.passes += 1;
        }
        Ok(())
    }
}

impl Decoder for GivenText<'_> {
    fn position(&self) -> usize {
        self.model.position()
    }

    fn context_limit(&self) -> usize {
        self.model.context_limit()
    }

    fn keep_prefix_of(&mut self, tokens: &[u32]) -> usize {
        self.model.keep_prefix_of(tokens)
    }

    fn append(&mut self, tokens: &[u32], sampler: &Sampler) -> Result<(), ModelError> {
        self.run(tokens, |model| model.append(tokens, sampler))
    }

    fn verified_together(&self) -> usize {
        Decoder::verified_together(&*self.model)
    }

    fn append_all(&mut self, tokens: &[u32], sampler: &Sampler) -> Result<(), ModelError> {
        self.run(tokens, |model| model.append_all(tokens, sampler))
    }

    fn sample(
        &mut self,
        index: usize,
        sampler: &mut Sampler,
        vocabulary: usize,
    ) -> Result<u32, ModelError> {
        let token = self.model.sample(index, sampler, vocabulary)?;
        self.sampled.push(token);
        Ok(self.text[self.sampled.len() - 1])
    }

    fn truncate(&mut self, tokens: usize) {
        self.model.truncate(tokens);
    }
}
