//! Where the parts that every token needs go, before any neuron does.
//!
//! The GPU takes them in the order of the original's loader: attention and norms of all layers,
//! predictors, the head, the KV cache. What does not fit stays on the CPU and the next one is
//! tried; what is left is the neurons' budget. A layer's predictor and KV cache work on what its
//! attention just wrote, so they never take the GPU when it did not. So with a little more VRAM a
//! further dense part may fit, and leave less to neurons than before.

use powerinfer_artifact::plan::Device;

use crate::Problem;

/// Where each dense part is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DensePlaces {
    /// Attention and norms, per layer.
    pub(crate) attention: Vec<Device>,
    /// Predictor, per layer; the CPU where there is none.
    pub(crate) predictor: Vec<Device>,
    /// KV cache, per layer.
    pub(crate) kv: Vec<Device>,
    /// Output head.
    pub(crate) head: Device,
    /// VRAM that is left for neurons.
    pub(crate) left_bytes: u64,
}

impl DensePlaces {
    /// Whether any dense part is on the GPU.
    pub(crate) fn use_gpu(&self) -> bool {
        self.head == Device::Gpu || self.attention.contains(&Device::Gpu)
    }
}

/// What using the GPU costs before anything is placed on it: its context and scratch.
pub(crate) fn reserve_bytes(problem: &Problem) -> u64 {
    problem
        .gpu()
        .map_or(0, |gpu| gpu.context_bytes + problem.gpu_scratch_bytes)
}

/// Places the dense parts of a valid problem.
pub(crate) fn place_dense(problem: &Problem) -> DensePlaces {
    let layers = &problem.layers;
    let mut vram = Vram {
        left: problem.gpu().and_then(|_| {
            problem
                .budget
                .vram_bytes
                .checked_sub(reserve_bytes(problem))
        }),
    };
    let attention: Vec<Device> = layers
        .iter()
        .map(|layer| vram.take(layer.attention_bytes))
        .collect();
    let beside_attention = |bytes: fn(&crate::Layer) -> u64, vram: &mut Vram| -> Vec<Device> {
        layers
            .iter()
            .zip(&attention)
            .map(|(layer, &home)| match home {
                Device::Gpu => vram.take(bytes(layer)),
                Device::Cpu => Device::Cpu,
            })
            .collect()
    };
    let predictor = beside_attention(|layer| layer.predictor_bytes, &mut vram);
    let head = vram.take(problem.head_bytes);
    let kv = beside_attention(|layer| layer.kv_bytes, &mut vram);
    DensePlaces {
        attention,
        predictor,
        kv,
        head,
        left_bytes: vram.left.unwrap_or(0),
    }
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
            let places = place_dense(&problem);
            let per_layer = [places.attention, places.predictor, places.kv];
            (per_layer, places.head, places.left_bytes)
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
            let places = place_dense(&problem);
            assert!(!places.use_gpu());
            assert_eq!(places.left_bytes, 0);
        }
    }
}
