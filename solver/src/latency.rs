//! The objective `latency` as a chain: minimise the predicted time of one token.
//!
//! ```text
//! min  Σ_l T_l + copies of the hidden state between devices
//! T_l = attention + KV + prediction + max(hot on the GPU, cold on the CPU), synchronisation included
//! ```
//!
//! A choice of a layer fixes the devices of its attention, KV cache and predictor, the execution mode of its
//! FFN, and the number of its hot groups. Only the memory limits and the device of the hidden state couple
//! the layers, so every layer becomes a list of all its choices with their exact times and bytes, and the
//! model a [`Chain`] of these lists.

use powerinfer_artifact::plan::Device;

use crate::{
    Candidate, Layer, Problem,
    chain::{Chain, Choice, ON_CPU, ON_GPU, Stage, State},
    cost::{self, Neurons},
    decomposition::Taken,
    dense::reserve_bytes,
    placement::{LayerPlacement, Placement},
};

/// The decisions of one choice of a layer, packed into [`Choice::tag`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LayerChoice {
    /// Index of the candidate.
    mode: usize,
    kv: Device,
    predictor: Device,
    /// Number of hot groups.
    groups: usize,
}

/// Bits of a tag for the number of hot groups.
const GROUP_BITS: u32 = 22;

impl LayerChoice {
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

/// Largest number of candidates of a layer.
pub(crate) const MAX_MODES: usize = 1 << (32 - GROUP_BITS - 2);
/// Number of groups of a layer that no longer fits a tag.
pub(crate) const MAX_GROUPS: usize = 1 << GROUP_BITS;

/// The chain of a valid problem whose layers have these candidates.
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
    Chain {
        stages,
        capacities,
        ram: problem.budget.ram_bytes,
        transfer: cost::crossing(problem, (Device::Cpu, 0), (Device::Gpu, 0)).total,
        peer_transfer: cost::crossing(problem, (Device::Gpu, 0), (Device::Gpu, 1)).total,
    }
}

/// Whether the budget of some GPU covers what its use takes before any part is placed on it; without that,
/// not even parts of 0 bytes can be on a GPU.
pub(crate) fn has_gpu(problem: &Problem) -> bool {
    let reserve = reserve_bytes(problem);
    let budgets = problem.budget.vram_per_gpu();
    problem.gpu().is_some() && budgets.iter().any(|vram| *vram >= reserve)
}

/// The choices of the output head.
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

/// The choices of a layer.
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
            let has_predictor = candidate.predictor_bytes > 0
                || candidate.mode.prediction != crate::ReadCost::default();
            for kv in devices(layer_device == Device::Gpu && layer.kv_bytes > 0) {
                for predictor in devices(layer_device == Device::Gpu && has_predictor) {
                    let place = LayerPlacement {
                        attention: layer_device,
                        kv: *kv,
                        predictor: *predictor,
                        ..LayerPlacement::COLD
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
                            tag: LayerChoice {
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

/// Devices of a part that may be on the GPU, or else is on the CPU.
fn devices(may_be_on_gpu: bool) -> &'static [Device] {
    if may_be_on_gpu {
        &[Device::Gpu, Device::Cpu]
    } else {
        &[Device::Cpu]
    }
}

fn hot_count(problem: &Problem, neurons: usize, groups: usize) -> usize {
    groups.saturating_mul(problem.group_size).min(neurons)
}

/// Numbers of hot groups that a layer may have, each with the time of its FFN, if the hidden state is on
/// `layer_device`.
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

/// The placement of a solution, and the index of the candidate of each layer.
pub(crate) fn placement(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    taken: &[Taken],
) -> (Placement, Vec<usize>) {
    let (head, layers) = taken.split_last().expect("a chain ends with the head");
    let device = |layer_device: usize| match layer_device {
        ON_CPU => Device::Cpu,
        _ => Device::Gpu,
    };
    let mut modes = Vec::with_capacity(layers.len());
    let mut layer_placements = Vec::with_capacity(layers.len());
    for (taken, candidates) in layers.iter().zip(candidates) {
        let choice = LayerChoice::unpack(taken.choice.tag);
        let state = State::from_parts(taken.state);
        let neurons = candidates[choice.mode].frequencies.len();
        modes.push(choice.mode);
        layer_placements.push(LayerPlacement {
            gpu: state.gpu,
            attention: device(state.device),
            kv: choice.kv,
            predictor: choice.predictor,
            hot_count: hot_count(problem, neurons, choice.groups),
        });
    }
    let head = State::from_parts(head.state);
    let placement = Placement {
        layers: layer_placements,
        head: device(head.device),
        head_gpu: head.gpu,
    };
    (placement, modes)
}

#[cfg(test)]
mod tests;
