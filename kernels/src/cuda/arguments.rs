//! Kernel arguments: the structures of `kernels/cuda`, field by field, with explicit padding.

use bytemuck::{Pod, Zeroable};

/// `Norm` in `input.cuh`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Norm {
    pub(super) weight: u64,
    pub(super) bias: u64,
    pub(super) epsilon: f32,
    pub(super) kind: i32,
}

/// `Matrix` in `matrix.cuh`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Matrix {
    pub(super) quants: u64,
    pub(super) scales: u64,
    pub(super) factors: u64,
    pub(super) rows: i32,
    pub(super) columns: i32,
}

/// `Segment` in `projection.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Segment {
    pub(super) matrix: Matrix,
    pub(super) bias: u64,
    pub(super) out: u64,
}

/// `Projection` in `projection.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Projection {
    pub(super) x: u64,
    pub(super) norm: Norm,
    pub(super) segments: [Segment; 3],
    pub(super) segment_count: i32,
    pub(super) int8: i32,
    pub(super) accumulate: i32,
    pub(super) tokens: i32,
    pub(super) tokens_at_once: i32,
    pub(super) padding: i32,
    pub(super) rounded: u64,
    pub(super) host_input: u64,
}

/// `NormInPlace` in `projection.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct NormInPlace {
    pub(super) x: u64,
    pub(super) columns: i32,
    pub(super) padding: i32,
    pub(super) norm: Norm,
}

/// `ArgMax` in `projection.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ArgMax {
    pub(super) x: u64,
    pub(super) count: i32,
    pub(super) padding: i32,
    pub(super) largest: u64,
    pub(super) indices: u64,
    pub(super) counter: u64,
    pub(super) out: u64,
}

/// `Embed` in `projection.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Embed {
    pub(super) table: Matrix,
    pub(super) token: u64,
    pub(super) scale: f32,
    pub(super) padding: i32,
    pub(super) out: u64,
}

/// `Attention` in `attention.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Attention {
    pub(super) query: u64,
    pub(super) key: u64,
    pub(super) value: u64,
    pub(super) query_norm: Norm,
    pub(super) key_norm: Norm,
    pub(super) sin_cos: u64,
    pub(super) pairs: i32,
    pub(super) padding: i32,
    pub(super) alibi_slopes: u64,
    pub(super) sinks: u64,
    pub(super) cache: u64,
    pub(super) cache_stride: i32,
    pub(super) heads: i32,
    pub(super) kv_heads: i32,
    pub(super) head_size: i32,
    pub(super) window: i32,
    pub(super) is_stored: i32,
    pub(super) position: u64,
    pub(super) scale: f32,
    pub(super) last_padding: i32,
    pub(super) partial: u64,
    pub(super) counters: u64,
    pub(super) out: u64,
    pub(super) tokens: i32,
    pub(super) end_padding: i32,
}

/// `Masks` in `masks.cuh`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Masks {
    pub(super) device: u64,
    pub(super) host: u64,
    pub(super) activations: u64,
    pub(super) hot_count: i32,
    pub(super) padding: i32,
}

/// `Predict` in `feed_forward.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Predict {
    pub(super) units: u64,
    pub(super) b: Matrix,
    pub(super) b_scales: u64,
    pub(super) bias: u64,
    pub(super) threshold: f32,
    pub(super) is_linear: i32,
    pub(super) masks: Masks,
}

/// `PredictBySigns` in `feed_forward.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct PredictBySigns {
    pub(super) x: u64,
    pub(super) norm: Norm,
    pub(super) signs: u64,
    pub(super) neurons: i32,
    pub(super) columns: i32,
    pub(super) min_agreements: i32,
    pub(super) padding: i32,
    pub(super) masks: Masks,
}

/// `Route` in `route.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Route {
    pub(super) logits: u64,
    pub(super) shared_logits: u64,
    pub(super) blocks: u64,
    pub(super) weights: u64,
    pub(super) host_weights: u64,
    pub(super) biases: u64,
    pub(super) bias_sums: u64,
    pub(super) experts: i32,
    pub(super) block_count: i32,
    pub(super) per_token: i32,
    pub(super) is_sigmoid: i32,
    pub(super) sums_all: i32,
    pub(super) neurons: i32,
    pub(super) intersects: i32,
    pub(super) hidden: i32,
    pub(super) scale: f32,
    pub(super) shared_weight: f32,
    pub(super) masks: Masks,
}

