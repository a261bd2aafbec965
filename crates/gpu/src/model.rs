//! The parts of a model on a device, and the tokens that run.

use std::sync::Arc;

use powerinfer_artifact::plan::{ATTENTION, HEAD, HOT_NEURONS, PREDICTORS, SCRATCH};
use powerinfer_kernels::cuda::{
    CacheShape, Device, DeviceError, Gpu, GpuCache, NeuronCounts, StagingStream,
};
use powerinfer_model::{ModelConfig, Positions};
use powerinfer_tensor::CacheFormat;

use crate::{
    CopiedParts, DeviceHead, DeviceLayer,
    head::Embedded,
    segments::GraphSegments,
    state::{PROMPT, Products, State},
};

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
    /// Whether the FFN reads the same hidden state as attention.
    pub is_parallel: bool,
    /// Pairs of numbers of a head that are rotated.
    pub rotated_pairs: usize,
    /// Numbers of experts and of blocks of neurons, in a mixture of experts; otherwise 0.
    pub experts: [usize; 2],
    /// Whether each expert has a down bias.
    pub has_expert_biases: bool,
    /// Maximum number of positions of a KV cache.
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
            is_parallel: config.block.is_parallel(),
            rotated_pairs: match &config.positions {
                Positions::Rotary(rotary) => rotary.frequencies.len(),
                _ => 0,
            },
            experts: (config.experts.as_ref())
                .map_or([0; 2], |experts| [experts.count, experts.blocks()]),
            has_expert_biases: config.experts.is_some() && config.biases.ffn,
            context,
            cache_format,
        }
    }

    /// Shape of the largest KV cache of a layer.
    pub(crate) fn cache(&self) -> CacheShape {
        CacheShape {
            format: self.cache_format,
            kv_heads: self.kv_heads,
            head_size: self.head_size,
            context: self.context,
        }
    }
}

/// Layers of a model on a device, and the buffers of the tokens that run.
///
/// A pass is [`start`](Self::start), the steps of each layer in the order of the forward pass, and
/// [`end_segment`](Self::end_segment) before the host reads a result.
#[derive(Debug)]
pub struct DeviceModel {
    // Dropped before the layers to which it copies.
    /// Pinned memory for experts that are copied to layers; `None` if none are.
    pub(crate) expert_copies: Option<StagingStream>,
    pub(crate) gpu: Gpu,
    pub(crate) shape: ModelShape,
    pub(crate) layers: Vec<DeviceLayer>,
    pub(crate) head: Option<DeviceHead>,
    /// Buffers of the pass that runs: those of a batch, unless a prompt runs.
    pub(crate) state: State,
    /// Memory for the parts that long prompts copy to the device.
    pub(crate) copied: Option<CopiedParts>,
    /// Minimum number of tokens of a pass that copies them.
    pub(crate) copies_from: usize,
    /// Buffers of a batch while a prompt runs, else of a prompt; `None` without room for a prompt.
    other: Option<State>,
    /// Tokens of the pass that runs.
    pub(crate) tokens: usize,
    /// The layer that runs.
    pub(crate) layer: usize,
    /// Whether all launches of the pass are made before the host computes its parts.
    pub(crate) is_launched_ahead: bool,
    /// Whether the next token is one that failed with graphs.
    is_retried: bool,
    /// Whether the hidden state is the embedding of the token that the head has found.
    pub(crate) embedded: Embedded,
    /// Whether counters have been cleared since a pass failed.
    is_reset: bool,
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
        let state = State::new(&gpu, &shape, &layers, None, 1, Products::Gemv)?;
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
            expert_copies: None,
            tokens: state.capacity(),
            state,
            other: None,
            copied: None,
            copies_from: 0,
            layer: 0,
            is_launched_ahead: false,
            is_retried: false,
            embedded: Embedded::No,
            is_reset: true,
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

    /// Shape of the largest KV cache of a layer.
    pub fn cache_shape(&self) -> CacheShape {
        self.shape.cache()
    }

