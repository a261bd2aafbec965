//! FFN of one layer, which can be loaded and run on its own.

use std::{collections::HashMap, ops::Range};

use candle_core::{Device, Result, Tensor, bail};
use powerinfer_artifact::random::Random;
use powerinfer_model::{Activation, Checkpoint, Experts, FfnKind, LayerWeight, ModelError};

use crate::operations::{activate, failed, linear, load_all, with_values};

/// Weights of an FFN.
const WEIGHTS: [LayerWeight; 9] = [
    LayerWeight::Router,
    LayerWeight::RouterBias,
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
    layer: usize,
    weights: HashMap<LayerWeight, Tensor>,
}

/// Intermediate values of an FFN. In a mixture of experts, activations and products of neurons that are not selected are 0.
#[derive(Debug)]
pub struct Neurons {
    /// `act(gate·x)`: `[tokens, ffn]`.
    pub activation: Tensor,
    /// Factor by which `up·x` multiplies the activation: `[tokens, ffn]`; `None` without gate.
    pub up: Option<Tensor>,
    /// Input of the down projection, multiplied by routing weights: `[tokens, ffn]`.
    pub product: Tensor,
    /// Routing weights, `[blocks of neurons][tokens]`, 0 if the token did not select the block; `None` in dense models.
    pub routing: Option<Vec<Vec<f32>>>,
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
            layer: index,
            weights: load_all(checkpoint, index, weights.collect())?,
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
        let Some(experts) = &self.experts else {
            return self.all_neurons(x, None);
        };
        let router_input = if experts.reads_layer_input {
            layer_input
        } else {
            x
        };
        let routing = self.routing_weights(experts, router_input)?;
        let (tokens, neurons) = (x.dim(0)?, experts.neurons());
        let zeros = || vec![0.0; tokens * neurons];
        let (mut activation, mut up, mut product) = (zeros(), zeros(), zeros());
        // Each expert computes only the tokens that selected it.
        for (block, weights) in routing.iter().enumerate() {
            let selected = (0..).zip(weights).filter(|(_, weight)| **weight != 0.0);
            let selected: Vec<u32> = selected.map(|(token, _)| token).collect();
            if selected.is_empty() {
                continue;
            }
            let places = experts.neurons_of(block);
            let part = self.all_neurons(&rows(x, &selected)?, Some(&places))?;
            let parts = [
                (Some(&part.activation), &mut activation, false),
                (part.up.as_ref(), &mut up, false),
                (Some(&part.product), &mut product, true),
            ];
            for (part, all, is_weighted) in parts {
                let Some(part) = part else { continue };
                with_values(part, |part| {
                    for (token, part) in selected.iter().zip(part.chunks_exact(places.len())) {
                        let token = *token as usize;
                        let weight = if is_weighted { weights[token] } else { 1.0 };
                        let own = &mut all[token * neurons..][places.clone()];
                        own.iter_mut()
                            .zip(part)
                            .for_each(|(own, value)| *own = value * weight);
                    }
                })?;
            }
        }
        let tensor = |values| Tensor::from_vec(values, (tokens, neurons), &Device::Cpu);
        Ok(Neurons {
            activation: tensor(activation)?,
            up: match self.kind {
                FfnKind::Plain => None,
                FfnKind::Gated | FfnKind::DoublyGated | FfnKind::ClampedGated => Some(tensor(up)?),
            },
            product: tensor(product)?,
            routing: Some(routing),
        })
    }

    /// Computes the neurons in `places`, or all neurons if it is `None`, without routing weights.
    fn all_neurons(&self, x: &Tensor, places: Option<&Range<usize>>) -> Result<Neurons> {
        let project = |weight, bias| -> Result<Tensor> {
            let own = |tensor: &Tensor| match places {
                None => Ok(tensor.clone()),
                Some(places) => tensor.narrow(0, places.start, places.len()),
            };
            let bias = self.weights.get(&bias).map(own).transpose()?;
            linear(x, &own(&self.weights[&weight])?, bias.as_ref())
        };
        let gate = project(LayerWeight::Gate, LayerWeight::GateBias)?;
        let activation = activate(self.activation, &gate)?;
        let up = match self.kind {
            FfnKind::Plain => None,
            FfnKind::Gated => Some(project(LayerWeight::Up, LayerWeight::UpBias)?),
            FfnKind::DoublyGated => {
                let up = project(LayerWeight::Up, LayerWeight::UpBias)?;
                Some(activate(self.activation, &up)?)
            }
            FfnKind::ClampedGated => {
                let up = project(LayerWeight::Up, LayerWeight::UpBias)?;
                let limit = self.activation.limit();
                Some((up.clamp(-limit, limit)? + 1.0)?)
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
            routing: None,
        })
    }

    /// Routing weights for `x [tokens, hidden]`: for each block of neurons, one weight per token.
    fn routing_weights(&self, experts: &Experts, x: &Tensor) -> Result<Vec<Vec<f32>>> {
        let bias = self.weights.get(&LayerWeight::RouterBias);
        let logits = linear(x, &self.weights[&LayerWeight::Router], bias)?.to_vec2::<f32>()?;
        let shared = match self.weights.get(&LayerWeight::SharedGate) {
            None => None,
            Some(gate) => Some(linear(x, gate, None)?.flatten_all()?.to_vec1::<f32>()?),
        };
        let mut by_block = vec![Vec::with_capacity(logits.len()); experts.blocks()];
        let mut weights = vec![0.0; experts.blocks()];
        for (token, logits) in logits.iter().enumerate() {
            let shared = shared.as_ref().map(|logits| logits[token]);
            experts.route(self.layer, logits, shared, &mut weights);
            for (block, weight) in by_block.iter_mut().zip(&weights) {
                block.push(*weight);
            }
        }
        Ok(by_block)
    }

    /// Computes the FFN's output `[tokens, hidden]` from `product [tokens, ffn]` and, in a mixture of experts, the routing weights
    /// `routing [blocks][tokens]`.
    ///
    /// # Errors
    ///
    /// `product` or `routing` has another shape.
    pub fn down(&self, product: &Tensor, routing: Option<&[Vec<f32>]>) -> Result<Tensor> {
        let output = self.down_unbiased(product)?;
        match (self.weights.get(&LayerWeight::DownBias), routing) {
            (None, _) => Ok(output),
            (Some(bias), None) => output.broadcast_add(bias),
            (Some(biases), Some(routing)) => {
                let shape = (routing.len(), product.dim(0)?);
                let weights = Tensor::from_vec(routing.concat(), shape, &Device::Cpu)?;
                output + weights.t()?.matmul(biases)?
            }
        }
    }

    /// Computes the FFN's output without the output bias.
    ///
    /// # Errors
    ///
    /// `product` has another shape.
    pub fn down_unbiased(&self, product: &Tensor) -> Result<Tensor> {
        let down = &self.weights[&LayerWeight::Down];
        let Some(experts) = &self.experts else {
            return linear(product, down, None);
        };
        let (hidden, neurons) = down.dims2()?;
        let (tokens, width) = product.dims2()?;
        if width != neurons {
            bail!("expected values of {neurons} neurons per token, not of {width}");
        }
        let mut output = vec![0.0; tokens * hidden];
        for block in 0..experts.blocks() {
            let places = experts.neurons_of(block);
            let (mut active, mut values) = (Vec::new(), Vec::new());
            with_values(product, |product| {
                for (token, row) in product.chunks_exact(neurons).enumerate() {
                    let own = &row[places.clone()];
                    if own.iter().any(|value| *value != 0.0) {
                        active.push(token);
                        values.extend_from_slice(own);
                    }
                }
            })?;
            if active.is_empty() {
                continue;
            }
            let values = Tensor::from_vec(values, (active.len(), places.len()), &Device::Cpu)?;
            // The product accepts a matrix's columns without copying them.
            let down = down.narrow(1, places.start, places.len())?;
            with_values(&linear(&values, &down, None)?, |part| {
                for (token, part) in active.iter().zip(part.chunks_exact(hidden)) {
                    let sums = output[token * hidden..][..hidden].iter_mut();
                    sums.zip(part).for_each(|(sum, value)| *sum += value);
                }
            })?;
        }
        Tensor::from_vec(output, (tokens, hidden), &Device::Cpu)
    }

    /// Returns this FFN's down projection, without biases, followed by a random projection to `size` values. The projection preserves
    /// lengths with a relative error of about `1/√(2·size)` (Johnson and Lindenstrauss 1984, with signs as in Achlioptas 2003). If
    /// outputs have at most `size` values, they are not projected.
    ///
    /// # Errors
    ///
    /// The tensor library failed.
    pub fn projected_down(&self, size: usize, seed: u64) -> Result<Self> {
        let down = &self.weights[&LayerWeight::Down];
        let hidden = down.dim(0)?;
        let down = if hidden <= size {
            down.clone()
        } else {
            let mut random = Random::new(seed);
            let length = (size as f32).sqrt().recip();
            let mut sign = || if random.chance(50) { length } else { -length };
            let signs: Vec<f32> = (0..size * hidden).map(|_| sign()).collect();
            Tensor::from_vec(signs, (size, hidden), &Device::Cpu)?.matmul(down)?
        };
        Ok(Self {
            weights: HashMap::from([(LayerWeight::Down, down)]),
            experts: self.experts.clone(),
            ..*self
        })
    }

    /// Computes the L2 norm of each neuron's column of the down projection, `[ffn]`: its contribution per unit
    /// of activation.
    ///
    /// # Errors
    ///
    /// The tensor library failed.
    pub fn contribution_norms(&self) -> std::result::Result<Vec<f32>, ModelError> {
        let down = &self.weights[&LayerWeight::Down];
        let norms = down.dim(1).and_then(|neurons| {
            let mut squares = vec![0.0f32; neurons];
            with_values(down, |down| {
                for row in down.chunks_exact(neurons) {
                    let sums = squares.iter_mut().zip(row);
                    sums.for_each(|(sum, value)| *sum += value * value);
                }
            })?;
            Ok(squares.into_iter().map(f32::sqrt).collect())
        });
        norms.map_err(failed)
    }
}

/// Rows of `x` at `indices`.
fn rows(x: &Tensor, indices: &[u32]) -> Result<Tensor> {
    x.index_select(&Tensor::new(indices, &Device::Cpu)?, 0)
}
