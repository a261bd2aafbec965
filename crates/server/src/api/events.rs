//! Streams of server-sent events.

use std::{convert::Infallible, sync::Arc};

use axum::response::{
    IntoResponse, Response,
    sse::{Event, KeepAlive, Sse},
};
use futures_util::stream;
use serde_json::{Value, json};

use super::error::ApiError;
use crate::{
    Service,
    generation::{Texts, Update},
    scheduler::Activity,
};

/// Streams the chunks that `chunks` makes from each update of `texts`, then those it makes at the end, then `[DONE]`. Chunks of
/// prompts may be long, so they are made on a worker.
pub(crate) fn stream_chunks(
    service: Arc<Service>,
    texts: Texts,
    chunks: impl FnMut(Option<Update>, &Texts) -> Result<Vec<Value>, ApiError> + Send + 'static,
) -> Response {
    let start = Some((texts, chunks));
    let events = stream::unfold(start, move |state| {
        let service = Arc::clone(&service);
        async move {
            let (mut texts, mut chunks) = state?;
            let update = texts.next().await;
            let is_prompt = matches!(update, Some(Ok(Update::Prompt { .. })));
            let make = move || {
                let is_end = update.is_none();
                let made = update
                    .transpose()
                    .and_then(|update| chunks(update, &texts))?;
                let events: Vec<_> = made.iter().map(event).collect();
                Ok((events, (!is_end).then_some((texts, chunks))))
            };
            let made = if is_prompt {
                service.workers.run(make).await.flatten()
            } else {
                make()
            };
            // Dropping the texts cancels them.
            let failed = |error: ApiError| (vec![event(&error.body())], None);
            let (mut events, next) = made.unwrap_or_else(failed);
            if next.is_none() {
                events.push(Event::default().data("[DONE]"));
            }
            Some((
                stream::iter(events.into_iter().map(Ok::<_, Infallible>)),
                next,
            ))
        }
    });
    let events = futures_util::StreamExt::flatten(events);
    Sse::new(events)
        .keep_alive(KeepAlive::default())
        .into_response()
}

fn event(chunk: &Value) -> Event {
    Event::default().data(chunk.to_string())
}

/// Active neurons, as an extension of a chunk.
pub(crate) fn activity_json(activity: &Activity) -> Value {
    json!({
        "layers": activity.bins,
        "computed_share": activity.computed_share,
        "bytes_per_token": activity.bytes_per_token,
        "batch": activity.batch,
    })
}
