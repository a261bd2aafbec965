//! The predicted time of one decoded token, layer by layer: every part takes the bytes it reads
//! over the bandwidth of the device that holds them, and the two sides of a split FFN work at once.
//!
//! ```text
//! T = attention + KV + predictor + max(hot, cold + T_sync)        attention on the GPU
//! T = attention + KV + predictor + max(hot + T_sync, cold)        attention on the CPU
//! ```
//!
//! A side with no neurons takes no time and no synchronisation; the hidden state crosses the link once
//! more wherever the attention of one layer lives elsewhere than that of the one before. The KV
//! cache counts as full.

use std::ops::Add;

use powerinfer_artifact::plan::Device;

use crate::{
    Layer, LayerMode, Problem, Work,
    machine::Machine,
    places::{LayerPlace, Places},
};

/// Kernels that each part of a layer takes: a matrix each on the CPU, fused on a GPU.
fn kernels(device: Device, part: Part) -> f64 {
    match (part, device) {
        (Part::Attention, Device::Cpu) => 4.0,
        (Part::Ffn, Device::Cpu) | (Part::Attention, Device::Gpu) => 3.0,
        (Part::Ffn, Device::Gpu) | (Part::Predictor, _) => 2.0,
    }
}

/// Parts of a layer that are kernels.
#[derive(Debug, Clone, Copy)]
enum Part {
    Attention,
    Predictor,
    Ffn,
}

/// Predicted seconds of one layer, or of a sum of parts.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Cost {
    /// Work of the GPU.
    pub(crate) gpu: f64,
    /// Work of the CPU.
    pub(crate) cpu: f64,
    /// Synchronising.
    pub(crate) sync: f64,
    /// From start to end.
    pub(crate) total: f64,
}

impl Cost {
    /// Nobody works.
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

/// Some neurons of a layer: how many, and how many of them are active on average.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Neurons {
    pub(crate) count: f64,
    pub(crate) active: f64,
}

impl Neurons {
    /// Neurons that are active so often.
    pub(crate) fn of(frequencies: &[f64]) -> Self {
        Self {
            count: frequencies.len() as f64,
            // Plus 0, for an empty sum is −0.
            active: frequencies.iter().sum::<f64>() + 0.0,
        }
    }
}

/// Cost of a token.
pub(crate) fn total(problem: &Problem, places: &Places) -> Cost {
    let layers = (0..problem.layers.len()).map(|index| layer(problem, places, index));
    layers.fold(head(problem, places), |sum, layer| sum + layer)
}

/// Cost of layer `index`, with the way into it.
pub(crate) fn layer(problem: &Problem, places: &Places, index: usize) -> Cost {
    layer_on(problem, problem, places, index)
}

/// Cost of layer `index` of `problem` on the machine of another problem.
pub(crate) fn layer_on(
    machine: &Problem,
    problem: &Problem,
    places: &Places,
    index: usize,
) -> Cost {
    let (layer, place) = (&problem.layers[index], &places.layers[index]);
    let before = match index {
        0 => (Device::Cpu, 0),
        _ => {
            let before = &places.layers[index - 1];
            (before.attention, before.gpu)
        }
    };
    crossing(machine, before, (place.attention, place.gpu))
        + attention(machine, layer, place)
        + ffn_with_prediction(machine, &layer.mode, &layer.frequencies, place)
}

