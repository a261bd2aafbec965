//! The paper's objective as a chain: maximise `Σ f_i a_i` over the neurons on the GPU.
//!
//! ```text
//! max  Σ_l Σ_k mass_lk z_lk
//!      Σ_k z_lk = 1                          layer l takes one of its hot sets k
//!      Σ_l Σ_k bytes_lk z_lk ≤ VRAM          and likewise the cold neurons within RAM
//!      z ∈ {0, 1}
//! ```
//!
//! All neurons of a layer have the same size, so among hot sets of one size the most frequently active
//! neurons are the best: a hot set is a prefix. A layer has no hot neuron or at least `C_l`, so its choices
//! are zero groups, the fewest groups with `C_l` neurons, and each further group. Only the memory limits couple
//! the layers: transitions are free, and every stage is in the state of the CPU.

use powerinfer_artifact::plan::Device;

use crate::{
    Problem,
    account::{bytes_on, lines},
    chain::{Chain, Choice, ON_CPU, Stage},
    decomposition::Taken,
    objective,
    placement::Placement,
};

/// The chain of a valid `problem` with `vram_bytes` for hot neurons, next to `cpu_bytes` of other parts on the
/// CPU. The cost of a choice is the negative sum of its activation frequencies, the tag its number of
/// hot neurons.
pub(crate) fn chain(problem: &Problem, vram_bytes: u64, cpu_bytes: u64) -> Chain {
    let mut stages: Vec<Stage> = (0..problem.layers.len())
        .map(|layer| stage(problem, layer))
        .collect();
    for choice in &mut stages[0].choices[ON_CPU] {
        choice.cpu_bytes += cpu_bytes;
    }
    Chain {
        capacities: vec![usable(&stages, vram_bytes)],
        stages,
        ram: problem.budget.ram_bytes,
        transfer: 0.0,
        peer_transfer: 0.0,
    }
}

fn stage(problem: &Problem, layer: usize) -> Stage {
    let counts = hot_count_choices(problem, layer);
    let layer = &problem.layers[layer];
    let neurons = layer.frequencies.len();
    let (mut counted, mut mass) = (0, 0.0);
    let choices = counts.into_iter().map(|hot| {
        for frequency in &layer.frequencies[counted..hot] {
            mass += frequency;
        }
        counted = hot;
        Choice {
            gpu_bytes: layer.neurons_bytes(hot),
            cpu_bytes: layer.neurons_bytes(neurons - hot),
            cost: -mass,
            tag: u32::try_from(hot).expect("the number of groups was checked"),
        }
    });
    let mut stage = Stage::default();
    stage.choices[ON_CPU] = choices.collect();
    stage
}

/// Hot counts that the paper's constraints allow in a layer: 0, then whole groups from `C_l` on.
fn hot_count_choices(problem: &Problem, layer: usize) -> Vec<usize> {
    let neurons = problem.layers[layer].frequencies.len();
    let mut counts = match problem.layers[layer].pins.neurons {
        Some(Device::Gpu) => return vec![neurons],
        Some(Device::Cpu) => return vec![0],
        None => vec![0],
    };
    if let Some(fewest) = objective::fewest_hot(problem, layer) {
        let first = fewest.div_ceil(problem.group_size);
        let groups = neurons.div_ceil(problem.group_size);
        counts.extend((first..=groups).map(|group| {
            // The last group is smaller where the size does not divide the number of neurons.
            group.saturating_mul(problem.group_size).min(neurons)
        }));
    }
    counts
}

/// The part of `capacity` that hot sets can fill: their sizes differ by multiples of the greatest common
/// divisor of all steps between choices. A tighter capacity makes the relaxation tighter.
fn usable(stages: &[Stage], capacity: u64) -> u64 {
    let (mut least, mut most, mut step) = (0, 0, 0);
    for stage in stages {
        let choices = &stage.choices[ON_CPU];
        least += choices[0].gpu_bytes;
        most += choices[choices.len() - 1].gpu_bytes;
        for pair in choices.windows(2) {
            step = greatest_common_divisor(step, pair[1].gpu_bytes - pair[0].gpu_bytes);
        }
    }
    match capacity.min(most).checked_sub(least) {
        Some(free) => least + free / step.max(1) * step,
        None => capacity,
    }
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    match b {
        0 => a,
        _ => greatest_common_divisor(b, a % b),
    }
}

/// Number of hot neurons of each layer in a solution of the chain.
pub(crate) fn hot_counts(taken: &[Taken]) -> Vec<usize> {
    taken
        .iter()
        .map(|taken| taken.choice.tag as usize)
        .collect()
}

