//! The paper's objective through good_lp: maximise `Σ f_i a_i` over the neurons on the GPU.
//!
//! ```text
//! max  Σ_l ( M_l y_l + Σ_g f_lg x_lg )       M_l: mass of the layer's certain groups
//!      Σ_g x_lg ≤ K_l y_l                    none is hot, or the layer is used (K_l: its open groups)
//!      at_least ≤ Σ_l ( U_l y_l + Σ_g u_lg x_lg ) ≤ capacity          memory of both devices
//!      x, y ∈ {0, 1}
//! ```
//!
//! A layer's certain groups hold at least its `C_l` neurons, so `C_l y_l ≤ Σ a` needs no row of
//! its own. Which groups are certain and which are out of the question follows from the relaxation
//! and a greedy start without losing a better plan, and leaves tens of binaries out of tens of
//! thousands.

use std::{ops::RangeInclusive, time::Duration};

use good_lp::{Expression, ProblemVariables, ResolutionError, Variable, variable};

use crate::{
    Backend, decomposition, general, greedy,
    program::{Levels, Program},
    relaxation::{Block, ROUNDING, Relaxation, blocks_by_density},
};

/// Memory rows are scaled to this at most, so that the solver's tolerance stays below one byte.
const LARGEST_ROW: f64 = 1e6;

/// The best choice of levels found, and how good it is known to be.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) choice: Vec<usize>,
    /// Its value.
    pub(crate) mass: f64,
    /// No choice is worth more.
    pub(crate) bound: f64,
    /// The same, by the relaxation alone.
    pub(crate) relaxation_bound: f64,
    /// What found it.
    pub(crate) backend: &'static str,
    /// Groups that the integer program had to decide.
    pub(crate) open_groups: usize,
    /// Why the integer program was not solved to the end, if it was not.
    pub(crate) trouble: Option<String>,
}

/// Solves the program, or returns the hot counts of the most bytes that its capacity admits when even
/// these are fewer than required. Never worse than greedy; when the solver fails or `time_limit`
/// passes, the best choice found so far with its bound.
pub(crate) fn solve(
    program: &Program,
    backend: Backend,
    time_limit: Duration,
) -> Result<Answer, Vec<usize>> {
    let decomposed = match backend {
        Backend::Auto | Backend::Decomposition => decomposed(program)?,
        Backend::Microlp | Backend::Highs => {
            return generally(program, backend, time_limit);
        }
    };
    let is_proven = decomposed.bound <= decomposed.mass;
    if is_proven || backend == Backend::Decomposition {
        return Ok(decomposed);
    }
    let backend = match Backend::Highs.is_built_in() {
        true => Backend::Highs,
        false => Backend::Microlp,
    };
    let mut answer = generally(program, backend, time_limit)?;
    // Each bound holds, and so does each choice.
    if decomposed.mass > answer.mass {
        answer = Answer {
            bound: decomposed.bound.min(answer.bound),
            ..decomposed
        };
    } else {
        answer.bound = answer.bound.min(decomposed.bound).max(answer.mass);
    }
    Ok(answer)
}

/// Solves the program as a chain without ways between its layers.
fn decomposed(program: &Program) -> Result<Answer, Vec<usize>> {
    let chain = program.chain();
    let levels = |answer: &decomposition::Answer| -> Vec<usize> {
        let taken = answer.taken.iter();
        taken.map(|taken| taken.choice.what as usize).collect()
    };
    match decomposition::solve(&chain) {
        Ok(answer) => {
            let choice = levels(&answer);
            if !program.allows(&choice) {
                // Not even all of them are as many as are required.
                return Err(program.hot_counts(&choice));
            }
            let mass = program.mass(&choice);
            // The sum of the answer may be in another order.
            let is_proven = -answer.bound <= mass + ROUNDING * mass.abs();
            Ok(Answer {
                choice,
                mass,
                bound: if is_proven { mass } else { -answer.bound },
                relaxation_bound: (-answer.relaxation_bound).max(mass),
                backend: "decomposition",
                open_groups: 0,
                trouble: None,
            })
        }
        Err(_) => {
            let most = decomposition::fullest(&chain).expect("no neuron has to be hot");
            Err(program.hot_counts(&levels(&most)))
        }
    }
}

