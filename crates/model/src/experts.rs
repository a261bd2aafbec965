//! Mixtures of experts: an FFN's neurons form blocks, and a router selects a few blocks for each token.
//!
//! An FFN with E experts of F neurons is an FFN of E·F neurons, and expert `e` consists of the neurons `e·F..(e + 1)·F`. A token
//! computes the neurons of its selected experts, each times the expert's routing weight; all others are 0. The neurons of a shared
//! expert come last, and every token computes them.
//!
//! In some models, certain layers have a dense FFN instead of experts. In such a layer, the dense FFN's neurons come first, and every token
//! computes their blocks with a routing weight of 1. The layer's other neurons are padding: their weights are 0, and no token computes
//! them.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Method of computing routing weights from the router's logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterScores {
    /// Softmax over all experts (Qwen2-MoE, OLMoE).
    Softmax,
    /// Softmax over the selected experts (Mixtral, Qwen3-MoE, gpt-oss).
    SoftmaxOfSelected,
    /// Sigmoid, divided by the sum over the selected experts (SmallThinker).
    SigmoidOfSelected,
}

/// Experts of every layer's FFN.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Experts {
    /// Number of experts, not counting a shared one.
    pub count: usize,
    /// Number of neurons per expert.
    pub size: usize,
    /// Number of experts that a token selects.
    pub per_token: usize,
    /// Method of computing routing weights from logits.
    pub scores: RouterScores,
    /// Whether the router has a bias.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_router_bias: bool,
    /// Whether the router reads the layer's input, before attention and its norm, instead of the FFN's input.
    pub reads_layer_input: bool,
    /// Number of neurons of the shared expert; 0 if there is none.
    pub shared_size: usize,
    /// Whether the shared expert's weight is the sigmoid of a projection of the FFN's input, instead of 1.
    pub has_shared_gate: bool,
    /// Factor of the routing weights of the selected experts.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub scale: f32,
    /// Layers with a dense FFN; `None` if all layers have experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense: Option<DenseLayers>,
}

/// Layers of a mixture of experts that have a dense FFN instead.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DenseLayers {
    /// Indices of the layers, in increasing order.
    pub layers: Vec<usize>,
    /// Number of neurons in each of these FFNs.
    pub size: usize,
}

