//! From prices to solutions that fit: along given homes the memory is filled to its price, and what
//! is then left goes, step by step, to whoever gains most by a byte of it.

use crate::{
    chain::{Chain, ON_CPU, ON_GPU, State, Step},
    dual::{Hulls, Point, peak},
};

/// The best solution found along the states of `path` that fits the GPUs; `None` where none does.
///
/// Looks at the CPU's memory only in what is filled up last.
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
        let found = peak(0.0, capacity, &mut |price| {
            let taken: Vec<Step> = stages
                .iter()
                .map(|&stage| cheapest(chain, hulls, stage, path[stage], price))
                .collect();
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
    top_up(chain, &mut steps);
    Some(steps)
}

fn cheapest(chain: &Chain, hulls: &Hulls, stage: usize, state: usize, price: f64) -> Step {
    let choices = chain.choices(stage, state);
    let mut best = (f64::INFINITY, 0);
    for &index in hulls.choices(stage, state) {
        let cost = choices[index].cost + price * choices[index].gpu_bytes as f64;
        if cost < best.0 {
            best = (cost, index);
        }
    }
    Step {
        state,
        choice: best.1,
    }
}

/// Takes better choices of the same homes for as long as they fit, the best for its bytes first.
pub(crate) fn top_up(chain: &Chain, steps: &mut [Step]) {
    let used = chain.gpu_bytes(steps);
    let mut left: Vec<u64> = chain
        .capacities
        .iter()
        .zip(used)
        .map(|(capacity, used)| capacity.saturating_sub(used))
        .collect();
    let mut ram_left = chain.ram.saturating_sub(chain.cpu_bytes(steps));
    loop {
        let mut best: Option<(f64, usize, usize)> = None;
        for (stage, step) in steps.iter().enumerate() {
            let now = *chain.chosen(stage, *step);
            let room = left[State::of(step.state).gpu].saturating_add(now.gpu_bytes);
            for (index, choice) in chain.choices(stage, step.state).iter().enumerate() {
                let fits = choice.gpu_bytes <= room
                    && choice.cpu_bytes <= ram_left.saturating_add(now.cpu_bytes);
                let gain = now.cost - choice.cost;
                if !fits || gain <= 0.0 {
                    continue;
                }
                let extra = choice.gpu_bytes.saturating_sub(now.gpu_bytes).max(1);
                let worth = gain / extra as f64;
                if best.is_none_or(|(most, ..)| worth > most) {
                    best = Some((worth, stage, index));
                }
            }
        }
        let Some((_, stage, index)) = best else {
            return;
        };
        let now = *chain.chosen(stage, steps[stage]);
        steps[stage].choice = index;
        let next = *chain.chosen(stage, steps[stage]);
        let left = &mut left[State::of(steps[stage].state).gpu];
        *left = *left + now.gpu_bytes - next.gpu_bytes;
        ram_left = ram_left + now.cpu_bytes - next.cpu_bytes;
    }
}

/// Paths with a run of stages on the GPU at the front or at the back, for one GPU: where the stages
/// are alike, every other path is a worse one of these.
pub(crate) fn runs(chain: &Chain) -> Vec<Vec<usize>> {
    let (layers, gpu) = (chain.stages.len().saturating_sub(1), 0);
    let state = |home: usize| 2 * gpu + home;
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
