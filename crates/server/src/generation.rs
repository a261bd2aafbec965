//! A request's texts while they are generated.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use powerinfer_runtime::{Sampler, SamplingSettings};
use powerinfer_text::{SpecialText, StreamDecoder};
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::{
    Service,
    api::error::ApiError,
    choice::{Choice, Piece},
    scheduler::{Activity, Cancel, Event, Events, Finish, Job, JobSettings, Score},
    stops::StopStrings,
};

/// Maximum number of texts of a request, for all prompts together.
pub(crate) const MAX_TEXTS: usize = 2048;

/// Maximum number of log probabilities of a request: one for each token, plus those of the likeliest alternatives requested for
/// it.
const MAX_SCORES: usize = 1 << 22;

/// Time between two batches of a text's tokens, at least, if they are streamed or may hold a stop string.
const STREAM_INTERVAL: Duration = Duration::from_millis(1);

/// As [`STREAM_INTERVAL`], if the text is sent in whole.
const WHOLE_INTERVAL: Duration = Duration::from_millis(20);

/// Texts to generate.
#[derive(Debug)]
pub(crate) struct TextRequest {
    /// Each of at least one token.
    pub(crate) prompts: Vec<Arc<[u32]>>,
    /// Whether texts continue their prompts, instead of answering a chat.
    pub(crate) continues: bool,
    /// Texts of each prompt.
    pub(crate) texts_each: usize,
    pub(crate) sampling: SamplingSettings,
    /// Whether the request set the seed: without one each has another.
    pub(crate) has_seed: bool,
    /// None for as many as the context holds.
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stops: Arc<StopStrings>,
    pub(crate) ignores_stop_tokens: bool,
    pub(crate) top_logprobs: Option<usize>,
    pub(crate) prompt_logprobs: Option<usize>,
    pub(crate) format: TextFormat,
    pub(crate) activity: bool,
}

impl TextRequest {
    /// Refuses too many texts.
    ///
    /// # Errors
    ///
    /// `prompts` prompts have too many texts.
    pub(crate) fn check_texts(&self, prompts: usize) -> Result<(), ApiError> {
        let count = prompts.saturating_mul(self.texts_each);
        if count <= MAX_TEXTS {
            Ok(())
        } else {
            Err(ApiError::invalid(format!(
                "the request asks for {count} texts, and may ask for {MAX_TEXTS}; split it"
            )))
        }
    }

    /// Refuses a request that does not fit the context or would need too much memory.
    ///
    /// # Errors
    ///
    /// A prompt, a setting or a count is out of range.
    pub(crate) fn check(&self, service: &Service) -> Result<(), ApiError> {
        self.check_texts(self.prompts.len())?;
        for prompt in &self.prompts {
            service.check_prompt(prompt)?;
        }
        Sampler::new(self.sampling.clone())
            .map_err(|error| ApiError::invalid(error.to_string()))?;
        let scores = |prompt: &Arc<[u32]>| {
            let room = service.context + 1 - prompt.len();
            let generated = self.max_tokens.unwrap_or(room).min(room);
            let of_prompt = self.prompt_logprobs.map(|top| prompt.len() * (top + 1));
            let of_text = self.top_logprobs.map(|top| generated * (top + 1));
            self.texts_each * (of_prompt.unwrap_or(0) + of_text.unwrap_or(0))
        };
        let scores: usize = self.prompts.iter().map(scores).sum();
        if scores <= MAX_SCORES {
            Ok(())
        } else {
            Err(ApiError::invalid(format!(
                "the request asks for up to {scores} log probabilities, and may ask for {MAX_SCORES}; lower `max_tokens`, or split it"
            )))
        }
    }
}

/// Constraint of a text.
#[derive(Debug, Default)]
pub(crate) enum TextFormat {
    /// Anything.
    #[default]
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON of a schema.
    JsonSchema(Value),
}

