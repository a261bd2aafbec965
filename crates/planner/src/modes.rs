//! The ways each layer could go, as a profile and predictors have it.

use anyhow::{Result, bail};
use powerinfer_artifact::{
    ByteSize,
    plan::{Policy, Threshold},
    predictor_file::{PredictorFile, PredictorSummary},
    threshold_curve::{ThresholdCurve, lerp, neighbours},
};
use powerinfer_bundle::{memory::predictor_bytes, neuron_bytes};
use powerinfer_model::ModelConfig;
use powerinfer_profile::Profile;
use powerinfer_solver::{Candidate, CandidateCost, LayerMode, NeuronShape, Prediction, Work};
use powerinfer_tensor::{BLOCK, Format};

/// What a placement is of.
#[derive(Clone, Copy)]
pub(crate) struct Subject<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) profile: &'a Profile,
    pub(crate) predictors: Option<&'a PredictorFile>,
    pub(crate) quant: Format,
    /// The policy of every layer, where a person says so.
    pub(crate) forced: Option<Policy>,
    /// Share of inputs that gate and up leave out where every neuron is computed.
    pub(crate) inputs_left_out: Option<f64>,
}

/// Modes of every layer that the perplexity budget allows: those that change the model's output.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AllowedModes {
    /// Per layer, whether neurons may be predicted.
    pub(crate) predicted: Vec<bool>,
    /// Error level of thresholds: index into [`ERRORS`](powerinfer_artifact::threshold_curve::ERRORS), between
    /// levels too; `None` where no threshold may be used.
    pub(crate) level: Option<f64>,
}

impl AllowedModes {
    /// Lossless modes alone.
    pub(crate) fn none(layers: usize) -> Self {
        Self {
            predicted: vec![false; layers],
            level: None,
        }
    }
}

/// What a predictor of `rank` reads for a token: A, half of B's columns, since relu silences about
/// half of the units, and what is kept per neuron in float32.
pub fn work_of_predictor(config: &ModelConfig, format: Format, rank: usize) -> Work {
    let neurons = config.ffn_size;
    let blocks = match format {
        Format::F32 | Format::F16 | Format::Bf16 => 0,
        Format::Q8_0 | Format::Q4K | Format::Q4_0 => rank.div_ceil(BLOCK),
    };
    let alive = rank as f64 / 2.0;
    Work {
        bytes: (rank * format.row_bytes(config.hidden_size)) as f64
            + alive * format.row_bytes(neurons) as f64
            + ((blocks + 1) * neurons * size_of::<f32>()) as f64,
        // A is read whole, of B every other row.
        rows: alive / 2.0,
        sums: alive,
    }
}

/// The threshold of the score that reads least at the place `level` in its curve, of a layer of so many neurons.
pub fn cheapest_at(
    shape: NeuronShape,
    neurons: usize,
    curves: &[ThresholdCurve],
    level: f64,
) -> Option<Threshold> {
    let (below, above, part) = neighbours(level);
    let read = |curve: &ThresholdCurve| {
        let [below, above] = [below, above].map(|level| curve.levels[level].density);
        let density = lerp(below, above, part);
        let mode = LayerMode::threshold(shape, curve.score);
        mode.work(neurons as f64, neurons as f64 * density).bytes
    };
    let mut best: Option<&ThresholdCurve> = None;
    for curve in curves {
        if best.is_none_or(|best| read(curve) < read(best)) {
            best = Some(curve);
        }
    }
    best.map(|curve| curve.at_level(level))
}

/// The ways one layer could go.
pub(crate) struct LayerCandidates {
    pub(crate) candidates: Vec<Candidate>,
    /// Neurons, hottest first.
    pub(crate) order: Vec<u32>,
    /// Of the candidate with the threshold policy.
    pub(crate) threshold: Option<Threshold>,
}

