//! Time of one pass over the weights by an engine, with the solver's cost model: a decode step of one or more requests, or
//! a chunk of a prompt.
//!
//! A pass reads a neuron once if it is active on any of its tokens, with probability `1 − (1 − f)^tokens` for independent
//! tokens, and computes it for each token on which it is active.

use powerinfer_artifact::{
    hardware::Hardware,
    plan::{Device, Plan, Policy},
};
use powerinfer_model::{Experts, ModelConfig};
use powerinfer_runtime::memory::kv_bytes;
use powerinfer_solver::{
    Candidate, LayerMode, Problem, ReadCost,
    cost::{Access, Cost, CostModel, Ffn, Neurons, Throughput},
};
use powerinfer_tensor::{BLOCK, Format};

use super::engine::{Blocks, Engine, Merge, PICKED_PRODUCTS, Streams, operations};

/// Maximum number of tokens in a decoding batch.
const DECODE_BATCH: usize = 8;

/// A placed model: the device of each part, and the bytes of it that a token reads.
#[derive(Debug, Clone)]
pub(crate) struct Placed<'a> {
    /// The layers, in order.
    pub(crate) layers: Vec<PlacedLayer<'a>>,
    /// Device of the head.
    pub(crate) head: Device,
    /// Bytes of the head and the last norm.
    pub(crate) head_bytes: u64,
    /// Format of the weights.
    pub(crate) quant: Format,
    /// Length of a hidden state.
    pub(crate) hidden_size: usize,
    /// Weight matrices of a neuron.
    pub(crate) matrices: usize,
}

/// A layer of a placed model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlacedLayer<'a> {
    /// Execution mode of the FFN.
    pub(crate) mode: LayerMode,
    /// Activation frequencies, hottest first.
    pub(crate) frequencies: &'a [f64],
    /// Number of hot neurons.
    pub(crate) hot_count: usize,
    /// Share of the neurons that belong to a token's experts; 1 in dense models.
    pub(crate) selected: f64,
    /// Number of neurons per expert.
    pub(crate) expert_neurons: f64,
    /// Bytes of a neuron.
    pub(crate) neuron_bytes: u64,
    /// Device of attention.
    pub(crate) attention: Device,
    /// Bytes of attention that a token reads.
    pub(crate) attention_bytes: u64,
    /// Device of the predictor.
    pub(crate) prediction: Device,
    /// Device of the KV cache.
    pub(crate) kv: Device,
    /// Numbers in the cache per token of context.
    pub(crate) kv_numbers: usize,
    /// Bytes of these numbers in the format of the plan.
    pub(crate) kv_bytes: f64,
}

/// Workload of a pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pass {
    /// Number of tokens, a whole number.
    pub(crate) tokens: f64,
    /// Tokens of context whose keys and values are read, over all requests.
    pub(crate) context: f64,
    /// Decoding or prompt.
    pub(crate) kind: Kind,
}

/// Kind of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A new token for every request, or a batch of a few prompt tokens.
    Decode,
    /// Many tokens of one prompt.
    Prompt,
}

/// An engine on a machine.
#[derive(Clone, Copy)]
pub(crate) struct Estimator<'a> {
    /// The engine.
    pub(crate) engine: &'a Engine,
    /// The machine, with values for the model.
    pub(crate) hardware: &'a Hardware,
}

