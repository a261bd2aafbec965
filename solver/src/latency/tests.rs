//! Tests of the objective `latency` against exhaustive search and a general solver.

use powerinfer_artifact::plan::Policy;
use proptest::prelude::*;

use super::*;
use crate::{
    Backend, LayerMode, NeuronShape, Options, Prediction, ReadCost, SolveError,
    account::{bytes_on, lines},
    candidate::with_modes,
    decide, samples,
};

#[test]
fn a_choice_survives_packing() {
    for mode in [0, 1, MAX_MODES - 1] {
        for groups in [0, 1, MAX_GROUPS - 1] {
            for (kv, predictor) in [(Device::Cpu, Device::Gpu), (Device::Gpu, Device::Cpu)] {
                let choice = LayerChoice {
                    mode,
                    kv,
                    predictor,
                    groups,
                };
                assert_eq!(LayerChoice::unpack(choice.pack()), choice);
            }
        }
    }
}

/// The least time of any placement within the budget, with any candidates, by exhaustive search over
/// placements. Does not use the chain.
fn exhaustive(problem: &Problem, candidates: &[Vec<Candidate>]) -> Option<f64> {
    let mut best = None;
    let mut modes = vec![0; problem.layers.len()];
    let mut placement = Placement::cold(problem);
    every(
        problem,
        candidates,
        0,
        &mut modes,
        &mut placement,
        &mut |modes, placement| {
            let taken = with_modes(problem, candidates, modes);
            let account = lines(&taken, placement);
            let fits = [Device::Gpu, Device::Cpu]
                .into_iter()
                .all(|device| bytes_on(device, &account) <= problem.budget.bytes(device));
            if fits {
                let time = cost::total(&taken, placement).total;
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
    placement: &mut Placement,
    visit: &mut dyn FnMut(&[usize], &Placement),
) {
    if layer == problem.layers.len() {
        for head in [Device::Cpu, Device::Gpu] {
            placement.head = head;
            visit(modes, placement);
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
            let devices: &[Device] = match attention {
                Device::Cpu => &[Device::Cpu],
                Device::Gpu => &[Device::Cpu, Device::Gpu],
            };
            for kv in devices {
                for predictor in devices {
                    for groups in 0..=neurons.div_ceil(problem.group_size) {
                        placement.layers[layer] = LayerPlacement {
                            gpu: 0,
                            attention,
                            kv: *kv,
                            predictor: *predictor,
                            hot_count: hot_count(problem, neurons, groups),
                        };
                        every(problem, candidates, layer + 1, modes, placement, visit);
                    }
                }
            }
        }
    }
}

/// Problems small enough for exhaustive search, in which any part may be faster on either device.
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
                work: ReadCost {
                    bytes: 150.0,
                    scattered_rows: 2.0,
                    axpy_rows: 0.0,
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

fn check_optimum(
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
        check_optimum(&problem, &candidates, Backend::Decomposition)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn three_layers_equal_exhaustive_search((problem, candidates) in tiny(3, 1)) {
        check_optimum(&problem, &candidates, Backend::Decomposition)?;
    }

    #[test]
    fn a_general_solver_equals_exhaustive_search((problem, candidates) in tiny(2, 2)) {
        check_optimum(&problem, &candidates, Backend::Microlp)?;
        #[cfg(feature = "highs")]
        check_optimum(&problem, &candidates, Backend::Highs)?;
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
fn a_budget_below_the_reserve_does_not_use_the_gpu() {
    let mut problem = samples::shaped(2, 64, samples::power_law);
    for layer in &mut problem.layers {
        // Parts of 0 bytes would fit any memory.
        (layer.attention_bytes, layer.attention_read_bytes) = (0, 0);
        (layer.kv_bytes, layer.predictor_bytes) = (0, 0);
    }
    // They would be faster on the GPU.
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
fn decomposition_and_microlp_agree_on_models_of_several_layers() {
    for (layers, neurons, share) in [(4, 640, 3), (6, 1024, 5), (8, 512, 7), (3, 2048, 4)] {
        let mut problem = samples::shaped(layers, neurons, samples::power_law);
        let reserve = reserve_bytes(&problem);
        let all = (neurons * 6912 * layers) as u64;
        problem.budget.vram_bytes = reserve + all * share / 10;
        let time = |backend| {
            let (plan, report) = crate::place(&problem, &options(backend)).unwrap();
            assert_eq!(report.failure, None, "{backend}");
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
fn no_time_for_a_general_solver_leaves_the_known_plan_and_the_gap_of_the_relaxation() {
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
    if report.failure.is_some() {
        assert_eq!(plan.solver.backend, "decomposition");
        assert!(
            report.gap > 0.0,
            "the bound of the decomposition is not used"
        );
    }
}
