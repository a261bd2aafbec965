//! Observers of FFNs.

use candle_core::Tensor;

/// Intermediate values of an FFN for the tokens of a sequence.
#[derive(Debug)]
pub struct FfnObservation<'a> {
    /// Index of the layer.
    pub layer: usize,
    /// Input of the FFN's norm, or of the FFN if it has none: `[tokens, hidden]`.
    pub residual: &'a Tensor,
    /// Input of the FFN, after its norm: `[tokens, hidden]`.
    pub input: &'a Tensor,
    /// `act(gate·x)`, one column per neuron: `[tokens, ffn]`.
    pub activation: &'a Tensor,
    /// `act(gate·x) · (up·x)`, the input of the down projection: `[tokens, ffn]`.
    pub product: &'a Tensor,
    /// Routing weights, `[blocks of neurons][tokens]`, 0 if the token did not select the block; `None` in dense models.
    pub routing: Option<&'a [Vec<f32>]>,
}

/// Observer of FFNs during a forward pass.
pub trait FfnObserver {
    /// Observes one FFN; a returned tensor replaces the product, for example to mask neurons.
    ///
    /// # Errors
    ///
    /// The tensor library failed; the forward pass stops.
    fn observe(&mut self, observation: &FfnObservation<'_>) -> candle_core::Result<Option<Tensor>>;
}

/// Observer that does nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoObserver;

impl FfnObserver for NoObserver {
    fn observe(
        &mut self,
        _observation: &FfnObservation<'_>,
    ) -> candle_core::Result<Option<Tensor>> {
        Ok(None)
    }
}