/// Solves the program by a general solver.
fn generally(
    program: &Program,
    backend: Backend,
    time_limit: Duration,
) -> Result<Answer, Vec<usize>> {
    let blocks = blocks_by_density(program);
    let mut start = greedy::fill(program, &blocks);
    if !program.allows(&start) {
        // The CPU's memory demands more on the GPU than greed put there: begin with the most.
        let fullest = program.fullest();
        let blocks = blocks_by_density(&fullest);
        let most = greedy::fill(&fullest, &blocks);
        start = improve(&fullest, &blocks, most, backend, time_limit).choice;
        if !program.allows(&start) {
            return Err(program.hot_counts(&start));
        }
    }
    Ok(improve(program, &blocks, start, backend, time_limit))
}

/// The best choice there is, from a feasible one.
fn improve(
    program: &Program,
    blocks: &[Block],
    start: Vec<usize>,
    backend: Backend,
    time_limit: Duration,
) -> Answer {
    let mut relaxation = Relaxation::solve(program, blocks, &start);
    // A step to each side of the start, so that there always is something to decide.
    for ((open, Levels(levels)), &level) in
        relaxation.open.iter_mut().zip(&program.layers).zip(&start)
    {
        open.open(level.saturating_sub(1));
        open.open((level + 1).min(levels.len() - 1));
    }
    let start_mass = program.mass(&start);
    let open_ranges = relaxation.open.iter().filter_map(|open| open.hot.clone());
    let open_groups = open_ranges.map(groups).sum();
    let mut answer = Answer {
        mass: start_mass,
        choice: start,
        bound: relaxation.bound,
        relaxation_bound: relaxation.bound,
        backend: "greedy",
        open_groups,
        trouble: None,
    };
    match solve_open(program, &relaxation, &answer.choice, backend, time_limit) {
        Err(error) => answer.trouble = Some(error.to_string()),
        Ok((choice, is_proven)) => {
            let mass = program.mass(&choice);
            if !program.allows(&choice) || mass < start_mass - ROUNDING * relaxation.bound {
                answer.trouble = Some("its answer is infeasible or worse than greedy's".to_owned());
                return answer;
            }
            answer.backend = match backend {
                Backend::Highs => "highs",
                _ => "microlp",
            };
            // Where both are equal but for rounding, greedy's choice is the plainer one.
            if mass > start_mass {
                answer.choice = choice;
                answer.mass = mass;
            }
            if is_proven {
                answer.bound = answer.mass;
            } else {
                answer.trouble = Some(format!("stopped after {time_limit:?}"));
            }
        }
    }
    answer
}

/// Groups beyond those that come with the lowest level of a range.
fn groups(hot: RangeInclusive<usize>) -> usize {
    hot.end() - hot.start()
}

/// The variables of a layer that may have hot neurons.
struct LayerVariables {
    /// `y`: the layer's lowest open level is hot.
    used: Variable,
    lowest: usize,
    /// `x`: one more group, for each open level above.
    groups: Vec<Variable>,
}

