//! How long an engine takes for one pass over the weights: a step of decoding for some requests at
//! once, or a stretch of a prompt.
//!
//! ```text
//! T = Σ_layers  attention + KV + prediction + max(hot, cold + T_sync)   + head
//! part = max(bytes / bandwidth, operations / throughput) + rows + kernels
//! ```
//!
//! A neuron is read once for all tokens of a pass that it is active for, in `1 − (1 − f)^tokens` of
//! the passes, as if tokens were independent; it is computed for each of them.

use powerinfer_artifact::{
    hardware::Hardware,
    plan::{Device, Plan},
};
use powerinfer_bundle::memory::kv_bytes;
use powerinfer_model::ModelConfig;
use powerinfer_solver::{Candidate, LayerMode, Problem, Work};
use powerinfer_tensor::{BLOCK, Format};

use super::engine::{Engine, Merge, PICKED_PRODUCTS, operations};

/// Tokens of a prompt that go through the weights together.
const CHUNK: usize = 512;

/// Where a model's parts are, and what a token reads of them.
#[derive(Debug, Clone)]
pub struct Placed<'a> {
    /// The layers, in order.
    pub layers: Vec<PlacedLayer<'a>>,
    /// Device of the head.
    pub head: Device,
    /// Bytes of the head and the last norm.
    pub head_bytes: u64,
    /// Format of the weights.
    pub quant: Format,
    /// Length of a hidden state.
    pub hidden_size: usize,
    /// Weight matrices of a neuron.
    pub matrices: usize,
}

/// One layer of it.
#[derive(Debug, Clone, Copy)]
pub struct PlacedLayer<'a> {
    /// Execution mode of the FFN.
    pub mode: LayerMode,
    /// Hottest first.
    pub frequencies: &'a [f64],
    /// So many of them are on the GPU.
    pub hot_count: usize,
    /// Bytes of a neuron.
    pub neuron_bytes: u64,
    /// Device of attention.
    pub attention: Device,
    /// Bytes of attention that a token reads.
    pub attention_bytes: u64,
    /// Device of the predictor.
    pub prediction: Device,
    /// Device of the KV cache.
    pub kv: Device,
    /// Numbers that a token of context adds to the cache.
    pub kv_numbers: usize,
    /// Bytes that they take where the plan says how they are stored.
    pub kv_bytes: f64,
}

/// What a pass does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pass {
    /// Tokens that go through the weights together, a whole number.
    pub tokens: f64,
    /// Tokens of context whose keys and values are read, of all requests together.
    pub context: f64,
    /// Whether it is part of a prompt.
    pub kind: Kind,
}

/// What a pass is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A new token for every request.
    Decode,
    /// Many tokens of one prompt.
    Prompt,
}

/// Seconds of a pass, and the work of it in which both sides share.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Time {
    /// The GPU works.
    pub gpu: f64,
    /// The CPU works.
    pub cpu: f64,
    /// Synchronising.
    pub sync: f64,
    /// From start to end.
    pub total: f64,
}

impl Time {
    fn on(device: Device, seconds: f64) -> Self {
        match device {
            Device::Gpu => Self {
                gpu: seconds,
                total: seconds,
                ..Self::default()
            },
            Device::Cpu => Self {
                cpu: seconds,
                total: seconds,
                ..Self::default()
            },
        }
    }

    fn syncing(seconds: f64) -> Self {
        Self {
            sync: seconds,
            total: seconds,
            ..Self::default()
        }
    }

    fn then(self, other: Self) -> Self {
        Self {
            gpu: self.gpu + other.gpu,
            cpu: self.cpu + other.cpu,
            sync: self.sync + other.sync,
            total: self.total + other.total,
        }
    }

    fn beside(self, other: Self) -> Self {
        Self {
            total: self.total.max(other.total),
            ..self.then(other)
        }
    }
}

/// Whether weights are read whole, or as rows that are picked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Matrices,
    Rows,
}

/// A part of a pass on one device.
struct Part {
    device: Device,
    access: Access,
    /// Read once.
    work: Work,
    /// Bytes of weights that are computed with, for every token.
    computed_bytes: f64,
    kernels: f64,
}