    /// Size in bytes on the device, without KV caches.
    pub fn bytes(&self) -> usize {
        self.memory().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Sizes in bytes on the device, without KV caches, by the lines of a plan.
    pub fn memory(&self) -> [(&'static str, usize); 5] {
        let (mut attention, mut predictors, mut neurons) = (0, 0, 0);
        for layer in &self.layers {
            let [around, predictor, ffn] = layer.bytes();
            attention += around;
            predictors += predictor;
            neurons += ffn;
        }
        let [head, results] = self.head.as_ref().map_or([0; 2], DeviceHead::bytes);
        let other = self.other.as_ref().map_or(0, State::bytes);
        let copied = self.copied.as_ref().map_or(0, CopiedParts::bytes);
        [
            (ATTENTION, attention),
            (PREDICTORS, predictors),
            (HEAD, head),
            (HOT_NEURONS, neurons),
            (SCRATCH, self.state.bytes() + other + copied + results),
        ]
    }

    /// Bytes of the embedding's copy in pinned host memory; 0 without a copy.
    pub fn pinned_embedding_bytes(&self) -> usize {
        self.head.as_ref().map_or(0, DeviceHead::pinned_bytes)
    }

    /// Layers whose KV cache is on the device.
    pub fn cached_layers(&self) -> usize {
        let layers = self.layers.iter();
        layers.filter(|layer| layer.has_cache).count()
    }

    /// Empty KV caches of `context` positions, at most the model's, of the layers that have them on the device, `None` for the
    /// others.
    ///
    /// # Errors
    ///
    /// Returns an error if the device has no room for them.
    pub fn new_caches(&self, context: usize) -> Result<Vec<Option<GpuCache>>, DeviceError> {
        let shape = CacheShape {
            context: context.min(self.shape.context),
            ..self.shape.cache()
        };
        let new = |layer: &DeviceLayer| {
            let cache = || GpuCache::new(self.device(), shape);
            layer.has_cache.then(cache).transpose()
        };
        self.layers.iter().map(new).collect()
    }

    /// Whether `caches` are [those](Self::new_caches) of a sequence of this model on this device, of any context.
    pub fn owns(&self, caches: &[Option<GpuCache>]) -> bool {
        let fits = |(layer, cache): (&DeviceLayer, &Option<GpuCache>)| match cache {
            Some(cache) => layer.has_cache && cache.fits(self.device(), &self.shape.cache()),
            None => !layer.has_cache,
        };
        caches.len() == self.layers.len() && self.layers.iter().zip(caches).all(fits)
    }

    /// Lets passes of at least `from` prompt tokens copy the parts that the device lacks to `parts`. Call it before
    /// [`allocate_prompt_buffers`](Self::allocate_prompt_buffers).
    pub fn use_copied_parts(&mut self, parts: CopiedParts, from: usize) {
        (self.copied, self.copies_from) = (Some(parts), from);
    }

    /// Makes room for prompts of up to `tokens` tokens at a time, half as many as long as the device has no room for
    /// them or their size in bytes does not pass `fits`; then for batches, in the same way.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails, but not for lack of memory.
    pub fn allocate_prompt_buffers(
        &mut self,
        tokens: usize,
        fits: impl Fn(usize) -> bool,
    ) -> Result<(), DeviceError> {
        let tokens = tokens.min(self.shape.context);
        let copied = self.copied.as_ref().map_or(0, CopiedParts::bytes);
        let fits_prompt = |state: &State| fits(state.bytes() + copied);
        let mut prompt = None;
        let mut tokens = tokens;
        if self.copied.is_some() {
            // Passes of fewer tokens copy no parts, so they need no memory for copies.
            let fewer = self.copies_from - 1;
            prompt = self.new_state(tokens, fewer, PROMPT, fits_prompt)?;
            if prompt.is_none() {
                self.copied = None;
                tokens = tokens.min(fewer);
            }
        }
        let fits_prompt = |state: &State| fits(state.bytes());
        if prompt.is_none() {
            prompt = self.new_state(tokens, Gpu::BATCH, PROMPT, fits_prompt)?;
        }
        self.other = prompt;
        let copied = self.copied.as_ref().map_or(0, CopiedParts::bytes);
        let prompt = self.other.as_ref().map_or(0, State::bytes) + copied;
        // Those of a single token are replaced.
        let single = self.state.bytes();
        let logits = self.head.as_ref().map_or(0, DeviceHead::bytes_per_token);
        let fits_batch = |state: &State| {
            let more_logits = (state.capacity() - 1) * logits;
            fits((prompt + state.bytes() + more_logits).saturating_sub(single))
        };
        let mut most = self.most_batch_tokens();
        while let Some(batch) = self.new_state(most, 1, Products::Gemv, fits_batch)? {
            let (tokens, device) = (batch.capacity(), self.gpu.device());
            let head = self.head.as_mut();
            match head.map_or(Ok(()), |head| head.allocate(tokens, device)) {
                Ok(()) => {
                    // The captured graphs use the previous buffers.
                    self.segments = GraphSegments::new(self.gpu.device());
                    self.state = batch;
                    self.embedded = Embedded::No;
                    break;
                }
                Err(DeviceError::OutOfMemory { .. }) => most = tokens / 2,
                Err(other) => return Err(other),
            }
        }
        self.set_tokens(1);
        Ok(())
    }

    /// Buffers for as many tokens as there is room for, up to `tokens`; `None` if there is room for no more than `fewer`.
    fn new_state(
        &self,
        mut tokens: usize,
        fewer: usize,
        products: Products,
        fits: impl Fn(&State) -> bool,
    ) -> Result<Option<State>, DeviceError> {
        while tokens > fewer {
            let (gpu, layers) = (&self.gpu, &self.layers);
            let copied = self.copied_parts(tokens);
            match State::new(gpu, &self.shape, layers, copied, tokens, products) {
                Ok(state) if fits(&state) => return Ok(Some(state)),
                Ok(_) | Err(DeviceError::OutOfMemory { .. }) => {}
                Err(other) => return Err(other),
            }
            tokens /= 2;
        }
        Ok(None)
    }

    /// Tokens of a batch, as far as shared memory goes.
    fn most_batch_tokens(&self) -> usize {
        let ffns = self.layers.iter().filter_map(|layer| layer.ffn.as_ref());
        let fits = ffns.map(|found| {
            let gate = &found.ffn.gate.matrix;
            let neurons = gate.rows();
            self.gpu
                .batch_tokens(gate.columns(), gate.format(), neurons)
        });
        fits.fold(Gpu::BATCH, usize::min)
    }

    /// Whether the device computes everything between the embedding and the head.
    pub fn computes_all_layers(&self) -> bool {
        self.layers.iter().all(|layer| {
            let has_ffn = layer.hot_count() == layer.neurons && !layer.is_predicted_on_host();
            layer.attention.is_some() && layer.has_cache && has_ffn
        })
    }

    /// Tokens of a prompt that run at a time.
    pub fn prompt_tokens(&self) -> usize {
        let prompt = self.other.as_ref().map_or(1, State::capacity);
        prompt.max(self.batch_tokens())
    }

    /// Most tokens, of any sequences, that run at a time with results that match running each alone.
    pub fn batch_tokens(&self) -> usize {
        self.state.capacity()
    }

    /// Begins a pass of `caches.len()` tokens with the KV caches, by layer, of each token's sequence; `None` if the host has the
    /// cache. The caller keeps the caches until [`end`](Self::end). Captured graphs of a single token are replayed, unless the
    /// host is to read between kernels (`is_observed`).
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    ///
    /// # Panics
    ///
    /// Panics if there is no room for so many tokens, or caches are not [of this model](Self::owns).
    pub fn begin(
        &mut self,
        caches: &[&[Option<GpuCache>]],
        is_observed: bool,
    ) -> Result<(), DeviceError> {
        let tokens = caches.len();
        assert!(
            caches.iter().all(|caches| self.owns(caches)),
            "caches of this model"
        );
        // Also ends a pass that has ended with a panic.
        self.end();
        self.embedded = Embedded::No;
        let is_retried = std::mem::take(&mut self.is_retried);
        self.segments.pause(tokens > 1 || is_observed || is_retried);
        if tokens > self.state.capacity() {
            self.swap_buffers();
        }
        if !self.is_reset {
            self.state.reset()?;
            self.is_reset = true;
        }
        self.set_tokens(tokens);
        let copied = self.copied_parts(tokens).and_then(CopiedParts::cache);
        let copied = copied.map(GpuCache::place).unwrap_or_default();
        self.state.use_caches(caches.iter().copied(), copied)
    }

    /// Ends a pass, complete or failed.
    pub fn end(&mut self) {
        self.is_launched_ahead = false;
        if self.state.prompt.is_some() {
            self.swap_buffers();
        }
    }

    fn swap_buffers(&mut self) {
        let other = self.other.as_mut().expect("room for so many tokens");
        std::mem::swap(&mut self.state, other);
    }

    pub(crate) fn set_tokens(&mut self, tokens: usize) {
        self.tokens = tokens;
        self.state.set_tokens(tokens);
    }

    /// Starts the pass of tokens at `positions` with their `rotations`, `[tokens, pairs]`.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    ///
    /// # Panics
    ///
    /// Panics if a position is outside its sequence's caches.
    pub fn start(
        &mut self,
        positions: impl Iterator<Item = usize>,
        rotations: &[[f32; 2]],
    ) -> Result<(), DeviceError> {
        let positions: Vec<u32> = positions.map(|position| position as u32).collect();
        assert_eq!(positions.len(), self.tokens, "a position per token");
        let state = &mut self.state;
        state.check_positions(&positions, self.layers.len());
        state.steps = state.steps.wrapping_add(1).max(1);
        state.step.write(&[state.steps])?;
        state.positions.write(&positions)?;
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

    /// Resets what a failed pass may have left behind; `error` is the device's, if the device failed. Returns whether the token is
    /// to be run again without graphs, because graphs are the cause.
    pub fn recover(&mut self, error: Option<&DeviceError>) -> bool {
        if self.is_launched_ahead {
            self.release_waiting_kernels();
        }
        self.is_retried = self.segments.fail(error) && self.tokens == 1;
        // A lost device runs no further pass.
        self.is_reset = self.state.reset().is_ok();
        self.end();
        self.is_retried && self.is_reset
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
