//! A text that is generated: how its tokens are chosen, and when it ends.

use std::{fmt, sync::Arc};

use powerinfer_model::log_sum_exp;

use crate::{RuntimeError, Sampler, Speculation};

/// When generation stops.
#[derive(Debug, Clone)]
pub struct StopConditions {
    /// Tokens to generate, at most.
    pub max_tokens: usize,
    /// Tokens that end the text.
    pub stop_tokens: Arc<[u32]>,
    /// Only ids below this number are sampled; rows of the head beyond the tokenizer's vocabulary are padding.
    pub vocabulary: usize,
}

/// Why generation has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// A stop token was sampled, or the text is complete under its [`Constraint`].
    StopToken,
    /// The requested number of tokens was generated.
    MaxTokens,
    /// The context is full.
    ContextFull,
    /// The caller has cancelled it, or a pass has failed.
    Cancelled,
}

/// Restricts which tokens a text may have, for example to those of a grammar.
pub trait Constraint: Send {
    /// Samples among the permitted tokens.
    ///
    /// # Errors
    ///
    /// The reason why no token is permitted.
    fn sample(&mut self, logits: &[f32], sampler: &mut Sampler) -> Result<u32, String>;

    /// Whether the text is complete and nothing may follow.
    fn is_complete(&self) -> bool;
}

/// State of a text between two passes: its sampler, its stop conditions, and the token that is to be run next.
pub struct Text {
    sampler: Sampler,
    stop: StopConditions,
    constraint: Option<Box<dyn Constraint>>,
    /// Tokens that follow whatever is sampled.
    given: Vec<u32>,
    has_log_probabilities: bool,
    speculation: Option<Speculation>,
    /// The last token, not run yet; none before the first token, or after a stop token or a full context.
    pending: Option<u32>,
    generated: usize,
    reason: Option<StopReason>,
}

/// Logits of the token before the one that is sampled.
#[derive(Debug, Clone, Copy)]
pub enum Logits<'a> {
    /// On the host, `[vocabulary]`.
    Host(&'a [f32]),
    /// On a device, which has found the token with the largest one.
    Largest(u32),
}

/// A generated token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Token {
    /// Index of its text.
    pub text: usize,
    /// The token.
    pub id: u32,
    /// The token that the sampler chose; it differs from `id` only in a given text ([`Text::with_given`]).
    pub sampled: u32,
    /// Whether it is a stop token, which ends the text and is not part of it.
    pub is_stop: bool,
    /// Natural logarithm of the token's probability before sampling settings are applied; none unless asked for.
    pub log_probability: Option<f64>,
}

impl Text {
    /// A text whose tokens `sampler` chooses until one of the `stop` conditions holds.
    pub fn new(sampler: Sampler, stop: StopConditions) -> Self {
        Self {
            sampler,
            stop,
            constraint: None,
            given: Vec::new(),
            has_log_probabilities: false,
            speculation: None,
            pending: None,
            generated: 0,
            reason: None,
        }
    }

    /// Restricts the tokens.
    #[must_use]
    pub fn with_constraint(mut self, constraint: Option<Box<dyn Constraint>>) -> Self {
        self.constraint = constraint;
        self
    }

    /// Continues with the tokens of `given`, regardless of what is sampled: the model decodes a known text as if it had
    /// generated it.
    #[must_use]
    pub fn with_given(mut self, given: Vec<u32>) -> Self {
        self.given = given;
        self
    }

    /// Continues after `token`, which the session does not have yet.
    #[must_use]
    pub fn with_pending(mut self, token: u32) -> Self {
        self.pending = Some(token);
        self
    }

    /// Computes the log probability of every token.
    #[must_use]
    pub fn with_log_probabilities(mut self) -> Self {
        self.has_log_probabilities = true;
        self
    }

    /// Enables speculative decoding: while the text is alone in a pass, proposed tokens are verified together. The text
    /// stays the same.
    pub fn speculate(&mut self, speculation: Speculation) {
        self.speculation = Some(speculation);
    }

