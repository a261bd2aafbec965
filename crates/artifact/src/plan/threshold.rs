//! Thresholds of a plan: on the scores of neurons, and on the inputs of projections.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Score of a neuron that is compared with its layer's threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Score {
    /// `|act(gate_i·x)|`, as in CATS (arXiv 2404.08763); available before up is read.
    Gate,
    /// `|act(gate_i·x)|·s_i` with `s_i = ‖down_i‖·rms(up_i·x)`, the neuron's expected contribution;
    /// available before up is read.
    WeightedGate,
    /// `|h_i − c_i|·‖down_i‖`, the neuron's contribution, as in CETT (arXiv 2402.03804); in a centred layer
    /// relative to its median `c_i`, otherwise `c_i = 0`.
    Contribution,
}

impl Score {
    /// Returns whether the score is available before up is read.
    pub fn precedes_up(self) -> bool {
        self != Self::Contribution
    }
}

impl fmt::Display for Score {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Gate => "gate",
            Self::WeightedGate => "weighted-gate",
            Self::Contribution => "contribution",
        })
    }
}

/// Threshold of [`Policy::Threshold`](super::Policy::Threshold).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Threshold {
    /// Score that is compared.
    pub score: Score,
    /// Whether skipped neurons contribute their median instead of zero.
    pub centred: bool,
    /// Neurons with at least this score are computed.
    pub value: f32,
    /// Relative error of the layer's FFN output that the threshold was calibrated to.
    pub error: f64,
}

/// Magnitude thresholds on the inputs of a layer's projections, as in TEAL (arXiv 2408.14690): a smaller
/// `|x_j|` counts as 0, and the weights of its channel are not read.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputThresholds {
    /// Share of inputs below the threshold on the calibration text.
    pub share: f64,
    /// Threshold for the common input of query, key and value.
    pub attention: f32,
    /// Threshold for the input of the output projection.
    pub output: f32,
    /// Threshold for the common input of gate and up; only under a policy that computes every neuron.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ffn: Option<f32>,
}
