//! The token loop: run the prompt, then sample and run one token after the other until generation stops.
//!
//! ```text
//! reuse prefix ── run prompt ──▶ sample ── stop token? ── limit? ── cancelled? ──▶ yield token
//!                                   ▲                                                  │
//!                                   └─────── run token, and proposed ones ◀────────────┘
//! ```

use std::time::Instant;

use powerinfer_model::{LanguageModel, ModelError};

use crate::{Runtime, Sampler, Speculation, Stage, runtime::model_error};

/// A model that decodes one sequence, token by token.
pub trait Decoder {
    /// Tokens of the sequence so far.
    fn position(&self) -> usize;

    /// Tokens that fit the context.
    fn context_limit(&self) -> usize;

    /// Keeps the longest common prefix of the sequence with `tokens`, except their last token; returns its length.
    fn keep_prefix_of(&mut self, tokens: &[u32]) -> usize;

    /// Appends `tokens`, at least one, and computes the logits of the last one; `sampler` is what they are for.
    ///
    /// # Errors
    ///
    /// Fails where the tokens are outside the vocabulary or the context is full, and where a device does.
    fn append(&mut self, tokens: &[u32], sampler: &Sampler) -> Result<(), ModelError>;

    /// Most tokens of [`append_all`](Self::append_all); 1 where the logits of several would differ from those of each.
    fn verified_together(&self) -> usize {
        1
    }

    /// As [`append`](Self::append), with the logits of all `tokens`.
    ///
    /// # Errors
    ///
    /// As [`append`](Self::append).
    fn append_all(&mut self, tokens: &[u32], sampler: &Sampler) -> Result<(), ModelError> {
        self.append(tokens, sampler)
    }

    /// Samples a token among the first `vocabulary` ones by the logits of the last call of [`append`](Self::append), or
    /// those of `tokens[index]` of [`append_all`](Self::append_all).
    ///
    /// # Errors
    ///
    /// Fails where a device does.
    fn sample(
        &mut self,
        index: usize,
        sampler: &mut Sampler,
        vocabulary: usize,
    ) -> Result<u32, ModelError>;

    /// Removes all tokens from index `tokens` on.
    fn truncate(&mut self, tokens: usize);
}

impl Decoder for Runtime {
    fn position(&self) -> usize {
        self.position()
    }

    fn context_limit(&self) -> usize {
        self.context_limit()
    }

    fn keep_prefix_of(&mut self, tokens: &[u32]) -> usize {
        self.keep_prefix_of(tokens)
    }

    fn append(&mut self, tokens: &[u32], sampler: &Sampler) -> Result<(), ModelError> {
        self.append(tokens, sampler)
    }

    fn verified_together(&self) -> usize {
        match self.verification() {
            None => self.decode_batch_size(),
            Some(_) => 1,
        }
    }

    fn append_all(&mut self, tokens: &[u32], sampler: &Sampler) -> Result<(), ModelError> {
        match tokens.len() {
            1 => self.append(tokens, sampler),
            _ => self.run_with_logits(tokens),
        }
    }

    fn sample(
        &mut self,
        index: usize,
        sampler: &mut Sampler,
        vocabulary: usize,
    ) -> Result<u32, ModelError> {
        self.sample(index, sampler, vocabulary)
    }

    fn truncate(&mut self, tokens: usize) {
        self.truncate(tokens);
    }
}

impl Runtime {
    /// As [`Decoder::append`]. Logits stay on a device that has the head where the sampler needs only the largest.
    ///
    /// # Errors
    ///
    /// A token is outside the vocabulary, the context is full, or a device fails; the sequence is as before.
    pub fn append(&mut self, tokens: &[u32], sampler: &Sampler) -> Result<(), ModelError> {
        self.undo_on_failure(|model| {
            let last = model.run_to_last(tokens)?;
            if !model.samples_on_device(sampler) {
                return model.head(last).map_err(model_error);
            }
            let hidden = model.hidden()[last].to_vec();
            if let Some(device) = model.executor.device_mut() {
                let launched = device.run_head(&hidden);
                launched.map_err(|error| model_error(error.into()))?;
                model.observers.statistics.device_bytes_read += device.head_bytes_read(1);
                model.logits.clear();
                model.observers.end_stage(Stage::Head);
            }
            Ok(())
        })
    }

    /// As [`Decoder::sample`].
    ///
    /// # Errors
    ///
    /// Fails where a device does.
    pub fn sample(
        &mut self,
        index: usize,
        sampler: &mut Sampler,
        vocabulary: usize,
    ) -> Result<u32, ModelError> {
        if self.logits.is_empty()
            && self.samples_on_device(sampler)
            && let Some(device) = self.executor.device_mut()
        {
            let token = device.largest_logit(vocabulary);
            let token = token.map_err(|error| model_error(error.into()))?;
            sampler.remember(token);
            return Ok(token);
        }
        let size = self.bundle().config().vocabulary_size;
        let logits = &self.logits[index * size..];
        Ok(sampler.sample(&logits[..vocabulary.min(size)]))
    }