fn one() -> f32 {
    1.0
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_one(scale: &f32) -> bool {
    *scale == 1.0
}

impl Experts {
    /// Returns the number of neurons of all experts together.
    pub fn neurons(&self) -> usize {
        self.count * self.size + self.shared_size
    }

    /// Returns the number of blocks of neurons: the experts, then the shared one, if any.
    pub fn blocks(&self) -> usize {
        self.count + usize::from(self.shared_size > 0)
    }

    /// Returns the neurons of a block.
    pub fn neurons_of(&self, block: usize) -> Range<usize> {
        let start = block * self.size;
        let size = if block < self.count {
            self.size
        } else {
            self.shared_size
        };
        start..start + size
    }

    /// Returns the block of a neuron.
    pub fn block_of(&self, neuron: usize) -> usize {
        (neuron / self.size).min(self.count)
    }

    /// Returns whether the neurons of every block are consecutive in `order`, a permutation of the neurons.
    pub fn are_whole_in(&self, order: &[u32]) -> bool {
        let block = |neuron: &u32| self.block_of(*neuron as usize);
        order.chunk_by(|a, b| block(a) == block(b)).count() <= self.blocks()
    }

    /// Returns the number of neurons of the dense FFN of `layer`; `None` if the layer has experts.
    pub fn dense_size(&self, layer: usize) -> Option<usize> {
        let dense = self.dense.as_ref()?;
        dense.layers.contains(&layer).then_some(dense.size)
    }

    /// Returns the number of experts that a token computes in `layer`; in a dense layer, the number of expert-sized blocks.
    pub fn selected_in(&self, layer: usize) -> usize {
        self.dense_size(layer)
            .map_or(self.per_token, |size| size.div_ceil(self.size))
    }

    /// Returns the number of neurons that a token computes in a layer with experts if no policy skips any.
    pub fn neurons_per_token(&self) -> usize {
        self.per_token * self.size + self.shared_size
    }

    /// Returns the largest number of neurons that a token computes in any layer.
    pub fn most_neurons_per_token(&self) -> usize {
        let dense = self.dense.as_ref().map_or(0, |dense| dense.size);
        self.neurons_per_token()
            .max(dense.next_multiple_of(self.size))
    }

    /// Returns the share of the neurons that a token computes in a layer with experts if no policy skips any.
    pub fn selected_share(&self) -> f64 {
        self.neurons_per_token() as f64 / self.neurons() as f64
    }

    /// Sets `weights`, one per block, to the routing weights of `layer`, computed from `logits`, one per expert; experts that are not
    /// selected get 0. If logits are equal, the expert with the lower index is preferred. `shared_gate` is the logit of the shared
    /// expert's weight.
    ///
    /// # Panics
    ///
    /// If there is not one logit per expert and one weight per block.
    pub fn route(
        &self,
        layer: usize,
        logits: &[f32],
        shared_gate: Option<f32>,
        weights: &mut [f32],
    ) {
        assert_eq!((logits.len(), weights.len()), (self.count, self.blocks()));
        if self.route_all(layer, weights) {
            return;
        }
        let mut order: Vec<usize> = (0..self.count).collect();
        // A stable sort keeps equal logits in the order of their experts.
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        let selected = &order[..self.per_token];
        let largest = f64::from(logits[selected[0]]);
        let score = |expert: usize| {
            let logit = f64::from(logits[expert]);
            match self.scores {
                RouterScores::Softmax | RouterScores::SoftmaxOfSelected => (logit - largest).exp(),
                RouterScores::SigmoidOfSelected => sigmoid(logit),
            }
        };
        let summed = match self.scores {
            RouterScores::Softmax => &order[..],
            RouterScores::SoftmaxOfSelected | RouterScores::SigmoidOfSelected => selected,
        };
        let sum: f64 = summed.iter().map(|expert| score(*expert)).sum();
        weights.fill(0.0);
        for expert in selected {
            weights[*expert] = (score(*expert) / sum) as f32 * self.scale;
        }
        if self.shared_size > 0 {
            weights[self.count] = shared_gate.map_or(1.0, |logit| sigmoid(logit.into()) as f32);
        }
    }

    /// Sets `weights`, one per block, to those of every token in `layer` if it has a dense FFN; returns whether it has.
    pub fn route_all(&self, layer: usize, weights: &mut [f32]) -> bool {
        let Some(size) = self.dense_size(layer) else {
            return false;
        };
        weights.fill(0.0);
        weights[..size.div_ceil(self.size)].fill(1.0);
        true
    }

    /// Checks that sizes are within limits.
    ///
    /// # Errors
    ///
    /// Returns what is wrong.
    pub fn validate(&self) -> Result<(), String> {
        // A bundle stores the block of a neuron in 16 bits.
        const MOST: usize = 1 << 30;
        let is_possible = (1..1 << 15).contains(&self.count)
            && (1..=MOST).contains(&self.size)
            && self.shared_size <= MOST;
        if !is_possible {
            return Err(format!(
                "{} experts of {} neurons are not supported",
                self.count, self.size
            ));
        }
        if !(1..=self.count).contains(&self.per_token) {
            return Err(format!(
                "selecting {} of {} experts per token (`num_experts_per_tok`) is not possible",
                self.per_token, self.count
            ));
        }
        if !(self.scale.is_normal() && self.scale > 0.0) {
            return Err(format!(
                "the factor of the routing weights (`routed_scaling_factor`) is {}, which is not a positive number",
                self.scale
            ));
        }
        let experts = self.count * self.size;
        match &self.dense {
            Some(dense) if !dense.layers.is_sorted_by(|a, b| a < b) => {
                Err("the layers with a dense FFN are not in increasing order".to_owned())
            }
            Some(dense) if !(1..=experts).contains(&dense.size) => Err(format!(
                "a dense FFN of {} neurons (`intermediate_size`) is not supported if a layer's experts have {experts} neurons in total",
                dense.size
            )),
            _ => Ok(()),
        }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPERTS: Experts = Experts {
        count: 4,
        size: 3,
        per_token: 2,
        scores: RouterScores::Softmax,
        has_router_bias: false,
        reads_layer_input: false,
        shared_size: 5,
        has_shared_gate: true,
        scale: 1.0,
        dense: None,
    };

    #[test]
    fn blocks_cover_every_neuron_once() {
        let all: Vec<usize> = (0..EXPERTS.blocks())
            .flat_map(|block| EXPERTS.neurons_of(block))
            .collect();
        assert_eq!(all, (0..EXPERTS.neurons()).collect::<Vec<_>>());
        for block in 0..EXPERTS.blocks() {
            assert!(
                EXPERTS
                    .neurons_of(block)
                    .all(|neuron| EXPERTS.block_of(neuron) == block)
            );
        }
    }

    #[test]
    fn the_first_of_equal_logits_is_selected() {
        for scores in [
            RouterScores::Softmax,
            RouterScores::SoftmaxOfSelected,
            RouterScores::SigmoidOfSelected,
        ] {
            let experts = Experts { scores, ..EXPERTS };
            let mut weights = [9.0; 5];
            experts.route(0, &[1.0, 2.0, 1.0, 1.0], Some(0.0), &mut weights);
            assert!(weights[1] > weights[0] && weights[0] > 0.0, "{weights:?}");
            assert_eq!(weights[2..], [0.0, 0.0, 0.5], "{scores:?}");
            let sum: f32 = weights[..4].iter().sum();
            let is_one = (sum - 1.0).abs() < 1e-6;
            assert_eq!(is_one, scores != RouterScores::Softmax, "{scores:?}: {sum}");
            let scaled = Experts {
                scale: 16.0,
                ..experts
            };
            let mut multiplied = [9.0; 5];
            scaled.route(0, &[1.0, 2.0, 1.0, 1.0], Some(0.0), &mut multiplied);
            let expected = [16.0 * weights[0], 16.0 * weights[1], 0.0, 0.0, 0.5];
            assert_eq!(multiplied, expected, "{scores:?}");
        }
    }

    #[test]
    fn every_token_computes_the_blocks_of_a_dense_layer() {
        let experts = Experts {
            dense: Some(DenseLayers {
                layers: vec![0, 2],
                size: 12,
            }),
            ..EXPERTS
        };
        experts.validate().unwrap();
        assert_eq!(
            (experts.dense_size(2), experts.dense_size(1)),
            (Some(12), None)
        );
        let mut weights = [9.0; 5];
        experts.route(2, &[1.0, 2.0, 3.0, 4.0], Some(0.0), &mut weights);
        assert_eq!(weights, [1.0, 1.0, 1.0, 1.0, 0.0]);
        experts.route(1, &[1.0, 2.0, 3.0, 4.0], Some(0.0), &mut weights);
        assert_eq!(weights[..2], [0.0, 0.0]);
        assert_eq!(
            (
                experts.neurons_per_token(),
                experts.most_neurons_per_token()
            ),
            (11, 12)
        );
        assert_eq!((experts.selected_in(2), experts.selected_in(1)), (4, 2));
        let wider = DenseLayers {
            layers: vec![0],
            size: 13,
        };
        let wider = Experts {
            dense: Some(wider),
            ..EXPERTS
        };
        assert!(wider.validate().is_err());
    }
}
