//! The tokens that run through the layers together, and their vectors.

use crate::{Session, input::InputBuffers, model::Model, observer::Observers};

/// Some tokens on their way through the layers: one of each session but the last, and the remaining ones of the last.
pub(crate) struct Pass<'a, 's> {
    pub(crate) model: &'a Model,
    pub(crate) sessions: &'a mut [&'s mut Session],
    pub(crate) tokens: &'a [u32],
    /// Number of logits of the last token among which to find the largest; an executor that finds it sets this to `None`.
    pub(crate) search: Option<usize>,
    pub(crate) observers: &'a mut Observers,
    pub(crate) buffers: &'a mut PassBuffers,
}

impl Pass<'_, '_> {
    /// Tokens of session `index`.
    pub(crate) fn tokens_of(&self, index: usize) -> usize {
        match self.sessions.len() - 1 {
            last if index == last => self.tokens.len() - last,
            _ => 1,
        }
    }
}

/// The vectors of a [`Pass`], reused from one to the next.
#[derive(Debug, Default)]
pub(crate) struct PassBuffers {
    /// `[tokens]`.
    pub(crate) positions: Vec<usize>,
    /// Sine and cosine of each rotary pair, `[tables, tokens, pairs]`; empty if the model has no rotary embedding.
    pub(crate) rotations: Vec<[f32; 2]>,
    /// The residual stream, `[tokens, hidden]`.
    pub(crate) hidden: Vec<f32>,
    /// Rows of the embedding, `[tokens, embedding]`, and their rounded form for a projection.
    pub(crate) embedded: Vec<f32>,
    pub(crate) input: InputBuffers,
}
