//! FFN of one layer, which can be loaded and run on its own.

use std::collections::HashMap;

use candle_core::{Device, Result, Tensor};
use powerinfer_model::{Activation, Checkpoint, Experts, FfnKind, LayerWeight, ModelError, Weight};

use crate::operations::{activate, failed, linear, load};

/// Weights of an FFN.
const WEIGHTS: [LayerWeight; 8] = [
    LayerWeight::Router,
    LayerWeight::SharedGate,
    LayerWeight::Gate,
    LayerWeight::GateBias,
    LayerWeight::Up,
    LayerWeight::UpBias,
    LayerWeight::Down,
    LayerWeight::DownBias,
];

/// FFN of one layer.
#[derive(Debug)]
pub struct FeedForward {
    kind: FfnKind,
    activation: Activation,
    experts: Option<Experts>,
    weights: HashMap<LayerWeight, Tensor>,
}

/// Intermediate values of an FFN. In a mixture of experts, activations and products of neurons that are not selected are 0.
#[derive(Debug)]
pub struct Neurons {
    /// `act(gate·x)`: `[tokens, ffn]`.
    pub activation: Tensor,
    /// `[tokens, ffn]`: `up·x`, after the activation function if it applies to both; `None` without gate.
    pub up: Option<Tensor>,
    /// Input of the down projection, multiplied by routing weights: `[tokens, ffn]`.
    pub product: Tensor,
}

impl FeedForward {
    /// Loads the FFN of layer `index`.
    ///
    /// # Errors
    ///
    /// A weight cannot be read.
    pub fn load(checkpoint: &Checkpoint, index: usize) -> std::result::Result<Self, ModelError> {
        let config = checkpoint.config();
        let weights = config.layer_weights().into_iter();
        let weights = weights.filter(|weight| Self::has(*weight));
        Ok(Self {
            kind: config.ffn,
            activation: config.activation,
            experts: config.experts.clone(),
            weights: weights
                .map(|weight| Ok((weight, load(checkpoint, Weight::Layer(index, weight))?)))
                .collect::<std::result::Result<_, ModelError>>()?,
        })
    }

    /// Returns whether `weight` belongs to FFNs.
    pub(crate) fn has(weight: LayerWeight) -> bool {
        WEIGHTS.contains(&weight)
    }

    /// Computes the neurons for `x [tokens, hidden]`, the FFN's input after its norm. The router reads `layer_input [tokens, hidden]`
    /// if the model's routers read the layer's input, else `x`.
    ///
    /// # Errors
    ///
    /// `x` has another shape.
    pub fn neurons(&self, x: &Tensor, layer_input: &Tensor) -> Result<Neurons> {
        let gate = self.linear(x, LayerWeight::Gate, LayerWeight::GateBias)?;
        let activation = activate(self.activation, &gate)?;
        let up = match self.kind {
            FfnKind::Plain => None,
            FfnKind::Gated => Some(self.linear(x, LayerWeight::Up, LayerWeight::UpBias)?),
            FfnKind::DoublyGated => {
                let up = self.linear(x, LayerWeight::Up, LayerWeight::UpBias)?;
                Some(activate(self.activation, &up)?)
            }
        };
        let product = match &up {
            None => activation.clone(),
            Some(up) => (&activation * up)?,
        };
        let (activation, product) = match &self.experts {
            None => (activation, product),
            Some(experts) => {
                let read = if experts.reads_layer_input {
                    layer_input
                } else {
                    x
                };
                let weights = self.routing_weights(experts, read)?;
                let is_selected = weights.ne(0.0)?.to_dtype(activation.dtype())?;
                ((activation * is_selected)?, (product * weights)?)
            }
        };
        Ok(Neurons {
            activation,
            up,
            product,
        })
    }

    /// Routing weight of every neuron for `x [tokens, hidden]`: `[tokens, ffn]`.
    fn routing_weights(&self, experts: &Experts, x: &Tensor) -> Result<Tensor> {
        let logits = linear(x, &self.weights[&LayerWeight::Router], None)?.to_vec2::<f32>()?;
        let shared = match self.weights.get(&LayerWeight::SharedGate) {
            None => None,
            Some(gate) => Some(linear(x, gate, None)?.flatten_all()?.to_vec1::<f32>()?),
        };
        let mut weights = vec![0.0; experts.blocks()];
        let mut all = Vec::with_capacity(logits.len() * experts.neurons());
        for (token, logits) in logits.iter().enumerate() {
            let shared = shared.as_ref().map(|logits| logits[token]);
            experts.route(logits, shared, &mut weights);
            for (block, weight) in weights.iter().enumerate() {
                all.extend(experts.neurons_of(block).map(|_| *weight));
            }
        }
        Tensor::from_vec(all, (logits.len(), experts.neurons()), &Device::Cpu)
    }

    /// Computes the FFN's output `[tokens, hidden]` from `product [tokens, ffn]`.
    ///
    /// # Errors
    ///
    /// `product` has another shape.
    pub fn down(&self, product: &Tensor) -> Result<Tensor> {
        self.linear(product, LayerWeight::Down, LayerWeight::DownBias)
    }

    /// Computes the FFN's output without the output bias.
    ///
    /// # Errors
    ///
    /// `product` has another shape.
    pub fn down_unbiased(&self, product: &Tensor) -> Result<Tensor> {
        linear(product, &self.weights[&LayerWeight::Down], None)
    }

    /// Computes the L2 norm of each neuron's column of the down projection, `[ffn]`: its contribution per unit
    /// of activation.
    ///
    /// # Errors
    ///
    /// The tensor library failed.
    pub fn contribution_norms(&self) -> std::result::Result<Vec<f32>, ModelError> {
        let norms = self.weights[&LayerWeight::Down]
            .sqr()
            .and_then(|square| square.sum(0)?.sqrt()?.to_vec1());
        norms.map_err(failed)
    }

    fn linear(&self, x: &Tensor, weight: LayerWeight, bias: LayerWeight) -> Result<Tensor> {
        linear(x, &self.weights[&weight], self.weights.get(&bias))
    }
}