/// States the program over the open levels and has it solved from `start`; says whether that was to the
/// end.
fn solve_open(
    program: &Program,
    relaxation: &Relaxation,
    start: &[usize],
    backend: Backend,
    time_limit: Duration,
) -> Result<(Vec<usize>, bool), ResolutionError> {
    let mut variables = ProblemVariables::new();
    let mut layers = Vec::with_capacity(relaxation.open.len());
    for open in &relaxation.open {
        layers.push(open.hot.clone().map(|hot| LayerVariables {
            used: variables.add(if open.none {
                variable().binary()
            } else {
                variable().integer().min(1).max(1)
            }),
            lowest: *hot.start(),
            groups: variables.add_vector(variable().binary(), groups(hot)),
        }));
    }

    // In steps of the sizes' grid, where that is coarse enough: then all coefficients are integers.
    let scale = (1.0 / relaxation.step as f64).min(LARGEST_ROW / relaxation.capacity.max(1) as f64);
    let mut mass = Expression::default();
    let mut memory = Expression::default();
    let mut rows = Vec::new();
    let mut warm = Vec::new();
    for ((layer, Levels(levels)), &start) in layers.iter().zip(&program.layers).zip(start) {
        let Some(layer) = layer else { continue };
        let lowest = levels[layer.lowest];
        mass.add_mul(lowest.mass, layer.used);
        memory.add_mul(lowest.bytes as f64 * scale, layer.used);
        warm.push((layer.used, f64::from(start > 0)));
        let mut hot_groups = Expression::default();
        let steps = levels[layer.lowest..].windows(2);
        for (index, (step, &group)) in steps.zip(&layer.groups).enumerate() {
            let bytes = (step[1].bytes - step[0].bytes) as f64 * scale;
            mass.add_mul(step[1].mass - step[0].mass, group);
            memory.add_mul(bytes, group);
            hot_groups.add_mul(1.0, group);
            warm.push((group, f64::from(start > layer.lowest + index)));
        }
        rows.push((hot_groups - layer.groups.len() as f64 * layer.used).leq(0));
        // Groups of one size need no order, the hottest are worth most; the smaller last group
        // could otherwise fill a gap that hotter ones do not fit.
        if let [others @ .., last] = &layer.groups[..] {
            rows.extend(others.iter().map(|&other| (*last - other).leq(0)));
        }
    }
    if program.at_least > 0 {
        rows.push(memory.clone().geq(program.at_least as f64 * scale));
    }
    rows.push(memory.leq(relaxation.capacity as f64 * scale));

    let program = variables.maximise(mass);
    let found = general::solve(program, rows, Some(warm), backend, time_limit)?;
    let is_set = |variable: Variable| found.value(variable) > 0.5;
    let level = |layer: &LayerVariables| {
        if !is_set(layer.used) {
            return 0;
        }
        layer.lowest + layer.groups.iter().filter(|&&group| is_set(group)).count()
    };
    let choice = layers
        .iter()
        .map(|layer| layer.as_ref().map_or(0, level))
        .collect();
    Ok((choice, found.is_proven))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Layer, Problem, exhaustive, samples};

    const LIMIT: Duration = Duration::from_secs(60);

    /// A problem small enough to try everything: uneven groups, equal and dead neurons, layers of
    /// different sizes, synchronisations that cost nothing to more than a layer can save.
    fn tiny() -> impl Strategy<Value = Problem> {
        let frequency = prop_oneof![
            (0u32..=4).prop_map(|quarter| f64::from(quarter) / 4.0),
            0.0..1.0
        ];
        let layer = (proptest::collection::vec(frequency, 1..=9), 1u64..=40);
        let layers = proptest::collection::vec(layer, 1..=3);
        let group_size = 1usize..=4;
        let sync = prop_oneof![Just(0.0), 0.0..6.0];
        (layers, group_size, sync, any::<bool>()).prop_map(|(layers, group_size, sync, even)| {
            let mut problem = samples::small();
            problem.group_size = group_size;
            // One byte takes a second on the CPU and half of one on the GPU.
            problem.hardware.cpu.read_bandwidth_bytes_per_second = 1.0;
            let gpu = problem.hardware.gpu.as_mut().unwrap();
            gpu.read_bandwidth_bytes_per_second = 2.0;
            let common = layers[0].1;
            gpu.sync_seconds = sync * common as f64;
            let model = problem.layers[0].clone();
            problem.layers = layers
                .into_iter()
                .map(|(mut frequencies, bytes)| {
                    frequencies.sort_by(|a, b| b.total_cmp(a));
                    Layer {
                        frequencies,
                        neuron_bytes: if even { common } else { bytes },
                        ..model.clone()
                    }
                })
                .collect();
            problem
        })
    }

    fn total_bytes(problem: &Problem) -> u64 {
        let layers = problem.layers.iter();
        layers
            .map(|layer| layer.neurons_bytes(layer.frequencies.len()))
            .sum()
    }

    /// A tiny problem, with a capacity and a lower limit as shares of its size in 1/64.
    fn tiny_with_limits() -> impl Strategy<Value = (Problem, u64, u64)> {
        let at_least = prop_oneof![3 => Just(0u64), 1 => 0u64..=64];
        (tiny(), 0u64..=66, at_least).prop_map(|(problem, capacity, at_least)| {
            let total = total_bytes(&problem);
            (problem, total * capacity / 64, total * at_least / 64)
        })
    }

    /// Every solver that this program has.
    fn backends() -> Vec<Backend> {
        let all = [Backend::Microlp, Backend::Decomposition, Backend::Highs];
        all.into_iter().filter(|one| one.is_built_in()).collect()
    }

    fn agree(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * a.abs().max(1.0)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn the_answer_equals_exhaustive_search(
            (problem, capacity, at_least) in tiny_with_limits(),
            backend in proptest::sample::select(backends()),
        ) {
            let program = Program::new(&problem, capacity, at_least);
            let truth = exhaustive::best_value(&problem, capacity, at_least);
            match (solve(&program, backend, LIMIT), truth) {
                (Ok(answer), Some(truth)) => {
                    prop_assert_eq!(answer.trouble, None);
                    prop_assert!(agree(answer.mass, truth), "{} is not {}", answer.mass, truth);
                    prop_assert!(program.allows(&answer.choice));
                    prop_assert!(answer.relaxation_bound >= truth * (1.0 - 1e-9));
                    for (layer, count) in program.hot_counts(&answer.choice).into_iter().enumerate() {
                        prop_assert!(exhaustive::pays(&problem, layer, count));
                    }
                }
                // What it says is the most must indeed be possible, and one byte more must not.
                (Err(most), None) => {
                    let most: u64 = most
                        .iter()
                        .zip(&problem.layers)
                        .map(|(count, layer)| layer.neurons_bytes(*count))
                        .sum();
                    prop_assert!(most < at_least);
                    prop_assert!(exhaustive::best_value(&problem, capacity, most).is_some());
                    prop_assert!(exhaustive::best_value(&problem, capacity, most + 1).is_none());
                }
                (answer, truth) => prop_assert!(false, "{answer:?} but {truth:?}"),
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn the_answer_is_never_worse_than_greedy((problem, capacity, _) in tiny_with_limits()) {
            let program = Program::new(&problem, capacity, 0);
            let greedy = greedy::fill(&program, &blocks_by_density(&program));
            prop_assert!(program.allows(&greedy));
            prop_assert!(solve(&program, Backend::Microlp, LIMIT).unwrap().mass >= program.mass(&greedy));
        }

        #[test]
        fn more_memory_is_never_worth_less(problem in tiny(), one in 0u64..=64, other in 0u64..=64) {
            let total = total_bytes(&problem);
            let value = |share: u64| {
                let program = Program::new(&problem, total * share / 64, 0);
                solve(&program, Backend::Microlp, LIMIT).unwrap().mass
            };
            let (less, more) = (value(one.min(other)), value(one.max(other)));
            prop_assert!(more >= less - 1e-9 * less);
        }

        #[test]
        fn no_set_of_groups_is_better_than_the_hottest(mut problem in tiny(), capacity in 0u64..=64) {
            for layer in &mut problem.layers {
                let even = layer.frequencies.len().div_ceil(problem.group_size) * problem.group_size;
                layer.frequencies.resize(even, 0.0);
            }
            let groups: usize = problem.layers.iter().map(|l| l.frequencies.len() / problem.group_size).sum();
            prop_assume!(groups <= 12);
            let capacity = total_bytes(&problem) * capacity / 64;
            let answer = solve(&Program::new(&problem, capacity, 0), Backend::Auto, LIMIT).unwrap();
            let truth = exhaustive::best_subset_value(&problem, capacity);
            prop_assert!(agree(answer.mass, truth), "{} is not {}", answer.mass, truth);
        }
    }

    #[test]
    fn slack_constraints_leave_the_global_top_k() {
        let mut problem = samples::shaped(8, 640, samples::power_law);
        problem.hardware.gpu.as_mut().unwrap().sync_seconds = 0.0;
        let mut groups: Vec<f64> = problem
            .layers
            .iter()
            .flat_map(|layer| layer.frequencies.chunks(64).map(|group| group.iter().sum()))
            .collect();
        groups.sort_by(|a: &f64, b| b.total_cmp(a));
        for count in [0, 1, 33, 79, 80] {
            // Half a group too much memory buys nothing.
            let program = Program::new(&problem, (64 * count as u64 + 32) * 6912, 0);
            let answer = solve(&program, Backend::Microlp, LIMIT).unwrap();
            assert!(agree(answer.mass, groups[..count].iter().sum()));
            assert!(
                agree(answer.relaxation_bound, answer.mass),
                "and the relaxation proves it"
            );
        }
    }

    #[test]
    fn where_the_fewest_count_binds_the_program_beats_greedy() {
        // Both layers need three neurons to pay. The first layer's are the hottest three, but they
        // are larger and leave no room for a fourth; four of the second layer are worth more.
        let frequencies = [[0.9, 0.9, 0.9, 0.0], [0.8, 0.7, 0.7, 0.7]];
        let mut problem = samples::shaped(2, 4, |layer, neuron| frequencies[layer][neuron]);
        problem.group_size = 1;
        problem.layers[0].neuron_bytes = 11;
        problem.layers[1].neuron_bytes = 10;
        problem.hardware.cpu.read_bandwidth_bytes_per_second = 1.0;
        let gpu = problem.hardware.gpu.as_mut().unwrap();
        gpu.read_bandwidth_bytes_per_second = 2.0;
        gpu.sync_seconds = 15.0;
        let program = Program::new(&problem, 40, 0);
        let greedy = greedy::fill(&program, &blocks_by_density(&program));
        assert_eq!(program.hot_counts(&greedy), [3, 0]);
        let answer = solve(&program, Backend::Microlp, LIMIT).unwrap();
        assert_eq!(program.hot_counts(&answer.choice), [0, 4]);
        assert!(agree(answer.mass, 2.9) && agree(answer.bound, 2.9));
    }

    #[test]
    fn no_time_leaves_the_greedy_plan_and_an_honest_gap() {
        let mut problem = samples::shaped(12, 64 * 20, samples::power_law);
        problem.hardware.cpu.read_bandwidth_bytes_per_second = 53.76e9;
        problem.hardware.gpu.as_mut().unwrap().sync_seconds = 80e-6;
        let total = total_bytes(&problem);
        let mut better = 0;
        for share in 1..16 {
            let program = Program::new(&problem, total * share / 16, 0);
            let hurried = solve(&program, Backend::Microlp, Duration::ZERO).unwrap();
            let best = solve(&program, Backend::Microlp, LIMIT).unwrap();
            assert_eq!(hurried.backend, "greedy");
            assert_eq!(
                hurried.choice,
                greedy::fill(&program, &blocks_by_density(&program))
            );
            assert!(hurried.trouble.is_some());
            assert!(hurried.bound >= best.mass * (1.0 - 1e-9));
            assert_eq!((best.backend, best.bound), ("microlp", best.mass));
            better += usize::from(best.mass > hurried.mass * (1.0 + 1e-6));
        }
        assert!(better > 0, "somewhere greed is not enough");
    }
}
