//! An FFN's weights on a device, its activation function, and the filter of neurons to skip.

use bytemuck::Zeroable;

use super::{Buffer, GpuLinear, GpuMatrix, arguments};

/// How gate and up are combined into the activations `h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuFfnKind {
    /// `act(gate)`: there is no up.
    Plain,
    /// `act(gate) · up`.
    Gated,
    /// `act(gate) · act(up)`.
    DoublyGated,
}

/// Activation function of an FFN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GpuActivation {
    /// `max(0, x)`.
    Relu,
    /// `max(0, x)²`.
    SquaredRelu,
    /// FATReLU: `x` if it is at least the threshold, else 0.
    FatRelu(f32),
    /// `x / (1 + e^−x)`.
    Silu,
    /// `x·Φ(x)`.
    GeluErf,
    /// `x·Φ(x)`, approximated with tanh.
    GeluTanh,
}

impl GpuActivation {
    /// Its value in the CUDA enum, and the threshold of FATReLU.
    fn argument(self) -> (i32, f32) {
        match self {
            Self::Relu => (0, 0.0),
            Self::SquaredRelu => (1, 0.0),
            Self::FatRelu(threshold) => (2, threshold),
            Self::Silu => (3, 0.0),
            Self::GeluErf => (4, 0.0),
            Self::GeluTanh => (5, 0.0),
        }
    }
}

/// Condition under which a neuron is computed; other neurons contribute 0.
#[derive(Debug, Clone, Copy)]
pub enum NeuronFilter<'a> {
    /// All neurons.
    All,
    /// `act(gate) != 0`.
    NonZeroGate,
    /// `|act(gate)| >= threshold`.
    GateThreshold(f32),
    /// `|act(gate)| * scale >= threshold`, with a scale per neuron.
    ScaledGateThreshold(f32, &'a Buffer<f32>),
    /// `|h - centre| * scale >= threshold`; the neuron then contributes `(h - centre) * down`.
    ContributionThreshold {
        /// Smallest contribution that is computed.
        threshold: f32,
        /// `[neurons]`: norm of each neuron's row of down.
        scale: &'a Buffer<f32>,
        /// `[neurons]`: value subtracted from `h`; `None` means 0.
        centre: Option<&'a Buffer<f32>>,
    },
}

/// Weights of a layer's hot neurons, and how they are combined.
#[derive(Debug)]
pub struct Ffn {
    /// `[hot, hidden]`; up, if the FFN is not gated.
    pub gate: GpuLinear,
    /// `[hot, hidden]`, if the FFN is gated.
    pub up: Option<GpuLinear>,
    /// `[hot, hidden]`: row i is column i of the checkpoint's down.
    pub down: GpuMatrix,
    /// `[hidden]`: bias of down.
    pub bias: Option<Buffer<f32>>,
    /// How gate and up are combined.
    pub kind: GpuFfnKind,
    /// The activation function.
    pub activation: GpuActivation,
}

/// The kernel arguments for the neurons of `ffn` under `filter`.
pub(super) fn neurons(ffn: &Ffn, filter: NeuronFilter<'_>) -> arguments::Neurons {
    let hot = ffn.gate.matrix.rows();
    let mut argument = arguments::Neurons::zeroed();
    (argument.activation, argument.fat_threshold) = ffn.activation.argument();
    argument.kind = match ffn.kind {
        GpuFfnKind::Plain => 0,
        GpuFfnKind::Gated => 1,
        GpuFfnKind::DoublyGated => 2,
    };
    let per_neuron = |values: &Buffer<f32>| {
        assert!(values.len() >= hot, "one value per neuron");
        values.address()
    };
    argument.filter = match filter {
        NeuronFilter::All => 0,
        NeuronFilter::NonZeroGate => 1,
        NeuronFilter::GateThreshold(threshold) => {
            argument.threshold = threshold;
            2
        }
        NeuronFilter::ScaledGateThreshold(threshold, scale) => {
            argument.threshold = threshold;
            argument.gate_scale = per_neuron(scale);
            3
        }
        NeuronFilter::ContributionThreshold {
            threshold,
            scale,
            centre,
        } => {
            argument.threshold = threshold;
            argument.contribution_scale = per_neuron(scale);
            argument.centre = centre.map_or(0, per_neuron);
            4
        }
    };
    argument
}
