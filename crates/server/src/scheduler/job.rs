//! Jobs of the engine, and its reports.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use powerinfer_model::log_sum_exp;
use powerinfer_runtime::{RuntimeError, Sampler, SamplingSettings};
use tokio::sync::mpsc::UnboundedSender;

use crate::constraint::Grammar;

/// A text to generate.
pub(crate) struct Job {
    /// At least one token.
    pub(crate) prompt: Arc<[u32]>,
    /// Seed of the text's samples.
    pub(crate) seed: u64,
    pub(crate) settings: Arc<JobSettings>,
    /// Receives the text's events.
    pub(crate) events: Events,
    /// When the request arrived.
    pub(crate) arrived: Instant,
}

/// Settings that all texts of a request share.
pub(crate) struct JobSettings {
    /// How tokens are sampled, except for the seed.
    pub(crate) sampling: SamplingSettings,
    /// Tokens to generate, at most.
    pub(crate) max_tokens: usize,
    /// Whether stop tokens are treated like other tokens.
    pub(crate) ignores_stop_tokens: bool,
    /// Scores each generated token, with this many of the largest log probabilities.
    pub(crate) top_logprobs: Option<usize>,
    /// Scores each token of the prompt, with this many of the largest log probabilities.
    pub(crate) prompt_logprobs: Option<usize>,
    /// Reports active neurons.
    pub(crate) activity: bool,
    /// Constraint of the text.
    pub(crate) grammar: Option<Grammar>,
}

impl Job {
    /// The sampler of the text, made when it begins.
    ///
    /// # Errors
    ///
    /// A setting is out of range.
    pub(crate) fn sampler(&self) -> Result<Sampler, RuntimeError> {
        Sampler::new(SamplingSettings {
            seed: self.seed,
            ..self.settings.sampling.clone()
        })
    }
}

/// The events of one choice of a request, sent in batches: each batch wakes a thread that competes with the model's.
#[derive(Debug)]
pub(crate) struct Events {
    choice: usize,
    sender: UnboundedSender<(usize, Vec<Event>)>,
    cancel: Cancel,
    pending: Vec<Event>,
    /// Shortest time between two batches of tokens.
    interval: Duration,
    /// When tokens were sent last.
    sent: Option<Instant>,
}

/// Cancels one choice of a request. Dropping the receiver cancels all of them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Cancels the choice.
    pub(crate) fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Events {
    /// Events of `choice`, sent to `sender` until `cancel`.
    pub(crate) fn new(
        choice: usize,
        sender: UnboundedSender<(usize, Vec<Event>)>,
        cancel: Cancel,
        interval: Duration,
    ) -> Self {
        Self {
            choice,
            sender,
            cancel,
            pending: Vec::new(),
            interval,
            sent: None,
        }
    }

    /// Sends `event`, perhaps with later ones; nothing happens if the client has gone.
    pub(crate) fn send(&mut self, event: Event) {
        let is_due = match event {
            // It is sent with the first token, or with the end of the text.
            Event::Prompt { .. } => false,
            Event::Token { .. } => self.sent.is_none_or(|sent| sent.elapsed() >= self.interval),
            Event::Done { .. } | Event::Refused(_) | Event::Failed(_) => true,
        };
        self.pending.push(event);
        if is_due {
            self.flush();
        }
    }

    /// Sends what has not been sent.
    pub(crate) fn flush(&mut self) {
        if !self.pending.is_empty() {
            self.sent = Some(Instant::now());
            let events = std::mem::take(&mut self.pending);
            let _ = self.sender.send((self.choice, events));
        }
    }

    /// Whether the client has gone or the choice is cancelled.
    pub(crate) fn is_closed(&self) -> bool {
        self.cancel.0.load(Ordering::Relaxed) || self.sender.is_closed()
    }
}

/// Progress of a job.
#[derive(Debug)]
pub(crate) enum Event {
    /// The prompt has been run.
    Prompt {
        /// Tokens whose keys and values were reused.
        cached: usize,
        /// Scores of the tokens after the first, if they are asked for.
        scores: Vec<Score>,
        at: Instant,
    },
    /// A token was generated.
    Token {
        id: u32,
        /// Whether it ends the text and is not part of it.
        is_stop: bool,
        score: Option<Score>,
        activity: Option<Activity>,
    },
    /// The text has ended.
    Done { finish: Finish, at: Instant },
    /// The schema permits no further token, or exceeds the library's limits.
    Refused(String),
    /// The engine has failed.
    Failed(String),
}

/// Why a text has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finish {
    /// A stop token, a stop string, or the end of what a constraint permits.
    Stop,
    /// The requested number of tokens, or the end of the context.
    Length,
}

/// Log probability of a token, and the largest ones at its position.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Score {
    pub(crate) id: u32,
    pub(crate) logprob: f64,
    /// In descending order.
    pub(crate) top: Vec<(u32, f64)>,
}

impl Score {
    /// The score of `id` from `logits`, with the `count` largest of the first `vocabulary` tokens.
    pub(crate) fn new(id: u32, logits: &[f32], count: usize, vocabulary: usize) -> Self {
        let normaliser = log_sum_exp(logits);
        let logprob = |logit: f32| f64::from(logit) - normaliser;
        let mut ids: Vec<u32> = (0..vocabulary.min(logits.len()) as u32).collect();
        let falling = |a: &u32, b: &u32| {
            let [a_logit, b_logit] = [a, b].map(|id| logits[*id as usize]);
            b_logit.total_cmp(&a_logit).then(a.cmp(b))
        };
        if count < ids.len() {
            ids.select_nth_unstable_by(count, falling);
            ids.truncate(count);
        }
        ids.sort_unstable_by(falling);
        Self {
            id,
            logprob: logits
                .get(id as usize)
                .map_or(f64::NEG_INFINITY, |logit| logprob(*logit)),
            top: ids
                .into_iter()
                .map(|id| (id, logprob(logits[id as usize])))
                .collect(),
        }
    }
}

/// Active neurons of a token.
#[derive(Debug, Clone)]
pub(crate) struct Activity {
    /// Per layer, active neurons in [`ACTIVITY_BINS`] equal ranges of the layer's neurons, most frequently active
    /// first.
    pub(crate) bins: Vec<Vec<u32>>,
    /// Share of the neurons that the last pass computed.
    pub(crate) computed_share: f64,
    /// Bytes that it read per token.
    pub(crate) bytes_per_token: f64,
    /// Sequences that it decoded.
    pub(crate) batch: usize,
}

/// Ranges of a layer's neurons in an [`Activity`].
pub(crate) const ACTIVITY_BINS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_log_probabilities_with_the_largest_first() {
        let score = Score::new(3, &[0.0, 2f32.ln(), 4f32.ln(), 0.0, 9.0], 2, 4);
        let total = (8.0 + 9f64.exp()).ln();
        let ids: Vec<u32> = score.top.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [2, 1], "of the vocabulary, not of the padding");
        assert!((score.logprob + total).abs() < 1e-6);
        assert!((score.top[0].1 - (4f64.ln() - total)).abs() < 1e-6);
        assert_eq!(Score::new(0, &[1.0], 5, 1).top.len(), 1);
    }
}
