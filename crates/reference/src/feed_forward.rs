//! The FFN of one layer, which can be loaded and run without the rest.

use std::collections::HashMap;

use candle_core::{Result, Tensor};
use powerinfer_model::{Activation, Checkpoint, FfnKind, LayerWeight, ModelError, Weight};

use crate::operations::{activate, failed, linear, load};

/// The weights that belong to an FFN.
const WEIGHTS: [LayerWeight; 6] = [
    LayerWeight::Gate,
    LayerWeight::GateBias,
    LayerWeight::Up,
    LayerWeight::UpBias,
    LayerWeight::Down,
    LayerWeight::DownBias,
];

/// The weights of one layer's FFN.
#[derive(Debug)]
pub struct FeedForward {
    kind: FfnKind,
    activation: Activation,
    weights: HashMap<LayerWeight, Tensor>,
}

/// What an FFN's neurons make of some tokens.
#[derive(Debug)]
pub struct Neurons {
    /// `act(gate·x)`: `[tokens, ffn]`.
    pub activation: Tensor,
    /// `up·x` where the FFN is gated, through the activation where that goes on both: `[tokens, ffn]`.
    pub up: Option<Tensor>,
    /// The input of the down projection: `[tokens, ffn]`.
    pub product: Tensor,
}

impl FeedForward {
    /// Loads the FFN of layer `index`.
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

    /// Whether `weight` belongs to FFNs.
    pub(crate) fn has(weight: LayerWeight) -> bool {
        WEIGHTS.contains(&weight)
    }

    /// The neurons for `x [tokens, hidden]`, the FFN's input after its norm.
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

    /// What the FFN adds for `product [tokens, ffn]`: `[tokens, hidden]`.
    pub fn down(&self, product: &Tensor) -> Result<Tensor> {
        self.linear(product, LayerWeight::Down, LayerWeight::DownBias)
    }

    /// The same without the bias, which no neuron's silence changes.
    pub fn down_unbiased(&self, product: &Tensor) -> Result<Tensor> {
        linear(product, &self.weights[&LayerWeight::Down], None)
    }

    /// L2 norm of every neuron's column of the down projection, `[ffn]`: what a unit of its
    /// activation contributes.
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
