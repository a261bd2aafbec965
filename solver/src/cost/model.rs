//! The cost model: the time of one pass over the weights. A pass is the decoding of a token by this engine, or
//! any number of tokens by another engine, which differs in its rates only.
//!
//! ```text
//! T    = attention + KV + predictor + max(hot, cold + T_sync)        attention on the GPU
//! T    = attention + KV + predictor + max(hot + T_sync, cold)        attention on the CPU
//! part = max(bytes / bandwidth, operations / throughput) + rows + sums + kernels
//! ```
//!
//! The hot and the cold neurons of a split FFN are computed in parallel; a device without neurons of the layer
//! takes no time and no synchronisation. The hidden state is copied between the devices wherever the attention
//! of two consecutive layers is on different devices.

use std::ops::Add;

use powerinfer_artifact::{hardware::Hardware, plan::Device};

use crate::{LayerMode, ReadCost};

/// Kernels of attention, of prediction, and of the FFN: fused on the GPU.
pub const GPU_KERNELS: [f64; 3] = [3.0, 2.0, 2.0];
/// Kernels of attention, of prediction, and of the FFN: on the CPU, the jobs that threads share.
pub const CPU_KERNELS: [f64; 3] = [3.0, 1.0, 2.0];

/// Time of a part of a pass, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    /// Time during which the GPU works.
    pub gpu: f64,
    /// Time during which the CPU works.
    pub cpu: f64,
    /// Host–device synchronisation and copies of the hidden state.
    pub sync: f64,
    /// Wall-clock time: less than the sum if both devices work in parallel.
    pub total: f64,
}

impl Cost {
    /// Time in which `device` alone works.
    pub fn on(device: Device, seconds: f64) -> Self {
        let (gpu, cpu) = match device {
            Device::Gpu => (seconds, 0.0),
            Device::Cpu => (0.0, seconds),
        };
        Self {
            gpu,
            cpu,
            sync: 0.0,
            total: seconds,
        }
    }

    /// Time in which neither device computes.
    pub fn waiting(seconds: f64) -> Self {
        Self {
            sync: seconds,
            total: seconds,
            ..Self::default()
        }
    }

    /// Two parts in parallel.
    pub fn parallel(self, other: Self) -> Self {
        Self {
            total: self.total.max(other.total),
            ..self + other
        }
    }
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            gpu: self.gpu + other.gpu,
            cpu: self.cpu + other.cpu,
            sync: self.sync + other.sync,
            total: self.total + other.total,
        }
    }
}

/// How the weights of a part are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Whole matrices.
    Matrices,
    /// Selected rows.
    Rows,
}

/// Rates of a device for one kind of access.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Throughput {
    /// Bytes of weights read per second.
    pub bytes_per_second: f64,
    /// Operations per second if many tokens share what is read; a multiplication and an addition are two.
    pub operations_per_second: f64,
}

/// Rates of a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Whole matrices.
    pub matrices: Throughput,
    /// Selected rows.
    pub rows: Throughput,
    /// Bytes of KV cache read per second.
    pub kv_bytes_per_second: f64,
    /// Seconds per row that is not adjacent to the row read before.
    pub row_seconds: f64,
    /// Seconds per accumulated row of the down projection.
    pub sum_row_seconds: f64,
    /// Seconds per kernel.
    pub kernel_seconds: f64,
    /// Seconds per layer in addition to its kernels.
    pub layer_seconds: f64,
    /// Kernels of attention, of prediction, and of the FFN.
    pub kernels: [f64; 3],
}

/// Rates of the link between the devices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Bytes copied per second.
    pub bytes_per_second: f64,
    /// Bytes of weights copied per second during a prompt.
    pub streamed_bytes_per_second: f64,
    /// Latency of a copy.
    pub latency_seconds: f64,
    /// Synchronisation within a layer, without its bytes.
    pub sync_seconds: f64,
}

/// An engine on a machine, for a pass of some tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostModel {
    /// Rates of the CPU.
    pub cpu: Rates,
    /// Rates of the GPU and of the link to it; `None` if there is none.
    pub gpu: Option<(Rates, Link)>,
    /// Seconds of the CPU per pass, in addition to layers and head.
    pub token_seconds: f64,
    /// Tokens that share a reading of the weights.
    pub tokens: f64,
    /// Bytes of a weight.
    pub bytes_per_weight: f64,
    /// Bytes of the hidden state of a token.
    pub hidden_bytes: f64,
    /// Whether whole matrices in CPU memory are copied to the GPU if this is faster.
    pub streams_weights: bool,
    /// Whether this includes the matrices of attention and of the head.
    pub streams_attention: bool,
}

