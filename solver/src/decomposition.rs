//! Solves a chain by Lagrangian decomposition: bounds from the dual, solutions from primal heuristics, and
//! the exact search to close the gap between them as far as its limits allow.

use crate::{
    chain::{Chain, Choice, Stage, Step},
    dual::{Dual, Hulls, maximise, potentials},
    fill::{division_paths, fill_path, improve_greedily, prefix_and_suffix_paths},
    labels::{Found, search},
};

/// The best solution found, and its bounds.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    /// State and choice of every stage.
    pub(crate) taken: Vec<Taken>,
    /// Objective of the solution.
    pub(crate) cost: f64,
    /// Lower bound on every solution.
    pub(crate) bound: f64,
    /// Lower bound by the relaxation alone.
    pub(crate) relaxation_bound: f64,
    /// Multiplier of each GPU's memory: cost that one more byte saves.
    pub(crate) gpu_multipliers: Vec<f64>,
}

/// Decision for one stage of an [`Answer`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Taken {
    /// Index of the state.
    pub(crate) state: usize,
    pub(crate) choice: Choice,
}

impl Taken {
    /// The decisions of a solution of `chain`.
    pub(crate) fn all(chain: &Chain, steps: &[Step]) -> Vec<Self> {
        let steps = steps.iter().enumerate();
        steps
            .map(|(stage, step)| Self {
                state: step.state,
                choice: *chain.chosen(stage, *step),
            })
            .collect()
    }
}

impl Answer {
    /// Whether the solution is proven optimal.
    pub(crate) fn is_optimal(&self) -> bool {
        self.bound >= self.cost
    }

    /// `(cost − bound) / |cost|`; 0 if the solution is optimal.
    pub(crate) fn gap(&self) -> f64 {
        if self.is_optimal() {
            0.0
        } else {
            (self.cost - self.bound) / self.cost.abs()
        }
    }

    /// Bytes on the CPU.
    pub(crate) fn cpu_bytes(&self) -> u64 {
        let taken = self.taken.iter();
        taken.map(|taken| taken.choice.cpu_bytes).sum()
    }
}

/// Reason why no solution fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Infeasible {
    /// The GPUs cannot hold the least that has to be on them.
    Gpu {
        /// Sufficient capacity in bytes, if there is one GPU.
        needed: u64,
    },
    /// The CPU cannot hold the least that has to be on it.
    Cpu {
        /// Sufficient capacity in bytes.
        needed: u64,
    },
}

/// Gap at which the search ends: `(cost − bound) / |cost|`.
pub(crate) const GOOD_ENOUGH: f64 = 1e-3;
/// Relative differences below this are rounding.
pub(crate) const ROUNDING: f64 = 1e-11;
/// Limit on the extensions of labels of a search for any solution that fits.
const EXTENSIONS: usize = 10_000_000;
/// Gaps that the exact search tries to prove, one after the other, each with its limit on extensions of
/// labels. A million extensions take about 10 ms.
const TOLERANCES: [(f64, usize); 5] = [
    (0.0, 3_000_000),
    (1e-4, 3_000_000),
    (3e-4, 4_000_000),
    (GOOD_ENOUGH * 0.999, 20_000_000),
    (GOOD_ENOUGH * 0.999, 60_000_000),
];

/// Finds the best solution of `chain` within the limits of the search.
///
/// # Errors
///
/// When no solution fits.
pub(crate) fn solve(chain: &Chain) -> Result<Answer, Infeasible> {
    let answer = Search::new(chain, false).solve(None)?;
    if answer.cpu_bytes() <= chain.ram {
        return Ok(answer);
    }
    // The memory of the CPU binds: start from the solution that uses the least of it.
    let least = least_ram(chain)?;
    let needed = least.cpu_bytes();
    if needed > chain.ram {
        return Err(Infeasible::Cpu { needed });
    }
    let search = Search::new(chain, true);
    let start = least.taken.iter().enumerate().map(|(stage, taken)| {
        let choices = search.chain.choices(stage, taken.state).iter();
        let fitting = choices.enumerate().filter(|(_, choice)| {
            choice.gpu_bytes <= taken.choice.gpu_bytes && choice.cpu_bytes <= taken.choice.cpu_bytes
        });
        let cheapest = fitting.min_by(|(_, a), (_, b)| a.cost.total_cmp(&b.cost));
        Step {
            state: taken.state,
            choice: cheapest
                .expect("a choice that dominates another one uses no more memory")
                .0,
        }
    });
    let start = start.collect();
    search.solve(Some(start))
}

