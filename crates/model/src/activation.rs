//! The nonlinearity that decides whether a neuron fires.

use serde::{Deserialize, Serialize};

/// The nonlinearity of the FFN's gate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `max(0, x)`: exactly zero for a silent neuron.
    Relu,
    /// `max(0, x)²` (Primer; So et al. 2021).
    SquaredRelu,
    /// `x` from the threshold on, else 0 (FATReLU; ProSparse, Song et al. 2024, §3.2).
    FatRelu {
        /// The smallest input that passes.
        threshold: f32,
    },
    /// `x / (1 + e^−x)`: small, never exactly zero.
    Silu,
    /// `x·Φ(x)` with the exact normal distribution.
    GeluErf,
    /// GELU by its hyperbolic tangent.
    GeluTanh,
}

impl Activation {
    /// The function's value at `x`.
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

    /// Whether a silent neuron contributes exactly nothing, so that skipping it is exact.
    pub fn has_exact_zeros(self) -> bool {
        matches!(self, Self::Relu | Self::SquaredRelu | Self::FatRelu { .. })
    }

    /// The function that checkpoints call `name`; one that has a parameter takes it from `parameter`.
    pub(crate) fn named(name: &str, parameter: Option<f32>) -> Option<Self> {
        Some(match name {
            "relu" => Self::Relu,
            "relu2" | "squared_relu" => Self::SquaredRelu,
            "fatrelu" => Self::FatRelu {
                threshold: parameter?,
            },
            "silu" | "swish" => Self::Silu,
            "gelu" | "gelu_python" => Self::GeluErf,
            "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" | "gelu_python_tanh" => Self::GeluTanh,
            _ => return None,
        })
    }

    /// The names [`Activation::named`] knows, for messages.
    pub(crate) const NAMES: &'static str = "relu, relu2, fatrelu (with `hidden_act_param`), silu, gelu, gelu_new, gelu_pytorch_tanh, gelu_fast";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_formulas() {
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
    fn functions_with_exact_zeros_are_zero_for_what_is_negative() {
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
