//! Baselines: simple placements, evaluated by the same cost model, which a plan has to beat.

use powerinfer_artifact::plan::{Baseline, Device};

use crate::{
    Problem,
    account::{bytes_on, lines},
    cost::{self, Cost, Neurons},
    dense::{place_dense, reserve_bytes},
    greedy, impact,
    placement::{LayerPlacement, Placement},
};

/// Returns all baselines with their predicted times, the most common placements first. Without a GPU, or with several, it returns only
/// the placement on the CPU.
pub(crate) fn all(problem: &Problem) -> Vec<Baseline> {
    let timed = |name: &str, placement: &Placement, cost: Cost| Baseline {
        name: name.to_owned(),
        microseconds_per_token: 1e6 * cost.total,
        fits_ram: bytes_on(Device::Cpu, &lines(problem, placement)) <= problem.budget.ram_bytes,
    };
    let baseline =
        |name: &str, placement: &Placement| timed(name, placement, cost::total(problem, placement));
    let cold = baseline("all on the CPU", &Placement::cold(problem));
    if problem.gpu().is_none() || problem.budget.vram_split.len() > 1 {
        return vec![cold];
    }
    let (dense, left_bytes) = place_dense(problem);
    let mut baselines = Vec::new();
    if let Some(shared) = problem.shared_neurons {
        let [all, last] = experts_by_layer(problem, &dense, left_bytes, shared);
        baselines.push(baseline("all experts on the CPU", &all));
        baselines.push(baseline("experts of the last layers on the GPU", &last));
    }
    baselines.push(cold);
    let whole = whole_layers(problem);
    baselines.push(baseline("whole layers on the GPU, the last first", &whole));
    let random = random(problem, &dense, left_bytes);
    baselines.push(timed(
        "dense parts first, then neurons at random",
        &random.0,
        random.1,
    ));
    let greedy = hottest(problem, dense, left_bytes);
    baselines.push(baseline(
        "dense parts first, then the hottest neurons",
        &greedy,
    ));
    baselines
}

/// `dense` with the hottest neurons that fit into the `left_bytes` of the GPU.
fn hottest(problem: &Problem, dense: Placement, left_bytes: u64) -> Placement {
    let chain = impact::chain_around(problem, &dense, left_bytes);
    dense.with_hot(&greedy::hot_counts(&chain))
}

/// The placement that puts the dense parts, then the hottest neurons, on the GPU, with its time in seconds. `None` if the rest
/// exceeds the RAM budget, if parts are pinned (it might move them), or if there is no GPU or more than one.
pub(crate) fn fitting(problem: &Problem) -> Option<(Placement, f64)> {
    let layers = &mut problem.layers.iter();
    let is_pinned = problem.head_pin.is_some()
        || layers.any(|layer| layer.pins.attention.or(layer.pins.neurons).is_some());
    if problem.gpu().is_none() || problem.budget.vram_split.len() > 1 || is_pinned {
        return None;
    }
    let (dense, left_bytes) = place_dense(problem);
    let placement = hottest(problem, dense, left_bytes);
    let cpu_bytes = bytes_on(Device::Cpu, &lines(problem, &placement));
    let seconds = cost::total(problem, &placement).total;
    (cpu_bytes <= problem.budget.ram_bytes).then_some((placement, seconds))
}

/// The placement of llama.cpp's `-ngl` with as many layers as fit: whole layers from the last one on, then
/// the output head once all layers are on the GPU.
pub(crate) fn whole_layers(problem: &Problem) -> Placement {
    let mut placement = Placement::cold(problem);
    let mut left = problem
        .budget
        .vram_bytes
        .saturating_sub(reserve_bytes(problem));
    let layers = placement.layers.iter_mut().zip(&problem.layers);
    for (place, layer) in layers.rev() {
        let neurons = layer.frequencies.len();
        let bytes = layer.attention_bytes
            + layer.predictor_bytes
            + layer.kv_bytes
            + layer.neurons_bytes(neurons);
        let Some(rest) = left.checked_sub(bytes) else {
            return placement;
        };
        left = rest;
        *place = LayerPlacement {
            gpu: 0,
            attention: Device::Gpu,
            kv: Device::Gpu,
            predictor: Device::Gpu,
            hot_count: neurons,
        };
    }
    if problem.head_bytes <= left {
        placement.head = Device::Gpu;
    }
    placement
}

/// Returns two placements that extend `dense` within the `left` bytes of the GPU. The first adds the `shared` neurons of each layer, as
/// llama.cpp's `--cpu-moe` does; the second also adds all experts of the last layers that fit, as its `--n-cpu-moe` does.
fn experts_by_layer(
    problem: &Problem,
    dense: &Placement,
    mut left: u64,
    shared: usize,
) -> [Placement; 2] {
    let mut cold = dense.clone();
    for (place, layer) in cold.layers.iter_mut().zip(&problem.layers) {
        if let Some(rest) = left.checked_sub(layer.neurons_bytes(shared)) {
            (left, place.hot_count) = (rest, shared);
        }
    }
    let mut last = cold.clone();
    for (place, layer) in last.layers.iter_mut().zip(&problem.layers).rev() {
        let neurons = layer.frequencies.len();
        let more = layer.neurons_bytes(neurons) - layer.neurons_bytes(place.hot_count);
        let Some(rest) = left.checked_sub(more) else {
            break;
        };
        (left, place.hot_count) = (rest, neurons);
    }
    [cold, last]
}