impl<'a> Subject<'a> {
    fn summary(&self, layer: usize) -> Option<&'a PredictorSummary> {
        self.predictors.and_then(|file| file.layers().get(layer))
    }

    /// Whether anything but dense and exact is possible at all.
    pub(crate) fn has_thresholds(&self) -> bool {
        let has = |layer| {
            self.summary(layer)
                .is_some_and(|s| !s.thresholds.is_empty())
        };
        (0..self.config.layer_count).any(has)
    }

    fn shape(&self) -> NeuronShape {
        NeuronShape {
            bytes: neuron_bytes(self.config, self.quant),
            matrices: self.config.matrices_per_neuron(),
        }
    }

    /// Every neuron is computed.
    fn dense(&self) -> LayerMode {
        match self.inputs_left_out {
            None => LayerMode::dense(self.shape()),
            Some(share) => LayerMode::dense_of_inputs(self.shape(), 1.0 - share),
        }
    }

    /// Refuses a policy that the model or the predictors cannot have.
    pub(crate) fn check_forced(&self) -> Result<()> {
        let Some(forced) = self.forced else {
            return Ok(());
        };
        let lacks = |has: &dyn Fn(&PredictorSummary) -> bool| {
            (0..self.config.layer_count).find(|layer| !self.summary(*layer).is_some_and(has))
        };
        match forced {
            Policy::Dense => {}
            Policy::Exact if self.config.activation.has_exact_zeros() => {}
            Policy::Exact => bail!(
                "the activation of this model is never exactly zero, so `--policy exact` would skip nothing; leave it out"
            ),
            Policy::Predicted => {
                if let Some(layer) = lacks(&|summary| summary.rank > 0) {
                    bail!(
                        "layer {layer} has no predictor, so `--policy predicted` is not possible; train predictors, or give them more bytes by `--max-bytes`"
                    );
                }
            }
            Policy::SignBit => {
                if let Some(layer) = lacks(&|summary| summary.sign_bit.is_some()) {
                    bail!(
                        "the signs of layer {layer} do not predict what was asked for, or were not looked at, so `--policy sign-bit` is not possible; run `powerinfer train-predictors`, with a lower `--recall` if need be"
                    );
                }
            }
            Policy::Threshold => {
                if let Some(layer) = lacks(&|summary| !summary.thresholds.is_empty()) {
                    bail!(
                        "layer {layer} has no thresholds, so `--policy threshold` is not possible; {}",
                        match self.config.activation.has_exact_zeros() {
                            true =>
                                "they are for models whose neurons are never exactly silent; leave it out",
                            false => "run `powerinfer train-predictors` first",
                        }
                    );
                }
            }
        }
        Ok(())
    }

    fn work_of_predictor(&self, rank: usize) -> Work {
        let format = self.predictors.map_or(Format::Q4_0, PredictorFile::weights);
        work_of_predictor(self.config, format, rank)
    }

    /// The ways `layer` could go within `allowed`.
    pub(crate) fn modes(&self, layer: usize, allowed: &AllowedModes) -> Result<LayerCandidates> {
        let activity = &self.profile.activities()[layer];
        let summary = self.summary(layer);
        let shape = self.shape();
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
                    // As a bundle keeps them, so that placing it again finds the same.
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
            add(self.dense(), frequencies, network_bytes, true);
            add(LayerMode::exact(shape), frequencies, network_bytes, true);
            let density = (1.0 - activity.sparsity()).max(f64::MIN_POSITIVE);
            let predicted = |work: Work, predicted_sparsity: f64, recall| Prediction {
                work,
                predicted_per_active: (1.0 - predicted_sparsity) / density,
                recall,
            };
            let may = allowed.predicted[layer];
            if let Some(summary) = summary.filter(|summary| summary.rank > 0) {
                let predicted = predicted(
                    self.work_of_predictor(summary.rank),
                    summary.predicted_sparsity,
                    summary.recall,
                );
                let mode = LayerMode::predicted(Policy::Predicted, shape, predicted);
                add(mode, frequencies, network_bytes, may);
            }
            if let Some(signs) = summary.and_then(|s| s.sign_bit.as_ref()) {
                let work = Work {
                    bytes: signs.bytes as f64,
                    ..Work::default()
                };
                let predicted = predicted(work, signs.predicted_sparsity, signs.recall);
                let mode = LayerMode::predicted(Policy::SignBit, shape, predicted);
                add(mode, frequencies, held(true), may);
            }
        } else {
            let all = vec![1.0; self.config.ffn_size];
            add(self.dense(), &all, network_bytes, true);
            if let (Some(level), Some(file)) = (allowed.level, self.predictors)
                && let Some((chosen, kept)) = self.at_level(file, layer, level)?
            {
                order.sort_by(|a, b| kept[*b as usize].total_cmp(&kept[*a as usize]));
                let kept: Vec<f64> = order.iter().map(|n| kept[*n as usize]).collect();
                let mode = LayerMode::threshold(shape, chosen.score);
                add(mode, &kept, network_bytes, true);
                threshold = Some(chosen);
            }
        }
        if let Some(forced) = self.forced {
            for candidate in &mut candidates {
                candidate.allowed = candidate.mode.policy == forced;
            }
            if candidates.iter().all(|candidate| !candidate.allowed) {
                bail!(
                    "`--policy {forced}` is not possible for layer {layer} within the allowed rise of perplexity; raise `--max-ppl-increase`"
                );
            }
        }
        Ok(LayerCandidates {
            candidates,
            order,
            threshold,
        })
    }

    /// The score that reads least at `level`, its threshold, and on which share of tokens each
    /// neuron reaches it.
    fn at_level(
        &self,
        file: &PredictorFile,
        layer: usize,
        level: f64,
    ) -> Result<Option<(Threshold, Vec<f64>)>> {
        let summary = file.layers().get(layer);
        let curves = summary.map_or(&[][..], |summary| &summary.thresholds[..]);
        let neurons = self.config.ffn_size;
        let Some(threshold) = cheapest_at(self.shape(), neurons, curves, level) else {
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

    /// Why `layer` goes the way it does, in a line.
    pub(crate) fn reason(
        &self,
        layer: usize,
        modes: &LayerCandidates,
        costs: &[CandidateCost],
        chosen: usize,
    ) -> String {
        let told = |place: usize| {
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
        let (_, own) = told(chosen);
        let mut reason = own;
        if let (Policy::Threshold, Some(threshold)) =
            (modes.candidates[chosen].mode.policy, modes.threshold)
        {
            reason += &format!(
                "; {} ≥ {:.3e} at a relative error of {:.1} %",
                threshold.score,
                threshold.value,
                100.0 * threshold.error
            );
        }
        for other in (0..costs.len()).filter(|place| *place != chosen) {
            let (name, cost) = told(other);
            let is_quicker = costs[other].seconds < costs[chosen].seconds;
            let but = match modes.candidates[other].allowed || self.forced.is_some() {
                false if is_quicker => ", but raises perplexity too much",
                _ => "",
            };
            reason += &format!("; {name} would take {cost}{but}");
        }
        if let Some(forced) = self.forced {
            reason = format!("as `--policy {forced}` says; {reason}");
        } else if costs.len() == 1 {
            reason += "; no other way is known";
        }
        reason
    }
}
