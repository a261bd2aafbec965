//! Routing in mixtures of experts: which neurons each token computes, and the weights of their experts.

use powerinfer_model::Experts;

use crate::{
    Threads,
    input::InputBuffers,
    linear::Linear,
    masks::{Masks, WORD},
};

/// A layer's router, borrowed for a forward pass.
#[derive(Clone, Copy)]
pub(crate) struct Router<'a> {
    pub(crate) layer: usize,
    pub(crate) experts: &'a Experts,
    pub(crate) linear: Linear<'a>,
    pub(crate) shared_gate: Option<Linear<'a>>,
    pub(crate) places: &'a ExpertPlaces,
}

/// Positions of each block's neurons in a layer of a bundle.
#[derive(Debug, Default)]
pub(crate) struct ExpertPlaces {
    /// The block of each neuron.
    blocks: Vec<u16>,
    /// Words of a mask in which a block has neurons, with their bits, per block.
    words: Vec<Vec<(u32, u64)>>,
}

impl ExpertPlaces {
    /// The block of the neuron at each position.
    pub(crate) fn blocks(&self) -> &[u16] {
        &self.blocks
    }

    /// Positions in a layer; `order` gives the checkpoint index of the neuron at each position.
    pub(crate) fn new(experts: &Experts, order: &[u32]) -> Self {
        let block = |neuron: &u32| experts.block_of(*neuron as usize) as u16;
        let blocks: Vec<u16> = order.iter().map(block).collect();
        let mut words: Vec<Vec<(u32, u64)>> = vec![Vec::new(); experts.blocks()];
        for (neuron, block) in blocks.iter().enumerate() {
            let (word, bit) = ((neuron / WORD) as u32, 1 << (neuron % WORD));
            match words[usize::from(*block)].last_mut() {
                Some((last, bits)) if *last == word => *bits |= bit,
                _ => words[usize::from(*block)].push((word, bit)),
            }
        }
        words.iter_mut().for_each(Vec::shrink_to_fit);
        Self { blocks, words }
    }
}

/// Routing weights of the tokens of a pass in a layer.
#[derive(Debug, Default)]
pub(crate) struct Routes {
    /// `[tokens, blocks]`; 0 for experts that are not selected.
    weights: Vec<f32>,
    logits: Vec<f32>,
    shared_logits: Vec<f32>,
    input: InputBuffers,
    words: Vec<u64>,
}

/// Routing weights of the neurons of one token.
#[derive(Clone, Copy)]
pub(crate) struct NeuronWeights<'a> {
    weights: &'a [f32],
    blocks: &'a [u16],
}

impl NeuronWeights<'_> {
    /// The weight of the neuron's expert.
    pub(crate) fn of(&self, neuron: u32) -> f32 {
        self.weights[usize::from(self.blocks[neuron as usize])]
    }
}

impl Router<'_> {
    /// Selects the experts of each token of `x [tokens, hidden]`; returns the bytes read.
    pub(crate) fn route(&self, threads: &Threads, x: &[f32], routes: &mut Routes) -> usize {
        let Routes {
            weights,
            logits,
            shared_logits,
            input,
            ..
        } = routes;
        let blocks = self.experts.blocks();
        weights.resize(x.len() / self.linear.inputs() * blocks, 0.0);
        let mut all = weights.chunks_exact_mut(blocks);
        if self.experts.dense_size(self.layer).is_some() {
            for weights in all {
                self.experts.route_all(self.layer, weights);
            }
            return 0;
        }
        let x = self.linear.input(threads, x, 0.0, input);
        let mut read = self.linear.product(threads, &x, 0.0, logits);
        if let Some(gate) = &self.shared_gate {
            read += gate.product(threads, &x, 0.0, shared_logits);
        }
        let tokens = all.by_ref().zip(logits.chunks_exact(self.experts.count));
        for (token, (weights, logits)) in tokens.enumerate() {
            let shared = self.shared_gate.map(|_| shared_logits[token]);
            self.experts.route(self.layer, logits, shared, weights);
        }
        read
    }

    /// Sets the weights of each token's blocks, `[tokens, blocks]`, which the device has computed.
    pub(crate) fn set_weights(&self, weights: Vec<f32>, routes: &mut Routes) {
        assert!(weights.len().is_multiple_of(self.experts.blocks()));
        routes.weights = weights;
    }

    /// Sets `masks` to the neurons of each token's experts; if `is_predicted`, keeps only those already predicted in `masks`.
    pub(crate) fn mask(&self, routes: &mut Routes, masks: &mut Masks, is_predicted: bool) {
        let Routes { weights, words, .. } = routes;
        let tokens = weights.len() / self.experts.blocks();
        let routed = if is_predicted {
            words.clear();
            words.resize(self.places.blocks.len().div_ceil(WORD) * tokens, 0);
            &mut words[..]
        } else {
            masks.reset(self.places.blocks.len(), tokens)
        };
        for (token, weights) in weights.chunks_exact(self.experts.blocks()).enumerate() {
            let selected = weights.iter().zip(&self.places.words);
            // If a weight is NaN, the result must be NaN too.
            let selected = selected.filter(|(weight, _)| **weight != 0.0);
            for (word, bits) in selected.flat_map(|(_, words)| words) {
                routed[*word as usize * tokens + token] |= bits;
            }
        }
        if is_predicted {
            masks.intersect(words);
        }
    }

    /// Adds the `biases [blocks, hidden]` of each token's experts, times their routing weights, to its row of `hidden [tokens, hidden]`.
    /// Returns the bytes read.
    pub(crate) fn add_biases(&self, routes: &Routes, biases: &[f32], hidden: &mut [f32]) -> usize {
        let blocks = self.experts.blocks();
        let size = biases.len() / blocks;
        let tokens = routes.weights.chunks_exact(blocks);
        let mut added = 0;
        for (weights, hidden) in tokens.zip(hidden.chunks_exact_mut(size)) {
            for (weight, bias) in weights.iter().zip(biases.chunks_exact(size)) {
                if *weight != 0.0 {
                    added += size_of_val(bias);
                    for (hidden, bias) in hidden.iter_mut().zip(bias) {
                        *hidden += weight * bias;
                    }
                }
            }
        }
        added.min(size_of_val(biases))
    }

    /// Routing weights of `token`.
    pub(crate) fn weights<'r>(&'r self, routes: &'r Routes, token: usize) -> NeuronWeights<'r> {
        let blocks = self.experts.blocks();
        NeuronWeights {
            weights: &routes.weights[token * blocks..][..blocks],
            blocks: &self.places.blocks,
        }
    }
}
