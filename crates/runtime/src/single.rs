//! An engine with one session, as a [`LanguageModel`] for evaluation.

use std::ops::{Deref, DerefMut};

use powerinfer_artifact::{Progress, plan::Policy};
use powerinfer_bundle::Bundle;
use powerinfer_model::{LanguageModel, ModelConfig, ModelError};

use crate::{Engine, Execution, RuntimeError, Session, Wanted};

/// An engine and the only session that it runs, for code that takes any [`LanguageModel`].
#[derive(Debug)]
pub struct SingleSession {
    /// The engine.
    pub engine: Engine,
    /// The session.
    pub session: Session,
}

impl SingleSession {
    /// Gives `engine` a session for the context of its plan.
    ///
    /// # Errors
    ///
    /// There is not enough memory for its KV cache.
    pub fn new(mut engine: Engine) -> Result<Self, RuntimeError> {
        let session = engine.new_session(engine.context_limit())?;
        Ok(Self { engine, session })
    }

    /// Opens `bundle` as [`Engine::open`] does.
    ///
    /// # Errors
    ///
    /// The errors of [`Engine::open`].
    pub fn open(
        bundle: Bundle,
        policy: Option<Policy>,
        execution: &Execution,
        progress: &dyn Progress,
    ) -> Result<Self, RuntimeError> {
        Self::new(Engine::open(bundle, policy, execution, progress)?)
    }

    fn run(&mut self, tokens: &[u32], wanted: Wanted) -> Result<Vec<f32>, ModelError> {
        let logits = self.engine.prefill(&mut self.session, tokens, wanted);
        logits.map(<[f32]>::to_vec).map_err(|error| match error {
            RuntimeError::Model(source) => source,
            other => ModelError::Device(other.to_string()),
        })
    }
}

impl Deref for SingleSession {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl DerefMut for SingleSession {
    fn deref_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }
}

impl LanguageModel for SingleSession {
    fn config(&self) -> &ModelConfig {
        &self.engine.model.config
    }

    fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        self.run(tokens, Wanted::All)
    }

    fn forward_last(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        self.run(tokens, Wanted::Last)
    }

    fn reset(&mut self) {
        self.session.truncate(0);
    }

    fn position(&self) -> usize {
        self.session.position()
    }
}
