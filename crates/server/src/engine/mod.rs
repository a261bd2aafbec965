//! Continuous batching: one thread runs the model for all requests.
//!
//! ```text
//! requests ─▶ queue ─▶ prompts: a piece of one of them a pass ─▶ decoding: one token of each a pass ─▶ done
//!                       ▲                                                                              │
//!                       └───────── idle sequences, whose prefixes are reused ◀─────────────────────────┘
//! ```
//!
//! A token's logits depend neither on the other tokens of a pass nor on how a prompt is split, so each request gets the
//! tokens that it would get alone.

mod job;
mod sequences;

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, Sender, TryRecvError, channel},
    },
    time::{Duration, Instant},
};

use powerinfer_model::LanguageModel;
use powerinfer_runtime::{
    PromptLogits, Runtime, RuntimeError, Sampler, Sequence, Speculation, Statistics,
};

pub(crate) use self::job::{
    ACTIVITY_BINS, Activity, Cancel, Event, Events, Finish, Job, JobSettings, Score,
};
use self::sequences::SequencePool;
use crate::{
    capacity::Capacity,
    constraint::{Constraint, Grammar},
    metrics::Metrics,
};

/// Tokens of a prefix that another prompt is about to run and that a prompt waits for.
const WORTH_WAITING: usize = 32;

/// Time between two reports of active neurons to a client.
const ACTIVITY_INTERVAL: Duration = Duration::from_millis(40);

/// What the engine may use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EngineSettings {
    /// Requests that run at the same time, and sequences.
    pub(crate) capacity: Capacity,
    /// Requests that may wait.
    pub(crate) queue: usize,
    /// Tokens of a sequence, at most.
    pub(crate) context: usize,
    /// Whether the text of a request that runs alone proposes tokens, where they can be verified together.
    pub(crate) speculates: bool,
}

/// Sends jobs to the engine.
#[derive(Clone)]
pub(crate) struct EngineHandle {
    jobs: Sender<Job>,
    queued: Arc<AtomicUsize>,
    limit: usize,
}

impl EngineHandle {
    /// Sends the jobs of one request; returns whether there is room in the queue.
    pub(crate) fn submit(&self, jobs: Vec<Job>) -> bool {
        // A request whose choices exceed the queue is accepted where none waits.
        if self.queued.load(Ordering::Relaxed) >= self.limit {
            return false;
        }
        self.queued.fetch_add(jobs.len(), Ordering::Relaxed);
        for job in jobs {
            // An engine that has stopped closes the events of the job that it drops.
            let _ = self.jobs.send(job);
        }
        true
    }

    /// Requests that wait.
    pub(crate) fn queued(&self) -> usize {
        self.queued.load(Ordering::Relaxed)
    }
}

/// The model and the requests that it runs.
pub(crate) struct Engine {
    model: Runtime,
    settings: EngineSettings,
    stop_tokens: Vec<u32>,
    /// Tokens that are sampled from, the first of the vocabulary.
    vocabulary: usize,
    jobs: Receiver<Job>,
    queued: Arc<AtomicUsize>,
    metrics: Arc<Metrics>,
    queue: VecDeque<Job>,
    /// The oldest first.
    prompts: Vec<Prompt>,
    /// Whether the next piece is one of the shortest prompt.
    is_turn_of_shortest: bool,
    decoding: Vec<Decoding>,
    /// The sequences of `decoding`.
    sequences: Vec<Sequence>,
    idle: SequencePool,
    /// Number of layers that verification has changed to another policy: earlier prefixes are not reused.
    fallbacks: usize,
}

/// A request whose prompt is being run.
struct Prompt {
    job: Job,
    /// The engine's `fallbacks` when its sequence was started.
    fallbacks: usize,
    /// None before its first piece.
    sequence: Option<Sequence>,
    cached: usize,
    scores: Vec<Score>,
}

