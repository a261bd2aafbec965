//! The engines that are compared, as far as their time depends on them. Every constant is that of an
//! engine on any machine and for any model, and says where it is from.

use powerinfer_artifact::{hardware::Hardware, plan::Device};
use powerinfer_kernels::Format;

/// An engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Engine {
    /// What it is called.
    pub(crate) name: &'static str,
    /// Share of the machine's sustained bandwidth that whole matrices are read at on the CPU.
    pub(crate) cpu_matrices: fn(Format) -> f64,
    /// The same where rows are picked.
    pub(crate) cpu_rows: fn(Format) -> f64,
    /// The same on the GPU, for both.
    pub(crate) gpu_reads: f64,
    /// What a kernel takes on the GPU beside its reading, where it is not what the machine says.
    pub(crate) gpu_kernel_seconds: Option<f64>,
    /// Kernels of attention, of foreseeing, and of the FFN.
    pub(crate) kernels: [f64; 3],
    /// Whether the CPU's rows and kernels cost what the machine says beside their bytes; else
    /// that is in the shares above.
    pub(crate) counts_rows: bool,
    /// How the results of a split FFN come together.
    pub(crate) merge: Merge,
    /// Bytes of a number in the KV cache.
    pub(crate) kv_number_bytes: u64,
    /// Whether the KV cache stays on the CPU, wherever attention is.
    pub(crate) kv_on_cpu: bool,
    /// Whether weights of the CPU are sent to the GPU for a prompt where that is quicker.
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

/// This project's engine. The solver's own costs, so that a step is what a plan says.
pub(crate) const OURS: Engine = Engine {
    name: "this engine",
    cpu_matrices: |_| 1.0,
    cpu_rows: |_| 1.0,
    gpu_reads: 1.0,
    gpu_kernel_seconds: None,
    kernels: [3.0, 2.0, 2.0],
    counts_rows: true,
    merge: Merge::PerLayer,
    kv_number_bytes: 4,
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
    cpu_rows: |format| 0.86 * (LLAMA_CPP.cpu_matrices)(format),
    gpu_reads: 1.0,
    gpu_kernel_seconds: LLAMA_CPP.gpu_kernel_seconds,
    kernels: LLAMA_CPP.kernels,
    counts_rows: false,
    // Three sparse operators per gated FFN, each in two halves and an addition (source code).
    merge: Merge::PerMatrix,
    kv_number_bytes: 2,
    // "The KV cache continues to reside in CPU memory" (section 7).
    kv_on_cpu: true,
    ships_weights: true,
    sparse_prompts: true,
};

/// llama.cpp of the paper's time: whole layers on the GPU, their KV cache with them.
pub(crate) const LLAMA_CPP: Engine = Engine {
    name: "llama.cpp",
    // 16 bits: the authors' model cards have dense models at 70 to 72 GB/s on the CPU of PC-High,
    // whose 67.2 is taken for sustained; section 2.2 has OPT-30B at 64.4. Blocks of four and eight
    // bits take more instructions for a byte: on our machine llama.cpp reads them at 0.6 to 0.8 of
    // what it reads 16 bits at.
    cpu_matrices: |format| match format {
        Format::F32 | Format::Bf16 => 1.0,
        Format::Q8_0 | Format::Q4_0 => 0.8,
    },
    cpu_rows: |format| (LLAMA_CPP.cpu_matrices)(format),
    gpu_reads: 1.0,
    // A launch on a stream without a graph, as in engines of 2023: about 5 µs.
    gpu_kernel_seconds: Some(5e-6),
    // Nodes of its graph per layer: norm, three products, two rotations, two copies to the cache,
    // scores, softmax, values, product, addition; predictor: two products and an activation; norm,
    // two or three products, activation, multiplication, addition.
    kernels: [13.0, 3.0, 7.0],
    counts_rows: false,
    merge: Merge::PerLayer,
    kv_number_bytes: 2,
    kv_on_cpu: false,
    ships_weights: true,
    sparse_prompts: false,
};

/// Share of the peak that products of large matrices reach.
const GPU_PRODUCTS: f64 = 0.5;
const CPU_PRODUCTS: f64 = 0.5;

/// Operations per second, a multiplication and an addition being two, that products of large
/// matrices reach on `device`.
pub(crate) fn operations(hardware: &Hardware, device: Device) -> f64 {
    match (device, &hardware.gpu) {
        (Device::Gpu, Some(gpu)) => {
            // Datasheets: 16-bit products summed in 32 bits by tensor cores, without sparsity.
            let peak = [
                ("5090", 209.5e12),
                ("4090", 165.2e12),
                ("4060", 60.6e12),
                ("3060", 51.2e12),
                ("2080 Ti", 53.8e12),
                ("H200", 989.4e12),
            ];
            let known = peak.iter().find(|(name, _)| gpu.name.contains(name));
            // Others have about this many for every byte that they read.
            let peak = known.map_or(120.0 * gpu.read_bandwidth_bytes_per_second, |(_, peak)| *peak);
            GPU_PRODUCTS * peak
        }
        // Two units of eight lanes a core, a multiplication and an addition each, at 5 GHz.
        _ => CPU_PRODUCTS * hardware.cpu.threads as f64 * 5e9 * 32.0,
    }
}