impl Estimator<'_> {
    /// Cost of one pass through `placed`.
    pub(crate) fn pass(self, placed: &Placed<'_>, pass: Pass) -> Cost {
        let model = self.cost_model(placed, pass);
        let mut before = (Device::Cpu, 0);
        let mut time = Cost::default();
        for layer in &placed.layers {
            let here = (layer.attention, 0);
            time = time
                + model.crossing(before, here)
                + self.attention(&model, layer, pass)
                + self.ffn(&model, placed, layer, pass);
            before = here;
        }
        let bytes = placed.head_bytes as f64;
        // Only the last token of a prompt needs logits.
        let computed_bytes = match pass.kind {
            Kind::Decode => bytes,
            Kind::Prompt => bytes / pass.tokens,
        };
        time + model.crossing(before, (placed.head, 0))
            + model.head(placed.head, bytes, computed_bytes)
            + model.token()
    }

    /// Seconds of a prompt of `tokens` tokens: passes of the engine's batch size, or batches of a few tokens as in decoding.
    pub(crate) fn prompt(self, placed: &Placed<'_>, tokens: usize) -> f64 {
        let most = self.engine.prompt_batch;
        let is_mixture = placed.layers.iter().any(|layer| layer.selected < 1.0);
        let batches_few = is_mixture && placed.hot()[0] >= 0.5;
        let (mut done, mut seconds) = (0, 0.0);
        while done < tokens {
            let left = tokens - done;
            let (size, kind) = if batches_few && left <= self.engine.expert_passes.few {
                (left.min(DECODE_BATCH), Kind::Decode)
            } else {
                (left.min(most), Kind::Prompt)
            };
            done += size;
            let pass = Pass {
                tokens: size as f64,
                context: done as f64,
                kind,
            };
            seconds += self.pass(placed, pass).total;
        }
        seconds
    }

    /// The cost model of `pass`: that of decoding, with the engine's rates.
    fn cost_model(self, placed: &Placed<'_>, pass: Pass) -> CostModel {
        let Engine {
            cpu_matrices,
            cpu_rows,
            gpu_reads,
            rates,
            ..
        } = self.engine;
        let quant = placed.quant;
        let mut model = CostModel::decoding(self.hardware, 4 * placed.hidden_size as u64);
        model.tokens = pass.tokens;
        model.bytes_per_weight = quant.row_bytes(4096) as f64 / 4096.0;
        model.streams_weights = pass.kind == Kind::Prompt;
        model.streams_attention = self.engine.streams == Streams::All;
        let [on_cpu, on_gpu] = match pass.kind {
            Kind::Prompt => rates.products,
            Kind::Decode => [1.0; 2],
        };
        // Nominal rates count other operations than those that the engines' shares were fitted to.
        let is_measured = self.hardware.is_measured("cpu.operations_per_second");
        let on_cpu = if is_measured { on_cpu } else { 1.0 };
        let cpu = &mut model.cpu;
        let products = on_cpu * operations(self.hardware, Device::Cpu, quant);
        cpu.matrices = Throughput {
            bytes_per_second: self.cpu_bandwidth(cpu_matrices(quant), quant),
            operations_per_second: products,
        };
        cpu.rows = Throughput {
            bytes_per_second: self.cpu_bandwidth(cpu_rows(quant), quant),
            operations_per_second: PICKED_PRODUCTS * products,
        };
        // The KV cache holds 16-bit numbers.
        let kv = self.cpu_bandwidth(cpu_matrices(Format::F16), Format::F16);
        cpu.kv_bytes_per_second = self.engine.cpu_kv * kv;
        cpu.kernels = self.engine.kernels(Device::Cpu);
        if !self.engine.counts_rows {
            (cpu.row_seconds, cpu.sum_row_seconds) = (0.0, 0.0);
            (cpu.kernel_seconds, cpu.layer_seconds) = (0.0, 0.0);
            model.token_seconds = match self.hardware.gpu {
                Some(_) => rates.gpu_token_seconds,
                None => 0.0,
            };
        }
        if let Some((gpu, link)) = &mut model.gpu {
            let bandwidth = gpu.matrices.bytes_per_second;
            gpu.matrices = Throughput {
                bytes_per_second: gpu_reads(quant) * bandwidth,
                operations_per_second: on_gpu * operations(self.hardware, Device::Gpu, quant),
            };
            gpu.rows = gpu.matrices;
            gpu.kv_bytes_per_second = gpu_reads(Format::F16) * bandwidth;
            gpu.kernels = self.engine.kernels(Device::Gpu);
            link.streamed_bytes_per_second = rates.link * link.bytes_per_second;
            if let Some(seconds) = self.engine.sync_seconds {
                link.sync_seconds = seconds;
            }
        }
        model
    }

    /// Bytes per second that the CPU reads at `share` of its bandwidth, in format `quant`.
    fn cpu_bandwidth(self, share: f64, quant: Format) -> f64 {
        let cpu = &self.hardware.cpu;
        let memory = share * cpu.read_bandwidth_bytes_per_second;
        if quant.is_quantised() {
            memory.min(match self.engine.cpu_blocks {
                Blocks::Unlimited => f64::INFINITY,
                Blocks::Bytes(bytes) => cpu.threads as f64 * bytes,
                Blocks::PerOperation(bytes, _)
                    if self.hardware.is_measured("cpu.operations_per_second") =>
                {
                    bytes * operations(self.hardware, Device::Cpu, quant)
                }
                Blocks::PerOperation(_, bytes) => cpu.threads as f64 * bytes,
            })
        } else {
            memory
        }
    }

    fn attention(self, model: &CostModel, layer: &PlacedLayer<'_>, pass: Pass) -> Cost {
        let kv_device = if self.engine.kv_on_cpu {
            Device::Cpu
        } else {
            layer.kv
        };
        let per_token = match self.engine.kv_number_bytes {
            Some(bytes) => (layer.kv_numbers as u64 * bytes) as f64,
            None => layer.kv_bytes,
        };
        let bytes = layer.attention_bytes as f64;
        model.attention(layer.attention, bytes, kv_device, pass.context * per_token)
    }

    fn ffn(
        self,
        model: &CostModel,
        placed: &Placed<'_>,
        layer: &PlacedLayer<'_>,
        pass: Pass,
    ) -> Cost {
        let neuron_bytes = layer.neuron_bytes as f64;
        let is_whole = pass.kind == Kind::Prompt && !self.engine.sparse_prompts;
        let mode = if is_whole {
            LayerMode {
                policy: Policy::Dense,
                prediction: ReadCost::default(),
                per_neuron: ReadCost::default(),
                per_active_neuron: ReadCost {
                    bytes: neuron_bytes,
                    ..ReadCost::default()
                },
            }
        } else {
            layer.mode
        };
        let (syncs, numbers) = match self.engine.merge {
            Merge::PerLayer => (1, 2 * placed.hidden_size),
            Merge::PerMatrix => (
                placed.matrices,
                placed.hidden_size + layer.frequencies.len(),
            ),
        };
        let ffn = Ffn {
            mode,
            device: layer.attention,
            // Other engines read whole experts.
            access: if is_whole
                || mode.per_neuron.bytes >= neuron_bytes
                || (!self.engine.counts_rows && mode.policy == Policy::Dense)
            {
                Access::Matrices
            } else {
                Access::Rows
            },
            syncs,
            sync_bytes: 4.0 * numbers as f64,
        };
        let (hot, cold) = layer.frequencies.split_at(layer.hot_count);
        if !is_whole {
            let [hot, cold] = [hot, cold].map(|frequencies| neurons(frequencies, pass.tokens));
            return model.prediction(&mode, layer.attention, layer.prediction)
                + model.ffn(&ffn, hot, cold);
        }
        let passes = self.engine.expert_passes;
        let gathers = pass.tokens >= passes.gathers_from;
        let cold = layer.whole(cold, pass.tokens, 1.0);
        let hot = if layer.selected < 1.0 && gathers {
            layer.whole(hot, pass.tokens, passes.tile)
        } else {
            all(hot.len())
        };
        let mut model = *model;
        if let Some((gpu, _)) = &mut model.gpu
            && layer.selected < 1.0
            && gathers
        {
            gpu.kernels[2] += passes.kernels * hot.read / layer.expert_neurons;
        }
        model.ffn(&ffn, hot, cold)
    }
}

