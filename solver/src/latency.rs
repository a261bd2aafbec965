//! Our objective: the least time for a token, every part counted.
//!
//! ```text
//! min  Σ_l T_l + ways between homes
//! T_l = attention + KV + prediction + max(hot on the GPU, cold on the CPU), synchronisations included
//! ```
//!
//! A layer decides where its attention, its KV cache and its predictor are, which way its FFN goes,
//! and how many groups of its hottest neurons are on the GPU. Nothing but memory and the hidden
//! state's way from layer to layer holds these decisions together, so each layer becomes a list of
//! all it can be, with its exact time and bytes, and the model a [`Chain`] of such lists.

use powerinfer_artifact::plan::Device;

use crate::{
    Candidate, Layer, Problem,
    chain::{Chain, Choice, ON_CPU, ON_GPU, Stage, State},
    cost::{self, Neurons},
    decomposition::Taken,
    dense::reserve_bytes,
    places::{LayerPlace, Places},
};

/// A layer's choice in one number: which way, where KV and predictor are, how many groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct What {
    mode: usize,
    kv: Device,
    predictor: Device,
    groups: usize,
}

const GROUP_BITS: u32 = 22;

impl What {
    fn pack(self) -> u32 {
        let bit = |device: Device| u32::from(device == Device::Gpu);
        (self.mode as u32) << (GROUP_BITS + 2)
            | bit(self.kv) << (GROUP_BITS + 1)
            | bit(self.predictor) << GROUP_BITS
            | self.groups as u32
    }

    fn unpack(packed: u32) -> Self {
        let device = |bit: u32| match packed >> bit & 1 {
            0 => Device::Cpu,
            _ => Device::Gpu,
        };
        Self {
            mode: (packed >> (GROUP_BITS + 2)) as usize,
            kv: device(GROUP_BITS + 1),
            predictor: device(GROUP_BITS),
            groups: (packed & ((1 << GROUP_BITS) - 1)) as usize,
        }
    }
}

/// Ways that a layer can be told apart in.
pub(crate) const MAX_MODES: usize = 1 << (32 - GROUP_BITS - 2);
/// Groups that a layer can be told apart in.
pub(crate) const MAX_GROUPS: usize = 1 << GROUP_BITS;

/// The chain of a valid problem whose layers may go these ways.
pub(crate) fn chain(problem: &Problem, candidates: &[Vec<Candidate>]) -> Chain {
    let layers = problem.layers.iter().zip(candidates);
    let mut stages: Vec<Stage> = layers
        .map(|(layer, candidates)| stage(problem, layer, candidates))
        .collect();
    let mut head = head(problem);
    for choice in head.choices.iter_mut().flatten() {
        // Memory that every placement takes on the CPU.
        choice.cpu_bytes += problem.embedding_bytes + problem.cpu_scratch_bytes;
    }
    stages.push(head);
    let reserve = reserve_bytes(problem);
    let capacities = match problem.gpu() {
        Some(_) => problem
            .budget
            .vram_per_gpu()
            .into_iter()
            .map(|vram| vram.saturating_sub(reserve))
            .collect(),
        None => vec![0],
    };
    let cpu = (Device::Cpu, 0);
    Chain {
        stages,
        capacities,
        ram: problem.budget.ram_bytes,
        transfer: cost::crossing(problem, cpu, (Device::Gpu, 0)).total,
        peer_transfer: cost::crossing(problem, (Device::Gpu, 0), (Device::Gpu, 1)).total,
    }
}

/// Whether a GPU has room for what whoever uses it has to reserve: one that has not can hold nothing, not even
/// parts of no bytes.
fn has_gpu(problem: &Problem) -> bool {
    let reserve = reserve_bytes(problem);
    let budgets = problem.budget.vram_per_gpu();
    problem.gpu().is_some() && budgets.iter().any(|vram| *vram >= reserve)
}

fn head(problem: &Problem) -> Stage {
    let on = |device: Device| {
        let is_pinned_elsewhere = problem.head_pin.is_some_and(|pin| pin != device);
        if is_pinned_elsewhere || (device == Device::Gpu && !has_gpu(problem)) {
            return Vec::new();
        }
        let cpu_bytes = if problem.tied_head {
            0
        } else {
            problem.head_bytes
        };
        let (gpu_bytes, cpu_bytes) = match device {
            Device::Gpu => (problem.head_bytes, 0),
            Device::Cpu => (0, cpu_bytes),
        };
        vec![Choice {
            gpu_bytes,
            cpu_bytes,
            cost: cost::head_alone(problem, device).total,
            tag: 0,
        }]
    };
    Stage {
        choices: [on(Device::Cpu), on(Device::Gpu)],
    }
}

