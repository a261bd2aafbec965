//! The whole model in memory, as a [`LanguageModel`].

use candle_core::Tensor;
use powerinfer_model::{Checkpoint, LanguageModel, ModelConfig, ModelError};

use crate::{Beginning, FfnTap, Head, Layer, NoTap, operations::failed};

/// A dense model without a cache: each call runs the whole sequence again, which is slow and
/// leaves little to get wrong.
#[derive(Debug)]
pub struct ReferenceModel {
    config: ModelConfig,
    beginning: Beginning,
    layers: Vec<Layer>,
    head: Head,
    sequence: Vec<u32>,
}

impl ReferenceModel {
    /// Loads every weight.
    pub fn load(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config = checkpoint.config().clone();
        let layers = (0..config.layer_count)
            .map(|index| Layer::load(checkpoint, index))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            beginning: Beginning::load(checkpoint)?,
            layers,
            head: Head::load(checkpoint)?,
            sequence: Vec::new(),
            config,
        })
    }

    /// Logits of a whole sequence, `[tokens, vocabulary]`, with every FFN going past `tap`.
    pub fn run(&self, tokens: &[u32], tap: &mut dyn FfnTap) -> Result<Tensor, ModelError> {
        let mut hidden = self.beginning.embed(tokens)?;
        for layer in &self.layers {
            hidden = layer.forward(&hidden, tap)?;
        }
        self.head.logits(&hidden)
    }
}

impl LanguageModel for ReferenceModel {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        let asked = self.sequence.len() + tokens.len();
        if asked > self.config.context_length {
            return Err(ModelError::ContextFull {
                asked,
                limit: self.config.context_length,
            });
        }
        if tokens.is_empty() {
            return Ok(Vec::new());
        }
        let sequence = [&self.sequence, tokens].concat();
        let logits = self.run(&sequence, &mut NoTap)?;
        let new = logits
            .narrow(0, self.sequence.len(), tokens.len())
            .and_then(|new| new.flatten_all()?.to_vec1());
        let new = new.map_err(failed)?;
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
