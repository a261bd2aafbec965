//! Candidates of each layer, from the profile and the predictors.

use powerinfer_artifact::{
    ByteSize, Hint,
    plan::{Policy, Threshold},
    predictor_file::{PredictorFile, PredictorSummary},
    threshold_curve::{lerp, neighbours},
};
use powerinfer_model::ModelConfig;
use powerinfer_profile::Profile;
use powerinfer_runtime::memory::predictor_bytes;
use powerinfer_solver::{Candidate, CandidateCost, LayerMode};
use powerinfer_tensor::Format;

use crate::{
    PlannerError,
    candidates::{ModeBuilder, Quality},
};

/// Inputs of a placement.
#[derive(Clone, Copy)]
pub(crate) struct Subject<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) profile: &'a Profile,
    pub(crate) predictors: Option<&'a PredictorFile>,
    pub(crate) quant: Format,
    /// Policy of every layer, if the options set one.
    pub(crate) forced: Option<Policy>,
    /// Input sparsity: share of the inputs of dense gate and up that are skipped.
    pub(crate) inputs_left_out: Option<f64>,
}

/// Lossy modes that the perplexity budget allows.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AllowedModes {
    /// Per layer, whether prediction is allowed.
    pub(crate) predicted: Vec<bool>,
    /// Error level of thresholds: an index into [`ERRORS`](powerinfer_artifact::threshold_curve::ERRORS), possibly
    /// fractional; `None` if thresholds are not allowed.
    pub(crate) level: Option<f64>,
}

impl AllowedModes {
    /// Lossless modes only.
    pub(crate) fn none(layers: usize) -> Self {
        Self {
            predicted: vec![false; layers],
            level: None,
        }
    }
}

/// Candidates of one layer.
pub(crate) struct LayerCandidates {
    pub(crate) candidates: Vec<Candidate>,
    /// Neurons, hottest first.
    pub(crate) order: Vec<u32>,
    /// Threshold of the candidate with policy `threshold`.
    pub(crate) threshold: Option<Threshold>,
}

