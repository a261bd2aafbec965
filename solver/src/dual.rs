//! The Lagrangian relaxation of a chain: every byte of memory has a price, and nothing else holds
//! the stages together but the ways between them.
//!
//! At given prices the best choice of every stage and home is found on its own, and the best homes
//! by dynamic programming along the chain (Viterbi). What that costs, less the price of all memory
//! there is, bounds every solution; the best prices are found by climbing that concave function.

use crate::chain::{Chain, Choice, State, Step};

/// What a byte costs in each memory.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Prices {
    /// Of each GPU.
    pub(crate) gpus: Vec<f64>,
    /// Of the CPU.
    pub(crate) ram: f64,
}

/// The choices that the relaxation looks at: those that are best at some price.
#[derive(Debug)]
pub(crate) struct Hulls {
    /// Per stage and home, the corners of the lower convex hull of cost over bytes on the GPU; all
    /// choices where memory of the CPU has a price too.
    corners: Vec<[Vec<usize>; 2]>,
    is_hull: bool,
}

impl Hulls {
    /// The hulls of a pruned chain.
    pub(crate) fn of(chain: &Chain, ram_matters: bool) -> Self {
        let hull = |choices: &Vec<Choice>| match ram_matters {
            true => (0..choices.len()).collect(),
            false => lower_hull(choices),
        };
        let stages = chain.stages.iter();
        Self {
            corners: stages
                .map(|stage| stage.homes.each_ref().map(hull))
                .collect(),
            is_hull: !ram_matters,
        }
    }

