//! Kinds of norms, FFNs and activation functions: what configurations describe and kernels compute.

use serde::{Deserialize, Serialize};

/// Kind of the norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// `w · x / √(mean(x²) + ε)` (Zhang and Sennrich 2019).
    RootMeanSquare,
    /// `w · (x − mean) / √(variance + ε) + b` (Ba et al. 2016).
    Layer,
}

/// Kind of the FFN; a neuron contributes `h_i · down_i`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FfnKind {
    /// `h_i = act(gate_i·x)`, with two matrices.
    Plain,
    /// `h_i = act(gate_i·x) · (up_i·x)`.
    Gated,
    /// `h_i = act(gate_i·x) · act(up_i·x)`: dReLU (TurboSparse, Song et al. 2024).
    DoublyGated,
}

/// Activation function of the FFN's gate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `max(0, x)`: exactly zero for an inactive neuron.
    Relu,
    /// `max(0, x)²` (Primer; So et al. 2021).
    SquaredRelu,
    /// `x` if at least `threshold`, else 0 (FATReLU; ProSparse, Song et al. 2024, §3.2).
    FatRelu {
        /// Smallest input that passes.
        threshold: f32,
    },
    /// `x / (1 + e^−x)`: small, never exactly zero.
    Silu,
    /// `x·Φ(x)` with the exact normal CDF (GELU).
    GeluErf,
    /// GELU in its tanh approximation.
    GeluTanh,
}

impl Activation {
    /// Returns the function's value at `x`.
    #[inline]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Self::Relu => x.max(0.0),
            Self::SquaredRelu => x.max(0.0) * x.max(0.0),
            Self::FatRelu { threshold } => {
                if x >= threshold {
                    x
                } else {
                    0.0
                }
            }
            Self::Silu => x / (1.0 + (-x).exp()),
            Self::GeluErf => 0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2)),
            Self::GeluTanh => {
                const SQRT_2_OVER_PI: f32 = 0.797_884_6;
                0.5 * x * (1.0 + (SQRT_2_OVER_PI * (x + 0.044_715 * x * x * x)).tanh())
            }
        }
    }

    /// Returns the function's usual name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Relu => "ReLU",
            Self::SquaredRelu => "squared ReLU",
            Self::FatRelu { .. } => "FATReLU",
            Self::Silu => "SiLU",
            Self::GeluErf => "GELU",
            Self::GeluTanh => "GELU (tanh)",
        }
    }

    /// Returns whether inactive neurons contribute exactly zero, so that skipping them is exact.
    pub fn has_exact_zeros(self) -> bool {
        matches!(self, Self::Relu | Self::SquaredRelu | Self::FatRelu { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_match_the_formulas() {
        // Computed in double precision.
        for (activation, x, expected) in [
            (Activation::Relu, -1.0, 0.0),
            (Activation::SquaredRelu, 1.5, 2.25),
            (Activation::FatRelu { threshold: 0.01 }, 0.005, 0.0),
            (Activation::FatRelu { threshold: 0.01 }, 0.01, 0.01),
            (Activation::Silu, 1.0, 0.731_058_6),
            (Activation::GeluErf, 1.0, 0.841_344_7),
            (Activation::GeluTanh, 1.0, 0.841_192),
            (Activation::GeluErf, -0.7, -0.169_374_6),
        ] {
            let got = activation.apply(x);
            assert!((got - expected).abs() < 1e-6, "{activation:?}({x}) = {got}");
        }
    }

    #[test]
    fn functions_with_exact_zeros_are_zero_for_negative_inputs() {
        for activation in [
            Activation::Relu,
            Activation::SquaredRelu,
            Activation::FatRelu { threshold: 0.1 },
            Activation::Silu,
            Activation::GeluErf,
            Activation::GeluTanh,
        ] {
            let zero = (1..50).all(|step| activation.apply(step as f32 * -0.1) == 0.0);
            assert_eq!(zero, activation.has_exact_zeros(), "{activation:?}");
        }
    }
}
