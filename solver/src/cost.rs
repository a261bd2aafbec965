//! The cost model: the predicted time of one decoded token, layer by layer. A part takes the bytes
//! it reads over the read bandwidth of the device that holds them; the hot and the cold neurons of a
//! split FFN are computed in parallel.
//!
//! ```text
//! T = attention + KV + predictor + max(hot, cold + T_sync)        attention on the GPU
//! T = attention + KV + predictor + max(hot + T_sync, cold)        attention on the CPU
//! ```
//!
//! A device without neurons of the layer takes no time and no synchronisation. The hidden state is
//! copied between the devices wherever the attention of two consecutive layers is on different
//! devices. The KV cache counts as full.

use std::ops::Add;

use powerinfer_artifact::plan::Device;

use crate::{
    Layer, LayerMode, Problem, Work,
    machine::Machine,
    placement::{LayerPlacement, Placement},
};

/// Number of kernels of a part of a layer: one per matrix on the CPU, fused on the GPU.
fn kernels(device: Device, part: Part) -> f64 {
    match (part, device) {
        (Part::Attention, Device::Cpu) => 4.0,
        (Part::Ffn, Device::Cpu) | (Part::Attention, Device::Gpu) => 3.0,
        (Part::Ffn, Device::Gpu) | (Part::Predictor, _) => 2.0,
    }
}

/// Parts of a layer that are run as kernels.
#[derive(Debug, Clone, Copy)]
enum Part {
    Attention,
    Predictor,
    Ffn,
}

/// Predicted time of a part of a token, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Cost {
    /// Time during which the GPU works.
    pub(crate) gpu: f64,
    /// Time during which the CPU works.
    pub(crate) cpu: f64,
    /// Host–device synchronisation and copies of the hidden state.
    pub(crate) sync: f64,
    /// Wall-clock time: less than the sum where both devices work in parallel.
    pub(crate) total: f64,
}

impl Cost {
    /// Time in which neither device computes.
    fn of_waiting(seconds: f64) -> Self {
        Self {
            sync: seconds,
            total: seconds,
            ..Self::default()
        }
    }
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            gpu: self.gpu + other.gpu,
            cpu: self.cpu + other.cpu,
            sync: self.sync + other.sync,
            total: self.total + other.total,
        }
    }
}

/// A set of neurons of a layer: its size and the mean number of active neurons per token.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Neurons {
    pub(crate) count: f64,
    pub(crate) active: f64,
}

impl Neurons {
    /// The set of neurons with these activation frequencies.
    pub(crate) fn of(frequencies: &[f64]) -> Self {
        Self {
            count: frequencies.len() as f64,
            // Plus 0, for an empty sum is −0.
            active: frequencies.iter().sum::<f64>() + 0.0,
        }
    }
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
    let machine = Machine(&problem.hardware);
    let layer_device = place.attention;
    let mut cost = machine.serial(
        layer_device,
        layer.attention_read_bytes as f64,
        kernels(layer_device, Part::Attention),
    ) + machine.serial(place.kv, layer.kv_bytes as f64, 0.0)
        + machine.layer(layer_device);
    if layer.kv_bytes > 0 && place.kv != layer_device {
        cost = cost + sync(problem);
    }
    cost
}

/// Cost of the predictor and the FFN of a layer in execution mode `mode`.
pub(crate) fn ffn_with_prediction(
    problem: &Problem,
    mode: &LayerMode,
    frequencies: &[f64],
    place: &LayerPlacement,
) -> Cost {
    let (hot, cold) = frequencies.split_at(place.hot_count);
    let (hot, cold) = (Neurons::of(hot), Neurons::of(cold));
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
    if mode.prediction == Work::default() {
        return Cost::default();
    }
    let cost =
        Machine(&problem.hardware).work(device, mode.prediction, kernels(device, Part::Predictor));
    match device == layer_device {
        true => cost,
        false => cost + sync(problem),
    }
}

/// Cost of an FFN whose `hot` neurons are computed on the GPU in parallel with the `cold` ones on the CPU.
pub(crate) fn ffn(
    problem: &Problem,
    mode: &LayerMode,
    layer_device: Device,
    hot: Neurons,
    cold: Neurons,
) -> Cost {
    let hot = ffn_on(problem, mode, layer_device, Device::Gpu, hot);
    let cold = ffn_on(problem, mode, layer_device, Device::Cpu, cold);
    Cost {
        total: hot.total.max(cold.total),
        ..hot + cold
    }
}

/// Cost of `neurons` on `device`, for a layer whose hidden state is on `layer_device`.
pub(crate) fn ffn_on(
    problem: &Problem,
    mode: &LayerMode,
    layer_device: Device,
    device: Device,
    neurons: Neurons,
) -> Cost {
    if neurons.count == 0.0 {
        return Cost::default();
    }
    let alone = LayerMode {
        prediction: Work::default(),
        ..*mode
    };
    let work = alone.work(neurons.count, neurons.active);
    let cost = Machine(&problem.hardware).work(device, work, kernels(device, Part::Ffn));
    match device == layer_device {
        true => cost,
        false => cost + sync(problem),
    }
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
    let machine = Machine(&problem.hardware);
    machine.serial(device, problem.head_bytes as f64, 1.0) + machine.token()
}

/// Copies the input of an FFN to the other device and its partial sum back.
fn sync(problem: &Problem) -> Cost {
    let seconds = problem.hardware.gpu.as_ref().map_or(0.0, |gpu| {
        gpu.sync_seconds + 2.0 * problem.hidden_bytes as f64 / gpu.pcie_bandwidth_bytes_per_second
    });
    Cost::of_waiting(seconds)
}

/// Copies the hidden state from one device and GPU to another; free where both are the same.
pub(crate) fn crossing(problem: &Problem, from: (Device, usize), to: (Device, usize)) -> Cost {
    let times = match (from.0, to.0) {
        (Device::Cpu, Device::Cpu) => 0.0,
        (Device::Gpu, Device::Gpu) if from.1 == to.1 => 0.0,
        // Consumer GPUs copy to one another through host memory.
        (Device::Gpu, Device::Gpu) => 2.0,
        _ => 1.0,
    };
    let seconds = match &problem.hardware.gpu {
        Some(gpu) => {
            gpu.pcie_latency_seconds
                + problem.hidden_bytes as f64 / gpu.pcie_bandwidth_bytes_per_second
        }
        None => 0.0,
    };
    Cost::of_waiting(times * seconds)
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::plan::Policy;

    use super::*;
    use crate::{NeuronShape, Prediction, samples};

    /// One layer, 1 GB/s on the CPU, 10 GB/s on the GPU, 1 µs per synchronisation, nothing else.
    fn problem(policy: Policy) -> (Problem, Placement) {
        let mut problem = samples::small();
        problem.layers.truncate(1);
        let neuron = NeuronShape {
            bytes: 12_000,
            matrices: 3,
        };
        let predicted = Prediction {
            work: Work {
                bytes: 3_000.0,
                ..Work::default()
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
