//! Continuous batching: one thread runs the engine for all requests.
//!
//! ```text
//! requests ─▶ queue ─▶ prompts: one piece per pass ─▶ decoding: one token of each per pass ─▶ done
//!                       ▲                                                                     │
//!                       └───────── idle sessions, whose prefixes are reused ◀────────────────┘
//! ```
//!
//! A token's logits depend neither on the other tokens of a pass nor on how a prompt is split, so each request gets the
//! tokens that it would get alone.

mod job;
mod pool;
mod running;

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, Sender, TryRecvError, channel},
    },
    time::Instant,
};

use powerinfer_runtime::{
    Engine, Logits, Ran, RuntimeError, Session, Speculation, Statistics, StopConditions, Text,
    memory::PREFILL_BATCH, run_pass,
};

pub(crate) use self::job::{
    ACTIVITY_BINS, Activity, Cancel, Event, Events, Finish, Job, JobSettings, Score,
};
use self::{
    pool::SessionPool,
    running::{Decoding, PassReport, Prompt, finish_of},
};
use crate::{capacity::Capacity, constraint::Grammar, metrics::Metrics};

/// Fewest tokens of a shared prefix, not yet run by another prompt, for which a prompt waits.
const WORTH_WAITING: usize = 32;

/// Limits of the scheduler.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SchedulerSettings {
    /// Requests that run at the same time, and sessions.
    pub(crate) capacity: Capacity,
    /// Requests that may wait.
    pub(crate) queue: usize,
    /// Whether the text of a request that runs alone proposes tokens, if they can be verified together.
    pub(crate) speculates: bool,
}

/// Sends jobs to the scheduler.
#[derive(Clone)]
pub(crate) struct SchedulerHandle {
    jobs: Sender<Job>,
    queued: Arc<AtomicUsize>,
    limit: usize,
}