/// A part of a pass on one device.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Part {
    /// Device that holds the weights.
    device: Device,
    /// How they are read.
    access: Access,
    /// ReadCost of reading, once for all tokens.
    work: ReadCost,
    /// Bytes of weights that each token is computed with, on average.
    computed_bytes: f64,
    /// Kernels.
    kernels: f64,
    /// Whether the weights are FFN neurons.
    is_ffn: bool,
}

/// A set of neurons of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Neurons {
    /// Number of neurons.
    pub count: f64,
    /// Mean number of active neurons per token.
    pub active: f64,
    /// Mean number of neurons that any token of the pass reads; `active` if it is one token.
    pub read: f64,
}

impl Neurons {
    /// Neurons of which `active` are active for the one token of a pass.
    pub(crate) fn of_token(count: f64, active: f64) -> Self {
        Self {
            count,
            active,
            read: active,
        }
    }

    /// Neurons with these activation frequencies, for one token.
    pub(crate) fn new(frequencies: &[f64]) -> Self {
        // Plus 0, for an empty sum is −0.
        let active = frequencies.iter().sum::<f64>() + 0.0;
        Self::of_token(frequencies.len() as f64, active)
    }
}

/// An FFN as the cost model sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ffn {
    /// Execution mode.
    pub mode: LayerMode,
    /// Device of the layer's attention, and so of its hidden state.
    pub device: Device,
    /// How its neurons are read.
    pub access: Access,
    /// Host–device synchronisations of the device that does not hold the hidden state.
    pub syncs: usize,
    /// Bytes that each of them copies for a token, in both directions together.
    pub sync_bytes: f64,
}

impl CostModel {
    /// This engine decoding one token.
    pub fn decoding(hardware: &Hardware, hidden_bytes: u64) -> Self {
        let reading = |bytes_per_second: f64| Throughput {
            bytes_per_second,
            operations_per_second: f64::INFINITY,
        };
        let cpu = &hardware.cpu;
        let read = reading(cpu.read_bandwidth_bytes_per_second);
        let gpu = hardware.gpu.as_ref().map(|gpu| {
            let read = reading(gpu.read_bandwidth_bytes_per_second);
            let rates = Rates {
                matrices: read,
                rows: read,
                kv_bytes_per_second: read.bytes_per_second,
                row_seconds: 0.0,
                sum_row_seconds: 0.0,
                kernel_seconds: gpu.kernel_launch_seconds,
                layer_seconds: 0.0,
                kernels: GPU_KERNELS,
            };
            let link = Link {
                bytes_per_second: gpu.pcie_bandwidth_bytes_per_second,
                streamed_bytes_per_second: gpu.pcie_bandwidth_bytes_per_second,
                latency_seconds: gpu.pcie_latency_seconds,
                sync_seconds: gpu.sync_seconds,
            };
            (rates, link)
        });
        Self {
            cpu: Rates {
                matrices: read,
                rows: read,
                kv_bytes_per_second: read.bytes_per_second,
                row_seconds: cpu.row_seconds,
                sum_row_seconds: cpu.sum_row_seconds,
                kernel_seconds: cpu.kernel_seconds,
                layer_seconds: cpu.layer_seconds,
                kernels: CPU_KERNELS,
            },
            gpu,
            token_seconds: cpu.token_seconds,
            tokens: 1.0,
            bytes_per_weight: 1.0,
            hidden_bytes: hidden_bytes as f64,
            streams_weights: false,
            streams_attention: true,
        }
    }

    fn rates(&self, device: Device) -> &Rates {
        match (device, &self.gpu) {
            (Device::Gpu, Some((gpu, _))) => gpu,
            _ => &self.cpu,
        }
    }

    /// Attention, which reads `bytes` of weights on `device`, and `kv_bytes` of KV cache on `kv`.
    pub fn attention(&self, device: Device, bytes: f64, kv: Device, kv_bytes: f64) -> Cost {
        let kernels = self.rates(device).kernels[0];
        let reading = Cost::on(kv, kv_bytes / self.rates(kv).kv_bytes_per_second);
        let rest = Cost::on(device, self.rates(device).layer_seconds);
        let cost = self.matrices(device, bytes, bytes, kernels) + reading + rest;
        if kv_bytes > 0.0 && kv != device {
            cost + self.sync(2.0 * self.hidden_bytes)
        } else {
            cost
        }
    }

    /// Prediction in execution mode `mode` on `device`, for a layer whose hidden state is on `layer_device`.
    pub fn prediction(&self, mode: &LayerMode, layer_device: Device, device: Device) -> Cost {
        if mode.prediction == ReadCost::default() {
            return Cost::default();
        }
        let cost = self.part(&Part {
            device,
            access: Access::Matrices,
            work: mode.prediction,
            computed_bytes: mode.prediction.bytes,
            kernels: self.rates(device).kernels[1],
            is_ffn: false,
        });
        if device == layer_device {
            cost
        } else {
            cost + self.sync(2.0 * self.hidden_bytes)
        }
    }