/// Progress of a request.
#[derive(Debug)]
pub(crate) enum Update {
    /// A prompt has been run; the scores are those of its tokens after the first.
    Prompt { choice: usize, scores: Vec<Score> },
    /// A choice has more text.
    Text {
        choice: usize,
        piece: Piece,
        activity: Option<Activity>,
    },
    /// A choice has ended, with the rest of its text.
    End {
        choice: usize,
        piece: Piece,
        finish: Finish,
    },
}

/// A request that is running. Dropping it cancels what is not finished.
pub(crate) struct Texts {
    receiver: UnboundedReceiver<(usize, Vec<Event>)>,
    /// Events that have been received, of one choice.
    received: (usize, std::vec::IntoIter<Event>),
    choices: Vec<Choice>,
    cancels: Vec<Cancel>,
    open: usize,
    texts_each: usize,
    /// Tokens of all prompts.
    pub(crate) prompt_tokens: usize,
    /// Prompt tokens whose keys and values were reused by the first text of their prompt.
    pub(crate) cached_tokens: usize,
    /// When the request arrived, when its first prompt had been run, and when its last text ended.
    arrived: Instant,
    prompt_done: Option<Instant>,
    ended: Option<Instant>,
}

/// The whole text of a choice.
#[derive(Debug, Default)]
pub(crate) struct FinishedText {
    pub(crate) prompt_scores: Vec<Score>,
    pub(crate) piece: Piece,
    pub(crate) finish: Option<Finish>,
    pub(crate) tokens: usize,
    /// Mean log probability of a token, if tokens are scored.
    pub(crate) mean_logprob: f64,
}

impl Texts {
    /// Queues the texts of `request`, whose tokens are sent as they come if it is streamed.
    ///
    /// # Errors
    ///
    /// The request is invalid, or the queue is full.
    pub(crate) async fn start(
        service: &Arc<Service>,
        request: TextRequest,
        is_streamed: bool,
    ) -> Result<Self, ApiError> {
        request.check(service)?;
        let grammar = service.compile(request.format).await?;
        let interval = if is_streamed || !request.stops.is_empty() {
            STREAM_INTERVAL
        } else {
            WHOLE_INTERVAL
        };
        static UNSEEDED: AtomicU64 = AtomicU64::new(0);
        let seed = |text: usize| {
            let first = if request.has_seed {
                request.sampling.seed
            } else {
                let count = UNSEEDED.fetch_add(1, Ordering::Relaxed);
                let count = count.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                service.started.wrapping_add(count)
            };
            first.wrapping_add(text as u64)
        };
        let arrived = Instant::now();
        let (sender, receiver) = unbounded_channel();
        let (mut jobs, mut choices, mut cancels) = (Vec::new(), Vec::new(), Vec::new());
        // All texts share their common settings.
        let settings = Arc::new(JobSettings {
            max_tokens: request.max_tokens.unwrap_or(service.context),
            ignores_stop_tokens: request.ignores_stop_tokens,
            top_logprobs: request.top_logprobs,
            prompt_logprobs: request.prompt_logprobs,
            activity: request.activity,
            grammar,
            sampling: request.sampling.clone(),
        });
        for prompt in &request.prompts {
            for text in 0..request.texts_each {
                let cancel = Cancel::default();
                cancels.push(cancel.clone());
                jobs.push(Job {
                    prompt: Arc::clone(prompt),
                    seed: seed(text),
                    settings: Arc::clone(&settings),
                    events: Events::new(choices.len(), sender.clone(), cancel, interval),
                    arrived,
                });
                let tokenizer = Arc::clone(&service.tokenizer);
                let decoder = if request.continues {
                    StreamDecoder::after(tokenizer, prompt, SpecialText::Skip)
                        .map_err(|error| ApiError::invalid_value("prompt", error))?
                } else {
                    StreamDecoder::new(tokenizer, SpecialText::Skip)
                };
                choices.push(Choice::new(decoder, Arc::clone(&request.stops)));
            }
        }
        if !service.engine.submit(jobs) {
            service.metrics.refused.inc();
            return Err(ApiError::queue_full());
        }
        service.metrics.requests.inc();
        Ok(Self {
            receiver,
            open: choices.len(),
            received: (0, Vec::new().into_iter()),
            choices,
            cancels,
            prompt_tokens: request.prompts.iter().map(|prompt| prompt.len()).sum(),
            cached_tokens: 0,
            texts_each: request.texts_each,
            arrived,
            prompt_done: None,
            ended: None,
        })
    }