/// Finds the solution that uses the least memory of the CPU, within the capacities of the GPUs.
///
/// # Errors
///
/// When the GPUs cannot hold the least that has to be on them.
pub(crate) fn least_ram(chain: &Chain) -> Result<Answer, Infeasible> {
    let mut least = chain.clone();
    least.ram = u64::MAX;
    (least.transfer, least.peer_transfer) = (0.0, 0.0);
    let stages = least.stages.iter_mut();
    for choice in stages.flat_map(|stage| &mut stage.choices).flatten() {
        choice.cost = choice.cpu_bytes as f64;
    }
    Search::new(&least, false).solve(None)
}

/// Search over a pruned chain.
struct Search {
    chain: Chain,
    hulls: Hulls,
    ram_binds: bool,
}

impl Search {
    fn new(chain: &Chain, ram_binds: bool) -> Self {
        let mut chain = chain.pruned(ram_binds);
        if !ram_binds {
            chain.ram = u64::MAX;
        }
        Self {
            hulls: Hulls::new(&chain, ram_binds),
            chain,
            ram_binds,
        }
    }

    /// Solves the chain; `start` is a solution that fits, in case the heuristics find none.
    fn solve(&self, start: Option<Vec<Step>>) -> Result<Answer, Infeasible> {
        let chain = &self.chain;
        let least = |stage: &Stage| {
            let choices = stage.choices.iter().flatten();
            choices.map(|choice| choice.gpu_bytes).min().unwrap_or(0)
        };
        let needed: u64 = chain.stages.iter().map(least).sum();
        let capacities = chain.capacities.iter();
        if needed > capacities.fold(0, |sum: u64, bytes| sum.saturating_add(*bytes)) {
            return Err(Infeasible::Gpu { needed });
        }
        let dual = maximise(chain, &self.hulls, self.ram_binds);
        let mut incumbent = Incumbent {
            steps: None,
            cost: f64::INFINITY,
        };
        if let Some(mut start) = start {
            improve_greedily(chain, &mut start);
            incumbent.offer(chain, start);
        }
        self.fill(&dual, &mut incumbent);
        if incumbent.gap(dual.bound) > GOOD_ENOUGH {
            let paths = match chain.capacities.len() {
                1 => prefix_and_suffix_paths(chain),
                _ => division_paths(chain),
            };
            incumbent.offer_paths(chain, &self.hulls, paths);
        }
        if incumbent.steps.is_none() {
            let potentials = potentials(chain, &self.hulls, &dual.multipliers);
            let found = search(
                chain,
                &dual.multipliers,
                &potentials,
                self.ram_binds,
                f64::INFINITY,
                EXTENSIONS,
            );
            if let Found::Optimum(steps) = found {
                incumbent.offer(chain, steps);
            }
        }
        let Some(steps) = incumbent.steps.clone() else {
            return Err(Infeasible::Gpu { needed });
        };
        let mut answer = Answer {
            taken: Vec::new(),
            cost: incumbent.cost,
            bound: dual.bound.min(incumbent.cost),
            relaxation_bound: dual.bound.min(incumbent.cost),
            gpu_multipliers: dual.multipliers.gpus.clone(),
        };
        let steps = self.close_gap(&dual, steps, &mut answer);
        answer.taken = Taken::all(chain, &steps);
        Ok(answer)
    }

    /// Offers the relaxed solutions that fit, and solutions that fill the paths of all of them.
    fn fill(&self, dual: &Dual, incumbent: &mut Incumbent) {
        const PATHS: usize = 24;
        let mut paths: Vec<Vec<usize>> = Vec::new();
        // The last ones have the best multipliers.
        for steps in dual.relaxed.iter().rev() {
            incumbent.offer(&self.chain, steps.clone());
            let path: Vec<usize> = steps.iter().map(|step| step.state).collect();
            if paths.len() < PATHS && !paths.contains(&path) {
                paths.push(path);
            }
        }
        incumbent.offer_paths(&self.chain, &self.hulls, paths);
    }

    /// Searches for a better solution and raises the bound to what the search proves.
    fn close_gap(&self, dual: &Dual, mut steps: Vec<Step>, answer: &mut Answer) -> Vec<Step> {
        let potentials = potentials(&self.chain, &self.hulls, &dual.multipliers);
        for (tolerance, extensions) in TOLERANCES {
            let cutoff = answer.cost - tolerance.max(ROUNDING) * answer.cost.abs();
            if answer.bound >= cutoff {
                if tolerance == 0.0 {
                    answer.bound = answer.cost;
                }
                return steps;
            }
            let found = search(
                &self.chain,
                &dual.multipliers,
                &potentials,
                self.ram_binds,
                cutoff,
                extensions,
            );
            match found {
                Found::LimitReached => continue,
                Found::NothingBelowCutoff => answer.bound = answer.bound.max(cutoff),
                Found::Optimum(better) => {
                    answer.cost = self.chain.cost(&better);
                    answer.bound = answer.cost;
                    steps = better;
                }
            }
            if tolerance == 0.0 {
                answer.bound = answer.cost;
            }
            return steps;
        }
        steps
    }
}

