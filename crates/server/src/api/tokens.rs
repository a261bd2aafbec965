//! `/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM has them; llama.cpp's names of the fields work too.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use powerinfer_text::{SpecialText, SpecialTokens};
use serde_json::{Value, json};

use super::{MAX_PROMPT_TOKENS, body::RequestBody, error::ApiError, parameters::Parameters};
use crate::Service;

pub(crate) async fn tokenize(
    State(service): State<Arc<Service>>,
    body: RequestBody,
) -> Result<Response, ApiError> {
    service.prepare(body, tokens_of).await
}

fn tokens_of(service: &Service, mut parameters: Parameters) -> Result<Response, ApiError> {
    service.take_model(&mut parameters)?;
    let prompt: Option<String> = parameters.take("prompt")?;
    let content: Option<String> = parameters.take("content")?;
    let adds: Option<bool> = parameters.take("add_special_tokens")?;
    let llama_adds: Option<bool> = parameters.take("add_special")?;
    let is_llama = prompt.is_none() && content.is_some();
    let Some(text) = prompt.or(content) else {
        return Err(ApiError::invalid_value("prompt", "there is no text"));
    };
    // vLLM adds special tokens unless asked not to, llama.cpp only if asked to.
    let special = if adds.or(llama_adds).unwrap_or(!is_llama) {
        SpecialTokens::Add
    } else {
        SpecialTokens::Omit
    };
    parameters.ignore(&["return_token_strs", "with_pieces", "parse_special"]);
    parameters.finish()?;
    let ids = service.encode(&text, special)?;
    let response = json!({ "tokens": ids, "count": ids.len(), "max_model_len": service.context });
    Ok(Json(response).into_response())
}

pub(crate) async fn detokenize(
    State(service): State<Arc<Service>>,
    body: RequestBody,
) -> Result<Response, ApiError> {
    service.prepare(body, text_of).await
}

fn text_of(service: &Service, mut parameters: Parameters) -> Result<Response, ApiError> {
    service.take_model(&mut parameters)?;
    let ids: Vec<u32> = parameters.take("tokens")?.unwrap_or_default();
    parameters.finish()?;
    if ids.len() > MAX_PROMPT_TOKENS {
        let message = format!("at most {MAX_PROMPT_TOKENS} at a time");
        return Err(ApiError::invalid_value("tokens", message));
    }
    let text = service.tokenizer.decode(&ids, SpecialText::Keep);
    let text = text.map_err(|error| ApiError::invalid_value("tokens", error))?;
    Ok(Json(json!({ "prompt": text, "content": text })).into_response())
}

pub(crate) async fn tokenizer_info(State(service): State<Arc<Service>>) -> Json<Value> {
    let tokenizer = &service.tokenizer;
    let [bos, eos] = [tokenizer.bos(), tokenizer.eos()].map(|token| token.map(|token| &token.text));
    let added = tokenizer.encode("", SpecialTokens::Add).unwrap_or_default();
    Json(json!({
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": eos,
        "add_bos_token": tokenizer.bos().is_some_and(|bos| added.first() == Some(&bos.id)),
        "chat_template": tokenizer.chat_template().map(|template| template.source()),
        "vocab_size": tokenizer.vocabulary_size(),
        "model_max_length": service.context,
    }))
}
