//! Solves a chain without a general solver: prices by climbing the dual, solutions that fit by
//! filling up, and the gap between both closed by the exact search as far as it goes.

use crate::{
    chain::{Chain, Choice, Step},
    dual::{Dual, Hulls, maximise, potentials},
    fill::{along, runs, top_up},
    labels::{Found, search},
};

/// The best solution found, and how good it is known to be.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    /// The state of every stage, and what it takes.
    pub(crate) taken: Vec<Taken>,
    /// What it costs.
    pub(crate) cost: f64,
    /// No solution costs less.
    pub(crate) bound: f64,
    /// The same by the prices alone.
    pub(crate) relaxation_bound: f64,
    /// What a byte more of each GPU's memory saves.
    pub(crate) gpu_prices: Vec<f64>,
}

/// A stage of an answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Taken {
    /// Index of the state.
    pub(crate) state: usize,
    pub(crate) choice: Choice,
}

/// No solution fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Infeasible {
    /// The least that the GPUs must hold is more than they can.
    Gpu {
        /// Bytes that would do, where there is one GPU.
        needed: u64,
    },
    /// The least that the CPU must hold is more than it can.
    Cpu {
        /// Bytes that would do.
        needed: u64,
    },
}

/// Gap below which nobody minds: `(cost − bound) / |cost|`.
pub(crate) const GOOD_ENOUGH: f64 = 1e-3;
/// Differences below this share of the cost are rounding.
pub(crate) const ROUNDING: f64 = 1e-11;
/// Extensions of labels that the first search for anything that fits may take.
const EXTENSIONS: usize = 10_000_000;
/// Gaps that the exact search tries to prove, until it can, and how many extensions of labels it
/// may take for each: a million takes about 10 ms.
const TOLERANCES: [(f64, usize); 5] = [
    (0.0, 3_000_000),
    (1e-4, 3_000_000),
    (3e-4, 4_000_000),
    (GOOD_ENOUGH * 0.999, 20_000_000),
    (GOOD_ENOUGH * 0.999, 60_000_000),
];

/// Solves `chain`.
pub(crate) fn solve(chain: &Chain) -> Result<Answer, Infeasible> {
    let answer = Search::new(chain, false).solve(None)?;
    if cpu_bytes(&answer) <= chain.ram {
        return Ok(answer);
    }
    // The CPU's memory binds: begin with the solution that takes the least of it.
    let fullest = fullest(chain)?;
    let needed = cpu_bytes(&fullest);
    if needed > chain.ram {
        return Err(Infeasible::Cpu { needed });
    }
    let search = Search::new(chain, true);
    let start = fullest.taken.iter().enumerate().map(|(stage, taken)| {
        let choices = search.chain.choices(stage, taken.state).iter();
        let fitting = choices.enumerate().filter(|(_, choice)| {
            choice.gpu_bytes <= taken.choice.gpu_bytes && choice.cpu_bytes <= taken.choice.cpu_bytes
        });
        let cheapest = fitting.min_by(|(_, a), (_, b)| a.cost.total_cmp(&b.cost));
        Step {
            state: taken.state,
            choice: cheapest
                .expect("what beats a choice takes no more memory")
                .0,
        }
    });
    let start = start.collect();
    search.solve(Some(start))
}

/// The solution that takes the least of the CPU's memory.
pub(crate) fn fullest(chain: &Chain) -> Result<Answer, Infeasible> {
    let mut least = chain.clone();
    least.ram = u64::MAX;
    (least.crossing, least.hop) = (0.0, 0.0);
    let homes = least.stages.iter_mut().flat_map(|stage| &mut stage.homes);
    for choice in homes.flatten() {
        choice.cost = choice.cpu_bytes as f64;
    }
    Search::new(&least, false).solve(None)
}

fn cpu_bytes(answer: &Answer) -> u64 {
    let taken = answer.taken.iter();
    taken.map(|taken| taken.choice.cpu_bytes).sum()
}

/// A pruned chain on its way to an answer.
struct Search {
    chain: Chain,
    hulls: Hulls,
    ram_matters: bool,
}

impl Search {
    fn new(chain: &Chain, ram_matters: bool) -> Self {
        let mut chain = chain.pruned(ram_matters);
        if !ram_matters {
            chain.ram = u64::MAX;
        }
        Self {
            hulls: Hulls::of(&chain, ram_matters),
            chain,
            ram_matters,
        }
    }

    /// Solves it, from a solution that fits where filling up may not find one.
    fn solve(&self, start: Option<Vec<Step>>) -> Result<Answer, Infeasible> {
        let chain = &self.chain;
        let least = |stage: &crate::chain::Stage| {
            let choices = stage.homes.iter().flatten();
            choices.map(|choice| choice.gpu_bytes).min().unwrap_or(0)
        };
        let needed: u64 = chain.stages.iter().map(least).sum();
        if needed
            > chain
                .capacities
                .iter()
                .fold(0, |sum: u64, c| sum.saturating_add(*c))
        {
            return Err(Infeasible::Gpu { needed });
        }
        let dual = maximise(chain, &self.hulls, self.ram_matters);
        let mut best = Best {
            steps: None,
            cost: f64::INFINITY,
        };
        if let Some(mut start) = start {
            top_up(chain, &mut start);
            best.offer(chain, start);
        }
        self.fill(&dual, &mut best);
        if best.gap(dual.bound) > GOOD_ENOUGH && chain.capacities.len() == 1 {
            best.offer_along(chain, &self.hulls, runs(chain));
        }
        if best.steps.is_none() {
            // Nothing that fits was stumbled upon, so whatever there is will do.
            let potentials = potentials(chain, &self.hulls, &dual.prices);
            let (prices, none) = (&dual.prices, f64::INFINITY);
            let found = search(
                chain,
                prices,
                &potentials,
                self.ram_matters,
                none,
                EXTENSIONS,
            );
            if let Found::Better(steps) = found {
                best.offer(chain, steps);
            }
        }
        let Some(steps) = best.steps.clone() else {
            return Err(Infeasible::Gpu { needed });
        };
        let mut answer = Answer {
            taken: Vec::new(),
            cost: best.cost,
            bound: dual.bound.min(best.cost),
            relaxation_bound: dual.bound.min(best.cost),
            gpu_prices: dual.prices.gpus.clone(),
        };
        let steps = self.close(&dual, steps, &mut answer);
        answer.taken = steps
            .iter()
            .enumerate()
            .map(|(stage, step)| Taken {
                state: step.state,
                choice: *chain.chosen(stage, *step),
            })
            .collect();
        Ok(answer)
    }

