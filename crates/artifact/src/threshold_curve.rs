//! What dropping a layer's weakest neurons costs and saves, threshold by threshold.

use serde::{Deserialize, Serialize};

use crate::plan::{Score, Threshold};

/// Relative errors of the FFN output, `‖y − y_τ‖/‖y‖` on average over tokens, that thresholds are
/// calibrated to; each about a quarter more than the one before.
pub const ERRORS: [f64; 16] = [
    0.02, 0.025, 0.032, 0.04, 0.05, 0.063, 0.08, 0.10, 0.125, 0.16, 0.20, 0.25, 0.32, 0.40, 0.50,
    0.63,
];

/// One way to choose neurons by a score, at every error of [`ERRORS`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ThresholdCurve {
    /// What is compared with the threshold.
    pub score: Score,
    /// Whether dropped neurons count as what they usually add.
    pub centred: bool,
    /// One level per entry of [`ERRORS`].
    pub levels: Vec<ThresholdLevel>,
}

/// A threshold and what it does.
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
    /// Whether there is a level for every error, and their figures can be.
    pub fn is_sound(&self) -> bool {
        let is_sound = |level: &ThresholdLevel| {
            let value = f64::from(level.value);
            let sound = |figure: f64| figure.is_finite() && figure >= 0.0;
            sound(value) && sound(level.error) && (0.0..=1.0).contains(&level.density)
        };
        self.levels.len() == ERRORS.len() && self.levels.iter().all(is_sound)
    }

    /// The threshold of `level`.
    pub fn threshold(&self, level: usize) -> Threshold {
        Threshold {
            score: self.score,
            centred: self.centred,
            value: self.levels[level].value,
            error: ERRORS[level],
        }
    }

    /// The threshold at the place `level`, between two levels too.
    pub fn between_levels(&self, level: f64) -> Threshold {
        let (below, above, part) = around(level);
        let value = |level: usize| f64::from(self.levels[level].value);
        Threshold {
            value: between(value(below), value(above), part) as f32,
            error: between(ERRORS[below], ERRORS[above], part),
            ..self.threshold(below)
        }
    }

    /// Name of the tensor `[levels, neurons]`: on which share of tokens each neuron is computed.
    pub fn kept_tensor(&self, layer: usize) -> String {
        format!("layers.{layer}.threshold.kept.{}", self.score)
    }
}

/// The levels around the place `level`, and how far it is from the first to the second.
pub fn around(level: f64) -> (usize, usize, f64) {
    let below = (level.floor() as usize).min(ERRORS.len() - 1);
    let above = (below + 1).min(ERRORS.len() - 1);
    (below, above, level - below as f64)
}

/// What is so far from `a` to `b`.
pub fn between(a: f64, b: f64, part: f64) -> f64 {
    a + (b - a) * part
}