/// A request that is being decoded.
struct Decoding {
    job: Job,
    /// As in [`Prompt`].
    fallbacks: usize,
    sampler: Sampler,
    constraint: Option<Constraint>,
    /// The last token, which has not been run.
    pending: u32,
    generated: usize,
    /// When it was generated.
    at: Instant,
    /// When active neurons are to be reported again.
    activity_due: Instant,
    speculation: Option<Speculation>,
}

/// Results of a pass.
struct Decoded<'a> {
    /// Requests that were decoded.
    batch: usize,
    /// `[tokens, vocabulary]`.
    logits: &'a [f32],
    /// Active neurons by layer and token, where they are observed.
    active: Option<&'a [Vec<Vec<u32>>]>,
    counts: &'a Statistics,
    at: Instant,
}

impl Prompt {
    /// Tokens that have not been run.
    fn tokens_left(&self) -> usize {
        let position = self.sequence.as_ref().map_or(0, Sequence::position);
        self.job.prompt.len() - position
    }
}

impl Engine {
    /// An engine for `model`, and what sends jobs to it; it stops when the last sender is gone and all jobs are done.
    pub(crate) fn new(
        mut model: Runtime,
        settings: EngineSettings,
        stop_tokens: Vec<u32>,
        vocabulary: usize,
        metrics: Arc<Metrics>,
    ) -> (Self, EngineHandle) {
        let (sender, jobs) = channel();
        let queued = Arc::new(AtomicUsize::new(0));
        let handle = EngineHandle {
            jobs: sender,
            queued: Arc::clone(&queued),
            limit: settings.queue,
        };
        let first = model.replace_sequence(Sequence::default());
        let engine = Self {
            idle: SequencePool::new(first, settings.capacity.sequences, settings.context),
            model,
            settings,
            stop_tokens,
            vocabulary,
            jobs,
            queued,
            metrics,
            queue: VecDeque::new(),
            prompts: Vec::new(),
            is_turn_of_shortest: false,
            decoding: Vec::new(),
            sequences: Vec::new(),
            fallbacks: 0,
        };
        (engine, handle)
    }

    /// Runs jobs until all senders are gone.
    pub(crate) fn run(mut self) {
        while self.receive() {
            self.drop_cancelled();
            self.admit();
            self.step();
            self.count();
            self.forget_prefixes_of_other_policies();
        }
    }

    /// Empties idle sequences after a layer fell back to another policy.
    fn forget_prefixes_of_other_policies(&mut self) {
        let found = self.model.verification();
        let fallbacks = found.map_or(0, |found| found.alarms().len());
        if fallbacks != self.fallbacks {
            self.fallbacks = fallbacks;
            self.idle.forget();
        }
    }

    /// Makes a request's sequence idle. The sequence is emptied if layers fell back after it started with this number of
    /// `fallbacks`.
    fn put_idle(&mut self, mut sequence: Sequence, fallbacks: usize) {
        if fallbacks != self.fallbacks {
            sequence.truncate(0);
        }
        self.idle.put(sequence);
    }

    /// Receives jobs, and waits for one where there is nothing to do; returns whether there is something to do.
    fn receive(&mut self) -> bool {
        let is_idle = |engine: &Self| {
            engine.queue.is_empty() && engine.prompts.is_empty() && engine.decoding.is_empty()
        };
        if is_idle(self) {
            match self.jobs.recv() {
                Ok(job) => self.queue.push_back(job),
                Err(_) => return false,
            }
        }
        loop {
            match self.jobs.try_recv() {
                Ok(job) => self.queue.push_back(job),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return !is_idle(self),
            }
        }
    }

    /// Forgets the requests whose clients have gone.
    fn drop_cancelled(&mut self) {
        let queued = self.queue.len();
        self.queue.retain(|job| !job.events.is_closed());
        let gone = queued - self.queue.len();
        self.queued.fetch_sub(gone, Ordering::Relaxed);
        self.metrics.cancelled.inc_by(gone as u64);
        for index in (0..self.prompts.len()).rev() {
            if self.prompts[index].job.events.is_closed() {
                let prompt = self.prompts.remove(index);
                if let Some(sequence) = prompt.sequence {
                    self.put_idle(sequence, prompt.fallbacks);
                }
                self.metrics.cancelled.inc();
            }
        }
        for index in (0..self.decoding.len()).rev() {
            if self.decoding[index].job.events.is_closed() {
                self.remove(index);
                self.metrics.cancelled.inc();
            }
        }
    }

