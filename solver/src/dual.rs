//! Lagrangian relaxation of a chain: the memory limits move into the objective, where every byte costs a
//! multiplier.
//!
//! At given multipliers the best choice of every stage and state is independent of the others, and the best
//! states follow by dynamic programming along the chain. The cost of that solution, less the multipliers
//! times the capacities, is a lower bound for every solution. The multipliers with the highest bound
//! maximise a concave function.

use std::ops::Range;

use crate::chain::{Chain, Choice, State, Step};

/// Lagrange multipliers: cost of a byte in each memory.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Multipliers {
    /// Multiplier of each GPU.
    pub(crate) gpus: Vec<f64>,
    /// Multiplier of the CPU.
    pub(crate) ram: f64,
}

/// Choices that are optimal for some multipliers.
#[derive(Debug)]
pub(crate) struct Hulls {
    /// Per stage and device of the hidden state, the vertices of the lower convex hull of cost over bytes
    /// on the GPU; all choices if `is_hull` is false.
    vertices: Vec<[Vec<usize>; 2]>,
    /// Whether memory of the GPU is the only one with a multiplier.
    is_hull: bool,
}

impl Hulls {
    /// The hulls of a pruned chain.
    pub(crate) fn new(chain: &Chain, ram_binds: bool) -> Self {
        let hull = |choices: &Vec<Choice>| {
            if ram_binds {
                (0..choices.len()).collect()
            } else {
                lower_hull(choices)
            }
        };
        let stages = chain.stages.iter();
        Self {
            vertices: stages
                .map(|stage| stage.choices.each_ref().map(hull))
                .collect(),
            is_hull: !ram_binds,
        }
    }

    /// The choice of a stage and state with the least Lagrangian cost, and this cost: among equal choices, the
    /// one with the fewest bytes; an infinite cost if the state has no choice.
    pub(crate) fn cheapest(
        &self,
        chain: &Chain,
        stage: usize,
        state: usize,
        multipliers: &Multipliers,
    ) -> (f64, usize) {
        let choices = chain.choices(stage, state);
        let State { gpu, device } = State::from_parts(state);
        let vertices = &self.vertices[stage][device];
        if !self.is_hull {
            let mut best = (f64::INFINITY, 0);
            for &index in vertices {
                let cost = multipliers.lagrangian(&choices[index], gpu);
                if cost < best.0 {
                    best = (cost, index);
                }
            }
            return best;
        }
        // Savings per byte fall along the hull, so the last vertex that saves more than the multiplier is found by bisection.
        let multiplier = multipliers.gpus[gpu];
        let saves = |vertex: usize| {
            let (less, more) = (&choices[vertices[vertex]], &choices[vertices[vertex + 1]]);
            less.cost - more.cost > multiplier * (more.gpu_bytes - less.gpu_bytes) as f64
        };
        let (mut low, mut high) = (0, vertices.len().saturating_sub(1));
        while low < high {
            let middle = (low + high) / 2;
            if saves(middle) {
                low = middle + 1
            } else {
                high = middle
            }
        }
        match vertices.get(low) {
            Some(&index) => (multipliers.lagrangian(&choices[index], gpu), index),
            None => (f64::INFINITY, 0),
        }
    }
}

/// Vertices of the lower convex hull of choices, which are sorted by rising bytes and falling cost.
fn lower_hull(choices: &[Choice]) -> Vec<usize> {
    let slope = |a: usize, b: usize| {
        let (a, b) = (&choices[a], &choices[b]);
        (b.cost - a.cost) / (b.gpu_bytes - a.gpu_bytes) as f64
    };
    let mut hull: Vec<usize> = Vec::new();
    for next in 0..choices.len() {
        while let [.., previous, last] = hull[..]
            && slope(previous, last) >= slope(last, next)
        {
            hull.pop();
        }
        hull.push(next);
    }
    hull
}

/// Solution of the relaxation at some multipliers.
#[derive(Debug)]
pub(crate) struct Relaxed {
    /// Lower bound on the cost of every solution.
    pub(crate) bound: f64,
    /// Optimal steps of the relaxation, which may exceed the memory limits.
    pub(crate) steps: Vec<Step>,
}

/// Least Lagrangian costs of the rest of the chain, around each stage and state.
#[derive(Debug)]
pub(crate) struct Potentials {
    /// Per stage and state: of all earlier stages, with the transition into this state.
    pub(crate) before: Vec<Vec<f64>>,
    /// Per stage and state: of all later stages, with the transition out of this state.
    pub(crate) after: Vec<Vec<f64>>,
    /// Multipliers times capacities.
    pub(crate) constant: f64,
}

impl Multipliers {
    /// Multipliers of 0.
    pub(crate) fn zero(chain: &Chain) -> Self {
        Self {
            gpus: vec![0.0; chain.capacities.len()],
            ram: 0.0,
        }
    }