    /// Tokens of the current sequence.
    pub fn position(&self) -> usize {
        self.sequence.position()
    }

    /// Logits of the token that was run last, `[vocabulary]`; none where they stayed on a device.
    pub fn last_logits(&self) -> Option<&[f32]> {
        let size = self.bundle().config().vocabulary_size;
        self.logits.rchunks_exact(size).next()
    }

    fn samples_on_device(&self, sampler: &Sampler) -> bool {
        let device = self.executor.device();
        sampler.is_greedy() && device.is_some_and(|device| device.has_head())
    }
}

/// Any model that returns logits, as a [`Decoder`].
#[derive(Debug)]
pub struct HostDecoder<'a, M: ?Sized> {
    model: &'a mut M,
    context_limit: usize,
    logits: Vec<f32>,
}

impl<'a, M: LanguageModel + ?Sized> HostDecoder<'a, M> {
    /// Decodes with `model`, whose sequence may have up to `context_limit` tokens.
    pub fn new(model: &'a mut M, context_limit: usize) -> Self {
        Self {
            model,
            context_limit,
            logits: Vec::new(),
        }
    }

    /// The model.
    pub fn model(&mut self) -> &mut M {
        self.model
    }
}

impl<M: LanguageModel + ?Sized> Decoder for HostDecoder<'_, M> {
    fn position(&self) -> usize {
        self.model.position()
    }

    fn context_limit(&self) -> usize {
        self.context_limit
    }

    fn keep_prefix_of(&mut self, _tokens: &[u32]) -> usize {
        self.model.reset();
        0
    }

    fn append(&mut self, tokens: &[u32], _sampler: &Sampler) -> Result<(), ModelError> {
        self.logits = self.model.forward_last(tokens)?;
        Ok(())
    }

    fn sample(
        &mut self,
        _index: usize,
        sampler: &mut Sampler,
        vocabulary: usize,
    ) -> Result<u32, ModelError> {
        let known = vocabulary.min(self.logits.len());
        Ok(sampler.sample(&self.logits[..known]))
    }

    /// There are no tokens to remove: none are proposed.
    fn truncate(&mut self, _tokens: usize) {}
}

/// When generation stops.
#[derive(Debug, Clone, Copy)]
pub struct StopConditions<'a> {
    /// Tokens to generate, at most.
    pub max_tokens: usize,
    /// Tokens that end the text.
    pub stop_tokens: &'a [u32],
    /// Tokens to sample from, the first of the vocabulary. Rows of the head beyond the tokenizer's vocabulary are
    /// padding.
    pub vocabulary: usize,
}

/// Why generation has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// A stop token was sampled.
    StopToken,
    /// As many tokens were generated as were asked for.
    MaxTokens,
    /// The context is full.
    ContextFull,
    /// The caller has cancelled it.
    Cancelled,
}

/// Generation of one text: an iterator over its tokens, a stop token included.
///
/// Each token but the last has been run when the next one is returned; the decoder's sequence can be continued.
#[derive(Debug)]
pub struct Generation<'a, D: ?Sized, C> {
    decoder: &'a mut D,
    sampler: &'a mut Sampler,
    stop: StopConditions<'a>,
    is_cancelled: C,
    /// The token that was returned last and has not been run, or was run as a proposed one.
    pending: Option<u32>,
    speculation: Option<Speculation>,
    /// Tokens that were proposed and have been run after the last token before them.
    proposed: Vec<u32>,
    /// Number of them that were sampled too.
    accepted: usize,
    generated: usize,
    reason: Option<StopReason>,
}

/// Runs `prompt`, at least one token, with the prefix that the decoder's sequence has in common with it reused, and
/// starts to generate; `is_cancelled` is asked before every token.
///
/// Returns the generation and the number of reused tokens.
///
/// # Errors
///
/// Fails where the prompt does not fit the context, and where the model does.
pub fn generate<'a, D: Decoder + ?Sized, C: FnMut() -> bool>(
    decoder: &'a mut D,
    sampler: &'a mut Sampler,
    prompt: &[u32],
    stop: StopConditions<'a>,
    is_cancelled: C,
) -> Result<(Generation<'a, D, C>, usize), ModelError> {
    let reused = decoder.keep_prefix_of(prompt);
    prompt.iter().for_each(|token| sampler.remember(*token));
    decoder.append(&prompt[reused..], sampler)?;
    let generation = Generation {
        decoder,
        sampler,
        stop,
        is_cancelled,
        pending: None,
        speculation: None,
        proposed: Vec::new(),
        accepted: 0,
        generated: 0,
        reason: None,
    };
    Ok((generation, reused))
}