    /// Starts requests that wait, while there is room.
    fn admit(&mut self) {
        while self.prompts.len() + self.decoding.len() < self.settings.capacity.parallel
            && let Some(job) = self.queue.pop_front()
        {
            self.queued.fetch_sub(1, Ordering::Relaxed);
            self.prompts.push(Prompt {
                job,
                fallbacks: self.fallbacks,
                sequence: None,
                cached: 0,
                scores: Vec::new(),
            });
        }
    }

    /// Runs a piece of a prompt together with one token of each request that is decoded.
    fn step(&mut self) {
        let prompt = self.next_prompt();
        if prompt.is_some() && self.model.verification().is_some() {
            // Verification is of passes of decoded tokens alone.
            self.pass(prompt, 0);
            return self.pass(None, self.decoding.len());
        }
        self.pass(prompt, self.decoding.len());
    }

    /// Takes the oldest prompt, or in turn the one with the fewest tokens left: a short prompt does not wait for long
    /// ones, and a long one is not overtaken for ever. Returns its index, too.
    fn next_prompt(&mut self) -> Option<(usize, Prompt)> {
        let mut ready = (0..self.prompts.len()).filter(|index| !self.waits_for_prefix(*index));
        let next = match self.is_turn_of_shortest {
            true => ready.min_by_key(|index| self.prompts[*index].tokens_left()),
            false => ready.next(),
        };
        let index = next?;
        self.is_turn_of_shortest = !self.is_turn_of_shortest;
        Some((index, self.prompts.remove(index)))
    }

    /// Whether another prompt is running a prefix that prompt `index`, which has not begun, can start from.
    fn waits_for_prefix(&self, index: usize) -> bool {
        let waiting = &self.prompts[index];
        if waiting.sequence.is_some() || waiting.job.settings.prompt_logprobs.is_some() {
            return false;
        }
        let prompt = &waiting.job.prompt;
        self.prompts.iter().any(|other| {
            let Some(sequence) = &other.sequence else {
                return false;
            };
            if other.fallbacks != self.fallbacks {
                return false;
            }
            let both = other.job.prompt.iter().zip(&**prompt);
            let shared = both.take_while(|(a, b)| a == b).count();
            shared >= sequence.position() + WORTH_WAITING
        })
    }

    /// Gives `prompt` a sequence if it has none: the one with the longest prefix of it.
    fn start_prompt(&mut self, prompt: &mut Prompt) -> Result<(), RuntimeError> {
        if prompt.sequence.is_some() {
            return Ok(());
        }
        let tokens = &prompt.job.prompt;
        // Logits of all tokens are those of a prompt that is run in whole.
        let reusable = match prompt.job.settings.prompt_logprobs {
            Some(_) => 0,
            None => tokens.len() - 1,
        };
        let now = self.fallbacks;
        let running = self.prompts.iter().filter(|prompt| prompt.fallbacks == now);
        let running = running.filter_map(|prompt| prompt.sequence.as_ref());
        let decoding = self.decoding.iter().zip(&self.sequences);
        let decoding = decoding.filter(|(decoding, _)| decoding.fallbacks == now);
        let busy: Vec<&Sequence> = running.chain(decoding.map(|(_, found)| found)).collect();
        let (sequence, cached) = self.idle.take(&self.model, tokens, reusable, &busy)?;
        (prompt.cached, prompt.fallbacks) = (cached, now);
        prompt.sequence = Some(sequence);
        Ok(())
    }

