//! Routes of Ollama's API: `/api/tags`, `/api/ps`, `/api/version`, `/api/show`, `/api/generate` and `/api/chat`.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::{
    Json,
    body::Body,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use futures_util::stream;
use powerinfer_text::{Message, SpecialTokens};
use serde_json::{Value, json};

use super::{
    body::RequestBody, chat::MessageParameter, completions::finish_reason, error::ApiError,
    parameters::Parameters, request::MAX_SCHEMA_BYTES,
};
use crate::{
    Service,
    generation::{TextFormat, TextRequest, Texts, Update},
    scheduler::Finish,
};

/// Options that concern how Ollama loads a model, and those that Ollama no longer has.
const IGNORED: &[&str] = &[
    "num_ctx",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "low_vram",
    "num_thread",
    "num_keep",
    "use_mmap",
    "use_mlock",
    "numa",
    "vocab_only",
    "logits_all",
    "f16_kv",
    "mirostat_tau",
    "mirostat_eta",
    "penalize_newline",
];

/// Options that clients may put next to the prompt by mistake.
const OPTIONS: &[&str] = &[
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "num_predict",
    "num_ctx",
    "repeat_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
];

/// An error in the shape of Ollama's API.
pub(crate) struct OllamaError(ApiError);

impl From<ApiError> for OllamaError {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for OllamaError {
    fn into_response(self) -> Response {
        self.0.respond(&self.0.ollama_body())
    }
}

pub(crate) async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

pub(crate) async fn tags(State(service): State<Arc<Service>>) -> Json<Value> {
    let mut model = describe(&service);
    model["modified_at"] = json!(rfc3339(service.planned));
    Json(json!({ "models": [model] }))
}

/// The loaded model, which stays loaded.
pub(crate) async fn running(State(service): State<Arc<Service>>) -> Json<Value> {
    let mut model = describe(&service);
    model["size_vram"] = json!(service.device_bytes);
    model["context_length"] = json!(service.context);
    model["expires_at"] = json!("9999-12-31T23:59:59Z");
    Json(json!({ "models": [model] }))
}

/// The model's names, size and digest.
fn describe(service: &Service) -> Value {
    let name = &service.name;
    json!({ "name": name, "model": name, "size": service.bytes, "digest": service.digest, "details": details(service) })
}

pub(crate) async fn show(
    State(service): State<Arc<Service>>,
    body: RequestBody,
) -> Result<Json<Value>, OllamaError> {
    let take_model = |service: &Service, mut parameters| service.take_model(&mut parameters);
    service.prepare(body, take_model).await?;
    let template = service
        .tokenizer
        .chat_template()
        .map(|template| template.source());
    Ok(Json(json!({
        "template": template.unwrap_or_default(),
        "details": details(&service),
        "model_info": { "general.architecture": "powerinfer", "powerinfer.context_length": service.context },
        "capabilities": ["completion"],
    })))
}

fn details(service: &Service) -> Value {
    json!({ "format": "powerinfer", "family": "powerinfer", "families": null, "parameter_size": service.parameters, "quantization_level": service.about["format"] })
}

/// A parsed request; without a prompt there is nothing to generate.
struct Prepared {
    request: Option<TextRequest>,
    is_streamed: bool,
}

pub(crate) async fn generate(
    State(service): State<Arc<Service>>,
    body: RequestBody,
) -> Result<Response, OllamaError> {
    let prepared = service.prepare(body, prepare_text).await?;
    respond(service, prepared, |text| ("response", json!(text))).await
}

fn prepare_text(service: &Service, mut parameters: Parameters) -> Result<Prepared, ApiError> {
    let (is_streamed, unloads) = begin(service, &mut parameters)?;
    parameters.refuse(&["suffix", "images", "template", "context", "think", "tools"])?;
    parameters.redirect(&["messages"], "send messages to `/api/chat`")?;
    let prompt: String = parameters.take("prompt")?.unwrap_or_default();
    let system: Option<String> = parameters.take("system")?;
    let system = system.filter(|text| !text.is_empty());
    let is_raw = parameters.take("raw")?.unwrap_or(false);
    let template = service.tokenizer.chat_template().filter(|_| !is_raw);
    if system.is_some() && template.is_none() {
        let reason = if is_raw {
            "a raw prompt takes no system message"
        } else {
            "this model has no chat template, so it takes no system message"
        };
        let message = format!("{reason}; write its text into `prompt`");
        return Err(ApiError::invalid_value("system", message));
    }
    let mut request = text_request(service, parameters)?;
    // Clients load a model by asking for nothing.
    if prompt.is_empty() {
        check_stays(unloads)?;
        let request = None;
        return Ok(Prepared {
            request,
            is_streamed,
        });
    }
    let ids = match template {
        Some(_) => {
            let system = system.map(|content| ("system", content));
            let messages = system.into_iter().chain([("user", prompt)]);
            let messages = messages.map(|(role, content)| Message {
                role: role.to_owned(),
                content,
            });
            service.encode_chat(&messages.collect::<Vec<_>>())?
        }
        None => service.encode(&prompt, SpecialTokens::Add)?,
    };
    (request.prompts, request.continues) = (vec![ids.into()], template.is_none());
    Ok(Prepared {
        request: Some(request),
        is_streamed,
    })
}

pub(crate) async fn chat(
    State(service): State<Arc<Service>>,
    body: RequestBody,
) -> Result<Response, OllamaError> {
    let prepared = service.prepare(body, prepare_chat).await?;
    let message = |text: &str| ("message", json!({ "role": "assistant", "content": text }));
    respond(service, prepared, message).await
}

fn prepare_chat(service: &Service, mut parameters: Parameters) -> Result<Prepared, ApiError> {
    let (is_streamed, unloads) = begin(service, &mut parameters)?;
    parameters.refuse(&["tools", "think"])?;
    parameters.redirect(&["prompt"], "send a prompt to `/api/generate`")?;
    let messages: Vec<MessageParameter> = parameters.take("messages")?.unwrap_or_default();
    let mut request = text_request(service, parameters)?;
    // As in Ollama, a message may be empty.
    let messages = messages
        .into_iter()
        .map(|message| message.or_empty().into_message());
    let messages = messages.collect::<Result<Vec<_>, _>>()?;
    let request = if messages.is_empty() {
        check_stays(unloads)?;
        None
    } else {
        request.prompts = vec![service.encode_chat(&messages)?.into()];
        Some(request)
    };
    Ok(Prepared {
        request,
        is_streamed,
    })
}

/// Checks the model; returns whether the response is streamed, and whether `keep_alive` asks to unload the model.
fn begin(service: &Service, parameters: &mut Parameters) -> Result<(bool, bool), ApiError> {
    service.take_model(parameters)?;
    // The model stays loaded, but a value that Ollama refuses is an error here too.
    let (is_valid, unloads) = match parameters.take::<Value>("keep_alive")? {
        None => (true, false),
        Some(Value::Number(seconds)) => (true, seconds.as_f64() == Some(0.0)),
        Some(Value::String(text)) => (
            is_duration(&text),
            !text.contains(|c| matches!(c, '1'..='9')),
        ),
        Some(_) => (false, false),
    };
    if !is_valid {
        let message = "give seconds, or a duration with a unit, such as `5m`";
        return Err(ApiError::invalid_value("keep_alive", message));
    }
    Ok((parameters.take("stream")?.unwrap_or(true), unloads))
}

/// Refuses a request that only unloads the model.
fn check_stays(unloads: bool) -> Result<(), ApiError> {
    if unloads {
        let message = "the model stays in memory until the server is stopped; stop `powerinfer serve` to free it";
        Err(ApiError::invalid_value("keep_alive", message))
    } else {
        Ok(())
    }
}

/// Whether `text` is a duration as Go writes it, such as `5m`, `1h30m`, `-1.5s` or `0`.
fn is_duration(text: &str) -> bool {
    const UNITS: [&str; 8] = ["ns", "us", "µs", "μs", "ms", "s", "m", "h"];
    let mut rest = text.strip_prefix(['-', '+']).unwrap_or(text);
    if rest == "0" {
        return true;
    }
    let is_number = |c: char| c.is_ascii_digit() || c == '.';
    let mut parts = 0;
    while !rest.is_empty() {
        let unit_start = rest.find(|c| !is_number(c)).unwrap_or(rest.len());
        let (number, tail) = rest.split_at(unit_start);
        let next = tail.find(is_number).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(next);
        if number.parse::<f64>().is_err() || !UNITS.contains(&unit) {
            return false;
        }
        (rest, parts) = (tail, parts + 1);
    }
    parts > 0
}

/// Takes `format` and `options`.
fn text_request(service: &Service, mut parameters: Parameters) -> Result<TextRequest, ApiError> {
    let format = match parameters.take_sized::<Value>("format", MAX_SCHEMA_BYTES)? {
        None => TextFormat::Text,
        Some(Value::String(name)) if name.is_empty() => TextFormat::Text,
        Some(Value::String(name)) if name == "json" => TextFormat::JsonObject,
        Some(schema @ Value::Object(_)) => TextFormat::JsonSchema(schema),
        Some(_) => {
            return Err(ApiError::invalid_value(
                "format",
                "it is neither `json` nor a schema",
            ));
        }
    };
    let mut options: Parameters = parameters.take("options")?.unwrap_or_default();
    parameters.redirect(OPTIONS, "it belongs in `options`")?;
    for parameters in [&parameters, &options] {
        let instead = "use `num_predict` in `options`";
        parameters.redirect(&["max_tokens", "max_completion_tokens"], instead)?;
    }
    parameters.finish()?;
    options.ignore(IGNORED);
    let mut request = service.take_text_request(&mut options)?;
    // −1 and −2 are as many as there is room for.
    let most = options.take_whole("num_predict", i64::MIN..=i64::MAX)?;
    request.max_tokens = most
        .and_then(|most| usize::try_from(most).ok())
        .filter(|most| *most > 0);
    if options.take_whole("repeat_last_n", i64::MIN..=i64::MAX)? == Some(0) {
        request.sampling.repeat_penalty = 1.0;
    }
    options.refuse(&["mirostat"])?;
    for name in ["typical_p", "tfs_z"] {
        // 1 turns them off.
        if options.take::<f64>(name)?.is_some_and(|value| value != 1.0) {
            return Err(ApiError::unsupported(name));
        }
    }
    options.finish()?;
    request.format = format;
    Ok(request)
}

/// Generates the text, in lines of JSON if it is streamed; `field` is where it stands.
async fn respond(
    service: Arc<Service>,
    prepared: Prepared,
    field: impl Fn(&str) -> (&'static str, Value) + Copy + Send + 'static,
) -> Result<Response, OllamaError> {
    let line = move |service: &Service, text: &str| {
        let (name, text) = field(text);
        let mut line =
            json!({ "model": service.name, "created_at": timestamp(service), "done": false });
        line[name] = text;
        line
    };
    let Prepared {
        request,
        is_streamed,
    } = prepared;
    let Some(request) = request else {
        let mut loaded = line(&service, "");
        loaded["done"] = json!(true);
        loaded["done_reason"] = json!("load");
        return Ok(Json(loaded).into_response());
    };
    let mut texts = Texts::start(&service, request, is_streamed).await?;
    if !is_streamed {
        let finished = texts.finish().await?;
        let mut whole = line(&service, &finished[0].piece.text);
        end(
            &mut whole,
            &texts,
            finished[0].finish.unwrap_or(Finish::Length),
        );
        return Ok(Json(whole).into_response());
    }
    let lines = stream::unfold(Some(texts), move |state| {
        let service = Arc::clone(&service);
        async move {
            let mut texts = state?;
            loop {
                let (value, next) = match texts.next().await? {
                    Ok(Update::Prompt { .. }) => continue,
                    Ok(Update::Text { piece, .. }) => (line(&service, &piece.text), Some(texts)),
                    Ok(Update::End { piece, finish, .. }) => {
                        let mut last = line(&service, "");
                        end(&mut last, &texts, finish);
                        // Clients may expect no text in the last line.
                        let mut lines = format!("{last}\n");
                        if !piece.text.is_empty() {
                            lines.insert_str(0, &format!("{}\n", line(&service, &piece.text)));
                        }
                        return Some((Ok(lines), None));
                    }
                    Err(error) => (error.ollama_body(), None),
                };
                return Some((
                    Ok::<_, std::convert::Infallible>(format!("{value}\n")),
                    next,
                ));
            }
        }
    });
    let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
    Ok((kind, Body::from_stream(lines)).into_response())
}

/// Adds what the last line counts; times are in nanoseconds.
fn end(line: &mut Value, texts: &Texts, finish: Finish) {
    let (prompt, decode) = texts.times();
    line["done"] = json!(true);
    line["done_reason"] = json!(finish_reason(finish));
    line["total_duration"] = json!((prompt + decode).as_nanos() as u64);
    line["load_duration"] = json!(0);
    line["prompt_eval_count"] = json!(texts.prompt_tokens);
    line["prompt_eval_duration"] = json!(prompt.as_nanos() as u64);
    line["eval_count"] = json!(texts.tokens());
    line["eval_duration"] = json!(decode.as_nanos() as u64);
}

/// The time, as RFC 3339 has it.
fn timestamp(service: &Service) -> String {
    rfc3339(UNIX_EPOCH + Duration::from_secs(service.now()))
}

fn rfc3339(time: SystemTime) -> String {
    chrono::DateTime::<chrono::Utc>::from(time).to_rfc3339()
}
