//! Predicted time of one decoded token of a placed problem, by the [`CostModel`] of this engine. The KV cache
//! counts as full.

mod model;

use powerinfer_artifact::plan::Device;

pub use model::{
    Access, CPU_KERNELS, Cost, CostModel, Ffn, GPU_KERNELS, Link, Neurons, Rates, Throughput,
};

use crate::{
    Layer, LayerMode, Problem,
    placement::{LayerPlacement, Placement},
};

/// The cost model of a decoded token of `problem`.
pub(crate) fn model(problem: &Problem) -> CostModel {
    CostModel::decoding(&problem.hardware, problem.hidden_bytes)
}

/// Cost of one decoded token.
pub(crate) fn total(problem: &Problem, placement: &Placement) -> Cost {
    let layers = (0..problem.layers.len()).map(|index| layer(problem, placement, index));
    layers.fold(head(problem, placement), |sum, layer| sum + layer)
}

/// Cost of layer `index`, with the copy of the hidden state to its device.
pub(crate) fn layer(problem: &Problem, placement: &Placement, index: usize) -> Cost {
    layer_on(problem, problem, placement, index)
}

/// Cost of layer `index` of `problem` on the hardware of `machine`, which is another problem.
pub(crate) fn layer_on(
    machine: &Problem,
    problem: &Problem,
    placement: &Placement,
    index: usize,
) -> Cost {
    let (layer, place) = (&problem.layers[index], &placement.layers[index]);
    let before = match index {
        0 => (Device::Cpu, 0),
        _ => {
            let before = &placement.layers[index - 1];
            (before.attention, before.gpu)
        }
    };
    crossing(machine, before, (place.attention, place.gpu))
        + attention(machine, layer, place)
        + ffn_with_prediction(machine, &layer.mode, &layer.frequencies, place)
}

/// Cost of attention and KV cache, the same in every execution mode.
pub(crate) fn attention(problem: &Problem, layer: &Layer, place: &LayerPlacement) -> Cost {
    let (bytes, kv_bytes) = (layer.attention_read_bytes as f64, layer.kv_bytes as f64);
    model(problem).attention(place.attention, bytes, place.kv, kv_bytes)
}

/// Cost of the predictor and the FFN of a layer in execution mode `mode`.
pub(crate) fn ffn_with_prediction(
    problem: &Problem,
    mode: &LayerMode,
    frequencies: &[f64],
    place: &LayerPlacement,
) -> Cost {
    let (hot, cold) = frequencies.split_at(place.hot_count);
    let (hot, cold) = (Neurons::new(hot), Neurons::new(cold));
    prediction(problem, mode, place.attention, place.predictor)
        + ffn(problem, mode, place.attention, hot, cold)
}

/// Cost of prediction on `device`, for a layer whose hidden state is on `layer_device`.
pub(crate) fn prediction(
    problem: &Problem,
    mode: &LayerMode,
    layer_device: Device,
    device: Device,
) -> Cost {
    model(problem).prediction(mode, layer_device, device)
}

/// Cost of an FFN whose `hot` neurons are computed on the GPU in parallel with the `cold` ones on the CPU.
pub(crate) fn ffn(
    problem: &Problem,
    mode: &LayerMode,
    layer_device: Device,
    hot: Neurons,
    cold: Neurons,
) -> Cost {
    let ffn = Ffn {
        mode: *mode,
        device: layer_device,
        // Decoding has the same rates for matrices and rows.
        access: Access::Rows,
        syncs: 1,
        sync_bytes: 2.0 * problem.hidden_bytes as f64,
    };
    model(problem).ffn(&ffn, hot, cold)
}

/// Cost of the output head, with the copy of the hidden state to its device.
pub(crate) fn head(problem: &Problem, placement: &Placement) -> Cost {
    let last = placement.layers.last().expect("a valid problem has layers");
    let (before, here) = (
        (last.attention, last.gpu),
        (placement.head, placement.head_gpu),
    );
    crossing(problem, before, here) + head_alone(problem, placement.head)
}

/// Cost of the output head on `device`, with the work that is done once per token.
pub(crate) fn head_alone(problem: &Problem, device: Device) -> Cost {
    let (model, bytes) = (model(problem), problem.head_bytes as f64);
    model.head(device, bytes, bytes) + model.token()
}

