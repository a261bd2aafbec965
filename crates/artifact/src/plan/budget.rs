//! What a plan may use of each memory.

use powerinfer_tensor::CacheFormat;
use serde::{Deserialize, Serialize};

use super::Device;

/// What the plan may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// Memory on the GPU, on all of them together where there are several.
    pub vram_bytes: u64,
    /// Memory on the CPU.
    pub ram_bytes: u64,
    /// Tokens that the KV cache holds.
    pub context_tokens: u64,
    /// How it stores them; plans that do not say were made for 32 bits.
    #[serde(default = "full_width", with = "cache_format_name")]
    pub kv_cache: CacheFormat,
    /// Memory on each GPU, in the order of the layers they have; empty where there is one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vram_split: Vec<u64>,
}

impl Budget {
    /// The budget of `device`.
    pub fn bytes(&self, device: Device) -> u64 {
        match device {
            Device::Gpu => self.vram_bytes,
            Device::Cpu => self.ram_bytes,
        }
    }

    /// The budget of each GPU; of one where there is no more.
    pub fn vram_per_gpu(&self) -> Vec<u64> {
        match self.vram_split.is_empty() {
            true => vec![self.vram_bytes],
            false => self.vram_split.clone(),
        }
    }
}

/// The format of plans that name none.
fn full_width() -> CacheFormat {
    CacheFormat::F32
}

/// A format by its name.
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