    /// Runs a piece of `prompt`, which was at the given index, together with the first `decoded` requests.
    fn pass(&mut self, prompt: Option<(usize, Prompt)>, decoded: usize) {
        let mut tokens: Vec<u32> = self.decoding[..decoded]
            .iter()
            .map(|decoding| decoding.pending)
            .collect();
        let mut piece = None;
        if let Some((index, mut prompt)) = prompt {
            let started = self.start_prompt(&mut prompt);
            match (started, prompt.sequence.take()) {
                (Ok(()), Some(sequence)) => {
                    let start = sequence.position();
                    let room = self.model.prompt_batch().saturating_sub(decoded).max(1);
                    let end = prompt.job.prompt.len().min(start + room);
                    tokens.extend(&prompt.job.prompt[start..end]);
                    self.sequences.push(sequence);
                    piece = Some((index, prompt, start..end));
                }
                (result, _) => {
                    let message = result.err().map(|error| error.to_string());
                    self.fail(prompt, message.unwrap_or_default());
                }
            }
        }
        if tokens.is_empty() {
            return;
        }
        let proposed = match &piece {
            None if decoded == 1 => self.propose(),
            _ => Vec::new(),
        };
        tokens.extend(&proposed);
        let now = Instant::now();
        let is_due =
            |decoding: &Decoding| decoding.job.settings.activity && decoding.activity_due <= now;
        let observes = self.decoding[..decoded].iter().any(is_due);
        self.model.observe_activity(observes);
        let result = match &piece {
            None if proposed.is_empty() => self
                .model
                .decode_batch(&mut self.sequences[..decoded], &tokens),
            None => {
                let sequence = &mut self.sequences[0];
                self.model.run_prompt(sequence, &tokens, PromptLogits::All)
            }
            Some((_, prompt, range)) => {
                let wanted = match prompt.job.settings.prompt_logprobs {
                    Some(_) => PromptLogits::All,
                    None if range.end == prompt.job.prompt.len() => PromptLogits::Last,
                    None => PromptLogits::None,
                };
                let last = self.sequences.len() - 1;
                let sequences = &mut self.sequences[last - decoded..];
                self.model.run_with_prompt(sequences, &tokens, wanted)
            }
        };
        let active = observes.then(|| self.model.take_activity());
        let counts = self.count();
        let piece = piece.map(|(index, mut prompt, range)| {
            prompt.sequence = self.sequences.pop();
            (index, prompt, range)
        });
        let logits = match result {
            Ok(logits) => logits,
            Err(error) => {
                for index in (0..decoded).rev() {
                    self.finish(index, Err(Event::Failed(error.to_string())));
                }
                if let Some((_, prompt, _)) = piece {
                    self.fail(prompt, error.to_string());
                }
                return;
            }
        };
        let of_decoded = (decoded + proposed.len()) * self.model.config().vocabulary_size;
        let (of_decoded, of_prompt) = logits.split_at(of_decoded);
        let results = Decoded {
            batch: decoded,
            logits: of_decoded,
            active: active.as_deref(),
            counts: &counts,
            at: Instant::now(),
        };
        match &mut self.decoding[..decoded] {
            [] => {}
            [
                Decoding {
                    speculation: Some(speculation),
                    ..
                },
            ] if piece.is_none() => {
                speculation.observe_pass(tokens.len(), now.elapsed());
                self.accept_proposed(&proposed, &results);
            }
            _ => self.accept_all(&results),
        }
        if let Some((index, prompt, range)) = piece {
            self.end_piece(index, prompt, range, of_prompt);
        }
    }

    /// Ends the pass of a piece, the tokens `range`, of `prompt`, which is at `index` unless it is complete.
    fn end_piece(&mut self, index: usize, mut prompt: Prompt, range: Range<usize>, logits: &[f32]) {
        self.metrics.prompt_tokens.inc_by(range.len() as u64);
        let size = self.model.config().vocabulary_size;
        let tokens = &prompt.job.prompt;
        if let Some(count) = prompt.job.settings.prompt_logprobs {
            let rows = logits.chunks_exact(size).zip(&tokens[range.start + 1..]);
            let scores = rows.map(|(row, next)| Score::new(*next, row, count, self.vocabulary));
            prompt.scores.extend(scores);
        }
        if range.end < tokens.len() {
            return self.prompts.insert(index, prompt);
        }
        self.start_decoding(prompt, &logits[logits.len() - size..]);
    }

