//! Buffers of the tokens that run: vectors on the device, and memory that both sides access.

use powerinfer_kernels::cuda::{
    Buffer, DeviceError, DownScratch, F16Buffer, Gpu, HostBuffer, NeuronCounts,
};

use crate::{
    DeviceLayer, ModelShape,
    cold_neurons::{PIECE, Piece},
};

/// Buffers of one token, or of up to `batch.capacity` tokens of a prompt.
#[derive(Debug)]
pub(crate) struct State {
    /// Buffers that only several tokens need; `None` for one.
    pub(crate) batch: Option<Batch>,
    pub(crate) hidden: Buffer<f32>,
    /// Input of the FFN where attention has already been added to `hidden`.
    pub(crate) residual: Buffer<f32>,
    pub(crate) query: Buffer<f32>,
    pub(crate) key: Buffer<f32>,
    pub(crate) value: Buffer<f32>,
    /// Weighted sums of values, before the output projection.
    pub(crate) mixed: Buffer<f32>,
    pub(crate) rotations: Buffer<[f32; 2]>,
    pub(crate) position: Buffer<u32>,
    pub(crate) step: Buffer<u32>,
    pub(crate) attention_partial: Buffer<f32>,
    pub(crate) attention_counters: Buffer<u32>,
    /// Predicted neurons, a bit each.
    pub(crate) mask: Buffer<u32>,
    /// Factors of the rows of down: `[tokens, hot]`.
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

/// Buffers of several tokens.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Tokens that there is room for.
    pub(crate) capacity: usize,
    /// Input of a matrix product in 16 bits.
    pub(crate) input: F16Buffer,
    /// Factors of the rows of down in 16 bits.
    pub(crate) products: F16Buffer,
    /// `[tokens, hot]`.
    pub(crate) up: Buffer<f32>,
    /// Hidden units of a predictor, `[tokens, rank]`.
    pub(crate) middle: Buffer<f32>,
    /// Cold neurons in copies that alternate.
    pub(crate) pieces: Option<[Piece; 2]>,
}

impl State {
    /// Zeroed buffers of up to `tokens` tokens of a model.
    pub(crate) fn new(
        gpu: &Gpu,
        shape: &ModelShape,
        layers: &[DeviceLayer],
        tokens: usize,
    ) -> Result<Self, DeviceError> {
        let device = gpu.device();
        let floats = |count: usize| Buffer::<f32>::new(device, tokens * count);
        let ModelShape {
            hidden,
            neurons,
            heads,
            kv_heads,
            head_size,
            rotated_pairs,
            context,
            ..
        } = *shape;
        let (queries, keys) = (heads * head_size, kv_heads * head_size);
        let words = tokens * neurons.div_ceil(32);
        let ffns = || layers.iter().filter_map(|layer| layer.ffn.as_ref());
        let hot = layers.iter().map(DeviceLayer::hot_count).max().unwrap_or(0);
        let streamed = || {
            let streams = |layer: &&DeviceLayer| {
                layer.ffn.is_some() && layer.streams_from.is_some_and(|least| tokens >= least)
            };
            layers.iter().filter(streams)
        };
        let cold = streamed().map(|layer| layer.neurons - layer.hot_count());
        let most_cold = cold.max().unwrap_or(0);
        let wide = hot.max(most_cold.min(PIECE));
        let batch = match tokens {
            1 => None,
            _ => Some(Batch {
                capacity: tokens,
                input: gpu.new_f16_buffer(tokens, hidden.max(queries))?,
                products: gpu.new_f16_buffer(tokens, wide)?,
                up: floats(wide)?,
                middle: floats(ffns().map(|ffn| ffn.selector.rank()).max().unwrap_or(0))?,
                pieces: match streamed().find_map(|layer| layer.ffn.as_ref()) {
                    None => None,
                    Some(ffn) => {
                        let piece = |number| Piece::new(device, number, &ffn.ffn, most_cold);
                        Some([piece(0)?, piece(1)?])
                    }
                },
            }),
        };
        // Several tokens add up rows of down by another kernel.
        let downs = ffns().map(|ffn| &ffn.ffn.down).filter(|_| tokens == 1);
        // A single token is shared between more thread blocks than one of several.
        let partial = [1, tokens]
            .map(|tokens| gpu.attention_scratch_len(tokens, heads, kv_heads, head_size, context))
            .into_iter()
            .max();
        Ok(State {
            batch,
            hidden: floats(hidden)?,
            residual: floats(hidden)?,
            query: floats(queries)?,
            key: floats(keys)?,
            value: floats(keys)?,
            mixed: floats(queries)?,
            rotations: Buffer::new(device, tokens * rotated_pairs)?,
            position: Buffer::new(device, 1)?,
            step: Buffer::new(device, 1)?,
            attention_partial: Buffer::new(device, partial.unwrap_or(0))?,
            attention_counters: Buffer::new(device, tokens * heads)?,
            mask: Buffer::new(device, words)?,
            products: floats(wide)?,
            down: gpu.down_scratch(downs)?,
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
        self.batch.as_ref().map_or(1, |batch| batch.capacity)
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
        ] {
            buffer.set_len(buffer.capacity() / capacity * tokens);
        }
        let (mask, rotations) = (&mut self.mask, &mut self.rotations);
        mask.set_len(mask.capacity() / capacity * tokens);
        rotations.set_len(rotations.capacity() / capacity * tokens);
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
            &self.products,
        ];
        let small = self.rotations.bytes() + self.mask.bytes() + self.attention_counters.bytes();
        let batch = self.batch.as_ref().map_or(0, |batch| {
            let inputs = batch.input.bytes() + batch.products.bytes();
            let pieces = batch.pieces.iter().flatten().map(Piece::bytes);
            inputs + batch.up.bytes() + batch.middle.bytes() + pieces.sum::<usize>()
        });
        vectors.into_iter().map(Buffer::bytes).sum::<usize>() + small + self.down.bytes() + batch
    }
}
