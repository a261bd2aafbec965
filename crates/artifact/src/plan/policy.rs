//! Which neurons of a layer are computed for a token.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Which neurons of a layer are computed for a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// All of them.
    Dense,
    /// Every gate, then the neurons that it leaves alive.
    Exact,
    /// Those that the predictor expects to be alive.
    Predicted,
    /// Those that most signs of their gates speak for.
    SignBit,
    /// Those whose score reaches the layer's threshold.
    Threshold,
}

impl Policy {
    /// Every policy.
    pub const ALL: [Self; 5] = [
        Self::Dense,
        Self::Exact,
        Self::Predicted,
        Self::SignBit,
        Self::Threshold,
    ];

    /// Whether the result is that of computing every neuron, for whatever model can have it.
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
