//! The engines that are compared, as parameters of the cost model. The constants of an engine hold for every machine and
//! model; each has its source.

use powerinfer_artifact::{
    hardware::{EngineRates, Hardware},
    plan::{Device, Plan},
};
use powerinfer_model::ModelConfig;
use powerinfer_runtime::memory::{PREFILL_BATCH, prompt_tokens};
use powerinfer_solver::cost::{CPU_KERNELS, GPU_KERNELS};
use powerinfer_tensor::Format;

/// An engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Engine {
    /// Name for reports.
    pub(crate) name: &'static str,
    /// Share of the CPU's sustained bandwidth at which whole matrices are read.
    pub(crate) cpu_matrices: fn(Format) -> f64,
    /// The same for selected rows.
    pub(crate) cpu_rows: fn(Format) -> f64,
    /// The same for the KV cache.
    pub(crate) cpu_kv: f64,
    /// Limit on the quantised blocks that a CPU thread processes.
    pub(crate) cpu_blocks: Blocks,
    /// Share of the GPU's sustained bandwidth at which it reads.
    pub(crate) gpu_reads: fn(Format) -> f64,
    /// Efficiency of its passes relative to the machine's rates.
    pub(crate) rates: EngineRates,
    /// Seconds per synchronisation in addition to its bytes; `None` for the machine's value.
    pub(crate) sync_seconds: Option<f64>,
    /// Kernels of attention, of prediction, and of the FFN, on the GPU and on the CPU.
    pub(crate) kernels: [[f64; 3]; 2],
    /// Whether rows and kernels of the CPU take time in addition to their bytes; if not, the shares above include it.
    pub(crate) counts_rows: bool,
    /// How the partial results of a split FFN are merged.
    pub(crate) merge: Merge,
    /// Bytes of a number in the KV cache; `None` for the format in the plan.
    pub(crate) kv_number_bytes: Option<u64>,
    /// Whether the KV cache is always on the CPU.
    pub(crate) kv_on_cpu: bool,
    /// Weights that prompts copy from the CPU to the GPU if that is faster.
    pub(crate) streams: Streams,
    /// Prompt tokens per pass.
    pub(crate) prompt_batch: usize,
    /// Whether prompts skip neurons as decoding does.
    pub(crate) sparse_prompts: bool,
    /// How the GPU multiplies the experts of a mixture with the tokens of a prompt.
    pub(crate) expert_passes: ExpertPasses,
}

/// How a GPU multiplies the experts of a mixture with the tokens of a prompt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertPasses {
    /// Minimum number of tokens for which each expert is multiplied only with the tokens that select it, instead of with all tokens.
    pub(crate) gathers_from: f64,
    /// Kernels launched per expert, in addition to those of the FFN.
    pub(crate) kernels: f64,
    /// Tokens per tile. With fewer tokens, an expert takes as long as with a full tile.
    pub(crate) tile: f64,
    /// Maximum number of remaining prompt tokens that run in small batches, as in decoding, if the GPU has most of the experts.
    pub(crate) few: usize,
}

/// All experts share the same kernels, and tiles are not padded.
const GROUPED: ExpertPasses = ExpertPasses {
    gathers_from: 1.0,
    kernels: 0.0,
    tile: 1.0,
    few: 0,
};

/// Limit on the bytes of quantised blocks that a CPU thread processes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Blocks {
    /// The machine's rates are the limit.
    Unlimited,
    /// This number of bytes.
    Bytes(f64),
    /// Bytes per operation, times the operations per second that a thread reaches in large products of quantised
    /// matrices. If that rate was not measured, the second value, in bytes per second: nominal rates count other
    /// operations.
    PerOperation(f64, f64),
}

/// Weights that a prompt copies from the CPU to the GPU if that is faster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Streams {
    /// Neurons.
    Neurons,
    /// Neurons, and the projections of attention.
    All,
}

/// How the partial results of a split FFN are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Merge {
    /// Once per layer, as a hidden state.
    PerLayer,
    /// After every matrix, as one number per neuron.
    PerMatrix,
}

