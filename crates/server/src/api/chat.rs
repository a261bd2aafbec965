//! `/v1/chat/completions`.

use std::{fmt, sync::Arc};

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use powerinfer_text::Message;
use serde::{
    Deserialize, Deserializer,
    de::{self, SeqAccess, Visitor},
};
use serde_json::{Value, json};

use super::{
    body::RequestBody,
    completions::{MAX_LOGPROBS, Streaming, add_usage, finish_reason},
    error::ApiError,
    events::{activity_json, stream_chunks},
    logprobs::chat_logprobs,
    parameters::{Asks, Parameters},
};
use crate::{
    Service,
    choice::TokenScore,
    generation::{TextRequest, Texts, Update},
};

/// Answers of one conversation, at most.
const MAX_TEXTS: usize = 128;

/// Parameters of the reference that ask for what this server does not do.
const UNSUPPORTED: &[&str] = &[
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "audio",
    "prediction",
    "web_search_options",
    "reasoning_effort",
    "verbosity",
];

/// A message of a request. Content other than text is parsed but not kept.
#[derive(Debug, Deserialize)]
pub(crate) struct MessageParameter {
    role: Role,
    content: Option<Content>,
    #[serde(default)]
    tool_calls: Asks,
    #[serde(default)]
    function_call: Asks,
    #[serde(default)]
    images: Asks,
}

/// The author of a message. Other roles are refused: templates write roles outside contents, so a role could contain special
/// tokens.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

