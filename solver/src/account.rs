//! The account: every use of memory on both devices, line by line.

use powerinfer_artifact::plan::{BudgetLine, COLD_NEURONS, Device, HOT_NEURONS};

use crate::{Layer, Problem, SolveError, dense::DensePlaces};

/// Every use of memory on both devices; the GPU's context and scratch only where it is used.
pub(crate) fn lines(
    problem: &Problem,
    places: &DensePlaces,
    hot_counts: &[usize],
) -> Vec<BudgetLine> {
    let layers = || problem.layers.iter().zip(hot_counts);
    let hot = layers().map(|(layer, &hot)| layer.neurons_bytes(hot)).sum();
    let cold = layers()
        .map(|(layer, &hot)| layer.neurons_bytes(layer.frequencies.len() - hot))
        .sum();
    let dense = |homes: &[Device], device: Device, bytes: fn(&Layer) -> u64| -> u64 {
        let here = problem.layers.iter().zip(homes);
        here.filter(|(_, home)| **home == device)
            .map(|(layer, _)| bytes(layer))
            .sum()
    };
    let mut lines = Vec::new();
    for device in [Device::Gpu, Device::Cpu] {
        let mut line = |name: &str, bytes: u64| {
            if bytes > 0 {
                lines.push(BudgetLine {
                    name: name.to_owned(),
                    device,
                    bytes,
                });
            }
        };
        line(
            "attention",
            dense(&places.attention, device, |layer| layer.attention_bytes),
        );
        line(
            "predictors",
            dense(&places.predictor, device, |layer| layer.predictor_bytes),
        );
        if places.head == device && !(device == Device::Cpu && problem.tied_head) {
            line("head", problem.head_bytes);
        }
        line(
            "KV cache",
            dense(&places.kv, device, |layer| layer.kv_bytes),
        );
        match device {
            Device::Gpu => {
                line(HOT_NEURONS, hot);
                if hot > 0 || places.use_gpu() {
                    line("scratch", problem.gpu_scratch_bytes);
                    line(
                        "CUDA context and reserve",
                        problem.gpu().map_or(0, |gpu| gpu.context_bytes),
                    );
                }
            }
            Device::Cpu => {
                line("embeddings", problem.embedding_bytes);
                line("scratch", problem.cpu_scratch_bytes);
                line(COLD_NEURONS, cold);
            }
        }
    }
    lines
}

/// Bytes of these lines on `device`.
pub(crate) fn bytes_on(device: Device, lines: &[BudgetLine]) -> u64 {
    let here = lines.iter().filter(|line| line.device == device);
    here.map(|line| line.bytes).sum()
}

/// The error for a RAM budget below `needed`: names the first line that does not fit.
pub(crate) fn too_small(
    problem: &Problem,
    places: &DensePlaces,
    most_hot_bytes: u64,
    needed: u64,
) -> SolveError {
    let budget = problem.budget.ram_bytes;
    let all_cold = vec![0; problem.layers.len()];
    let mut used = 0;
    for mut line in lines(problem, places, &all_cold) {
        if line.device == Device::Gpu {
            continue;
        }
        if line.name == COLD_NEURONS {
            line.bytes -= most_hot_bytes;
        }
        used += line.bytes;
        if used > budget {
            return SolveError::TooSmall {
                device: Device::Cpu,
                budget,
                line: line.name,
                line_bytes: line.bytes,
                needed,
            };
        }
    }
    unreachable!("the CPU's lines add up to more than its budget")
}
