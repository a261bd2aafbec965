//! A layer of a checkpoint on a device whose active neurons are counted there; only the activations of wanted tokens are
//! copied back.

use std::sync::Arc;

use powerinfer_kernels::{
    Arithmetic,
    cuda::{ActivityCounts, CachePlace, Device, DeviceError, Gpu, GpuCache, WINDOWS},
};
use powerinfer_model::{ModelConfig, Positions};
use powerinfer_tensor::CacheFormat;

use crate::{
    DeviceFfn, DeviceLayer, DeviceModel, DeviceSelector, FfnInput, LayerWeights, ModelShape,
    Upload,
    state::{Products, State},
};

/// Tokens that run at a time.
const BATCH: usize = 256;

/// A layer on a device with counts of its active neurons.
///
/// Weights are those of the checkpoint, bit for bit; keys, values and products have 32 bits.
#[derive(Debug)]
pub struct ObservedLayer {
    model: DeviceModel,
    _cache: [Option<GpuCache>; 1],
    counts: ActivityCounts,
    positions: Positions,
    reads: FfnInput,
    contribution_norms: Vec<f32>,
}

/// Input and activations of the FFN for one token of a text.
#[derive(Debug, Clone, Copy)]
pub struct ObservedToken<'a> {
    /// Index of the token in the text.
    pub token: usize,
    /// Hidden state before the FFN's norm, `[hidden]`.
    pub residual: &'a [f32],
    /// Input of the FFN, after its norm, `[hidden]`.
    pub input: &'a [f32],
    /// Factors of the rows of down, `[ffn]`: `act(gate·x) · (up·x)`, or `act(gate·x)` in plain FFNs.
    pub product: &'a [f32],
}

impl ObservedLayer {
    /// Uploads the `weights` of layer `layer` of a model to `device`, with room for texts of up to `longest` tokens. Active
    /// neurons are counted for each of `parts` parts of the text, and so are those that were also active within each of
    /// `windows` preceding tokens.
    ///
    /// # Errors
    ///
    /// Returns an error if the device has no room for the layer and two tokens.
    pub fn new(
        device: &Arc<dyn Device>,
        config: &ModelConfig,
        layer: usize,
        weights: &LayerWeights,
        longest: usize,
        parts: usize,
        windows: [usize; WINDOWS],
    ) -> Result<Self, DeviceError> {
        let upload = Upload { device, config };
        let neurons = config.ffn_size;
        let slopes = upload.slopes()?;
        let on_device = DeviceLayer {
            attention: Some(upload.attention(weights, layer, slopes.as_ref())?),
            has_cache: true,
            neurons,
            streams_from: None,
            ffn: Some(DeviceFfn {
                norm: upload.ffn_norm(weights)?,
                ffn: upload.ffn(weights, neurons)?,
                selector: DeviceSelector::Dense,
                router: None,
                experts: Vec::new(),
                offset: None,
            }),
            norms_after: upload.norms_after(weights)?,
        };
        // Products are those of 32 bits.
        let gpu = Gpu::new(Arc::clone(device), Arithmetic::Float);
        let shape = ModelShape::new(config, longest, CacheFormat::F32);
        let cache = GpuCache::new(device, shape.cache())?;
        let counts = gpu.new_activity_counts(neurons, parts, windows)?;
        let layers = vec![on_device];
        let mut tokens = BATCH.min(longest).max(2);
        // Activations of all neurons are read together.
        let products = Products::Gemm { neurons };
        let state = loop {
            match State::new(&gpu, &shape, &layers, None, tokens, products) {
                Err(DeviceError::OutOfMemory { .. }) if tokens > 2 => tokens = tokens.div_ceil(2),
                other => break other?,
            }
        };
        let mut model = DeviceModel::with_state(gpu, shape, layers, None, state)?;
        model.segments.pause(true);
        let cache = [Some(cache)];
        model.state.use_caches(
            std::iter::repeat_n(&cache[..], tokens),
            CachePlace::default(),
        )?;
        Ok(Self {
            model,
            _cache: cache,
            counts,
            positions: config.positions.clone(),
            reads: if config.block.is_parallel() {
                FfnInput::Residual
            } else {
                FfnInput::Hidden
            },
            contribution_norms: weights.contribution_norms().to_vec(),
        })
    }

