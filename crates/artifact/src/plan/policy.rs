//! Policy: which neurons of a layer are computed for a token.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Which neurons of a layer are computed for a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// All neurons.
    Dense,
    /// Neurons whose gate is active, after computing every gate.
    Exact,
    /// Neurons that the predictor expects to be active.
    Predicted,
    /// Neurons whose gate and input agree in enough signs.
    SignBit,
    /// Neurons whose score reaches the layer's threshold.
    Threshold,
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 5] = [
        Self::Dense,
        Self::Exact,
        Self::Predicted,
        Self::SignBit,
        Self::Threshold,
    ];

    /// Returns whether the result equals that of computing every neuron.
    pub fn is_lossless(self) -> bool {
        matches!(self, Self::Dense | Self::Exact)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Dense => "dense",
            Self::Exact => "exact",
            Self::Predicted => "predicted",
            Self::SignBit => "sign-bit",
            Self::Threshold => "threshold",
        })
    }
}