/// Expected cost of `dense` with randomly chosen hot neurons, the same share of every layer.
fn random(problem: &Problem, dense: &Placement, left_bytes: u64) -> (Placement, Cost) {
    let layers = || problem.layers.iter();
    let all: u64 = layers()
        .map(|layer| layer.neurons_bytes(layer.frequencies.len()))
        .sum();
    let share = (left_bytes as f64 / all as f64).min(1.0);
    let mut placement = dense.clone();
    let mut sum = cost::head(problem, dense);
    for (index, layer) in layers().enumerate() {
        let neurons = layer.frequencies.len();
        let place = &mut placement.layers[index];
        // Rounded down to stay within the budget.
        place.hot_count = (share * neurons as f64) as usize;
        let all = Neurons::new(&layer.frequencies);
        let part = place.hot_count as f64 / neurons as f64;
        let [hot, cold] =
            [part, 1.0 - part].map(|part| Neurons::of_token(part * all.count, part * all.active));
        let whole = cost::layer(problem, dense, index);
        let without = cost::ffn(
            problem,
            &layer.mode,
            place.attention,
            Neurons::default(),
            all,
        );
        let with = cost::ffn(problem, &layer.mode, place.attention, hot, cold);
        sum = sum
            + Cost {
                total: whole.total - without.total + with.total,
                ..Cost::default()
            };
    }
    (placement, sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, place, samples};

    #[test]
    fn the_plan_is_never_slower_than_a_baseline() {
        let mut problem = samples::shaped(6, 640, samples::power_law);
        let reserve = reserve_bytes(&problem);
        for vram in [
            0,
            reserve,
            reserve + 100_000,
            reserve + 2_000_000,
            reserve + 15_000_000,
            1 << 40,
        ] {
            problem.budget.vram_bytes = vram;
            let (plan, _) = place(&problem, &Options::default()).unwrap();
            let time = plan.totals.microseconds_per_token;
            for baseline in all(&problem) {
                // Times in a plan are rounded to nanoseconds.
                assert!(
                    time <= baseline.microseconds_per_token + 1e-3,
                    "{vram}: {time} but {baseline:?}"
                );
            }
        }
    }

    /// Both memories together barely hold the model.
    #[test]
    fn the_plan_is_never_slower_than_a_baseline_if_both_memories_are_full() {
        let mut problem = samples::shaped(12, 2048, samples::power_law);
        let reserve = reserve_bytes(&problem);
        for (vram, spare) in [
            (3_000_000, 0),
            (3_000_000, 20_000),
            (40_000_000, 0),
            (40_000_000, 1_000_000),
        ] {
            problem.budget.vram_bytes = reserve + vram;
            problem.budget.ram_bytes = u64::MAX;
            let (dense, left) = place_dense(&problem);
            let hottest = hottest(&problem, dense, left);
            problem.budget.ram_bytes = spare + bytes_on(Device::Cpu, &lines(&problem, &hottest));
            let (plan, _) = place(&problem, &Options::default()).unwrap();
            let bytes = plan.totals.cpu_bytes;
            assert!(bytes <= problem.budget.ram_bytes);
            for baseline in all(&problem).iter().filter(|baseline| baseline.fits_ram) {
                assert!(
                    plan.totals.microseconds_per_token <= baseline.microseconds_per_token + 1e-3,
                    "{vram}, {spare}: {} but {baseline:?}",
                    plan.totals.microseconds_per_token
                );
            }
        }
    }

    #[test]
    fn experts_of_the_last_layers_follow_shared_ones() {
        let mut problem = samples::shaped(3, 100, samples::power_law);
        problem.shared_neurons = Some(20);
        let reserve = reserve_bytes(&problem);
        let vram = 4_000_000;
        problem.budget.vram_bytes = reserve + vram;
        let (dense, left) = place_dense(&problem);
        let bytes = |neurons| problem.layers[0].neurons_bytes(neurons);
        let hot = |left| {
            experts_by_layer(&problem, &dense, left, 20).map(|placement| {
                let layers = placement.layers.iter();
                layers.map(|layer| layer.hot_count).collect::<Vec<_>>()
            })
        };
        let all: Vec<usize> = vec![20; 3];
        assert!(left > 3 * bytes(100));
        assert_eq!(hot(3 * bytes(20)), [all.clone(), all.clone()]);
        assert_eq!(hot(2 * bytes(20)), [vec![20, 20, 0], vec![20, 20, 0]]);
        assert_eq!(
            hot(3 * bytes(20) + bytes(80)),
            [all.clone(), vec![20, 20, 100]]
        );
        assert_eq!(hot(left), [all, vec![100; 3]]);
        let names: Vec<String> = super::all(&problem)
            .into_iter()
            .map(|found| found.name)
            .collect();
        assert!(
            names.iter().any(|name| name == "all experts on the CPU"),
            "{names:?}"
        );
        let (plan, _) = place(&problem, &Options::default()).unwrap();
        for baseline in super::all(&problem) {
            assert!(plan.totals.microseconds_per_token <= baseline.microseconds_per_token + 1e-3);
        }
    }

    #[test]
    fn whole_layers_start_from_the_last_and_the_head_follows_all_layers() {
        let mut problem = samples::shaped(3, 10, samples::power_law);
        let layer = 80_000 + 10 * 6912;
        let reserve = reserve_bytes(&problem);
        for (vram, layers, head) in [
            (0, 0, Device::Cpu),
            (layer, 1, Device::Cpu),
            (3 * layer + 99_999, 3, Device::Cpu),
            (3 * layer + 100_000, 3, Device::Gpu),
        ] {
            problem.budget.vram_bytes = reserve + vram;
            let placement = whole_layers(&problem);
            let on_gpu: Vec<bool> = placement.layers.iter().map(|l| l.hot_count == 10).collect();
            assert_eq!(on_gpu.iter().filter(|on| **on).count(), layers);
            assert!(on_gpu.is_sorted(), "the last layers");
            assert_eq!(placement.head, head);
        }
    }
}
