//! The predicted time of one decoded token, layer by layer: every part takes the bytes it reads
//! over the bandwidth of the device that holds them, and the two sides of a split FFN work at once.
//!
//! ```text
//! T = attention + KV + predictor + max(hot, cold + T_sync)        attention on the GPU
//! T = attention + KV + predictor + max(hot + T_sync, cold)        attention on the CPU
//! ```
//!
//! A side with no neurons takes no time and no hand-over; the hidden state crosses the link once
//! more wherever the attention of one layer lives elsewhere than that of the one before. The KV
//! cache counts as full.

use std::ops::{Add, Range};

use powerinfer_artifact::plan::Device;

use crate::{Layer, Problem, Way, Work, dense::DensePlaces, machine::Machine};

/// Kernels that each part of a layer takes.
const ATTENTION_KERNELS: f64 = 3.0;
const PREDICTOR_KERNELS: f64 = 2.0;
const FFN_KERNELS: f64 = 2.0;

/// Predicted seconds of one layer, or of a sum of parts.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Cost {
    /// Work of the GPU.
    pub(crate) gpu: f64,
    /// Work of the CPU.
    pub(crate) cpu: f64,
    /// Handing over.
    pub(crate) sync: f64,
    /// From start to end.
    pub(crate) total: f64,
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

/// Cost of layer `index` when its first `hot_count` neurons are on the GPU.
pub(crate) fn layer(
    problem: &Problem,
    places: &DensePlaces,
    index: usize,
    hot_count: usize,
) -> Cost {
    let machine = Machine(&problem.hardware);
    let layer = &problem.layers[index];
    let home = places.attention[index];
    let before = match index {
        0 => Device::Cpu,
        _ => places.attention[index - 1],
    };
    let mut cost = crossing(problem, before, home)
        + machine.serial(home, layer.attention_read_bytes as f64, ATTENTION_KERNELS)
        + machine.serial(places.kv[index], layer.kv_bytes as f64, 0.0);
    if layer.kv_bytes > 0 && places.kv[index] != home {
        cost = cost + hand_over(problem);
    }
    cost + ffn_with_foresight(problem, places, index, hot_count)
}

/// The part of it that depends on which way the FFN goes.
pub(crate) fn ffn_with_foresight(
    problem: &Problem,
    places: &DensePlaces,
    index: usize,
    hot_count: usize,
) -> Cost {
    let layer = &problem.layers[index];
    let home = places.attention[index];
    let mut cost = ffn(problem, layer, home, hot_count);
    if layer.way.foresight != Work::default() {
        let place = places.predictor[index];
        let machine = Machine(&problem.hardware);
        cost = cost + machine.work(place, layer.way.foresight, PREDICTOR_KERNELS);
        if place != home {
            cost = cost + hand_over(problem);
        }
    }
    cost
}

/// Cost of the head, after a last layer whose attention is on `before`.
pub(crate) fn head(problem: &Problem, places: &DensePlaces) -> Cost {
    let machine = Machine(&problem.hardware);
    let before = *places.attention.last().expect("a valid problem has layers");
    crossing(problem, before, places.head)
        + machine.serial(places.head, problem.head_bytes as f64, 1.0)
        + machine.token()
}

fn ffn(problem: &Problem, layer: &Layer, home: Device, hot_count: usize) -> Cost {
    let machine = Machine(&problem.hardware);
    let neuron_count = layer.frequencies.len();
    let side = |device, neurons: Range<usize>| {
        if neurons.is_empty() {
            return Cost::default();
        }
        let work = machine.work(device, expected_work(layer, neurons), FFN_KERNELS);
        if device == home {
            work
        } else {
            work + hand_over(problem)
        }
    };
    let hot = side(Device::Gpu, 0..hot_count);
    let cold = side(Device::Cpu, hot_count..neuron_count);
    Cost {
        total: hot.total.max(cold.total),
        ..hot + cold
    }
}

/// What of these neurons a token reads on average.
fn expected_work(layer: &Layer, neurons: Range<usize>) -> Work {
    let count = neurons.len() as f64;
    let active: f64 = layer.frequencies[neurons].iter().sum();
    let neurons_alone = Way {
        foresight: Work::default(),
        ..layer.way
    };
    neurons_alone.work(count, active)
}

