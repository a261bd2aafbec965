//! What the requests of all APIs have in common.

use std::{
    sync::Arc,
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use powerinfer_text::{ChatTemplate, GenerationPrompt, Message, SpecialTokens};
use serde::Deserialize;
use serde_json::Value;

use super::{
    error::ApiError,
    parameters::{OneOrMany, Parameters},
};
use crate::{
    Service,
    generation::{TextFormat, TextRequest},
};

/// Bytes of a token, at most: a text that cannot fit the context is not encoded.
const MAX_TOKEN_BYTES: usize = 256;

/// Stop strings of a request, at most.
const MAX_STOPS: usize = 32;

/// The format of a chat's answer.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ResponseFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: NamedSchema },
}

#[derive(Debug, Deserialize)]
struct NamedSchema {
    schema: Option<Value>,
}

impl Service {
    /// Refuses a model that is not served; a request without one means the one that is.
    pub(crate) fn take_model(&self, parameters: &mut Parameters) -> Result<(), ApiError> {
        match parameters.take::<String>("model")? {
            // Ollama's clients add a tag.
            Some(asked) if asked.strip_suffix(":latest").unwrap_or(&asked) != self.name => {
                Err(ApiError::no_model(&asked, &self.name))
            }
            _ => Ok(()),
        }
    }

    /// Takes how text is sampled and where it ends; prompts and lengths are the caller's.
    pub(crate) fn take_text_request(
        &self,
        parameters: &mut Parameters,
    ) -> Result<TextRequest, ApiError> {
        let has_seed = parameters.has("seed");
        let stops: Option<OneOrMany<String>> = parameters.take("stop")?;
        let stops = stops.map(OneOrMany::into_vec).unwrap_or_default();
        if stops.len() > MAX_STOPS || stops.iter().any(String::is_empty) {
            let message = format!("at most {MAX_STOPS} texts, none of them empty");
            return Err(ApiError::invalid_value("stop", message));
        }
        let format = match parameters.take("response_format")? {
            None | Some(ResponseFormat::Text) => TextFormat::Text,
            Some(ResponseFormat::JsonObject) => TextFormat::JsonObject,
            Some(ResponseFormat::JsonSchema { json_schema }) => match json_schema.schema {
                Some(schema) => TextFormat::JsonSchema(schema),
                None => {
                    return Err(ApiError::invalid_value(
                        "response_format",
                        "there is no `schema`",
                    ));
                }
            },
        };
        Ok(TextRequest {
            prompts: Vec::new(),
            texts_each: 1,
            sampling: parameters.sampling(&self.sampling)?,
            has_seed,
            max_tokens: None,
            stops,
            ignores_stop_tokens: parameters.take("ignore_eos")?.unwrap_or(false),
            top_logprobs: None,
            prompt_logprobs: None,
            format,
            activity: parameters.take("activity")?.unwrap_or(false),
        })
    }

    /// The tokens of `text`, encoded on a thread that may block.
    pub(crate) async fn encode(
        self: &Arc<Self>,
        text: String,
        special: SpecialTokens,
    ) -> Result<Vec<u32>, ApiError> {
        let most = self.context.saturating_mul(MAX_TOKEN_BYTES);
        if text.len() > most {
            return Err(ApiError::too_long_text(text.len(), self.context));
        }
        let tokenizer = Arc::clone(&self.tokenizer);
        let encode = move || tokenizer.encode(&text, special);
        let encoded = tokio::task::spawn_blocking(encode).await;
        match encoded {
            Ok(Ok(ids)) => Ok(ids),
            Ok(Err(error)) => Err(ApiError::invalid_value("prompt", error)),
            Err(_) => Err(ApiError::server("the tokenizer failed on this text")),
        }
    }

    /// The prompt that continues a conversation.
    pub(crate) async fn encode_chat(
        self: &Arc<Self>,
        messages: Vec<Message>,
    ) -> Result<Vec<u32>, ApiError> {
        let service = Arc::clone(self);
        let render = move || {
            let template = service.chat_template()?;
            let rendered = template.render(&messages, GenerationPrompt::Add);
            rendered.map_err(|error| ApiError::invalid_value("messages", error))
        };
        let rendered = tokio::task::spawn_blocking(render).await;
        let text = rendered.map_err(|_| ApiError::server("the chat template failed"))??;
        self.encode(text, SpecialTokens::Omit).await
    }

    /// The chat template, which a conversation needs.
    pub(crate) fn chat_template(&self) -> Result<&ChatTemplate, ApiError> {
        self.tokenizer.chat_template().ok_or_else(|| {
            ApiError::invalid(
                "the model has no chat template; use `/v1/completions`, which continues a text",
            )
        })
    }

    /// An id of a response.
    pub(crate) fn new_id(&self, prefix: &str) -> String {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}-{:x}-{count}", self.started)
    }

    /// Seconds since 1970.
    pub(crate) fn now(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        since.map_or(self.started, |since| since.as_secs())
    }
}
