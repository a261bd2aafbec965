//! `/v1/completions`.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    body::RequestBody,
    error::ApiError,
    events::{activity_json, stream_chunks},
    logprobs::LegacyLogprobs,
    parameters::Parameters,
    prompts::Prompts,
};
use crate::{
    Service,
    choice::prompt_text,
    generation::{TextRequest, Texts, Update},
    scheduler::{Finish, Score},
};

/// Log probabilities per token, at most.
pub(crate) const MAX_LOGPROBS: usize = 20;

/// Texts of one prompt, at most.
const MAX_TEXTS: usize = 128;

/// Maximum bytes of the prompts that a response repeats.
const MAX_ECHO_BYTES: usize = 64 << 20;

/// A prompt. If the response repeats it, also its text and the offset of each token in the text.
struct EchoedPrompt {
    ids: Arc<[u32]>,
    echo: Option<(String, Vec<usize>)>,
}

/// Parts of a request that its response needs.
struct Shape {
    id: String,
    created: u64,
    prompts: Vec<EchoedPrompt>,
    /// Texts that each prompt has in the response.
    texts_each: usize,
    logprobs: bool,
    include_usage: bool,
}

pub(crate) async fn completions(
    State(service): State<Arc<Service>>,
    body: RequestBody,
) -> Result<Response, ApiError> {
    let (request, shape, is_streamed) = service.prepare(body, prepare).await?;
    let best_of = request.texts_each;
    let texts = Texts::start(&service, request, is_streamed).await?;
    if is_streamed {
        Ok(shape.stream(service, texts))
    } else {
        shape.respond(service, texts, best_of).await
    }
}

/// Reads a request; returns what its response needs, and whether it is streamed.
fn prepare(
    service: &Service,
    mut parameters: Parameters,
) -> Result<(TextRequest, Shape, bool), ApiError> {
    service.take_model(&mut parameters)?;
    let prompts: Prompts = parameters.take("prompt")?.unwrap_or_default();
    let echo = parameters.take("echo")?.unwrap_or(false);
    let logprobs = parameters.take_count("logprobs", 0..=MAX_LOGPROBS)?;
    let texts_each = parameters.take_count("n", 1..=MAX_TEXTS)?.unwrap_or(1);
    let best_of = parameters
        .take_count("best_of", texts_each..=MAX_TEXTS)?
        .unwrap_or(texts_each);
    let stream = Streaming::take(&mut parameters)?;
    if stream.is_on && best_of > texts_each {
        return Err(ApiError::invalid_value(
            "best_of",
            "a stream cannot choose among texts",
        ));
    }
    let mut request = service.take_text_request(&mut parameters)?;
    // The default is to fill the context, as in llama.cpp; OpenAI's is 16 tokens.
    let max_tokens = parameters.take_limit("max_tokens", 0)?.flatten();
    // Echoed prompts alone are scored without a token.
    if max_tokens == Some(0) && !echo {
        return Err(ApiError::invalid_value(
            "max_tokens",
            "it is 0, which `echo` alone makes sense of",
        ));
    }
    parameters.refuse(&["suffix", "tools"])?;
    parameters.finish()?;
    request.texts_each = best_of;
    request.max_tokens = max_tokens;
    // The best texts are chosen by their log probabilities.
    request.top_logprobs = logprobs.or((best_of > texts_each).then_some(0));
    request.prompt_logprobs = logprobs.filter(|_| echo);
    request.check_texts(prompts.len())?;
    let (ids, texts) = prompts.encode(service)?;
    (request.prompts, request.continues) = (ids, true);
    let prompts = echoed(service, &request, texts, echo)?;
    let shape = Shape {
        id: service.new_id("cmpl"),
        created: service.now(),
        prompts,
        texts_each,
        logprobs: logprobs.is_some(),
        include_usage: stream.includes_usage,
    };
    Ok((request, shape, stream.is_on))
}

/// The prompts of `request`, with their texts if the response repeats them.
fn echoed(
    service: &Service,
    request: &TextRequest,
    texts: Vec<String>,
    echo: bool,
) -> Result<Vec<EchoedPrompt>, ApiError> {
    let mut texts = texts.into_iter();
    let mut bytes = 0;
    let prompts = request.prompts.iter().map(|ids| {
        let echo = match (echo, texts.next()) {
            (false, _) => None,
            (true, own) => {
                let (text, offsets) = prompt_text(&service.tokenizer, ids)
                    .map_err(|error| ApiError::invalid_value("prompt", error))?;
                let text = own.unwrap_or(text);
                bytes += request.texts_each * text.len();
                Some((text, offsets))
            }
        };
        if bytes > MAX_ECHO_BYTES {
            let message =
                format!("the response would repeat more than {MAX_ECHO_BYTES} bytes of prompts");
            return Err(ApiError::invalid_value("echo", message));
        }
        let ids = Arc::clone(ids);
        Ok(EchoedPrompt { ids, echo })
    });
    prompts.collect()
}

impl Shape {
    /// Waits for the whole text of every choice.
    async fn respond(
        self,
        service: Arc<Service>,
        mut texts: Texts,
        best_of: usize,
    ) -> Result<Response, ApiError> {
        let mut finished = texts.finish().await?;
        let of_service = Arc::clone(&service);
        let write = move || {
            let service = &of_service;
            let mut choices = Vec::new();
            for (prompt, of_prompt) in self.prompts.iter().zip(finished.chunks_mut(best_of)) {
                of_prompt.sort_by(|a, b| b.mean_logprob.total_cmp(&a.mean_logprob));
                for text in &of_prompt[..self.texts_each] {
                    let (mut whole, mut logprobs) =
                        self.begin(service, prompt, &text.prompt_scores);
                    let start = whole.chars().count();
                    whole.push_str(&text.piece.text);
                    logprobs.push_generated(&service.tokenizer, start, &text.piece.scores);
                    choices.push(json!({
                        "text": whole,
                        "index": choices.len(),
                        "logprobs": self.logprobs.then(|| logprobs.into_json()),
                        "finish_reason": text.finish.map(finish_reason),
                    }));
                }
            }
            let mut response = self.envelope(service, choices);
            add_usage(service, &mut response, &texts);
            Json(response).into_response()
        };
        service.workers.run(write).await
    }

