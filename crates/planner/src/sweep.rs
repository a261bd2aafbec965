//! Places the points of a sweep and predicts their speed with the cost model.

use powerinfer_artifact::{
    Hint,
    hardware::Hardware,
    placement_inputs::LayerInputs,
    plan::{Budget, Device, Plan, Policy, Threshold},
};
use powerinfer_bundle::Bundle;
use powerinfer_eval::sweep::{
    AuditedPolicy, BatchShape, PlacedPoint, PlacementSummary, PlacementTarget, PlannedSpeed, Point,
    PolicySetting, SweepPlanner,
};
use powerinfer_runtime::LayerAudit;
use powerinfer_solver::{Candidate, Options, Problem, SolveError, decide};

use crate::{
    PlannerError,
    candidates::{ModeBuilder, audited},
    problem::{PredictorSizes, problem},
    simulate::{
        engine::OURS,
        step::{Estimator, Kind, Pass, Placed},
    },
};

/// Places a bundle for a sweep.
pub struct BundlePlanner<'a> {
    /// The bundle.
    pub bundle: &'a Bundle,
    /// The bundle's activation frequencies.
    pub layers: &'a [LayerInputs],
    /// Target machine, with values for the model.
    pub hardware: &'a Hardware,
    /// This machine, with values for the model.
    pub here: Hardware,
}

impl BundlePlanner<'_> {
    fn candidates(&self, policy: &AuditedPolicy) -> Vec<Candidate> {
        let thresholds = policy.thresholds.as_deref();
        let (chosen, audit) = (policy.setting.policy(), &policy.audit);
        audited(self.bundle, self.layers, chosen, thresholds, audit)
    }
}

impl SweepPlanner for BundlePlanner<'_> {
    type Error = PlannerError;

    fn thresholds(&self, setting: PolicySetting) -> Result<Option<Vec<Threshold>>, PlannerError> {
        thresholds(self.bundle, setting)
    }

    fn place(&self, policy: &AuditedPolicy, point: &Point) -> Result<PlacedPoint, PlannerError> {
        let candidates = self.candidates(policy);
        let (target, shape) = (point.target, point.shape);
        Ok(place(
            self.bundle,
            &candidates,
            self.hardware,
            target,
            shape,
        )?)
    }

    fn predict_here(
        &self,
        policy: &AuditedPolicy,
        plan: Option<&Plan>,
        shape: BatchShape,
    ) -> Result<Option<PlannedSpeed>, PlannerError> {
        let candidates = self.candidates(policy);
        let here = &self.here;
        match plan {
            Some(_) if here.gpu.is_none() => Ok(None),
            Some(plan) => Ok(Some(estimate(self.bundle, &candidates, plan, here, shape))),
            None => {
                let on_cpu = PlacementTarget::Within(0);
                Ok(Some(
                    place(self.bundle, &candidates, here, on_cpu, shape)?.planned,
                ))
            }
        }
    }
}

/// Thresholds of the layers of `bundle` under `setting`; `None` if its policy has no thresholds.
///
/// # Errors
///
/// When the bundle has no thresholds, or none calibrated for the setting.
pub fn thresholds(
    bundle: &Bundle,
    setting: PolicySetting,
) -> Result<Option<Vec<Threshold>>, PlannerError> {
    if setting.policy() != Policy::Threshold {
        return Ok(None);
    }
    let config = bundle.config();
    let modes = ModeBuilder::new(config, bundle.quant());
    let summaries = bundle.predictors().map_or(&[][..], |file| file.layers());
    let of_layer = |layer: usize| {
        let curves = summaries
            .get(layer)
            .map_or(&[][..], |summary| &summary.thresholds[..]);
        let cheapest = |level| modes.cheapest_threshold(curves, level);
        let covered = setting.covered(curves);
        let missing = || {
            let (folder, setting) = (bundle.folder().to_owned(), setting.to_string());
            match covered {
                Some([low, high]) => PlannerError::ThresholdRange {
                    layer,
                    folder,
                    setting,
                    low,
                    high,
                },
                None => PlannerError::NoThresholds {
                    layer,
                    folder,
                    setting,
                    hint: if config.activation.has_exact_zeros() {
                        Hint::ZerosPolicy
                    } else {
                        Hint::TrainPredictorsAndPlace
                    },
                },
            }
        };
        setting.threshold(curves, cheapest).ok_or_else(missing)
    };
    let thresholds: Result<_, _> = (0..config.layer_count).map(of_layer).collect();
    thresholds.map(Some)
}

