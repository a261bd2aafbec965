//! Finds the policies that the perplexity budget allows, and the best placement with them.

use std::path::Path;

use powerinfer_artifact::{
    Hint, Progress,
    placement_inputs::LayerInputs,
    plan::{InputThresholds, Plan, Policy},
    predictor_file::PredictorFile,
    threshold_curve::ERRORS,
    write::ScratchFolder,
};
use powerinfer_bundle::{Bundle, PackInputs, contents, pack};
use powerinfer_eval::format::percent;
use powerinfer_model::Checkpoint;
use powerinfer_solver::{Options, Problem, SolveReport, decide};

use crate::{
    PlannerError, Request, candidates, certify, forecast, inputs,
    modes::{AllowedModes, LayerCandidates, Subject},
    search::{self, PerplexityProbe},
};

/// Location of the temporary bundle that is measured.
#[derive(Clone, Copy)]
pub enum Scratch<'a> {
    /// None: nothing may be written.
    None,
    /// Next to this folder.
    NextTo(&'a Path),
}

/// A solved placement.
pub(crate) struct Solved {
    pub(crate) plan: Plan,
    pub(crate) report: SolveReport,
    pub(crate) orders: Vec<Vec<u32>>,
    /// Per layer, the placement inputs for the bundle.
    pub(crate) placing: Vec<LayerInputs>,
    /// Per layer, microseconds that its mode saves over the fastest lossless one.
    pub(crate) savings: Vec<f64>,
}

/// Inputs of the search for policies and placement.
pub(crate) struct Solver<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) subject: Subject<'a>,
    pub(crate) problem: Problem,
    pub(crate) options: Options,
    pub(crate) request: &'a Request,
    /// Held-out texts for decisions.
    pub(crate) texts: Vec<Vec<u32>>,
    /// Maximum number of tokens in these texts, set by `--certify`.
    pub(crate) most_tokens: usize,
    pub(crate) perplexity_budget: f64,
    /// Input thresholds per layer; `None` without input sparsity.
    pub(crate) inputs: Option<Vec<InputThresholds>>,
    pub(crate) scratch: Scratch<'a>,
    /// The last temporary bundle, kept because its weights can be reused.
    pub(crate) packed: Option<ScratchFolder>,
    pub(crate) progress: &'a dyn Progress,
}

/// Half widths of the confidence interval that are added to a measured rise: one for the sampling error here, one for that
/// of the certificate.
const CAUTION: f64 = 2.0;

/// Error level that a dry run assumes, an index into `ERRORS`.
const ASSUMED_LEVEL: f64 = 7.0;

