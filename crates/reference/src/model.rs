//! The whole model as a [`LanguageModel`].

use candle_core::Tensor;
use powerinfer_model::{Checkpoint, LanguageModel, ModelConfig, ModelError, check_finite};

use crate::{Embedding, FfnObserver, Head, Layer, NoObserver, operations::failed};

/// Dense model without a KV cache: each call recomputes the whole sequence, which is slow and simple.
#[derive(Debug)]
pub struct ReferenceModel {
    config: ModelConfig,
    embedding: Embedding,
    layers: Vec<Layer>,
    head: Head,
    sequence: Vec<u32>,
}

impl ReferenceModel {
    /// Loads all weights.
    ///
    /// # Errors
    ///
    /// A weight cannot be read.
    pub fn load(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config = checkpoint.config().clone();
        let layers = (0..config.layer_count)
            .map(|index| Layer::load(checkpoint, index))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            embedding: Embedding::load(checkpoint)?,
            layers,
            head: Head::load(checkpoint)?,
            sequence: Vec::new(),
            config,
        })
    }

    /// Computes the logits `[tokens, vocabulary]` of a whole sequence; `observer` observes every FFN.
    ///
    /// # Errors
    ///
    /// A token is outside the vocabulary, or the tensor library or the observer failed.
    pub fn run(
        &self,
        tokens: &[u32],
        observer: &mut dyn FfnObserver,
    ) -> Result<Tensor, ModelError> {
        let mut hidden = self.embedding.embed(tokens)?;
        for layer in &self.layers {
            hidden = layer.forward(&hidden, observer)?;
        }
        self.head.logits(&hidden)
    }
}

impl LanguageModel for ReferenceModel {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        let length = self.sequence.len() + tokens.len();
        if length > self.config.context_length {
            return Err(ModelError::ContextFull {
                tokens: length,
                limit: self.config.context_length,
            });
        }
        if tokens.is_empty() {
            return Ok(Vec::new());
        }
        let sequence = [&self.sequence, tokens].concat();
        let logits = self.run(&sequence, &mut NoObserver)?;
        let new = logits
            .narrow(0, self.sequence.len(), tokens.len())
            .and_then(|new| new.flatten_all()?.to_vec1());
        let new: Vec<f32> = new.map_err(failed)?;
        check_finite(&new)?;
        self.sequence = sequence;
        Ok(new)
    }

    fn reset(&mut self) {
        self.sequence.clear();
    }

    fn position(&self) -> usize {
        self.sequence.len()
    }
}