    /// Ends `prompt` with an error.
    fn fail(&mut self, prompt: Prompt, message: String) {
        if let Some(sequence) = prompt.sequence {
            self.put_idle(sequence, prompt.fallbacks);
        }
        let mut events = prompt.job.events;
        events.send(Event::Failed(message));
    }

    /// Generates the first token of `prompt`, which has been run.
    fn start_decoding(&mut self, prompt: Prompt, logits: &[f32]) {
        let Prompt {
            mut job,
            fallbacks,
            sequence,
            cached,
            scores,
        } = prompt;
        let Some(sequence) = sequence else { return };
        let mut sampler = match job.sampler() {
            Ok(sampler) => sampler,
            Err(error) => {
                job.events.send(Event::Failed(error.to_string()));
                return self.idle.put(sequence);
            }
        };
        self.metrics.cached_tokens.inc_by(cached as u64);
        let now = Instant::now();
        job.events.send(Event::Prompt {
            cached,
            scores,
            at: now,
        });
        if job.settings.max_tokens == 0 {
            self.metrics.finished.inc();
            job.events.send(Event::Done {
                finish: Finish::Length,
                at: now,
            });
            return self.put_idle(sequence, fallbacks);
        }
        job.prompt.iter().for_each(|token| sampler.remember(*token));
        let waited = now.duration_since(job.arrived);
        self.metrics.first_token.observe(waited.as_secs_f64());
        let mut decoding = Decoding {
            constraint: job.settings.grammar.as_ref().map(Grammar::start),
            sampler,
            job,
            fallbacks,
            pending: 0,
            generated: 0,
            at: now,
            activity_due: now,
            speculation: None,
        };
        if self.settings.speculates {
            decoding.speculation = Some(Speculation::new(&decoding.job.prompt));
        }
        let finish = self.accept(&mut decoding, sequence.position(), logits, None);
        self.decoding.push(decoding);
        self.sequences.push(sequence);
        if let Some(finish) = finish {
            self.finish(self.decoding.len() - 1, finish);
        }
    }

    /// Samples the next token of `decoding`, whose sequence has `position` tokens, and reports it; returns why the text
    /// ends with it.
    fn accept(
        &self,
        decoding: &mut Decoding,
        position: usize,
        logits: &[f32],
        activity: Option<Activity>,
    ) -> Option<Result<Finish, Event>> {
        let job = &mut decoding.job;
        let known = &logits[..self.vocabulary.min(logits.len())];
        let sampled = match &mut decoding.constraint {
            None => Ok(decoding.sampler.sample(known)),
            Some(constraint) => constraint.sample(known, &mut decoding.sampler),
        };
        let id = match sampled {
            Ok(id) => id,
            Err(error) => return Some(Err(Event::Refused(error))),
        };
        decoding.generated += 1;
        decoding.pending = id;
        if let Some(speculation) = &mut decoding.speculation {
            speculation.push(id);
        }
        let is_stop = !job.settings.ignores_stop_tokens && self.stop_tokens.contains(&id);
        let count = job.settings.top_logprobs;
        job.events.send(Event::Token {
            id,
            is_stop,
            score: count.map(|count| Score::new(id, logits, count, self.vocabulary)),
            activity,
        });
        let is_complete = decoding
            .constraint
            .as_ref()
            .is_some_and(Constraint::is_complete);
        if is_stop || is_complete {
            Some(Ok(Finish::Stop))
        } else if position >= self.settings.context || decoding.generated >= job.settings.max_tokens
        {
            Some(Ok(Finish::Length))
        } else {
            None
        }
    }

    /// The tokens that the text of the only request proposes after its last one.
    fn propose(&mut self) -> Vec<u32> {
        let (decoding, position) = (&mut self.decoding[0], self.sequences[0].position());
        let Some(speculation) = &mut decoding.speculation else {
            return Vec::new();
        };
        let room = (self.settings.context - position)
            .min(decoding.job.settings.max_tokens - decoding.generated)
            .min(self.model.decode_batch_size());
        speculation.propose(room.saturating_sub(1)).to_vec()
    }

