//! A sequence of tokens with its KV cache.

use powerinfer_kernels::cuda::GpuCache;
use powerinfer_model::ModelConfig;
use powerinfer_tensor::{CacheFormat, CacheLayout, CachePlane};

use crate::RuntimeError;

/// The tokens so far, with their keys and values in every layer.
///
/// A sequence can be continued by any [`Runtime`](crate::Runtime) of the same bundle.
#[derive(Debug, Default)]
pub struct Sequence {
    /// KV caches on the host; without capacity in layers whose cache is on a device.
    pub(crate) layers: Vec<LayerCache>,
    /// KV caches on a device, by layer; empty without a device.
    pub(crate) on_device: Vec<Option<GpuCache>>,
    pub(crate) tokens: Vec<u32>,
}

impl Sequence {
    /// An empty sequence for up to `context` tokens, with the caches `on_device`; none where memory is missing.
    /// Unused memory is reserved but not touched.
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

    /// Number of tokens.
    pub fn position(&self) -> usize {
        self.tokens.len()
    }

    /// Length of the common prefix with `tokens`.
    pub fn common_prefix(&self, tokens: &[u32]) -> usize {
        let both = self.tokens.iter().zip(tokens);
        both.take_while(|(own, other)| own == other).count()
    }

    /// Removes all tokens from index `tokens` on.
    pub fn truncate(&mut self, tokens: usize) {
        self.tokens.truncate(tokens);
        self.layers
            .iter_mut()
            .for_each(|layer| layer.truncate(tokens));
    }

    /// Replaces the tokens by the first `tokens` ones of `other`, a sequence of the same bundle.
    ///
    /// # Errors
    ///
    /// Fails where a device does.
    ///
    /// # Panics
    ///
    /// Panics where `other` has fewer tokens.
    pub fn copy_from(&mut self, other: &Sequence, tokens: usize) -> Result<(), RuntimeError> {
        self.tokens.clear();
        self.tokens.extend(&other.tokens[..tokens]);
        for (layer, other) in self.layers.iter_mut().zip(&other.layers) {
            for (plane, other) in layer.planes_mut().zip(other.planes()) {
                // Caches on a device have no positions here.
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

    /// Bytes reserved for keys and values.
    pub(crate) fn bytes(&self) -> usize {
        let on_device = self.on_device.iter().flatten().map(GpuCache::bytes);
        self.layers
            .iter()
            .map(LayerCache::bytes)
            .chain(on_device)
            .sum()
    }
}

/// Keys and values of one layer, one plane of each per head.
#[derive(Debug)]
pub(crate) struct LayerCache {
    pub(crate) keys: Vec<CachePlane>,
    pub(crate) values: Vec<CachePlane>,
}

impl LayerCache {
    /// A cache for up to `positions` tokens; none where memory is missing. Unused memory is reserved but not touched.
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

    /// All planes, keys first.
    pub(crate) fn planes(&self) -> impl Iterator<Item = &CachePlane> {
        self.keys.iter().chain(&self.values)
    }

    /// All planes, keys first, mutably.
    pub(crate) fn planes_mut(&mut self) -> impl Iterator<Item = &mut CachePlane> {
        self.keys.iter_mut().chain(&mut self.values)
    }

    /// Bytes reserved.
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

    /// Removes all positions from `positions` on.
    pub(crate) fn truncate(&mut self, positions: usize) {
        self.planes_mut()
            .for_each(|plane| plane.truncate(positions));
    }
}