/// An engine on a machine.
#[derive(Clone, Copy)]
pub struct Stage<'a> {
    /// The engine.
    pub engine: &'a Engine,
    /// The machine, as the model finds it.
    pub hardware: &'a Hardware,
}

impl Stage<'_> {
    /// Time of one pass over all of `placed`.
    pub fn pass(self, placed: &Placed<'_>, pass: Pass) -> Time {
        let mut before = Device::Cpu;
        let mut time = Time::default();
        for layer in &placed.layers {
            time = time
                .then(self.crossing(placed, pass, before, layer.attention))
                .then(self.attention(placed, layer, pass))
                .then(self.ffn(placed, layer, pass));
            before = layer.attention;
        }
        let head = Part {
            device: placed.head,
            access: Access::Matrices,
            work: Work {
                bytes: placed.head_bytes as f64,
                ..Work::default()
            },
            // A prompt's last token alone needs a successor.
            computed_bytes: match pass.kind {
                Kind::Decode => placed.head_bytes as f64,
                Kind::Prompt => placed.head_bytes as f64 / pass.tokens,
            },
            kernels: 1.0,
        };
        let token = match self.engine.counts_rows {
            true => self.hardware.cpu.token_seconds,
            false => 0.0,
        };
        time.then(self.crossing(placed, pass, before, placed.head))
            .then(self.part(placed, pass, &head))
            .then(Time::on(Device::Cpu, token))
    }

    /// Seconds of a prompt of so many tokens, [`CHUNK`] at a time.
    pub fn prompt(self, placed: &Placed<'_>, tokens: usize) -> f64 {
        let chunks = (0..tokens.div_ceil(CHUNK)).map(|chunk| {
            let until = ((chunk + 1) * CHUNK).min(tokens);
            let pass = Pass {
                tokens: (until - chunk * CHUNK) as f64,
                context: until as f64,
                kind: Kind::Prompt,
            };
            self.pass(placed, pass).total
        });
        chunks.sum()
    }

    fn attention(self, placed: &Placed<'_>, layer: &PlacedLayer<'_>, pass: Pass) -> Time {
        let weights = Part {
            device: layer.attention,
            access: Access::Matrices,
            work: Work {
                bytes: layer.attention_bytes as f64,
                ..Work::default()
            },
            computed_bytes: layer.attention_bytes as f64,
            kernels: self.engine.kernels(layer.attention)[0],
        };
        let device = match self.engine.kv_on_cpu {
            true => Device::Cpu,
            false => layer.kv,
        };
        let per_token = match self.engine.kv_number_bytes {
            Some(bytes) => (layer.kv_numbers as u64 * bytes) as f64,
            None => layer.kv_bytes,
        };
        let bytes = pass.context * per_token;
        let share = match device {
            Device::Gpu => 1.0,
            Device::Cpu => self.engine.cpu_kv,
        };
        let bandwidth = share * self.bandwidth(device, Access::Matrices, Format::F16);
        let mut time = self
            .part(placed, pass, &weights)
            .then(Time::on(device, bytes / bandwidth));
        if self.engine.counts_rows && layer.attention == Device::Cpu {
            time = time.then(Time::on(Device::Cpu, self.hardware.cpu.layer_seconds));
        }
        if layer.kv_numbers > 0 && device != layer.attention {
            time = time.then(self.sync(pass, 2 * placed.hidden_size));
        }
        time
    }

    fn ffn(self, placed: &Placed<'_>, layer: &PlacedLayer<'_>, pass: Pass) -> Time {
        let LayerMode {
            prediction, every, ..
        } = layer.mode;
        let is_dense = pass.kind == Kind::Prompt && !self.engine.sparse_prompts;
        let mut time = Time::default();
        if prediction != Work::default() && !is_dense {
            let part = Part {
                device: layer.prediction,
                access: Access::Matrices,
                work: prediction,
                computed_bytes: prediction.bytes,
                kernels: self.engine.kernels(layer.prediction)[1],
            };
            time = self.part(placed, pass, &part);
            if layer.prediction != layer.attention {
                time = time.then(self.sync(pass, 2 * placed.hidden_size));
            }
        }
        let side = |device: Device, frequencies: &[f64]| {
            if frequencies.is_empty() {
                return Time::default();
            }
            let count = frequencies.len() as f64;
            let all = count * layer.neuron_bytes as f64;
            let neurons = LayerMode {
                prediction: Work::default(),
                ..layer.mode
            };
            let (work, computed_bytes) = if is_dense {
                let work = Work {
                    bytes: all,
                    ..Work::default()
                };
                (work, all)
            } else {
                let active: f64 = frequencies.iter().sum();
                let read: f64 = match pass.tokens as i32 {
                    1 => active,
                    tokens => frequencies
                        .iter()
                        .map(|f| 1.0 - (1.0 - f).powi(tokens))
                        .sum(),
                };
                (neurons.work(count, read), neurons.work(count, active).bytes)
            };
            let access = match is_dense || every.bytes * count >= all {
                true => Access::Matrices,
                false => Access::Rows,
            };
            let part = Part {
                device,
                access,
                work,
                computed_bytes,
                kernels: self.engine.kernels(device)[2],
            };
            let time = self.part(placed, pass, &part);
            match device == layer.attention {
                true => time,
                false => time.then(self.merge(placed, layer, pass)),
            }
        };
        let (hot, cold) = layer.frequencies.split_at(layer.hot_count);
        time.then(side(Device::Gpu, hot).beside(side(Device::Cpu, cold)))
    }

    /// Input to the other side and its results back.
    fn merge(self, placed: &Placed<'_>, layer: &PlacedLayer<'_>, pass: Pass) -> Time {
        match self.engine.merge {
            Merge::PerLayer => self.sync(pass, 2 * placed.hidden_size),
            Merge::PerMatrix => {
                let each = placed.hidden_size + layer.frequencies.len();
                (0..placed.matrices)
                    .fold(Time::default(), |time, _| time.then(self.sync(pass, each)))
            }
        }
    }

    /// Time of `part`, or of sending its weights to the GPU where the engine may and that is
    /// quicker.
    fn part(self, placed: &Placed<'_>, pass: Pass, part: &Part) -> Time {
        let here = self.part_on(part.device, placed, pass, part);
        match &self.hardware.gpu {
            Some(gpu)
                if self.engine.ships_weights
                    && pass.kind == Kind::Prompt
                    && part.access == Access::Matrices
                    && part.device == Device::Cpu =>
            {
                let sent = part.work.bytes / gpu.pcie_bandwidth_bytes_per_second;
                let there = self.part_on(Device::Gpu, placed, pass, part);
                match sent + there < here {
                    true => Time {
                        gpu: there,
                        sync: sent,
                        total: sent + there,
                        cpu: 0.0,
                    },
                    false => Time::on(Device::Cpu, here),
                }
            }
            _ => Time::on(part.device, here),
        }
    }

    fn part_on(self, device: Device, placed: &Placed<'_>, pass: Pass, part: &Part) -> f64 {
        let reading = part.work.bytes / self.bandwidth(device, part.access, placed.quant);
        // Two operations for a weight and a token.
        let bytes_per_weight = placed.quant.row_bytes(4096) as f64 / 4096.0;
        let operations_needed = 2.0 * pass.tokens * part.computed_bytes / bytes_per_weight;
        let products = match (device, part.access) {
            (Device::Cpu, Access::Rows) => PICKED_PRODUCTS,
            _ => 1.0,
        };
        // How fast one token's weights are read has been measured with what is computed with them.
        let computing = match pass.tokens > 1.0 {
            true => operations_needed / (products * operations(self.hardware, device)),
            false => 0.0,
        };
        let beside = match (device, &self.hardware.gpu) {
            (Device::Gpu, Some(gpu)) => {
                let kernel = self.engine.gpu_kernel_seconds;
                part.kernels * kernel.unwrap_or(gpu.kernel_launch_seconds)
            }
            _ if self.engine.counts_rows => {
                let cpu = &self.hardware.cpu;
                part.work.rows * cpu.row_seconds
                    + part.work.sums * cpu.sum_row_seconds
                    + part.kernels * cpu.kernel_seconds
            }
            _ => 0.0,
        };
        reading.max(computing) + beside
    }

    fn bandwidth(self, device: Device, access: Access, quant: Format) -> f64 {
        match (device, &self.hardware.gpu) {
            (Device::Gpu, Some(gpu)) => {
                (self.engine.gpu_reads)(quant) * gpu.read_bandwidth_bytes_per_second
            }
            _ => {
                let share = match access {
                    Access::Matrices => self.engine.cpu_matrices,
                    Access::Rows => self.engine.cpu_rows,
                };
                let cpu = &self.hardware.cpu;
                let memory = share(quant) * cpu.read_bandwidth_bytes_per_second;
                match quant.is_quantised() {
                    true => memory.min(cpu.threads as f64 * self.engine.cpu_blocks_per_thread),
                    false => memory,
                }
            }
        }
    }

    /// `numbers` in float32 cross for each token, there and back together.
    fn sync(self, pass: Pass, numbers: usize) -> Time {
        Time::syncing(self.hardware.gpu.as_ref().map_or(0.0, |gpu| {
            let bytes = 4.0 * numbers as f64 * pass.tokens;
            let beside = self.engine.sync_seconds.unwrap_or(gpu.sync_seconds);
            beside + bytes / gpu.pcie_bandwidth_bytes_per_second
        }))
    }

    /// The hidden state moves from one device to the other, or stays.
    fn crossing(self, placed: &Placed<'_>, pass: Pass, from: Device, to: Device) -> Time {
        match &self.hardware.gpu {
            Some(gpu) if from != to => {
                let bytes = 4.0 * placed.hidden_size as f64 * pass.tokens;
                Time::syncing(
                    gpu.pcie_latency_seconds + bytes / gpu.pcie_bandwidth_bytes_per_second,
                )
            }
            _ => Time::default(),
        }
    }
}

