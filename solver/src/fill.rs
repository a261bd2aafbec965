//! Primal heuristics: turn the states of a relaxed solution into solutions that fit, by filling the memory up
//! to one multiplier and then greedily by savings per byte.

use crate::{
    chain::{Chain, ON_CPU, ON_GPU, State, Step},
    dual::{Hulls, Multipliers, Point, line_search},
};

/// The cheapest solution along the states of `path` that fills each GPU up to one multiplier; `None` if
/// none fits. Ignores the memory limit of the CPU.
pub(crate) fn fill_path(chain: &Chain, hulls: &Hulls, path: &[usize]) -> Option<Vec<Step>> {
    let mut steps: Vec<Step> = Vec::new();
    for gpu in 0..chain.capacities.len() {
        let stages: Vec<usize> = (0..path.len())
            .filter(|stage| State::from_parts(path[*stage]).gpu == gpu)
            .collect();
        if stages.is_empty() {
            continue;
        }
        let capacity = chain.capacities[gpu];
        let mut best: Option<Vec<Step>> = None;
        let mut multipliers = Multipliers::zero(chain);
        let found = line_search(0.0, capacity, &mut |multiplier| {
            multipliers.gpus[gpu] = multiplier;
            let taken = stages.iter().map(|&stage| Step {
                state: path[stage],
                choice: hulls.cheapest(chain, stage, path[stage], &multipliers).1,
            });
            let taken: Vec<Step> = taken.collect();
            let (mut bytes, mut bound) = (0, -multiplier * capacity as f64);
            for (&stage, step) in stages.iter().zip(&taken) {
                let choice = chain.chosen(stage, *step);
                bytes += choice.gpu_bytes;
                bound += choice.cost + multiplier * choice.gpu_bytes as f64;
            }
            if bytes <= capacity {
                best = Some(taken);
            }
            Point {
                multiplier,
                bound,
                excess: bytes as f64 - capacity as f64,
            }
        });
        found?;
        steps.extend(best?);
    }
    Some(steps)
}

