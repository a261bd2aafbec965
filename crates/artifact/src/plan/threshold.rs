//! Thresholds that a plan sets: on the scores of neurons, and on the inputs of projections.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What is compared with a layer's threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Score {
    /// `|act(gate_i·x)|`, as CATS has it (arXiv 2404.08763): known before up is read.
    Gate,
    /// `|act(gate_i·x)|·s_i` with `s_i = ‖down_i‖·rms(up_i·x)`, what the neuron may be expected to
    /// add: known before up is read.
    WeightedGate,
    /// `|h_i − c_i|·‖down_i‖`, what the neuron does add, as CETT has it (arXiv 2402.03804), beyond
    /// what it usually adds where the layer is centred.
    Contribution,
}

impl Score {
    /// Whether it is known before up is read.
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

/// From where on a neuron is computed under [`Policy::Threshold`](super::Policy::Threshold).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Threshold {
    /// What is compared.
    pub score: Score,
    /// Whether dropped neurons count as what they usually add, and not as nothing.
    pub centred: bool,
    /// Neurons with at least this score are computed.
    pub value: f32,
    /// The relative error of the layer's FFN output that this was calibrated to.
    pub error: f64,
}

/// From which magnitude on the inputs of a layer's projections are read, as TEAL has it
/// (arXiv 2408.14690): a smaller `|x_j|` counts as 0, and its channel's weights stay unread.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputThresholds {
    /// Share of the inputs that was to fall below, on the text that this was calibrated on.
    pub share: f64,
    /// Of query, key and value, which see one input.
    pub attention: f32,
    /// Of the output projection.
    pub output: f32,
    /// Of gate and up, which see one input; only where every neuron is computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ffn: Option<f32>,
}