impl<'a> Subject<'a> {
    fn summary(&self, layer: usize) -> Option<&'a PredictorSummary> {
        self.predictors.and_then(|file| file.layers().get(layer))
    }

    /// Whether any layer has calibrated thresholds.
    pub(crate) fn has_thresholds(&self) -> bool {
        let has = |layer| {
            self.summary(layer)
                .is_some_and(|s| !s.thresholds.is_empty())
        };
        (0..self.config.layer_count).any(has)
    }

    /// Builder of the model's execution modes.
    fn builder(&self) -> ModeBuilder<'a> {
        ModeBuilder::new(self.config, self.quant)
    }

    /// Fails if the model or its predictors do not support the forced policy.
    pub(crate) fn check_forced(&self) -> Result<(), PlannerError> {
        let Some(forced) = self.forced else {
            return Ok(());
        };
        let lacks = |has: &dyn Fn(&PredictorSummary) -> bool| {
            (0..self.config.layer_count).find(|layer| !self.summary(*layer).is_some_and(has))
        };
        let (layer, what, hint) = match forced {
            Policy::Dense => return Ok(()),
            Policy::Exact | Policy::Predicted | Policy::SignBit
                if !self.config.activation.has_exact_zeros() =>
            {
                return Err(PlannerError::NeverZero(forced));
            }
            Policy::Exact => return Ok(()),
            Policy::Predicted => (
                lacks(&|summary| summary.rank > 0),
                "predictor",
                Hint::TrainOtherPredictors,
            ),
            Policy::SignBit => (
                lacks(&|summary| summary.sign_bit.is_some()),
                "signs that predict with the recall asked for",
                Hint::TrainOtherPredictors,
            ),
            Policy::Threshold => (
                lacks(&|summary| !summary.thresholds.is_empty()),
                "thresholds",
                if self.config.activation.has_exact_zeros() {
                    Hint::OtherPolicy
                } else {
                    Hint::TrainPredictors
                },
            ),
        };
        let missing = |layer| PlannerError::PolicyMissing {
            layer,
            what,
            policy: forced,
            hint,
        };
        layer.map_or(Ok(()), |layer| Err(missing(layer)))
    }

    /// Candidates of `layer` within `allowed`.
    pub(crate) fn modes(
        &self,
        layer: usize,
        allowed: &AllowedModes,
    ) -> Result<LayerCandidates, PlannerError> {
        let activity = &self.profile.activities()[layer];
        let summary = self.summary(layer);
        let modes = self.builder();
        let mut order = activity.hottest_first();
        let mut frequencies = activity.frequencies();
        let held = |with_signs: bool| {
            let found = summary.zip(self.predictors);
            found.map_or(0, |(summary, file)| {
                predictor_bytes(self.config, summary, file.weights(), with_signs)
            })
        };
        let network_bytes = held(false);
        let mut candidates = Vec::new();
        let mut add =
            |mode: LayerMode, frequencies: &[f64], predictor_bytes: u64, allowed: bool| {
                candidates.push(Candidate {
                    mode,
                    // Rounded as in a bundle, so that placing it again finds the same plan.
                    frequencies: frequencies
                        .iter()
                        .map(|one| f64::from(*one as f32))
                        .collect(),
                    predictor_bytes,
                    allowed,
                });
            };
        let mut threshold = None;
        if self.config.activation.has_exact_zeros() {
            frequencies = order.iter().map(|n| frequencies[*n as usize]).collect();
            let frequencies = &frequencies;
            let dense = modes.dense(self.inputs_left_out);
            add(dense, frequencies, network_bytes, true);
            add(modes.exact(), frequencies, network_bytes, true);
            let density = (1.0 - activity.sparsity()).max(f64::MIN_POSITIVE);
            let quality = |predicted_sparsity: f64, recall| Quality {
                predicted_per_active: (1.0 - predicted_sparsity) / density,
                recall,
            };
            let may = allowed.predicted[layer];
            if let Some(summary) = summary.filter(|summary| summary.rank > 0) {
                let quality = quality(summary.predicted_sparsity, summary.recall);
                let format = self.predictors.map_or(Format::Q4_0, PredictorFile::weights);
                let mode = modes.predicted(format, summary.into(), quality);
                add(mode, frequencies, network_bytes, may);
            }
            if let Some(signs) = summary.and_then(|s| s.sign_bit.as_ref()) {
                let quality = quality(signs.predicted_sparsity, signs.recall);
                let mode = modes.reading(Policy::SignBit, signs.bytes, quality);
                add(mode, frequencies, held(true), may);
            }
        } else {
            if self.config.experts.is_some() && self.inputs_left_out.is_none() {
                let selected: Vec<f64> = order.iter().map(|n| frequencies[*n as usize]).collect();
                add(modes.dense_experts(), &selected, network_bytes, true);
            } else {
                let all = vec![1.0; self.config.ffn_size];
                let dense = modes.dense(self.inputs_left_out);
                add(dense, &all, network_bytes, true);
            }
            if let (Some(level), Some(file)) = (allowed.level, self.predictors)
                && let Some((chosen, kept)) = self.at_level(file, layer, level)?
            {
                order.sort_by(|a, b| kept[*b as usize].total_cmp(&kept[*a as usize]));
                let kept: Vec<f64> = order.iter().map(|n| kept[*n as usize]).collect();
                add(modes.threshold(chosen.score), &kept, network_bytes, true);
                threshold = Some(chosen);
            }
        }
        if let Some(forced) = self.forced {
            for candidate in &mut candidates {
                candidate.allowed = candidate.mode.policy == forced;
            }
            if candidates.iter().all(|candidate| !candidate.allowed) {
                return Err(PlannerError::PerplexityBudget {
                    layer,
                    policy: forced,
                });
            }
        }
        Ok(LayerCandidates {
            candidates,
            order,
            threshold,
        })
    }

    /// Threshold at `level` with the score that reads the fewest bytes, and per neuron the share of tokens that reach it.
    fn at_level(
        &self,
        file: &PredictorFile,
        layer: usize,
        level: f64,
    ) -> Result<Option<(Threshold, Vec<f64>)>, PlannerError> {
        let summary = file.layers().get(layer);
        let curves = summary.map_or(&[][..], |summary| &summary.thresholds[..]);
        let neurons = self.config.ffn_size;
        let Some(threshold) = self.builder().cheapest_threshold(curves, level) else {
            return Ok(None);
        };
        let curve = curves.iter().find(|curve| curve.score == threshold.score);
        let Some(curve) = curve else {
            return Ok(None);
        };
        let (below, above, part) = neighbours(level);
        let [first, second] =
            [below, above].map(|level| file.computed_frequencies(layer, curve, level, neurons));
        let kept = first?.into_iter().zip(second?);
        let kept = kept.map(|(a, b)| lerp(f64::from(a), f64::from(b), part).clamp(0.0, 1.0));
        Ok(Some((threshold, kept.collect())))
    }

    /// Explains the choice for `layer` in one line.
    pub(crate) fn reason(
        &self,
        layer: usize,
        modes: &LayerCandidates,
        costs: &[CandidateCost],
        chosen: usize,
    ) -> String {
        let describe = |place: usize| {
            let cost = costs[place];
            let name = match modes.candidates[place].mode.policy {
                Policy::Predicted => {
                    let rank = self.summary(layer).map_or(0, |summary| summary.rank);
                    format!("predicted (rank {rank})")
                }
                Policy::Threshold => match modes.threshold {
                    Some(threshold) => format!("threshold ({})", threshold.score),
                    None => "threshold".to_owned(),
                },
                policy => policy.to_string(),
            };
            (
                name,
                format!(
                    "{:.1} µs, {}",
                    1e6 * cost.seconds,
                    ByteSize(cost.work.bytes as u64)
                ),
            )
        };
        let (_, mut reason) = describe(chosen);
        if let (Policy::Threshold, Some(threshold)) =
            (modes.candidates[chosen].mode.policy, modes.threshold)
        {
            reason += &format!(
                "; {} ≥ {:.3e} at a relative error of {:.1}%",
                threshold.score,
                threshold.value,
                100.0 * threshold.error
            );
        }
        for other in (0..costs.len()).filter(|place| *place != chosen) {
            let (name, cost) = describe(other);
            let is_quicker = costs[other].seconds < costs[chosen].seconds;
            let but = match modes.candidates[other].allowed || self.forced.is_some() {
                false if is_quicker => ", but raises perplexity too much",
                _ => "",
            };
            reason += &format!("; {name} would take {cost}{but}");
        }
        if self.forced.is_some() {
            reason = format!("policy given; {reason}");
        } else if costs.len() == 1 {
            reason += "; there is no other candidate";
        }
        reason
    }
}
