//! Bodies of requests: the size of each is limited, and the size of all together.

use std::sync::Arc;

use axum::{
    body::{Body, HttpBody},
    extract::{FromRequest, Request},
};
use futures_util::StreamExt;
use tokio::sync::OwnedSemaphorePermit;

use super::error::ApiError;
use crate::{Service, connection::BodyTooSlow};

/// Maximum bytes of a request's body.
const BODY_LIMIT: usize = 10 << 20;

/// Bytes of a body that do not count towards the common limit: whatever some clients send, there is room for small requests of
/// others.
const SMALL_BODY: usize = 64 << 10;

/// Maximum bytes of all bodies together until they have been read, not counting the first [`SMALL_BODY`] of each.
pub(crate) const BODY_BUDGET: usize = 64 << 20;

/// The body of a request, with its share of the budget.
pub(crate) struct RequestBody {
    pub(crate) bytes: Vec<u8>,
    budget: Option<OwnedSemaphorePermit>,
}

impl FromRequest<Arc<Service>> for RequestBody {
    type Rejection = ApiError;

    async fn from_request(
        request: Request<Body>,
        service: &Arc<Service>,
    ) -> Result<Self, ApiError> {
        let body = request.into_body();
        if body.size_hint().lower() > BODY_LIMIT as u64 {
            return Err(ApiError::body_too_large(BODY_LIMIT));
        }
        let mut received = Self {
            bytes: Vec::new(),
            budget: None,
        };
        let mut chunks = body.into_data_stream();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|error| {
                if error.into_inner().is::<BodyTooSlow>() {
                    ApiError::body_too_slow()
                } else {
                    ApiError::invalid("the body of the request ended too early")
                }
            })?;
            received.push(&chunk, service)?;
        }
        Ok(received)
    }
}

impl RequestBody {
    fn push(&mut self, chunk: &[u8], service: &Service) -> Result<(), ApiError> {
        let size = self.bytes.len() + chunk.len();
        if size > BODY_LIMIT {
            return Err(ApiError::body_too_large(BODY_LIMIT));
        }
        let held = self
            .budget
            .as_ref()
            .map_or(0, OwnedSemaphorePermit::num_permits);
        let missing = size.saturating_sub(SMALL_BODY).saturating_sub(held);
        if missing > 0 {
            let budget = Arc::clone(&service.bodies);
            let more = budget.try_acquire_many_owned(missing as u32);
            let more = more.map_err(|_| ApiError::too_many_bodies())?;
            match &mut self.budget {
                Some(budget) => budget.merge(more),
                None => self.budget = Some(more),
            }
        }
        self.bytes.extend_from_slice(chunk);
        Ok(())
    }
}
