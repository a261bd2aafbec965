//! Temporary memory of a model on a device, for plans.

use powerinfer_kernels::cuda::{CachePlace, F16Buffer, Gpu, KeptInput, SplitSums};
use powerinfer_model::ModelConfig;
use powerinfer_tensor::{BLOCK, CacheFormat, Format};

use crate::{
    COPIED_NEURONS, ModelShape,
    experts::{Gathered, LEAST_TOKENS},
    state::RESIDENT_NEURONS,
};

/// Bytes of counters, position tables and the search for the largest logit.
const SMALL: usize = 64 << 10;

const FLOAT: usize = size_of::<f32>();

/// Properties that determine the temporary memory of a model.
#[derive(Debug, Clone, Copy)]
pub struct DeviceScratch {
    shape: ModelShape,
    layers: usize,
    quant: Format,
    matrices: usize,
    logits: usize,
    rank: usize,
}

impl DeviceScratch {
    /// Scratch of a model with weights in `quant`, KV caches of `context` positions in `cache`, and predictors of at most `rank`
    /// hidden units.
    pub fn new(
        config: &ModelConfig,
        quant: Format,
        (context, cache): (usize, CacheFormat),
        rank: usize,
    ) -> Self {
        Self {
            shape: ModelShape::new(config, context, cache),
            layers: config.layer_count,
            quant,
            matrices: config.matrices_per_neuron(),
            logits: config.vocabulary_size + config.embedding_size,
            rank,
        }
    }

    /// Upper bound of the bytes that a device needs for prompts of up to `tokens` tokens at a time, for batches, for cold neurons being
    /// copied, and for logits. Inputs of quantised weights are in 8 bits.
    pub fn bytes(&self, tokens: usize) -> u64 {
        let tokens = tokens.min(self.shape.context);
        let logits = Gpu::BATCH * self.logits * FLOAT;
        let all = self.prompt(tokens) + self.batch() + self.pieces() + logits + SMALL;
        all as u64
    }

    /// Bytes of the buffers of a prompt.
    fn prompt(&self, tokens: usize) -> usize {
        let ModelShape {
            hidden,
            neurons,
            heads,
            kv_heads,
            head_size,
            ..
        } = self.shape;
        let (queries, keys) = (heads * head_size, kv_heads * head_size);
        let wide = neurons.min(RESIDENT_NEURONS);
        let products = [
            [hidden, queries.max(keys).max(wide)],
            [queries.max(wide), hidden],
        ];
        let [_, blocks] = self.shape.experts;
        let gathered = if blocks > 0 && tokens >= LEAST_TOKENS {
            Gathered::max_bytes((tokens, hidden), self.quant, blocks)
        } else {
            0
        };
        let inputs = [hidden.max(queries), wide];
        let inputs = inputs.map(|columns| F16Buffer::max_bytes(tokens, columns, self.quant));
        self.tokens(tokens, wide)
            + tokens * wide * FLOAT // up
            + inputs.iter().sum::<usize>()
            + SplitSums::max_bytes(&products, tokens)
            + gathered
    }

    /// Bytes of the buffers of a batch.
    fn batch(&self) -> usize {
        let ModelShape {
            hidden, neurons, ..
        } = self.shape;
        let tokens = Gpu::BATCH;
        self.tokens(tokens, neurons)
            + KeptInput::max_bytes(hidden, tokens)
            + Gpu::max_down_scratch_bytes(self.quant, neurons, hidden, tokens)
    }

    /// Bytes of the vectors of `tokens` tokens, including buffers for attention and the products of `neurons` neurons.
    fn tokens(&self, tokens: usize, neurons: usize) -> usize {
        let shape = &self.shape;
        let (queries, keys) = (
            shape.heads * shape.head_size,
            shape.kv_heads * shape.head_size,
        );
        let states = if shape.is_parallel { 2 } else { 1 };
        let masks = shape.neurons.div_ceil(32);
        let numbers = states * shape.hidden + 2 * (queries + keys + shape.rotated_pairs);
        let [_, blocks] = shape.experts;
        let numbers = numbers + neurons + self.rank + masks + shape.heads;
        // Logits, routing weights and sums of biases.
        let bias_sums = if shape.has_expert_biases {
            shape.hidden
        } else {
            0
        };
        let numbers = numbers + 2 * blocks + bias_sums;
        let partial = [1, tokens.min(Gpu::BATCH), tokens]
            .map(|tokens| Gpu::max_attention_scratch(tokens, shape.heads, &shape.cache()));
        let partial = partial.into_iter().max().unwrap_or(0);
        tokens * (numbers * FLOAT + self.layers * size_of::<CachePlace>()) + partial * FLOAT
    }

    /// Bytes of two pieces of cold neurons: their weights, biases, scales and centres.
    fn pieces(&self) -> usize {
        let row = self
            .quant
            .row_bytes(self.shape.hidden.next_multiple_of(BLOCK));
        let neurons = self.shape.neurons.min(COPIED_NEURONS);
        2 * neurons * (self.matrices * row + 4 * FLOAT)
    }
}