    /// Lagrangian cost of a choice whose stage is on `gpu`: its cost plus its bytes times the multipliers.
    pub(crate) fn lagrangian(&self, choice: &Choice, gpu: usize) -> f64 {
        let mut cost = choice.cost + self.gpus[gpu] * choice.gpu_bytes as f64;
        if self.ram > 0.0 {
            cost += self.ram * choice.cpu_bytes as f64;
        }
        cost
    }

    /// Multipliers times capacities, of the GPUs from `first_gpu` on and of the CPU.
    pub(crate) fn of_capacities(&self, chain: &Chain, first_gpu: usize) -> f64 {
        let gpus = self.gpus[first_gpu..]
            .iter()
            .zip(&chain.capacities[first_gpu..]);
        let gpus: f64 = gpus
            .map(|(multiplier, bytes)| multiplier * *bytes as f64)
            .sum();
        if self.ram > 0.0 {
            gpus + self.ram * chain.ram as f64
        } else {
            gpus
        }
    }

    /// Sets the multiplier of one memory; the CPU's index follows those of the GPUs.
    fn set(&mut self, memory: usize, multiplier: f64) {
        match self.gpus.get_mut(memory) {
            Some(gpu) => *gpu = multiplier,
            None => self.ram = multiplier,
        }
    }

    fn get(&self, memory: usize) -> f64 {
        self.gpus.get(memory).copied().unwrap_or(self.ram)
    }
}

/// Per stage and state, the least Lagrangian cost and its choice.
type Cheapest = Vec<Vec<(f64, usize)>>;

fn cheapest(chain: &Chain, hulls: &Hulls, multipliers: &Multipliers) -> Cheapest {
    let stage = |stage: usize| {
        let states = 0..chain.states();
        states
            .map(|state| hulls.cheapest(chain, stage, state, multipliers))
            .collect()
    };
    (0..chain.stages.len()).map(stage).collect()
}

/// Forward pass: per stage and state, the least Lagrangian cost before the stage with the transition into
/// the state, and the state of the previous stage that attains it.
fn forward(chain: &Chain, cheapest: &Cheapest) -> Vec<Vec<(f64, usize)>> {
    let states = 0..chain.states();
    let first = states
        .clone()
        .map(|state| (chain.transition(Chain::START, state), Chain::START));
    let mut least = vec![first.collect::<Vec<_>>()];
    for (stage, cheapest) in cheapest[..cheapest.len() - 1].iter().enumerate() {
        let next = states.clone().map(|to| {
            let mut best = (f64::INFINITY, 0);
            for from in states.clone() {
                let cost = least[stage][from].0 + cheapest[from].0 + chain.transition(from, to);
                if cost < best.0 {
                    best = (cost, from);
                }
            }
            best
        });
        least.push(next.collect());
    }
    least
}

/// Solves the relaxation of `chain` at `multipliers`.
pub(crate) fn relax(chain: &Chain, hulls: &Hulls, multipliers: &Multipliers) -> Relaxed {
    let cheapest = cheapest(chain, hulls, multipliers);
    let least = forward(chain, &cheapest);
    let last = cheapest.len() - 1;
    let (mut state, mut cost) = (0, f64::INFINITY);
    for end in 0..chain.states() {
        let total = least[last][end].0 + cheapest[last][end].0;
        if total < cost {
            (state, cost) = (end, total);
        }
    }
    let mut steps = Vec::with_capacity(cheapest.len());
    for stage in (0..cheapest.len()).rev() {
        steps.push(Step {
            state,
            choice: cheapest[stage][state].1,
        });
        state = least[stage][state].1;
    }
    steps.reverse();
    Relaxed {
        bound: cost - multipliers.of_capacities(chain, 0),
        steps,
    }
}

/// The potentials of every stage and state at `multipliers`.
pub(crate) fn potentials(chain: &Chain, hulls: &Hulls, multipliers: &Multipliers) -> Potentials {
    let cheapest = cheapest(chain, hulls, multipliers);
    let (stages, states) = (cheapest.len(), chain.states());
    let before = forward(chain, &cheapest)
        .into_iter()
        .map(|states| states.into_iter().map(|(cost, _)| cost).collect());
    let mut after = vec![vec![f64::INFINITY; states]; stages];
    after[stages - 1].fill(0.0);
    for stage in (0..stages - 1).rev() {
        for from in 0..states {
            for to in 0..states {
                let cost = cheapest[stage + 1][to].0 + after[stage + 1][to];
                after[stage][from] = after[stage][from].min(chain.transition(from, to) + cost);
            }
        }
    }
    Potentials {
        before: before.collect(),
        after,
        constant: multipliers.of_capacities(chain, 0),
    }
}

