//! [`Placement`].

use powerinfer_artifact::plan::Device::{self, Cpu, Gpu};

/// Placement of a layer and of the output head.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Placement {
    /// Hot neurons, in quarters of all.
    pub(crate) quarters: usize,
    pub(crate) attention: Device,
    pub(crate) kv: Device,
    pub(crate) predictor: Device,
    pub(crate) head: Device,
}

/// Placements which have every part on the device and on the host.
pub(crate) const PLACEMENTS: [Placement; 6] = [
    // Neurons; attention, KV cache, predictor, head.
    placement(4, [Gpu, Gpu, Gpu, Gpu]),
    placement(2, [Gpu, Gpu, Gpu, Gpu]),
    placement(0, [Gpu, Gpu, Gpu, Cpu]),
    placement(4, [Gpu, Cpu, Gpu, Gpu]),
    placement(1, [Gpu, Gpu, Cpu, Gpu]),
    placement(3, [Cpu, Cpu, Cpu, Cpu]),
];

impl Placement {
    /// Returns this placement, but with attention and its KV cache on the host.
    pub(crate) fn with_attention_on_host(self) -> Self {
        Self {
            attention: Cpu,
            kv: Cpu,
            ..self
        }
    }
}

/// Everything on the device.
pub(crate) const ALL: Placement = PLACEMENTS[0];
/// Everything on the device but half of the neurons.
pub(crate) const HALF: Placement = PLACEMENTS[1];

const fn placement(quarters: usize, [attention, kv, predictor, head]: [Device; 4]) -> Placement {
    Placement {
        quarters,
        attention,
        kv,
        predictor,
        head,
    }
}