/// Places a bundle whose layers have the modes of `candidates` on `hardware`, which has values for the model.
fn place(
    bundle: &Bundle,
    candidates: &[Candidate],
    hardware: &Hardware,
    target: PlacementTarget,
    shape: BatchShape,
) -> Result<PlacedPoint, SolveError> {
    let vram_bytes = match target {
        PlacementTarget::Within(bytes) => bytes,
        PlacementTarget::HotFrom(_) => MORE_THAN_ANY,
    };
    let mut problem = placement_problem(bundle, hardware, vram_bytes, shape);
    if let PlacementTarget::HotFrom(_) = target {
        problem.head_pin = Some(Device::Gpu);
        for layer in &mut problem.layers {
            layer.pins.attention.get_or_insert(Device::Gpu);
        }
    }
    let modes: Vec<_> = candidates.iter().map(|one| vec![one.clone()]).collect();
    let mut plan = decide(&problem, &modes, &Options::default())?.plan;
    if let PlacementTarget::HotFrom(threshold) = target {
        move_border(&mut plan, candidates, threshold);
    }
    let chosen: Vec<&Candidate> = candidates.iter().collect();
    let placed = Placed::new(&plan, &problem, bundle.config(), bundle.quant(), &chosen);
    Ok(PlacedPoint {
        placement: placement(&plan, &placed, candidates),
        planned: predict(&placed, hardware, shape),
        plan,
    })
}

/// Predicted speed of `plan` on `hardware`, which has values for the model.
fn estimate(
    bundle: &Bundle,
    candidates: &[Candidate],
    plan: &Plan,
    hardware: &Hardware,
    shape: BatchShape,
) -> PlannedSpeed {
    let problem = placement_problem(bundle, hardware, MORE_THAN_ANY, shape);
    let chosen: Vec<&Candidate> = candidates.iter().collect();
    let placed = Placed::new(plan, &problem, bundle.config(), bundle.quant(), &chosen);
    predict(&placed, hardware, shape)
}

/// More memory than any model takes.
const MORE_THAN_ANY: u64 = 1 << 50;

/// Placement problem for a batch of `shape`.
fn placement_problem(
    bundle: &Bundle,
    hardware: &Hardware,
    vram_bytes: u64,
    shape: BatchShape,
) -> Problem {
    let before = &bundle.plan().budget;
    let budget = Budget {
        vram_split: Vec::new(),
        vram_bytes,
        ram_bytes: before.ram_bytes.max(hardware.cpu.ram_bytes),
        context_tokens: (shape.batch * shape.context()) as u64,
        kv_cache: before.kv_cache,
    };
    let mut problem = problem(
        bundle.config(),
        budget,
        hardware.clone(),
        bundle.quant(),
        None,
        PredictorSizes::of(bundle.config(), bundle.predictors()),
        None,
    );
    problem.hardware = hardware.clone();
    problem
}

fn predict(placed: &Placed<'_>, hardware: &Hardware, shape: BatchShape) -> PlannedSpeed {
    let estimator = Estimator {
        engine: &OURS,
        hardware,
    };
    let context = shape.prompt_tokens as f64 + shape.decode_tokens as f64 / 2.0;
    let step = estimator.pass(
        placed,
        Pass {
            tokens: shape.batch as f64,
            context: shape.batch as f64 * context,
            kind: Kind::Decode,
        },
    );
    PlannedSpeed {
        hardware: hardware.name.clone(),
        simulated: true,
        first_token_milliseconds: 1e3 * estimator.prompt(placed, shape.prompt_tokens),
        decode_microseconds: 1e6 * step.total,
        gpu_microseconds: 1e6 * step.gpu,
        cpu_microseconds: 1e6 * step.cpu,
        sync_microseconds: 1e6 * step.sync,
        tokens_per_second: shape.batch as f64 / step.total,
    }
}

