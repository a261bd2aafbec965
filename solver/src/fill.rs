//! From prices to solutions that fit: along given homes the memory is filled to its price, and what
//! is then left goes, step by step, to whoever gains most by a byte of it.

use crate::{
    chain::{Chain, ON_CPU, ON_GPU, State, Step},
    dual::{Hulls, Point, Prices, peak},
};

/// A solution along the states of `path` that fills the GPUs to one price each; `None` where none
/// fits. Looks at no other memory.
pub(crate) fn along(chain: &Chain, hulls: &Hulls, path: &[usize]) -> Option<Vec<Step>> {
    let mut steps: Vec<Step> = Vec::new();
    for gpu in 0..chain.capacities.len() {
        let stages: Vec<usize> = (0..path.len())
            .filter(|stage| State::of(path[*stage]).gpu == gpu)
            .collect();
        if stages.is_empty() {
            continue;
        }
        let capacity = chain.capacities[gpu];
        let mut best: Option<Vec<Step>> = None;
        let mut prices = Prices::zero(chain);
        let found = peak(0.0, capacity, &mut |price| {
            prices.gpus[gpu] = price;
            let taken = stages.iter().map(|&stage| Step {
                state: path[stage],
                choice: hulls.cheapest(chain, stage, path[stage], &prices).1,
            });
            let taken: Vec<Step> = taken.collect();
            let (mut bytes, mut bound) = (0, -price * capacity as f64);
            for (&stage, step) in stages.iter().zip(&taken) {
                let choice = chain.chosen(stage, *step);
                bytes += choice.gpu_bytes;
                bound += choice.cost + price * choice.gpu_bytes as f64;
            }
            if bytes <= capacity {
                best = Some(taken);
            }
            Point {
                price,
                bound,
                excess: bytes as f64 - capacity as f64,
            }
        });
        found?;
        steps.extend(best?);
    }
    Some(steps)
}

/// Takes better choices of the same homes for as long as they fit, the best for its bytes first.
pub(crate) fn top_up(chain: &Chain, steps: &mut [Step]) {
    let used = chain.gpu_bytes(steps);
    let mut left = Left {
        gpus: chain
            .capacities
            .iter()
            .zip(used)
            .map(|(capacity, used)| capacity.saturating_sub(used))
            .collect(),
        ram: chain.ram.saturating_sub(chain.cpu_bytes(steps)),
    };
    let mut best: Vec<Option<(f64, usize)>> = steps
        .iter()
        .enumerate()
        .map(|(stage, step)| left.best(chain, stage, *step))
        .collect();
    loop {
        let mut next: Option<(f64, usize)> = None;
        for (stage, found) in best.iter().enumerate() {
            if let Some((worth, _)) = *found
                && next.is_none_or(|(most, _)| worth > most)
            {
                next = Some((worth, stage));
            }
        }
        let Some((_, stage)) = next else {
            return;
        };
        let (_, choice) = best[stage].expect("it has something better");
        if !left.fits(chain, stage, steps[stage], choice) {
            best[stage] = left.best(chain, stage, steps[stage]);
            continue;
        }
        let freed = left.take(chain, stage, &mut steps[stage], choice);
        if freed {
            for (stage, best) in best.iter_mut().enumerate() {
                *best = left.best(chain, stage, steps[stage]);
            }
        } else {
            // What others found best is still the best of what fits, if it fits.
            best[stage] = left.best(chain, stage, steps[stage]);
        }
    }
}

/// What is left of every memory.
struct Left {
    gpus: Vec<u64>,
    ram: u64,
}

impl Left {
    fn fits(&self, chain: &Chain, stage: usize, step: Step, choice: usize) -> bool {
        let now = chain.chosen(stage, step);
        let next = &chain.choices(stage, step.state)[choice];
        let room = self.gpus[State::of(step.state).gpu].saturating_add(now.gpu_bytes);
        next.gpu_bytes <= room && next.cpu_bytes <= self.ram.saturating_add(now.cpu_bytes)
    }

    /// What gains most by a byte, and fits.
    fn best(&self, chain: &Chain, stage: usize, step: Step) -> Option<(f64, usize)> {
        let now = chain.chosen(stage, step);
        let mut best: Option<(f64, usize)> = None;
        for (index, choice) in chain.choices(stage, step.state).iter().enumerate() {
            let gain = now.cost - choice.cost;
            if gain <= 0.0 || !self.fits(chain, stage, step, index) {
                continue;
            }
            let extra = choice.gpu_bytes.saturating_sub(now.gpu_bytes).max(1);
            let worth = gain / extra as f64;
            if best.is_none_or(|(most, _)| worth > most) {
                best = Some((worth, index));
            }
        }
        best
    }

    /// Takes a choice that fits; tells whether that freed any memory.
    fn take(&mut self, chain: &Chain, stage: usize, step: &mut Step, choice: usize) -> bool {
        let now = *chain.chosen(stage, *step);
        step.choice = choice;
        let next = *chain.chosen(stage, *step);
        let gpu = &mut self.gpus[State::of(step.state).gpu];
        *gpu = *gpu + now.gpu_bytes - next.gpu_bytes;
        self.ram = self.ram + now.cpu_bytes - next.cpu_bytes;
        next.gpu_bytes < now.gpu_bytes || next.cpu_bytes < now.cpu_bytes && chain.ram < u64::MAX
    }
}

/// Paths with a run of stages on the GPU at the front or at the back, for one GPU: where the stages
/// are alike, every other path is a worse one of these.
pub(crate) fn runs(chain: &Chain) -> Vec<Vec<usize>> {
    let (layers, gpu) = (chain.stages.len().saturating_sub(1), 0);
    let state = |layer_device: usize| 2 * gpu + layer_device;
    let mut paths = Vec::new();
    for count in 0..=layers {
        for is_front in [true, false] {
            for head in [ON_CPU, ON_GPU] {
                let mut path: Vec<usize> = (0..layers)
                    .map(|layer| match is_front {
                        true => layer < count,
                        false => layer >= layers - count,
                    })
                    .map(|on_gpu| state(usize::from(on_gpu)))
                    .collect();
                path.push(state(head));
                let is_there = path
                    .iter()
                    .enumerate()
                    .all(|(stage, state)| !chain.choices(stage, *state).is_empty());
                if is_there {
                    paths.push(path);
                }
            }
        }
    }
    paths
}
