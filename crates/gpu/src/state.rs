//! Buffers of the tokens that run: vectors on the device, and memory that both sides access.

use std::ops::Range;

use powerinfer_kernels::cuda::{
    Buffer, CachePlace, DeviceError, DownScratch, F16Buffer, Gpu, GpuCache, GpuMatrix, HostBuffer,
    KeptInput, NeuronCounts, Routes, SplitSums,
};
use powerinfer_tensor::Format;

use crate::{
    CopiedParts, DeviceLayer, ModelShape,
    cold_neurons::{COPIED_NEURONS, Piece},
    experts::{self, Gathered},
};

/// How the tokens of a pass are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Products {
    /// By products of vectors: a token, or a batch of up to [`Gpu::BATCH`].
    Gemv,
    /// By products of matrices: a prompt.
    Gemm {
        /// Maximum number of neurons on the device that are multiplied at a time.
        neurons: usize,
    },
}

/// Products of a prompt. More neurons at a time would not fill a GPU better, and their products would need more memory.
pub(crate) const PROMPT: Products = Products::Gemm {
    neurons: RESIDENT_NEURONS,
};

/// Maximum number of a layer's neurons on the device that a prompt multiplies at a time.
pub(crate) const RESIDENT_NEURONS: usize = 4096;

/// Splits `count` neurons into pieces of at most `most`; returns at least one piece, which may be empty.
pub(crate) fn pieces(
    count: usize,
    most: usize,
) -> impl DoubleEndedIterator<Item = Range<usize>> + use<> {
    let pieces = count.div_ceil(most).max(1);
    (0..pieces).map(move |piece| piece * most..count.min((piece + 1) * most))
}

/// Buffers of up to [`capacity`](State::capacity) tokens.
#[derive(Debug)]
pub(crate) struct State {
    /// Buffers that only products of matrices need.
    pub(crate) prompt: Option<Prompt>,
    /// Places of the KV caches of each token's sequence, `[tokens, layers]`.
    pub(crate) caches: Buffer<CachePlace>,
    /// The first of them, as the host knows them.
    known_caches: Vec<CachePlace>,
    pub(crate) hidden: Buffer<f32>,
    /// Input of the FFN in parallel blocks, in which attention has already been added to `hidden`.
    pub(crate) residual: Buffer<f32>,
    pub(crate) query: Buffer<f32>,
    pub(crate) key: Buffer<f32>,
    pub(crate) value: Buffer<f32>,
    /// Weighted sums of values, before the output projection.
    pub(crate) mixed: Buffer<f32>,
    pub(crate) rotations: Buffer<[f32; 2]>,
    pub(crate) positions: Buffer<u32>,
    pub(crate) step: Buffer<u32>,
    pub(crate) attention_partial: Buffer<f32>,
    pub(crate) attention_counters: Buffer<u32>,
    /// Hidden units of a predictor, `[tokens, rank]`.
    pub(crate) units: Buffer<f32>,
    /// The FFN's input in 8 bits, as read by the predictor; unused in a prompt.
    pub(crate) kept: KeptInput,
    pub(crate) routes: Routes,
    /// Mask of the neurons that routers and predictors leave, one bit each.
    pub(crate) mask: Buffer<u32>,
    /// Factors of the rows of down: `[tokens, hot]`, or `[tokens, neurons of a piece]` in a prompt.
    pub(crate) products: Buffer<f32>,
    pub(crate) down: DownScratch,
    /// The FFN's input, for the host.
    pub(crate) input: HostBuffer,
    /// Predicted neurons, for the host.
    pub(crate) predicted: HostBuffer,
    /// One word per layer: the last step whose input the host can read.
    pub(crate) ready: HostBuffer,
    /// Sums of the cold neurons, from the host.
    pub(crate) cold: HostBuffer,
    /// One word per layer: the last step whose cold sum is complete.
    pub(crate) done: HostBuffer,
    /// The last step in which a kernel stopped waiting for the host.
    pub(crate) timed_out: HostBuffer,
    /// Number of passes so far; the step of the current one.
    pub(crate) steps: u32,
    /// Neurons computed on the device up to the last [`take_counts`](crate::DeviceModel::take_counts).
    pub(crate) counts: NeuronCounts,
}

/// Returns the weight format, copied weights included, whose inputs need the most terms in 16 bits.
fn finest_format(layers: &[DeviceLayer], copied: Option<&CopiedParts>) -> Format {
    let own = layers.iter().filter_map(|layer| layer.attention.as_ref());
    let attentions = own.chain(copied.and_then(CopiedParts::attention));
    let projections =
        attentions.flat_map(|attention| [&attention.query.matrix, &attention.output.matrix]);
    let ffns = layers.iter().filter_map(|layer| layer.ffn.as_ref());
    let neurons = ffns.flat_map(|found| [&found.ffn.gate.matrix, &found.ffn.down]);
    let mut formats = projections.chain(neurons).map(GpuMatrix::format);
    let is_exact = formats.any(|format| format == Format::F32);
    if is_exact { Format::F32 } else { Format::Q8_0 }
}

