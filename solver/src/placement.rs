//! From a problem to a plan: what is best by the objective, written down with the account of every
//! memory and the expected time of every part.

use std::{
    fmt,
    time::{Duration, Instant},
};

use powerinfer_artifact::plan::{
    Device, LayerPlan, Limit, Objective, Outlook, Plan, SolverSummary, Totals,
};
use serde::Serialize;

use crate::{
    Candidate, Problem, SolveError,
    account::{bytes_on, lines, too_small},
    baselines, cost,
    decomposition::{self, Infeasible},
    dense::{place_dense, reserve_bytes},
    impact, latency, mixed_integer, objective,
    places::Places,
    program::Program,
};

/// What solves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    /// Whatever proves its answer first.
    #[default]
    Auto,
    /// One price on memory, exact choices layer by layer, and an exact search for what is left.
    Decomposition,
    /// The mixed integer program by microlp.
    Microlp,
    /// The mixed integer program by HiGHS, where this program was built with it.
    Highs,
}

impl fmt::Display for Backend {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Auto => "auto",
            Self::Decomposition => "decomposition",
            Self::Microlp => "microlp",
            Self::Highs => "highs",
        })
    }
}

impl Backend {
    /// Whether this program was built with it.
    pub fn is_built_in(self) -> bool {
        self != Self::Highs || cfg!(feature = "highs")
    }
}

/// How to solve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// What to optimise.
    pub objective: Objective,
    /// What solves.
    pub backend: Backend,
    /// How long a general solver may take before the best plan so far is taken.
    pub time_limit: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            objective: Objective::Latency,
            backend: Backend::Auto,
            time_limit: Duration::from_secs(10),
        }
    }
}

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

/// A placement as it was found, by whichever objective.
pub(crate) struct Solved {
    pub(crate) places: Places,
    pub(crate) backend: String,
    /// In the objective's own unit.
    pub(crate) value: f64,
    pub(crate) bound: f64,
    pub(crate) relaxation_bound: f64,
    pub(crate) open: usize,
    pub(crate) trouble: Option<String>,
    /// Seconds that a byte more VRAM saves.
    pub(crate) price: Option<f64>,
}

/// Places every part of a model within the budget, each layer going the one way it has.
///
/// The same problem gives the same plan, unless a time limit cuts the search. A budget of RAM that
/// is too small, or of VRAM for what is pinned to it, is an error that names a sufficient one.
pub fn place(problem: &Problem, options: &Options) -> Result<(Plan, SolveReport), SolveError> {
    let only = |layer: &crate::Layer| {
        vec![Candidate {
            way: layer.way,
            frequencies: layer.frequencies.clone(),
            foresight_bytes: layer.predictor_bytes,
            allowed: true,
        }]
    };
    let candidates: Vec<Vec<Candidate>> = problem.layers.iter().map(only).collect();
    let decision = crate::decide(problem, &candidates, options)?;
    Ok((decision.plan, decision.report))
}

/// Solves by the paper's objective, each layer going the one way it has.
pub(crate) fn solve_impact(problem: &Problem, options: &Options) -> Result<Solved, SolveError> {
    let gpus = problem.budget.vram_split.len();
    if gpus > 1 {
        return Err(SolveError::ImpactGpus { gpus });
    }
    let (places, left_bytes) = place_dense(problem);
    if let Some(error) = pinned_too_much(problem, &places, left_bytes) {
        return Err(error);
    }
    let cold_bytes = bytes_on(Device::Cpu, &lines(problem, &places));
    let must_be_hot = cold_bytes.saturating_sub(problem.budget.ram_bytes);
    let program = Program::new(problem, left_bytes, must_be_hot);
    let answer = impact::solve(&program, options.backend, options.time_limit);
    let answer = answer.map_err(|most_hot| {
        let least = places.clone().with_hot(&most_hot);
        let needed = bytes_on(Device::Cpu, &lines(problem, &least));
        too_small(problem, &least, Device::Cpu, needed)
    })?;
    let places = places.with_hot(&program.hot_counts(&answer.choice));
    // The plan's own value; the answer's bound may differ from it by the order of summation.
    let value = objective::evaluate(problem, &places.hot_counts());
    let bound = match answer.bound > answer.mass {
        true => answer.bound.max(value),
        false => value,
    };
    Ok(Solved {
        places,
        backend: answer.backend.to_owned(),
        value,
        bound,
        relaxation_bound: answer.relaxation_bound,
        open: answer.open_groups,
        trouble: answer.trouble,
        price: None,
    })
}

