//! Places the dense parts, which every token needs, before any neuron.
//!
//! The GPU takes them in the order of PowerInfer's loader: attention and norms of all layers, predictors,
//! the output head, the KV cache. A part that does not fit stays on the CPU and the next one is tried. The
//! remaining VRAM is the budget of the neurons. The predictor and the KV cache of a layer use the output of
//! its attention, so they are on the GPU only if the attention is.
//!
//! The neurons' budget does not grow monotonically: with a little more VRAM a further dense part may fit.

use powerinfer_artifact::plan::Device;

use crate::{
    Problem,
    placement::{LayerPlacement, Placement},
};

/// Bytes that a GPU needs before any part is placed on it: reserve and scratch.
pub(crate) fn reserve_bytes(problem: &Problem) -> u64 {
    problem.gpu().map_or(0, |_| {
        problem.gpu_reserve_bytes() + problem.gpu_scratch_bytes + problem.copied_bytes.total()
    })
}

/// Places the dense parts of a valid problem. Returns the placement and the bytes of VRAM left for neurons.
///
/// Several GPUs are filled as if they were one.
pub(crate) fn place_dense(problem: &Problem) -> (Placement, u64) {
    let layers = &problem.layers;
    let mut vram = Vram {
        left: problem.gpu().and_then(|_| {
            problem
                .budget
                .vram_bytes
                .checked_sub(reserve_bytes(problem))
        }),
    };
    let mut placement = Placement::cold(problem);
    for (place, layer) in placement.layers.iter_mut().zip(layers) {
        if layer.pins.attention != Some(Device::Cpu) {
            place.attention = vram.take(layer.attention_bytes);
        }
    }
    let is_on_gpu = |place: &LayerPlacement| place.attention == Device::Gpu;
    for (place, layer) in placement.layers.iter_mut().zip(layers) {
        if is_on_gpu(place) {
            place.predictor = vram.take(layer.predictor_bytes);
        }
    }
    if problem.head_pin != Some(Device::Cpu) {
        placement.head = vram.take(problem.head_bytes);
    }
    for (place, layer) in placement.layers.iter_mut().zip(layers) {
        if is_on_gpu(place) {
            place.kv = vram.take(layer.kv_bytes);
        }
    }
    (placement, vram.left.unwrap_or(0))
}

/// Remaining bytes of the GPU; `None` if the GPU is not used.
struct Vram {
    left: Option<u64>,
}

impl Vram {
    /// Places a part of `bytes` on the GPU if it fits, else on the CPU.
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
    fn dense_parts_are_placed_in_the_order_of_the_original_loader() {
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
            let (placement, left_bytes) = place_dense(&problem);
            let devices =
                |of: fn(&LayerPlacement) -> Device| placement.layers.iter().map(of).collect();
            let per_layer: [Vec<Device>; 3] = [
                devices(|layer| layer.attention),
                devices(|layer| layer.predictor),
                devices(|layer| layer.kv),
            ];
            (per_layer, placement.head, left_bytes)
        };
        let cpu = || vec![Cpu, Cpu];
        let first = || vec![Gpu, Cpu];
        assert_eq!(with(99), ([cpu(), cpu(), cpu()], Gpu, 49));
        assert_eq!(with(49), ([cpu(), cpu(), cpu()], Cpu, 49));
        // Neither the second attention nor the head fits; the other parts do.
        assert_eq!(with(120), ([first(), first(), first()], Cpu, 3));
        assert_eq!(with(280), ([vec![Gpu; 2], vec![Gpu; 2], first()], Gpu, 3));
    }

    #[test]
    fn a_budget_below_the_reserve_does_not_use_the_gpu() {
        let mut problem = samples::small();
        for vram in [0, 1, reserve_bytes(&problem) - 1] {
            problem.budget.vram_bytes = vram;
            let (placement, left_bytes) = place_dense(&problem);
            assert!(!placement.use_gpu(0));
            assert_eq!(left_bytes, 0);
        }
    }
}