    /// The proposals so far.
    pub fn speculation(&self) -> Option<&Speculation> {
        self.speculation.as_ref()
    }

    /// Starts again after `prompt`: no tokens generated, none pending. The sampler keeps its random state and its penalties.
    pub fn begin(&mut self, prompt: &[u32]) {
        prompt
            .iter()
            .for_each(|token| self.sampler.remember(*token));
        (self.pending, self.generated) = (None, 0);
        self.reason = (self.stop.max_tokens == 0).then_some(StopReason::MaxTokens);
    }

    /// Tokens generated so far, a stop token included.
    pub fn generated(&self) -> usize {
        self.generated
    }

    /// The last token, not run yet; none before the first token, or after a stop token or a full context.
    pub fn pending(&self) -> Option<u32> {
        self.pending
    }

    /// Why generation has stopped; none while it continues.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.reason
    }

    /// Stops generation, unless it has stopped already.
    pub fn cancel(&mut self) {
        self.reason.get_or_insert(StopReason::Cancelled);
    }

    /// Removes and returns the pending token.
    pub(crate) fn take_pending(&mut self) -> Option<u32> {
        self.pending.take()
    }

    /// Whether the next pass only has to find the token with the largest logit.
    pub(crate) fn needs_largest_only(&self) -> bool {
        self.sampler.is_greedy() && self.constraint.is_none() && !self.has_log_probabilities
    }

    /// Tokens to sample from.
    pub(crate) fn vocabulary(&self) -> usize {
        self.stop.vocabulary
    }

    /// Tokens that the text proposes after the pending one, at most `room`.
    pub(crate) fn propose(&mut self, room: usize) -> &[u32] {
        let room = room.min((self.stop.max_tokens - self.generated).saturating_sub(1));
        match &mut self.speculation {
            Some(speculation) => speculation.propose(room),
            None => &[],
        }
    }

    pub(crate) fn speculation_mut(&mut self) -> Option<&mut Speculation> {
        self.speculation.as_mut()
    }

    /// Chooses the next token by the `logits` of the last one; the session has `position` tokens and room for `context`.
    ///
    /// # Errors
    ///
    /// The constraint permits no token; the text has stopped.
    pub fn accept(
        &mut self,
        logits: Logits<'_>,
        position: usize,
        context: usize,
    ) -> Result<Token, RuntimeError> {
        let all = match logits {
            Logits::Host(logits) => logits,
            Logits::Largest(_) => &[],
        };
        let known = &all[..self.stop.vocabulary.min(all.len())];
        let sampled = match (&mut self.constraint, logits) {
            (_, Logits::Largest(token)) => {
                self.sampler.remember(token);
                Ok(token)
            }
            (None, _) => Ok(self.sampler.sample(known)),
            (Some(constraint), _) => constraint.sample(known, &mut self.sampler),
        };
        let sampled = sampled.map_err(|reason| {
            self.cancel();
            RuntimeError::NoToken { reason }
        })?;
        let id = self.given.get(self.generated).copied().unwrap_or(sampled);
        if let Some(speculation) = &mut self.speculation {
            speculation.push(id);
        }
        self.generated += 1;
        self.pending = Some(id);
        let is_complete = self
            .constraint
            .as_ref()
            .is_some_and(|constraint| constraint.is_complete());
        let is_stop = self.stop.stop_tokens.contains(&id);
        if is_complete || is_stop {
            (self.pending, self.reason) = (None, Some(StopReason::StopToken));
        } else if position >= context {
            (self.pending, self.reason) = (None, Some(StopReason::ContextFull));
        } else if self.generated >= self.stop.max_tokens {
            self.reason = Some(StopReason::MaxTokens);
        }
        let logit = all.get(id as usize).filter(|_| self.has_log_probabilities);
        Ok(Token {
            text: 0,
            id,
            sampled,
            is_stop,
            log_probability: logit.map(|logit| f64::from(*logit) - log_sum_exp(all)),
        })
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Text")
            .field("pending", &self.pending)
            .field("generated", &self.generated)
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}
