//! The exact search: dynamic programming over the stages with a label for every set of partial
//! solutions that no other one beats, which forgets those that the relaxation shows to be hopeless.
//!
//! A label is what a partial solution costs and which memory it has used. Of two in the same state,
//! the one that costs and uses no less is dropped; and so is one whose cost, with the least that the
//! rest can cost at the relaxation's prices, is not below what is already known to be possible.

use crate::{
    chain::{Chain, Front, State, Step},
    dual::{Potentials, Prices},
};

/// A set of partial solutions.
#[derive(Debug, Clone, Copy)]
struct Label {
    cost: f64,
    /// On the GPU of the state's range.
    gpu_bytes: u64,
    cpu_bytes: u64,
    /// The label of the stage before, and the choice taken from it.
    before: u32,
    choice: u32,
}

/// What the search found.
#[derive(Debug)]
pub(crate) enum Found {
    /// A solution below the cutoff; no other is cheaper.
    Better(Vec<Step>),
    /// No solution is below the cutoff.
    Nothing,
    /// More labels than allowed.
    TooMany,
}

/// Looks for the cheapest solution of `chain` below `cutoff`, extending labels at most `extensions`
/// times.
pub(crate) fn search(
    chain: &Chain,
    prices: &Prices,
    potentials: &Potentials,
    ram_matters: bool,
    cutoff: f64,
    extensions: usize,
) -> Found {
    let mut left = extensions;
    let states = chain.states();
    let mut layers: Vec<Vec<Vec<Label>>> = Vec::with_capacity(chain.stages.len());
    for stage in 0..chain.stages.len() {
        let mut next: Vec<Vec<Label>> = vec![Vec::new(); states];
        for (to, labels) in next.iter_mut().enumerate() {
            let gpu = State::of(to).gpu;
            let open = open_choices(chain, prices, potentials, stage, to, cutoff);
            if open.is_empty() {
                continue;
            }
            let capacity = chain.capacities[gpu];
            // What the rest costs at least, less the price of the memory that is left for it.
            let rest = potentials.out[stage][to]
                - prices.gpus[gpu..]
                    .iter()
                    .zip(&chain.capacities[gpu..])
                    .map(|(price, bytes)| price * *bytes as f64)
                    .sum::<f64>()
                - match prices.ram > 0.0 {
                    true => prices.ram * chain.ram as f64,
                    false => 0.0,
                };
            let mut extend = |before: u32, from: usize, label: &Label| -> bool {
                let mode = chain.transition(from, to);
                if mode.is_infinite() {
                    return true;
                }
                let used = if State::of(from).gpu == gpu {
                    label.gpu_bytes
                } else {
                    0
                };
                for &choice in &open {
                    if left == 0 {
                        return false;
                    }
                    left -= 1;
                    let taken = &chain.choices(stage, to)[choice];
                    let (gpu_bytes, cpu_bytes) =
                        (used + taken.gpu_bytes, label.cpu_bytes + taken.cpu_bytes);
                    if gpu_bytes > capacity {
                        // Sorted by bytes, so no later one fits.
                        break;
                    }
                    if cpu_bytes > chain.ram {
                        continue;
                    }
                    let cost = label.cost + mode + taken.cost;
                    let mut least = cost + rest + prices.gpus[gpu] * gpu_bytes as f64;
                    if ram_matters {
                        least += prices.ram * cpu_bytes as f64;
                    }
                    if least < cutoff {
                        labels.push(Label {
                            cost,
                            gpu_bytes,
                            cpu_bytes,
                            before,
                            choice: choice as u32,
                        });
                    }
                }
                true
            };
            let done = match layers.last() {
                None => {
                    let start = Label {
                        cost: 0.0,
                        gpu_bytes: 0,
                        cpu_bytes: 0,
                        before: 0,
                        choice: 0,
                    };
                    extend(0, Chain::START, &start)
                }
                Some(before) => {
                    let mut place = 0;
                    let all = before.iter().enumerate();
                    all.flat_map(|(from, labels)| labels.iter().map(move |label| (from, label)))
                        .all(|(from, label)| {
                            place += 1;
                            extend(place - 1, from, label)
                        })
                }
            };
            if !done {
                return Found::TooMany;
            }
            keep_best(labels, ram_matters);
        }
        layers.push(next);
    }
    trace(chain, &layers, cutoff)
}

/// Choices of `stage` in `state` that a solution below `cutoff` may have.
pub(crate) fn open_choices(
    chain: &Chain,
    prices: &Prices,
    potentials: &Potentials,
    stage: usize,
    state: usize,
    cutoff: f64,
) -> Vec<usize> {
    let around = potentials.into[stage][state] + potentials.out[stage][state] - potentials.constant;
    let gpu = State::of(state).gpu;
    let choices = chain.choices(stage, state).iter().enumerate();
    choices
        .filter(|(_, choice)| around + prices.charged(choice, gpu) < cutoff)
        .map(|(index, _)| index)
        .collect()
}

/// Drops labels that another one beats.
fn keep_best(labels: &mut Vec<Label>, ram_matters: bool) {
    labels.sort_by(|a, b| {
        (a.gpu_bytes.cmp(&b.gpu_bytes))
            .then(a.cost.total_cmp(&b.cost))
            .then(a.cpu_bytes.cmp(&b.cpu_bytes))
    });
    if ram_matters {
        let mut front = Front::default();
        labels.retain(|label| front.insert(label.cpu_bytes, label.cost));
    } else {
        let mut least = f64::INFINITY;
        labels.retain(|label| {
            let is_better = label.cost < least;
            least = least.min(label.cost);
            is_better
        });
    }
}

/// The way back from the cheapest label of the last stage.
fn trace(chain: &Chain, layers: &[Vec<Vec<Label>>], cutoff: f64) -> Found {
    let last = layers.last().expect("a chain has stages");
    let mut best: Option<(usize, usize)> = None;
    for (state, labels) in last.iter().enumerate() {
        for (index, label) in labels.iter().enumerate() {
            let is_better = best.is_none_or(|(s, i)| label.cost < last[s][i].cost);
            if label.cost < cutoff && is_better {
                best = Some((state, index));
            }
        }
    }
    let Some((mut state, mut index)) = best else {
        return Found::Nothing;
    };
    let mut steps = Vec::with_capacity(layers.len());
    for stage in (0..layers.len()).rev() {
        let label = layers[stage][state][index];
        steps.push(Step {
            state,
            choice: label.choice as usize,
        });
        if stage > 0 {
            // Labels of the stage before are counted through all its states.
            let mut place = label.before as usize;
            for (from, labels) in layers[stage - 1].iter().enumerate() {
                if place < labels.len() {
                    (state, index) = (from, place);
                    break;
                }
                place -= labels.len();
            }
        }
    }
    steps.reverse();
    debug_assert!(chain.allows(&steps));
    Found::Better(steps)
}