    /// Tokens generated so far.
    pub(crate) fn tokens(&self) -> usize {
        self.choices.iter().map(|choice| choice.tokens).sum()
    }

    /// Times up to the first token, waiting included, and from there to the end.
    pub(crate) fn times(&self) -> (Duration, Duration) {
        let ended = self.ended.unwrap_or_else(Instant::now);
        let prompt_done = self.prompt_done.unwrap_or(ended);
        (
            prompt_done.saturating_duration_since(self.arrived),
            ended.saturating_duration_since(prompt_done),
        )
    }

    /// The next update; none once all choices have ended.
    pub(crate) async fn next(&mut self) -> Option<Result<Update, ApiError>> {
        loop {
            if self.open == 0 {
                return None;
            }
            let Some(event) = self.received.1.next() else {
                match self.receiver.recv().await {
                    Some((choice, events)) => self.received = (choice, events.into_iter()),
                    None => return Some(Err(ApiError::stopping())),
                }
                continue;
            };
            match self.take(self.received.0, event) {
                Ok(None) => {}
                Ok(Some(update)) => return Some(Ok(update)),
                Err(error) => return Some(Err(error)),
            }
        }
    }

    fn take(&mut self, index: usize, event: Event) -> Result<Option<Update>, ApiError> {
        let choice = &mut self.choices[index];
        if choice.finish.is_some() {
            return Ok(None); // it was ended by a stop string
        }
        let decoding = |error: powerinfer_text::TextError| ApiError::server(error.to_string());
        Ok(match event {
            Event::Prompt { cached, scores, at } => {
                self.prompt_done.get_or_insert(at);
                if index.is_multiple_of(self.texts_each) {
                    self.cached_tokens += cached;
                }
                Some(Update::Prompt {
                    choice: index,
                    scores,
                })
            }
            Event::Token {
                id,
                is_stop,
                score,
                activity,
            } => {
                let piece = choice.push(id, is_stop, score).map_err(decoding)?;
                if let Some(finish) = choice.finish {
                    self.cancels[index].cancel();
                    self.ended = Some(Instant::now());
                    self.open -= 1;
                    return Ok(Some(Update::End {
                        choice: index,
                        piece,
                        finish,
                    }));
                }
                let is_empty = piece.text.is_empty() && piece.scores.is_empty();
                (!is_empty || activity.is_some()).then_some(Update::Text {
                    choice: index,
                    piece,
                    activity,
                })
            }
            Event::Done { finish, at } => {
                self.ended = Some(at);
                let piece = choice.end(finish).map_err(decoding)?;
                self.open -= 1;
                Some(Update::End {
                    choice: index,
                    piece,
                    finish: choice.finish.unwrap_or(finish),
                })
            }
            Event::Refused(message) => {
                return Err(ApiError::invalid_value("response_format", message));
            }
            Event::Failed(message) => return Err(ApiError::server(message)),
        })
    }

    /// Waits for all choices.
    pub(crate) async fn finish(&mut self) -> Result<Vec<FinishedText>, ApiError> {
        let mut texts: Vec<FinishedText> = Vec::new();
        texts.resize_with(self.choices.len(), FinishedText::default);
        while let Some(update) = self.next().await {
            match update? {
                Update::Prompt { choice, scores } => texts[choice].prompt_scores = scores,
                Update::Text { choice, piece, .. } => texts[choice].piece.append(piece),
                Update::End {
                    choice,
                    piece,
                    finish,
                } => {
                    texts[choice].piece.append(piece);
                    texts[choice].finish = Some(finish);
                }
            }
        }
        for (text, choice) in texts.iter_mut().zip(&self.choices) {
            text.tokens = choice.tokens;
            text.mean_logprob = choice.total_logprob / choice.tokens.max(1) as f64;
        }
        Ok(texts)
    }
}
