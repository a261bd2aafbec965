//! A layer of a checkpoint through which text goes on a device, and whose FFN is watched: who fires is counted
//! there, and only what somebody asks for comes back.

use std::sync::Arc;

use powerinfer_kernels::{
    Arithmetic,
    cuda::{ActivityCounts, Device, DeviceError, Gpu, GpuCache, WINDOWS},
};
use powerinfer_model::{Block, ModelConfig, Positions};
use powerinfer_tensor::CacheFormat;

use super::{
    DeviceChoice, DeviceFfn, DeviceLayer, Hybrid,
    launches::Source,
    place,
    segments::GraphSegments,
    upload::{LayerWeights, Upload},
};
use crate::{RuntimeError, rotary};

/// Most tokens that go through a layer at once.
const BATCH: usize = 256;

/// A layer on a device, and what is counted of its neurons.
///
/// Weights are those of the checkpoint, bit by bit; keys and values are kept in 32 bits, and products are those
/// of 32 bits up to the order of sums.
#[derive(Debug)]
pub struct ObservedLayer {
    hybrid: Hybrid,
    cache: GpuCache,
    tally: ActivityCounts,
    positions: Positions,
    sees: Source,
    contribution_norms: Vec<f32>,
}

/// What one token of a text makes of a layer's FFN.
#[derive(Debug, Clone, Copy)]
pub struct ObservedToken<'a> {
    /// Which token of the text.
    pub token: usize,
    /// What goes into the FFN's norm, or into the FFN where it has none: `[hidden]`.
    pub residual: &'a [f32],
    /// The FFN's input, after its norm: `[hidden]`.
    pub input: &'a [f32],
    /// `act(gate·x) · (up·x)`, or `act(gate·x)` where there is no up: `[ffn]`.
    pub product: &'a [f32],
}