/// All that a layer can be.
fn stage(problem: &Problem, layer: &Layer, candidates: &[Candidate]) -> Stage {
    let has_gpu = has_gpu(problem);
    let mut stage = Stage::default();
    for layer_device in [Device::Cpu, Device::Gpu] {
        let is_pinned_elsewhere = layer.pins.attention.is_some_and(|pin| pin != layer_device);
        if is_pinned_elsewhere || (layer_device == Device::Gpu && !has_gpu) {
            continue;
        }
        let choices = &mut stage.choices[match layer_device {
            Device::Cpu => ON_CPU,
            Device::Gpu => ON_GPU,
        }];
        for (mode, candidate) in candidates.iter().enumerate() {
            if !candidate.allowed {
                continue;
            }
            let ffn = ffn(problem, layer, candidate, layer_device);
            let is_there = candidate.predictor_bytes > 0
                || candidate.mode.prediction != crate::Work::default();
            for kv in devices(layer_device == Device::Gpu && layer.kv_bytes > 0) {
                for predictor in devices(layer_device == Device::Gpu && is_there) {
                    let place = LayerPlace {
                        attention: layer_device,
                        kv: *kv,
                        predictor: *predictor,
                        ..LayerPlace::COLD
                    };
                    let dense = cost::attention(problem, layer, &place)
                        + cost::prediction(problem, &candidate.mode, layer_device, *predictor);
                    let parts = [
                        (layer_device, layer.attention_bytes),
                        (*kv, layer.kv_bytes),
                        (*predictor, candidate.predictor_bytes),
                    ];
                    let on = |device: Device| -> u64 {
                        let here = parts.iter().filter(|(place, _)| *place == device);
                        here.map(|(_, bytes)| bytes).sum()
                    };
                    let (on_gpu, on_cpu) = (on(Device::Gpu), on(Device::Cpu));
                    let neurons = candidate.frequencies.len();
                    choices.extend(ffn.iter().map(|&(groups, time)| {
                        let hot = hot_count(problem, neurons, groups);
                        Choice {
                            gpu_bytes: on_gpu + layer.neurons_bytes(hot),
                            cpu_bytes: on_cpu + layer.neurons_bytes(neurons - hot),
                            cost: dense.total + time,
                            tag: What {
                                mode,
                                kv: *kv,
                                predictor: *predictor,
                                groups,
                            }
                            .pack(),
                        }
                    }));
                }
            }
        }
    }
    stage
}

fn devices(both: bool) -> &'static [Device] {
    match both {
        true => &[Device::Gpu, Device::Cpu],
        false => &[Device::Cpu],
    }
}

fn hot_count(problem: &Problem, neurons: usize, groups: usize) -> usize {
    groups.saturating_mul(problem.group_size).min(neurons)
}

/// The time of the neurons of a layer at home on `home`, for every number of hot groups.
fn ffn(
    problem: &Problem,
    layer: &Layer,
    candidate: &Candidate,
    layer_device: Device,
) -> Vec<(usize, f64)> {
    let frequencies = &candidate.frequencies;
    let neurons = frequencies.len();
    let groups = neurons.div_ceil(problem.group_size);
    let all: f64 = frequencies.iter().sum();
    let possible = match (layer.pins.neurons, has_gpu(problem)) {
        (Some(Device::Cpu), _) | (None, false) => 0..=0,
        (Some(Device::Gpu), _) => groups..=groups,
        (None, true) => 0..=groups,
    };
    let mut times = Vec::with_capacity(groups + 1);
    let (mut counted, mut active) = (0, 0.0);
    for group in 0..=groups {
        let hot = hot_count(problem, neurons, group);
        for frequency in &frequencies[counted..hot] {
            active += frequency;
        }
        counted = hot;
        if !possible.contains(&group) {
            continue;
        }
        let hot_neurons = Neurons::of_token(hot as f64, active);
        let cold_neurons = Neurons::of_token((neurons - hot) as f64, (all - active).max(0.0));
        let cost = cost::ffn(
            problem,
            &candidate.mode,
            layer_device,
            hot_neurons,
            cold_neurons,
        );
        times.push((group, cost.total));
    }
    times
}

