//! The parts of a model on a device, and the tokens that run.

use std::sync::Arc;

use powerinfer_kernels::cuda::{Buffer, Device, DeviceError, Gpu, GpuCache, NeuronCounts};
use powerinfer_model::{ModelConfig, Positions};
use powerinfer_tensor::CacheFormat;

use crate::{DeviceHead, DeviceLayer, segments::GraphSegments, state::State};

/// Sizes of a model and of its KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelShape {
    /// Size of the hidden state.
    pub hidden: usize,
    /// Neurons of a layer.
    pub neurons: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Numbers of a head.
    pub head_size: usize,
    /// Pairs of numbers of a head that are rotated.
    pub rotated_pairs: usize,
    /// Positions of a KV cache.
    pub context: usize,
    /// Number format of a KV cache.
    pub cache_format: CacheFormat,
}

impl ModelShape {
    /// Shape of a model with KV caches of `context` positions in `cache_format`.
    pub fn new(config: &ModelConfig, context: usize, cache_format: CacheFormat) -> Self {
        Self {
            hidden: config.hidden_size,
            neurons: config.ffn_size,
            heads: config.head_count,
            kv_heads: config.kv_head_count,
            head_size: config.head_size,
            rotated_pairs: match &config.positions {
                Positions::Rotary(rotary) => rotary.frequencies.len(),
                _ => 0,
            },
            context,
            cache_format,
        }
    }
}

/// Layers of a model on a device, and the buffers of the tokens that run.
///
/// A pass is [`start`](Self::start), the steps of each layer in the order of the forward pass, and
/// [`end_segment`](Self::end_segment) before the host reads a result.
#[derive(Debug)]
pub struct DeviceModel {
    pub(crate) gpu: Gpu,
    pub(crate) shape: ModelShape,
    pub(crate) layers: Vec<DeviceLayer>,
    pub(crate) head: Option<DeviceHead>,
    /// Buffers of the pass that runs.
    pub(crate) state: State,
    /// Buffers of a token while a prompt runs, of a prompt while a token runs; `None` without room for a prompt.
    prompt: Option<State>,
    /// `[layers]`: addresses of the sequence's keys and values, zeros where the host has them.
    pub(crate) caches: Buffer<[u64; 2]>,
    /// The same on the host.
    known_caches: Vec<[u64; 2]>,
    /// Tokens of the pass that runs.
    pub(crate) tokens: usize,
    /// The layer that runs.
    pub(crate) layer: usize,
    /// Whether all launches of the pass are made before the host computes its parts.
    pub(crate) is_launched_ahead: bool,
    /// Whether the next token is one that failed with graphs.
    is_retried: bool,
    pub(crate) segments: GraphSegments,
}

impl DeviceModel {
    /// A model of `layers` and `head`, with buffers for one token.
    ///
    /// # Errors
    ///
    /// Returns an error if the device has no room for the buffers.
    pub fn new(
        gpu: Gpu,
        shape: ModelShape,
        layers: Vec<DeviceLayer>,
        head: Option<DeviceHead>,
    ) -> Result<Self, DeviceError> {
        let state = State::new(&gpu, &shape, &layers, 1)?;
        Self::with_state(gpu, shape, layers, head, state)
    }