    /// L2 norm of every neuron's row of down, `[ffn]`: the contribution of an activation of one.
    pub fn contribution_norms(&self) -> &[f32] {
        &self.contribution_norms
    }

    /// Counts of active neurons so far, by the parts given to [`forward`](Self::forward).
    pub fn counts(&self) -> &ActivityCounts {
        &self.counts
    }

    /// Runs a text, `[tokens, hidden]`, from position 0 through the layer and counts its active neurons as of `part`;
    /// returns the output, `[tokens, hidden]`. Calls `observe` with the tokens that are `wanted`, in order.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    ///
    /// # Panics
    ///
    /// Panics if the text is longer than there is room for.
    pub fn forward(
        &mut self,
        text: &[f32],
        part: usize,
        wanted: impl Fn(usize) -> bool,
        mut observe: impl FnMut(ObservedToken<'_>),
    ) -> Result<Vec<f32>, DeviceError> {
        let ModelShape {
            hidden, context, ..
        } = self.model.shape;
        let capacity = self.model.state.capacity();
        assert!(text.len() <= context * hidden, "room for the text");
        let mut out = vec![0.0; text.len()];
        let batches = text
            .chunks(capacity * hidden)
            .zip(out.chunks_mut(capacity * hidden));
        for (index, (from, to)) in batches.enumerate() {
            let first = index * capacity;
            let tokens = first..first + from.len() / hidden;
            let wanted = tokens.clone().filter(|token| wanted(*token)).collect();
            self.batch(first, from, part, wanted, &mut observe)?;
            self.model.down(0, false)?;
            self.model.norm_after(0)?;
            self.model.state.hidden.read(to)?;
        }
        Ok(out)
    }

    /// Runs some tokens up to gate and up.
    fn batch(
        &mut self,
        first: usize,
        hidden: &[f32],
        part: usize,
        wanted: Vec<usize>,
        observe: &mut impl FnMut(ObservedToken<'_>),
    ) -> Result<(), DeviceError> {
        let model = &mut self.model;
        let ModelShape {
            hidden: size,
            neurons,
            ..
        } = model.shape;
        let tokens = hidden.len() / size;
        model.set_tokens(tokens);
        let rotations: Vec<[f32; 2]> = match &self.positions {
            Positions::Rotary(rotary) => (first..first + tokens)
                .flat_map(|position| rotary.rotations(position))
                .collect(),
            _ => Vec::new(),
        };
        model.start(first..first + tokens, &rotations)?;
        model.state.hidden.write(hidden)?;
        if self.reads == FfnInput::Residual {
            model.keep_residual()?;
        }
        model.project_attention(0)?;
        model.attend(0)?;
        model.add_attention(0)?;
        model.gate_up(0, self.reads, !wanted.is_empty())?;
        let (gpu, state) = (&model.gpu, &model.state);
        gpu.observe(&state.products, first, part, &mut self.counts)?;
        if wanted.is_empty() {
            return Ok(());
        }
        let (mut product, mut residual) = (vec![0.0; neurons], vec![0.0; size]);
        let source = match self.reads {
            FfnInput::Residual => &state.residual,
            FfnInput::Hidden => &state.hidden,
        };
        let mut inputs = vec![0.0; tokens * size];
        // Host memory is complete once the kernels that write it are done.
        gpu.device().synchronise()?;
        state.input.read_f32(&mut inputs);
        for token in wanted {
            let row = token - first;
            state.products.read_at(row * neurons, &mut product)?;
            source.read_at(row * size, &mut residual)?;
            observe(ObservedToken {
                token,
                residual: &residual,
                input: &inputs[row * size..][..size],
                product: &product,
            });
        }
        Ok(())
    }
}
