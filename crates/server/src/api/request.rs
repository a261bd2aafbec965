//! Parts that the requests of all APIs have in common.

use std::{
    sync::Arc,
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use powerinfer_text::{GenerationPrompt, Message, SpecialTokens, TextError};
use serde::Deserialize;
use serde_json::Value;

use super::{
    body::RequestBody,
    error::ApiError,
    parameters::{Parameters, Texts},
};
use crate::{
    Service,
    generation::{TextFormat, TextRequest},
    stops::StopStrings,
};

/// Bytes of a token, at most: a text that cannot fit the context is not encoded.
const MAX_TOKEN_BYTES: usize = 256;

/// Stop strings of a request, at most.
const MAX_STOPS: usize = 32;

/// Maximum bytes of JSON of all stop strings.
const MAX_STOP_BYTES: usize = 16 << 10;

/// Maximum bytes of JSON of a schema.
pub(super) const MAX_SCHEMA_BYTES: usize = 64 << 10;

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
    /// Reads the parameters of a request on a worker, which may also encode texts.
    pub(crate) async fn prepare<T: Send + 'static>(
        self: &Arc<Self>,
        body: RequestBody,
        prepare: impl FnOnce(&Self, Parameters) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let service = Arc::clone(self);
        let work = move || prepare(&service, Parameters::parse(&body.bytes)?);
        self.workers.run(work).await?
    }

    /// Refuses a model that is not served; a request without one means the one that is.
    pub(crate) fn take_model(&self, parameters: &mut Parameters) -> Result<(), ApiError> {
        match parameters.take::<String>("model")? {
            Some(asked) => self.check_model(&asked),
            None => Ok(()),
        }
    }

    /// Refuses a model that is not served. Accepts the tag that Ollama's clients add to a name, and the ending `.powerinfer` of folders.
    pub(crate) fn check_model(&self, asked: &str) -> Result<(), ApiError> {
        let untagged = asked.strip_suffix(":latest").unwrap_or(asked);
        let bare = untagged.strip_suffix(".powerinfer").unwrap_or(untagged);
        if [asked, untagged, bare].contains(&self.name.as_str()) {
            Ok(())
        } else {
            Err(ApiError::no_model(asked, &self.name))
        }
    }

    /// Takes how text is sampled and where it ends; prompts and lengths are the caller's.
    pub(crate) fn take_text_request(
        &self,
        parameters: &mut Parameters,
    ) -> Result<TextRequest, ApiError> {
        let has_seed = parameters.has("seed");
        let stops = parameters.take_sized("stop", MAX_STOP_BYTES)?;
        let Texts(stops) = stops.unwrap_or(Texts(Vec::new()));
        if stops.len() > MAX_STOPS || stops.iter().any(String::is_empty) {
            let message = format!("at most {MAX_STOPS} texts, none of them empty");
            return Err(ApiError::invalid_value("stop", message));
        }
        let format = match parameters.take_sized("response_format", MAX_SCHEMA_BYTES)? {
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
            continues: false,
            texts_each: 1,
            sampling: parameters.sampling(&self.sampling, self.vocabulary)?,
            has_seed,
            max_tokens: None,
            stops: Arc::new(StopStrings::new(stops)),
            ignores_stop_tokens: parameters.take("ignore_eos")?.unwrap_or(false),
            top_logprobs: None,
            prompt_logprobs: None,
            format,
            activity: parameters.take("activity")?.unwrap_or(false),
        })
    }

    /// The tokens of `text`. This takes time: call it on a worker.
    pub(crate) fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, ApiError> {
        self.check_size(text.len())?;
        let encoded = self.tokenizer.encode(text, special);
        encoded.map_err(|error| ApiError::invalid_value("prompt", error))
    }

    /// The prompt that continues a conversation. This takes time: call it on a worker.
    pub(crate) fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, ApiError> {
        if self.tokenizer.chat_template().is_none() {
            return Err(ApiError::invalid(
                "the model has no chat template; use `/v1/completions` or `/api/generate`, which continue a text",
            ));
        }
        self.check_size(messages.iter().map(|message| message.content.len()).sum())?;
        let tokens = self.settings.message_tokens;
        let chat = self
            .tokenizer
            .render_chat(messages, GenerationPrompt::Add, tokens);
        let chat = chat.map_err(|error| match error {
            TextError::TemplateWorker { .. } => ApiError::unavailable(error.to_string()),
            error => ApiError::invalid_value("messages", error),
        })?;
        self.check_size(chat.size())?;
        let encoded = self.tokenizer.encode_chat(&chat);
        encoded.map_err(|error| ApiError::invalid_value("messages", error))
    }

    /// Refuses a text with so many bytes that its tokens cannot fit the context.
    fn check_size(&self, bytes: usize) -> Result<(), ApiError> {
        if bytes <= self.context.saturating_mul(MAX_TOKEN_BYTES) {
            Ok(())
        } else {
            let length = format!(
                "{bytes} bytes long, more than the context's {} tokens",
                self.context
            );
            Err(ApiError::too_long(&length, self.longer_context()))
        }
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
