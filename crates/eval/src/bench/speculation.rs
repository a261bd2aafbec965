//! Time of speculative decoding of given texts, compared with decoding token by token.
//!
//! Every token is followed by that of the text, whichever the model samples, so any model decodes the text as if it had
//! written it: proposals and their acceptance are those of the text, times and active neurons those of the model.

use std::{collections::BTreeMap, path::Path, time::Instant};

use powerinfer_runtime::{
    Generation, Sampler, SingleSession, Speculation, SpeculationCounts, Statistics, StopConditions,
    Text,
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
    /// Accepted tokens.
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
    model: &mut SingleSession,
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
        speedup: Spread::from_repeats(speedup.collect()),
        plain: Spread::from_repeats(plain),
        speculative: Spread::from_repeats(speculative),
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
    /// The token that the model sampled in the place of each given one.
    sampled: Vec<u32>,
    counts: SpeculationCounts,
}

fn decode(
    bench: &Bench<'_>,
    model: &mut SingleSession,
    completion: &Completion,
    speculation: Option<Speculation>,
    passes: &mut BTreeMap<usize, PassTotal>,
) -> Result<Decoded, EvalError> {
    let stop = StopConditions {
        max_tokens: completion.tokens.len(),
        stop_tokens: [].into(),
        vocabulary: usize::MAX,
    };
    let mut text = Text::new(Sampler::greedy(), stop).with_given(completion.tokens.clone());
    if let Some(speculation) = speculation {
        text.speculate(speculation);
    }
    let SingleSession { engine, session } = model;
    let prompt = &completion.prompt;
    let (mut generation, _) = Generation::start(engine, session, &mut text, prompt, || false)?;
    generation.passes().observers_mut().take_statistics();
    let (mut seconds, mut sampled) = (0.0, Vec::new());
    loop {
        bench.progress.advance(0)?;
        let started = Instant::now();
        let token = generation.next();
        let elapsed = started.elapsed().as_secs_f64();
        let Some(token) = token else {
            break;
        };
        seconds += elapsed;
        sampled.push(token?.sampled);
        let statistics = generation.passes().observers_mut().take_statistics();
        // Accepted tokens and the first one need no pass.
        if statistics.tokens > 0 {
            let total = passes.entry(statistics.tokens as usize).or_default();
            total.seconds += elapsed;
            total.statistics += statistics;
            total.passes += 1;
        }
        bench.progress.advance(1)?;
    }
    let counts = text.speculation().map(Speculation::counts);
    Ok(Decoded {
        seconds,
        counts: counts.unwrap_or_default(),
        sampled,
    })
}