/// Buffers of products of matrices.
#[derive(Debug)]
pub(crate) struct Prompt {
    /// Input of a matrix product in 16 bits.
    pub(crate) input: F16Buffer,
    /// Factors of the rows of down in 16 bits.
    pub(crate) products: F16Buffer,
    pub(crate) sums: SplitSums,
    /// `[tokens, neurons of a piece]`.
    pub(crate) up: Buffer<f32>,
    /// Maximum number of neurons on the device that are multiplied at a time.
    pub(crate) most_neurons: usize,
    /// Buffers for the tokens of one expert; `None` if there are few tokens or no experts.
    pub(crate) gathered: Option<Gathered>,
    /// Cold neurons in copies that alternate.
    pub(crate) pieces: Option<[Piece; 2]>,
}

impl State {
    /// Allocates zeroed buffers for up to `tokens` tokens of a model, which may use `copied` parts.
    pub(crate) fn new(
        gpu: &Gpu,
        shape: &ModelShape,
        layers: &[DeviceLayer],
        copied: Option<&CopiedParts>,
        tokens: usize,
        products: Products,
    ) -> Result<Self, DeviceError> {
        let device = gpu.device();
        let floats = |count: usize| Buffer::<f32>::new(device, tokens * count);
        let ModelShape {
            hidden,
            neurons,
            heads,
            kv_heads,
            head_size,
            is_parallel,
            rotated_pairs,
            experts: [expert_count, blocks],
            has_expert_biases,
            ..
        } = *shape;
        let (queries, keys) = (heads * head_size, kv_heads * head_size);
        let words = tokens * neurons.div_ceil(32);
        let ffns = || layers.iter().filter_map(|layer| layer.ffn.as_ref());
        let hot = layers.iter().map(DeviceLayer::hot_count).max().unwrap_or(0);
        let streamed = || {
            let streams = |layer: &&DeviceLayer| {
                let streams = layer.streams_from.is_some_and(|least| tokens >= least);
                products != Products::Gemv && layer.ffn.is_some() && streams
            };
            layers.iter().filter(streams)
        };
        let cold = streamed().map(|layer| layer.neurons - layer.hot_count());
        let most_cold = cold.max().unwrap_or(0);
        let (most_neurons, vectors) = match products {
            Products::Gemv => (usize::MAX, tokens),
            Products::Gemm { neurons } => (neurons, 0),
        };
        let wide = hot.min(most_neurons).max(most_cold.min(COPIED_NEURONS));
        let format = finest_format(layers, copied);
        let prompt = match products {
            Products::Gemv => None,
            Products::Gemm { .. } => Some(Prompt {
                input: gpu.new_f16_buffer(tokens, hidden.max(queries), format)?,
                products: gpu.new_f16_buffer(tokens, wide, format)?,
                sums: gpu.new_split_sums(
                    &[
                        [hidden, queries.max(keys).max(wide)],
                        [queries.max(wide), hidden],
                    ],
                    tokens,
                )?,
                up: floats(wide)?,
                most_neurons,
                gathered: if blocks > 0 && tokens >= experts::LEAST_TOKENS {
                    Some(Gathered::new(gpu, (tokens, hidden), format, blocks)?)
                } else {
                    None
                },
                pieces: match streamed().find_map(|layer| layer.ffn.as_ref()) {
                    None => None,
                    Some(ffn) => {
                        let piece = |number| Piece::new(device, number, &ffn.ffn, most_cold);
                        Some([piece(0)?, piece(1)?])
                    }
                },
            }),
        };
        // A prompt adds up rows of down by another kernel.
        let downs = ffns().map(|ffn| &ffn.ffn.down).filter(|_| prompt.is_none());
        let down = gpu.down_scratch(downs, tokens)?;
        let ranks = ffns().map(|ffn| ffn.selector.rank());
        let rank = ranks.fold(copied.map_or(0, CopiedParts::rank), usize::max);
        // Few tokens are shared between more thread blocks.
        let partial = [1, tokens.min(Gpu::BATCH), tokens]
            .map(|tokens| gpu.attention_scratch_len(tokens, heads, &shape.cache()))
            .into_iter()
            .max();
        Ok(State {
            prompt,
            caches: Buffer::new(device, tokens * layers.len())?,
            known_caches: Vec::new(),
            hidden: floats(hidden)?,
            residual: floats(if is_parallel { hidden } else { 0 })?,
            query: floats(queries)?,
            key: floats(keys)?,
            value: floats(keys)?,
            mixed: floats(queries)?,
            rotations: Buffer::new(device, tokens * rotated_pairs)?,
            positions: Buffer::new(device, tokens)?,
            step: Buffer::new(device, 1)?,
            attention_partial: Buffer::new(device, partial.unwrap_or(0))?,
            attention_counters: Buffer::new(device, tokens * heads)?,
            units: floats(rank)?,
            kept: KeptInput::new(device, hidden, vectors)?,
            routes: Routes {
                logits: floats(expert_count)?,
                shared_logits: floats(blocks - expert_count)?,
                weights: floats(blocks)?,
                bias_sums: floats(if has_expert_biases { hidden } else { 0 })?,
                host: HostBuffer::new(device, tokens * blocks)?,
            },
            mask: Buffer::new(device, words)?,
            products: floats(wide)?,
            down,
            input: HostBuffer::new(device, tokens * hidden)?,
            predicted: HostBuffer::new(device, words)?,
            ready: HostBuffer::new(device, layers.len())?,
            cold: HostBuffer::new(device, tokens * hidden)?,
            done: HostBuffer::new(device, layers.len())?,
            timed_out: HostBuffer::new(device, 1)?,
            steps: 0,
            counts: NeuronCounts::default(),
        })
    }