impl<D: Decoder + ?Sized, C: FnMut() -> bool> Generation<'_, D, C> {
    /// The decoder, between two tokens.
    pub fn decoder(&mut self) -> &mut D {
        self.decoder
    }

    /// Tokens generated so far, a stop token included.
    pub fn generated(&self) -> usize {
        self.generated
    }

    /// Why generation has stopped; none while it goes on.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.reason
    }

    /// Proposes tokens that are verified together; the text stays the same.
    pub fn speculate(&mut self, speculation: Speculation) {
        self.speculation = Some(speculation);
    }

    /// The proposals so far.
    pub fn speculation(&self) -> Option<&Speculation> {
        self.speculation.as_ref()
    }

    /// Runs the last token as well, unless it ended the text, so that the sequence has all of them.
    ///
    /// # Errors
    ///
    /// Fails where the model does.
    pub fn finish(&mut self) -> Result<(), ModelError> {
        self.remove_unconfirmed();
        match self.pending.take() {
            Some(token)
                if self.accepted == 0 && self.decoder.position() < self.decoder.context_limit() =>
            {
                self.decoder.append(&[token], self.sampler)
            }
            _ => Ok(()),
        }
    }

    /// Removes proposed tokens that were not sampled from the decoder's sequence.
    fn remove_unconfirmed(&mut self) {
        let unconfirmed = self.proposed.len() - self.accepted;
        if unconfirmed > 0 {
            let confirmed = self.decoder.position() - unconfirmed;
            self.decoder.truncate(confirmed);
            self.proposed.truncate(self.accepted);
        }
    }

    /// Why generation stops before the next token, if it does.
    fn stops(&mut self) -> Option<StopReason> {
        if let Some(token) = self.pending {
            if self.stop.stop_tokens.contains(&token) {
                // It ends the text, and is not a part of it.
                self.accepted = self.accepted.saturating_sub(1);
                self.pending = None;
                return Some(StopReason::StopToken);
            }
            if self.accepted == 0 && self.decoder.position() >= self.decoder.context_limit() {
                self.pending = None;
                return Some(StopReason::ContextFull);
            }
        }
        if self.generated >= self.stop.max_tokens {
            return Some(StopReason::MaxTokens);
        }
        (self.is_cancelled)().then_some(StopReason::Cancelled)
    }

    /// Runs the last token, and those that are proposed to follow it.
    fn run(&mut self, token: u32) -> Result<(), ModelError> {
        let Some(speculation) = &mut self.speculation else {
            return self.decoder.append(&[token], self.sampler);
        };
        let room = [
            self.decoder.verified_together(),
            self.decoder.context_limit() - self.decoder.position(),
            self.stop.max_tokens - self.generated,
        ];
        let most = room.into_iter().min().unwrap_or_default();
        let proposed = speculation.propose(most.saturating_sub(1));
        let tokens = [&[token], proposed].concat();
        let started = Instant::now();
        self.decoder.append_all(&tokens, self.sampler)?;
        speculation.observe_pass(tokens.len(), started.elapsed());
        self.proposed.extend_from_slice(&tokens[1..]);
        Ok(())
    }

    /// Compares the sampled `token` with the one proposed in its place.
    fn confirm(&mut self, token: u32) {
        let Some(speculation) = &mut self.speculation else {
            return;
        };
        speculation.push(token);
        if self.proposed.get(self.accepted) == Some(&token) {
            self.accepted += 1;
            return;
        }
        if !self.proposed.is_empty() {
            speculation.observe_accepted(self.accepted, self.proposed.len());
        }
        self.remove_unconfirmed();
        self.proposed.clear();
        self.accepted = 0;
    }

    fn step(&mut self) -> Result<Option<u32>, ModelError> {
        if self.reason.is_some() {
            return Ok(None);
        }
        if let Some(reason) = self.stops() {
            self.remove_unconfirmed();
            self.reason = Some(reason);
            return Ok(None);
        }
        if let Some(token) = self.pending.take()
            && self.accepted == 0
        {
            self.run(token)?;
        }
        let (index, vocabulary) = (self.accepted, self.stop.vocabulary);
        let token = self.decoder.sample(index, self.sampler, vocabulary)?;
        self.confirm(token);
        self.generated += 1;
        self.pending = Some(token);
        Ok(Some(token))
    }
}

impl<D: Decoder + ?Sized, C: FnMut() -> bool> Iterator for Generation<'_, D, C> {
    type Item = Result<u32, ModelError>;

    fn next(&mut self) -> Option<Self::Item> {
        let step = self.step();
        if step.is_err() {
            self.reason.get_or_insert(StopReason::Cancelled);
        }
        step.transpose()
    }
}
