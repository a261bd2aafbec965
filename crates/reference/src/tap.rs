//! Where one can watch, or change, what passes through an FFN.

use candle_core::Tensor;

/// What an FFN computes on its way, for the tokens of one sequence.
#[derive(Debug)]
pub struct FfnObservation<'a> {
    /// Which layer.
    pub layer: usize,
    /// What goes into the FFN's norm, or into the FFN where it has none: `[tokens, hidden]`.
    pub residual: &'a Tensor,
    /// The FFN's input, after its norm: `[tokens, hidden]`.
    pub input: &'a Tensor,
    /// `act(gate·x)`, one column a neuron: `[tokens, ffn]`.
    pub activation: &'a Tensor,
    /// `act(gate·x) · (up·x)`, the input of the down projection: `[tokens, ffn]`.
    pub product: &'a Tensor,
}

/// Watches FFNs as they run.
pub trait FfnTap {
    /// Sees one FFN; a tensor returned takes the product's place, which is how neurons are masked.
    fn tap(&mut self, observation: &FfnObservation<'_>) -> candle_core::Result<Option<Tensor>>;
}

/// Watches nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoTap;

impl FfnTap for NoTap {
    fn tap(&mut self, _observation: &FfnObservation<'_>) -> candle_core::Result<Option<Tensor>> {
        Ok(None)
    }
}