    /// The cheapest choice of a stage in a state, and what it costs with its memory; of equally cheap
    /// ones that which takes the least. Infinite where there is none.
    pub(crate) fn cheapest(
        &self,
        chain: &Chain,
        stage: usize,
        state: usize,
        prices: &Prices,
    ) -> (f64, usize) {
        let choices = chain.choices(stage, state);
        let State { gpu, layer_device } = State::of(state);
        let corners = &self.corners[stage][layer_device];
        if !self.is_hull {
            let mut best = (f64::INFINITY, 0);
            for &index in corners {
                let cost = prices.charged(&choices[index], gpu);
                if cost < best.0 {
                    best = (cost, index);
                }
            }
            return best;
        }
        // Along the hull a byte saves less and less; the best is where it saves less than its price.
        let price = prices.gpus[gpu];
        let pays = |corner: usize| {
            let (less, more) = (&choices[corners[corner]], &choices[corners[corner + 1]]);
            less.cost - more.cost > price * (more.gpu_bytes - less.gpu_bytes) as f64
        };
        let (mut low, mut high) = (0, corners.len().saturating_sub(1));
        while low < high {
            let middle = (low + high) / 2;
            match pays(middle) {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        match corners.get(low) {
            Some(&index) => (prices.charged(&choices[index], gpu), index),
            None => (f64::INFINITY, 0),
        }
    }
}

/// Corners of the lower convex hull of choices sorted by bytes, costs falling.
fn lower_hull(choices: &[Choice]) -> Vec<usize> {
    let slope = |a: usize, b: usize| {
        let (a, b) = (&choices[a], &choices[b]);
        (b.cost - a.cost) / (b.gpu_bytes - a.gpu_bytes) as f64
    };
    let mut hull: Vec<usize> = Vec::new();
    for next in 0..choices.len() {
        while let [.., before, last] = hull[..]
            && slope(before, last) >= slope(last, next)
        {
            hull.pop();
        }
        hull.push(next);
    }
    hull
}

/// The chain at some prices.
#[derive(Debug)]
pub(crate) struct Relaxed {
    /// No solution costs less.
    pub(crate) bound: f64,
    /// What is best at these prices, whether it fits or not.
    pub(crate) steps: Vec<Step>,
}

/// What is paid besides the stages before and after a state.
#[derive(Debug)]
pub(crate) struct Potentials {
    /// Per stage and state: the least of everything before the stage, and the way into it.
    pub(crate) into: Vec<Vec<f64>>,
    /// Per stage and state: the least of everything after the stage, and the way out of it.
    pub(crate) out: Vec<Vec<f64>>,
    /// The price of all memory there is.
    pub(crate) constant: f64,
}

impl Prices {
    /// Nothing costs anything.
    pub(crate) fn zero(chain: &Chain) -> Self {
        Self {
            gpus: vec![0.0; chain.capacities.len()],
            ram: 0.0,
        }
    }

    /// Cost of a choice on a GPU's range with the price of its memory.
    pub(crate) fn charged(&self, choice: &Choice, gpu: usize) -> f64 {
        let mut cost = choice.cost + self.gpus[gpu] * choice.gpu_bytes as f64;
        if self.ram > 0.0 {
            cost += self.ram * choice.cpu_bytes as f64;
        }
        cost
    }

    /// The price of all memory there is.
    fn of_all(&self, chain: &Chain) -> f64 {
        let gpus = self.gpus.iter().zip(&chain.capacities);
        let gpus: f64 = gpus.map(|(price, bytes)| price * *bytes as f64).sum();
        match self.ram > 0.0 {
            true => gpus + self.ram * chain.ram as f64,
            false => gpus,
        }
    }

    /// One of the prices: of a GPU, or behind them of the CPU.
    fn set(&mut self, memory: usize, price: f64) {
        match self.gpus.get_mut(memory) {
            Some(gpu) => *gpu = price,
            None => self.ram = price,
        }
    }

    fn get(&self, memory: usize) -> f64 {
        self.gpus.get(memory).copied().unwrap_or(self.ram)
    }
}

/// The cheapest choice of every stage and state, and what it costs.
fn cheapest(chain: &Chain, hulls: &Hulls, prices: &Prices) -> Vec<Vec<(f64, usize)>> {
    let stage = |stage: usize| {
        let states = 0..chain.states();
        states
            .map(|state| hulls.cheapest(chain, stage, state, prices))
            .collect()
    };
    (0..chain.stages.len()).map(stage).collect()
}

/// Solves the chain at `prices`.
pub(crate) fn relax(chain: &Chain, hulls: &Hulls, prices: &Prices) -> Relaxed {
    let cheapest = cheapest(chain, hulls, prices);
    let states = chain.states();
    let mut least: Vec<f64> = (0..states)
        .map(|state| chain.transition(Chain::START, state) + cheapest[0][state].0)
        .collect();
    let mut from: Vec<Vec<usize>> = Vec::with_capacity(cheapest.len());
    for stage in &cheapest[1..] {
        let mut next = vec![f64::INFINITY; states];
        let mut back = vec![0; states];
        for to in 0..states {
            for (before, cost) in least.iter().enumerate() {
                let cost = cost + chain.transition(before, to) + stage[to].0;
                if cost < next[to] {
                    (next[to], back[to]) = (cost, before);
                }
            }
        }
        least = next;
        from.push(back);
    }
    let mut state = (0..states)
        .reduce(|best, next| {
            if least[next] < least[best] {
                next
            } else {
                best
            }
        })
        .expect("there are states");
    let bound = least[state] - prices.of_all(chain);
    let mut steps = Vec::with_capacity(cheapest.len());
    for stage in (0..cheapest.len()).rev() {
        steps.push(Step {
            state,
            choice: cheapest[stage][state].1,
        });
        if stage > 0 {
            state = from[stage - 1][state];
        }
    }
    steps.reverse();
    Relaxed { bound, steps }
}

/// What is paid around every stage at `prices`.
pub(crate) fn potentials(chain: &Chain, hulls: &Hulls, prices: &Prices) -> Potentials {
    let cheapest = cheapest(chain, hulls, prices);
    let (stages, states) = (cheapest.len(), chain.states());
    let mut into = vec![vec![f64::INFINITY; states]; stages];
    let mut out = vec![vec![f64::INFINITY; states]; stages];
    for (state, into) in into[0].iter_mut().enumerate() {
        *into = chain.transition(Chain::START, state);
    }
    for stage in 1..stages {
        for to in 0..states {
            for before in 0..states {
                let cost = into[stage - 1][before] + cheapest[stage - 1][before].0;
                into[stage][to] = into[stage][to].min(cost + chain.transition(before, to));
            }
        }
    }
    out[stages - 1].fill(0.0);
    for stage in (0..stages - 1).rev() {
        for before in 0..states {
            for to in 0..states {
                let cost = cheapest[stage + 1][to].0 + out[stage + 1][to];
                out[stage][before] = out[stage][before].min(chain.transition(before, to) + cost);
            }
        }
    }
    Potentials {
        into,
        out,
        constant: prices.of_all(chain),
    }
}

/// The best prices found, their bound, and what was best on the way to them.
#[derive(Debug)]
pub(crate) struct Dual {
    pub(crate) prices: Prices,
    pub(crate) bound: f64,
    /// Solutions of the relaxation, of which some may fit.
    pub(crate) seen: Vec<Vec<Step>>,
}

/// Rounds over all memories, where there is more than one to find a price for.
const ROUNDS: usize = 6;

/// Finds prices whose bound is the highest; of the CPU's memory only where `ram_matters`.
pub(crate) fn maximise(chain: &Chain, hulls: &Hulls, ram_matters: bool) -> Dual {
    let memories = chain.capacities.len() + usize::from(ram_matters);
    let mut dual = Dual {
        prices: Prices::zero(chain),
        bound: f64::NEG_INFINITY,
        seen: Vec::new(),
    };
    for _ in 0..if memories == 1 { 1 } else { ROUNDS } {
        let before = dual.bound;
        for memory in 0..memories {
            climb(chain, hulls, memory, &mut dual);
        }
        if dual.bound - before <= 1e-9 * dual.bound.abs() {
            break;
        }
    }
    dual
}

/// Finds the best price of one memory, the others given.
fn climb(chain: &Chain, hulls: &Hulls, memory: usize, dual: &mut Dual) {
    let start = dual.prices.get(memory);
    let scale = match chain.capacities.get(memory) {
        Some(capacity) => *capacity,
        None => chain.ram,
    };
    let mut prices = dual.prices.clone();
    let mut at = |price: f64| {
        prices.set(memory, price);
        let relaxed = relax(chain, hulls, &prices);
        let excess = match chain.capacities.get(memory) {
            Some(capacity) => chain.gpu_bytes(&relaxed.steps)[memory] as f64 - *capacity as f64,
            None => chain.cpu_bytes(&relaxed.steps) as f64 - chain.ram as f64,
        };
        let point = Point {
            price,
            bound: relaxed.bound,
            excess,
        };
        if relaxed.bound > dual.bound {
            dual.bound = relaxed.bound;
            dual.prices = prices.clone();
        }
        if dual.seen.last() != Some(&relaxed.steps) {
            dual.seen.push(relaxed.steps);
        }
        point
    };
    peak(start, scale, &mut at);
}

/// A bound and how much of a memory it takes too much.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Point {
    pub(crate) price: f64,
    pub(crate) bound: f64,
    /// Bytes beyond what there is: the slope of the bound.
    pub(crate) excess: f64,
}

/// Looks for the highest bound over the price of one memory of about `scale` bytes: where the
/// tangents at a price that is too low and one that is too high meet, again and again.
pub(crate) fn peak(start: f64, scale: u64, at: &mut dyn FnMut(f64) -> Point) -> Option<f64> {
    const STEPS: usize = 200;
    let mut low = at(0.0);
    if low.excess <= 0.0 {
        return Some(0.0);
    }
    let guess = (low.bound.abs() / scale.max(1) as f64).max(1e-18);
    let mut high = at(if start > 0.0 { start } else { guess });
    let mut steps = 0;
    while high.excess > 0.0 {
        low = high;
        steps += 1;
        if steps > STEPS {
            return None;
        }
        high = at(high.price * 4.0);
    }
    for _ in 0..STEPS {
        if low.excess <= 0.0 || high.excess >= 0.0 {
            break;
        }
        let meet = (high.bound - low.bound + low.excess * low.price - high.excess * high.price)
            / (low.excess - high.excess);
        if !(meet > low.price && meet < high.price) {
            break;
        }
        let most = low.bound + low.excess * (meet - low.price);
        let found = at(meet);
        if most - found.bound <= 1e-13 * most.abs() {
            return Some(meet);
        }
        match found.excess > 0.0 {
            true => low = found,
            false => high = found,
        }
    }
    Some(high.price)
}
