//! Tensors of a predictor file: their names and locations.

use std::ops::Range;

use powerinfer_tensor::SignMatrix;

use crate::{TensorFile, matrix_planes::StoredMatrix};

/// Name of a layer's tensor `a`, `b`, `bias`, `units` or `unit_scales`.
pub fn tensor_name(layer: usize, tensor: &str) -> String {
    format!("layers.{layer}.predictor.{tensor}")
}

/// Name of the tensor with the gate signs of a layer.
pub fn signs_name(layer: usize) -> String {
    format!("layers.{layer}.sign_bit.signs")
}

/// Names of the tensors of a layer's [`ScoreVectors`], in field order.
pub fn score_names(layer: usize) -> [String; 4] {
    ["gate_scale", "contribution_scale", "centre", "offset"]
        .map(|vector| format!("layers.{layer}.threshold.{vector}"))
}

/// Vectors from which the scores of a layer's neurons are computed; `[neurons]` except for `offset`.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoreVectors {
    /// `‖down_i‖·rms(up_i·x)`.
    pub gate_scale: Vec<f32>,
    /// `‖down_i‖`.
    pub contribution_scale: Vec<f32>,
    /// `c_i`, the median activation of the neuron.
    pub centre: Vec<f32>,
    /// `Σ c_i·down_i`, `[hidden]`: what the skipped neurons add if all are skipped.
    pub offset: Vec<f32>,
}

/// Location of a network in a predictor file.
#[derive(Debug, Clone)]
pub struct StoredPredictor {
    /// `[rank, hidden]`.
    pub a: StoredMatrix,
    /// `[neurons, rank]`.
    pub b: StoredMatrix,
    /// `[neurons]`.
    pub bias: StoredMatrix,
}

/// Network of a bundle, with B transposed.
#[derive(Debug, Clone)]
pub struct StoredUnits {
    /// `[rank, hidden]`.
    pub a: StoredMatrix,
    /// `[rank, neurons]`.
    pub units: StoredMatrix,
    /// `[blocks, neurons]`; empty for formats without block scales.
    pub scales: Vec<f32>,
    /// `[neurons]`.
    pub bias: Vec<f32>,
}

/// Location of the gate signs of a layer.
#[derive(Debug, Clone)]
pub struct StoredSigns {
    /// Byte range within the file.
    pub(super) range: Range<usize>,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl StoredSigns {
    /// Returns the signs as a view of `file`, the file they were found in.
    ///
    /// # Panics
    ///
    /// If `file` is another file than the one the signs were found in.
    pub fn view<'a>(&self, file: &'a TensorFile) -> SignMatrix<'a> {
        let bytes = &file.bytes()[self.range.clone()];
        SignMatrix::new(bytes, self.rows, self.columns).expect("the shape was checked")
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.range.len()
    }
}
