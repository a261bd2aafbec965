//! The engines that are compared, as parameters of the cost model. The constants of an engine hold for every machine and
//! model; each has its source.

use powerinfer_artifact::{hardware::Hardware, plan::Device};
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
    /// Bytes of quantised blocks that a CPU thread processes per second at most, limited by its instructions.
    pub(crate) cpu_blocks_per_thread: f64,
    /// Share of the GPU's sustained bandwidth at which it reads.
    pub(crate) gpu_reads: fn(Format) -> f64,
    /// Seconds per GPU kernel in addition to its reading; `None` for the machine's value.
    pub(crate) gpu_kernel_seconds: Option<f64>,
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
    /// Whether prompts copy matrices from the CPU to the GPU if that is faster.
    pub(crate) ships_weights: bool,
    /// Whether prompts skip neurons as decoding does.
    pub(crate) sparse_prompts: bool,
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
    cpu_blocks_per_thread: f64::INFINITY,
    gpu_reads: |_| 1.0,
    gpu_kernel_seconds: None,
    sync_seconds: None,
    kernels: [GPU_KERNELS, CPU_KERNELS],
    counts_rows: true,
    merge: Merge::PerLayer,
    kv_number_bytes: None,
    kv_on_cpu: false,
    ships_weights: false,
    sparse_prompts: false,
};

/// PowerInfer as its paper describes and measures it (arXiv 2312.12456v2).
pub(crate) const ORIGINAL: Engine = Engine {
    name: "PowerInfer (2024)",
    // Attention and predictors are llama.cpp's kernels (section 7).
    cpu_matrices: LLAMA_CPP.cpu_matrices,
    // Model card of ReluLLaMA-7B: on the CPU of PC-High alone 193 ms per token dense and 122 ms with
    // 70% zeros. The dense parts take 79 ms of these; in the rest, active neurons are read at 0.86 of
    // the speed of whole matrices.
    cpu_rows: |_| 0.86,
    cpu_kv: LLAMA_CPP.cpu_kv,
    cpu_blocks_per_thread: LLAMA_CPP.cpu_blocks_per_thread,
    gpu_reads: LLAMA_CPP.gpu_reads,
    gpu_kernel_seconds: LLAMA_CPP.gpu_kernel_seconds,
    // Assumed; with `cpu_kv` the only figure without a source. The CPU waits for the GPU's stream and a
    // small copy (20 µs), wakes eight threads and joins them at a barrier (20 µs), copies the result back
    // (20 µs), and launches eight kernels of 5 µs, which the wait keeps from being queued ahead.
    sync_seconds: Some(100e-6),
    kernels: LLAMA_CPP.kernels,
    counts_rows: false,
    // Three sparse operators per gated FFN, each in two halves and an addition (source code).
    merge: Merge::PerMatrix,
    kv_number_bytes: LLAMA_CPP.kv_number_bytes,
    // "The KV cache continues to reside in CPU memory" (section 7).
    kv_on_cpu: true,
    ships_weights: true,
    sparse_prompts: true,
};

/// llama.cpp at the time of the paper: whole layers on the GPU, with their KV cache.
pub(crate) const LLAMA_CPP: Engine = Engine {
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
    cpu_blocks_per_thread: 6.3e9,
    // github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference, December 2023: LLaMA-2-7B on an RTX 4090
    // decodes 60.78 tokens/s in F16 and 149.37 in Q4_0: 81% and 56% of 1008 GB/s, launches included.
    // 80% counts as sustained.
    gpu_reads: |format| match format {
        Format::F32 | Format::F16 | Format::Bf16 => 1.0,
        Format::Q8_0 | Format::Q4K | Format::Q4_0 => 0.7,
    },
    gpu_kernel_seconds: Some(0.0),
    sync_seconds: None,
    kernels: [[0.0; 3]; 2],
    counts_rows: false,
    merge: Merge::PerLayer,
    kv_number_bytes: Some(LLAMA_CPP_KV_NUMBER_BYTES),
    kv_on_cpu: false,
    ships_weights: true,
    sparse_prompts: false,
};

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