impl SchedulerHandle {
    /// Sends the jobs of one request; returns whether there is room in the queue.
    pub(crate) fn submit(&self, jobs: Vec<Job>) -> bool {
        // A request whose choices exceed the queue is accepted if no other request waits.
        if self.queued.load(Ordering::Relaxed) >= self.limit {
            return false;
        }
        self.queued.fetch_add(jobs.len(), Ordering::Relaxed);
        for job in jobs {
            // A scheduler that has stopped closes the events of the job that it drops.
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
pub(crate) struct Scheduler {
    engine: Engine,
    settings: SchedulerSettings,
    stop_tokens: Arc<[u32]>,
    /// Number of tokens that can be sampled: the first ones of the vocabulary.
    vocabulary: usize,
    jobs: Receiver<Job>,
    queued: Arc<AtomicUsize>,
    metrics: Arc<Metrics>,
    queue: VecDeque<Job>,
    /// The oldest first.
    prompts: Vec<Prompt>,
    /// Whether the next piece is of the prompt with the fewest tokens left.
    is_turn_of_shortest: bool,
    decoding: Vec<Decoding>,
    /// The texts of `decoding`, and their sessions.
    texts: Vec<Text>,
    sessions: Vec<Session>,
    idle: SessionPool,
    /// Number of layers that verification has changed to another policy. Prefixes from before such a change are not reused.
    fallbacks: usize,
}

impl Scheduler {
    /// A scheduler for `engine` with its `first` session, and the handle that sends jobs to it. It stops when the last sender is
    /// gone and all jobs are done.
    pub(crate) fn new(
        engine: Engine,
        first: Session,
        settings: SchedulerSettings,
        stop_tokens: Arc<[u32]>,
        vocabulary: usize,
        metrics: Arc<Metrics>,
    ) -> (Self, SchedulerHandle) {
        let (sender, jobs) = channel();
        let queued = Arc::new(AtomicUsize::new(0));
        let handle = SchedulerHandle {
            jobs: sender,
            queued: Arc::clone(&queued),
            limit: settings.queue,
        };
        let scheduler = Self {
            idle: SessionPool::new(first, settings.capacity.sequences),
            engine,
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
            texts: Vec::new(),
            sessions: Vec::new(),
            fallbacks: 0,
        };
        (scheduler, handle)
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

    /// Empties idle sessions after a layer fell back to another policy.
    fn forget_prefixes_of_other_policies(&mut self) {
        let found = self.engine.observers().verification();
        let fallbacks = found.map_or(0, |found| found.alarms().len());
        if fallbacks != self.fallbacks {
            self.fallbacks = fallbacks;
            self.idle.forget();
        }
    }

    /// Makes a request's session idle. The session is emptied if layers fell back after it started with this number of
    /// `fallbacks`.
    fn put_idle(&mut self, mut session: Session, fallbacks: usize) {
        if fallbacks != self.fallbacks {
            session.truncate(0);
        }
        self.idle.put(session);
    }

    /// Receives jobs, and waits for one if there is nothing to do; returns whether there is something to do.
    fn receive(&mut self) -> bool {
        let is_idle =
            |own: &Self| own.queue.is_empty() && own.prompts.is_empty() && own.decoding.is_empty();
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
                if let Some(session) = prompt.session {
                    self.put_idle(session, prompt.fallbacks);
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
                session: None,
                cached: 0,
                scores: Vec::new(),
            });
        }
    }

    /// Runs a piece of a prompt together with one token of each request that is decoded.
    fn step(&mut self) {
        let prompt = self.next_prompt();
        if prompt.is_some() && self.engine.observers().verification().is_some() {
            // Verification needs passes that contain only decoded tokens.
            self.pass(prompt, 0);
            return self.pass(None, self.decoding.len());
        }
        self.pass(prompt, self.decoding.len());
    }

    /// Takes, in turn, the oldest prompt or the one with the fewest tokens left: a short prompt does not wait for long
    /// ones, and a long one is not overtaken for ever. Also returns its index.
    fn next_prompt(&mut self) -> Option<(usize, Prompt)> {
        let mut ready = (0..self.prompts.len()).filter(|index| !self.waits_for_prefix(*index));
        let next = if self.is_turn_of_shortest {
            ready.min_by_key(|index| self.prompts[*index].tokens_left())
        } else {
            ready.next()
        };
        let index = next?;
        self.is_turn_of_shortest = !self.is_turn_of_shortest;
        Some((index, self.prompts.remove(index)))
    }

    /// Whether another prompt is running a prefix that prompt `index`, which has not begun, can start from.
    fn waits_for_prefix(&self, index: usize) -> bool {
        let waiting = &self.prompts[index];
        if waiting.session.is_some() || waiting.job.settings.prompt_logprobs.is_some() {
            return false;
        }
        let prompt = &waiting.job.prompt;
        self.prompts.iter().any(|other| {
            let Some(session) = &other.session else {
                return false;
            };
            if other.fallbacks != self.fallbacks {
                return false;
            }
            let both = other.job.prompt.iter().zip(&**prompt);
            let shared = both.take_while(|(a, b)| a == b).count();
            shared >= session.position() + WORTH_WAITING
        })
    }

    /// Gives `prompt` a session if it has none: the one with the longest prefix of it.
    fn start_prompt(&mut self, prompt: &mut Prompt) -> Result<(), RuntimeError> {
        if prompt.session.is_some() {
            return Ok(());
        }
        let tokens = &prompt.job.prompt;
        // If the logits of all tokens are needed, the whole prompt is run.
        let reusable = match prompt.job.settings.prompt_logprobs {
            Some(_) => 0,
            None => tokens.len() - 1,
        };
        let now = self.fallbacks;
        let running = self.prompts.iter().filter(|prompt| prompt.fallbacks == now);
        let running = running.filter_map(|prompt| prompt.session.as_ref());
        let decoding = self.decoding.iter().zip(&self.sessions);
        let decoding = decoding.filter(|(decoding, _)| decoding.fallbacks == now);
        let busy: Vec<&Session> = running.chain(decoding.map(|(_, found)| found)).collect();
        let (session, cached) = self.idle.take(&mut self.engine, tokens, reusable, &busy)?;
        (prompt.cached, prompt.fallbacks) = (cached, now);
        prompt.session = Some(session);
        Ok(())
    }

    /// Runs a piece of `prompt`, which was at the given index, together with the first `decoded` requests.
    fn pass(&mut self, prompt: Option<(usize, Prompt)>, decoded: usize) {
        let mut piece = None;
        if let Some((index, mut prompt)) = prompt {
            match self.start_prompt(&mut prompt) {
                Ok(()) => {
                    let start = prompt.job.prompt.len() - prompt.tokens_left();
                    // All decoding requests wait for this pass, even those that are not in it.
                    let mut room = self.engine.prompt_room(self.decoding.len());
                    if prompt.job.settings.prompt_logprobs.is_some() && !self.engine.uses_device() {
                        // Logits of all tokens take much memory.
                        room = room.min(PREFILL_BATCH);
                    }
                    let end = prompt.job.prompt.len().min(start + room);
                    piece = Some((index, prompt, start..end));
                }
                Err(error) => self.fail(prompt, error.to_string()),
            }
        }
        if piece.is_none() && decoded == 0 {
            return;
        }
        let now = Instant::now();
        let is_due =
            |decoding: &Decoding| decoding.job.settings.activity && decoding.activity_due <= now;
        let observes = self.decoding[..decoded].iter().any(is_due);
        self.engine.observers_mut().list_active(observes);
        let of_prompt = piece
            .as_mut()
            .and_then(|(_, prompt, range)| prompt.piece(range.clone()));
        let mut running: Vec<_> = (self.sessions.iter_mut().zip(&mut self.texts))
            .take(decoded)
            .collect();
        let ran = run_pass(&mut self.engine, &mut running, of_prompt);
        let active = observes.then(|| self.engine.observers_mut().take_active());
        let report = PassReport {
            batch: decoded,
            active,
            counts: self.count(),
            at: Instant::now(),
        };
        let accepted = ran.and_then(|ran| {
            let of_prompt = ran.piece_logits(&self.engine).to_vec();
            self.accept(ran, &report)?;
            Ok(of_prompt)
        });
        match (accepted, piece) {
            (Ok(logits), Some((index, prompt, range))) => {
                self.end_piece(index, prompt, range, &logits);
            }
            (Ok(_), None) => {}
            (Err(error), piece) => {
                for index in (0..decoded).rev() {
                    self.finish(index, Err(Event::Failed(error.to_string())));
                }
                if let Some((_, prompt, _)) = piece {
                    self.fail(prompt, error.to_string());
                }
            }
        }
    }

    /// Samples and reports the next tokens of the requests of a pass.
    fn accept(&mut self, ran: Ran, report: &PassReport) -> Result<(), RuntimeError> {
        if report.batch == 0 {
            return Ok(());
        }
        self.metrics.batch.observe(report.batch as f64);
        let Self {
            engine,
            decoding,
            texts,
            sessions,
            metrics,
            vocabulary,
            ..
        } = self;
        let config = engine.bundle().config().clone();
        let mut refused = vec![None; report.batch];
        let mut running: Vec<_> = sessions.iter_mut().zip(texts).take(report.batch).collect();
        let proposed = ran.proposed();
        let accepted = ran.accept(engine, &mut running, |sampled| {
            let decoding = &mut decoding[sampled.text];
            let between = report.at.duration_since(decoding.at);
            metrics.between_tokens.observe(between.as_secs_f64());
            decoding.at = report.at;
            let activity = decoding.activity(sampled.row, report, config.ffn_size);
            match sampled.token {
                Ok(token) => {
                    decoding.report(&token, sampled.logits, activity, *vocabulary);
                }
                Err(error) => refused[sampled.text] = Some(error.to_string()),
            }
        })?;
        if proposed > 0 {
            self.metrics.proposed_tokens.inc_by(proposed as u64);
            self.metrics.accepted_tokens.inc_by(accepted as u64);
        }
        for (index, refused) in refused.into_iter().enumerate().rev() {
            let finish = self.texts[index].stop_reason().map(finish_of);
            match refused {
                Some(reason) => self.finish(index, Err(Event::Refused(reason))),
                None => finish
                    .into_iter()
                    .for_each(|finish| self.finish(index, Ok(finish))),
            }
        }
        if !self.prompts.is_empty() {
            // The next pass takes long, because it includes a piece of a prompt.
            let decoding = self.decoding.iter_mut();
            decoding.for_each(|decoding| decoding.job.events.flush());
        }
        Ok(())
    }

    /// Ends the pass of a piece, the tokens `range`, of `prompt`, which is at `index` unless it is complete.
    fn end_piece(&mut self, index: usize, mut prompt: Prompt, range: Range<usize>, logits: &[f32]) {
        self.metrics.prompt_tokens.inc_by(range.len() as u64);
        let size = self.engine.bundle().config().vocabulary_size;
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
        if let Some(session) = prompt.session {
            self.put_idle(session, prompt.fallbacks);
        }
        let mut events = prompt.job.events;
        events.send(Event::Failed(message));
    }

    /// Generates the first token of `prompt`, which has been run.
    fn start_decoding(&mut self, prompt: Prompt, logits: &[f32]) {
        let Prompt {
            mut job,
            fallbacks,
            session,
            cached,
            scores,
        } = prompt;
        let Some(session) = session else { return };
        let sampler = match job.sampler() {
            Ok(sampler) => sampler,
            Err(error) => {
                job.events.send(Event::Failed(error.to_string()));
                return self.idle.put(session);
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
            return self.put_idle(session, fallbacks);
        }
        let waited = now.duration_since(job.arrived);
        self.metrics.first_token.observe(waited.as_secs_f64());
        let constraint = job.settings.grammar.as_ref().map(Grammar::start);
        let stop = StopConditions {
            max_tokens: job.settings.max_tokens,
            stop_tokens: if job.settings.ignores_stop_tokens {
                [].into()
            } else {
                Arc::clone(&self.stop_tokens)
            },
            vocabulary: self.vocabulary,
        };
        let mut text =
            Text::new(sampler, stop).with_constraint(constraint.map(|own| Box::new(own) as _));
        if job.settings.top_logprobs.is_some() {
            text = text.with_log_probabilities();
        }
        if self.settings.speculates {
            text.speculate(Speculation::new(&job.prompt));
        }
        text.begin(&job.prompt);
        let mut decoding = Decoding {
            job,
            fallbacks,
            at: now,
            activity_due: now,
        };
        let token = text.accept(Logits::Host(logits), session.position(), session.context());
        let finish = match token {
            Ok(token) => {
                decoding.report(&token, logits, None, self.vocabulary);
                text.stop_reason().map(|reason| Ok(finish_of(reason)))
            }
            Err(error) => Some(Err(Event::Refused(error.to_string()))),
        };
        self.decoding.push(decoding);
        self.texts.push(text);
        self.sessions.push(session);
        if let Some(finish) = finish {
            self.finish(self.decoding.len() - 1, finish);
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

    /// Removes request `index`; its session becomes idle.
    fn remove(&mut self, index: usize) -> Decoding {
        let decoding = self.decoding.swap_remove(index);
        self.texts.swap_remove(index);
        let session = self.sessions.swap_remove(index);
        self.put_idle(session, decoding.fallbacks);
        decoding
    }

    /// Counts what was computed since the last call, and returns it.
    fn count(&mut self) -> Statistics {
        let counts = self.engine.observers_mut().take_statistics();
        self.metrics.count(
            &counts,
            self.prompts.len() + self.decoding.len(),
            self.engine.observers(),
        );
        counts
    }
}
