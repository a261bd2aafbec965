//! What stands before the first layer and after the last.

use std::collections::{BTreeSet, HashMap};

use candle_core::{Device, Tensor};
use powerinfer_model::{Checkpoint, ModelConfig, ModelError, Positions, Weight};

use crate::operations::{failed, linear, load, norm};

/// Reads a weight that a model may not have.
fn load_if(
    present: bool,
    checkpoint: &Checkpoint,
    weight: Weight,
) -> Result<Option<Tensor>, ModelError> {
    present.then(|| load(checkpoint, weight)).transpose()
}

/// Embeddings and whatever is done to them before the first layer.
#[derive(Debug)]
pub struct Beginning {
    config: ModelConfig,
    /// `[rows, embedding]`.
    table: Tensor,
    /// Which row of the table each token has, where it does not have all.
    rows: Option<HashMap<u32, u32>>,
    project_in: Option<Tensor>,
    positions: Option<Tensor>,
}

impl Beginning {
    /// Loads the weights.
    pub fn load(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        Self::with_table(checkpoint, load(checkpoint, Weight::Embedding)?, None)
    }

    /// Loads what it takes to embed `tokens` and no others.
    pub fn load_for<'a>(
        checkpoint: &Checkpoint,
        tokens: impl IntoIterator<Item = &'a u32>,
    ) -> Result<Self, ModelError> {
        let tokens: BTreeSet<u32> = tokens.into_iter().copied().collect();
        let tokens: Vec<u32> = tokens.into_iter().collect();
        let values = checkpoint.embedding_rows(&tokens)?;
        let shape = (tokens.len(), checkpoint.config().embedding_size);
        let table = Tensor::from_vec(values, shape, &Device::Cpu).map_err(failed)?;
        let rows = tokens.into_iter().zip(0..).collect();
        Self::with_table(checkpoint, table, Some(rows))
    }

    fn with_table(
        checkpoint: &Checkpoint,
        table: Tensor,
        rows: Option<HashMap<u32, u32>>,
    ) -> Result<Self, ModelError> {
        let config = checkpoint.config().clone();
        let projected = config.embedding_size != config.hidden_size;
        let learned = matches!(config.positions, Positions::Learned { .. });
        Ok(Self {
            table,
            rows,
            project_in: load_if(projected, checkpoint, Weight::ProjectIn)?,
            positions: load_if(learned, checkpoint, Weight::Positions)?,
            config,
        })
    }

    /// Embeds a sequence: `[tokens, hidden]`.
    pub fn embed(&self, tokens: &[u32]) -> Result<Tensor, ModelError> {
        let vocabulary = self.config.vocabulary_size;
        let row = |token: &u32| match &self.rows {
            None => (*token as usize).lt(&vocabulary).then_some(*token),
            Some(rows) => rows.get(token).copied(),
        };
        let rows = tokens.iter().map(|token| {
            row(token).ok_or(ModelError::TokenOutside {
                token: *token,
                vocabulary,
            })
        });
        self.run(rows.collect::<Result<_, _>>()?).map_err(failed)
    }

    fn run(&self, rows: Vec<u32>) -> candle_core::Result<Tensor> {
        let count = rows.len();
        let rows = Tensor::from_vec(rows, count, &Device::Cpu)?;
        let scale = f64::from(self.config.embedding_scale);
        let embedded = (self.table.index_select(&rows, 0)? * scale)?;
        let hidden = match &self.project_in {
            None => embedded,
            Some(project) => linear(&embedded, project, None)?,
        };
        match (&self.positions, &self.config.positions) {
            (Some(table), Positions::Learned { offset }) => {
                hidden + table.narrow(0, *offset, count)?
            }
            _ => Ok(hidden),
        }
    }
}

/// The final norm and the head.
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

    /// Logits from the last layer's output: `[tokens, vocabulary]`.
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
        linear(&narrow, &self.head, self.bias.as_ref())
    }
}
