//! Memory use of a plan, by purpose and in total.

use serde::{Deserialize, Serialize};

use super::Device;

/// Memory use of one purpose on one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BudgetLine {
    /// Purpose: [`ATTENTION`], [`HOT_NEURONS`], …
    pub name: String,
    /// Device of the memory.
    pub device: Device,
    /// Index of the GPU, if there are several.
    #[serde(default, skip_serializing_if = "super::is_first")]
    pub gpu: usize,
    /// Bytes used.
    pub bytes: u64,
}

/// Line of memory on the CPU for experts that may be replaced on the GPU while the model runs, and for their copies.
pub const CACHED_EXPERTS: &str = "cached experts";
/// Line of attention weights, norms, and FFN weights outside neurons.
pub const ATTENTION: &str = "attention";
/// Line of predictors, gate signs and score vectors.
pub const PREDICTORS: &str = "predictors";
/// Line of the output head.
pub const HEAD: &str = "head";
/// Line of the embeddings.
pub const EMBEDDINGS: &str = "embeddings";
/// Line of the copy of the embeddings in pinned memory, from which a GPU looks up rows.
pub const PINNED_EMBEDDINGS: &str = "pinned embeddings";
/// Line of the KV cache.
pub const KV_CACHE: &str = "KV cache";
/// Line of activations and other temporary memory of a forward pass.
pub const SCRATCH: &str = "scratch";
/// Line of the memory that a GPU's budget keeps for the driver: loaded kernels, captured graphs, partly used pages.
pub const RESERVE: &str = "reserve";
/// Line of the neurons on the GPU.
pub const HOT_NEURONS: &str = "hot neurons";
/// Line of the neurons on the CPU.
pub const COLD_NEURONS: &str = "cold neurons";

/// Sums over lines and layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Totals {
    /// Bytes used on the GPU.
    pub gpu_bytes: u64,
    /// Bytes used on the CPU.
    pub cpu_bytes: u64,
    /// Number of neurons of the model.
    pub neuron_count: u64,
    /// Number of neurons on the GPU.
    pub hot_count: u64,
    /// Share of all activations that belong to neurons on the GPU.
    pub hot_share: f64,
    /// Predicted time per decoded token at full context.
    pub microseconds_per_token: f64,
}

impl Totals {
    /// Returns the bytes used on `device`.
    pub fn bytes(&self, device: Device) -> u64 {
        match device {
            Device::Gpu => self.gpu_bytes,
            Device::Cpu => self.cpu_bytes,
        }
    }
}
