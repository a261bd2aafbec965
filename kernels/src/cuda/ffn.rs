//! An FFN's weights on a device, and the filter of neurons to skip.

use std::ops::Range;

use bytemuck::Zeroable;
use powerinfer_tensor::{Activation, FfnKind};

use super::{Buffer, GpuLinear, GpuMatrix, Routing, arguments};

/// The activation function's value in the CUDA enum, and the threshold of FATReLU or the limit of the clamped swish.
fn activation_argument(activation: Activation) -> (i32, f32) {
    match activation {
        Activation::Relu => (0, activation.limit()),
        Activation::SquaredRelu => (1, activation.limit()),
        Activation::FatRelu { threshold } => (2, threshold),
        Activation::Silu => (3, activation.limit()),
        Activation::GeluErf => (4, activation.limit()),
        Activation::GeluTanh => (5, activation.limit()),
        Activation::ClampedSwish { limit } => (6, limit),
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
    pub kind: FfnKind,
    /// The activation function.
    pub activation: Activation,
}

/// Kernel arguments for the neurons `rows` of `ffn` with `filter`, and the weights of their experts for `tokens` tokens.
pub(super) fn neurons(
    ffn: &Ffn,
    rows: &Range<usize>,
    filter: NeuronFilter<'_>,
    routing: Option<Routing<'_>>,
    tokens: usize,
) -> arguments::Neurons {
    let mut argument = arguments::Neurons::zeroed();
    if let Some(routing) = routing {
        let first = routing.first + rows.start;
        assert!(
            routing.blocks.len() >= first + rows.len()
                && routing.weights.len() >= tokens * routing.block_count
        );
        argument.weights = routing.weights.address();
        argument.blocks = routing.blocks.address() + (first * size_of::<u16>()) as u64;
        argument.block_count = routing.block_count as i32;
    }
    (argument.activation, argument.bound) = activation_argument(ffn.activation);
    argument.kind = match ffn.kind {
        FfnKind::Plain => 0,
        FfnKind::Gated => 1,
        FfnKind::DoublyGated => 2,
        FfnKind::ClampedGated => 3,
    };
    let per_neuron = |values: &Buffer<f32>| {
        assert!(values.len() >= rows.end, "one value per neuron");
        values.address() + (rows.start * size_of::<f32>()) as u64
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
