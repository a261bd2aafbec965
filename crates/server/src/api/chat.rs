//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use powerinfer_text::Message;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    completions::{MAX_LOGPROBS, Streaming, add_usage, finish_reason},
    error::ApiError,
    events::{activity_json, stream_chunks},
    logprobs::chat_logprobs,
    parameters::Parameters,
};
use crate::{
    Service,
    choice::TokenScore,
    generation::{Texts, Update},
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

/// A message of a request.
#[derive(Debug, Deserialize)]
pub(crate) struct MessageParameter {
    role: String,
    content: Option<Content>,
    tool_calls: Option<Value>,
    function_call: Option<Value>,
    images: Option<Vec<Value>>,
}

/// Text, or parts that are put together.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

impl MessageParameter {
    /// The message, which must be text.
    pub(crate) fn into_message(self) -> Result<Message, ApiError> {
        let unsupported = |what: &str| {
            Err(ApiError::invalid_value(
                "messages",
                format!("{what} are not supported, only text is"),
            ))
        };
        if self.tool_calls.is_some_and(|calls| !calls.is_null())
            || self.function_call.is_some_and(|call| !call.is_null())
        {
            return unsupported("calls of tools");
        }
        if self.images.is_some_and(|images| !images.is_empty()) {
            return unsupported("images");
        }
        let content = match self.content {
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => {
                let mut texts = Vec::new();
                for part in parts {
                    match part.text {
                        Some(text) if part.kind == "text" => texts.push(text),
                        _ => return unsupported(&format!("parts of type `{}`", part.kind)),
                    }
                }
                texts.concat()
            }
            None => {
                return Err(ApiError::invalid_value(
                    "messages",
                    "a message has no `content`",
                ));
            }
        };
        Ok(Message {
            // The reference's newer name; templates know the older one.
            role: match self.role.as_str() {
                "developer" => "system".to_owned(),
                _ => self.role,
            },
            content,
        })
    }
}

pub(crate) async fn completions(
    State(service): State<Arc<Service>>,
    mut parameters: Parameters,
) -> Result<Response, ApiError> {
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
    let top_logprobs = parameters.take_within("top_logprobs", 0..=MAX_LOGPROBS)?;
    if top_logprobs.is_some() && !scored {
        return Err(ApiError::invalid_value(
            "top_logprobs",
            "`logprobs` is not true",
        ));
    }
    let stream = Streaming::take(&mut parameters)?;
    let mut request = service.take_text_request(&mut parameters)?;
    request.texts_each = parameters.take_within("n", 1..=MAX_TEXTS)?.unwrap_or(1);
    let older = parameters.take_within("max_tokens", 1..=usize::MAX)?;
    request.max_tokens = parameters
        .take_within("max_completion_tokens", 1..=usize::MAX)?
        .or(older);
    request.top_logprobs = scored.then_some(top_logprobs.unwrap_or(0));
    parameters.finish()?;
    request.prompts = vec![service.encode_chat(messages).await?];
    let shape = Shape {
        id: service.new_id("chatcmpl"),
        created: service.now(),
        scored,
        includes_usage: stream.includes_usage,
    };
    let texts = Texts::start(&service, &request, stream.is_on)?;
    match stream.is_on {
        true => Ok(shape.stream(service, texts, request.texts_each)),
        false => shape.respond(&service, texts).await,
    }
}

/// What a response needs of its request.
struct Shape {
    id: String,
    created: u64,
    scored: bool,
    includes_usage: bool,
}

impl Shape {
    async fn respond(self, service: &Service, mut texts: Texts) -> Result<Response, ApiError> {
        let finished = texts.finish().await?;
        let choices = finished.iter().enumerate().map(|(index, text)| {
            json!({
                "index": index,
                "message": { "role": "assistant", "content": text.piece.text, "refusal": null },
                "logprobs": self.logprobs(service, &text.piece.scores),
                "finish_reason": text.finish.map(finish_reason),
            })
        });
        let mut response = self.envelope(service, "chat.completion", choices.collect());
        add_usage(&mut response, &texts);
        Ok(Json(response).into_response())
    }

    fn stream(self, service: Arc<Service>, texts: Texts, count: usize) -> Response {
        let mut has_role = vec![false; count];
        stream_chunks(texts, move |update, texts| {
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
                    add_usage(&mut last, texts);
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