/// Copies the hidden state from one device and GPU to another; free if both are the same.
pub(crate) fn crossing(problem: &Problem, from: (Device, usize), to: (Device, usize)) -> Cost {
    model(problem).crossing(from, to)
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::plan::Policy;

    use super::*;
    use crate::{NeuronShape, Prediction, ReadCost, samples};

    /// One layer, 1 GB/s on the CPU, 10 GB/s on the GPU, 1 µs per synchronisation, nothing else.
    fn problem(policy: Policy) -> (Problem, Placement) {
        let mut problem = samples::small();
        problem.layers.truncate(1);
        let neuron = NeuronShape {
            bytes: 12_000,
            matrices: 3,
        };
        let predicted = Prediction {
            work: ReadCost {
                bytes: 3_000.0,
                ..ReadCost::default()
            },
            predicted_per_active: 1.0,
            recall: 1.0,
        };
        problem.layers[0] = Layer {
            mode: match policy {
                Policy::Dense => LayerMode::dense(neuron),
                Policy::Exact => LayerMode::exact(neuron),
                _ => LayerMode::predicted(policy, neuron, predicted),
            },
            frequencies: vec![0.5, 0.25],
            neuron_bytes: 12_000,
            attention_bytes: 0,
            attention_read_bytes: 0,
            predictor_bytes: 3_000,
            kv_bytes: 0,
            pins: Default::default(),
        };
        problem.hidden_bytes = 0;
        problem.hardware.cpu.read_bandwidth_bytes_per_second = 1e9;
        problem.hardware.cpu.row_seconds = 0.0;
        problem.hardware.cpu.kernel_seconds = 0.0;
        let gpu = problem.hardware.gpu.as_mut().unwrap();
        gpu.read_bandwidth_bytes_per_second = 10e9;
        gpu.sync_seconds = 1e-6;
        gpu.kernel_launch_seconds = 0.0;
        gpu.pcie_latency_seconds = 0.0;
        let place = LayerPlacement {
            gpu: 0,
            attention: Device::Gpu,
            kv: Device::Gpu,
            predictor: Device::Gpu,
            hot_count: 0,
        };
        let placement = Placement {
            layers: vec![place],
            head: Device::Gpu,
            head_gpu: 0,
        };
        (problem, placement)
    }

    fn microseconds(policy: Policy, hot_count: usize) -> [f64; 4] {
        let (problem, placement) = problem(policy);
        let cost = layer(&problem, &placement.with_hot(&[hot_count]), 0);
        [cost.gpu, cost.cpu, cost.sync, cost.total].map(|seconds| (seconds * 1e9).round() / 1e3)
    }

    #[test]
    fn the_policy_sets_the_bytes_that_are_read() {
        assert_eq!(microseconds(Policy::Dense, 0), [0.0, 24.0, 1.0, 25.0]);
        assert_eq!(microseconds(Policy::Exact, 0), [0.0, 14.0, 1.0, 15.0]);
        assert_eq!(microseconds(Policy::Predicted, 0), [0.3, 9.0, 1.0, 10.3]);
    }

    #[test]
    fn both_devices_work_in_parallel_and_a_fully_hot_layer_needs_no_sync() {
        assert_eq!(microseconds(Policy::Dense, 1), [1.2, 12.0, 1.0, 13.0]);
        assert_eq!(microseconds(Policy::Dense, 2), [2.4, 0.0, 0.0, 2.4]);
    }

    #[test]
    fn attention_takes_the_time_of_the_bytes_it_reads() {
        let (mut problem, placement) = problem(Policy::Dense);
        let placement = placement.with_hot(&[2]);
        let mut time = |read: u64| {
            problem.layers[0].attention_bytes = 40_000;
            problem.layers[0].attention_read_bytes = read;
            layer(&problem, &placement, 0).gpu
        };
        assert!((time(40_000) - time(30_000) - 1e-6).abs() < 1e-12);
    }

    #[test]
    fn copying_the_hidden_state_to_another_device_costs_time() {
        let (mut problem, placement) = problem(Policy::Dense);
        let mut placement = placement.with_hot(&[2]);
        problem.hardware.gpu.as_mut().unwrap().pcie_latency_seconds = 5e-6;
        let all = total(&problem, &placement);
        assert!((all.sync - 5e-6).abs() < 1e-12, "into the GPU once");
        placement.head = Device::Cpu;
        let all = total(&problem, &placement);
        assert!((all.sync - 10e-6).abs() < 1e-12, "and out again");
    }
}