impl Engine {
    /// This engine with the prefill batch of `plan` for a model with configuration `config`.
    pub(crate) fn of_plan(plan: &Plan, config: &ModelConfig) -> Self {
        Self {
            prompt_batch: if plan.uses_gpu() {
                plan.prompt_batch
            } else {
                prompt_tokens(config)
            },
            streams: if plan.prompt_batch > PREFILL_BATCH {
                Streams::All
            } else {
                Streams::Neurons
            },
            ..OURS
        }
    }

    /// Kernels of attention, of prediction, and of the FFN, on `device`.
    pub(crate) fn kernels(&self, device: Device) -> [f64; 3] {
        let [gpu, cpu] = self.kernels;
        match device {
            Device::Gpu => gpu,
            Device::Cpu => cpu,
        }
    }
}

/// This engine, with the solver's costs, so that a decode step takes the time in the plan.
pub(crate) const OURS: Engine = Engine {
    name: "this engine",
    cpu_matrices: |_| 1.0,
    cpu_rows: |_| 1.0,
    cpu_kv: 1.0,
    cpu_blocks: Blocks::Unlimited,
    gpu_reads: |_| 1.0,
    rates: EngineRates::CURRENT,
    sync_seconds: None,
    kernels: [GPU_KERNELS, CPU_KERNELS],
    counts_rows: true,
    merge: Merge::PerLayer,
    kv_number_bytes: None,
    kv_on_cpu: false,
    streams: Streams::Neurons,
    prompt_batch: PREFILL_BATCH,
    sparse_prompts: false,
    // Kernels per expert: gathering, clearing, gate, up, activation, two for `down`, and scattering.
    expert_passes: ExpertPasses {
        gathers_from: PREFILL_BATCH as f64 + 1.0,
        kernels: 8.0,
        tile: 64.0,
        few: PREFILL_BATCH,
    },
};

/// PowerInfer as its paper describes and measures it (arXiv 2312.12456v2).
pub(crate) const ORIGINAL: Engine = Engine {
    name: "PowerInfer (2024)",
    // Attention and predictors are llama.cpp's kernels (section 7).
    cpu_matrices: LLAMA_CPP_2023.cpu_matrices,
    // Model card of ReluLLaMA-7B: on the CPU of PC-High alone 193 ms per token dense and 122 ms with
    // 70% zeros. The dense parts take 79 ms of these; in the rest, active neurons are read at 0.86 of
    // the speed of whole matrices.
    cpu_rows: |_| 0.86,
    cpu_kv: LLAMA_CPP_2023.cpu_kv,
    cpu_blocks: LLAMA_CPP_2023.cpu_blocks,
    gpu_reads: LLAMA_CPP_2023.gpu_reads,
    rates: LLAMA_CPP_2023.rates,
    // Assumed; with `cpu_kv` the only figure without a source. The CPU waits for the GPU's stream and a
    // small copy (20 µs), wakes eight threads and joins them at a barrier (20 µs), copies the result back
    // (20 µs), and launches eight kernels of 5 µs, which the wait keeps from being queued ahead.
    sync_seconds: Some(100e-6),
    kernels: LLAMA_CPP_2023.kernels,
    counts_rows: false,
    // Three sparse operators per gated FFN, each in two halves and an addition (source code).
    merge: Merge::PerMatrix,
    kv_number_bytes: LLAMA_CPP_2023.kv_number_bytes,
    // "The KV cache continues to reside in CPU memory" (section 7).
    kv_on_cpu: true,
    streams: Streams::All,
    prompt_batch: LLAMA_CPP_2023.prompt_batch,
    sparse_prompts: true,
    expert_passes: GROUPED,
};