/// The best solution so far.
struct Incumbent {
    steps: Option<Vec<Step>>,
    cost: f64,
}

impl Incumbent {
    /// Takes a solution that fits and is better.
    fn offer(&mut self, chain: &Chain, steps: Vec<Step>) {
        let cost = chain.cost(&steps);
        if cost < self.cost && chain.fits(&steps) {
            (self.cost, self.steps) = (cost, Some(steps));
        }
    }

    /// Offers solutions that fill these paths; improves the best of them greedily.
    fn offer_paths(&mut self, chain: &Chain, hulls: &Hulls, paths: Vec<Vec<usize>>) {
        const IMPROVED: usize = 400;
        let mut filled: Vec<(f64, Vec<Step>)> = paths
            .iter()
            .filter_map(|path| fill_path(chain, hulls, path))
            .map(|steps| (chain.cost(&steps), steps))
            .collect();
        filled.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        for (_, mut steps) in filled.into_iter().take(IMPROVED) {
            improve_greedily(chain, &mut steps);
            self.offer(chain, steps);
        }
    }

    fn gap(&self, bound: f64) -> f64 {
        match self.steps {
            Some(_) => (self.cost - bound) / self.cost.abs(),
            None => f64::INFINITY,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::exhaustive;

    /// Chains small enough for exhaustive search, with ties, states without choices and capacities of every size.
    fn tiny() -> impl Strategy<Value = Chain> {
        let cost = prop_oneof![(0u32..6).prop_map(f64::from), 0.0..6.0];
        let choice = (0u64..12, 0u64..12, cost).prop_map(|(gpu_bytes, cpu_bytes, cost)| Choice {
            gpu_bytes,
            cpu_bytes,
            cost,
            tag: 0,
        });
        let choices = |least| proptest::collection::vec(choice.clone(), least..4);
        let stage = (choices(1), choices(0)).prop_map(|(cpu, gpu)| Stage {
            choices: [cpu, gpu],
        });
        let stages = proptest::collection::vec(stage, 1..5);
        let capacities = prop_oneof![
            3 => proptest::collection::vec(0u64..40, 1),
            1 => proptest::collection::vec(0u64..25, 2)
        ];
        let ram = prop_oneof![2 => Just(u64::MAX), 1 => 0u64..40];
        let transfer = prop_oneof![Just(0.0), 0.0..3.0];
        (stages, capacities, ram, transfer.clone(), transfer).prop_map(
            |(stages, capacities, ram, transfer, peer_transfer)| Chain {
                stages,
                capacities,
                ram,
                transfer,
                peer_transfer,
            },
        )
    }

    fn cost_of(chain: &Chain, answer: &Answer) -> f64 {
        let mut previous = Chain::START;
        let mut cost = 0.0;
        for taken in &answer.taken {
            cost += chain.transition(previous, taken.state) + taken.choice.cost;
            previous = taken.state;
        }
        cost
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(6000))]

        #[test]
        fn the_answer_equals_exhaustive_search(chain in tiny()) {
            let truth = exhaustive::least_cost(&chain);
            match (solve(&chain), truth) {
                (Ok(answer), Some(truth)) => {
                    prop_assert!((answer.cost - truth).abs() <= 1e-9, "{} is not {truth}", answer.cost);
                    prop_assert!((cost_of(&chain, &answer) - truth).abs() <= 1e-9);
                    prop_assert!(answer.bound <= truth + 1e-9 && answer.bound >= truth - 1e-9);
                    prop_assert!(answer.relaxation_bound <= truth + 1e-9);
                    prop_assert!(answer.cpu_bytes() <= chain.ram);
                }
                (Err(_), None) => {}
                (answer, truth) => prop_assert!(false, "{answer:?} but {truth:?}"),
            }
        }

        #[test]
        fn the_capacity_that_an_error_names_is_sufficient(mut chain in tiny()) {
            chain.capacities.truncate(1);
            match solve(&chain) {
                Ok(_) => {}
                Err(Infeasible::Gpu { needed }) => {
                    prop_assert!(needed > chain.capacities[0]);
                    chain.capacities[0] = needed;
                    chain.ram = u64::MAX;
                    prop_assert!(solve(&chain).is_ok());
                }
                Err(Infeasible::Cpu { needed }) => {
                    chain.ram = needed;
                    prop_assert!(solve(&chain).is_ok());
                    chain.ram -= 1;
                    prop_assert!(solve(&chain).is_err());
                }
            }
        }
    }
}
