//! Memory budget of a plan.

use powerinfer_tensor::CacheFormat;
use serde::{Deserialize, Serialize};

use super::Device;

/// Memory that a plan may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// Bytes of GPU memory, of all GPUs together.
    pub vram_bytes: u64,
    /// Bytes of main memory.
    pub ram_bytes: u64,
    /// Capacity of the KV cache, in tokens.
    pub context_tokens: u64,
    /// Number format of the KV cache.
    #[serde(with = "cache_format_name")]
    pub kv_cache: CacheFormat,
    /// Bytes of memory per GPU, in the order of the layers they hold; empty for a single GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vram_split: Vec<u64>,
}

impl Budget {
    /// Returns the budget of `device` in bytes.
    pub fn bytes(&self, device: Device) -> u64 {
        match device {
            Device::Gpu => self.vram_bytes,
            Device::Cpu => self.ram_bytes,
        }
    }

    /// Returns the budget per GPU in bytes; one entry for a single GPU.
    pub fn vram_per_gpu(&self) -> Vec<u64> {
        if self.vram_split.is_empty() {
            vec![self.vram_bytes]
        } else {
            self.vram_split.clone()
        }
    }
}

/// Serialises a [`CacheFormat`] by its name.
mod cache_format_name {
    use powerinfer_tensor::CacheFormat;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(format: &CacheFormat, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(format.name())
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<CacheFormat, D::Error> {
        let name = String::deserialize(from)?;
        name.parse().map_err(D::Error::custom)
    }
}
