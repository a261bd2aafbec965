//! Calibrated thresholds of a layer: error and density at each of a fixed set of error levels.

use serde::{Deserialize, Serialize};

use crate::plan::{Score, Threshold};

/// Calibrated levels of the relative FFN error, mean over tokens of `‖y − y_τ‖/‖y‖`; each is about a
/// quarter above the previous one.
pub const ERRORS: [f64; 16] = [
    0.02, 0.025, 0.032, 0.04, 0.05, 0.063, 0.08, 0.10, 0.125, 0.16, 0.20, 0.25, 0.32, 0.40, 0.50,
    0.63,
];

/// Thresholds on one score, one for each entry of [`ERRORS`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ThresholdCurve {
    /// Score that is compared with the threshold.
    pub score: Score,
    /// Whether skipped neurons contribute their median instead of zero.
    pub centred: bool,
    /// One level per entry of [`ERRORS`].
    pub levels: Vec<ThresholdLevel>,
}

/// Threshold with its measured error and density.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ThresholdLevel {
    /// Neurons with at least this score are computed.
    pub value: f32,
    /// Mean relative error of the FFN output on held-out tokens.
    pub error: f64,
    /// Held-out share of neurons that are computed.
    pub density: f64,
}

impl ThresholdCurve {
    /// Returns whether there is a level for every error and all values are in range.
    pub fn is_valid(&self) -> bool {
        let is_valid = |level: &ThresholdLevel| {
            let value = f64::from(level.value);
            let non_negative = |figure: f64| figure.is_finite() && figure >= 0.0;
            non_negative(value) && non_negative(level.error) && (0.0..=1.0).contains(&level.density)
        };
        self.levels.len() == ERRORS.len() && self.levels.iter().all(is_valid)
    }

    /// Returns the threshold of `level`, an index into [`ERRORS`].
    ///
    /// # Panics
    ///
    /// If `level` is out of range.
    pub fn threshold(&self, level: usize) -> Threshold {
        Threshold {
            score: self.score,
            centred: self.centred,
            value: self.levels[level].value,
            error: ERRORS[level],
        }
    }

    /// Interpolates the threshold at the fractional index `level`.
    ///
    /// # Panics
    ///
    /// If `level` is negative or the curve has too few levels.
    pub fn at_level(&self, level: f64) -> Threshold {
        let (below, above, fraction) = neighbours(level);
        let value = |level: usize| f64::from(self.levels[level].value);
        Threshold {
            value: lerp(value(below), value(above), fraction) as f32,
            error: lerp(ERRORS[below], ERRORS[above], fraction),
            ..self.threshold(below)
        }
    }

    /// Name of the tensor `[levels, neurons]` with the share of tokens on which each neuron is computed.
    pub fn frequencies_tensor(&self, layer: usize) -> String {
        format!("layers.{layer}.threshold.kept.{}", self.score)
    }
}

/// Returns the integer levels around the fractional index `level` and the fraction between them.
pub fn neighbours(level: f64) -> (usize, usize, f64) {
    let below = (level.floor() as usize).min(ERRORS.len() - 1);
    let above = (below + 1).min(ERRORS.len() - 1);
    (below, above, level - below as f64)
}

/// Interpolates linearly from `a` to `b`.
pub fn lerp(a: f64, b: f64, fraction: f64) -> f64 {
    a + (b - a) * fraction
}