/// `Neurons` in `neurons.cuh`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Neurons {
    pub(super) kind: i32,
    pub(super) activation: i32,
    pub(super) bound: f32,
    pub(super) filter: i32,
    pub(super) threshold: f32,
    pub(super) padding: i32,
    pub(super) gate_scale: u64,
    pub(super) contribution_scale: u64,
    pub(super) centre: u64,
    pub(super) weights: u64,
    pub(super) blocks: u64,
    pub(super) block_count: i32,
    pub(super) last_padding: i32,
}

/// `GateUp` in `feed_forward.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct GateUp {
    pub(super) x: u64,
    pub(super) norm: Norm,
    pub(super) gate: Matrix,
    pub(super) gate_bias: u64,
    pub(super) up: Matrix,
    pub(super) up_bias: u64,
    pub(super) ffn: Neurons,
    pub(super) mask: u64,
    pub(super) mask_words: i32,
    pub(super) hot_count: i32,
    pub(super) activations: u64,
    pub(super) int8: i32,
    pub(super) tokens: i32,
    pub(super) rounded: u64,
    pub(super) host_input: u64,
    pub(super) flag: u64,
    pub(super) step: u64,
    pub(super) gate_rows: u64,
    pub(super) union_rows: u64,
}

/// `Down` in `feed_forward.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Down {
    pub(super) down: Matrix,
    pub(super) activations: u64,
    pub(super) hot_count: i32,
    pub(super) bias_stride: i32,
    pub(super) partial: u64,
    pub(super) counters: u64,
    pub(super) bias: u64,
    pub(super) offset: u64,
    pub(super) cold: u64,
    pub(super) flag: u64,
    pub(super) step: u64,
    pub(super) timed_out: u64,
    pub(super) timeout_nanoseconds: u64,
    pub(super) hidden: u64,
    pub(super) down_rows: u64,
}

/// `F16Buffer` in `prompt.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct F16Buffer {
    pub(super) values: u64,
    pub(super) scales: u64,
    pub(super) tokens: i32,
    pub(super) stride: i32,
    pub(super) terms: i32,
    pub(super) padding: i32,
}

/// `ToF16` in `prompt.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ToF16 {
    pub(super) x: u64,
    pub(super) columns: i32,
    pub(super) padding: i32,
    pub(super) norm: Norm,
    pub(super) out: F16Buffer,
    pub(super) host_input: u64,
}

/// `ActivateGateUp` in `prompt.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ActivateGateUp {
    pub(super) ffn: Neurons,
    pub(super) gate: u64,
    pub(super) up: u64,
    pub(super) tokens: u64,
    pub(super) mask: u64,
    pub(super) mask_words: i32,
    pub(super) first_neuron: i32,
    pub(super) count: i32,
    pub(super) padding: i32,
    pub(super) out: F16Buffer,
    pub(super) down_rows: u64,
}

/// `GatherTokens` in `prompt.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct GatherTokens {
    pub(super) x: F16Buffer,
    pub(super) tokens: u64,
    pub(super) out: F16Buffer,
}

/// `ScatterTokens` in `prompt.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ScatterTokens {
    pub(super) x: u64,
    pub(super) tokens: u64,
    pub(super) columns: i32,
    pub(super) padding: i32,
    pub(super) out: u64,
}

/// `Gemm` in `prompt.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Gemm {
    pub(super) matrix: Matrix,
    pub(super) x: F16Buffer,
    pub(super) bias: u64,
    pub(super) offset: u64,
    pub(super) cold: u64,
    pub(super) out: u64,
    pub(super) accumulate: i32,
    pub(super) bias_stride: i32,
    pub(super) partial: u64,
    pub(super) counters: u64,
}

/// `SignalHost` in `prompt.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct SignalHost {
    pub(super) flag: u64,
    pub(super) step: u64,
}

/// Number of windows of preceding tokens over which reuse of active neurons is counted.
pub const WINDOWS: usize = 3;

/// `Observe` in `observe.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Observe {
    pub(super) activations: u64,
    pub(super) tokens: i32,
    pub(super) neurons: i32,
    pub(super) preceding: i32,
    pub(super) windows: [i32; WINDOWS],
    pub(super) active_tokens: u64,
    pub(super) magnitude: u64,
    pub(super) history: u64,
    pub(super) reuse: u64,
    pub(super) not_finite: u64,
}