    /// An FFN whose `hot` neurons are computed on the GPU in parallel with the `cold` ones on the CPU.
    pub fn ffn(&self, ffn: &Ffn, hot: Neurons, cold: Neurons) -> Cost {
        let hot = self.neurons(ffn, Device::Gpu, hot);
        hot.parallel(self.neurons(ffn, Device::Cpu, cold))
    }

    /// The `neurons` of an FFN that are on `device`.
    fn neurons(&self, ffn: &Ffn, device: Device, neurons: Neurons) -> Cost {
        if neurons.count == 0.0 {
            return Cost::default();
        }
        let mode = LayerMode {
            prediction: ReadCost::default(),
            ..ffn.mode
        };
        let cost = self.part(&Part {
            device,
            access: ffn.access,
            work: mode.work(neurons.count, neurons.read),
            computed_bytes: mode.work(neurons.count, neurons.active).bytes,
            kernels: self.rates(device).kernels[2],
            is_ffn: true,
        });
        if device == ffn.device {
            return cost;
        }
        let syncs = (0..ffn.syncs).map(|_| self.sync(ffn.sync_bytes));
        cost + syncs.fold(Cost::default(), Cost::add)
    }

    /// The output head, of which each token is computed with `computed_bytes` of its `bytes`.
    pub fn head(&self, device: Device, bytes: f64, computed_bytes: f64) -> Cost {
        self.matrices(device, bytes, computed_bytes, 1.0)
    }

    /// ReadCost that the CPU does once per pass.
    pub fn token(&self) -> Cost {
        Cost::on(Device::Cpu, self.token_seconds)
    }

    fn matrices(&self, device: Device, bytes: f64, computed_bytes: f64, kernels: f64) -> Cost {
        self.part(&Part {
            device,
            access: Access::Matrices,
            work: ReadCost {
                bytes,
                ..ReadCost::default()
            },
            computed_bytes,
            kernels,
            is_ffn: false,
        })
    }

    /// Time of `part` on the device of its weights, or on the GPU after copying them there.
    fn part(&self, part: &Part) -> Cost {
        let here = self.seconds(part.device, part);
        let may_move = part.device == Device::Cpu && part.access == Access::Matrices;
        if self.streams_weights
            && (part.is_ffn || self.streams_attention)
            && may_move
            && let Some((_, link)) = &self.gpu
        {
            let sent = part.work.bytes / link.streamed_bytes_per_second;
            let there = self.seconds(Device::Gpu, part);
            if sent + there < here {
                return Cost {
                    gpu: there,
                    cpu: 0.0,
                    sync: sent,
                    total: sent + there,
                };
            }
        }
        Cost::on(part.device, here)
    }

    /// Seconds that `device` takes for `part`.
    fn seconds(&self, device: Device, part: &Part) -> f64 {
        let rates = self.rates(device);
        let Throughput {
            bytes_per_second,
            operations_per_second,
        } = match part.access {
            Access::Matrices => rates.matrices,
            Access::Rows => rates.rows,
        };
        // The bandwidth for one token was measured with its arithmetic, so computing takes at most that time per token.
        let computing = if self.tokens > 1.0 {
            let computed_bytes = self.tokens * part.computed_bytes;
            (2.0 * computed_bytes / self.bytes_per_weight / operations_per_second)
                .min(computed_bytes / bytes_per_second)
        } else {
            0.0
        };
        (part.work.bytes / bytes_per_second).max(computing)
            + part.work.scattered_rows * rates.row_seconds
            + part.work.axpy_rows * rates.sum_row_seconds
            + part.kernels * rates.kernel_seconds
    }

    /// A synchronisation within a layer that copies `bytes` for each token, in both directions together.
    fn sync(&self, bytes: f64) -> Cost {
        Cost::waiting(self.gpu.as_ref().map_or(0.0, |(_, link)| {
            link.sync_seconds + bytes * self.tokens / link.bytes_per_second
        }))
    }

    /// Copy of the hidden state from one device and GPU to another; free if both are the same.
    pub fn crossing(&self, from: (Device, usize), to: (Device, usize)) -> Cost {
        let times = match (from.0, to.0) {
            (Device::Cpu, Device::Cpu) => 0.0,
            (Device::Gpu, Device::Gpu) if from.1 == to.1 => 0.0,
            // Consumer GPUs copy to one another through host memory.
            (Device::Gpu, Device::Gpu) => 2.0,
            _ => 1.0,
        };
        let seconds = self.gpu.as_ref().map_or(0.0, |(_, link)| {
            link.latency_seconds + self.hidden_bytes * self.tokens / link.bytes_per_second
        });
        Cost::waiting(times * seconds)
    }
}