    /// Tokens that there is room for.
    pub(crate) fn capacity(&self) -> usize {
        self.positions.capacity()
    }

    /// Sets the lengths of all buffers to `tokens` tokens.
    pub(crate) fn set_tokens(&mut self, tokens: usize) {
        let capacity = self.capacity();
        for buffer in [
            &mut self.hidden,
            &mut self.residual,
            &mut self.query,
            &mut self.key,
            &mut self.value,
            &mut self.mixed,
            &mut self.routes.logits,
            &mut self.routes.shared_logits,
            &mut self.routes.weights,
            &mut self.routes.bias_sums,
        ] {
            buffer.set_len(buffer.capacity() / capacity * tokens);
        }
        let (mask, positions) = (&mut self.mask, &mut self.positions);
        mask.set_len(mask.capacity() / capacity * tokens);
        positions.set_len(tokens);
        let (rotations, caches) = (&mut self.rotations, &mut self.caches);
        rotations.set_len(rotations.capacity() / capacity * tokens);
        caches.set_len(caches.capacity() / capacity * tokens);
    }

    /// Sets the KV caches of each token's sequence, by layer. `None` stands for a cache on the host; `copied` is the place of its copy.
    pub(crate) fn use_caches<'a>(
        &mut self,
        caches: impl Iterator<Item = &'a [Option<GpuCache>]>,
        copied: CachePlace,
    ) -> Result<(), DeviceError> {
        let place = |cache: &Option<GpuCache>| cache.as_ref().map_or(copied, GpuCache::place);
        let caches: Vec<CachePlace> = caches.flatten().map(place).collect();
        if !self.known_caches.starts_with(&caches) {
            self.caches.write(&caches)?;
            self.known_caches = caches;
        }
        Ok(())
    }

    /// Clears counters, which a pass that ended early may have left non-zero.
    pub(crate) fn reset(&mut self) -> Result<(), DeviceError> {
        self.attention_counters.clear()?;
        self.down.reset()?;
        if let Some(prompt) = &mut self.prompt {
            prompt.sums.reset()?;
        }
        self.counts = self.down.counts()?;
        Ok(())
    }

    /// Panics if the KV caches in use lack one of the `positions` of tokens: kernels would write outside them.
    pub(crate) fn check_positions(&self, positions: &[u32], layers: usize) {
        let places = self.known_caches.chunks(layers.max(1));
        for (position, places) in positions.iter().zip(places) {
            let has_room = |place: &CachePlace| place.has_room(*position as usize);
            assert!(
                places.iter().all(has_room),
                "position {position} of a KV cache"
            );
        }
    }

    /// Size in bytes on the device.
    pub(crate) fn bytes(&self) -> usize {
        let vectors = [
            &self.hidden,
            &self.residual,
            &self.query,
            &self.key,
            &self.value,
            &self.mixed,
            &self.attention_partial,
            &self.units,
            &self.products,
            &self.routes.logits,
            &self.routes.shared_logits,
            &self.routes.weights,
            &self.routes.bias_sums,
        ];
        let small = self.rotations.bytes() + self.mask.bytes() + self.attention_counters.bytes();
        let prompt = self.prompt.as_ref().map_or(0, |prompt| {
            let inputs = prompt.input.bytes() + prompt.products.bytes() + prompt.sums.bytes();
            let pieces = prompt.pieces.iter().flatten().map(Piece::bytes);
            let gathered = prompt.gathered.as_ref().map_or(0, Gathered::bytes);
            inputs + prompt.up.bytes() + gathered + pieces.sum::<usize>()
        });
        let vectors = vectors.into_iter().map(Buffer::bytes).sum::<usize>();
        vectors + small + self.kept.bytes() + self.caches.bytes() + self.down.bytes() + prompt
    }
}
