//! Turns a solved placement into a plan, with the memory account and the predicted time of every part, and
//! into a report on the solver.

use std::time::Instant;

use powerinfer_artifact::plan::{
    Device, Forecast, LayerPlan, Objective, Plan, SolverSummary, Totals,
};
use serde::Serialize;

use crate::{
    Options, Problem,
    account::{account, bytes_on},
    baselines, cost,
    dense::reserve_bytes,
    limit::Relieved,
    objective,
    placement::Placement,
    solve::Solved,
};

/// Statistics of the solver: what a plan does not contain because it differs from run to run or is only
/// explanatory.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SolveReport {
    /// Solver that found the plan.
    pub backend: String,
    /// Value of the objective.
    pub objective: f64,
    /// Bound on the objective of every plan.
    pub bound: f64,
    /// Distance between objective and bound, as a share of the bound.
    pub gap: f64,
    /// Bound by the relaxation alone.
    pub relaxation_bound: f64,
    /// Wall-clock time from problem to plan, in seconds.
    pub solve_seconds: f64,
    /// Number of groups of neurons in the model.
    pub group_count: usize,
    /// Number of binary variables of the general solver; 0 if none was used.
    pub binary_variables: usize,
    /// Reason why a general solver proved nothing, if it did not.
    pub failure: Option<String>,
    /// Bytes that the use of a GPU takes before any part is placed on it. A smaller VRAM budget leaves the GPU
    /// unused.
    pub gpu_reserve_bytes: u64,
}

/// The plan and the report for `problem`, whose layers have the chosen execution modes.
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
        gap: if solved.bound > 0.0 {
            gap.max(0.0) / solved.bound
        } else {
            0.0
        },
    };
    let plan = write_plan(
        problem,
        options,
        &solved.placement,
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
        binary_variables: solved.open,
        failure: solved.failure,
        gpu_reserve_bytes: reserve_bytes(problem),
    };
    (plan, report)
}

fn write_plan(
    problem: &Problem,
    options: &Options,
    placement: &Placement,
    solver: SolverSummary,
    price: Option<f64>,
) -> Plan {
    let (lines, prompt_batch) = account(problem, placement);
    let relieved = Relieved::new(problem);
    let layers: Vec<LayerPlan> = (0..problem.layers.len())
        .map(|index| layer_plan(problem, placement, &relieved, index))
        .collect();
    let neuron_count = problem.layers.iter().map(|layer| layer.frequencies.len());
    let active: f64 = problem
        .layers
        .iter()
        .flat_map(|layer| &layer.frequencies)
        .sum();
    let hot_counts = placement.hot_counts();
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
            microseconds_per_token: microseconds(cost::total(problem, placement).total),
        },
        head: placement.head,
        head_gpu: placement.head_gpu,
        prompt_batch,
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

fn layer_plan(
    problem: &Problem,
    placement: &Placement,
    relieved: &Relieved,
    index: usize,
) -> LayerPlan {
    let layer = &problem.layers[index];
    let place = &placement.layers[index];
    let (neuron_count, hot_count) = (layer.frequencies.len(), place.hot_count);
    let bytes = |device: Device, neurons: usize| {
        let dense = [
            (place.attention, layer.attention_bytes),
            (place.predictor, layer.predictor_bytes),
            (place.kv, layer.kv_bytes),
        ];
        let here = dense
            .iter()
            .filter(|(part_device, _)| *part_device == device);
        here.map(|(_, bytes)| bytes).sum::<u64>() + layer.neurons_bytes(neurons)
    };
    let cost = cost::layer(problem, placement, index);
    let carried: f64 = layer.frequencies[..hot_count].iter().sum();
    let active = layer.frequencies.iter().sum();
    LayerPlan {
        layer: index,
        policy: layer.mode.policy,
        // Set by the planner, which knows the candidates.
        reason: String::new(),
        threshold: None,
        input_thresholds: None,
        neuron_count,
        hot_count,
        cached_experts: 0,
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
        limit: Some(relieved.limit(problem, placement, index)),
    }
}

/// `part / all`, rounded to six places; 1 if `complete`, also if no neuron is ever active.
fn share(part: f64, all: f64, complete: bool) -> f64 {
    if complete {
        return 1.0;
    }
    if all <= 0.0 {
        return 0.0;
    }
    ((part / all * 1e6).round() / 1e6).clamp(0.0, 1.0) + 0.0
}

/// `seconds` in microseconds, rounded to nanoseconds.
fn microseconds(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e3
}
