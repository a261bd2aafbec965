//! Exhaustive search over small problems: the reference for the solvers in tests. For the paper's objective
//! it uses the paper's constraints alone, not the chain.

use crate::{
    Problem,
    chain::{Chain, Step},
};

/// The best value of any placement of whole groups, hottest first, with `at_least_bytes` to
/// `capacity_bytes` of hot neurons; `None` if there is none.
pub(crate) fn best_value(
    problem: &Problem,
    capacity_bytes: u64,
    at_least_bytes: u64,
) -> Option<f64> {
    let mut best = None;
    let mut counts = vec![0; problem.layers.len()];
    loop {
        let bytes: u64 = counts
            .iter()
            .zip(&problem.layers)
            .map(|(&count, layer)| count as u64 * layer.neuron_bytes)
            .sum();
        let pays = (0..counts.len()).all(|layer| pays(problem, layer, counts[layer]));
        if pays && (at_least_bytes..=capacity_bytes).contains(&bytes) {
            let value = crate::objective::evaluate(problem, &counts);
            best = Some(best.map_or(value, |best: f64| best.max(value)));
        }
        // Next combination of hot counts, in steps of a group.
        let mut layer = 0;
        loop {
            if layer == counts.len() {
                return best;
            }
            let neurons = problem.layers[layer].frequencies.len();
            if counts[layer] < neurons {
                counts[layer] = (counts[layer] + problem.group_size).min(neurons);
                break;
            }
            counts[layer] = 0;
            layer += 1;
        }
    }
}

/// The best value of any set of groups, not only of the hottest ones. The group size must divide every
/// layer.
pub(crate) fn best_subset_value(problem: &Problem, capacity_bytes: u64) -> f64 {
    let groups: Vec<(usize, f64)> = problem
        .layers
        .iter()
        .enumerate()
        .flat_map(|(layer, values)| {
            let groups = values.frequencies.chunks(problem.group_size);
            groups.map(move |group| (layer, group.iter().sum()))
        })
        .collect();
    let mut best = 0.0;
    for set in 0u32..1 << groups.len() {
        let chosen = groups
            .iter()
            .enumerate()
            .filter(|(index, _)| set >> index & 1 == 1);
        let mut counts = vec![0; problem.layers.len()];
        let (mut value, mut bytes) = (0.0, 0);
        for (_, &(layer, mass)) in chosen {
            counts[layer] += problem.group_size;
            value += mass;
            bytes += problem.group_size as u64 * problem.layers[layer].neuron_bytes;
        }
        let pays = (0..counts.len()).all(|layer| pays(problem, layer, counts[layer]));
        if pays && bytes <= capacity_bytes && value > best {
            best = value;
        }
    }
    best
}

/// The paper's inequality 4; a layer that is entirely hot needs no synchronisation, so it is exempt.
pub(crate) fn pays(problem: &Problem, layer: usize, count: usize) -> bool {
    let gpu = problem.hardware.gpu.as_ref().expect("a machine with a GPU");
    let bytes = problem.layers[layer].neuron_bytes as f64;
    let on_gpu = bytes / gpu.read_bandwidth_bytes_per_second;
    let on_cpu = bytes / problem.hardware.cpu.read_bandwidth_bytes_per_second;
    let whole = count == problem.layers[layer].frequencies.len();
    let count = count as f64;
    count == 0.0
        || (whole && on_gpu < on_cpu)
        || count * on_gpu + gpu.sync_seconds <= count * on_cpu
}

/// Cost of the optimal solution of `chain`; `None` if no solution fits.
pub(crate) fn least_cost(chain: &Chain) -> Option<f64> {
    fn from(chain: &Chain, steps: &mut Vec<Step>, best: &mut Option<f64>) {
        let stage = steps.len();
        if stage == chain.stages.len() {
            let cost = chain.cost(steps);
            if chain.fits(steps) && cost.is_finite() {
                *best = Some(best.map_or(cost, |best: f64| best.min(cost)));
            }
            return;
        }
        for state in 0..chain.states() {
            for choice in 0..chain.choices(stage, state).len() {
                steps.push(Step { state, choice });
                from(chain, steps, best);
                steps.pop();
            }
        }
    }
    let mut best = None;
    from(chain, &mut Vec::new(), &mut best);
    best
}
