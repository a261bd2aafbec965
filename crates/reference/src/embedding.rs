//! Embedding of tokens.

use std::collections::{BTreeSet, HashMap};

use candle_core::{Device, Tensor};
use powerinfer_model::{Checkpoint, ModelConfig, ModelError, Positions, Weight};

use crate::operations::{failed, linear, load, load_if};

/// Embedding of tokens: the table, its scale and projection, and learned positions.
#[derive(Debug)]
pub struct Embedding {
    config: ModelConfig,
    /// `[rows, embedding]`.
    table: Tensor,
    /// Row of each token, if the table has only some tokens.
    rows: Option<HashMap<u32, u32>>,
    project_in: Option<Tensor>,
    positions: Option<Tensor>,
}

impl Embedding {
    /// Loads the weights.
    ///
    /// # Errors
    ///
    /// A weight cannot be read.
    pub fn load(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        Self::with_table(checkpoint, load(checkpoint, Weight::Embedding)?, None)
    }

    /// Loads the weights, with the rows of `tokens` alone.
    ///
    /// # Errors
    ///
    /// A weight cannot be read, or a token is outside the vocabulary.
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

    /// Embeds a sequence: returns `[tokens, hidden]`.
    ///
    /// # Errors
    ///
    /// A token is outside the vocabulary or was not loaded.
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
