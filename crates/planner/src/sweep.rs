//! Placements of a sweep's points, with the cost model's estimates.

use anyhow::{Context, Result};
use powerinfer_artifact::{
    hardware::Hardware,
    placement_inputs::LayerInputs,
    plan::{Budget, Device, Plan, Policy, Score, Threshold},
};
use powerinfer_bundle::{Bundle, memory::predictor_bytes, neuron_bytes};
use powerinfer_runtime::LayerAudit;
use powerinfer_solver::{
    Candidate, LayerMode, NeuronShape, Options, Prediction, Problem, SolveError, Work, decide,
};

use powerinfer_eval::{
    format,
    sweep::{
        AuditedPolicy, BatchShape, PlacedPoint, PlacementSummary, PlacementTarget, PlannedSpeed,
        Point, PolicySetting, SweepPlanner,
    },
};

use crate::{
    modes::{cheapest_at, work_of_predictor},
    problem::{largest_rank, problem},
    simulate::{
        engine::OURS,
        step::{Kind, Pass, Placed, Stage},
    },
};

/// Places a bundle for a sweep.
pub struct BundlePlanner<'a> {
    /// The bundle.
    pub bundle: &'a Bundle,
    /// The bundle's activation frequencies.
    pub layers: &'a [LayerInputs],
    /// Target machine, measured for the model.
    pub hardware: &'a Hardware,
    /// This machine, measured for the model.
    pub here: Hardware,
}

impl BundlePlanner<'_> {
    fn candidates(&self, policy: &AuditedPolicy) -> Vec<Candidate> {
        let thresholds = policy.thresholds.as_deref();
        let audit = &policy.audit;
        candidates(self.bundle, self.layers, policy.setting, thresholds, audit)
    }
}

impl SweepPlanner for BundlePlanner<'_> {
    type Error = anyhow::Error;

    fn thresholds(&self, setting: PolicySetting) -> Result<Option<Vec<Threshold>>> {
        thresholds(self.bundle, setting)
    }

    fn place(&self, policy: &AuditedPolicy, point: &Point) -> Result<PlacedPoint> {
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
    ) -> Result<Option<PlannedSpeed>> {
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

/// Threshold of every layer of `bundle` under `setting`; none where its policy has no thresholds.
///
/// # Errors
///
/// Fails if the bundle has no thresholds, or none calibrated for the setting.
pub fn thresholds(bundle: &Bundle, setting: PolicySetting) -> Result<Option<Vec<Threshold>>> {
    if setting.policy() != Policy::Threshold {
        return Ok(None);
    }
    let config = bundle.config();
    let shape = NeuronShape {
        bytes: neuron_bytes(config, bundle.quant()),
        matrices: config.matrices_per_neuron(),
    };
    let summaries = bundle.predictors().map_or(&[][..], |file| file.layers());
    let of_layer = |layer: usize| {
        let curves = summaries
            .get(layer)
            .map_or(&[][..], |summary| &summary.thresholds[..]);
        let cheapest = |place| cheapest_at(shape, config.ffn_size, curves, place);
        setting.threshold(curves, cheapest).with_context(|| {
                let folder = bundle.folder().display();
                match setting.covered(curves) {
                    Some([low, high]) => format!(
                        "thresholds of layer {layer} of `{folder}` are calibrated from {} to {}; give a setting between for `{setting}`",
                        format::percent(low),
                        format::percent(high)
                    ),
                    None if config.activation.has_exact_zeros() => format!(
                        "layer {layer} of `{folder}` has no thresholds, so `{setting}` is not possible; activations of this model are exactly zero: use `exact` or `predicted`"
                    ),
                    None => format!(
                        "layer {layer} of `{folder}` has no thresholds, so `{setting}` is not possible; run `powerinfer train-predictors` and place again"
                    ),
                }
            })
    };
    let thresholds: Result<Vec<Threshold>> = (0..config.layer_count).map(of_layer).collect();
    thresholds.map(Some)
}

/// Execution mode of every layer under `setting`, as observed.
fn candidates(
    bundle: &Bundle,
    layers: &[LayerInputs],
    setting: PolicySetting,
    thresholds: Option<&[Threshold]>,
    audit: &[LayerAudit],
) -> Vec<Candidate> {
    let config = bundle.config();
    let neuron = NeuronShape {
        bytes: neuron_bytes(config, bundle.quant()),
        matrices: config.matrices_per_neuron(),
    };
    let candidate = |(index, placing): (usize, &LayerInputs)| {
        let audit = &audit[index];
        let file = bundle.predictors();
        let summary = file.and_then(|file| file.layers().get(index));
        let predicted = |work: Work| Prediction {
            work,
            predicted_per_active: audit.predicted.unwrap_or(0) as f64 / audit.fired.max(1) as f64,
            recall: audit.recall(),
        };
        let mut frequencies: Vec<f64> = placing
            .frequencies
            .iter()
            .map(|one| f64::from(*one))
            .collect();
        let mode = match setting {
            PolicySetting::Dense => LayerMode::dense(neuron),
            PolicySetting::Exact => LayerMode::exact(neuron),
            PolicySetting::Predicted(_) => {
                let work = summary
                    .zip(file)
                    .map(|(summary, file)| work_of_predictor(config, file.weights(), summary.rank));
                LayerMode::predicted(
                    Policy::Predicted,
                    neuron,
                    predicted(work.unwrap_or_default()),
                )
            }
            PolicySetting::SignBit => {
                let signs = summary.and_then(|summary| summary.sign_bit.as_ref());
                let work = Work {
                    bytes: signs.map_or(0.0, |signs| signs.bytes as f64),
                    ..Work::default()
                };
                LayerMode::predicted(Policy::SignBit, neuron, predicted(work))
            }
            PolicySetting::Error(_) | PolicySetting::Gate(_) => {
                // A bundle made for this setting would have its neurons in this order.
                let tokens = audit.tokens.max(1) as f64;
                frequencies = audit
                    .computed
                    .iter()
                    .map(|count| f64::from(*count) / tokens)
                    .collect();
                frequencies.sort_by(|a, b| b.total_cmp(a));
                LayerMode::threshold(
                    neuron,
                    thresholds.map_or(Score::Gate, |all| all[index].score),
                )
            }
        };
        let held = summary.zip(file).map(|(summary, file)| {
            let signs = setting == PolicySetting::SignBit;
            predictor_bytes(config, summary, file.weights(), signs)
        });
        Candidate {
            mode,
            frequencies,
            predictor_bytes: held.unwrap_or(0),
            allowed: true,
        }
    };
    layers.iter().enumerate().map(candidate).collect()
}

/// Places a bundle whose layers run in the modes of `candidates` on `hardware`, measured for the model.
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
            layer.pins.attention = Some(Device::Gpu);
        }
    }
    let modes: Vec<_> = candidates.iter().map(|one| vec![one.clone()]).collect();
    let mut plan = decide(&problem, &modes, &Options::default())?.plan;
    if let PlacementTarget::HotFrom(threshold) = target {
        move_border(&mut plan, candidates, threshold);
    }
    let chosen: Vec<&Candidate> = candidates.iter().collect();
    let placed = Placed::of(&plan, &problem, bundle.config(), bundle.quant(), &chosen);
    Ok(PlacedPoint {
        placement: placement(&plan, &placed, candidates),
        planned: predict(&placed, hardware, shape),
        plan,
    })
}

