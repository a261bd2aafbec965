//! Which neurons are computed: a policy, and how far it goes.

use std::{fmt, str::FromStr};

use anyhow::Result;
use powerinfer_artifact::{
    plan::{Policy, Score, Threshold},
    predictor_file::PredictorSummary,
    threshold_curve::{ERRORS, ThresholdCurve},
};
use powerinfer_bundle::{Bundle, neuron_bytes};
use powerinfer_planner::modes::cheapest_at;
use powerinfer_runtime::Runtime;
use powerinfer_solver::NeuronShape;

use crate::output::{parse_percent, percent};

/// A policy, and how far it goes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Level {
    /// All neurons.
    Dense,
    /// Those that their gates leave alive.
    Exact,
    /// Those that predictors predict, their thresholds raised by so much.
    Predicted(f32),
    /// Those that the signs of their gates speak for.
    SignBit,
    /// As many as keep every FFN's output within this relative error on average (CETT).
    Error(f64),
    /// Those with the largest |gate|, all but this share (CATS).
    Gate(f64),
}

impl FromStr for Level {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, level) = match text.split_once(':') {
            Some((name, level)) => (name.trim(), Some(level.trim())),
            None => (text.trim(), None),
        };
        let share = |level: &str| {
            let share = match level.ends_with('%') {
                true => parse_percent(level),
                false => level.parse().ok(),
            };
            share.filter(|share: &f64| *share > 0.0 && *share < 1.0)
        };
        let found = match (name, level) {
            ("dense", None) => Some(Self::Dense),
            ("exact", None) => Some(Self::Exact),
            ("sign-bit", None) => Some(Self::SignBit),
            ("predicted", None) => Some(Self::Predicted(0.0)),
            ("predicted", Some(by)) => {
                let by = by.parse().ok().filter(|by: &f32| by.is_finite());
                by.map(Self::Predicted)
            }
            ("error", Some(level)) => share(level).map(Self::Error),
            ("gate", Some(level)) => share(level).map(Self::Gate),
            _ => None,
        };
        found.ok_or_else(|| {
            "give `dense`, `exact`, `sign-bit`, `predicted`, `predicted:+2` (a raised logit), `error:10%` (of FFN outputs) or `gate:50%` (of the gates dropped)".to_owned()
        })
    }
}

impl fmt::Display for Level {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(&match self {
            Self::Dense => "dense".to_owned(),
            Self::Exact => "exact".to_owned(),
            Self::SignBit => "sign-bit".to_owned(),
            Self::Predicted(by) if *by == 0.0 => "predicted".to_owned(),
            Self::Predicted(by) => format!("predicted:{by:+}"),
            Self::Error(error) => format!("error:{}%", shortest(100.0 * error)),
            Self::Gate(share) => format!("gate:{}%", shortest(100.0 * share)),
        })
    }
}

/// A number without the last digits, where rounding lives.
fn shortest(value: f64) -> String {
    ((value * 1e9).round() / 1e9).to_string()
}

impl Level {
    /// What is compared unless somebody says so: of a bundle, what it can follow.
    pub(crate) fn usual(bundle: &Bundle) -> Vec<Self> {
        let mut levels = vec![Self::Dense];
        if bundle.config().activation.has_exact_zeros() {
            levels.push(Self::Exact);
        }
        let summaries = bundle.predictors().map_or(&[][..], |file| file.layers());
        let all = |has: &dyn Fn(&PredictorSummary) -> bool| {
            !summaries.is_empty() && summaries.iter().all(has)
        };
        if all(&|summary| summary.rank > 0) {
            levels.extend([-2.0, 0.0, 2.0].map(Self::Predicted));
        }
        if all(&|summary| !summary.thresholds.is_empty()) {
            levels.extend([0.05, 0.1, 0.2, 0.32].map(Self::Error));
        }
        levels
    }

    /// The policy.
    pub(crate) fn policy(self) -> Policy {
        match self {
            Self::Dense => Policy::Dense,
            Self::Exact => Policy::Exact,
            Self::Predicted(_) => Policy::Predicted,
            Self::SignBit => Policy::SignBit,
            Self::Error(_) | Self::Gate(_) => Policy::Threshold,
        }
    }

    /// What the level is of, and how large, where there are several of the policy.
    pub(crate) fn value(self) -> Option<(&'static str, f64)> {
        match self {
            Self::Predicted(by) => Some(("raised logit", f64::from(by))),
            Self::Error(error) => Some(("relative FFN error", error)),
            Self::Gate(share) => Some(("gates dropped", share)),
            Self::Dense | Self::Exact | Self::SignBit => None,
        }
    }

    /// Whether it is another one than the bundle's own, which the CPU alone follows.
    pub(crate) fn is_raised(self) -> bool {
        matches!(self, Self::Predicted(by) if by != 0.0)
    }

    /// Whether it is the same as dense but for rounding.
    pub(crate) fn is_lossless(self) -> bool {
        matches!(self, Self::Dense | Self::Exact)
    }

