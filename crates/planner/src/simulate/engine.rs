//! The engines that are compared, as far as their time depends on them. Every constant is that of an
//! engine on any machine and for any model, and says where it is from.

use powerinfer_artifact::{hardware::Hardware, plan::Device};
use powerinfer_solver::cost::{CPU_KERNELS, GPU_KERNELS};
use powerinfer_tensor::Format;

/// An engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Engine {
    /// What it is called.
    pub(crate) name: &'static str,
    /// Share of the machine's sustained bandwidth that whole matrices are read at on the CPU.
    pub(crate) cpu_matrices: fn(Format) -> f64,
    /// The same where rows are picked.
    pub(crate) cpu_rows: fn(Format) -> f64,
    /// The same of the KV cache on the CPU.
    pub(crate) cpu_kv: f64,
    /// No thread of the CPU gets through more bytes of blocks of four or eight bits per second: the
    /// instructions take that long.
    pub(crate) cpu_blocks_per_thread: f64,
    /// Share of the machine's sustained bandwidth that the GPU reads at.
    pub(crate) gpu_reads: fn(Format) -> f64,
    /// What a kernel takes on the GPU beside its reading, where it is not what the machine says.
    pub(crate) gpu_kernel_seconds: Option<f64>,
    /// What handing over takes beside its bytes, where it is not what the machine says.
    pub(crate) sync_seconds: Option<f64>,
    /// Kernels of attention, of prediction, and of the FFN, on the GPU and on the CPU.
    pub(crate) kernels: [[f64; 3]; 2],
    /// Whether the CPU's rows and kernels cost what the machine says beside their bytes; else
    /// that is in the shares above.
    pub(crate) counts_rows: bool,
    /// How the results of a split FFN come together.
    pub(crate) merge: Merge,
    /// Bytes of a number in the KV cache; none where the plan says how it is stored.
    pub(crate) kv_number_bytes: Option<u64>,
    /// Whether the KV cache stays on the CPU, wherever attention is.
    pub(crate) kv_on_cpu: bool,
    /// Whether matrices of the CPU are sent to the GPU for a prompt where that is quicker.
    pub(crate) ships_weights: bool,
    /// Whether a prompt leaves neurons out as a step does.
    pub(crate) sparse_prompts: bool,
}

/// How the results of a split FFN come together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Merge {
    /// Once per layer, as a hidden state.
    PerLayer,
    /// After every matrix, as a number per neuron.
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

/// This project's engine. The solver's own costs, so that a step is what a plan says.
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
    // 70 % zeros. Of these 79 ms are for what is dense; in the others active neurons are read at
    // 0.86 of the speed of whole matrices.
    cpu_rows: |_| 0.86,
    cpu_kv: LLAMA_CPP.cpu_kv,
    cpu_blocks_per_thread: LLAMA_CPP.cpu_blocks_per_thread,
    gpu_reads: LLAMA_CPP.gpu_reads,
    gpu_kernel_seconds: LLAMA_CPP.gpu_kernel_seconds,
    // Assumed, with the cache's half below the only figures here without a source: a wait of the CPU for the GPU's
    // stream and a small copy (20 µs), waking eight threads and their barrier (20 µs), the copy back
    // (20 µs), and launches of the kernels around it, which a wait no longer hides (8 of 5 µs).
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

/// llama.cpp of the paper's time: whole layers on the GPU, their KV cache with them.
pub(crate) const LLAMA_CPP: Engine = Engine {
    name: "llama.cpp",
    // The authors' model cards have dense models at 70 to 72 GB/s on the CPU of PC-High, whose 67.2
    // is taken for sustained; section 2.2 has OPT-30B at 64.4.
    cpu_matrices: |_| 1.0,
    cpu_rows: |_| 1.0,
    // Assumed: a head's 256 bytes at a time, with the other heads' between them, come at half the
    // speed of what lies in one piece.
    cpu_kv: 0.5,
    // TurboSparse (arXiv 2406.05955), PC-Laptop: dense Mixtral-47B in INT4 makes 6.91 tokens/s of
    // 12.9 billion parameters each, 50 GB/s where 16 bits come at 60, on eight performance cores.
    cpu_blocks_per_thread: 6.3e9,
    // github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference, December 2023: LLaMA-2-7B on an RTX 4090
    // makes 60.78 tokens/s in F16 and 149.37 in Q4_0, 81 % and 56 % of 1008 GB/s with all
    // launches, where 80 % counts as sustained.
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

/// Tokens of a prompt that llama.cpp makes room for at once on the GPU.
pub(crate) const LLAMA_CPP_BATCH: u64 = 512;

/// Of the products that a CPU reaches, what is left where rows are picked for each token: every one of its weights is loaded
/// and converted anew for every token.
pub(crate) const PICKED_PRODUCTS: f64 = 0.25;

/// Operations per second, a multiplication and an addition being two, that products of large
/// matrices reach on `device`: as the machine says, or else half of what is usual for its kind.
pub(crate) fn operations(hardware: &Hardware, device: Device) -> f64 {
    match (device, &hardware.gpu) {
        (Device::Gpu, Some(gpu)) => {
            // Cards have tensor cores for some 120 operations a byte that they read.
            let usual = 0.5 * 120.0 * gpu.read_bandwidth_bytes_per_second;
            gpu.operations_per_second.unwrap_or(usual)
        }
        _ => {
            // Two units of eight lanes a core, a multiplication and an addition each, at 5 GHz.
            let usual = 0.5 * hardware.cpu.threads as f64 * 5e9 * 32.0;
            hardware.cpu.operations_per_second.unwrap_or(usual)
        }
    }
}
