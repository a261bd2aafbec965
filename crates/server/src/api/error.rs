//! Errors of a request, as OpenAI's API has them: `{"error": {message, type, param, code}}`.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

/// Maximum characters of a message: some messages repeat a part of the request.
const MAX_MESSAGE: usize = 500;

/// An error of a request.
#[derive(Debug, Clone)]
pub(crate) struct ApiError {
    status: StatusCode,
    message: String,
    /// The parameter that is to blame.
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let mut message = message.into();
        if let Some((end, _)) = message.char_indices().nth(MAX_MESSAGE) {
            message.replace_range(end.., "…");
        }
        Self {
            status,
            message,
            param: None,
            code: None,
        }
    }

    /// The request is wrong.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// The value of `param` is wrong.
    pub(crate) fn invalid_value(param: &str, message: impl std::fmt::Display) -> Self {
        Self {
            param: Some(param.to_owned()),
            code: Some("invalid_value"),
            ..Self::invalid(format!("`{param}`: {message}"))
        }
    }

    /// `param` is part of OpenAI's API, and this server does not support it.
    pub(crate) fn unsupported(param: &str) -> Self {
        Self {
            param: Some(param.to_owned()),
            code: Some("unsupported_parameter"),
            ..Self::invalid(format!("`{param}` is not supported; leave it out"))
        }
    }

    /// No API has a parameter called `param`.
    pub(crate) fn unknown(param: &str) -> Self {
        let end = param.char_indices().nth(MAX_MESSAGE / 2);
        let param = &param[..end.map_or(param.len(), |(end, _)| end)];
        Self {
            param: Some(param.to_owned()),
            code: Some("unknown_parameter"),
            ..Self::invalid(format!("unknown parameter `{param}`; leave it out"))
        }
    }

    /// A prompt does not fit the context: `length` describes its length, and `longer` how to get a longer context.
    pub(crate) fn too_long(length: &str, longer: Option<&str>) -> Self {
        let longer = longer.map_or_else(String::new, |longer| format!(", or {longer}"));
        Self {
            code: Some("context_length_exceeded"),
            ..Self::invalid(format!("the prompt is {length}; shorten it{longer}"))
        }
    }

    /// Another model is served than `asked`.
    pub(crate) fn no_model(asked: &str, served: &str) -> Self {
        Self {
            param: Some("model".to_owned()),
            code: Some("model_not_found"),
            ..Self::new(
                StatusCode::NOT_FOUND,
                format!(
                    "the model `{asked}` is not served here; `{served}` is (`powerinfer serve --alias` sets its name)"
                ),
            )
        }
    }

    /// There is no such path.
    pub(crate) fn no_path(method: &str, path: &str) -> Self {
        let text = match path {
            "/api/embed" | "/api/embeddings" | "/v1/embeddings" => {
                "embeddings are not supported".to_owned()
            }
            "/api/pull" | "/api/push" | "/api/create" | "/api/copy" | "/api/delete" => {
                format!("`{path}` is not supported: models are prepared on the command line")
            }
            _ => format!("`{method} {path}` does not exist in this API"),
        };
        Self::new(StatusCode::NOT_FOUND, text)
    }

    /// The path exists, and takes another method.
    pub(crate) fn no_method(method: &str, path: &str) -> Self {
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            format!("`{path}` does not take `{method}`"),
        )
    }

    /// The key is missing or wrong.
    pub(crate) fn unauthorized() -> Self {
        Self {
            code: Some("invalid_api_key"),
            ..Self::new(
                StatusCode::UNAUTHORIZED,
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
            )
        }
    }

    /// The request comes from a web page of another origin, or names another host.
    pub(crate) fn foreign_origin(origin: &str) -> Self {
        Self::new(
            StatusCode::FORBIDDEN,
            format!(
                "requests of `{origin}` are refused; `powerinfer serve --allow-origin` lets pages of an origin use the API"
            ),
        )
    }

    /// Too many requests wait.
    pub(crate) fn queue_full() -> Self {
        Self {
            code: Some("rate_limit_exceeded"),
            ..Self::new(
                StatusCode::TOO_MANY_REQUESTS,
                "too many requests are waiting; try again in a moment",
            )
        }
    }

    /// The body of the request is too large.
    pub(crate) fn body_too_large(limit: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("the body is larger than {limit} bytes"),
        )
    }

    /// The request took too long to arrive.
    pub(crate) fn body_too_slow() -> Self {
        Self::new(
            StatusCode::REQUEST_TIMEOUT,
            "the body of the request did not arrive in time",
        )
    }

    /// There is no room for the body of the request.
    pub(crate) fn too_many_bodies() -> Self {
        Self::unavailable("too many large requests are arriving; try again in a moment")
    }

    /// There is no connection left for requests that may take long.
    pub(crate) fn too_many_connections() -> Self {
        Self::unavailable("too many connections are open; try again in a moment")
    }

    /// The server cannot do it now.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    /// The server failed.
    pub(crate) fn server(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// The server is stopping.
    pub(crate) fn stopping() -> Self {
        Self::unavailable("the server is stopping")
    }

    /// The body of the response.
    pub(crate) fn body(&self) -> Value {
        let kind = match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::INTERNAL_SERVER_ERROR | StatusCode::SERVICE_UNAVAILABLE => "server_error",
            _ => "invalid_request_error",
        };
        json!({ "error": { "message": self.message, "type": kind, "param": self.param, "code": self.code } })
    }

    /// The body in the shape of Ollama's API.
    pub(crate) fn ollama_body(&self) -> Value {
        // Ollama's name for the parameter.
        let message = self.message.replace("`response_format`", "`format`");
        json!({ "error": message })
    }

    /// The response to a request of `path`, in the shape of that path's API.
    pub(crate) fn at(&self, path: &str) -> Response {
        let is_ollama = path.starts_with("/api/");
        self.respond(&if is_ollama {
            self.ollama_body()
        } else {
            self.body()
        })
    }

    /// The response with `body`.
    pub(crate) fn respond(&self, body: &Value) -> Response {
        let mut response = (self.status, axum::Json(body)).into_response();
        let mut header = |name, value| {
            let headers = response.headers_mut();
            headers.insert(name, HeaderValue::from_static(value));
        };
        match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                header(header::RETRY_AFTER, "1");
            }
            StatusCode::UNAUTHORIZED => header(header::WWW_AUTHENTICATE, "Bearer"),
            _ => {}
        }
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.respond(&self.body())
    }
}