/// Input to the other side and its share back.
fn hand_over(problem: &Problem) -> Cost {
    let seconds = problem.hardware.gpu.as_ref().map_or(0.0, |gpu| {
        gpu.hand_over_seconds
            + 2.0 * problem.hidden_bytes as f64 / gpu.pcie_bandwidth_bytes_per_second
    });
    Cost {
        sync: seconds,
        total: seconds,
        ..Cost::default()
    }
}

/// The hidden state moves from one device to the other, or stays.
fn crossing(problem: &Problem, from: Device, to: Device) -> Cost {
    let seconds = match &problem.hardware.gpu {
        Some(gpu) if from != to => {
            gpu.pcie_latency_seconds
                + problem.hidden_bytes as f64 / gpu.pcie_bandwidth_bytes_per_second
        }
        _ => 0.0,
    };
    Cost {
        sync: seconds,
        total: seconds,
        ..Cost::default()
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::plan::Policy;

    use super::*;
    use crate::{Foreseen, NeuronShape, samples};

    /// One layer, 1 GB/s on the CPU, 10 GB/s on the GPU, 1 µs per hand-over, nothing else.
    fn problem(policy: Policy) -> (Problem, DensePlaces) {
        let mut problem = samples::small();
        problem.layers.truncate(1);
        let neuron = NeuronShape {
            bytes: 12_000,
            matrices: 3,
        };
        let foreseen = Foreseen {
            work: Work {
                bytes: 3_000.0,
                ..Work::default()
            },
            predicted_per_active: 1.0,
            recall: 1.0,
        };
        problem.layers[0] = Layer {
            way: match policy {
                Policy::Dense => Way::dense(neuron),
                Policy::Exact => Way::exact(neuron),
                _ => Way::foreseen(policy, neuron, foreseen),
            },
            frequencies: vec![0.5, 0.25],
            neuron_bytes: 12_000,
            attention_bytes: 0,
            attention_read_bytes: 0,
            predictor_bytes: 3_000,
            kv_bytes: 0,
        };
        problem.hidden_bytes = 0;
        problem.hardware.cpu.read_bandwidth_bytes_per_second = 1e9;
        problem.hardware.cpu.row_seconds = 0.0;
        problem.hardware.cpu.kernel_seconds = 0.0;
        let gpu = problem.hardware.gpu.as_mut().unwrap();
        gpu.read_bandwidth_bytes_per_second = 10e9;
        gpu.hand_over_seconds = 1e-6;
        gpu.kernel_launch_seconds = 0.0;
        gpu.pcie_latency_seconds = 0.0;
        let places = DensePlaces {
            attention: vec![Device::Gpu],
            predictor: vec![Device::Gpu],
            kv: vec![Device::Gpu],
            head: Device::Gpu,
            left_bytes: 0,
        };
        (problem, places)
    }

    fn microseconds(policy: Policy, hot_count: usize) -> [f64; 4] {
        let (problem, places) = problem(policy);
        let cost = layer(&problem, &places, 0, hot_count);
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
        let mut time = |read: u64| {
            problem.layers[0].attention_bytes = 40_000;
            problem.layers[0].attention_read_bytes = read;
            layer(&problem, &places, 0, 2).gpu
        };
        assert!((time(40_000) - time(30_000) - 1e-6).abs() < 1e-12);
    }

    #[test]
    fn crossings_cost_where_the_hidden_state_changes_side() {
        let (mut problem, mut places) = problem(Policy::Dense);
        problem.hardware.gpu.as_mut().unwrap().pcie_latency_seconds = 5e-6;
        let all = layer(&problem, &places, 0, 2) + head(&problem, &places);
        assert!((all.sync - 5e-6).abs() < 1e-12, "into the GPU once");
        places.head = Device::Cpu;
        let all = layer(&problem, &places, 0, 2) + head(&problem, &places);
        assert!((all.sync - 10e-6).abs() < 1e-12, "and out again");
    }
}
