//! Placement with given execution modes.

use powerinfer_artifact::plan::Plan;

use crate::{Candidate, Layer, Options, Problem, SolveError, SolveReport, decide};

/// Finds the best plan for `problem` within its budget, with the execution mode of each layer as given.
///
/// The result is deterministic unless the time limit ends the search.
///
/// # Errors
///
/// When the problem is invalid, when the RAM budget is too small, when the VRAM budget is too small for the
/// parts pinned to the GPU, or when the solver that `options` name is not built in. For a budget that is too
/// small the error names a sufficient one.
pub fn place(problem: &Problem, options: &Options) -> Result<(Plan, SolveReport), SolveError> {
    let only = |layer: &Layer| {
        vec![Candidate {
            mode: layer.mode,
            frequencies: layer.frequencies.clone(),
            predictor_bytes: layer.predictor_bytes,
            allowed: true,
        }]
    };
    let candidates: Vec<Vec<Candidate>> = problem.layers.iter().map(only).collect();
    let decision = decide(problem, &candidates, options)?;
    Ok((decision.plan, decision.report))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use powerinfer_artifact::plan::{COLD_NEURONS, Device, HOT_NEURONS, Objective};
    use proptest::prelude::*;

    use super::*;
    use crate::{Backend, dense::reserve_bytes, objective, samples};

    /// Options for the paper's objective, which places as many neurons on the GPU as fit.
    fn impact() -> Options {
        Options {
            objective: Objective::Impact,
            ..Options::default()
        }
    }

    fn placed(problem: &Problem) -> Plan {
        place(problem, &impact()).unwrap().0
    }

    fn with_vram(mut problem: Problem, vram_bytes: u64) -> Problem {
        problem.budget.vram_bytes = vram_bytes;
        problem
    }

    #[test]
    fn an_unlimited_budget_makes_every_neuron_hot() {
        let mut problem = samples::shaped(3, 200, samples::power_law);
        for sync in [0.0, 20e-6, 1.0] {
            problem.hardware.gpu.as_mut().unwrap().sync_seconds = sync;
            let plan = placed(&problem);
            assert!(
                plan.layers
                    .iter()
                    .all(|layer| layer.hot_count == 200 && layer.hot_share == 1.0)
            );
            assert!(
                plan.layers
                    .iter()
                    .all(|layer| layer.sync_microseconds == 0.0 || layer.layer == 0)
            );
            assert_eq!(plan.line(COLD_NEURONS), 0);
            assert_eq!((plan.totals.hot_share, plan.solver.gap), (1.0, 0.0));
        }
    }

    #[test]
    fn no_vram_puts_everything_on_the_cpu() {
        let problem = samples::shaped(3, 200, samples::power_law);
        let without_gpu = |vram| {
            let mut problem = with_vram(problem.clone(), vram);
            problem.hardware.gpu = None;
            problem
        };
        for problem in [
            with_vram(problem.clone(), 0),
            with_vram(problem.clone(), 1000),
            without_gpu(0),
        ] {
            let plan = placed(&problem);
            assert!(plan.lines.iter().all(|line| line.device == Device::Cpu));
            assert_eq!((plan.totals.gpu_bytes, plan.totals.hot_count), (0, 0));
            assert_eq!(
                (plan.head, plan.layers[0].attention),
                (Device::Cpu, Device::Cpu)
            );
            assert!(
                plan.layers
                    .iter()
                    .all(|layer| layer.gpu_microseconds == 0.0)
            );
            assert_eq!(
                plan.solver.objective.to_bits(),
                0f64.to_bits(),
                "0 and not −0"
            );
        }
    }

    #[test]
    fn the_same_problem_gives_the_same_bytes() {
        let problem = with_vram(samples::shaped(4, 1000, samples::power_law), 530 << 20);
        let json = || serde_json::to_string_pretty(&placed(&problem)).unwrap();
        assert_eq!(json(), json());
    }

    #[test]
    fn too_little_ram_names_the_line_and_a_budget_that_works() {
        let mut problem = samples::shaped(3, 640, samples::power_law);
        problem.hardware.gpu.as_mut().unwrap().sync_seconds = 0.0;
        for vram in [0, 512 << 20, (512 << 20) + 8_000_000] {
            let mut problem = with_vram(problem.clone(), vram);
            problem.budget.ram_bytes = 1_000_000;
            let error = place(&problem, &impact()).unwrap_err();
            let SolveError::TooSmall {
                device: Device::Cpu,
                line,
                needed,
                ..
            } = &error
            else {
                panic!("{error}");
            };
            assert_eq!(line, COLD_NEURONS);
            assert!(error.to_string().contains("M` is the least"), "{error}");
            problem.budget.ram_bytes = *needed;
            let plan = placed(&problem);
            assert_eq!(plan.totals.cpu_bytes, *needed);
            problem.budget.ram_bytes -= 1;
            assert!(place(&problem, &impact()).is_err());
            // Less than the embeddings.
            problem.budget.ram_bytes = 50_000;
            let error = place(&problem, &impact()).unwrap_err();
            assert!(matches!(&error, SolveError::TooSmall { needed: same, .. } if same == needed));
        }
    }

    #[test]
    fn a_tied_head_on_the_cpu_is_the_embeddings() {
        let mut problem = with_vram(samples::small(), 0);
        let apart = placed(&problem).totals.cpu_bytes;
        problem.tied_head = true;
        assert_eq!(
            placed(&problem).totals.cpu_bytes,
            apart - problem.head_bytes
        );
        let on_gpu = placed(&with_vram(problem, 24 << 30));
        assert_eq!(on_gpu.line("head"), 100_000);
    }

    #[test]
    fn more_hot_neurons_are_predicted_to_be_faster() {
        let problem = samples::shaped(4, 6400, samples::power_law);
        let time = |vram| {
            placed(&with_vram(problem.clone(), vram))
                .totals
                .microseconds_per_token
        };
        let reserve = reserve_bytes(&problem);
        let times = [0, reserve + 20_000_000, reserve + 100_000_000, 24 << 30].map(time);
        assert!(times.is_sorted_by(|a, b| a > b), "{times:?}");
    }

    #[test]
    fn a_7b_model_is_solved_to_optimality() {
        let mut problem = samples::shaped(32, 11008, samples::power_law);
        for layer in &mut problem.layers {
            layer.attention_bytes = 37_748_736;
            layer.kv_bytes = 33_554_432;
        }
        problem.budget.vram_bytes = 4 << 30;
        for sync in [0.0, 20e-6, 300e-6] {
            problem.hardware.gpu.as_mut().unwrap().sync_seconds = sync;
            let options = Options {
                backend: Backend::Microlp,
                ..impact()
            };
            let (plan, report) = place(&problem, &options).unwrap();
            assert_eq!(report.failure, None);
            assert_eq!(
                (plan.solver.backend.as_str(), plan.solver.gap),
                ("microlp", 0.0)
            );
            let (other, _) = place(&problem, &impact()).unwrap();
            assert!(
                (other.solver.objective - plan.solver.objective).abs()
                    < 1e-9 * plan.solver.objective
            );
            assert_eq!(report.group_count, 32 * 172);
            assert!(plan.totals.hot_count > 0 && plan.totals.hot_count < 32 * 11008);
            assert!(plan.layers.iter().all(|layer| layer.hot_count % 64 == 0));
        }
    }

    proptest! {
        #[test]
        fn every_plan_adds_up_and_keeps_its_budget(
            shape in (1usize..5, 1usize..300, 1usize..80),
            vram in 0u64..16_000_000,
            ram in 0u64..16_000_000,
            sync in prop_oneof![Just(0.0), 0.0..40e-6],
            context in 0u64..1_000_000,
        ) {
            let (layer_count, neuron_count, group_size) = shape;
            let mut problem = samples::shaped(layer_count, neuron_count, samples::power_law);
            problem.group_size = group_size;
            problem.budget.vram_bytes = vram;
            problem.budget.ram_bytes = ram;
            let gpu = problem.hardware.gpu.as_mut().unwrap();
            gpu.sync_seconds = sync;
            gpu.context_bytes = context;
            // Uneven groups can take the solver long in a debug build, and any plan suffices here.
            let options = Options { time_limit: Duration::from_millis(200), ..impact() };
            match place(&problem, &options) {
                Ok((plan, report)) => {
                    plan.validate().unwrap();
                    prop_assert!(plan.totals.gpu_bytes <= vram && plan.totals.cpu_bytes <= ram);
                    let hot: Vec<usize> = plan.layers.iter().map(|layer| layer.hot_count).collect();
                    prop_assert_eq!(plan.solver.objective, objective::evaluate(&problem, &hot));
                    prop_assert!(plan.solver.bound >= plan.solver.objective);
                    prop_assert!(report.gap >= 0.0 && report.gap <= 1.0);
                    let hot_bytes: u64 = hot.iter().map(|&count| count as u64 * 6912).sum();
                    prop_assert_eq!(plan.line(HOT_NEURONS), hot_bytes);
                    // Every byte of the model is somewhere, once.
                    let model = problem.embedding_bytes
                        + problem.head_bytes
                        + layer_count as u64 * (80_000 + 6912 * neuron_count as u64);
                    let overhead: u64 = ["scratch", "reserve"]
                        .iter()
                        .flat_map(|name| plan.lines.iter().filter(move |line| line.name == *name))
                        .map(|line| line.bytes)
                        .sum();
                    prop_assert_eq!(plan.totals.gpu_bytes + plan.totals.cpu_bytes, model + overhead);
                }
                Err(SolveError::TooSmall { needed, budget, .. }) => prop_assert!(needed > budget),
                Err(error) => prop_assert!(false, "{error}"),
            }
        }
    }

    #[test]
    fn latency_is_proven_optimal_at_the_shape_of_a_7b_model() {
        let mut problem = samples::shaped(32, 11008, samples::power_law);
        for layer in &mut problem.layers {
            layer.attention_bytes = 37_748_736;
            layer.attention_read_bytes = 37_748_736;
            layer.kv_bytes = 33_554_432;
        }
        for vram in [0, 1 << 30, 2 << 30, 3 << 30, 4 << 30, 24 << 30] {
            let problem = with_vram(problem.clone(), vram);
            let (plan, report) = place(&problem, &Options::default()).unwrap();
            assert_eq!(plan.objective, Objective::Latency);
            assert!(report.gap <= 1e-3, "{vram}: {}", report.gap);
            assert!((plan.solver.objective - plan.totals.microseconds_per_token).abs() < 1e-3);
            let (paper, _) = place(&problem, &impact()).unwrap();
            let [ours, theirs] = [&plan, &paper].map(|plan| plan.totals.microseconds_per_token);
            assert!(ours <= theirs, "{vram}: {ours} but {theirs}");
        }
    }

    #[test]
    fn layers_of_several_gpus_are_ranges_and_each_budget_is_kept() {
        let mut problem = samples::shaped(12, 2048, samples::power_law);
        let reserve = reserve_bytes(&problem);
        let time = |problem: &Problem| {
            let (plan, _) = place(problem, &Options::default()).unwrap();
            assert!(plan.layers.is_sorted_by_key(|layer| layer.gpu));
            for (gpu, budget) in problem.budget.vram_per_gpu().into_iter().enumerate() {
                let lines = plan.lines.iter();
                let here = lines.filter(|line| line.device == Device::Gpu && line.gpu == gpu);
                assert!(here.map(|line| line.bytes).sum::<u64>() <= budget);
            }
            (
                plan.totals.microseconds_per_token,
                plan.layers.iter().map(|l| l.gpu).max(),
            )
        };
        let mut at = |split: &[u64]| {
            let split: Vec<u64> = split.iter().map(|bytes| reserve + bytes).collect();
            problem.budget.vram_bytes = split.iter().sum();
            problem.budget.vram_split = if split.len() > 1 { split } else { Vec::new() };
            time(&problem)
        };
        let half = 60_000_000;
        let (one, _) = at(&[half]);
        let (two, last) = at(&[half, half]);
        let (large, _) = at(&[2 * half]);
        assert!(two < one, "{two} {one}");
        assert!(large <= two, "copies between GPUs cost time: {large} {two}");
        assert_eq!(last, Some(1));
    }

    #[test]
    fn pinned_parts_stay_on_their_device_and_pins_that_do_not_fit_are_errors() {
        let mut problem = samples::shaped(3, 640, samples::power_law);
        let reserve = reserve_bytes(&problem);
        problem.budget.vram_bytes = reserve + 2_000_000;
        for options in [Options::default(), impact()] {
            let mut pinned = problem.clone();
            pinned.head_pin = Some(Device::Cpu);
            pinned.layers[1].pins.neurons = Some(Device::Cpu);
            pinned.layers[2].pins.attention = Some(Device::Cpu);
            pinned.layers[0].pins.attention = Some(Device::Gpu);
            let (plan, _) = place(&pinned, &options).unwrap();
            assert_eq!(plan.head, Device::Cpu);
            assert_eq!(plan.layers[1].hot_count, 0);
            let attention: Vec<Device> = plan.layers.iter().map(|layer| layer.attention).collect();
            assert_eq!((attention[0], attention[2]), (Device::Gpu, Device::Cpu));
            // 640 neurons take 4.4 MB.
            pinned.layers[2].pins.neurons = Some(Device::Gpu);
            let error = place(&pinned, &options).unwrap_err();
            let SolveError::TooSmall {
                device: Device::Gpu,
                line,
                needed,
                ..
            } = &error
            else {
                panic!("{error}");
            };
            assert_eq!(line, HOT_NEURONS);
            pinned.budget.vram_bytes = *needed;
            let (plan, _) = place(&pinned, &options).unwrap();
            assert_eq!(plan.layers[2].hot_count, 640);
            pinned.budget.vram_bytes = 0;
            let error = place(&pinned, &options).unwrap_err();
            assert!(matches!(error, SolveError::PinnedToNoGpu { .. }), "{error}");
        }
    }
}
