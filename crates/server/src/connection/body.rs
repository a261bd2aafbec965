//! Bodies of requests and responses that record on their connection whether the server waits for the client.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{BoxError, body::Body as AxumBody};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use tokio::time::{Sleep, sleep};

use super::waiting::Connection;

/// Time limit for the body of a request to arrive after its head, no matter what reads it.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// The body of a request did not arrive in time.
#[derive(Debug, thiserror::Error)]
#[error("the body of the request did not arrive in time")]
pub(crate) struct BodyTooSlow;

/// The body of a request; until its end the server waits for the client.
pub(crate) struct ReceivedBody {
    body: Incoming,
    connection: Arc<Connection>,
    deadline: Pin<Box<Sleep>>,
}

impl ReceivedBody {
    /// The body of a request on `connection` whose head has arrived.
    pub(crate) fn new(body: Incoming, connection: Arc<Connection>) -> Self {
        connection.begins(!body.is_end_stream());
        let deadline = Box::pin(sleep(BODY_TIMEOUT));
        Self {
            body,
            connection,
            deadline,
        }
    }
}

impl Body for ReceivedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.deadline.as_mut().poll(context).is_ready() {
            return Poll::Ready(Some(Err(BodyTooSlow.into())));
        }
        let frame = Pin::new(&mut self.body).poll_frame(context);
        frame.map(|frame| frame.map(|frame| frame.map_err(BoxError::from)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for ReceivedBody {
    fn drop(&mut self) {
        self.connection.received();
    }
}

/// The body of a response; after its end the server waits for the next request.
pub(crate) struct AnsweredBody {
    body: AxumBody,
    connection: Arc<Connection>,
}

impl AnsweredBody {
    /// The body of the response to a request on `connection`.
    pub(crate) fn new(body: AxumBody, connection: Arc<Connection>) -> Self {
        Self { body, connection }
    }
}

impl Body for AnsweredBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for AnsweredBody {
    fn drop(&mut self) {
        self.connection.answered();
    }
}