/// The chain of the paper's objective; `placement` has everything but the hot neurons.
pub(crate) fn chain_around(problem: &Problem, placement: &Placement, vram_bytes: u64) -> Chain {
    let neurons = problem.layers.iter();
    let neurons: u64 = neurons
        .map(|layer| layer.neurons_bytes(layer.frequencies.len()))
        .sum();
    let cpu_bytes = bytes_on(Device::Cpu, &lines(problem, placement)) - neurons;
    chain(problem, vram_bytes, cpu_bytes)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        Backend, Layer, Options,
        decomposition::Infeasible,
        exhaustive, greedy, samples,
        solve::{ChainAnswer, solve_chain},
    };

    fn solve(chain: &Chain, backend: Backend, limit: Duration) -> Result<ChainAnswer, Infeasible> {
        let options = Options {
            backend,
            time_limit: limit,
            ..Options::default()
        };
        solve_chain(chain, &options, 0.0)
    }

    fn solved(chain: &Chain, backend: Backend) -> ChainAnswer {
        solve(chain, backend, LIMIT).unwrap()
    }

    const LIMIT: Duration = Duration::from_secs(60);

    /// Problems small enough for exhaustive search: uneven groups, equal frequencies, neurons that are never
    /// active, layers of different sizes, synchronisation that costs nothing up to more than a layer saves.
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
            // A byte takes one second on the CPU and half a second on the GPU.
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

    /// Tiny problems with the capacities of the GPU and, sometimes, of the CPU, in 1/64 of their size.
    fn tiny_with_limits() -> impl Strategy<Value = (Problem, u64)> {
        let ram = prop_oneof![3 => Just(64u64), 1 => 0u64..=64];
        (tiny(), 0u64..=66, ram).prop_map(|(mut problem, capacity, ram)| {
            let total = total_bytes(&problem);
            problem.budget.ram_bytes = total - total * (64 - ram) / 64;
            (problem, total * capacity / 64)
        })
    }

    /// Every solver that this build has.
    fn backends() -> Vec<Backend> {
        let all = [Backend::Microlp, Backend::Decomposition, Backend::Highs];
        all.into_iter().filter(|one| one.is_built_in()).collect()
    }

    fn agree(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * a.abs().max(1.0)
    }

    fn greedy_mass(problem: &Problem, chain: &Chain) -> f64 {
        objective::evaluate(problem, &greedy::hot_counts(chain))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn the_answer_equals_exhaustive_search(
            (problem, capacity) in tiny_with_limits(),
            backend in proptest::sample::select(backends()),
        ) {
            let chain = chain(&problem, capacity, 0);
            let total = total_bytes(&problem);
            let at_least = total - problem.budget.ram_bytes;
            let truth = exhaustive::best_value(&problem, capacity, at_least);
            match (solve(&chain, backend, LIMIT), truth) {
                (Ok(ChainAnswer { answer, failure, .. }), Some(truth)) => {
                    prop_assert_eq!(failure, None);
                    prop_assert!(agree(-answer.cost, truth), "{} is not {}", answer.cost, truth);
                    prop_assert!(answer.is_optimal() && answer.relaxation_bound <= -truth * (1.0 - 1e-9));
                    let hot = hot_counts(&answer.taken);
                    prop_assert!(agree(objective::evaluate(&problem, &hot), truth));
                    let layers = problem.layers.iter().zip(&hot);
                    let bytes: u64 = layers.map(|(layer, hot)| layer.neurons_bytes(*hot)).sum();
                    prop_assert!((at_least..=capacity).contains(&bytes));
                    for (layer, count) in hot.into_iter().enumerate() {
                        prop_assert!(exhaustive::pays(&problem, layer, count));
                    }
                }
                // The memory of the CPU that the error names is sufficient, and one byte less is not.
                (Err(Infeasible::Cpu { needed }), None) => {
                    let most = total - needed;
                    prop_assert!(most < at_least);
                    prop_assert!(exhaustive::best_value(&problem, capacity, most).is_some());
                    prop_assert!(exhaustive::best_value(&problem, capacity, most + 1).is_none());
                }
                (Ok(found), None) => prop_assert!(false, "{:?} but nothing fits", found.answer),
                (Err(error), truth) => prop_assert!(false, "{error:?} but {truth:?}"),
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn the_answer_is_never_worse_than_greedy(problem in tiny(), share in 0u64..=66) {
            let chain = chain(&problem, total_bytes(&problem) * share / 64, 0);
            let greedy = greedy_mass(&problem, &chain);
            prop_assert!(-solved(&chain, Backend::Microlp).answer.cost >= greedy - 1e-9 * greedy);
        }

        #[test]
        fn more_memory_is_never_worth_less(problem in tiny(), one in 0u64..=64, other in 0u64..=64) {
            let total = total_bytes(&problem);
            let value = |share: u64| {
                -solved(&chain(&problem, total * share / 64, 0), Backend::Microlp).answer.cost
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
            let mass = -solved(&chain(&problem, capacity, 0), Backend::Auto).answer.cost;
            let truth = exhaustive::best_subset_value(&problem, capacity);
            prop_assert!(agree(mass, truth), "{} is not {}", mass, truth);
        }
    }

    #[test]
    fn choices_are_no_group_the_fewest_that_pay_and_each_further_group() {
        let mut problem = samples::small();
        problem.group_size = 3;
        problem.layers[0].frequencies = vec![0.5; 11];
        problem.layers[0].neuron_bytes = 10;
        problem.layers[1].frequencies = vec![0.25; 6];
        problem.layers[1].neuron_bytes = 10;
        problem.hardware.cpu.read_bandwidth_bytes_per_second = 1e6;
        let gpu = problem.hardware.gpu.as_mut().unwrap();
        gpu.read_bandwidth_bytes_per_second = 2e6;
        // One neuron saves 5 µs, so four pay for the synchronisation, which takes two groups.
        gpu.sync_seconds = 20e-6;
        let chain = chain(&problem, 95, 7);
        let choices = |stage: usize| -> Vec<(u32, u64, u64, f64)> {
            let choices = chain.stages[stage].choices[ON_CPU].iter();
            choices
                .map(|choice| (choice.tag, choice.gpu_bytes, choice.cpu_bytes, choice.cost))
                .collect()
        };
        let first = [
            (0, 0, 117, 0.0),
            (6, 60, 57, -3.0),
            (9, 90, 27, -4.5),
            (11, 110, 7, -5.5),
        ];
        assert_eq!(choices(0), first);
        assert_eq!(choices(1), [(0, 0, 60, 0.0), (6, 60, 0, -1.5)]);
        assert_eq!(chain.capacities, [90], "sizes are multiples of 10");
    }

    #[test]
    fn without_binding_minimums_the_globally_hottest_groups_are_hot() {
        let mut problem = samples::shaped(8, 640, samples::power_law);
        problem.hardware.gpu.as_mut().unwrap().sync_seconds = 0.0;
        let mut groups: Vec<f64> = problem
            .layers
            .iter()
            .flat_map(|layer| layer.frequencies.chunks(64).map(|group| group.iter().sum()))
            .collect();
        groups.sort_by(|a: &f64, b| b.total_cmp(a));
        for count in [0, 1, 33, 79, 80] {
            // Memory for half a group more.
            let chain = chain(&problem, (64 * count as u64 + 32) * 6912, 0);
            let answer = solved(&chain, Backend::Microlp).answer;
            assert!(agree(-answer.cost, groups[..count].iter().sum()));
            assert!(
                agree(answer.relaxation_bound, answer.cost),
                "the relaxation is tight"
            );
        }
    }

    #[test]
    fn where_the_minimum_count_binds_the_program_beats_greedy() {
        // Three neurons of either layer pay for the synchronisation. The hottest three are in the first
        // layer, but they are larger and leave no room for a fourth; four of the second layer are worth more.
        let frequencies = [[0.9, 0.9, 0.9, 0.0], [0.8, 0.7, 0.7, 0.7]];
        let mut problem = samples::shaped(2, 4, |layer, neuron| frequencies[layer][neuron]);
        problem.group_size = 1;
        problem.layers[0].neuron_bytes = 11;
        problem.layers[1].neuron_bytes = 10;
        problem.hardware.cpu.read_bandwidth_bytes_per_second = 1.0;
        let gpu = problem.hardware.gpu.as_mut().unwrap();
        gpu.read_bandwidth_bytes_per_second = 2.0;
        gpu.sync_seconds = 15.0;
        let chain = chain(&problem, 40, 0);
        assert_eq!(greedy::hot_counts(&chain), [3, 0]);
        let answer = solved(&chain, Backend::Microlp).answer;
        assert_eq!(hot_counts(&answer.taken), [0, 4]);
        assert!(agree(-answer.cost, 2.9) && answer.is_optimal());
    }

    #[test]
    fn no_time_for_a_general_solver_leaves_the_known_plan_and_the_gap_of_the_relaxation() {
        let mut problem = samples::shaped(12, 64 * 20, samples::power_law);
        problem.hardware.cpu.read_bandwidth_bytes_per_second = 53.76e9;
        problem.hardware.gpu.as_mut().unwrap().sync_seconds = 80e-6;
        let total = total_bytes(&problem);
        let (mut better, mut open) = (0, 0);
        for share in 1..16 {
            let chain = chain(&problem, total * share / 16, 0);
            let hurried = solve(&chain, Backend::Microlp, Duration::ZERO).unwrap();
            let best = solved(&chain, Backend::Microlp);
            assert!(hurried.answer.bound <= best.answer.cost * (1.0 - 1e-9));
            assert_eq!(hurried.answer.cost, best.answer.cost);
            if hurried.failure.is_some() {
                assert_eq!(hurried.backend, Backend::Decomposition);
                assert_eq!(hurried.answer.bound, hurried.answer.relaxation_bound);
                open += 1;
            }
            assert_eq!((best.backend, best.failure), (Backend::Microlp, None));
            assert!(best.answer.is_optimal());
            let greedy = greedy_mass(&problem, &chain);
            better += usize::from(-best.answer.cost > greedy * (1.0 + 1e-6));
        }
        assert!(better > 0, "greedy is not optimal everywhere");
        assert!(open > 0, "the time limit ends some solutions");
    }
}
