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
    /// `h_i = act(gate_i·x) · (c + 1)`, where `c` is `up_i·x` clamped to ±[limit](Activation::limit) (gpt-oss).
    ClampedGated,
}

impl FfnKind {
    /// Returns the factor of `h_i` that `up`, the product `up_i·x`, determines.
    #[inline]
    pub fn up_factor(self, activation: Activation, up: f32) -> f32 {
        match self {
            Self::Plain | Self::Gated => up,
            Self::DoublyGated => activation.apply(up),
            Self::ClampedGated => {
                let limit = activation.limit();
                // NaN passes through, unlike with `f32::min`.
                up.clamp(-limit, limit) + 1.0
            }
        }
    }
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
    /// `c / (1 + e^(−1.702·c))`, where `c` is the smaller of `x` and `limit` (gpt-oss).
    ClampedSwish {
        /// Largest input that is not clamped; positive.
        limit: f32,
    },
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
            Self::ClampedSwish { limit } => {
                let clamped = if x > limit { limit } else { x };
                clamped / (1.0 + (-Self::SWISH_SLOPE * clamped).exp())
            }
            Self::GeluErf => 0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2)),
            Self::GeluTanh => {
                const SQRT_2_OVER_PI: f32 = 0.797_884_6;
                0.5 * x * (1.0 + (SQRT_2_OVER_PI * (x + 0.044_715 * x * x * x)).tanh())
            }
        }
    }

    /// Factor of `c` in the exponent of [`ClampedSwish`](Self::ClampedSwish).
    pub const SWISH_SLOPE: f32 = 1.702;

    /// Returns the limit to which inputs are clamped; infinity if they are not clamped.
    #[inline]
    pub fn limit(self) -> f32 {
        match self {
            Self::ClampedSwish { limit } => limit,
            _ => f32::INFINITY,
        }
    }

    /// Returns the function's usual name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Relu => "ReLU",
            Self::SquaredRelu => "squared ReLU",
            Self::FatRelu { .. } => "FATReLU",
            Self::Silu => "SiLU",
            Self::ClampedSwish { .. } => "clamped swish",
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
            (Activation::ClampedSwish { limit: 7.0 }, 1.0, 0.845_796),
            (Activation::ClampedSwish { limit: 0.5 }, 1.0, 0.350_388_44),
            (Activation::GeluErf, 1.0, 0.841_344_7),
            (Activation::GeluTanh, 1.0, 0.841_192),
            (Activation::GeluErf, -0.7, -0.169_374_6),
        ] {
            let got = activation.apply(x);
            assert!((got - expected).abs() < 1e-6, "{activation:?}({x}) = {got}");
        }
    }

    #[test]
    fn up_is_clamped_on_both_sides() {
        let activation = Activation::ClampedSwish { limit: 2.0 };
        for (up, factor) in [(0.5, 1.5), (3.0, 3.0), (-9.0, -1.0)] {
            assert_eq!(FfnKind::ClampedGated.up_factor(activation, up), factor);
            assert_eq!(FfnKind::Gated.up_factor(activation, up), up);
        }
        assert!(
            FfnKind::ClampedGated
                .up_factor(activation, f32::NAN)
                .is_nan()
        );
        assert!(activation.apply(f32::NAN).is_nan());
    }

    #[test]
    fn functions_with_exact_zeros_are_zero_for_negative_inputs() {
        for activation in [
            Activation::Relu,
            Activation::SquaredRelu,
            Activation::FatRelu { threshold: 0.1 },
            Activation::Silu,
            Activation::ClampedSwish { limit: 7.0 },
            Activation::GeluErf,
            Activation::GeluTanh,
        ] {
            let zero = (1..50).all(|step| activation.apply(step as f32 * -0.1) == 0.0);
            assert_eq!(zero, activation.has_exact_zeros(), "{activation:?}");
        }
    }
}
