//! Settings of training.

use std::time::Duration;

use powerinfer_artifact::predictor_file::BIAS;
use powerinfer_tensor::Format;

use crate::Targets;

/// Method of choosing the rank of a layer's predictor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sizing {
    /// Minimises the bytes read per token, of the predictor and the predicted neurons.
    #[default]
    Evidence,
    /// The paper's rule: starts from the layer's sparsity, adjusts by its skewness, until the target recall is reached.
    Paper,
}

impl Sizing {
    /// All methods.
    pub const ALL: [Self; 2] = [Self::Evidence, Self::Paper];

    /// Name, as in file headers and arguments.
    pub fn name(self) -> &'static str {
        match self {
            Self::Evidence => "evidence",
            Self::Paper => "paper",
        }
    }
}

/// How a layer's predictor is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Method {
    /// Calculated: linear, from the gate and the sampled inputs.
    ClosedForm,
    /// Trained from random weights, with ReLU, as in the paper.
    Trained,
    /// Calculated, then trained further if that should save bytes, layer by layer.
    #[default]
    Auto,
}

impl Method {
    /// All methods.
    pub const ALL: [Self; 3] = [Self::Auto, Self::ClosedForm, Self::Trained];

    /// Name, as in file headers and arguments.
    pub fn name(self) -> &'static str {
        match self {
            Self::ClosedForm => "closed-form",
            Self::Trained => "trained",
            Self::Auto => "auto",
        }
    }

    /// Number of training samples per layer that this method uses. A profile need not keep more.
    pub fn samples(self) -> usize {
        match self {
            // Half of them are used for the calculation. The more samples are held out, the better the calibration.
            Self::ClosedForm => 8192,
            Self::Trained | Self::Auto => 16_384,
        }
    }
}

/// Settings of training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Required recall on held-out tokens.
    pub targets: Targets,
    /// Byte budget of a layer's predictor.
    pub layer_bytes: u64,
    /// How predictors are made.
    pub method: Method,
    /// Time limit for all predictors, after which [`Method::Auto`] stops training.
    pub max_time: Option<Duration>,
    /// Smallest estimated saving, as a share of a layer's bytes per token, for which [`Method::Auto`] trains the layer's predictor further.
    pub min_saving: f64,
    /// Method of choosing the rank.
    pub sizing: Sizing,
    /// Limit of optimiser steps per network.
    pub steps: usize,
    /// Early stopping: steps without improvement.
    pub patience: usize,
    /// Weight format of the neurons in the bundle, which determines the bytes that a neuron costs.
    pub quant: Format,
    /// Matrices of the FFN: 3 if gated, else 2.
    pub matrices_per_neuron: usize,
    /// Weight format of the predictors.
    pub weights: Format,
    /// Seed of initialisation and batches.
    pub seed: u64,
}

impl Settings {
    /// Default of [`Self::min_saving`].
    pub const MIN_SAVING: f64 = 0.03;

    /// Bytes of a predictor of `rank` for a layer of `neurons` neurons with inputs of `hidden` values.
    pub(crate) fn predictor_bytes(&self, rank: usize, hidden: usize, neurons: usize) -> u64 {
        let row = self.weights.row_bytes(rank) + BIAS.row_bytes(1);
        (rank * self.weights.row_bytes(hidden) + neurons * row) as u64
    }
}
