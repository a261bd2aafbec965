//! Exact search: dynamic programming over the stages that keeps a label for every undominated partial
//! solution and prunes with the bound of the relaxation.
//!
//! A label holds the cost of a partial solution and the memory it uses. It is dropped if another label of
//! the same state has no higher cost and uses no more memory, or if its cost plus the bound for the rest is
//! not below the cost of a known solution.

use crate::{
    chain::{Chain, State, Step, retain_undominated},
    dual::{Multipliers, Potentials},
};

/// A partial solution.
#[derive(Debug, Clone, Copy)]
struct Label {
    cost: f64,
    /// On the GPU of the state.
    gpu_bytes: u64,
    cpu_bytes: u64,
    /// Index of the label of the previous stage, counted through all its states.
    parent: u32,
    /// Choice of this stage.
    choice: u32,
}

/// Result of [`search`].
#[derive(Debug)]
pub(crate) enum Found {
    /// The optimal solution, which is below the cutoff.
    Optimum(Vec<Step>),
    /// No solution is below the cutoff.
    NothingBelowCutoff,
    /// The limit on extensions was reached.
    LimitReached,
}

/// Looks for the cheapest solution of `chain` below `cutoff` with at most `extensions` extensions of labels.
pub(crate) fn search(
    chain: &Chain,
    multipliers: &Multipliers,
    potentials: &Potentials,
    ram_binds: bool,
    cutoff: f64,
    extensions: usize,
) -> Found {
    let mut left = extensions;
    let states = chain.states();
    let mut stages: Vec<Vec<Vec<Label>>> = Vec::with_capacity(chain.stages.len());
    for stage in 0..chain.stages.len() {
        let mut next: Vec<Vec<Label>> = vec![Vec::new(); states];
        for (to, labels) in next.iter_mut().enumerate() {
            let gpu = State::from_parts(to).gpu;
            let open = open_choices(chain, multipliers, potentials, stage, to, cutoff);
            if open.is_empty() {
                continue;
            }
            let capacity = chain.capacities[gpu];
            // Bound for the later stages, less the multipliers times the memory that is left for them.
            let rest = potentials.after[stage][to] - multipliers.of_capacities(chain, gpu);
            let mut extend = |parent: u32, from: usize, label: &Label| -> bool {
                let transition = chain.transition(from, to);
                if transition.is_infinite() {
                    return true;
                }
                let used = if State::from_parts(from).gpu == gpu {
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
                        // Choices are sorted by bytes, so no later one fits.
                        break;
                    }
                    if cpu_bytes > chain.ram {
                        continue;
                    }
                    let cost = label.cost + transition + taken.cost;
                    let mut bound = cost + rest + multipliers.gpus[gpu] * gpu_bytes as f64;
                    if ram_binds {
                        bound += multipliers.ram * cpu_bytes as f64;
                    }
                    if bound < cutoff {
                        labels.push(Label {
                            cost,
                            gpu_bytes,
                            cpu_bytes,
                            parent,
                            choice: choice as u32,
                        });
                    }
                }
                true
            };
            let is_complete = match stages.last() {
                None => {
                    let start = Label {
                        cost: 0.0,
                        gpu_bytes: 0,
                        cpu_bytes: 0,
                        parent: 0,
                        choice: 0,
                    };
                    extend(0, Chain::START, &start)
                }
                Some(previous) => {
                    let all = previous.iter().enumerate();
                    all.flat_map(|(from, labels)| labels.iter().map(move |label| (from, label)))
                        .zip(0..)
                        .all(|((from, label), parent)| extend(parent, from, label))
                }
            };
            if !is_complete {
                return Found::LimitReached;
            }
            retain_undominated(labels, ram_binds, |label| {
                (label.gpu_bytes, label.cost, label.cpu_bytes)
            });
        }
        stages.push(next);
    }
    trace(chain, &stages, cutoff)
}

/// Choices of `stage` in `state` that a solution below `cutoff` can contain.
pub(crate) fn open_choices(
    chain: &Chain,
    multipliers: &Multipliers,
    potentials: &Potentials,
    stage: usize,
    state: usize,
    cutoff: f64,
) -> Vec<usize> {
    let others =
        potentials.before[stage][state] + potentials.after[stage][state] - potentials.constant;
    let gpu = State::from_parts(state).gpu;
    let choices = chain.choices(stage, state).iter().enumerate();
    choices
        .filter(|(_, choice)| others + multipliers.lagrangian(choice, gpu) < cutoff)
        .map(|(index, _)| index)
        .collect()
}

/// Follows the parents of the cheapest label of the last stage.
fn trace(chain: &Chain, stages: &[Vec<Vec<Label>>], cutoff: f64) -> Found {
    let last = stages.last().expect("a chain has stages");
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
        return Found::NothingBelowCutoff;
    };
    let mut steps = Vec::with_capacity(stages.len());
    for stage in (0..stages.len()).rev() {
        let label = stages[stage][state][index];
        steps.push(Step {
            state,
            choice: label.choice as usize,
        });
        if stage > 0 {
            index = label.parent as usize;
            state = 0;
            while index >= stages[stage - 1][state].len() {
                index -= stages[stage - 1][state].len();
                state += 1;
            }
        }
    }
    steps.reverse();
    debug_assert!(chain.fits(&steps));
    Found::Optimum(steps)
}