impl Solver<'_> {
    /// Calibrates input thresholds at which `share` of the inputs is skipped.
    pub(crate) fn calibrated_inputs(
        &self,
        share: f64,
    ) -> Result<Vec<InputThresholds>, PlannerError> {
        let Scratch::NextTo(out) = self.scratch else {
            return Err(PlannerError::DryRun);
        };
        if search::scored(&self.texts) == 0 {
            return Err(PlannerError::NoCalibrationText);
        }
        let folder = ScratchFolder::next_to(out, &contents(&[]))?;
        let bundle = self.pack(&self.solve(&self.most())?, &folder.path())?;
        inputs::calibrate(bundle, &self.texts, share, self.progress)
    }

    /// Allowed modes without a measurement: prediction in every layer, thresholds at `ASSUMED_LEVEL`.
    fn most(&self) -> AllowedModes {
        AllowedModes {
            predicted: vec![true; self.subject.config.layer_count],
            level: Some(ASSUMED_LEVEL),
        }
    }

    /// Finds the modes that the perplexity budget allows.
    pub(crate) fn allowed_modes(&mut self) -> Result<AllowedModes, PlannerError> {
        let layers = self.subject.config.layer_count;
        let none = AllowedModes::none(layers);
        let most = self.most();
        match self.subject.forced {
            Some(Policy::Dense | Policy::Exact) => return Ok(none),
            // A forced policy is not limited by the budget; the certificate reports its quality.
            Some(Policy::Predicted | Policy::SignBit) => return Ok(most),
            Some(Policy::Threshold) | None => {}
        }
        if !self.subject.has_thresholds() && self.subject.config.activation.has_exact_zeros() {
            return self.allowed_predictions(&none, &most);
        }
        if !self.subject.has_thresholds() {
            let line = "the activation is never exactly zero and there are no thresholds, so every neuron is computed";
            self.progress.advise(line, Hint::TrainPredictors);
            return Ok(none);
        }
        if matches!(self.scratch, Scratch::None) {
            self.progress.note(&format!(
                "a dry run measures nothing: it assumes a relative FFN error of {} in every layer",
                percent(ERRORS[ASSUMED_LEVEL as usize])
            ));
            return Ok(most);
        }
        if !self.can_measure() {
            if self.subject.forced.is_some() {
                return Err(PlannerError::NoHeldOutText {
                    needed: certify::FEWEST,
                    hint: certify::more_text(&self.texts, self.most_tokens),
                });
            }
            return Ok(none);
        }
        let ladder = search::thresholds(layers);
        self.last_allowed(&ladder, false, &most)
    }

    /// Finds the layers in which prediction is allowed. Layers that are faster with it are ranked by time saved over
    /// contribution missed; as many are allowed as the perplexity budget permits.
    fn allowed_predictions(
        &mut self,
        none: &AllowedModes,
        most: &AllowedModes,
    ) -> Result<AllowedModes, PlannerError> {
        let solved = self.solve(most)?;
        let layers = solved.plan.layers.iter();
        let mut approximate: Vec<usize> = layers
            .filter(|layer| !layer.policy.is_lossless())
            .map(|layer| layer.layer)
            .collect();
        if approximate.is_empty() {
            return Ok(none.clone());
        }
        if matches!(self.scratch, Scratch::None) {
            self.progress
                .note("a dry run does not measure quality: it allows prediction in every layer");
            return Ok(most.clone());
        }
        if !self.can_measure() {
            return Ok(none.clone());
        }
        let missed = |layer: &usize| {
            let summaries = self
                .subject
                .predictors
                .map_or(&[][..], PredictorFile::layers);
            let recall = summaries.get(*layer).and_then(|s| s.contribution_recall);
            1.0 - recall.unwrap_or(1.0) + 1e-3
        };
        let worth = |layer: &usize| solved.savings[*layer] / missed(layer);
        approximate.sort_by(|a, b| worth(b).total_cmp(&worth(a)));
        let ladder = search::predicted(none.predicted.len(), &approximate);
        // Predictors miss so little that prediction in all layers is usually allowed.
        self.last_allowed(&ladder, true, most)
    }

    /// Whether there is enough text to measure on; advises more if not.
    fn can_measure(&self) -> bool {
        let is_there = search::scored(&self.texts) >= certify::FEWEST;
        if self.most_tokens == 0 {
            let line =
                "without a certificate no loss can be measured, so only lossless policies are used";
            self.progress.advise(line, Hint::Certify);
        } else if !is_there {
            let line = format!(
                "there are {} tokens to decide on, at least {} are needed, so only lossless policies are used",
                search::scored(&self.texts),
                certify::FEWEST
            );
            let hint = certify::more_text(&self.texts, self.most_tokens);
            self.progress.advise(&line, hint);
        }
        is_there
    }

    /// Finds the last step of `ladder` within the perplexity budget; if `tries_last`, that step is tried first. The temporary bundle is
    /// packed for the modes `packed`.
    fn last_allowed(
        &mut self,
        ladder: &[AllowedModes],
        tries_last: bool,
        packed: &AllowedModes,
    ) -> Result<AllowedModes, PlannerError> {
        let Scratch::NextTo(out) = self.scratch else {
            unreachable!("nothing is measured without a scratch folder")
        };
        let folder = ScratchFolder::next_to(out, &contents(&[]))?;
        let solved = self.solve(packed)?;
        self.progress.note(&format!(
            "searching for policies that raise perplexity by at most {} on {} tokens",
            percent(self.perplexity_budget),
            search::scored(&self.texts)
        ));
        let bundle = self.pack(&solved, &folder.path())?;
        let mut judge = PerplexityProbe::new(bundle, self.texts.clone(), self.progress)?;
        let found = search::last_allowed(ladder, tries_last, |allowed| {
            let solved = self.solve(allowed)?;
            if solved
                .plan
                .layers
                .iter()
                .all(|layer| layer.policy.is_lossless())
            {
                return Ok(true);
            }
            let rise = judge.rise(&solved.plan.layers)?;
            self.progress.detail(&format!(
                "{}: perplexity {:+.3}% ({:+.3} to {:+.3})",
                describe(allowed),
                100.0 * rise.value,
                100.0 * rise.low,
                100.0 * rise.high
            ));
            Ok(rise.value + CAUTION * (rise.high - rise.value) <= self.perplexity_budget)
        })?;
        drop(judge);
        self.packed = Some(folder);
        if found == 0 {
            let line = format!(
                "no policy that skips more keeps the rise of perplexity within {}",
                percent(self.perplexity_budget)
            );
            self.progress.advise(&line, Hint::LargerPerplexityBudget);
        }
        Ok(ladder[found].clone())
    }

    /// Finds the fastest placement within `allowed`.
    pub(crate) fn solve(&self, allowed: &AllowedModes) -> Result<Solved, PlannerError> {
        let layers = 0..self.subject.config.layer_count;
        let modes = layers.map(|layer| self.subject.modes(layer, allowed));
        let modes = modes.collect::<Result<Vec<LayerCandidates>, PlannerError>>()?;
        let candidates: Vec<_> = modes.iter().map(|modes| modes.candidates.clone()).collect();
        let decision = decide(&self.problem, &candidates, &self.options)?;
        let mut plan = decision.plan;
        let chosen = candidates.iter().zip(&decision.chosen);
        let chosen: Vec<_> = chosen.map(|(modes, chosen)| &modes[*chosen]).collect();
        let (config, quant) = (self.subject.config, self.subject.quant);
        let activities = self.subject.profile.activities().iter().zip(&modes);
        let hits = activities.map(|(activity, modes)| {
            // An expert can be replaced only if its rows are consecutive.
            let experts = config.experts.as_ref();
            let experts = experts.filter(|experts| experts.are_whole_in(&modes.order));
            experts.map_or_else(Vec::new, |_| candidates::expert_hits(activity))
        });
        let hits: Vec<Vec<f32>> = hits.collect();
        let of_layers: Vec<&[f32]> = hits.iter().map(Vec::as_slice).collect();
        forecast::predict(&mut plan, &self.problem, config, quant, &chosen, &of_layers);
        let (mut savings, mut placing) = (Vec::new(), Vec::new());
        for (index, (layer, modes)) in plan.layers.iter_mut().zip(&modes).enumerate() {
            let (costs, chosen) = (&decision.costs[index], decision.chosen[index]);
            layer.reason = self.subject.reason(index, modes, costs, chosen);
            layer.threshold = modes.threshold;
            layer.input_thresholds = self.inputs.as_ref().map(|inputs| InputThresholds {
                ffn: inputs[index].ffn.filter(|_| layer.policy == Policy::Dense),
                ..inputs[index]
            });
            if let Some(read) = inputs::reason(layer) {
                layer.reason += &format!("; {read}");
            }
            let read = self.problem.layers[index].attention_read_bytes;
            let hits = hits.get(index).cloned().unwrap_or_default();
            placing.push(candidates::stored(&modes.candidates[chosen], read, hits));
            let lossless = modes.candidates.iter().zip(costs);
            let lossless = lossless.filter(|(mode, _)| mode.mode.policy.is_lossless());
            let least = lossless
                .map(|(_, cost)| cost.seconds)
                .fold(f64::INFINITY, f64::min);
            savings.push(1e6 * (least - costs[chosen].seconds));
        }
        Ok(Solved {
            plan,
            report: decision.report,
            orders: modes.into_iter().map(|modes| modes.order).collect(),
            placing,
            savings,
        })
    }

    fn pack(&self, solved: &Solved, out: &Path) -> Result<Bundle, PlannerError> {
        let mut plan = solved.plan.clone();
        // Its sign bits and layouts differ from those in the memory account.
        plan.clear_memory_use();
        // With small inputs set to zero, the layout by output gives the same and is faster for prompts.
        for layer in &mut plan.layers {
            layer.input_thresholds = None;
        }
        // Sign bits are packed for policy `sign-bit` only, and here any layer may take it.
        if let Some(file) = self.subject.predictors {
            for (layer, summary) in plan.layers.iter_mut().zip(file.layers()) {
                if summary.sign_bit.is_some() {
                    layer.policy = Policy::SignBit;
                }
            }
        }
        let inputs = PackInputs {
            predictors: self.subject.predictors,
            inputs: self.request.inputs.clone(),
            ..PackInputs::new(self.checkpoint, &solved.orders, plan, self.subject.quant)
        };
        Ok(pack(&inputs, out, self.progress)?)
    }
}

/// Describes `allowed`.
fn describe(allowed: &AllowedModes) -> String {
    match allowed.level {
        Some(level) => {
            let below = level.floor() as usize;
            let above = (below + 1).min(ERRORS.len() - 1);
            let error = ERRORS[below] + (ERRORS[above] - ERRORS[below]) * level.fract();
            format!("relative FFN error {}", percent(error))
        }
        None => {
            let layers = allowed.predicted.iter().filter(|predicted| **predicted);
            format!("{} layers may predict", layers.count())
        }
    }
}
