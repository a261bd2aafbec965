//! The HTTP API: routes, who may use them, and what requests have in common.

mod body;
mod chat;
mod completions;
pub(crate) mod error;
mod events;
mod logprobs;
mod ollama;
mod parameters;
mod plain_words;
mod prompts;
mod request;
mod status;
mod tokens;

use std::{net::Ipv4Addr, sync::Arc};

use axum::{
    Router,
    extract::{DefaultBodyLimit, Request, State},
    http::{HeaderMap, Method, Uri, Version, header},
    middleware::{Next, from_fn_with_state},
    response::{Html, IntoResponse, Response},
    routing::{get, post},
};
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};

use self::error::ApiError;
pub(crate) use self::{body::BODY_BUDGET, parameters::MAX_PROMPT_TOKENS};
use crate::Service;

/// The routes of the server.
pub(crate) fn router(service: Arc<Service>) -> Router {
    let open = Router::new()
        .route("/", get(home))
        .route("/health", get(status::health));
    let guarded = Router::new()
        .route("/v1/models", get(status::models))
        .route("/v1/models/{id}", get(status::model))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/chat/completions", post(chat::completions))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/tokenizer_info", get(tokens::tokenizer_info))
        .route("/metrics", get(status::metrics))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::running))
        .route("/api/version", get(ollama::version))
        .route("/api/show", post(ollama::show))
        .route("/api/generate", post(ollama::generate))
        .route("/api/chat", post(ollama::chat))
        .layer(from_fn_with_state(Arc::clone(&service), check_key));
    let no_path = async |method: Method, uri: Uri| {
        ApiError::no_path(method.as_str(), uri.path()).at(uri.path())
    };
    let no_method = async |method: Method, uri: Uri| {
        ApiError::no_method(method.as_str(), uri.path()).at(uri.path())
    };
    let routes = open
        .merge(guarded)
        .fallback(no_path)
        .method_not_allowed_fallback(no_method)
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn_with_state(Arc::clone(&service), check_origin));
    let routes = match &service.settings.allow_origin {
        None => routes,
        Some(origin) => {
            let origin = match origin.to_str() {
                Ok("*") => AllowOrigin::any(),
                _ => AllowOrigin::exact(origin.clone()),
            };
            let cors = CorsLayer::new()
                .allow_origin(origin)
                .allow_methods(AllowMethods::list([Method::GET, Method::POST]))
                .allow_headers(AllowHeaders::list([
                    header::AUTHORIZATION,
                    header::CONTENT_TYPE,
                ]));
            routes.layer(cors)
        }
    };
    routes.with_state(service)
}

/// The page for browsers; a line for other programs.
async fn home(headers: HeaderMap) -> Response {
    let accepted = headers.get(header::ACCEPT);
    let accepted = accepted.and_then(|value| value.to_str().ok());
    if accepted.is_some_and(|accepted| accepted.contains("text/html")) {
        Html(include_str!("../page.html")).into_response()
    } else {
        "PowerInfer is running; open this address in a browser to chat\n".into_response()
    }
}

/// Refuses requests without the key, if there is one.
async fn check_key(State(service): State<Arc<Service>>, request: Request, next: Next) -> Response {
    if let Some(key) = &service.settings.api_key {
        let given = request.headers().get(header::AUTHORIZATION);
        let given = given.and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        // Digests are compared in constant time.
        let is_right =
            given.is_some_and(|given| blake3::hash(given) == blake3::hash(key.as_bytes()));
        if !is_right {
            return ApiError::unauthorized().at(request.uri().path());
        }
    }
    next.run(request).await
}

/// Refuses what web pages of other origins send: browsers ask before they send JSON, and not before other requests.
async fn check_origin(
    State(service): State<Arc<Service>>,
    request: Request,
    next: Next,
) -> Response {
    if let Err(error) = check_host(&request) {
        return error.at(request.uri().path());
    }
    match foreign_origin(&service, request.headers()) {
        Some(origin) => ApiError::foreign_origin(origin).at(request.uri().path()),
        None => next.run(request).await,
    }
}

/// Refuses a request without a host, which HTTP/1.1 requires, and one with several, since programs differ in which one they use.
fn check_host(request: &Request) -> Result<(), ApiError> {
    let count = request.headers().get_all(header::HOST).iter().count();
    let is_required = request.version() >= Version::HTTP_11;
    match (count, is_required) {
        (0, true) => Err(ApiError::invalid("the request has no `Host` header")),
        (0 | 1, _) => Ok(()),
        _ => Err(ApiError::invalid(format!(
            "the request has {count} `Host` headers; send one"
        ))),
    }
}

/// The origin or host of a request that is neither this server's nor allowed.
fn foreign_origin<'a>(service: &Service, headers: &'a HeaderMap) -> Option<&'a str> {
    let header = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let host = header(header::HOST).unwrap_or_default();
    let allowed = service.settings.allow_origin.as_ref();
    let allowed = allowed.and_then(|origin| origin.to_str().ok());
    if let Some(origin) = header(header::ORIGIN)
        && allowed != Some("*")
        && allowed != Some(origin)
        && origin.split_once("://").is_none_or(|(_, own)| own != host)
    {
        return Some(origin);
    }
    // A name that someone has pointed to the loopback address is not this server's.
    let name = match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => name,
        _ => host,
    };
    let is_own = matches!(name, "localhost" | "")
        || name.starts_with('[')
        || name.parse::<Ipv4Addr>().is_ok();
    (service.is_loopback && !is_own).then_some(host)
}