/// Bytes on the GPU if it holds the whole model: outside the layers, and in the layers.
fn whole(
    bundle: &Bundle,
    candidates: &[Candidate],
    hardware: &Hardware,
    shape: BatchShape,
) -> Result<(u64, u64), SolveError> {
    let all = PlacementTarget::Within(MORE_THAN_ANY);
    let plan = place(bundle, candidates, hardware, all, shape)?.plan;
    let layers = plan.layers.iter().map(|layer| layer.bytes(Device::Gpu));
    let layers: u64 = layers.sum();
    Ok((plan.totals.gpu_bytes.saturating_sub(layers), layers))
}

/// Makes the neurons with an activation frequency of at least `threshold` hot, and all others cold.
fn move_border(plan: &mut Plan, candidates: &[Candidate], threshold: f64) {
    let mut moved: i128 = 0;
    for (layer, candidate) in plan.layers.iter_mut().zip(candidates) {
        let hot = candidate
            .frequencies
            .partition_point(|frequency| *frequency >= threshold);
        let bytes = (hot as i128 - layer.hot_count as i128) * i128::from(layer.neuron_bytes);
        layer.hot_count = hot;
        moved += bytes;
    }
    let shifted = |bytes: u64, by: i128| (i128::from(bytes) + by).max(0) as u64;
    let (gpu, cpu) = (plan.totals.gpu_bytes, plan.totals.cpu_bytes);
    let (gpu, cpu) = (shifted(gpu, moved), shifted(cpu, -moved));
    // The memory account of the plan no longer holds.
    plan.clear_memory_use();
    (plan.totals.gpu_bytes, plan.totals.cpu_bytes) = (gpu, cpu);
    plan.totals.hot_count = plan.layers.iter().map(|layer| layer.hot_count as u64).sum();
}

fn placement(plan: &Plan, placed: &Placed<'_>, candidates: &[Candidate]) -> PlacementSummary {
    // Without any activation the share is undefined.
    let [neuron_share, activation_share] = placed
        .hot()
        .map(|share| if share.is_finite() { share } else { 0.0 });
    let rarest = plan
        .layers
        .iter()
        .zip(candidates)
        .filter_map(|(layer, candidate)| {
            let last = layer.hot_count.checked_sub(1)?;
            candidate.frequencies.get(last).copied()
        });
    PlacementSummary {
        hot_neurons: plan.layers.iter().map(|layer| layer.hot_count as u64).sum(),
        neurons: plan
            .layers
            .iter()
            .map(|layer| layer.neuron_count as u64)
            .sum(),
        neuron_share,
        activation_share,
        load_share: placed.load_on_gpu(),
        coldest_hot_frequency: rarest.reduce(f64::min),
        gpu_bytes: plan.totals.gpu_bytes,
        cpu_bytes: plan.totals.cpu_bytes,
        attention_layers: plan
            .layers
            .iter()
            .filter(|layer| layer.attention == Device::Gpu)
            .count(),
        layers: plan.layers.len(),
        hot_per_layer: plan.layers.iter().map(|layer| layer.hot_count).collect(),
    }
}

/// Default VRAM budgets of a sweep: 0 and, with a GPU, room for a quarter, half, three quarters and all of the layers in
/// addition to the other parts.
///
/// # Errors
///
/// The placement problem is invalid, or the model does not fit in RAM.
pub fn default_budgets(
    bundle: &Bundle,
    layers: &[LayerInputs],
    hardware: &Hardware,
    shape: BatchShape,
) -> Result<Vec<PlacementTarget>, SolveError> {
    const STEP: u64 = 64 << 10;
    let mut sizes = vec![0];
    if hardware.gpu.is_some() {
        let audit = vec![LayerAudit::default(); layers.len()];
        let dense = audited(bundle, layers, Policy::Dense, None, &audit);
        let (fixed, layers) = whole(bundle, &dense, hardware, shape)?;
        let quarter = |count: u64| (fixed + layers * count / 4).div_ceil(STEP) * STEP;
        sizes.extend((1..=4).map(quarter));
        // All are 0 if the model is so small that the GPU gets nothing.
        sizes.dedup();
    }
    Ok(sizes.into_iter().map(PlacementTarget::Within).collect())
}
