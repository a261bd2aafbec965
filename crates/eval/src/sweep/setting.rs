//! Policy settings: a policy with its parameter, an axis of a sweep.

use std::{fmt, str::FromStr};

use powerinfer_artifact::{
    plan::{Policy, Score, Threshold},
    predictor_file::PredictorSummary,
    threshold_curve::{ERRORS, ThresholdCurve},
};
use powerinfer_bundle::Bundle;
use powerinfer_runtime::{RuntimeError, SingleSession};

/// A policy with its parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PolicySetting {
    /// Policy `dense`.
    Dense,
    /// Policy `exact`.
    Exact,
    /// Policy `predicted`, with the predictors' logit thresholds raised by this.
    Predicted(f32),
    /// Policy `sign-bit`.
    SignBit,
    /// Policy `threshold` with this mean relative error of the FFNs' outputs (CETT).
    Error(f64),
    /// Policy `threshold` on |gate|, dropping this share of the neurons (CATS).
    Gate(f64),
}

impl FromStr for PolicySetting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, parameter) = match text.split_once(':') {
            Some((name, parameter)) => (name.trim(), Some(parameter.trim())),
            None => (text.trim(), None),
        };
        let share = |text: &str| parse_share(text).filter(|share| *share > 0.0 && *share < 1.0);
        let found = match (name, parameter) {
            ("dense", None) => Some(Self::Dense),
            ("exact", None) => Some(Self::Exact),
            ("sign-bit", None) => Some(Self::SignBit),
            ("predicted", None) => Some(Self::Predicted(0.0)),
            ("predicted", Some(by)) => {
                let by = by.parse().ok().filter(|by: &f32| by.is_finite());
                by.map(Self::Predicted)
            }
            ("error", Some(text)) => share(text).map(Self::Error),
            ("gate", Some(text)) => share(text).map(Self::Gate),
            _ => None,
        };
        found.ok_or_else(|| {
            "give `dense`, `exact`, `sign-bit`, `predicted`, `predicted:+2` (a raised logit), `error:10%` (of FFN outputs) or `gate:50%` (of the gates dropped)".to_owned()
        })
    }
}

impl fmt::Display for PolicySetting {
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

/// Share from 0 to 1, written plain or in percent.
pub fn parse_share(text: &str) -> Option<f64> {
    let share: f64 = match text.strip_suffix('%') {
        Some(percent) => percent.trim().parse::<f64>().ok()? / 100.0,
        None => text.parse().ok()?,
    };
    (0.0..=1.0).contains(&share).then_some(share)
}

/// `value` without the digits that rounding leaves.
fn shortest(value: f64) -> String {
    ((value * 1e9).round() / 1e9).to_string()
}

impl PolicySetting {
    /// Default settings of a sweep: those that `bundle` has predictors or thresholds for.
    pub fn defaults(bundle: &Bundle) -> Vec<Self> {
        let mut settings = vec![Self::Dense];
        if bundle.config().activation.has_exact_zeros() {
            settings.push(Self::Exact);
        }
        let summaries = bundle.predictors().map_or(&[][..], |file| file.layers());
        let all = |has: &dyn Fn(&PredictorSummary) -> bool| {
            !summaries.is_empty() && summaries.iter().all(has)
        };
        if all(&|summary| summary.rank > 0) {
            settings.extend([-2.0, 0.0, 2.0].map(Self::Predicted));
        }
        if all(&|summary| !summary.thresholds.is_empty()) {
            settings.extend([0.05, 0.1, 0.2, 0.32].map(Self::Error));
        }
        settings
    }

    /// The policy.
    pub fn policy(self) -> Policy {
        match self {
            Self::Dense => Policy::Dense,
            Self::Exact => Policy::Exact,
            Self::Predicted(_) => Policy::Predicted,
            Self::SignBit => Policy::SignBit,
            Self::Error(_) | Self::Gate(_) => Policy::Threshold,
        }
    }

    /// Name and value of the parameter, if the policy has one.
    pub fn parameter(self) -> Option<(&'static str, f64)> {
        match self {
            Self::Predicted(by) => Some(("raised logit", f64::from(by))),
            Self::Error(error) => Some(("relative FFN error", error)),
            Self::Gate(share) => Some(("gates dropped", share)),
            Self::Dense | Self::Exact | Self::SignBit => None,
        }
    }