/// The error where what is pinned to the GPU does not fit it in the order of the paper.
fn pinned_too_much(problem: &Problem, places: &Places, left_bytes: u64) -> Option<SolveError> {
    let layers = problem.layers.iter().zip(&places.layers);
    let left_out = layers
        .clone()
        .filter(|(layer, place)| {
            layer.pins.attention == Some(Device::Gpu) && place.attention != Device::Gpu
        })
        .map(|(layer, _)| layer.attention_bytes)
        .sum::<u64>()
        + match problem.head_pin == Some(Device::Gpu) && places.head != Device::Gpu {
            true => problem.head_bytes,
            false => 0,
        };
    let neurons: u64 = layers
        .filter(|(layer, _)| layer.pins.neurons == Some(Device::Gpu))
        .map(|(layer, _)| layer.neurons_bytes(layer.frequencies.len()))
        .sum();
    let missing = (left_out + neurons).saturating_sub(left_bytes);
    (missing > 0).then(|| {
        let needed = problem.budget.vram_bytes.max(reserve_bytes(problem)) + missing;
        let mut least = places.clone();
        for (place, layer) in least.layers.iter_mut().zip(&problem.layers) {
            if layer.pins.attention == Some(Device::Gpu) {
                place.attention = Device::Gpu;
            }
            if layer.pins.neurons == Some(Device::Gpu) {
                place.hot_count = layer.frequencies.len();
            }
        }
        if problem.head_pin == Some(Device::Gpu) {
            least.head = Device::Gpu;
        }
        too_small(problem, &least, Device::Gpu, needed)
    })
}

/// Solves by time, each layer going the best of the ways it may; gives which.
pub(crate) fn solve_latency(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    options: &Options,
) -> Result<(Solved, Vec<usize>), SolveError> {
    let chain = latency::chain(problem, candidates);
    let always = problem.embedding_bytes + problem.cpu_scratch_bytes;
    if always > problem.budget.ram_bytes {
        let least = decomposition::fullest(&chain);
        let least = least.map(|least| least.taken.iter().map(|t| t.choice.cpu_bytes).sum());
        let infeasible = match least {
            Ok(needed) => Infeasible::Cpu { needed },
            Err(infeasible) => infeasible,
        };
        return Err(explain(problem, candidates, &chain, infeasible));
    }
    let mut answer = decomposition::solve(&chain)
        .map_err(|infeasible| explain(problem, candidates, &chain, infeasible))?;
    let gap = (answer.cost - answer.bound) / answer.cost.abs();
    let general = match options.backend {
        Backend::Decomposition => None,
        Backend::Auto if gap <= decomposition::GOOD_ENOUGH => None,
        Backend::Auto if Backend::Highs.is_built_in() => Some(Backend::Highs),
        Backend::Auto => Some(Backend::Microlp),
        general => Some(general),
    };
    let (mut open, mut trouble) = (0, None);
    let mut backend = Backend::Decomposition;
    if let Some(general) = general {
        let relaxation_bound = answer.relaxation_bound;
        if options.backend != Backend::Auto {
            // Who asks for a general solver wants its proof, not another one's.
            answer.bound = relaxation_bound;
        }
        let improved = mixed_integer::improve(&chain, &answer, general, options.time_limit);
        open = improved.open;
        if improved.trouble.is_none() || improved.answer.cost < answer.cost {
            backend = general;
        }
        answer = improved.answer;
        trouble = improved.trouble;
    }
    let (places, ways) = latency::places(problem, candidates, &answer.taken);
    let taken = crate::decide::take(problem, candidates, &ways);
    // The plan's own value, evaluated part by part.
    let seconds = cost::total(&taken, &places).total;
    let is_optimal = answer.bound >= answer.cost * (1.0 - 1e-12);
    let bound = match is_optimal {
        true => seconds,
        false => answer.bound.min(seconds),
    };
    let solved = Solved {
        places,
        backend: backend.to_string(),
        value: 1e6 * seconds,
        bound: 1e6 * bound,
        relaxation_bound: 1e6 * answer.relaxation_bound.min(seconds),
        open,
        trouble,
        price: answer.gpu_prices.first().copied(),
    };
    Ok((solved, ways))
}