/// llama.cpp at the time of the paper: whole layers on the GPU, with their KV cache.
pub(crate) const LLAMA_CPP_2023: Engine = Engine {
    name: "llama.cpp",
    // Dense models reach 70 to 72 GB/s on the CPU of PC-High in the authors' model cards, and OPT-30B
    // 64.4 in section 2.2; its 67.2 GB/s count as sustained.
    cpu_matrices: |_| 1.0,
    cpu_rows: |_| 1.0,
    // Assumed: 256 bytes of a head, interleaved with those of other heads, are read at half the speed of
    // contiguous memory.
    cpu_kv: 0.5,
    // TurboSparse (arXiv 2406.05955), PC-Laptop: dense Mixtral-47B in INT4 decodes 6.91 tokens/s of 12.9
    // billion parameters each on eight performance cores: 50 GB/s, where 16 bits reach 60.
    cpu_blocks: Blocks::Bytes(LLAMA_CPP_2023_BLOCKS),
    // github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference, December 2023: LLaMA-2-7B on an RTX 4090
    // decodes 60.78 tokens/s in F16 and 149.37 in Q4_0: 81% and 56% of 1008 GB/s, launches included.
    // 80% counts as sustained.
    gpu_reads: |format| match format {
        Format::F32 | Format::F16 | Format::Bf16 => 1.0,
        Format::Q8_0 | Format::Q4K | Format::Q4_0 => 0.7,
    },
    // The shares above include the launches.
    rates: EngineRates::IDEAL,
    sync_seconds: None,
    kernels: [[0.0; 3]; 2],
    counts_rows: false,
    merge: Merge::PerLayer,
    kv_number_bytes: Some(LLAMA_CPP_KV_NUMBER_BYTES),
    kv_on_cpu: false,
    streams: Streams::All,
    prompt_batch: LLAMA_CPP_BATCH as usize,
    sparse_prompts: false,
    expert_passes: GROUPED,
};

/// llama.cpp in November 2026 (0c1e570), fitted to measurements on an NVIDIA H200 and 16 virtual cores of an Intel Xeon;
/// `docs/reports/simulator.md` compares them.
pub(crate) const LLAMA_CPP: Engine = Engine {
    // On the Xeon, a thread processes 3.6 to 5 GB/s of blocks, and 45 billion operations per second in large products.
    cpu_blocks: Blocks::PerOperation(0.088, LLAMA_CPP_2023_BLOCKS),
    gpu_reads: |format| match format {
        Format::F32 | Format::F16 | Format::Bf16 => 1.0,
        Format::Q8_0 | Format::Q4K | Format::Q4_0 => 0.95,
    },
    rates: EngineRates {
        // Of all kernels of a layer together; 7B and 70B shapes differ little.
        gpu_kernel_seconds: 50e-6,
        gpu_token_seconds: 150e-6,
        products: [0.3, 0.27],
        // From a mapped file, whose pages are not pinned.
        link: 0.11,
        ..EngineRates::IDEAL
    },
    kernels: [[1.0, 0.0, 0.0], [0.0; 3]],
    ..LLAMA_CPP_2023
};

const LLAMA_CPP_2023_BLOCKS: f64 = 6.3e9;

/// Bytes of a number in llama.cpp's KV cache: F16, its default.
pub(crate) const LLAMA_CPP_KV_NUMBER_BYTES: u64 = 2;

/// Prompt tokens per batch of llama.cpp, for which it reserves memory on the GPU.
pub(crate) const LLAMA_CPP_BATCH: u64 = 512;

/// Share of a CPU's operations per second that remains if rows are selected per token: each weight is loaded and
/// converted again for every token.
pub(crate) const PICKED_PRODUCTS: f64 = 0.25;

/// Operations per second of large matrix products on `device` with weights in `format`; a multiplication and an addition are two. Without a value
/// of the machine, half of the usual peak.
pub(crate) fn operations(hardware: &Hardware, device: Device, format: Format) -> f64 {
    match (device, &hardware.gpu) {
        (Device::Gpu, Some(gpu)) => {
            // Tensor cores have a peak of about 120 operations per byte of memory bandwidth.
            let usual = 0.5 * 120.0 * gpu.read_bandwidth_bytes_per_second;
            gpu.operations_per_second.unwrap_or(usual)
        }
        _ => {
            // Two FMA units of eight lanes per core, at 5 GHz.
            let usual = 0.5 * hardware.cpu.threads as f64 * 5e9 * 32.0;
            hardware
                .cpu
                .gemm_operations_per_second(format)
                .unwrap_or(usual)
        }
    }
}
