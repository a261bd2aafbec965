//! Plan of one layer: device and memory of its parts.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Device, InputThresholds, Policy, Threshold};

/// Plan of one layer; its first `hot_count` neurons, hottest first, are on the GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerPlan {
    /// Index of the layer.
    pub layer: usize,
    /// Policy that selects the neurons.
    pub policy: Policy,
    /// Reason for the policy, for display.
    pub reason: String,
    /// Calibrated threshold of [`Policy::Threshold`], if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threshold: Option<Threshold>,
    /// Thresholds on the inputs of the projections; `None` to read all inputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_thresholds: Option<InputThresholds>,
    /// Number of neurons.
    pub neuron_count: usize,
    /// Number of neurons on the GPU.
    pub hot_count: usize,
    /// Number of hot experts that may be replaced while the model runs, the least frequent ones; 0 without experts.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cached_experts: usize,
    /// Share of the layer's activations that belong to hot neurons.
    pub hot_share: f64,
    /// Bytes per neuron: its rows of gate and up and its column of down, packed.
    pub neuron_bytes: u64,
    /// Index of the GPU with the layer's device parts, if there are several.
    #[serde(default, skip_serializing_if = "super::is_first")]
    pub gpu: usize,
    /// Device of attention weights and norms.
    pub attention: Device,
    /// Device of the KV cache.
    pub kv: Device,
    /// Device of the predictor; `None` if the layer has none.
    pub predictor: Option<Device>,
    /// Total bytes of the layer on the GPU.
    pub gpu_bytes: u64,
    /// Total bytes of the layer on the CPU.
    pub cpu_bytes: u64,
    /// Predicted GPU time per token.
    pub gpu_microseconds: f64,
    /// Predicted CPU time per token.
    pub cpu_microseconds: f64,
    /// Predicted time of host–device synchronisation per token.
    pub sync_microseconds: f64,
    /// Predicted time per token: less than the sum if both devices work in parallel.
    pub microseconds: f64,
    /// Bottleneck: what most of that time is spent on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<Limit>,
}

impl LayerPlan {
    /// Returns the bytes used on `device`.
    pub fn bytes(&self, device: Device) -> u64 {
        match device {
            Device::Gpu => self.gpu_bytes,
            Device::Cpu => self.cpu_bytes,
        }
    }
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// Bottleneck of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// Reads of weights and KV cache by the GPU.
    GpuMemory,
    /// Reads of weights and KV cache by the CPU.
    CpuMemory,
    /// Host–device synchronisation.
    SyncCost,
    /// Kernel launches.
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
