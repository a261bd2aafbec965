//! A bundle's weights as the checkpoint had them: one row per output, neurons in the checkpoint's order.

use std::ops::Range;

use powerinfer_model::{LayerWeight, Weight};

use crate::{
    Bundle, BundleError, Layout,
    weights::{Finder, neuron_order},
};

impl Bundle {
    /// Reads the checkpoint's index of each neuron of `layer`, hottest first.
    ///
    /// # Errors
    ///
    /// The tensor is missing or no permutation.
    pub fn neuron_order(&self, layer: usize) -> Result<Vec<u32>, BundleError> {
        neuron_order(self.weights(), self.config(), layer)
    }

    /// Reads a weight, dequantised, in the layout and order of the checkpoint.
    ///
    /// # Errors
    ///
    /// A tensor is missing or has another type or shape.
    pub fn read(&self, weight: Weight) -> Result<Vec<f32>, BundleError> {
        let finder = Finder::new(self.weights(), self.config(), self.quant());
        let layout = finder.layout(weight);
        let stored = finder.matrix_as(weight, layout)?;
        let view = stored.view(self.weights());
        let shape = self.config().shape(weight);
        let width = if shape.len() > 1 { shape[1] } else { 1 };
        let order = match weight {
            Weight::Layer(layer, weight) if is_of_neurons(weight) => {
                Some(self.neuron_order(layer)?)
            }
            _ => None,
        };
        let neuron = |index: usize| order.as_ref().map_or(index, |order| order[index] as usize);
        let mut values = vec![0.0; shape.iter().product()];
        let mut row_values = vec![0.0; view.columns()];
        for row in 0..view.rows() {
            view.dequantise_row(row, &mut row_values);
            for (column, value) in row_values.iter().enumerate() {
                let (output, input) = match (layout, shape.len()) {
                    (_, 1) => (column, 0), // a vector is stored as one row
                    (Layout::ByOutput, _) => (row, column),
                    (Layout::ByInput, _) => (column, row),
                };
                let (output, input) = match weight {
                    Weight::Layer(_, LayerWeight::Down) => (output, neuron(input)),
                    _ => (neuron(output), input),
                };
                values[output * width + input] = *value;
            }
        }
        Ok(values)
    }

    /// Reads a range of a weight's rows, as [`read`](Self::read) does.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn read_rows(&self, weight: Weight, rows: Range<usize>) -> Result<Vec<f32>, BundleError> {
        let finder = Finder::new(self.weights(), self.config(), self.quant());
        let width = self.config().shape(weight).last().copied().unwrap_or(1);
        let is_layers = matches!(weight, Weight::Layer(..));
        if is_layers || self.config().shape(weight).len() == 1 {
            let values = self.read(weight)?;
            let width = values.len() / self.config().shape(weight)[0];
            return Ok(values[rows.start * width..rows.end * width].to_vec());
        }
        let stored = finder.matrix_as(weight, Layout::ByOutput)?;
        let view = stored.view(self.weights());
        let mut values = vec![0.0; rows.len() * width];
        for (row, values) in rows.zip(values.chunks_exact_mut(width)) {
            view.dequantise_row(row, values);
        }
        Ok(values)
    }
}

/// Whether a weight has a row, a column or an element per neuron.
fn is_of_neurons(weight: LayerWeight) -> bool {
    use LayerWeight::{Down, Gate, GateBias, Up, UpBias};
    matches!(weight, Gate | GateBias | Up | UpBias | Down)
}
