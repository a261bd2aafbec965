//! What a plan uses of each memory: line by line, and in all.

use serde::{Deserialize, Serialize};

use super::Device;

/// One use of one device's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BudgetLine {
    /// What the memory is for: `attention`, [`HOT_NEURONS`], …
    pub name: String,
    /// Whose memory.
    pub device: Device,
    /// Which GPU's, where there are several.
    #[serde(default, skip_serializing_if = "super::is_first")]
    pub gpu: usize,
    /// How much of it.
    pub bytes: u64,
}

/// Name of the line for attention's weights, norms, and what the FFN adds beside its neurons.
pub const ATTENTION: &str = "attention";
/// Name of the line for what predicts: predictors, signs, scores.
pub const PREDICTORS: &str = "predictors";
/// Name of the line for the head.
pub const HEAD: &str = "head";
/// Name of the line for the embeddings.
pub const EMBEDDINGS: &str = "embeddings";
/// Name of the line for keys and values.
pub const KV_CACHE: &str = "KV cache";
/// Name of the line for activations and whatever else is only there while a token is computed.
pub const SCRATCH: &str = "scratch";
/// Name of the line for the neurons on the GPU.
pub const HOT_NEURONS: &str = "hot neurons";
/// Name of the line for the neurons on the CPU.
pub const COLD_NEURONS: &str = "cold neurons";

/// Sums over lines and layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Totals {
    /// Used on the GPU.
    pub gpu_bytes: u64,
    /// Used on the CPU.
    pub cpu_bytes: u64,
    /// Neurons of the model.
    pub neuron_count: u64,
    /// Neurons on the GPU.
    pub hot_count: u64,
    /// Share of all activations that the neurons on the GPU carry.
    pub hot_share: f64,
    /// Predicted time of one decoded token at full context.
    pub microseconds_per_token: f64,
}

impl Totals {
    /// What is used of `device`.
    pub fn bytes(&self, device: Device) -> u64 {
        match device {
            Device::Gpu => self.gpu_bytes,
            Device::Cpu => self.cpu_bytes,
        }
    }
}
