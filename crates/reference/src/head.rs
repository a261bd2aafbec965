//! Final norm and output head.

use candle_core::Tensor;
use powerinfer_model::{Checkpoint, ModelConfig, ModelError, Weight};

use crate::operations::{failed, linear, load, load_if, norm, soft_cap};

/// Final norm and output head.
#[derive(Debug)]
pub struct Head {
    config: ModelConfig,
    norm: Option<Tensor>,
    norm_bias: Option<Tensor>,
    project_out: Option<Tensor>,
    head: Tensor,
    bias: Option<Tensor>,
}

impl Head {
    /// Loads the weights.
    ///
    /// # Errors
    ///
    /// A weight cannot be read.
    pub fn load(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config = checkpoint.config().clone();
        let weights = config.weights();
        let load_if = |weight| load_if(weights.contains(&weight), checkpoint, weight);
        Ok(Self {
            norm: load_if(Weight::FinalNorm)?,
            norm_bias: load_if(Weight::FinalNormBias)?,
            project_out: load_if(Weight::ProjectOut)?,
            bias: load_if(Weight::HeadBias)?,
            head: load(
                checkpoint,
                if config.tied_embeddings {
                    Weight::Embedding
                } else {
                    Weight::Head
                },
            )?,
            config,
        })
    }

    /// Computes the logits `[tokens, vocabulary]` of the last layer's output.
    ///
    /// # Errors
    ///
    /// `hidden` is not `[tokens, hidden]`.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor, ModelError> {
        self.run(hidden).map_err(failed)
    }

    fn run(&self, hidden: &Tensor) -> candle_core::Result<Tensor> {
        let normed = match &self.norm {
            None => hidden.clone(),
            Some(weight) => norm(&self.config, hidden, weight, self.norm_bias.as_ref())?,
        };
        let narrow = match &self.project_out {
            None => normed,
            Some(project) => linear(&normed, project, None)?,
        };
        let logits = linear(&narrow, &self.head, self.bias.as_ref())?;
        soft_cap(self.config.soft_caps.logits, logits)
    }
}
