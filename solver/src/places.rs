//! Where everything is: what a placement decides.

use powerinfer_artifact::plan::Device;

use crate::Problem;

/// Where every part of a model is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Places {
    /// The layers, in order.
    pub(crate) layers: Vec<LayerPlace>,
    /// Output head.
    pub(crate) head: Device,
    /// Which GPU it is on, if it is on one.
    pub(crate) head_gpu: usize,
}

/// Where the parts of one layer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayerPlace {
    /// Which GPU has whatever of the layer is on one.
    pub(crate) gpu: usize,
    /// Attention and norms.
    pub(crate) attention: Device,
    /// KV cache.
    pub(crate) kv: Device,
    /// Predictor; the CPU where there is none.
    pub(crate) predictor: Device,
    /// Neurons on the GPU, the hottest.
    pub(crate) hot_count: usize,
}

impl LayerPlace {
    /// Everything on the CPU.
    pub(crate) const COLD: Self = Self {
        gpu: 0,
        attention: Device::Cpu,
        kv: Device::Cpu,
        predictor: Device::Cpu,
        hot_count: 0,
    };
}

impl Places {
    /// Everything on the CPU.
    pub(crate) fn cold(problem: &Problem) -> Self {
        Self {
            layers: vec![LayerPlace::COLD; problem.layers.len()],
            head: Device::Cpu,
            head_gpu: 0,
        }
    }

    /// Whether any part is on this GPU.
    pub(crate) fn use_gpu(&self, gpu: usize) -> bool {
        let of_layers = self.layers.iter().any(|layer| {
            layer.gpu == gpu && (layer.attention == Device::Gpu || layer.hot_count > 0)
        });
        of_layers || (self.head == Device::Gpu && self.head_gpu == gpu)
    }

    /// Neurons on the GPU, layer by layer.
    pub(crate) fn hot_counts(&self) -> Vec<usize> {
        self.layers.iter().map(|layer| layer.hot_count).collect()
    }

    /// The same with these neurons on the GPU.
    pub(crate) fn with_hot(mut self, hot_counts: &[usize]) -> Self {
        for (layer, hot_count) in self.layers.iter_mut().zip(hot_counts) {
            layer.hot_count = *hot_count;
        }
        self
    }
}
