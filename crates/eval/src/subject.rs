//! The model that an evaluation runs.

use powerinfer_model::{LanguageModel, ModelConfig, ModelError};
use powerinfer_reference::ReferenceModel;
use powerinfer_runtime::{SingleSession, Statistics};

/// A model that is evaluated.
#[derive(Debug)]
pub enum Subject {
    /// A bundle on an engine.
    Engine(Box<SingleSession>),
    /// A checkpoint, computed densely in float32.
    Reference(Box<ReferenceModel>),
}

impl Subject {
    /// Tokens that there is room for.
    pub fn context_limit(&self) -> usize {
        match self {
            Self::Engine(model) => model.context_limit(),
            Self::Reference(model) => model.config().context_length,
        }
    }

    /// Share of FFN neurons that were computed since the last call.
    pub fn computed_share(&mut self) -> f64 {
        self.take_statistics()
            .map_or(1.0, |found| found.computed_share())
    }

    /// Counts since the last call; none for a reference, which computes everything.
    pub fn take_statistics(&mut self) -> Option<Statistics> {
        match self {
            Self::Engine(model) => Some(model.observers_mut().take_statistics()),
            Self::Reference(_) => None,
        }
    }

    fn inner(&mut self) -> &mut dyn LanguageModel {
        match self {
            Self::Engine(model) => &mut **model,
            Self::Reference(model) => &mut **model,
        }
    }
}

impl LanguageModel for Subject {
    fn config(&self) -> &ModelConfig {
        match self {
            Self::Engine(model) => model.config(),
            Self::Reference(model) => model.config(),
        }
    }

    fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        self.inner().forward(tokens)
    }

    fn forward_last(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        self.inner().forward_last(tokens)
    }

    fn reset(&mut self) {
        self.inner().reset();
    }

    fn position(&self) -> usize {
        match self {
            Self::Engine(model) => model.position(),
            Self::Reference(model) => model.position(),
        }
    }
}