/// Estimate of `plan` on `hardware`, measured for the model.
fn estimate(
    bundle: &Bundle,
    candidates: &[Candidate],
    plan: &Plan,
    hardware: &Hardware,
    shape: BatchShape,
) -> PlannedSpeed {
    let problem = placement_problem(bundle, hardware, MORE_THAN_ANY, shape);
    let chosen: Vec<&Candidate> = candidates.iter().collect();
    let placed = Placed::of(plan, &problem, bundle.config(), bundle.quant(), &chosen);
    predict(&placed, hardware, shape)
}

/// More memory than any model takes.
const MORE_THAN_ANY: u64 = 1 << 50;

/// The placement problem of the solver.
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
    let rank = largest_rank(bundle.predictors());
    let mut problem = problem(
        bundle.config(),
        budget,
        hardware.clone(),
        bundle.quant(),
        None,
        rank,
    );
    problem.hardware = hardware.clone();
    problem
}

fn predict(placed: &Placed<'_>, hardware: &Hardware, shape: BatchShape) -> PlannedSpeed {
    let stage = Stage {
        engine: &OURS,
        hardware,
    };
    let context = shape.prompt_tokens as f64 + shape.decode_tokens as f64 / 2.0;
    let step = stage.pass(
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
        first_token_milliseconds: 1e3 * stage.prompt(placed, shape.prompt_tokens),
        decode_microseconds: 1e6 * step.total,
        gpu_microseconds: 1e6 * step.gpu,
        cpu_microseconds: 1e6 * step.cpu,
        sync_microseconds: 1e6 * step.sync,
        tokens_per_second: shape.batch as f64 / step.total,
    }
}

/// Everything on a GPU: its bytes outside the layers, and those of the layers.
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

/// Moves the border between hot and cold to the activation frequency `threshold`.
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
    // The plan's lines no longer add up.
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

/// Default budgets of a sweep: none, and room for a quarter, half, three quarters and all of the layers next to what a
/// GPU holds outside them; none alone if `hardware` has no GPU.
pub fn default_budgets(
    bundle: &Bundle,
    layers: &[LayerInputs],
    hardware: &Hardware,
    shape: BatchShape,
) -> Result<Vec<PlacementTarget>, SolveError> {
    const STEP: u64 = 64 << 10;
    let mut budgets = vec![PlacementTarget::Within(0)];
    if hardware.gpu.is_some() {
        let audit = vec![LayerAudit::default(); layers.len()];
        let dense = candidates(bundle, layers, PolicySetting::Dense, None, &audit);
        let (fixed, layers) = whole(bundle, &dense, hardware, shape)?;
        let quarter = |count: u64| (fixed + layers * count / 4).div_ceil(STEP) * STEP;
        let mut sizes: Vec<u64> = (1..=4).map(quarter).collect();
        sizes.dedup();
        budgets.extend(sizes.into_iter().map(PlacementTarget::Within));
    }
    Ok(budgets)
}
