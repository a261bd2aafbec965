//! FFN of one layer, which can be loaded and run on its own.

use std::collections::HashMap;

use candle_core::{Result, Tensor};
use powerinfer_model::{Activation, Checkpoint, FfnKind, LayerWeight, ModelError, Weight};

use crate::operations::{activate, failed, linear, load};

/// Weights of an FFN.
const WEIGHTS: [LayerWeight; 6] = [
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
    weights: HashMap<LayerWeight, Tensor>,
}

/// Intermediate values of an FFN.
#[derive(Debug)]
pub struct Neurons {
    /// `act(gate·x)`: `[tokens, ffn]`.
    pub activation: Tensor,
    /// `[tokens, ffn]`: `up·x`, after the activation function if it applies to both; `None` without gate.
    pub up: Option<Tensor>,
    /// Input of the down projection: `[tokens, ffn]`.
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
            weights: weights
                .map(|weight| Ok((weight, load(checkpoint, Weight::Layer(index, weight))?)))
                .collect::<std::result::Result<_, ModelError>>()?,
        })
    }

    /// Returns whether `weight` belongs to FFNs.
    pub(crate) fn has(weight: LayerWeight) -> bool {
        WEIGHTS.contains(&weight)
    }

    /// Computes the neurons for `x [tokens, hidden]`, the FFN's input after its norm.
    ///
    /// # Errors
    ///
    /// `x` has another shape.
    pub fn neurons(&self, x: &Tensor) -> Result<Neurons> {
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
        Ok(Neurons {
            activation,
            up,
            product,
        })
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