    /// As [`new`](Self::new), with the buffers `state`.
    pub(crate) fn with_state(
        gpu: Gpu,
        shape: ModelShape,
        layers: Vec<DeviceLayer>,
        head: Option<DeviceHead>,
        state: State,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            caches: Buffer::new(gpu.device(), layers.len())?,
            known_caches: vec![[0; 2]; layers.len()],
            tokens: state.capacity(),
            state,
            prompt: None,
            layer: 0,
            is_launched_ahead: false,
            is_retried: false,
            segments: GraphSegments::new(gpu.device()),
            gpu,
            shape,
            layers,
            head,
        })
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        self.gpu.device()
    }

    /// Number of layers, on either side.
    pub fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// Layer `index`.
    ///
    /// # Panics
    ///
    /// Panics if there is no such layer.
    pub fn layer(&self, index: usize) -> &DeviceLayer {
        &self.layers[index]
    }

    /// Size in bytes on the device, without KV caches.
    pub fn bytes(&self) -> usize {
        let layers: usize = self.layers.iter().map(DeviceLayer::bytes).sum();
        let head = self.head.as_ref().map_or(0, DeviceHead::bytes);
        let prompt = self.prompt.as_ref().map_or(0, State::bytes);
        layers + head + self.state.bytes() + prompt
    }

    /// Empty KV caches of the layers that have them on the device, `None` for the others.
    ///
    /// # Errors
    ///
    /// Returns an error if the device has no room for them.
    pub fn new_caches(&self) -> Result<Vec<Option<GpuCache>>, DeviceError> {
        let ModelShape {
            cache_format,
            kv_heads,
            context,
            head_size,
            ..
        } = self.shape;
        let new = |layer: &DeviceLayer| {
            let cache = || GpuCache::new(self.device(), cache_format, kv_heads, context, head_size);
            layer.has_cache.then(cache).transpose()
        };
        self.layers.iter().map(new).collect()
    }

    /// Makes room for prompts of up to `tokens` tokens at a time, half as many as long as the device has no room for
    /// them or the size of their buffers in bytes does not pass `fits`.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails, but not for lack of memory.
    pub fn allocate_prompt_buffers(
        &mut self,
        tokens: usize,
        fits: impl Fn(usize) -> bool,
    ) -> Result<(), DeviceError> {
        let mut tokens = tokens.min(self.shape.context);
        while tokens > 1 {
            match State::new(&self.gpu, &self.shape, &self.layers, tokens) {
                Ok(state) if fits(state.bytes()) => {
                    self.prompt = Some(state);
                    return Ok(());
                }
                Ok(_) | Err(DeviceError::OutOfMemory { .. }) => {}
                Err(other) => return Err(other),
            }
            tokens /= 2;
        }
        Ok(())
    }

    /// Tokens of a prompt that run at a time.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt.as_ref().map_or(1, State::capacity)
    }

    /// Sets the KV caches, one per layer, of the sequence whose passes follow; `None` where the host has one.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    pub fn use_caches(&mut self, caches: &[Option<GpuCache>]) -> Result<(), DeviceError> {
        let address = |cache: &Option<GpuCache>| cache.as_ref().map_or([0; 2], GpuCache::addresses);
        let caches: Vec<[u64; 2]> = caches.iter().map(address).collect();
        if caches != self.known_caches {
            self.caches.write(&caches)?;
            self.known_caches = caches;
        }
        Ok(())
    }

    /// Begins a pass of a single token: captured graphs are replayed, unless the host is to read between kernels
    /// (`is_observed`).
    pub fn begin_token(&mut self, is_observed: bool) {
        self.is_launched_ahead = false;
        let is_retried = std::mem::take(&mut self.is_retried);
        self.segments.pause(is_observed || is_retried);
    }

    /// Switches to the buffers of a prompt, for `tokens` tokens, or back to those of a single token.
    ///
    /// # Panics
    ///
    /// Panics if there is no room for prompts.
    pub fn use_prompt_buffers(&mut self, tokens: usize) {
        self.is_launched_ahead = false;
        let prompt = self.prompt.as_mut().expect("room for several tokens");
        std::mem::swap(&mut self.state, prompt);
        self.segments.pause(tokens > 1);
        self.set_tokens(tokens);
    }

    pub(crate) fn set_tokens(&mut self, tokens: usize) {
        self.tokens = tokens;
        self.state.set_tokens(tokens);
    }

    /// Starts the pass at `position`, with the `rotations` of its tokens, `[tokens, pairs]`.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    pub fn start(&mut self, position: usize, rotations: &[[f32; 2]]) -> Result<(), DeviceError> {
        let state = &mut self.state;
        state.steps = state.steps.wrapping_add(1).max(1);
        state.step.write(&[state.steps])?;
        state.position.write(&[position as u32])?;
        state.rotations.write(rotations)
    }

    /// Launches all of the pass before the host computes its parts, if `is_allowed` and if the device waits for the
    /// host only in kernels that add cold sums.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    pub fn launch_ahead(&mut self, is_allowed: bool) -> Result<(), DeviceError> {
        let is_here = |layer: &DeviceLayer| {
            layer.has_cache && layer.has_neurons() && !layer.is_predicted_on_host()
        };
        self.is_launched_ahead = is_allowed
            && self.tokens == 1
            && self.layers.iter().all(is_here)
            && self.segments.are_recorded()?;
        Ok(())
    }

    /// Whether all of the pass is launched before the host computes its parts.
    pub fn is_launched_ahead(&self) -> bool {
        self.is_launched_ahead
    }

    /// Begins layer `index`: what is launched and waited for is accounted to it.
    pub fn begin_layer(&mut self, index: usize) {
        self.layer = index;
    }

    /// Submits the launches so far, before the host reads or changes memory of the device.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    pub fn end_segment(&mut self) -> Result<(), DeviceError> {
        self.segments.end(self.layer)
    }

    /// Discards what a failed token has captured. Returns whether graphs may have been the cause: the next token runs
    /// without.
    pub fn discard_capture(&mut self) -> bool {
        self.is_retried = self.segments.fail();
        self.is_retried
    }

    /// Why no more graphs are captured, if that has failed.
    pub fn graph_failure(&self) -> Option<&DeviceError> {
        self.segments.failure()
    }

    /// Whether the device's time is measured for every graph segment from now on.
    pub fn set_timed(&mut self, is_timed: bool) {
        self.segments.set_timed(is_timed);
    }

    /// Seconds of each graph segment of the last pass, with the layer in which it ended.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    pub fn take_segment_times(&mut self) -> Result<Vec<(usize, f64)>, DeviceError> {
        self.segments.take_times()
    }

    /// Factors of the rows of down in layer `index`, `[hot]`, after [`gate_up`](Self::gate_up) of an observed token; those of
    /// inactive neurons are 0.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    pub fn read_products(&self, index: usize) -> Result<Vec<f32>, DeviceError> {
        let mut products = vec![0.0; self.layers[index].hot_count()];
        self.state.products.read_at(0, &mut products)?;
        Ok(products)
    }

    /// Neurons computed on the device since the last call; the pass is complete.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    pub fn take_counts(&mut self) -> Result<NeuronCounts, DeviceError> {
        let now = self.state.down.counts()?;
        Ok(now.since(std::mem::replace(&mut self.state.counts, now)))
    }
}