    /// Whether the predictors' thresholds are raised, which only the CPU can do.
    pub fn is_raised(self) -> bool {
        matches!(self, Self::Predicted(by) if by != 0.0)
    }

    /// Whether results equal dense's but for rounding.
    pub fn is_lossless(self) -> bool {
        matches!(self, Self::Dense | Self::Exact)
    }

    /// Threshold of one layer whose calibrated `curves` these are; none if the setting has none there.
    ///
    /// `cheapest` gives the threshold that reads least at a place in the curves of relative errors.
    pub fn threshold(
        self,
        curves: &[ThresholdCurve],
        cheapest: impl FnOnce(f64) -> Option<Threshold>,
    ) -> Option<Threshold> {
        match self {
            Self::Error(error) => cheapest(place_among(&ERRORS, error)?),
            Self::Gate(share) => {
                let curve = curves.iter().find(|curve| curve.score == Score::Gate)?;
                let dropped: Vec<f64> = curve.levels.iter().map(|one| 1.0 - one.density).collect();
                Some(curve.at_level(place_among(&dropped, share)?))
            }
            _ => None,
        }
    }

    /// Smallest and largest parameter that the calibrated `curves` of a layer cover; none if there are no curves.
    pub fn covered(self, curves: &[ThresholdCurve]) -> Option<[f64; 2]> {
        let gates = curves.iter().find(|curve| curve.score == Score::Gate);
        match (self, gates) {
            (Self::Gate(_), Some(curve)) => {
                let ends = [curve.levels.first(), curve.levels.last()];
                Some(ends.map(|level| level.map_or(0.0, |level| 1.0 - level.density)))
            }
            _ if curves.is_empty() => None,
            _ => Some([ERRORS[0], ERRORS[ERRORS.len() - 1]]),
        }
    }

    /// Sets the parameter in `model`, which runs on the CPU and follows the policy, or `dense` if `thresholds` has one
    /// per layer.
    ///
    /// # Errors
    ///
    /// Fails if the bundle lacks what the policy needs.
    pub fn apply(
        self,
        model: &mut SingleSession,
        thresholds: Option<&[Threshold]>,
    ) -> Result<(), RuntimeError> {
        match self {
            Self::Predicted(by) => model.experiments().raise_predictors(by),
            Self::Error(_) | Self::Gate(_) => {
                for (layer, threshold) in thresholds.unwrap_or_default().iter().enumerate() {
                    model
                        .experiments()
                        .set_policy(layer, Policy::Threshold, Some(*threshold))?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Place of `value` in `ascending`, interpolated; none if it is outside.
fn place_among(ascending: &[f64], value: f64) -> Option<f64> {
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
    fn settings_parse_to_what_they_display() {
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
            let setting: PolicySetting = text.parse().unwrap();
            assert_eq!(setting.to_string(), text);
        }
        assert_eq!("error:0.1".parse(), Ok(PolicySetting::Error(0.1)));
        for bad in [
            "",
            "dense:1",
            "error",
            "error:0%",
            "gate:100%",
            "predicted:nan",
            "warm",
        ] {
            let error = bad.parse::<PolicySetting>().unwrap_err();
            assert!(error.contains("`dense`"), "{bad}: {error}");
        }
    }

    #[test]
    fn shares_are_plain_or_in_percent() {
        assert_eq!(parse_share("0.25"), Some(0.25));
        assert_eq!(parse_share("25%"), Some(0.25));
        assert_eq!(parse_share("0"), Some(0.0));
        for bad in ["", "-0.1", "101%", "much", "nan"] {
            assert_eq!(parse_share(bad), None, "{bad}");
        }
    }

    #[test]
    fn places_are_interpolated() {
        let ends = [0.1, 0.2, 0.4];
        assert_eq!(place_among(&ends, 0.1), Some(0.0));
        assert_eq!(place_among(&ends, 0.4), Some(2.0));
        assert!((place_among(&ends, 0.3).unwrap() - 1.5).abs() < 1e-12);
        assert_eq!(place_among(&ends, 0.05), None);
        assert_eq!(place_among(&ends, 0.5), None);
    }
}