/// Result of [`maximise`].
#[derive(Debug)]
pub(crate) struct Dual {
    /// Multipliers of the highest bound found.
    pub(crate) multipliers: Multipliers,
    /// The highest bound found.
    pub(crate) bound: f64,
    /// Solutions of all relaxations on the way, of which some may fit.
    pub(crate) relaxed: Vec<Vec<Step>>,
}

/// Rounds of coordinate ascent if there is more than one multiplier.
const ROUNDS: usize = 6;

/// Maximises the bound over the multipliers by coordinate ascent, after a common multiplier of all GPUs: the price of
/// one GPU's memory alone raises no bound while the stages can move to another one. The multiplier of the CPU's memory
/// stays 0 unless `ram_binds`.
pub(crate) fn maximise(chain: &Chain, hulls: &Hulls, ram_binds: bool) -> Dual {
    let gpus = chain.capacities.len();
    let memories = gpus + usize::from(ram_binds);
    let mut dual = Dual {
        multipliers: Multipliers::zero(chain),
        bound: f64::NEG_INFINITY,
        relaxed: Vec::new(),
    };
    for _ in 0..if memories == 1 { 1 } else { ROUNDS } {
        let previous = dual.bound;
        if gpus > 1 {
            maximise_common(chain, hulls, 0..gpus, &mut dual);
        }
        for memory in 0..memories {
            maximise_common(chain, hulls, memory..memory + 1, &mut dual);
        }
        if dual.bound - previous <= 1e-9 * dual.bound.abs() {
            break;
        }
    }
    dual
}

/// Maximises the bound over a common multiplier of some memories.
fn maximise_common(chain: &Chain, hulls: &Hulls, memories: Range<usize>, dual: &mut Dual) {
    let start = dual.multipliers.get(memories.start);
    // The CPU's memory follows those of the GPUs.
    let of_each = [&chain.capacities[..], &[chain.ram]].concat();
    let capacity = of_each[memories.clone()]
        .iter()
        .fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
    let mut multipliers = dual.multipliers.clone();
    let mut evaluate = |multiplier: f64| {
        for memory in memories.clone() {
            multipliers.set(memory, multiplier);
        }
        let relaxed = relax(chain, hulls, &multipliers);
        let mut used = chain.gpu_bytes(&relaxed.steps);
        used.push(chain.cpu_bytes(&relaxed.steps));
        let used: u64 = used[memories.clone()].iter().sum();
        let point = Point {
            multiplier,
            bound: relaxed.bound,
            excess: used as f64 - capacity as f64,
        };
        if relaxed.bound > dual.bound {
            dual.bound = relaxed.bound;
            dual.multipliers = multipliers.clone();
        }
        if dual.relaxed.last() != Some(&relaxed.steps) {
            dual.relaxed.push(relaxed.steps);
        }
        point
    };
    line_search(start, capacity, &mut evaluate);
}

/// The bound at one multiplier, and its slope.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Point {
    pub(crate) multiplier: f64,
    pub(crate) bound: f64,
    /// Bytes used beyond the capacity: the slope of the bound.
    pub(crate) excess: f64,
}

/// Maximises the bound over the multiplier of a memory of `capacity` bytes: evaluates it where the tangents
/// at a multiplier that is too low and at one that is too high intersect, until they are the same.
///
/// Starts at `start` if it is positive. Returns the multiplier, or `None` if every one tried is too low.
pub(crate) fn line_search(
    start: f64,
    capacity: u64,
    evaluate: &mut dyn FnMut(f64) -> Point,
) -> Option<f64> {
    const STEPS: usize = 200;
    let mut low = evaluate(0.0);
    if low.excess <= 0.0 {
        return Some(0.0);
    }
    let guess = (low.bound.abs() / capacity.max(1) as f64).max(1e-18);
    let mut high = evaluate(if start > 0.0 { start } else { guess });
    let mut steps = 0;
    while high.excess > 0.0 {
        low = high;
        steps += 1;
        if steps > STEPS {
            return None;
        }
        high = evaluate(high.multiplier * 4.0);
    }
    for _ in 0..STEPS {
        if low.excess <= 0.0 || high.excess >= 0.0 {
            break;
        }
        let intersection = (high.bound - low.bound + low.excess * low.multiplier
            - high.excess * high.multiplier)
            / (low.excess - high.excess);
        if !(intersection > low.multiplier && intersection < high.multiplier) {
            break;
        }
        let most = low.bound + low.excess * (intersection - low.multiplier);
        let found = evaluate(intersection);
        if most - found.bound <= 1e-13 * most.abs() {
            return Some(intersection);
        }
        if found.excess > 0.0 {
            low = found
        } else {
            high = found
        }
    }
    Some(high.multiplier)
}