impl PlacedLayer<'_> {
    /// Neurons with these frequencies, in a pass of `tokens` tokens that computes all neurons of the selected experts. With fewer than
    /// `tile` tokens, an expert takes as long as with `tile` tokens.
    fn whole(&self, frequencies: &[f64], tokens: f64, tile: f64) -> Neurons {
        let count = frequencies.len();
        if self.selected == 1.0 {
            return all(count);
        }
        let mut neurons = Neurons {
            count: count as f64,
            ..Neurons::default()
        };
        let mut add = |selected: f64, count: f64| {
            let read = 1.0 - (1.0 - selected).powi(tokens as i32);
            neurons.read += count * read;
            neurons.active += count * selected.max(read * tile / tokens);
        };
        match self.mode.policy {
            // The frequency of a neuron is that of its expert.
            Policy::Dense => frequencies.iter().for_each(|selected| add(*selected, 1.0)),
            _ => add(self.selected, count as f64),
        }
        neurons
    }
}

/// `count` neurons that are computed for every token.
fn all(count: usize) -> Neurons {
    let count = count as f64;
    Neurons {
        count,
        active: count,
        read: count,
    }
}

/// Neurons with these activation frequencies, in a pass of `tokens` independent tokens.
fn neurons(frequencies: &[f64], tokens: f64) -> Neurons {
    let active: f64 = frequencies.iter().sum();
    let read = match tokens as i32 {
        1 => active,
        tokens => frequencies
            .iter()
            .map(|f| 1.0 - (1.0 - f).powi(tokens))
            .sum(),
    };
    Neurons {
        count: frequencies.len() as f64,
        active,
        read,
    }
}