/// Why nothing fits, in lines of the account.
fn explain(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    chain: &crate::chain::Chain,
    infeasible: Infeasible,
) -> SolveError {
    match infeasible {
        Infeasible::Gpu { .. } if chain.capacities.len() > 1 => SolveError::PinnedToGpus,
        Infeasible::Gpu { needed } => {
            let mut least = Places::cold(problem);
            for (place, layer) in least.layers.iter_mut().zip(&problem.layers) {
                if layer.pins.attention == Some(Device::Gpu) {
                    place.attention = Device::Gpu;
                }
                if layer.pins.neurons == Some(Device::Gpu) {
                    place.hot_count = layer.frequencies.len();
                }
            }
            if problem.head_pin == Some(Device::Gpu) {
                least.head = Device::Gpu;
            }
            let needed = needed + reserve_bytes(problem);
            too_small(problem, &least, Device::Gpu, needed)
        }
        Infeasible::Cpu { needed } => {
            let always = problem.embedding_bytes + problem.cpu_scratch_bytes;
            match decomposition::fullest(chain) {
                Ok(fullest) => {
                    let (least, ways) = latency::places(problem, candidates, &fullest.taken);
                    let taken = crate::decide::take(problem, candidates, &ways);
                    too_small(&taken, &least, Device::Cpu, needed + always)
                }
                Err(_) => too_small(
                    problem,
                    &Places::cold(problem),
                    Device::Cpu,
                    needed + always,
                ),
            }
        }
    }
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
    let plan = write_plan(problem, options, &solved.places, summary, solved.price);
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
        outlook: Some(Outlook {
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
        let here = dense.iter().filter(|(home, _)| *home == device);
        here.map(|(_, bytes)| bytes).sum::<u64>() + layer.neurons_bytes(neurons)
    };
    let cost = cost::layer(problem, places, index);
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

/// Machines that are better than a problem's in one way each, to tell what limits it.
struct Better(Vec<(Limit, Problem)>);

impl Better {
    fn than(problem: &Problem) -> Self {
        let with = |limit: Limit| {
            let mut machine = problem.without_layers();
            let (cpu, gpu) = (&mut machine.hardware.cpu, &mut machine.hardware.gpu);
            match (limit, gpu) {
                (Limit::CpuMemory, _) => cpu.read_bandwidth_bytes_per_second = f64::INFINITY,
                (Limit::Kernels, gpu) => {
                    (cpu.kernel_seconds, cpu.layer_seconds) = (0.0, 0.0);
                    (cpu.row_seconds, cpu.sum_row_seconds) = (0.0, 0.0);
                    if let Some(gpu) = gpu {
                        gpu.kernel_launch_seconds = 0.0;
                    }
                }
                (Limit::GpuMemory, Some(gpu)) => {
                    gpu.read_bandwidth_bytes_per_second = f64::INFINITY;
                }
                (Limit::HandOver, Some(gpu)) => {
                    (gpu.hand_over_seconds, gpu.pcie_latency_seconds) = (0.0, 0.0);
                    gpu.pcie_bandwidth_bytes_per_second = f64::INFINITY;
                }
                (_, None) => {}
            }
            (limit, machine)
        };
        let limits = [
            Limit::CpuMemory,
            Limit::GpuMemory,
            Limit::HandOver,
            Limit::Kernels,
        ];
        Self(limits.map(with).into())
    }

    /// What the time of a layer waits for: whatever would shorten it most if it took no time.
    fn limit(&self, problem: &Problem, places: &Places, index: usize) -> Limit {
        let mut least = (f64::INFINITY, Limit::CpuMemory);
        for (limit, machine) in &self.0 {
            let seconds = cost::layer_on(machine, problem, places, index).total;
            if seconds < least.0 {
                least = (seconds, *limit);
            }
        }
        least.1
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

    /// By the paper's objective, which takes whatever fits.
    fn impact() -> Options {
        Options {
            objective: Objective::Impact,
            ..Options::default()
        }
    }

    fn placed(problem: &Problem) -> Plan {
        place(problem, &impact()).unwrap().0
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
            let error = place(&problem, &impact()).unwrap_err();
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
            assert!(place(&problem, &impact()).is_err());
            // Not even the embeddings.
            problem.budget.ram_bytes = 50_000;
            let error = place(&problem, &impact()).unwrap_err();
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
            let options = Options {
                backend: Backend::Microlp,
                ..impact()
            };
            let (plan, report) = place(&problem, &options).unwrap();
            assert_eq!(report.trouble, None);
            assert_eq!(
                (plan.solver.backend.as_str(), plan.solver.gap),
                ("microlp", 0.0)
            );
            let (other, _) = place(&problem, &impact()).unwrap();
            assert!(
                (other.solver.objective - plan.solver.objective).abs()
                    < 1e-9 * plan.solver.objective
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
            let options = Options { time_limit: Duration::from_millis(200), ..impact() };
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

    #[test]
    fn time_is_optimal_with_proof_at_the_shape_of_a_7b_model() {
        let mut problem = samples::shaped(32, 11008, samples::power_law);
        for layer in &mut problem.layers {
            layer.attention_bytes = 37_748_736;
            layer.attention_read_bytes = 37_748_736;
            layer.kv_bytes = 33_554_432;
        }
        for vram in [0, 1 << 30, 2 << 30, 3 << 30, 4 << 30, 24 << 30] {
            let problem = with_vram(problem.clone(), vram);
            let (plan, report) = place(&problem, &Options::default()).unwrap();
            assert_eq!(plan.objective, Objective::Latency);
            assert!(report.gap <= 1e-3, "{vram}: {}", report.gap);
            assert!((plan.solver.objective - plan.totals.microseconds_per_token).abs() < 1e-3);
            let (paper, _) = place(&problem, &impact()).unwrap();
            let [ours, theirs] = [&plan, &paper].map(|plan| plan.totals.microseconds_per_token);
            assert!(ours <= theirs, "{vram}: {ours} but {theirs}");
        }
    }

    #[test]
    fn layers_of_several_gpus_are_ranges_and_each_budget_is_kept() {
        let mut problem = samples::shaped(12, 2048, samples::power_law);
        let reserve = reserve_bytes(&problem);
        let time = |problem: &Problem| {
            let (plan, _) = place(problem, &Options::default()).unwrap();
            assert!(plan.layers.is_sorted_by_key(|layer| layer.gpu));
            for (gpu, budget) in problem.budget.vram_per_gpu().into_iter().enumerate() {
                let lines = plan.lines.iter();
                let here = lines.filter(|line| line.device == Device::Gpu && line.gpu == gpu);
                assert!(here.map(|line| line.bytes).sum::<u64>() <= budget);
            }
            (
                plan.totals.microseconds_per_token,
                plan.layers.iter().map(|l| l.gpu).max(),
            )
        };
        let mut at = |split: &[u64]| {
            let split: Vec<u64> = split.iter().map(|bytes| reserve + bytes).collect();
            problem.budget.vram_bytes = split.iter().sum();
            problem.budget.vram_split = if split.len() > 1 { split } else { Vec::new() };
            time(&problem)
        };
        let half = 60_000_000;
        let (one, _) = at(&[half]);
        let (two, last) = at(&[half, half]);
        let (large, _) = at(&[2 * half]);
        assert!(two < one, "{two} {one}");
        assert!(large <= two, "a hop costs something: {large} {two}");
        assert_eq!(last, Some(1));
    }

    #[test]
    fn what_is_pinned_stays_there_and_what_cannot_be_is_told() {
        let mut problem = samples::shaped(3, 640, samples::power_law);
        let reserve = reserve_bytes(&problem);
        problem.budget.vram_bytes = reserve + 2_000_000;
        for options in [Options::default(), impact()] {
            let mut pinned = problem.clone();
            pinned.head_pin = Some(Device::Cpu);
            pinned.layers[1].pins.neurons = Some(Device::Cpu);
            pinned.layers[2].pins.attention = Some(Device::Cpu);
            pinned.layers[0].pins.attention = Some(Device::Gpu);
            let (plan, _) = place(&pinned, &options).unwrap();
            assert_eq!(plan.head, Device::Cpu);
            assert_eq!(plan.layers[1].hot_count, 0);
            let homes: Vec<Device> = plan.layers.iter().map(|layer| layer.attention).collect();
            assert_eq!((homes[0], homes[2]), (Device::Gpu, Device::Cpu));
            // 640 neurons are 4.4 MB.
            pinned.layers[2].pins.neurons = Some(Device::Gpu);
            let error = place(&pinned, &options).unwrap_err();
            let SolveError::TooSmall {
                device: Device::Gpu,
                line,
                needed,
                ..
            } = &error
            else {
                panic!("{error}");
            };
            assert_eq!(line, HOT_NEURONS);
            pinned.budget.vram_bytes = *needed;
            let (plan, _) = place(&pinned, &options).unwrap();
            assert_eq!(plan.layers[2].hot_count, 640);
            pinned.budget.vram_bytes = 0;
            let error = place(&pinned, &options).unwrap_err();
            assert!(matches!(error, SolveError::PinnedToNoGpu { .. }), "{error}");
        }
    }
}
