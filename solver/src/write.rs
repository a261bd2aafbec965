//! Writes down what was found: the plan with the account of every memory and the expected time of
//! every part, and how the solving went.

use std::time::Instant;

use powerinfer_artifact::plan::{
    Device, Forecast, LayerPlan, Objective, Plan, SolverSummary, Totals,
};
use serde::Serialize;

use crate::{
    Options, Problem,
    account::{bytes_on, lines},
    baselines, cost,
    dense::reserve_bytes,
    limit::Better,
    objective,
    places::Places,
    solve::Solved,
};

/// How the solving went: what a plan must not hold because it differs from run to run, or because
/// it only explains.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SolveReport {
    /// What found the plan.
    pub backend: String,
    /// Value of the plan.
    pub objective: f64,
    /// No plan is better.
    pub bound: f64,
    /// How far the plan may be from the bound, as a share of it.
    pub gap: f64,
    /// The bound by the relaxation alone.
    pub relaxation_bound: f64,
    /// Time from problem to plan.
    pub solve_seconds: f64,
    /// Groups of neurons in the model.
    pub group_count: usize,
    /// Binaries that a general solver had to decide, where one was asked.
    pub open_groups: usize,
    /// Why a general solver did not come to an end, if it did not.
    pub trouble: Option<String>,
    /// What using a GPU takes before anything is on it. A smaller VRAM budget uses none of it.
    pub gpu_reserve_bytes: u64,
}

/// Writes down what was found for a problem whose layers go the ways taken.
pub(crate) fn write(
    problem: &Problem,
    options: &Options,
    solved: Solved,
    started: Instant,
) -> (Plan, SolveReport) {
    let gap = match options.objective {
        Objective::Impact => solved.bound - solved.value,
        Objective::Latency => solved.value - solved.bound,
    };
    let summary = SolverSummary {
        backend: solved.backend,
        objective: solved.value,
        bound: solved.bound,
        gap: match solved.bound > 0.0 {
            true => gap.max(0.0) / solved.bound,
            false => 0.0,
        },
    };
    let plan = write_plan(
        problem,
        options,
        &solved.places,
        summary,
        solved.vram_multiplier,
    );
    plan.validate().expect("a plan adds up and fits its budget");
    let report = SolveReport {
        backend: plan.solver.backend.clone(),
        objective: plan.solver.objective,
        bound: plan.solver.bound,
        gap: plan.solver.gap,
        relaxation_bound: solved.relaxation_bound,
        solve_seconds: started.elapsed().as_secs_f64(),
        group_count: problem
            .layers
            .iter()
            .map(|layer| layer.frequencies.len().div_ceil(problem.group_size))
            .sum(),
        open_groups: solved.open,
        trouble: solved.trouble,
        gpu_reserve_bytes: reserve_bytes(problem),
    };
    (plan, report)
}

fn write_plan(
    problem: &Problem,
    options: &Options,
    places: &Places,
    solver: SolverSummary,
    price: Option<f64>,
) -> Plan {
    let lines = lines(problem, places);
    let better = Better::than(problem);
    let layers: Vec<LayerPlan> = (0..problem.layers.len())
        .map(|index| layer_plan(problem, places, &better, index))
        .collect();
    let neuron_count = problem.layers.iter().map(|layer| layer.frequencies.len());
    let active: f64 = problem
        .layers
        .iter()
        .flat_map(|layer| &layer.frequencies)
        .sum();
    let hot_counts = places.hot_counts();
    let carried = objective::evaluate(problem, &hot_counts);
    let all_hot = hot_counts.iter().copied().eq(neuron_count.clone());
    Plan {
        objective: options.objective,
        group_size: problem.group_size,
        solver,
        budget: problem.budget.clone(),
        totals: Totals {
            gpu_bytes: bytes_on(Device::Gpu, &lines),
            cpu_bytes: bytes_on(Device::Cpu, &lines),
            neuron_count: neuron_count.map(|count| count as u64).sum(),
            hot_count: hot_counts.iter().map(|&count| count as u64).sum(),
            hot_share: share(carried, active, all_hot),
            microseconds_per_token: microseconds(cost::total(problem, places).total),
        },
        head: places.head,
        head_gpu: places.head_gpu,
        forecast: Some(Forecast {
            decode: Vec::new(),
            prompt_tokens_per_second: None,
            microseconds_per_gibibyte: price.map(|price| price * 1e6 * (1u64 << 30) as f64),
            baselines: baselines::all(problem),
        }),
        layers,
        hardware: problem.hardware.clone(),
        lines,
    }
}

fn layer_plan(problem: &Problem, places: &Places, better: &Better, index: usize) -> LayerPlan {
    let layer = &problem.layers[index];
    let place = &places.layers[index];
    let (neuron_count, hot_count) = (layer.frequencies.len(), place.hot_count);
    let bytes = |device: Device, neurons: usize| {
        let dense = [
            (place.attention, layer.attention_bytes),
            (place.predictor, layer.predictor_bytes),
            (place.kv, layer.kv_bytes),
        ];
        let here = dense
            .iter()
            .filter(|(layer_device, _)| *layer_device == device);
        here.map(|(_, bytes)| bytes).sum::<u64>() + layer.neurons_bytes(neurons)
    };
    let cost = cost::layer(problem, places, index);
    let carried: f64 = layer.frequencies[..hot_count].iter().sum();
    let active = layer.frequencies.iter().sum();
    LayerPlan {
        layer: index,
        policy: layer.mode.policy,
        reason: String::new(), // whoever chose the policy knows
        threshold: None,       // and how
        input_thresholds: None,
        neuron_count,
        hot_count,
        hot_share: share(carried, active, hot_count == neuron_count),
        neuron_bytes: layer.neuron_bytes,
        gpu: place.gpu,
        attention: place.attention,
        kv: place.kv,
        predictor: (layer.predictor_bytes > 0).then_some(place.predictor),
        gpu_bytes: bytes(Device::Gpu, hot_count),
        cpu_bytes: bytes(Device::Cpu, neuron_count - hot_count),
        gpu_microseconds: microseconds(cost.gpu),
        cpu_microseconds: microseconds(cost.cpu),
        sync_microseconds: microseconds(cost.sync),
        microseconds: microseconds(cost.total),
        limit: Some(better.limit(problem, places, index)),
    }
}

/// `part` of `all` to six places; of neurons that never fire, all or nothing.
fn share(part: f64, all: f64, complete: bool) -> f64 {
    if complete {
        return 1.0;
    }
    if all <= 0.0 {
        return 0.0;
    }
    ((part / all * 1e6).round() / 1e6).clamp(0.0, 1.0) + 0.0
}

/// To the nanosecond: a plan is read by people.
fn microseconds(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e3
}
