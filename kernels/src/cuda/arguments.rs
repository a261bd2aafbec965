//! Arguments of kernels, as the sources in `kernels/cuda` declare them: word for word the same.

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
    pub(super) rounded: i32,
    pub(super) add: i32,
    pub(super) padding: i32,
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
    pub(super) places: u64,
    pub(super) counter: u64,
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
    pub(super) rotations: u64,
    pub(super) pairs: i32,
    pub(super) padding: i32,
    pub(super) slopes: u64,
    pub(super) keys: u64,
    pub(super) values: u64,
    pub(super) heads: i32,
    pub(super) kv_heads: i32,
    pub(super) head_size: i32,
    pub(super) context: i32,
    pub(super) window: i32,
    pub(super) appended: i32,
    pub(super) position: u64,
    pub(super) scale: f32,
    pub(super) last_padding: i32,
    pub(super) partial: u64,
    pub(super) counters: u64,
    pub(super) out: u64,
}

/// `Masks` in `feed_forward.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Masks {
    pub(super) all: u64,
    pub(super) for_host: u64,
    pub(super) products: u64,
    pub(super) hot_count: i32,
    pub(super) padding: i32,
}

/// `Predict` in `feed_forward.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Predict {
    pub(super) middle: u64,
    pub(super) units: Matrix,
    pub(super) scales: u64,
    pub(super) bias: u64,
    pub(super) threshold: f32,
    pub(super) padding: i32,
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
    pub(super) agreements: i32,
    pub(super) padding: i32,
    pub(super) masks: Masks,
}

/// `Neurons` in `neurons.cuh`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Neurons {
    pub(super) kind: i32,
    pub(super) activation: i32,
    pub(super) fat_threshold: f32,
    pub(super) rule: i32,
    pub(super) threshold: f32,
    pub(super) padding: i32,
    pub(super) gate_scale: u64,
    pub(super) contribution_scale: u64,
    pub(super) centre: u64,
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
    pub(super) neurons: Neurons,
    pub(super) mask: u64,
    pub(super) hot_count: i32,
    pub(super) more_padding: i32,
    pub(super) products: u64,
    pub(super) rounded: i32,
    pub(super) last_padding: i32,
    pub(super) for_host: u64,
    pub(super) flag: u64,
    pub(super) step: u64,
    pub(super) evaluated: u64,
}

/// `Down` in `feed_forward.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Down {
    pub(super) down: Matrix,
    pub(super) products: u64,
    pub(super) hot_count: i32,
    pub(super) padding: i32,
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
    pub(super) computed: u64,
}

/// `F16Buffer` in `prompt.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct F16Buffer {
    pub(super) numbers: u64,
    pub(super) scales: u64,
    pub(super) tokens: i32,
    pub(super) padded: i32,
    pub(super) parts: i32,
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
    pub(super) to: F16Buffer,
    pub(super) for_host: u64,
}

/// `ActivateGateUp` in `prompt.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ActivateGateUp {
    pub(super) neurons: Neurons,
    pub(super) gate: u64,
    pub(super) up: u64,
    pub(super) mask: u64,
    pub(super) words: i32,
    pub(super) first: i32,
    pub(super) count: i32,
    pub(super) padding: i32,
    pub(super) to: F16Buffer,
    pub(super) computed: u64,
}

/// `Gemm` in `prompt.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Gemm {
    pub(super) matrix: Matrix,
    pub(super) x: F16Buffer,
    pub(super) bias: u64,
    pub(super) offset: u64,
    pub(super) beside: u64,
    pub(super) out: u64,
    pub(super) add: i32,
    pub(super) padding: i32,
}

/// `SignalHost` in `prompt.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct SignalHost {
    pub(super) flag: u64,
    pub(super) step: u64,
}

/// `Observe` in `observe.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Observe {
    pub(super) products: u64,
    pub(super) tokens: i32,
    pub(super) neurons: i32,
    pub(super) before: i32,
    pub(super) windows: [i32; super::observe::WINDOWS],
    pub(super) active: u64,
    pub(super) magnitude: u64,
    pub(super) recent: u64,
    pub(super) reuse: u64,
    pub(super) strange: u64,
}
