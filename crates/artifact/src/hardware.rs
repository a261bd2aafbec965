//! Machines as the planner sees them: bandwidth, memory and latency of CPU and GPU, measured or from
//! datasheets.

mod error;
mod file;
mod named;
mod rates;
mod validate;

use std::collections::BTreeMap;

use powerinfer_tensor::Format;
use serde::{Deserialize, Serialize};

pub use error::HardwareError;
pub use named::{NAMES, named};
pub use rates::{CpuRates, EngineRates, ModelShape};

/// Measurements of one machine.
///
/// `sources` states the origin of every value under the value's dotted name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Short name.
    pub name: String,
    /// One-line description.
    pub description: String,
    /// Host, which computes the cold neurons.
    pub cpu: Cpu,
    /// Device, which computes the hot neurons; `None` for a machine without a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
    /// Origin of each value: `gpu.vram_bytes` → `datasheet`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sources: BTreeMap<String, String>,
}

/// Processor and main memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cpu {
    /// Number of compute threads.
    pub threads: usize,
    /// Sustained read bandwidth of all threads together.
    pub read_bandwidth_bytes_per_second: f64,
    /// Size of main memory.
    pub ram_bytes: u64,
    /// Time per matrix row that does not follow the previously read one, in addition to its bytes; all
    /// threads together.
    #[serde(default)]
    pub row_seconds: f64,
    /// Additional time per row of an axpy (`y += a·x`), with all threads together.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub sum_row_seconds: f64,
    /// Fixed time per kernel: starting it, and waiting for all threads.
    #[serde(default)]
    pub kernel_seconds: f64,
    /// Time per layer and element of the hidden state between kernels: norms, and rounding the inputs of kernels.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hidden_seconds: f64,
    /// Time per neuron between kernels: listing the computed neurons.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub neuron_seconds: f64,
    /// Time of sampling a token, per vocabulary entry.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub vocabulary_seconds: f64,
    /// Time per layer outside matrices, derived for a model from
    /// [`hidden_seconds`](Self::hidden_seconds) and [`neuron_seconds`](Self::neuron_seconds).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub layer_seconds: f64,
    /// Time per token outside layers and matrices, derived for a model from
    /// [`vocabulary_seconds`](Self::vocabulary_seconds).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub token_seconds: f64,
    /// Sustained arithmetic throughput of GEMMs (prefill), in operations per second; a multiply-add is two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operations_per_second: Option<f64>,
    /// The same for weights in float formats, if that was measured: quantised weights are multiplied as integers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub float_operations_per_second: Option<f64>,
    /// Measured bandwidth of reading scattered rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reads: Vec<ReadSpeed>,
    /// Measured throughput of the decode kernels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernels: Vec<KernelSpeed>,
}

/// Bandwidth of reading rows scattered over much more memory than the caches hold.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadSpeed {
    /// Number of reading threads.
    pub threads: usize,
    /// Bytes per row; the largest entry amounts to a sequential stream.
    pub row_bytes: u64,
    /// Bandwidth of all threads together.
    pub bytes_per_second: f64,
}

/// Throughput of the decode kernels, in bytes of weights per second.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelSpeed {
    /// Storage format of the weights.
    #[serde(with = "format_name")]
    pub format: Format,
    /// Number of compute threads.
    pub threads: usize,
    /// Bytes per row.
    pub row_bytes: u64,
    /// GEMV over the whole matrix.
    pub dense_bytes_per_second: f64,
    /// GEMV over a random tenth of the rows.
    pub rows_bytes_per_second: f64,
    /// Axpy over a random tenth of the rows.
    pub axpy_bytes_per_second: f64,
    /// Axpy over all rows.
    pub dense_axpy_bytes_per_second: f64,
}

/// GPU and its link to the host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Model name.
    pub name: String,
    /// Sustained read bandwidth of kernels from device memory.
    pub read_bandwidth_bytes_per_second: f64,
    /// Size of device memory.
    pub vram_bytes: u64,
    /// Device memory that was free when the machine was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// Sustained bandwidth of the link in one direction.
    pub pcie_bandwidth_bytes_per_second: f64,
    /// Latency of a transfer.
    pub pcie_latency_seconds: f64,
    /// `T_sync`: time of one host–device synchronisation within a layer (input over, partial sums back).
    pub sync_seconds: f64,
    /// Fixed time per kernel launch.
    pub kernel_launch_seconds: f64,
    /// Device memory of a run in addition to the model's data: loaded kernels, captured graphs, partly used pages. Excludes the
    /// CUDA context.
    pub context_bytes: u64,
    /// Sustained arithmetic throughput of GEMMs (prefill) with f16 inputs and f32 accumulation, in
    /// operations per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operations_per_second: Option<f64>,
}

impl Hardware {
    /// Whether the value `name`, such as `cpu.operations_per_second`, was measured.
    pub fn is_measured(&self, name: &str) -> bool {
        let source = self.sources.get(name);
        source.is_some_and(|source| source.starts_with("measured"))
    }
}

/// Device memory of a CUDA context, assumed: 0.5 GiB on an H200.
const CONTEXT_BYTES: u64 = 512 << 20;

impl Gpu {
    /// Bytes of a budget of `budget` bytes that a plan leaves free: [`context_bytes`](Self::context_bytes), or more if the card
    /// could not hold the rest of the budget and a CUDA context. A budget far beyond the card is taken to be for another card.
    pub fn reserve_bytes(&self, budget: u64) -> u64 {
        let most = self.vram_bytes.saturating_sub(CONTEXT_BYTES);
        if budget > self.vram_bytes.saturating_add(CONTEXT_BYTES) {
            self.context_bytes
        } else {
            self.context_bytes.max(budget.saturating_sub(most))
        }
    }
}

/// Serialises a [`Format`] by its name.
mod format_name {
    use powerinfer_tensor::Format;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(format: &Format, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(format.name())
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Format, D::Error> {
        let name = String::deserialize(from)?;
        name.parse().map_err(D::Error::custom)
    }
}

impl Cpu {
    /// Bandwidth of a sequential stream on `threads` threads: the one measured with the most threads up to that number. If all
    /// measurements have more threads, it is the one with the fewest; without measurements, it is
    /// [`read_bandwidth_bytes_per_second`](Self::read_bandwidth_bytes_per_second).
    pub fn stream_bytes_per_second(&self, threads: usize) -> f64 {
        let streams = self.streams();
        let up_to = streams.clone().filter(|read| read.threads <= threads);
        let found = up_to
            .max_by_key(|read| read.threads)
            .or(streams.min_by_key(|read| read.threads));
        found.map_or(self.read_bandwidth_bytes_per_second, |read| {
            read.bytes_per_second
        })
    }

    /// The sequential streams among the measured reads.
    fn streams(&self) -> impl Iterator<Item = &ReadSpeed> + Clone {
        let longest = self.reads.iter().map(|read| read.row_bytes).max();
        self.reads
            .iter()
            .filter(move |read| Some(read.row_bytes) == longest)
    }
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "signature required by serde"
)]
fn is_zero(value: &f64) -> bool {
    *value == 0.0
}