/// The part of a layer that is the same whichever way its FFN goes.
pub(crate) fn attention(problem: &Problem, layer: &Layer, place: &LayerPlace) -> Cost {
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

/// The part of a layer that depends on which way its FFN goes.
pub(crate) fn ffn_with_prediction(
    problem: &Problem,
    mode: &LayerMode,
    frequencies: &[f64],
    place: &LayerPlace,
) -> Cost {
    let (hot, cold) = frequencies.split_at(place.hot_count);
    let (hot, cold) = (Neurons::of(hot), Neurons::of(cold));
    prediction(problem, mode, place.attention, place.predictor)
        + ffn(problem, mode, place.attention, hot, cold)
}

/// What prediction takes on `device`, for a layer at home on `home`.
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

/// What these neurons take, the hot ones on the GPU and at the same time the cold ones on the CPU.
pub(crate) fn ffn(
    problem: &Problem,
    mode: &LayerMode,
    layer_device: Device,
    hot: Neurons,
    cold: Neurons,
) -> Cost {
    let hot = side(problem, mode, layer_device, Device::Gpu, hot);
    let cold = side(problem, mode, layer_device, Device::Cpu, cold);
    Cost {
        total: hot.total.max(cold.total),
        ..hot + cold
    }
}

/// What `neurons` take on `device`, for a layer at home on `home`.
pub(crate) fn side(
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

/// Cost of the head, with the way into it.
pub(crate) fn head(problem: &Problem, places: &Places) -> Cost {
    let last = places.layers.last().expect("a valid problem has layers");
    let (before, here) = ((last.attention, last.gpu), (places.head, places.head_gpu));
    crossing(problem, before, here) + head_alone(problem, places.head)
}

/// Cost of the head on `device`, and of what comes once a token.
pub(crate) fn head_alone(problem: &Problem, device: Device) -> Cost {
    let machine = Machine(&problem.hardware);
    machine.serial(device, problem.head_bytes as f64, 1.0) + machine.token()
}

/// Input to the other side and its share back.
fn sync(problem: &Problem) -> Cost {
    let seconds = problem.hardware.gpu.as_ref().map_or(0.0, |gpu| {
        gpu.sync_seconds + 2.0 * problem.hidden_bytes as f64 / gpu.pcie_bandwidth_bytes_per_second
    });
    Cost::of_waiting(seconds)
}

/// The hidden state moves from one device and GPU to another, or stays.
pub(crate) fn crossing(problem: &Problem, from: (Device, usize), to: (Device, usize)) -> Cost {
    let times = match (from.0, to.0) {
        (Device::Cpu, Device::Cpu) => 0.0,
        (Device::Gpu, Device::Gpu) if from.1 == to.1 => 0.0,
        // Cards for the home speak with one another through the CPU's memory.
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
    fn problem(policy: Policy) -> (Problem, Places) {
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
        let place = LayerPlace {
            gpu: 0,
            attention: Device::Gpu,
            kv: Device::Gpu,
            predictor: Device::Gpu,
            hot_count: 0,
        };
        let places = Places {
            layers: vec![place],
            head: Device::Gpu,
            head_gpu: 0,
        };
        (problem, places)
    }

    fn microseconds(policy: Policy, hot_count: usize) -> [f64; 4] {
        let (problem, places) = problem(policy);
        let cost = layer(&problem, &places.with_hot(&[hot_count]), 0);
        [cost.gpu, cost.cpu, cost.sync, cost.total].map(|seconds| (seconds * 1e9).round() / 1e3)
    }

    #[test]
    fn the_policy_sets_the_bytes_that_are_read() {
        assert_eq!(microseconds(Policy::Dense, 0), [0.0, 24.0, 1.0, 25.0]);
        assert_eq!(microseconds(Policy::Exact, 0), [0.0, 14.0, 1.0, 15.0]);
        assert_eq!(microseconds(Policy::Predicted, 0), [0.3, 9.0, 1.0, 10.3]);
    }

    #[test]
    fn both_sides_work_at_once_and_a_full_layer_hands_nothing_over() {
        assert_eq!(microseconds(Policy::Dense, 1), [1.2, 12.0, 1.0, 13.0]);
        assert_eq!(microseconds(Policy::Dense, 2), [2.4, 0.0, 0.0, 2.4]);
    }

    #[test]
    fn attention_takes_the_time_of_what_is_read_of_it() {
        let (mut problem, places) = problem(Policy::Dense);
        let places = places.with_hot(&[2]);
        let mut time = |read: u64| {
            problem.layers[0].attention_bytes = 40_000;
            problem.layers[0].attention_read_bytes = read;
            layer(&problem, &places, 0).gpu
        };
        assert!((time(40_000) - time(30_000) - 1e-6).abs() < 1e-12);
    }

    #[test]
    fn crossings_cost_where_the_hidden_state_changes_side() {
        let (mut problem, places) = problem(Policy::Dense);
        let mut places = places.with_hot(&[2]);
        problem.hardware.gpu.as_mut().unwrap().pcie_latency_seconds = 5e-6;
        let all = total(&problem, &places);
        assert!((all.sync - 5e-6).abs() < 1e-12, "into the GPU once");
        places.head = Device::Cpu;
        let all = total(&problem, &places);
        assert!((all.sync - 10e-6).abs() < 1e-12, "and out again");
    }
}