    /// Streams a chunk for every piece of text.
    fn stream(self, service: Arc<Service>, texts: Texts) -> Response {
        // Characters of the prompt that a choice begins with.
        let mut starts = vec![0; self.prompts.len() * self.texts_each];
        stream_chunks(Arc::clone(&service), texts, move |update, texts| {
            let chunk =
                |choice: usize, text: &str, logprobs: LegacyLogprobs, finish: Option<Finish>| {
                    let choice = json!({
                        "text": text,
                        "index": choice,
                        "logprobs": self.logprobs.then(|| logprobs.into_json()),
                        "finish_reason": finish.map(finish_reason),
                    });
                    let mut chunk = self.envelope(&service, vec![choice]);
                    if self.include_usage {
                        chunk["usage"] = Value::Null;
                    }
                    chunk
                };
            Ok(match update {
                Some(Update::Prompt { choice, scores }) => {
                    let prompt = &self.prompts[choice / self.texts_each];
                    if prompt.echo.is_none() {
                        return Ok(Vec::new());
                    }
                    let (text, logprobs) = self.begin(&service, prompt, &scores);
                    starts[choice] = text.chars().count();
                    vec![chunk(choice, &text, logprobs, None)]
                }
                Some(Update::Text {
                    choice,
                    piece,
                    activity,
                }) => {
                    let mut logprobs = LegacyLogprobs::default();
                    logprobs.push_generated(&service.tokenizer, starts[choice], &piece.scores);
                    let mut chunk = chunk(choice, &piece.text, logprobs, None);
                    if let Some(activity) = &activity {
                        chunk["powerinfer"] = activity_json(activity);
                    }
                    vec![chunk]
                }
                Some(Update::End {
                    choice,
                    piece,
                    finish,
                }) => {
                    let mut logprobs = LegacyLogprobs::default();
                    logprobs.push_generated(&service.tokenizer, starts[choice], &piece.scores);
                    vec![chunk(choice, &piece.text, logprobs, Some(finish))]
                }
                None if self.include_usage => {
                    let mut last = self.envelope(&service, Vec::new());
                    add_usage(&service, &mut last, texts);
                    vec![last]
                }
                None => Vec::new(),
            })
        })
    }

    /// Beginning of a choice of `prompt`.
    fn begin(
        &self,
        service: &Service,
        prompt: &EchoedPrompt,
        scores: &[Score],
    ) -> (String, LegacyLogprobs) {
        let mut logprobs = LegacyLogprobs::default();
        let Some((text, offsets)) = &prompt.echo else {
            return (String::new(), logprobs);
        };
        if self.logprobs {
            logprobs.push_prompt(&service.tokenizer, &prompt.ids, offsets, scores);
        }
        (text.clone(), logprobs)
    }

    fn envelope(&self, service: &Service, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": service.name,
            "choices": choices,
        })
    }
}

/// Whether a response is streamed, and whether its last chunk counts tokens.
#[derive(Debug)]
pub(crate) struct Streaming {
    pub(crate) is_on: bool,
    pub(crate) includes_usage: bool,
}

impl Streaming {
    /// Takes `stream` and `stream_options`.
    pub(crate) fn take(parameters: &mut Parameters) -> Result<Self, ApiError> {
        #[derive(Deserialize)]
        struct Options {
            include_usage: Option<bool>,
        }
        let is_on = parameters.take("stream")?.unwrap_or(false);
        let options: Option<Options> = parameters.take("stream_options")?;
        if options.is_some() && !is_on {
            return Err(ApiError::invalid_value(
                "stream_options",
                "`stream` is not true",
            ));
        }
        let includes_usage = options.and_then(|options| options.include_usage);
        Ok(Self {
            is_on,
            includes_usage: includes_usage.unwrap_or(false),
        })
    }
}

/// OpenAI's name of why a text has ended.
pub(crate) fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
    }
}

/// Adds the token counts of a response, and timings in the format of llama.cpp's server. The number of cached tokens reveals what
/// others have asked, so strangers do not see it.
pub(crate) fn add_usage(service: &Service, response: &mut Value, texts: &Texts) {
    let (prompt, generated) = (texts.prompt_tokens, texts.tokens());
    let cached = service.reports_cache.then_some(texts.cached_tokens);
    let computed = cached.map(|cached| prompt - cached);
    let (prompt_time, decode_time) = texts.times();
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let rate = |tokens: usize, time: Duration| {
        // Nothing has been decoded for the first token.
        (tokens > 0 && !time.is_zero()).then(|| tokens as f64 / time.as_secs_f64())
    };
    response["usage"] = json!({
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": cached.map(|cached| json!({ "cached_tokens": cached })),
    });
    response["timings"] = json!({
        "cache_n": cached,
        "prompt_n": computed,
        "prompt_ms": milliseconds(prompt_time),
        "prompt_per_second": computed.and_then(|computed| rate(computed, prompt_time)),
        "predicted_n": generated,
        "predicted_ms": milliseconds(decode_time),
        "predicted_per_second": rate(generated, decode_time).filter(|_| generated > 1),
    });
}