impl ObservedLayer {
    /// Copies the `weights` of layer `layer` of a model to `device`, with room for texts of up to `longest` tokens that
    /// are counted apart in so many `parts`. Who fired within each of `windows` tokens before is counted too.
    ///
    /// Fails where the device has no room for the layer and two tokens.
    pub fn new(
        device: &Arc<dyn Device>,
        config: &ModelConfig,
        layer: usize,
        weights: &LayerWeights,
        longest: usize,
        parts: usize,
        windows: [usize; WINDOWS],
    ) -> Result<Self, RuntimeError> {
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
                choice: DeviceChoice::Every,
                offset: None,
            }),
            norms_after: upload.norms_after(weights)?,
        };
        let layers = vec![on_device];
        // Nothing is rounded to bytes.
        let gpu = Gpu::new(Arc::clone(device), Arithmetic::Float);
        let (kv_heads, head_size) = (config.kv_head_count, config.head_size);
        let cache_format = CacheFormat::F32;
        let cache = GpuCache::new(device, cache_format, kv_heads, longest, head_size)?;
        let tally = gpu.new_activity_counts(neurons, parts, windows)?;
        let mut tokens = BATCH.min(longest).max(2);
        let state = loop {
            match place::state(&gpu, config, &layers, longest, tokens) {
                Err(DeviceError::OutOfMemory { .. }) if tokens > 2 => tokens = tokens.div_ceil(2),
                other => break other?,
            }
        };
        let mut segments = GraphSegments::new(device);
        segments.pause(true);
        Ok(Self {
            hybrid: Hybrid {
                gpu,
                layers,
                head: None,
                cache_format,
                context: longest,
                kv_heads,
                head_size,
                state,
                prompt: None,
                tokens,
                layer: 0,
                is_whole: false,
                times: None,
                segments,
                hidden_on_device: false,
            },
            cache,
            tally,
            positions: config.positions.clone(),
            sees: match config.block {
                Block::Parallel | Block::ParallelSharedNorm => Source::Residual,
                Block::PreNorm | Block::PostNorm => Source::Hidden,
            },
            contribution_norms: weights.contribution_norms().to_vec(),
        })
    }

    /// L2 norm of every neuron's row of down, `[ffn]`: what a unit of its activation contributes.
    pub fn contribution_norms(&self) -> &[f32] {
        &self.contribution_norms
    }

    /// What has been counted; parts of the text are numbered as they were given.
    pub fn tally(&self) -> &ActivityCounts {
        &self.tally
    }

    /// Takes a text, `[tokens, hidden]`, from its first position through the layer, and counts its neurons as of
    /// `part`; returns what comes out. `see` gets the tokens that are `wanted`, in order.
    ///
    /// Panics where the text is longer than there is room for.
    pub fn forward(
        &mut self,
        text: &[f32],
        part: usize,
        wanted: impl Fn(usize) -> bool,
        mut see: impl FnMut(ObservedToken<'_>),
    ) -> Result<Vec<f32>, RuntimeError> {
        let most = self.hybrid.state.many.as_ref().map_or(1, |many| many.most);
        let hidden = self.hybrid.state.hidden.capacity() / most;
        assert!(text.len() <= self.hybrid.context * hidden, "room for it");
        let mut out = vec![0.0; text.len()];
        let batches = text
            .chunks(most * hidden)
            .zip(out.chunks_mut(most * hidden));
        for (index, (from, to)) in batches.enumerate() {
            let first = index * most;
            let tokens = first..first + from.len() / hidden;
            let wanted = tokens.clone().filter(|token| wanted(*token)).collect();
            self.batch(first, from, part, wanted, &mut see)?;
            self.hybrid.down(0, false)?;
            self.hybrid.norm_after(0)?;
            self.hybrid.state.hidden.read(to)?;
        }
        Ok(out)
    }

    /// Some tokens up to what rows of down are multiplied by.
    fn batch(
        &mut self,
        first: usize,
        hidden: &[f32],
        part: usize,
        wanted: Vec<usize>,
        see: &mut impl FnMut(ObservedToken<'_>),
    ) -> Result<(), RuntimeError> {
        let hybrid = &mut self.hybrid;
        let most = hybrid.state.many.as_ref().map_or(1, |many| many.most);
        let size = hybrid.state.hidden.capacity() / most;
        let tokens = hidden.len() / size;
        hybrid.set_tokens(tokens);
        let rotations: Vec<[f32; 2]> = match &self.positions {
            Positions::Rotary(rotary) => (first..first + tokens)
                .flat_map(|position| rotary::rotations(rotary, position))
                .collect(),
            _ => Vec::new(),
        };
        hybrid.start(first, &rotations)?;
        hybrid.state.hidden.write(hidden)?;
        if self.sees == Source::Residual {
            hybrid.keep_residual()?;
        }
        hybrid.project_attention(0)?;
        hybrid.attend(0, &mut self.cache)?;
        hybrid.add_attention(0)?;
        hybrid.gate_up(0, self.sees, !wanted.is_empty())?;
        let (gpu, state) = (&hybrid.gpu, &hybrid.state);
        gpu.observe(&state.products, first, part, &mut self.tally)?;
        if wanted.is_empty() {
            return Ok(());
        }
        let neurons = self.contribution_norms.len();
        let (mut product, mut residual) = (vec![0.0; neurons], vec![0.0; size]);
        let source = match self.sees {
            Source::Residual => &state.residual,
            Source::Hidden => &state.hidden,
        };
        let mut inputs = vec![0.0; tokens * size];
        // What kernels write for the host is there once they are done.
        gpu.device().synchronise()?;
        state.input.read_f32(&mut inputs);
        for token in wanted {
            let row = token - first;
            state.products.read_at(row * neurons, &mut product)?;
            source.read_at(row * size, &mut residual)?;
            see(ObservedToken {
                token,
                residual: &residual,
                input: &inputs[row * size..][..size],
                product: &product,
            });
        }
        Ok(())
    }
}
