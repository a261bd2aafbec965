//! Source of an export: a checkpoint or a bundle.

use std::ops::Range;

use powerinfer_bundle::Bundle;
use powerinfer_model::{Checkpoint, Files, ModelConfig, Weight};

use crate::ExportError;

/// Model to export; weights have the checkpoint's layout and order.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// A checkpoint.
    Checkpoint(&'a Checkpoint),
    /// A bundle, whose weights are dequantised.
    Bundle(&'a Bundle),
}

impl Source<'_> {
    /// Returns the model's configuration.
    pub fn config(&self) -> &ModelConfig {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.config(),
            Self::Bundle(bundle) => bundle.config(),
        }
    }

    /// Returns the name of the model.
    pub fn name(&self) -> &str {
        match self {
            Self::Checkpoint(checkpoint) => &checkpoint.identity().name,
            Self::Bundle(bundle) => &bundle.header().model.name,
        }
    }

    /// Returns the files next to the weights.
    pub(crate) fn files(&self) -> Files {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.files().clone(),
            Self::Bundle(bundle) => bundle.files(),
        }
    }

    /// Reads a weight.
    pub(crate) fn read(&self, weight: Weight) -> Result<Vec<f32>, ExportError> {
        Ok(match self {
            Self::Checkpoint(checkpoint) => checkpoint.read(weight)?,
            Self::Bundle(bundle) => bundle.read(weight)?,
        })
    }

    /// Reads a weight and pads it with zeros to `shape`.
    pub(crate) fn read_padded(
        &self,
        weight: Weight,
        shape: &[usize],
    ) -> Result<Vec<f32>, ExportError> {
        let mut values = self.read(weight)?;
        let own = self.config().shape(weight);
        if let ([_, own], [_, columns]) = (&own[..], shape)
            && own != columns
        {
            let rows = values.chunks_exact(*own);
            let padding = vec![0.0; columns - own];
            values = rows
                .flat_map(|row| row.iter().chain(&padding))
                .copied()
                .collect();
        }
        values.resize(shape.iter().product(), 0.0);
        Ok(values)
    }

    /// Reads a range of a weight's rows.
    pub(crate) fn read_rows(
        &self,
        weight: Weight,
        rows: Range<usize>,
    ) -> Result<Vec<f32>, ExportError> {
        Ok(match self {
            Self::Checkpoint(checkpoint) => checkpoint.read_rows(weight, rows)?,
            Self::Bundle(bundle) => bundle.read_rows(weight, rows)?,
        })
    }
}
