//! `/health`, `/v1/models` and `/metrics`.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Path, State},
    http::header,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::error::ApiError;
use crate::Service;

pub(crate) async fn health(State(service): State<Arc<Service>>) -> Json<Value> {
    Json(json!({
        "status": "ok",
        "model": service.name,
        "context_length": service.context,
        "parallel": service.parallel,
        "batching": if service.batches { "continuous" } else { "one request at a time: the plan has a part on a GPU" },
        "running": service.metrics.running(),
        "waiting": service.engine.queued(),
    }))
}

pub(crate) async fn models(State(service): State<Arc<Service>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [describe(&service)] }))
}

pub(crate) async fn model(
    State(service): State<Arc<Service>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    service.check_model(&id)?;
    Ok(Json(describe(&service)))
}

fn describe(service: &Service) -> Value {
    json!({
        "id": service.name,
        "object": "model",
        "created": service.started,
        "owned_by": "powerinfer",
        "max_model_len": service.context,
        "powerinfer": service.about,
        "has_chat_template": service.tokenizer.chat_template().is_some(),
    })
}

pub(crate) async fn metrics(State(service): State<Arc<Service>>) -> Response {
    let text = service.metrics.encode(service.engine.queued());
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (kind, text).into_response()
}
