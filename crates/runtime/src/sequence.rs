//! A sequence of tokens, and what attention keeps of them.

use powerinfer_kernels::cuda::GpuCache;
use powerinfer_model::ModelConfig;
use powerinfer_tensor::{CacheFormat, CacheLayout, CachePlane};

use crate::RuntimeError;

/// Tokens that were run, with their keys and values in every layer.
///
/// It belongs to no [`Runtime`](crate::Runtime) in particular: any of the same bundle goes on with it.
#[derive(Debug, Default)]
pub struct Sequence {
    /// With no room in those layers whose keys and values are on a device.
    pub(crate) layers: Vec<LayerCache>,
    /// What is on a device, layer by layer; empty where nothing is.
    pub(crate) on_device: Vec<Option<GpuCache>>,
    pub(crate) tokens: Vec<u32>,
}

impl Sequence {
    /// An empty sequence with room for `context` tokens, `on_device` in those layers that have some there;
    /// none where memory has not got it. What is not used yet is not touched.
    pub(crate) fn new(
        config: &ModelConfig,
        format: CacheFormat,
        context: usize,
        on_device: Vec<Option<GpuCache>>,
    ) -> Option<Self> {
        let (heads, size) = (config.kv_head_count, config.head_size);
        let layer = |layer: usize| {
            let is_here = on_device.get(layer).is_none_or(Option::is_none);
            LayerCache::new(heads, size, format, if is_here { context } else { 0 })
        };
        let mut tokens = Vec::new();
        tokens.try_reserve_exact(context).ok()?;
        Some(Self {
            layers: (0..config.layer_count).map(layer).collect::<Option<_>>()?,
            on_device,
            tokens,
        })
    }

    /// The tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// How many there are.
    pub fn position(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens that it begins with like `tokens` does.
    pub fn common_prefix(&self, tokens: &[u32]) -> usize {
        let both = self.tokens.iter().zip(tokens);
        both.take_while(|(own, other)| own == other).count()
    }

    /// Forgets all tokens from number `tokens` on.
    pub fn truncate(&mut self, tokens: usize) {
        self.tokens.truncate(tokens);
        self.layers
            .iter_mut()
            .for_each(|layer| layer.truncate(tokens));
    }

    /// Takes over the first `tokens` tokens of `other`, a sequence of the same bundle, instead of what
    /// is here.
    ///
    /// Fails where a device does; panics where `other` has fewer.
    pub fn copy_from(&mut self, other: &Sequence, tokens: usize) -> Result<(), RuntimeError> {
        self.tokens.clear();
        self.tokens.extend(&other.tokens[..tokens]);
        for (layer, other) in self.layers.iter_mut().zip(&other.layers) {
            for (plane, other) in layer.planes_mut().zip(other.planes()) {
                // Where keys and values are on a device, there are none here.
                plane.copy_from(other, tokens.min(other.positions()));
            }
        }
        for (cache, other) in self.on_device.iter_mut().zip(&other.on_device) {
            if let (Some(cache), Some(other)) = (cache, other) {
                cache.copy_from(other, tokens)?;
            }
        }
        Ok(())
    }

    /// Bytes that are reserved for keys and values.
    pub(crate) fn bytes(&self) -> usize {
        let on_device = self.on_device.iter().flatten().map(GpuCache::bytes);
        self.layers
            .iter()
            .map(LayerCache::bytes)
            .chain(on_device)
            .sum()
    }
}

/// Keys and values of one layer, a plane of each per head.
#[derive(Debug)]
pub(crate) struct LayerCache {
    pub(crate) keys: Vec<CachePlane>,
    pub(crate) values: Vec<CachePlane>,
}

impl LayerCache {
    /// A cache with room for `positions`; none where memory has not got it. What is not used yet is
    /// not touched.
    pub(crate) fn new(
        kv_heads: usize,
        head_size: usize,
        format: CacheFormat,
        positions: usize,
    ) -> Option<Self> {
        let heads = |layout| {
            let plane = |_| CachePlane::new(layout, format, head_size, positions);
            (0..kv_heads).map(plane).collect::<Option<_>>()
        };
        Some(Self {
            keys: heads(CacheLayout::Keys)?,
            values: heads(CacheLayout::Values)?,
        })
    }

    /// All planes, those of keys first.
    pub(crate) fn planes(&self) -> impl Iterator<Item = &CachePlane> {
        self.keys.iter().chain(&self.values)
    }

    /// The same, to be changed.
    pub(crate) fn planes_mut(&mut self) -> impl Iterator<Item = &mut CachePlane> {
        self.keys.iter_mut().chain(&mut self.values)
    }

    /// Bytes that are reserved.
    pub(crate) fn bytes(&self) -> usize {
        self.planes().map(CachePlane::bytes).sum()
    }

    /// Appends one position; `key` and `value` are `[kv_heads, head_size]`.
    pub(crate) fn push(&mut self, key: &[f32], value: &[f32]) {
        let size = key.len() / self.keys.len();
        for (plane, key) in self.keys.iter_mut().zip(key.chunks_exact(size)) {
            plane.push(key);
        }
        for (plane, value) in self.values.iter_mut().zip(value.chunks_exact(size)) {
            plane.push(value);
        }
    }

    /// Forgets all positions from `positions` on.
    pub(crate) fn truncate(&mut self, positions: usize) {
        self.planes_mut()
            .for_each(|plane| plane.truncate(positions));
    }
}
