//! From a problem to a plan: dense parts first, then the neurons, then the account of both.

use std::time::{Duration, Instant};

use powerinfer_artifact::plan::{Device, LayerPlan, Objective, Plan, SolverSummary, Totals};
use serde::Serialize;

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
            time_limit: Duration::from_secs(10),
        }
    }
}

/// How the solving went: what a plan must not hold because it differs from run to run, or because
/// it only explains.
#[derive(Debug, Clone, PartialEq, Serialize)]
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
    let carried: f64 = layer.frequencies[..hot_count].iter().sum();
    let active = layer.frequencies.iter().sum();
    LayerPlan {
        layer: index,
        policy: layer.way.policy,
        reason: String::new(), // whoever chose the policy knows
        threshold: None,       // and how
        input_thresholds: None,
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
    ((part / all * 1e6).round() / 1e6).clamp(0.0, 1.0) + 0.0
}

/// To the nanosecond: a plan is read by people.
fn microseconds(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e3
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::plan::{COLD_NEURONS, HOT_NEURONS};
    use proptest::prelude::*;

    use super::*;
    use crate::samples;

    fn placed(problem: &Problem) -> Plan {
        place(problem, &Options::default()).unwrap().0
    }

    fn with_vram(mut problem: Problem, vram_bytes: u64) -> Problem {
        problem.budget.vram_bytes = vram_bytes;
        problem
    }

    #[test]
    fn an_unlimited_budget_makes_every_neuron_hot() {
        let mut problem = samples::shaped(3, 200, samples::power_law);
        for hand_over in [0.0, 20e-6, 1.0] {
            problem.hardware.gpu.as_mut().unwrap().hand_over_seconds = hand_over;
            let plan = placed(&problem);
            assert!(
                plan.layers
                    .iter()
                    .all(|layer| layer.hot_count == 200 && layer.hot_share == 1.0)
            );
            assert!(
                plan.layers
                    .iter()
                    .all(|layer| layer.sync_microseconds == 0.0 || layer.layer == 0)
            );
            assert_eq!(plan.line(COLD_NEURONS), 0);
            assert_eq!((plan.totals.hot_share, plan.solver.gap), (1.0, 0.0));
        }
    }

    #[test]
    fn no_vram_puts_everything_on_the_cpu() {
        let problem = samples::shaped(3, 200, samples::power_law);
        let without_gpu = |vram| {
            let mut problem = with_vram(problem.clone(), vram);
            problem.hardware.gpu = None;
            problem
        };
        for problem in [
            with_vram(problem.clone(), 0),
            with_vram(problem.clone(), 1000),
            without_gpu(0),
        ] {
            let plan = placed(&problem);
            assert!(plan.lines.iter().all(|line| line.device == Device::Cpu));
            assert_eq!((plan.totals.gpu_bytes, plan.totals.hot_count), (0, 0));
            assert_eq!(
                (plan.head, plan.layers[0].attention),
                (Device::Cpu, Device::Cpu)
            );
            assert!(
                plan.layers
                    .iter()
                    .all(|layer| layer.gpu_microseconds == 0.0)
            );
            assert_eq!(
                plan.solver.objective.to_bits(),
                0f64.to_bits(),
                "and not −0"
            );
        }
    }

    #[test]
    fn the_same_problem_gives_the_same_bytes() {
        let problem = with_vram(samples::shaped(4, 1000, samples::power_law), 530 << 20);
        let json = || serde_json::to_string_pretty(&placed(&problem)).unwrap();
        assert_eq!(json(), json());
    }

    #[test]
    fn too_little_ram_names_the_line_and_a_budget_that_works() {
        let mut problem = samples::shaped(3, 640, samples::power_law);
        problem.hardware.gpu.as_mut().unwrap().hand_over_seconds = 0.0;
        for vram in [0, 512 << 20, (512 << 20) + 8_000_000] {
            let mut problem = with_vram(problem.clone(), vram);
            problem.budget.ram_bytes = 1_000_000;
            let error = place(&problem, &Options::default()).unwrap_err();
            let SolveError::TooSmall {
                device: Device::Cpu,
                line,
                needed,
                ..
            } = &error
            else {
                panic!("{error}");
            };
            assert_eq!(line, COLD_NEURONS);
            assert!(error.to_string().contains("allow `"), "{error}");
            problem.budget.ram_bytes = *needed;
            let plan = placed(&problem);
            assert_eq!(plan.totals.cpu_bytes, *needed);
            problem.budget.ram_bytes -= 1;
            assert!(place(&problem, &Options::default()).is_err());
            // Not even the embeddings.
            problem.budget.ram_bytes = 50_000;
            let error = place(&problem, &Options::default()).unwrap_err();
            assert!(matches!(&error, SolveError::TooSmall { needed: same, .. } if same == needed));
        }
    }

    #[test]
    fn a_tied_head_on_the_cpu_is_the_embeddings() {
        let mut problem = with_vram(samples::small(), 0);
        let apart = placed(&problem).totals.cpu_bytes;
        problem.tied_head = true;
        assert_eq!(
            placed(&problem).totals.cpu_bytes,
            apart - problem.head_bytes
        );
        let on_gpu = placed(&with_vram(problem, 24 << 30));
        assert_eq!(on_gpu.line("head"), 100_000);
    }

    #[test]
    fn more_hot_neurons_are_predicted_to_be_faster() {
        let problem = samples::shaped(4, 6400, samples::power_law);
        let time = |vram| {
            placed(&with_vram(problem.clone(), vram))
                .totals
                .microseconds_per_token
        };
        let reserve = reserve_bytes(&problem);
        let times = [0, reserve + 20_000_000, reserve + 100_000_000, 24 << 30].map(time);
        assert!(times.is_sorted_by(|a, b| a > b), "{times:?}");
    }

    #[test]
    fn a_7b_model_is_solved_to_optimality() {
        let mut problem = samples::shaped(32, 11008, samples::power_law);
        for layer in &mut problem.layers {
            layer.attention_bytes = 37_748_736;
            layer.kv_bytes = 33_554_432;
        }
        problem.budget.vram_bytes = 4 << 30;
        for hand_over in [0.0, 20e-6, 300e-6] {
            problem.hardware.gpu.as_mut().unwrap().hand_over_seconds = hand_over;
            let (plan, report) = place(&problem, &Options::default()).unwrap();
            assert_eq!(report.trouble, None);
            assert_eq!(
                (plan.solver.backend.as_str(), plan.solver.gap),
                ("microlp", 0.0)
            );
            assert_eq!(report.group_count, 32 * 172);
            assert!(plan.totals.hot_count > 0 && plan.totals.hot_count < 32 * 11008);
            assert!(plan.layers.iter().all(|layer| layer.hot_count % 64 == 0));
        }
    }

    proptest! {
        #[test]
        fn every_plan_adds_up_and_keeps_its_budget(
            shape in (1usize..5, 1usize..300, 1usize..80),
            vram in 0u64..16_000_000,
            ram in 0u64..16_000_000,
            hand_over in prop_oneof![Just(0.0), 0.0..40e-6],
            context in 0u64..1_000_000,
        ) {
            let (layer_count, neuron_count, group_size) = shape;
            let mut problem = samples::shaped(layer_count, neuron_count, samples::power_law);
            problem.group_size = group_size;
            problem.budget.vram_bytes = vram;
            problem.budget.ram_bytes = ram;
            let gpu = problem.hardware.gpu.as_mut().unwrap();
            gpu.hand_over_seconds = hand_over;
            gpu.context_bytes = context;
            // In a debug build uneven groups can take the solver long; any plan will do here.
            let options = Options { time_limit: Duration::from_millis(200), ..Options::default() };
            match place(&problem, &options) {
                Ok((plan, report)) => {
                    plan.validate().unwrap();
                    prop_assert!(plan.totals.gpu_bytes <= vram && plan.totals.cpu_bytes <= ram);
                    let hot: Vec<usize> = plan.layers.iter().map(|layer| layer.hot_count).collect();
                    prop_assert_eq!(plan.solver.objective, objective::evaluate(&problem, &hot));
                    prop_assert!(plan.solver.bound >= plan.solver.objective);
                    prop_assert!(report.gap >= 0.0 && report.gap <= 1.0);
                    let hot_bytes: u64 = hot.iter().map(|&count| count as u64 * 6912).sum();
                    prop_assert_eq!(plan.line(HOT_NEURONS), hot_bytes);
                    // Every byte of the model is somewhere, once.
                    let model = problem.embedding_bytes
                        + problem.head_bytes
                        + layer_count as u64 * (80_000 + 6912 * neuron_count as u64);
                    let overhead: u64 = ["scratch", "CUDA context and reserve"]
                        .iter()
                        .flat_map(|name| plan.lines.iter().filter(move |line| line.name == *name))
                        .map(|line| line.bytes)
                        .sum();
                    prop_assert_eq!(plan.totals.gpu_bytes + plan.totals.cpu_bytes, model + overhead);
                }
                Err(SolveError::TooSmall { needed, budget, .. }) => prop_assert!(needed > budget),
                Err(error) => prop_assert!(false, "{error}"),
            }
        }
    }
}