/// Where a solution has everything, and which way each layer goes in it.
pub(crate) fn places(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    taken: &[Taken],
) -> (Places, Vec<usize>) {
    let (head, layers) = taken.split_last().expect("a chain ends with the head");
    let device = |layer_device: usize| match layer_device {
        ON_CPU => Device::Cpu,
        _ => Device::Gpu,
    };
    let mut modes = Vec::with_capacity(layers.len());
    let mut places = Vec::with_capacity(layers.len());
    for (taken, candidates) in layers.iter().zip(candidates) {
        let what = What::unpack(taken.choice.tag);
        let state = State::of(taken.state);
        let neurons = candidates[what.mode].frequencies.len();
        modes.push(what.mode);
        places.push(LayerPlace {
            gpu: state.gpu,
            attention: device(state.device),
            kv: what.kv,
            predictor: what.predictor,
            hot_count: hot_count(problem, neurons, what.groups),
        });
    }
    let head = State::of(head.state);
    let places = Places {
        layers: places,
        head: device(head.device),
        head_gpu: head.gpu,
    };
    (places, modes)
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::plan::Policy;
    use proptest::prelude::*;

    use super::*;
    use crate::{
        Backend, LayerMode, NeuronShape, Options, Prediction, SolveError, Work,
        account::{bytes_on, lines},
        decide,
        decide::with_modes,
        samples,
    };

    #[test]
    fn a_choice_survives_its_number() {
        for mode in [0, 1, MAX_MODES - 1] {
            for groups in [0, 1, MAX_GROUPS - 1] {
                for (kv, predictor) in [(Device::Cpu, Device::Gpu), (Device::Gpu, Device::Cpu)] {
                    let what = What {
                        mode,
                        kv,
                        predictor,
                        groups,
                    };
                    assert_eq!(What::unpack(what.pack()), what);
                }
            }
        }
    }

    /// The least time of any placement in any ways that keeps the budget, found by trying them all;
    /// knows nothing of chains.
    fn exhaustive(problem: &Problem, candidates: &[Vec<Candidate>]) -> Option<f64> {
        let mut best = None;
        let mut modes = vec![0; problem.layers.len()];
        let mut places = Places::cold(problem);
        every(
            problem,
            candidates,
            0,
            &mut modes,
            &mut places,
            &mut |modes, places| {
                let taken = with_modes(problem, candidates, modes);
                let account = lines(&taken, places);
                let fits = [Device::Gpu, Device::Cpu]
                    .into_iter()
                    .all(|device| bytes_on(device, &account) <= problem.budget.bytes(device));
                if fits {
                    let time = cost::total(&taken, places).total;
                    best = Some(best.map_or(time, |best: f64| best.min(time)));
                }
            },
        );
        best
    }

    fn every(
        problem: &Problem,
        candidates: &[Vec<Candidate>],
        layer: usize,
        modes: &mut Vec<usize>,
        places: &mut Places,
        visit: &mut dyn FnMut(&[usize], &Places),
    ) {
        if layer == problem.layers.len() {
            for head in [Device::Cpu, Device::Gpu] {
                places.head = head;
                visit(modes, places);
            }
            return;
        }
        for mode in 0..candidates[layer].len() {
            if !candidates[layer][mode].allowed {
                continue;
            }
            modes[layer] = mode;
            let neurons = candidates[layer][mode].frequencies.len();
            for attention in [Device::Cpu, Device::Gpu] {
                let beside: &[Device] = match attention {
                    Device::Cpu => &[Device::Cpu],
                    Device::Gpu => &[Device::Cpu, Device::Gpu],
                };
                for kv in beside {
                    for predictor in beside {
                        for groups in 0..=neurons.div_ceil(problem.group_size) {
                            places.layers[layer] = LayerPlace {
                                gpu: 0,
                                attention,
                                kv: *kv,
                                predictor: *predictor,
                                hot_count: hot_count(problem, neurons, groups),
                            };
                            every(problem, candidates, layer + 1, modes, places, visit);
                        }
                    }
                }
            }
        }
    }

    /// Problems small enough to try everything, of which every part may be worth the GPU or not.
    fn tiny(layers: usize, groups: usize) -> impl Strategy<Value = (Problem, Vec<Vec<Candidate>>)> {
        let frequency = prop_oneof![Just(0.0), Just(1.0), 0.0..1.0];
        let layer = (
            proptest::collection::vec(frequency, 1..=2 * groups),
            proptest::collection::vec(any::<bool>(), 2),
            0u64..3,
            (0u64..2000, 0u64..500),
        );
        let layers = proptest::collection::vec(layer, 1..=layers);
        let machine = (
            1u32..30,
            prop_oneof![Just(0.0), 0.0..2e-6],
            0.0..1e-6,
            0u64..3000,
        );
        let budgets = (
            0u64..30_000,
            prop_oneof![2 => Just(1u64 << 40), 1 => 0u64..40_000],
        );
        (layers, machine, budgets, any::<bool>()).prop_map(|(layers, machine, budgets, tied)| {
            let mut problem = samples::small();
            let (faster, sync, launch, context) = machine;
            problem.group_size = 2;
            problem.tied_head = tied;
            problem.hidden_bytes = 100;
            problem.gpu_scratch_bytes = 200;
            problem.cpu_scratch_bytes = 300;
            problem.embedding_bytes = 1000;
            problem.head_bytes = 1500;
            (problem.budget.vram_bytes, problem.budget.ram_bytes) = budgets;
            problem.hardware.cpu.read_bandwidth_bytes_per_second = 1e9;
            problem.hardware.cpu.row_seconds = 0.0;
            problem.hardware.cpu.kernel_seconds = 2e-7;
            let gpu = problem.hardware.gpu.as_mut().unwrap();
            gpu.read_bandwidth_bytes_per_second = f64::from(faster) * 1e9;
            gpu.sync_seconds = sync;
            gpu.pcie_latency_seconds = sync / 2.0;
            gpu.kernel_launch_seconds = launch;
            gpu.context_bytes = context;
            let model = problem.layers[0].clone();
            let mut candidates = Vec::new();
            problem.layers = Vec::new();
            for (mut frequencies, allowed, neuron, (attention, kv)) in layers {
                frequencies.sort_by(|a: &f64, b: &f64| b.total_cmp(a));
                let shape = NeuronShape {
                    bytes: 300 * (neuron + 1),
                    matrices: 3,
                };
                let predicted = Prediction {
                    work: Work {
                        bytes: 150.0,
                        rows: 2.0,
                        sums: 0.0,
                    },
                    predicted_per_active: 1.25,
                    recall: 0.95,
                };
                let candidate = |mode: LayerMode, predictor_bytes, allowed| Candidate {
                    mode,
                    frequencies: frequencies.clone(),
                    predictor_bytes,
                    allowed,
                };
                candidates.push(vec![
                    candidate(LayerMode::exact(shape), 200, true),
                    candidate(LayerMode::dense(shape), 200, allowed[0]),
                    candidate(
                        LayerMode::predicted(Policy::Predicted, shape, predicted),
                        250,
                        allowed[1],
                    ),
                ]);
                problem.layers.push(Layer {
                    frequencies,
                    neuron_bytes: shape.bytes,
                    attention_bytes: attention,
                    attention_read_bytes: attention,
                    kv_bytes: kv,
                    ..model.clone()
                });
            }
            (problem, candidates)
        })
    }

    fn options(backend: Backend) -> Options {
        Options {
            backend,
            time_limit: std::time::Duration::from_secs(60),
            ..Options::default()
        }
    }

    fn is_best(
        problem: &Problem,
        candidates: &[Vec<Candidate>],
        backend: Backend,
    ) -> Result<(), TestCaseError> {
        let truth = exhaustive(problem, candidates);
        match (decide(problem, candidates, &options(backend)), truth) {
            (Ok(decision), Some(truth)) => {
                let (found, truth) = (decision.plan.solver.objective, 1e6 * truth);
                prop_assert!(
                    (found - truth).abs() <= 1e-6 * truth,
                    "{found} is not {truth}"
                );
                prop_assert!(decision.plan.solver.bound <= found);
                prop_assert!(
                    decision.plan.solver.gap <= 1e-6,
                    "{}",
                    decision.plan.solver.gap
                );
                prop_assert!(decision.report.relaxation_bound <= truth * (1.0 + 1e-9));
            }
            (
                Err(SolveError::TooSmall {
                    needed,
                    device: Device::Cpu,
                    ..
                }),
                None,
            ) => {
                let mut problem = problem.clone();
                problem.budget.ram_bytes = needed;
                prop_assert!(decide(&problem, candidates, &options(backend)).is_ok());
                problem.budget.ram_bytes -= 1;
                prop_assert!(decide(&problem, candidates, &options(backend)).is_err());
            }
            (found, truth) => prop_assert!(false, "{found:?} but {truth:?}"),
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn two_layers_equal_exhaustive_search((problem, candidates) in tiny(2, 2)) {
            is_best(&problem, &candidates, Backend::Decomposition)?;
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn three_layers_equal_exhaustive_search((problem, candidates) in tiny(3, 1)) {
            is_best(&problem, &candidates, Backend::Decomposition)?;
        }

        #[test]
        fn a_general_solver_equals_exhaustive_search((problem, candidates) in tiny(2, 2)) {
            is_best(&problem, &candidates, Backend::Microlp)?;
            #[cfg(feature = "highs")]
            is_best(&problem, &candidates, Backend::Highs)?;
        }

        #[test]
        fn more_vram_is_never_slower((problem, candidates) in tiny(3, 3), more in 0u64..20_000) {
            let mut larger = problem.clone();
            larger.budget.vram_bytes += more;
            let time = |problem: &Problem| decide(problem, &candidates, &Options::default());
            if let Ok(before) = time(&problem) {
                let after = time(&larger).unwrap().plan.solver.objective;
                prop_assert!(after <= before.plan.solver.objective * (1.0 + 1e-9));
            }
        }
    }

    #[test]
    fn a_gpu_without_room_for_its_reserve_holds_nothing() {
        let mut problem = samples::shaped(2, 64, samples::power_law);
        for layer in &mut problem.layers {
            // Parts that take no room would fit whatever is left.
            (layer.attention_bytes, layer.attention_read_bytes) = (0, 0);
            (layer.kv_bytes, layer.predictor_bytes) = (0, 0);
        }
        // And there they would be faster.
        problem.hardware.cpu.kernel_seconds = 1e-3;
        let gpu = problem.hardware.gpu.as_mut().unwrap();
        (gpu.sync_seconds, gpu.pcie_latency_seconds) = (0.0, 0.0);
        for vram in [1, reserve_bytes(&problem) - 1] {
            problem.budget.vram_bytes = vram;
            for backend in [Backend::Decomposition, Backend::Microlp] {
                let (plan, _) = crate::place(&problem, &options(backend)).unwrap();
                assert!(!plan.uses_gpu(), "{backend}, {vram} bytes");
            }
        }
    }

    #[test]
    fn both_solvers_agree_on_models_of_some_layers() {
        for (layers, neurons, share) in [(4, 640, 3), (6, 1024, 5), (8, 512, 7), (3, 2048, 4)] {
            let mut problem = samples::shaped(layers, neurons, samples::power_law);
            let reserve = reserve_bytes(&problem);
            let all = (neurons * 6912 * layers) as u64;
            problem.budget.vram_bytes = reserve + all * share / 10;
            let time = |backend| {
                let (plan, report) = crate::place(&problem, &options(backend)).unwrap();
                assert_eq!(report.trouble, None, "{backend}");
                plan.solver
            };
            let ours = time(Backend::Decomposition);
            let general = time(Backend::Microlp);
            assert_eq!(general.backend, "microlp");
            assert!((ours.objective - general.objective).abs() <= 1e-9 * ours.objective);
            assert!(ours.bound <= general.objective * (1.0 + 1e-9) && ours.gap <= 1e-4);
            assert_eq!(general.gap, 0.0);
        }
    }

    #[test]
    fn no_time_for_a_general_solver_leaves_the_best_plan_known_and_an_honest_gap() {
        let mut problem = samples::shaped(6, 1024, samples::power_law);
        problem.budget.vram_bytes = reserve_bytes(&problem) + 20_000_000;
        let hurried = Options {
            time_limit: std::time::Duration::ZERO,
            ..options(Backend::Microlp)
        };
        let (plan, report) = crate::place(&problem, &hurried).unwrap();
        plan.validate().unwrap();
        let (best, _) = crate::place(&problem, &options(Backend::Decomposition)).unwrap();
        assert_eq!(plan.solver.objective, best.solver.objective);
        assert!(plan.solver.bound <= best.solver.bound * (1.0 + 1e-12));
        if report.trouble.is_some() {
            assert_eq!(plan.solver.backend, "decomposition");
            assert!(report.gap > 0.0, "its proof was not asked for");
        }
    }
}
