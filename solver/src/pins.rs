//! Placement of the parts that are pinned to a device.

use powerinfer_artifact::plan::Device;

use crate::{Problem, SolveError, account::too_small, dense::reserve_bytes, placement::Placement};

impl Placement {
    /// The placement with every part on the GPU that is pinned to it.
    pub(crate) fn with_pinned(mut self, problem: &Problem) -> Self {
        for (place, layer) in self.layers.iter_mut().zip(&problem.layers) {
            if layer.pins.attention == Some(Device::Gpu) {
                place.attention = Device::Gpu;
            }
            if layer.pins.neurons == Some(Device::Gpu) {
                place.hot_count = layer.frequencies.len();
            }
        }
        if problem.head_pin == Some(Device::Gpu) {
            self.head = Device::Gpu;
        }
        self
    }
}

/// The error for pins to the GPU that do not fit: `placement` has the dense parts and leaves `left_bytes`
/// of VRAM.
pub(crate) fn pinned_too_much(
    problem: &Problem,
    placement: &Placement,
    left_bytes: u64,
) -> Option<SolveError> {
    let layers = problem.layers.iter().zip(&placement.layers);
    let left_out = layers
        .clone()
        .filter(|(layer, place)| {
            layer.pins.attention == Some(Device::Gpu) && place.attention != Device::Gpu
        })
        .map(|(layer, _)| layer.attention_bytes)
        .sum::<u64>()
        + if problem.head_pin == Some(Device::Gpu) && placement.head != Device::Gpu {
            problem.head_bytes
        } else {
            0
        };
    let neurons: u64 = layers
        .filter(|(layer, _)| layer.pins.neurons == Some(Device::Gpu))
        .map(|(layer, _)| layer.neurons_bytes(layer.frequencies.len()))
        .sum();
    let missing = (left_out + neurons).saturating_sub(left_bytes);
    (missing > 0).then(|| {
        let needed = problem.budget.vram_bytes.max(reserve_bytes(problem)) + missing;
        let least = placement.clone().with_pinned(problem);
        too_small(problem, &least, Device::Gpu, needed)
    })
}
