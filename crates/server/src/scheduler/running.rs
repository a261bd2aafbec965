//! Requests that run: their prompts, and then their texts.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use powerinfer_runtime::{Piece, Session, Statistics, StopReason, Token, Wanted};

use super::{ACTIVITY_BINS, Activity, Event, Finish, Job, Score};

/// Time between two reports of active neurons to a client.
const ACTIVITY_INTERVAL: Duration = Duration::from_millis(40);

/// A request whose prompt is being run.
pub(super) struct Prompt {
    pub(super) job: Job,
    /// The scheduler's `fallbacks` when its session was started.
    pub(super) fallbacks: usize,
    /// None before its first piece.
    pub(super) session: Option<Session>,
    pub(super) cached: usize,
    pub(super) scores: Vec<Score>,
}

/// A request that is being decoded.
pub(super) struct Decoding {
    pub(super) job: Job,
    /// As in [`Prompt`].
    pub(super) fallbacks: usize,
    /// When the last token was generated.
    pub(super) at: Instant,
    /// When active neurons are to be reported again.
    pub(super) activity_due: Instant,
}

/// Measurements of a pass.
pub(super) struct PassReport {
    /// Requests that were decoded.
    pub(super) batch: usize,
    /// Active neurons by layer and token, if they are observed.
    pub(super) active: Option<Vec<Vec<Vec<u32>>>>,
    pub(super) counts: Statistics,
    pub(super) at: Instant,
}

impl Prompt {
    /// Tokens `range`, which run next; none before the prompt has a session.
    pub(super) fn piece(&mut self, range: Range<usize>) -> Option<Piece<'_, Session>> {
        let wanted = match self.job.settings.prompt_logprobs {
            Some(_) => Wanted::All,
            None if range.end == self.job.prompt.len() => Wanted::Last,
            None => Wanted::None,
        };
        Some(Piece {
            session: self.session.as_mut()?,
            tokens: &self.job.prompt[range],
            wanted,
        })
    }

    /// Tokens that have not been run.
    pub(super) fn tokens_left(&self) -> usize {
        let position = self.session.as_ref().map_or(0, Session::position);
        self.job.prompt.len() - position
    }
}

impl Decoding {
    /// Reports a token, which was sampled from `logits`.
    pub(super) fn report(
        &mut self,
        token: &Token,
        logits: &[f32],
        activity: Option<Activity>,
        vocabulary: usize,
    ) {
        let settings = &self.job.settings;
        let score = settings.top_logprobs;
        let score = score.map(|count| Score::new(token.id, logits, count, vocabulary));
        self.job.events.send(Event::Token {
            id: token.id,
            is_stop: token.is_stop,
            score,
            activity,
        });
    }

    /// The active neurons of token `row` of a pass, if they are to be reported.
    pub(super) fn activity(
        &mut self,
        row: usize,
        pass: &PassReport,
        neurons: usize,
    ) -> Option<Activity> {
        let is_due = self.job.settings.activity && self.activity_due <= pass.at;
        let layers = pass.active.as_ref().filter(|_| is_due)?;
        self.activity_due = pass.at + ACTIVITY_INTERVAL;
        let bins = |tokens: &Vec<Vec<u32>>| bins(&tokens[row], neurons);
        Some(Activity {
            bins: layers.iter().map(bins).collect(),
            computed_share: pass.counts.computed_share(),
            bytes_per_token: pass.counts.bytes_per_token(),
            batch: pass.batch,
        })
    }
}

/// The reason that a client gets for the end of a text.
pub(super) fn finish_of(reason: StopReason) -> Finish {
    match reason {
        StopReason::StopToken => Finish::Stop,
        StopReason::MaxTokens | StopReason::ContextFull | StopReason::Cancelled => Finish::Length,
    }
}

/// Counts the active neurons of each of [`ACTIVITY_BINS`] ranges of `neurons`.
fn bins(active: &[u32], neurons: usize) -> Vec<u32> {
    let mut bins = vec![0; ACTIVITY_BINS.min(neurons)];
    let count = bins.len();
    for neuron in active {
        bins[*neuron as usize * count / neurons] += 1;
    }
    bins
}