impl Role {
    /// The role's name in templates.
    fn name(self) -> &'static str {
        match self {
            // The API reference's newer name for the same role.
            Self::System | Self::Developer => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// Text, or parts that are concatenated.
#[derive(Debug)]
struct Content(String);

#[derive(Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrParts;
        impl<'de> Visitor<'de> for TextOrParts {
            type Value = Content;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("text or a list of its parts")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Content, E> {
                Ok(Content(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Content, A::Error> {
                let mut whole = String::new();
                while let Some(part) = parts.next_element::<Part>()? {
                    match part.text {
                        Some(text) if part.kind == "text" => whole.push_str(&text),
                        _ => {
                            let kind = part.kind;
                            let message =
                                format!("parts of type `{kind}` are not supported, only text is");
                            return Err(de::Error::custom(message));
                        }
                    }
                }
                Ok(Content(whole))
            }
        }
        deserializer.deserialize_any(TextOrParts)
    }
}

impl MessageParameter {
    /// The message with an empty text if it has none.
    pub(crate) fn or_empty(mut self) -> Self {
        self.content.get_or_insert_with(|| Content(String::new()));
        self
    }

    /// The message, which must be text.
    pub(crate) fn into_message(self) -> Result<Message, ApiError> {
        let invalid = |message: &str| Err(ApiError::invalid_value("messages", message));
        if self.tool_calls.0 || self.function_call.0 {
            return invalid("calls of tools are not supported, only text is");
        }
        if self.images.0 {
            return invalid("images are not supported, only text is");
        }
        match self.content {
            Some(Content(content)) => Ok(Message {
                role: self.role.name().to_owned(),
                content,
            }),
            None => invalid("a message has no `content`"),
        }
    }
}

pub(crate) async fn completions(
    State(service): State<Arc<Service>>,
    body: RequestBody,
) -> Result<Response, ApiError> {
    let (request, shape, is_streamed) = service.prepare(body, prepare).await?;
    let texts_each = request.texts_each;
    let texts = Texts::start(&service, request, is_streamed).await?;
    if is_streamed {
        Ok(shape.stream(service, texts, texts_each))
    } else {
        shape.respond(service, texts).await
    }
}

/// Reads a request; returns what its response needs, and whether it is streamed.
fn prepare(
    service: &Service,
    mut parameters: Parameters,
) -> Result<(TextRequest, Shape, bool), ApiError> {
    service.take_model(&mut parameters)?;
    parameters.refuse(UNSUPPORTED)?;
    let modalities: Option<Vec<String>> = parameters.take("modalities")?;
    if modalities.is_some_and(|modalities| modalities != ["text"]) {
        return Err(ApiError::invalid_value(
            "modalities",
            "only `text` is supported",
        ));
    }
    let messages: Vec<MessageParameter> = parameters.take("messages")?.unwrap_or_default();
    if messages.is_empty() {
        return Err(ApiError::invalid_value("messages", "there is no message"));
    }
    let messages = messages.into_iter().map(MessageParameter::into_message);
    let messages = messages.collect::<Result<Vec<_>, _>>()?;
    let scored = parameters.take("logprobs")?.unwrap_or(false);
    let top_logprobs = parameters.take_count("top_logprobs", 0..=MAX_LOGPROBS)?;
    if top_logprobs.is_some() && !scored {
        return Err(ApiError::invalid_value(
            "top_logprobs",
            "`logprobs` is not true",
        ));
    }
    let stream = Streaming::take(&mut parameters)?;
    let mut request = service.take_text_request(&mut parameters)?;
    request.texts_each = parameters.take_count("n", 1..=MAX_TEXTS)?.unwrap_or(1);
    let older = parameters.take_limit("max_tokens", 1)?;
    let limit = parameters.take_limit("max_completion_tokens", 1)?;
    request.max_tokens = limit.or(older).flatten();
    request.top_logprobs = scored.then_some(top_logprobs.unwrap_or(0));
    parameters.finish()?;
    request.prompts = vec![service.encode_chat(&messages)?.into()];
    let shape = Shape {
        id: service.new_id("chatcmpl"),
        created: service.now(),
        scored,
        includes_usage: stream.includes_usage,
    };
    Ok((request, shape, stream.is_on))
}

/// Parts of a request that its response needs.
struct Shape {
    id: String,
    created: u64,
    scored: bool,
    includes_usage: bool,
}

impl Shape {
    async fn respond(self, service: Arc<Service>, mut texts: Texts) -> Result<Response, ApiError> {
        let finished = texts.finish().await?;
        let of_service = Arc::clone(&service);
        let write = move || {
            let service = &of_service;
            let choices = finished.iter().enumerate().map(|(index, text)| {
                json!({
                    "index": index,
                    "message": { "role": "assistant", "content": text.piece.text, "refusal": null },
                    "logprobs": self.logprobs(service, &text.piece.scores),
                    "finish_reason": text.finish.map(finish_reason),
                })
            });
            let mut response = self.envelope(service, "chat.completion", choices.collect());
            add_usage(service, &mut response, &texts);
            Json(response).into_response()
        };
        service.workers.run(write).await
    }

    fn stream(self, service: Arc<Service>, texts: Texts, count: usize) -> Response {
        let mut has_role = vec![false; count];
        stream_chunks(Arc::clone(&service), texts, move |update, texts| {
            let chunk =
                |choice: usize, delta: Value, scores: &[TokenScore], reason: Option<&str>| {
                    let choice = json!({
                        "index": choice,
                        "delta": delta,
                        "logprobs": self.logprobs(&service, scores).filter(|_| !scores.is_empty()),
                        "finish_reason": reason,
                    });
                    let mut chunk = self.envelope(&service, "chat.completion.chunk", vec![choice]);
                    if self.includes_usage {
                        chunk["usage"] = Value::Null;
                    }
                    chunk
                };
            let mut chunks = Vec::new();
            match update {
                Some(Update::Prompt { choice, .. }) => {
                    has_role[choice] = true;
                    chunks.push(chunk(
                        choice,
                        json!({ "role": "assistant", "content": "" }),
                        &[],
                        None,
                    ));
                }
                Some(Update::Text {
                    choice,
                    piece,
                    activity,
                }) => {
                    let mut chunk = chunk(
                        choice,
                        json!({ "content": piece.text }),
                        &piece.scores,
                        None,
                    );
                    if let Some(activity) = &activity {
                        chunk["powerinfer"] = activity_json(activity);
                    }
                    chunks.push(chunk);
                }
                Some(Update::End {
                    choice,
                    piece,
                    finish,
                }) => {
                    if !piece.text.is_empty() || !piece.scores.is_empty() {
                        chunks.push(chunk(
                            choice,
                            json!({ "content": piece.text }),
                            &piece.scores,
                            None,
                        ));
                    }
                    chunks.push(chunk(choice, json!({}), &[], Some(finish_reason(finish))));
                }
                None if self.includes_usage => {
                    let mut last = self.envelope(&service, "chat.completion.chunk", Vec::new());
                    add_usage(&service, &mut last, texts);
                    chunks.push(last);
                }
                None => {}
            }
            Ok(chunks)
        })
    }

    fn logprobs(&self, service: &Service, scores: &[TokenScore]) -> Option<Value> {
        self.scored
            .then(|| chat_logprobs(&service.tokenizer, scores))
    }

    fn envelope(&self, service: &Service, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": service.name,
            "choices": choices,
        })
    }
}
