//! From a problem to a plan: dense parts first, then the neurons, then the account of both.

use std::time::{Duration, Instant};

use powerinfer_artifact::plan::{Device, LayerPlan, Objective, Plan, SolverSummary, Totals};

use crate::{
    Problem, SolveError,
    account::{bytes_on, lines, too_small},
    cost,
    dense::{DensePlaces, place_dense, reserve_bytes},
    impact::{self, Answer},
    objective,
    program::Program,
};

/// How to solve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// What to optimise.
    pub objective: Objective,
    /// How long the integer program may take before the best plan so far is taken.
    pub time_limit: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            objective: Objective::Impact,
            time_limit: Duration::from_secs(20),
        }
    }
}

/// How the solving went: what a plan must not hold because it differs from run to run, or because
/// it only explains.
#[derive(Debug, Clone, PartialEq)]
pub struct SolveReport {
    /// What found the plan: `microlp` or `greedy`.
    pub backend: String,
    /// Value of the plan.
    pub objective: f64,
    /// No plan is worth more.
    pub bound: f64,
    /// `(bound − objective) / bound`.
    pub gap: f64,
    /// The bound by the linear relaxation alone.
    pub relaxation_bound: f64,
    /// Time from problem to plan.
    pub solve_seconds: f64,
    /// Groups of neurons in the model.
    pub group_count: usize,
    /// Those that the relaxation left for the integer program to decide.
    pub open_groups: usize,
    /// Why the integer program was not solved to the end, if it was not.
    pub trouble: Option<String>,
    /// What using the GPU takes before anything is on it. A smaller VRAM budget uses none of it.
    pub gpu_reserve_bytes: u64,
}

/// Places every part of a model within the budget.
///
/// The same problem gives the same plan, unless the time limit cuts the search. Any VRAM budget
/// works, down to none; a RAM budget that is too small is an error that names a sufficient one.
pub fn place(problem: &Problem, options: &Options) -> Result<(Plan, SolveReport), SolveError> {
    let started = Instant::now();
    problem.validate()?;
    let places = place_dense(problem);
    let all_cold = vec![0; problem.layers.len()];
    let cold_bytes = bytes_on(Device::Cpu, &lines(problem, &places, &all_cold));
    let must_be_hot = cold_bytes.saturating_sub(problem.budget.ram_bytes);
    let program = Program::new(problem, places.left_bytes, must_be_hot);
    let answer = match options.objective {
        Objective::Impact => impact::solve(&program, options.time_limit),
    };
    let answer = answer.map_err(|most_hot_bytes| {
        let needed = cold_bytes - most_hot_bytes;
        too_small(problem, &places, most_hot_bytes, needed)
    })?;
    let plan = write_plan(problem, options, &places, &program, &answer);
    plan.validate().expect("a plan adds up and fits its budget");
    let report = SolveReport {
        backend: plan.solver.backend.clone(),
        objective: plan.solver.objective,
        bound: plan.solver.bound,
        gap: plan.solver.gap,
        relaxation_bound: answer.relaxation_bound,
        solve_seconds: started.elapsed().as_secs_f64(),
        group_count: problem
            .layers
            .iter()
            .map(|layer| layer.frequencies.len().div_ceil(problem.group_size))
            .sum(),
        open_groups: answer.open_groups,
        trouble: answer.trouble,
        gpu_reserve_bytes: reserve_bytes(problem),
    };
    Ok((plan, report))
}

fn write_plan(
    problem: &Problem,
    options: &Options,
    places: &DensePlaces,
    program: &Program,
    answer: &Answer,
) -> Plan {
    let hot_counts = program.hot_counts(&answer.choice);
    let lines = lines(problem, places, &hot_counts);
    // The plan's own value; the answer's bound may differ from it by the order of summation.
    let value = objective::evaluate(problem, &hot_counts);
    let bound = if answer.bound > answer.mass {
        answer.bound.max(value)
    } else {
        value
    };
    let layers: Vec<LayerPlan> = (0..problem.layers.len())
        .map(|index| layer_plan(problem, places, index, hot_counts[index]))
        .collect();
    let neuron_count = problem.layers.iter().map(|layer| layer.frequencies.len());
    let active: f64 = problem
        .layers
        .iter()
        .flat_map(|layer| &layer.frequencies)
        .sum();
    let all_hot = hot_counts.iter().copied().eq(neuron_count.clone());
    let time = (0..layers.len())
        .map(|index| cost::layer(problem, places, index, hot_counts[index]))
        .fold(cost::head(problem, places), |sum, layer| sum + layer);
    Plan {
        objective: options.objective,
        group_size: problem.group_size,
        solver: SolverSummary {
            backend: answer.backend.to_owned(),
            objective: value,
            bound,
            gap: if bound > 0.0 {
                (bound - value) / bound
            } else {
                0.0
            },
        },
        budget: problem.budget.clone(),
        totals: Totals {
            gpu_bytes: bytes_on(Device::Gpu, &lines),
            cpu_bytes: bytes_on(Device::Cpu, &lines),
            neuron_count: neuron_count.map(|count| count as u64).sum(),
            hot_count: hot_counts.iter().map(|&count| count as u64).sum(),
            hot_share: share(value, active, all_hot),
            microseconds_per_token: microseconds(time.total),
        },
        head: places.head,
        layers,
        hardware: problem.hardware.clone(),
        lines,
    }
}

fn layer_plan(
    problem: &Problem,
    places: &DensePlaces,
    index: usize,
    hot_count: usize,
) -> LayerPlan {
    let layer = &problem.layers[index];
    let neuron_count = layer.frequencies.len();
    let bytes = |device: Device, neurons: usize| {
        let dense = [
            (places.attention[index], layer.attention_bytes),
            (places.predictor[index], layer.predictor_bytes),
            (places.kv[index], layer.kv_bytes),
        ];
        let here = dense.iter().filter(|(home, _)| *home == device);
        here.map(|(_, bytes)| bytes).sum::<u64>() + layer.neurons_bytes(neurons)
    };
    let cost = cost::layer(problem, places, index, hot_count);
    let carried = layer.frequencies[..hot_count].iter().sum();
    let active = layer.frequencies.iter().sum();
    LayerPlan {
        layer: index,
        policy: layer.policy,
        neuron_count,
        hot_count,
        hot_share: share(carried, active, hot_count == neuron_count),
        neuron_bytes: layer.neuron_bytes,
        attention: places.attention[index],
        kv: places.kv[index],
        predictor: (layer.predictor_bytes > 0).then_some(places.predictor[index]),
        gpu_bytes: bytes(Device::Gpu, hot_count),
        cpu_bytes: bytes(Device::Cpu, neuron_count - hot_count),
        gpu_microseconds: microseconds(cost.gpu),
        cpu_microseconds: microseconds(cost.cpu),
        sync_microseconds: microseconds(cost.sync),
        microseconds: microseconds(cost.total),
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
    ((part / all * 1e6).round() / 1e6).min(1.0)
}

/// To the nanosecond: a plan is read by people.
fn microseconds(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e3
}