impl<'a> Placed<'a> {
    /// A model as `plan` has it, its layers going the ways `chosen`.
    pub fn of(
        plan: &Plan,
        problem: &Problem,
        config: &ModelConfig,
        quant: Format,
        chosen: &[&'a Candidate],
    ) -> Self {
        let kv_bytes = kv_bytes(config, BLOCK as u64, plan.budget.kv_cache) as f64 / BLOCK as f64;
        let layers = plan.layers.iter().zip(&problem.layers).zip(chosen);
        let layers = layers.map(|((plan, layer), chosen)| PlacedLayer {
            mode: chosen.mode,
            frequencies: &chosen.frequencies,
            hot_count: plan.hot_count,
            neuron_bytes: layer.neuron_bytes,
            attention: plan.attention,
            attention_bytes: layer.attention_read_bytes,
            prediction: plan.predictor.unwrap_or(plan.attention),
            kv: plan.kv,
            kv_numbers: 2 * config.kv_head_count * config.head_size,
            kv_bytes,
        });
        Self {
            layers: layers.collect(),
            head: plan.head,
            head_bytes: problem.head_bytes,
            quant,
            hidden_size: config.hidden_size,
            matrices: config.matrices_per_neuron(),
        }
    }

    /// Share of the neurons on the GPU, and of the activations that they carry.
    pub fn hot(&self) -> [f64; 2] {
        let mut counts = [0.0; 2];
        let mut carried = [0.0; 2];
        for layer in &self.layers {
            let (hot, cold) = layer.frequencies.split_at(layer.hot_count);
            counts = [counts[0] + hot.len() as f64, counts[1] + cold.len() as f64];
            let sum = |frequencies: &[f64]| frequencies.iter().sum::<f64>();
            carried = [carried[0] + sum(hot), carried[1] + sum(cold)];
        }
        [counts, carried].map(|[hot, cold]| hot / (hot + cold))
    }

    /// Share of what a token computes with, attention and active neurons, that is on the GPU: the
    /// paper's neuron load, whose neurons are the rows of any matrix.
    pub fn load_on_gpu(&self) -> f64 {
        let mut on_gpu = 0.0;
        let mut all = 0.0;
        for layer in &self.layers {
            let active = |frequencies: &[f64]| {
                let sum: f64 = frequencies.iter().sum();
                let neurons = LayerMode {
                    prediction: Work::default(),
                    ..layer.mode
                };
                neurons.work(frequencies.len() as f64, sum).bytes
            };
            let (hot, cold) = layer.frequencies.split_at(layer.hot_count);
            let (hot, cold) = (active(hot), active(cold));
            let attention = layer.attention_bytes as f64;
            all += attention + hot + cold;
            on_gpu += hot;
            if layer.attention == Device::Gpu {
                on_gpu += attention;
            }
        }
        on_gpu / all
    }
}
