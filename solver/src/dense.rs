//! Where the parts that every token needs go, before any neuron does.
//!
//! The GPU takes them in the order of the original's loader: attention and norms of all layers,
//! predictors, the head, the KV cache. What does not fit stays on the CPU and the next one is
//! tried; what is left is the neurons' budget. A layer's predictor and KV cache work on what its
//! attention just wrote, so they never take the GPU when it did not. So with a little more VRAM a
//! further dense part may fit, and leave less to neurons than before.

use powerinfer_artifact::plan::Device;

use crate::{
    Problem,
    places::{LayerPlace, Places},
};

/// What using a GPU costs before anything is placed on it: its context and scratch.
pub(crate) fn reserve_bytes(problem: &Problem) -> u64 {
    problem
        .gpu()
        .map_or(0, |gpu| gpu.context_bytes + problem.gpu_scratch_bytes)
}

/// Places the dense parts of a valid problem; gives what VRAM is left for neurons.
///
/// With several GPUs, whose layers are ranges, all are filled as if they were one.
pub(crate) fn place_dense(problem: &Problem) -> (Places, u64) {
    let layers = &problem.layers;
    let mut vram = Vram {
        left: problem.gpu().and_then(|_| {
            problem
                .budget
                .vram_bytes
                .checked_sub(reserve_bytes(problem))
        }),
    };
    let mut places = Places::cold(problem);
    for (place, layer) in places.layers.iter_mut().zip(layers) {
        if layer.pins.attention != Some(Device::Cpu) {
            place.attention = vram.take(layer.attention_bytes);
        }
    }
    let here = |place: &LayerPlace| place.attention == Device::Gpu;
    for (place, layer) in places.layers.iter_mut().zip(layers) {
        if here(place) {
            place.predictor = vram.take(layer.predictor_bytes);
        }
    }
    if problem.head_pin != Some(Device::Cpu) {
        places.head = vram.take(problem.head_bytes);
    }
    for (place, layer) in places.layers.iter_mut().zip(layers) {
        if here(place) {
            place.kv = vram.take(layer.kv_bytes);
        }
    }
    (places, vram.left.unwrap_or(0))
}

/// What is left of the GPU's memory; `None` where the GPU is not used.
struct Vram {
    left: Option<u64>,
}

impl Vram {
    fn take(&mut self, bytes: u64) -> Device {
        match self.left.and_then(|left| left.checked_sub(bytes)) {
            Some(left) => {
                self.left = Some(left);
                Device::Gpu
            }
            None => Device::Cpu,
        }
    }
}

#[cfg(test)]
mod tests {
    use Device::{Cpu, Gpu};

    use super::*;
    use crate::samples;

    #[test]
    fn dense_parts_go_first_in_the_original_order() {
        let mut problem = samples::small();
        for layer in &mut problem.layers {
            layer.attention_bytes = 100;
            layer.predictor_bytes = 10;
            layer.kv_bytes = 7;
        }
        problem.head_bytes = 50;
        let reserve = reserve_bytes(&problem);
        let mut with = |vram: u64| {
            problem.budget.vram_bytes = reserve + vram;
            let (places, left_bytes) = place_dense(&problem);
            let devices = |of: fn(&LayerPlace) -> Device| places.layers.iter().map(of).collect();
            let per_layer: [Vec<Device>; 3] = [
                devices(|layer| layer.attention),
                devices(|layer| layer.predictor),
                devices(|layer| layer.kv),
            ];
            (per_layer, places.head, left_bytes)
        };
        let cpu = || vec![Cpu, Cpu];
        let first = || vec![Gpu, Cpu];
        assert_eq!(with(99), ([cpu(), cpu(), cpu()], Gpu, 49));
        assert_eq!(with(49), ([cpu(), cpu(), cpu()], Cpu, 49));
        // The second attention does not fit, and neither does the head; the others do.
        assert_eq!(with(120), ([first(), first(), first()], Cpu, 3));
        assert_eq!(with(280), ([vec![Gpu; 2], vec![Gpu; 2], first()], Gpu, 3));
    }

    #[test]
    fn a_budget_below_the_reserve_leaves_the_gpu_alone() {
        let mut problem = samples::small();
        for vram in [0, 1, reserve_bytes(&problem) - 1] {
            problem.budget.vram_bytes = vram;
            let (places, left_bytes) = place_dense(&problem);
            assert!(!places.use_gpu(0));
            assert_eq!(left_bytes, 0);
        }
    }
}