    /// Samples and reports the token after the one at `index` of the pass, as [`Self::accept`].
    fn accept_after(
        &self,
        index: usize,
        decoding: &mut Decoding,
        position: usize,
        pass: &Decoded<'_>,
    ) -> Option<Result<Finish, Event>> {
        let config = self.model.config();
        let between = pass.at.duration_since(decoding.at);
        self.metrics.between_tokens.observe(between.as_secs_f64());
        decoding.at = pass.at;
        let is_due = decoding.job.settings.activity && decoding.activity_due <= pass.at;
        let activity = pass.active.filter(|_| is_due).map(|layers| {
            decoding.activity_due = pass.at + ACTIVITY_INTERVAL;
            let bins = |tokens: &Vec<Vec<u32>>| bins(&tokens[index], config.ffn_size);
            Activity {
                bins: layers.iter().map(bins).collect(),
                computed_share: pass.counts.computed_share(),
                bytes_per_token: pass.counts.bytes_per_token(),
                batch: pass.batch,
            }
        });
        let logits = &pass.logits[index * config.vocabulary_size..][..config.vocabulary_size];
        self.accept(decoding, position, logits, activity)
    }

    /// Samples a token of each request of `pass`.
    fn accept_all(&mut self, pass: &Decoded<'_>) {
        self.metrics.batch.observe(pass.batch as f64);
        let mut finished = Vec::new();
        let mut all = std::mem::take(&mut self.decoding);
        for (index, decoding) in all[..pass.batch].iter_mut().enumerate() {
            let position = self.sequences[index].position();
            let finish = self.accept_after(index, decoding, position, pass);
            finished.extend(finish.map(|finish| (index, finish)));
        }
        self.decoding = all;
        for (index, finish) in finished.into_iter().rev() {
            self.finish(index, finish);
        }
        if !self.prompts.is_empty() {
            // The next pass is a long one.
            let decoding = self.decoding.iter_mut();
            decoding.for_each(|decoding| decoding.job.events.flush());
        }
    }

    /// Samples tokens of the only request as long as they are the `proposed` ones, and one more.
    fn accept_proposed(&mut self, proposed: &[u32], pass: &Decoded<'_>) {
        self.metrics.batch.observe(1.0);
        let position = self.sequences[0].position() - proposed.len();
        let mut all = std::mem::take(&mut self.decoding);
        let mut accepted = 0;
        let finish = loop {
            let finish = self.accept_after(accepted, &mut all[0], position + accepted, pass);
            if finish.is_some() || proposed.get(accepted) != Some(&all[0].pending) {
                break finish;
            }
            accepted += 1;
        };
        if let Some(speculation) = &mut all[0].speculation
            && !proposed.is_empty()
        {
            speculation.observe_accepted(accepted, proposed.len());
            self.metrics.proposed_tokens.inc_by(proposed.len() as u64);
            self.metrics.accepted_tokens.inc_by(accepted as u64);
        }
        self.decoding = all;
        self.sequences[0].truncate(position + accepted);
        if let Some(finish) = finish {
            self.finish(0, finish);
        }
    }

    /// Reports the end of request `index` and frees its place.
    fn finish(&mut self, index: usize, finish: Result<Finish, Event>) {
        let mut decoding = self.remove(index);
        self.metrics.finished.inc();
        decoding.job.events.send(match finish {
            Ok(finish) => Event::Done {
                finish,
                at: Instant::now(),
            },
            Err(event) => event,
        });
    }

    /// Removes request `index`; its sequence is idle then.
    fn remove(&mut self, index: usize) -> Decoding {
        let decoding = self.decoding.swap_remove(index);
        let sequence = self.sequences.swap_remove(index);
        self.put_idle(sequence, decoding.fallbacks);
        decoding
    }

    /// Counts what was computed since the last call, and returns it.
    fn count(&mut self) -> Statistics {
        let counts = self.model.take_statistics();
        self.metrics.count(
            &counts,
            self.prompts.len() + self.decoding.len(),
            &self.model,
        );
        counts
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