/// Replaces choices by better ones of the same states for as long as they fit, the largest savings per
/// byte first.
pub(crate) fn improve_greedily(chain: &Chain, steps: &mut [Step]) {
    let used = chain.gpu_bytes(steps);
    let mut free = Free {
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
        .map(|(stage, step)| free.best(chain, stage, *step))
        .collect();
    loop {
        let mut next: Option<(f64, usize)> = None;
        for (stage, found) in best.iter().enumerate() {
            if let Some((density, _)) = *found
                && next.is_none_or(|(most, _)| density > most)
            {
                next = Some((density, stage));
            }
        }
        let Some((_, stage)) = next else {
            return;
        };
        let (_, choice) = best[stage].expect("the stage has a better choice");
        if !free.fits(chain, stage, steps[stage], choice) {
            best[stage] = free.best(chain, stage, steps[stage]);
            continue;
        }
        let freed = free.take(chain, stage, &mut steps[stage], choice);
        if freed {
            for (stage, best) in best.iter_mut().enumerate() {
                *best = free.best(chain, stage, steps[stage]);
            }
        } else {
            // Less memory is free than before, so the best choices of other stages stay the best while they fit.
            best[stage] = free.best(chain, stage, steps[stage]);
        }
    }
}

/// Unused bytes of every memory.
struct Free {
    gpus: Vec<u64>,
    ram: u64,
}

impl Free {
    fn fits(&self, chain: &Chain, stage: usize, step: Step, choice: usize) -> bool {
        let now = chain.chosen(stage, step);
        let next = &chain.choices(stage, step.state)[choice];
        let gpu = self.gpus[State::from_parts(step.state).gpu].saturating_add(now.gpu_bytes);
        next.gpu_bytes <= gpu && next.cpu_bytes <= self.ram.saturating_add(now.cpu_bytes)
    }

    /// The better choice with the largest savings per byte among those that fit, and these savings.
    fn best(&self, chain: &Chain, stage: usize, step: Step) -> Option<(f64, usize)> {
        let now = chain.chosen(stage, step);
        let mut best: Option<(f64, usize)> = None;
        for (index, choice) in chain.choices(stage, step.state).iter().enumerate() {
            let gain = now.cost - choice.cost;
            if gain <= 0.0 || !self.fits(chain, stage, step, index) {
                continue;
            }
            let extra = choice.gpu_bytes.saturating_sub(now.gpu_bytes).max(1);
            let density = gain / extra as f64;
            if best.is_none_or(|(most, _)| density > most) {
                best = Some((density, index));
            }
        }
        best
    }

    /// Takes a choice that fits. Returns whether this freed any memory.
    fn take(&mut self, chain: &Chain, stage: usize, step: &mut Step, choice: usize) -> bool {
        let now = *chain.chosen(stage, *step);
        step.choice = choice;
        let next = *chain.chosen(stage, *step);
        let gpu = &mut self.gpus[State::from_parts(step.state).gpu];
        *gpu = *gpu + now.gpu_bytes - next.gpu_bytes;
        self.ram = self.ram + now.cpu_bytes - next.cpu_bytes;
        next.gpu_bytes < now.gpu_bytes || next.cpu_bytes < now.cpu_bytes && chain.ram < u64::MAX
    }
}

/// Paths of a chain with one GPU whose first or last layers are on the GPU. If all layers are equal, one of
/// these paths is optimal.
pub(crate) fn prefix_and_suffix_paths(chain: &Chain) -> Vec<Vec<usize>> {
    let layers = chain.stages.len().saturating_sub(1);
    let mut paths = Vec::new();
    for count in 0..=layers {
        for is_prefix in [true, false] {
            for head in [ON_CPU, ON_GPU] {
                // With one GPU the index of a state is that of its device.
                let mut path: Vec<usize> = (0..layers)
                    .map(|layer| {
                        if is_prefix {
                            layer < count
                        } else {
                            layer >= layers - count
                        }
                    })
                    .map(usize::from)
                    .collect();
                path.push(head);
                let mut states = path.iter().enumerate();
                if states.all(|(stage, state)| !chain.choices(stage, *state).is_empty()) {
                    paths.push(path);
                }
            }
        }
    }
    paths
}

/// Paths of a chain with several GPUs that divide its stages among the GPUs: in proportion to their capacities, but for
/// one boundary, which is anywhere. The relaxation gives no such paths if layers are equal: it has no reason to
/// leave a GPU for the next.
pub(crate) fn division_paths(chain: &Chain) -> Vec<Vec<usize>> {
    let stages = chain.stages.len();
    let all: f64 = chain.capacities.iter().map(|bytes| *bytes as f64).sum();
    let mut begun = 0.0;
    let mut ends: Vec<usize> = Vec::new();
    for bytes in &chain.capacities {
        begun += *bytes as f64;
        ends.push((stages as f64 * begun / all.max(1.0)).round() as usize);
    }
    let mut paths = Vec::new();
    for boundary in 0..ends.len() - 1 {
        let from = if boundary == 0 { 0 } else { ends[boundary - 1] };
        for end in from..=ends[boundary + 1] {
            let mut ends = ends.clone();
            ends[boundary] = end;
            for devices in [[ON_GPU; 2], [ON_GPU, ON_CPU], [ON_CPU, ON_GPU], [ON_CPU; 2]] {
                let state = |stage: usize| {
                    let gpu = ends.iter().take_while(|end| **end <= stage).count();
                    let is_head = stage + 1 == stages;
                    2 * gpu.min(ends.len() - 1) + devices[usize::from(is_head)]
                };
                let path: Vec<usize> = (0..stages).map(state).collect();
                let mut states = path.iter().enumerate();
                if states.all(|(stage, state)| !chain.choices(stage, *state).is_empty()) {
                    paths.push(path);
                }
            }
        }
    }
    paths
}
