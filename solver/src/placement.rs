//! A placement: the device of every part of a model.

use powerinfer_artifact::plan::Device;

use crate::{CopiedBytes, Problem};

/// Devices of all parts of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Placement {
    /// The layers, in order.
    pub(crate) layers: Vec<LayerPlacement>,
    /// Device of the output head.
    pub(crate) head: Device,
    /// Index of the head's GPU, if it is on a GPU.
    pub(crate) head_gpu: usize,
}

/// Devices of the parts of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayerPlacement {
    /// Index of the GPU for the parts of the layer that are on a GPU.
    pub(crate) gpu: usize,
    /// Device of attention and norms, and of the hidden state.
    pub(crate) attention: Device,
    /// Device of the KV cache.
    pub(crate) kv: Device,
    /// Device of the predictor; the CPU if there is none.
    pub(crate) predictor: Device,
    /// Number of hot neurons: the first ones, on the GPU.
    pub(crate) hot_count: usize,
}

impl LayerPlacement {
    /// Everything on the CPU.
    pub(crate) const COLD: Self = Self {
        gpu: 0,
        attention: Device::Cpu,
        kv: Device::Cpu,
        predictor: Device::Cpu,
        hot_count: 0,
    };
}

impl Placement {
    /// Everything on the CPU.
    pub(crate) fn cold(problem: &Problem) -> Self {
        Self {
            layers: vec![LayerPlacement::COLD; problem.layers.len()],
            head: Device::Cpu,
            head_gpu: 0,
        }
    }

    /// Whether any part is on the GPU with this index.
    pub(crate) fn use_gpu(&self, gpu: usize) -> bool {
        let of_layers = self.layers.iter().any(|layer| {
            layer.gpu == gpu && (layer.attention == Device::Gpu || layer.hot_count > 0)
        });
        of_layers || (self.head == Device::Gpu && self.head_gpu == gpu)
    }

    /// Whether all layers are entirely on the GPU.
    pub(crate) fn is_on_gpu(&self, problem: &Problem) -> bool {
        let mut layers = problem.layers.iter().zip(&self.layers);
        layers.all(|(layer, place)| {
            let has_predictor = layer.predictor_bytes > 0;
            place.attention == Device::Gpu
                && place.kv == Device::Gpu
                && (place.predictor == Device::Gpu || !has_predictor)
                && place.hot_count == layer.frequencies.len()
        })
    }

    /// Bytes for copies of the parts that at least one layer does not have on the GPU.
    pub(crate) fn copied_bytes(&self, problem: &Problem) -> CopiedBytes {
        let mut lacking = CopiedBytes::default();
        let copied = problem.copied_bytes;
        for (layer, place) in problem.layers.iter().zip(&self.layers) {
            if place.attention == Device::Cpu {
                lacking.attention = copied.attention;
            }
            if place.predictor == Device::Cpu && layer.predictor_bytes > 0 {
                lacking.predictor = copied.predictor;
            }
            if place.kv == Device::Cpu {
                lacking.kv = copied.kv;
            }
            let is_multiplied = place.hot_count > 0 || copied.attention > 0;
            if place.attention == Device::Cpu && is_multiplied {
                lacking.routing += copied.routing / self.layers.len() as u64;
            }
        }
        lacking
    }

    /// Number of hot neurons of each layer.
    pub(crate) fn hot_counts(&self) -> Vec<usize> {
        self.layers.iter().map(|layer| layer.hot_count).collect()
    }

    /// The placement with these numbers of hot neurons.
    pub(crate) fn with_hot(mut self, hot_counts: &[usize]) -> Self {
        for (layer, hot_count) in self.layers.iter_mut().zip(hot_counts) {
            layer.hot_count = *hot_count;
        }
        self
    }
}
