//! The entry of one layer: where its parts are, and what they take.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Device, InputThresholds, Policy, Threshold};

/// One layer: its first `hot_count` neurons, hottest first, are the GPU's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerPlan {
    /// Index of the layer.
    pub layer: usize,
    /// Which neurons are computed.
    pub policy: Policy,
    /// Why that policy, for people.
    #[serde(default)]
    pub reason: String,
    /// What [`Policy::Threshold`] compares with what, wherever it was calibrated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threshold: Option<Threshold>,
    /// Which inputs of its projections are read; all where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_thresholds: Option<InputThresholds>,
    /// Neurons of the layer.
    pub neuron_count: usize,
    /// Neurons on the GPU.
    pub hot_count: usize,
    /// Share of the layer's activations that they carry.
    pub hot_share: f64,
    /// Bytes of one neuron: its rows of gate and up and its column of down, packed.
    pub neuron_bytes: u64,
    /// Which GPU has whatever of the layer is on one, where there are several.
    #[serde(default, skip_serializing_if = "super::is_first")]
    pub gpu: usize,
    /// Where the attention weights and norms live.
    pub attention: Device,
    /// Where the KV cache lives.
    pub kv: Device,
    /// Where the predictor lives; `None` where the layer has none.
    pub predictor: Option<Device>,
    /// Bytes of the layer on the GPU, all parts together.
    pub gpu_bytes: u64,
    /// Bytes of the layer on the CPU, all parts together.
    pub cpu_bytes: u64,
    /// Predicted work of the GPU for one token.
    pub gpu_microseconds: f64,
    /// Predicted work of the CPU for one token.
    pub cpu_microseconds: f64,
    /// Predicted cost of handing work between them.
    pub sync_microseconds: f64,
    /// Predicted time of the layer: less than the sum where both sides work at once.
    pub microseconds: f64,
    /// What most of that time waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<Limit>,
}

impl LayerPlan {
    /// What the layer uses of `device`.
    pub fn bytes(&self, device: Device) -> u64 {
        match device {
            Device::Gpu => self.gpu_bytes,
            Device::Cpu => self.cpu_bytes,
        }
    }
}

/// What the time of a layer waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// The GPU reading its weights and cache.
    GpuMemory,
    /// The CPU reading its weights and cache.
    CpuMemory,
    /// Handing work from one side to the other.
    SyncCost,
    /// What starting kernels costs, whatever they read.
    Kernels,
}

impl fmt::Display for Limit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::GpuMemory => "GPU memory",
            Self::CpuMemory => "CPU memory",
            Self::SyncCost => "synchronisation",
            Self::Kernels => "kernels",
        })
    }
}