    /// The threshold of every layer, where the level has such.
    ///
    /// Fails where the bundle has none, or was not calibrated so far.
    pub(crate) fn thresholds(self, bundle: &Bundle) -> Result<Option<Vec<Threshold>>> {
        if !matches!(self, Self::Error(_) | Self::Gate(_)) {
            return Ok(None);
        }
        let config = bundle.config();
        let shape = NeuronShape {
            bytes: neuron_bytes(config, bundle.quant()),
            matrices: config.matrices_per_neuron(),
        };
        let summaries = bundle.predictors().map_or(&[][..], |file| file.layers());
        let mut thresholds = Vec::new();
        for layer in 0..config.layer_count {
            let curves = summaries
                .get(layer)
                .map_or(&[][..], |summary| &summary.thresholds[..]);
            let found = match self {
                Self::Error(error) => {
                    let place = between(&ERRORS, error);
                    place.and_then(|place| cheapest_at(shape, config.ffn_size, curves, place))
                }
                _ => {
                    let curve = curves.iter().find(|curve| curve.score == Score::Gate);
                    curve.and_then(|curve| self.of_gates(curve))
                }
            };
            let Some(threshold) = found else {
                return Err(self.out_of_reach(bundle, layer, curves));
            };
            thresholds.push(threshold);
        }
        Ok(Some(thresholds))
    }

    /// The threshold on |gate| at this level.
    fn of_gates(self, curve: &ThresholdCurve) -> Option<Threshold> {
        let Self::Gate(share) = self else {
            return None;
        };
        let dropped: Vec<f64> = curve.levels.iter().map(|one| 1.0 - one.density).collect();
        let place = between(&dropped, share)?;
        Some(curve.at_level(place))
    }

    fn out_of_reach(
        self,
        bundle: &Bundle,
        layer: usize,
        curves: &[ThresholdCurve],
    ) -> anyhow::Error {
        let folder = bundle.folder().display();
        let gates = curves.iter().find(|curve| curve.score == Score::Gate);
        if curves.is_empty() {
            return anyhow::anyhow!(
                "layer {layer} of `{folder}` has no thresholds, so `{self}` is not possible; {}",
                match bundle.config().activation.has_exact_zeros() {
                    true =>
                        "neurons of this model fall silent by themselves: use `exact` or `predicted`",
                    false => "run `powerinfer train-predictors` and place again",
                }
            );
        }
        let [low, high] = match (self, gates) {
            (Self::Gate(_), Some(curve)) => {
                let ends = [curve.levels.first(), curve.levels.last()];
                ends.map(|level| level.map_or(0.0, |level| 1.0 - level.density))
            }
            _ => [ERRORS[0], ERRORS[ERRORS.len() - 1]],
        };
        anyhow::anyhow!(
            "thresholds of layer {layer} of `{folder}` are known from {} to {}; give a level between for `{self}`",
            percent(low),
            percent(high)
        )
    }

    /// Has `model`, all of it on the CPU, follow this level; its layers follow the policy, but for thresholds.
    pub(crate) fn apply(self, model: &mut Runtime, thresholds: Option<&[Threshold]>) -> Result<()> {
        match self {
            Self::Predicted(by) => model.raise_predictors(by),
            Self::Error(_) | Self::Gate(_) => {
                for (layer, threshold) in thresholds.unwrap_or_default().iter().enumerate() {
                    model.set_policy(layer, Policy::Threshold, Some(*threshold))?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// The place of `value` among `ascending`, between them too; none where it is outside.
fn between(ascending: &[f64], value: f64) -> Option<f64> {
    let above = ascending.iter().position(|one| *one >= value - 1e-12)?;
    if ascending[above] <= value + 1e-12 {
        return Some(above as f64);
    }
    let below = above.checked_sub(1)?;
    let (low, high) = (ascending[below], ascending[above]);
    Some(below as f64 + (value - low) / (high - low))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_read_as_they_are_written() {
        for text in [
            "dense",
            "exact",
            "sign-bit",
            "predicted",
            "predicted:+2",
            "predicted:-1.5",
            "error:10%",
            "error:6.3%",
            "error:10.004%",
            "gate:99.999%",
            "gate:50%",
        ] {
            let level: Level = text.parse().unwrap();
            assert_eq!(level.to_string(), text);
        }
        assert_eq!("error:0.1".parse(), Ok(Level::Error(0.1)));
        for bad in [
            "",
            "dense:1",
            "error",
            "error:0%",
            "gate:100%",
            "predicted:nan",
            "warm",
        ] {
            let told = bad.parse::<Level>().unwrap_err();
            assert!(told.contains("`dense`"), "{bad}: {told}");
        }
    }

    #[test]
    fn places_lie_between_their_neighbours() {
        let ends = [0.1, 0.2, 0.4];
        assert_eq!(between(&ends, 0.1), Some(0.0));
        assert_eq!(between(&ends, 0.4), Some(2.0));
        assert!((between(&ends, 0.3).unwrap() - 1.5).abs() < 1e-12);
        assert_eq!(between(&ends, 0.05), None);
        assert_eq!(between(&ends, 0.5), None);
    }
}