impl<'a> Placed<'a> {
    /// The model placed by `plan`, whose layers have the candidates `chosen`.
    pub(crate) fn new(
        plan: &Plan,
        problem: &Problem,
        config: &ModelConfig,
        quant: Format,
        chosen: &[&'a Candidate],
    ) -> Self {
        let kv_bytes = kv_bytes(config, BLOCK as u64, plan.budget.kv_cache) as f64 / BLOCK as f64;
        let experts = config.experts.as_ref();
        let selected = experts.map_or(1.0, Experts::selected_share);
        let expert_neurons = experts.map_or(config.ffn_size, |experts| experts.size) as f64;
        let layers = plan.layers.iter().zip(&problem.layers).zip(chosen);
        let layers = layers.map(|((plan, layer), chosen)| PlacedLayer {
            mode: chosen.mode,
            frequencies: &chosen.frequencies,
            hot_count: plan.hot_count,
            selected,
            expert_neurons,
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

    /// Share of the neurons on the GPU, and share of the activations of these neurons.
    pub(crate) fn hot(&self) -> [f64; 2] {
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

    /// Share of the weights that a token reads, attention and active neurons, on the GPU: the paper's neuron load, which
    /// counts the rows of every matrix as neurons.
    pub(crate) fn load_on_gpu(&self) -> f64 {
        let mut on_gpu = 0.0;
        let mut all = 0.0;
        for layer in &self.layers {
            let active = |frequencies: &[f64]| {
                let sum: f64 = frequencies.iter().sum();
                let neurons = LayerMode {
                    prediction: ReadCost::default(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_reads_each_expert_that_any_token_selects_and_computes_those_of_each() {
        // 100 neurons of experts that a token selects with probability 1/4, then 100 of experts that it rarely selects.
        let frequencies = [[0.25; 100], [0.01; 100]].concat();
        let layer = PlacedLayer {
            mode: LayerMode {
                policy: Policy::Dense,
                prediction: ReadCost::default(),
                per_neuron: ReadCost::default(),
                per_active_neuron: ReadCost::default(),
            },
            frequencies: &frequencies,
            hot_count: 0,
            selected: 0.13,
            expert_neurons: 20.0,
            neuron_bytes: 1,
            attention: Device::Cpu,
            attention_bytes: 0,
            prediction: Device::Cpu,
            kv: Device::Cpu,
            kv_numbers: 0,
            kv_bytes: 0.0,
        };
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} {b}");
        let one = layer.whole(&frequencies, 1.0, 1.0);
        near(one.active, 26.0);
        near(one.read, 26.0);
        // At least one of two tokens selects an expert with probability 1 − (3/4)², or 1 − 0.99² if it is rarely selected.
        let two = layer.whole(&frequencies, 2.0, 1.0);
        near(two.active, 26.0);
        near(two.read, 43.75 + 1.99);
        // Each of the first experts gets a quarter of 64 tokens, but takes as long as for a full tile of 64.
        let tiles = layer.whole(&frequencies[..100], 64.0, 64.0);
        near(tiles.active, 100.0 * (1.0 - 0.75f64.powi(64)));
        // With other policies, the frequencies are those of neurons, not of experts.
        let skipping = PlacedLayer {
            mode: LayerMode {
                policy: Policy::Threshold,
                ..layer.mode
            },
            ..layer
        };
        near(skipping.whole(&frequencies, 1.0, 1.0).read, 26.0);
        let dense = PlacedLayer {
            selected: 1.0,
            ..layer
        };
        assert_eq!(dense.whole(&frequencies, 512.0, 64.0), all(200));
    }
}