    /// Offers what fits of the relaxation's solutions, and what fills the paths of all of them.
    fn fill(&self, dual: &Dual, best: &mut Best) {
        const PATHS: usize = 24;
        let mut paths: Vec<Vec<usize>> = Vec::new();
        // The last are those at the best prices.
        for steps in dual.seen.iter().rev() {
            best.offer(&self.chain, steps.clone());
            let path: Vec<usize> = steps.iter().map(|step| step.state).collect();
            if paths.len() < PATHS && !paths.contains(&path) {
                paths.push(path);
            }
        }
        best.offer_along(&self.chain, &self.hulls, paths);
    }

    /// Looks for something better with the exact search, and raises the bound to what it proves.
    fn close(&self, dual: &Dual, mut steps: Vec<Step>, answer: &mut Answer) -> Vec<Step> {
        let potentials = potentials(&self.chain, &self.hulls, &dual.prices);
        for (tolerance, extensions) in TOLERANCES {
            let slack = |cost: f64| cost - tolerance.max(ROUNDING) * cost.abs();
            if answer.bound >= slack(answer.cost) {
                return steps;
            }
            let cutoff = slack(answer.cost);
            let found = search(
                &self.chain,
                &dual.prices,
                &potentials,
                self.ram_matters,
                cutoff,
                extensions,
            );
            match found {
                Found::TooMany => continue,
                Found::Nothing => answer.bound = answer.bound.max(cutoff),
                Found::Better(better) => {
                    answer.cost = self.chain.cost(&better);
                    // Nothing below the cutoff is cheaper than this.
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
struct Best {
    steps: Option<Vec<Step>>,
    cost: f64,
}

impl Best {
    fn offer(&mut self, chain: &Chain, steps: Vec<Step>) {
        let cost = chain.cost(&steps);
        if cost < self.cost && chain.allows(&steps) {
            (self.cost, self.steps) = (cost, Some(steps));
        }
    }

    /// Offers what fills these paths; the most promising ones to the last byte.
    fn offer_along(&mut self, chain: &Chain, hulls: &Hulls, paths: Vec<Vec<usize>>) {
        const PROMISING: usize = 400;
        let mut filled: Vec<(f64, Vec<Step>)> = paths
            .iter()
            .filter_map(|path| along(chain, hulls, path))
            .map(|steps| (chain.cost(&steps), steps))
            .collect();
        filled.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        for (_, mut steps) in filled.into_iter().take(PROMISING) {
            top_up(chain, &mut steps);
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
    use crate::{chain::Stage, exhaustive};

    /// Chains small enough to try everything, with ties, dead ends and memories of every size.
    fn tiny() -> impl Strategy<Value = Chain> {
        let cost = prop_oneof![(0u32..6).prop_map(f64::from), 0.0..6.0];
        let choice = (0u64..12, 0u64..12, cost).prop_map(|(gpu_bytes, cpu_bytes, cost)| Choice {
            gpu_bytes,
            cpu_bytes,
            cost,
            what: 0,
        });
        let layer_device = |least| proptest::collection::vec(choice.clone(), least..4);
        let stage =
            (layer_device(1), layer_device(0)).prop_map(|(cpu, gpu)| Stage { homes: [cpu, gpu] });
        let stages = proptest::collection::vec(stage, 1..5);
        let capacities = prop_oneof![
            3 => proptest::collection::vec(0u64..40, 1),
            1 => proptest::collection::vec(0u64..25, 2)
        ];
        let ram = prop_oneof![2 => Just(u64::MAX), 1 => 0u64..40];
        let mode = prop_oneof![Just(0.0), 0.0..3.0];
        (stages, capacities, ram, mode.clone(), mode).prop_map(
            |(stages, capacities, ram, crossing, hop)| Chain {
                stages,
                capacities,
                ram,
                crossing,
                hop,
            },
        )
    }

    fn cost_of(chain: &Chain, answer: &Answer) -> f64 {
        let mut before = Chain::START;
        let mut cost = 0.0;
        for taken in &answer.taken {
            cost += chain.transition(before, taken.state) + taken.choice.cost;
            before = taken.state;
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
                    prop_assert!(cpu_bytes(&answer) <= chain.ram);
                }
                (Err(_), None) => {}
                (answer, truth) => prop_assert!(false, "{answer:?} but {truth:?}"),
            }
        }

        #[test]
        fn what_is_said_to_do_does(mut chain in tiny()) {
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
