//! Quality of predictors on held-out tokens, as stored in the header.

use serde::{Deserialize, Serialize};

use crate::threshold_curve::ThresholdCurve;

/// Size of a layer's predictor and its quality on held-out tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PredictorSummary {
    /// Index of the layer.
    pub layer: usize,
    /// Number of hidden units; 0 if the layer has no predictor.
    pub rank: usize,
    /// Whether the hidden units are `A · x`, without ReLU.
    #[serde(default)]
    pub is_linear: bool,
    /// Optimiser steps of training; 0 if the predictor was only calculated, or imported.
    #[serde(default)]
    pub steps: u64,
    /// A neuron is computed if its logit is at least this.
    pub threshold: f32,
    /// Bytes of A, B and b.
    pub bytes: u64,
    /// Held-out share of active neurons that were predicted.
    pub recall: f64,
    /// Share of the contribution `|h_i|·‖down_i‖` of active neurons that predicted ones cover, on held-out
    /// tokens; `None` if contributions were not sampled.
    #[serde(default)]
    pub contribution_recall: Option<f64>,
    /// Held-out share of predicted neurons that were active.
    pub precision: f64,
    /// Held-out share of neurons that were not predicted.
    pub predicted_sparsity: f64,
    /// Held-out share of neurons that were not active.
    pub sparsity: f64,
    /// Number of held-out tokens.
    pub held_out_tokens: u64,
    /// Quality of sign-bit prediction, if calibrated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sign_bit: Option<SignBitSummary>,
    /// Threshold curves, if calibrated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub thresholds: Vec<ThresholdCurve>,
}

/// Calibration and held-out quality of sign-bit prediction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SignBitSummary {
    /// A neuron is computed if at least this many signs of its gate row and the input agree.
    pub agreements: u32,
    /// SparseInfer's α for that number: a neuron is skipped if `α·agree < disagree`.
    pub alpha: f64,
    /// Bytes of the sign bits.
    pub bytes: u64,
    /// Share of active neurons that were predicted.
    pub recall: f64,
    /// Share of the contribution of active neurons that predicted ones cover.
    pub contribution_recall: Option<f64>,
    /// Share of predicted neurons that were active.
    pub precision: f64,
    /// Share of neurons that were not predicted.
    pub predicted_sparsity: f64,
}

impl PredictorSummary {
    /// Creates the summary of a layer without a predictor.
    pub fn none(layer: usize) -> Self {
        Self {
            layer,
            rank: 0,
            is_linear: false,
            steps: 0,
            threshold: 0.0,
            bytes: 0,
            recall: 0.0,
            contribution_recall: None,
            precision: 0.0,
            predicted_sparsity: 0.0,
            sparsity: 0.0,
            held_out_tokens: 0,
            sign_bit: None,
            thresholds: Vec::new(),
        }
    }
}
