//! A sequence of tokens with its KV cache.

use std::{cell::Cell, ops::Range};

use powerinfer_bundle::Bundle;
use powerinfer_gpu::DeviceModel;
use powerinfer_kernels::{Isa, cuda::GpuCache};
use powerinfer_model::{ModelConfig, ModelError};
use powerinfer_tensor::{BLOCK, CacheFormat, CacheLayout, CachePlane, HeadWriter};

use crate::{RuntimeError, Threads, memory::kv_bytes, rotary::rotate, scratch::ThreadBuffer};

thread_local! {
    /// Rotated keys.
    static KEYS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Bytes that can be read in the time that writing one number of a key takes.
const KEY_WRITE_BYTES: usize = 64;

/// A sequence: its tokens so far, with their keys and values in every layer.
///
/// Any [`Engine`](crate::Engine) of the same bundle can continue a session, if its KV caches are in the same places and those on
/// a device are on the same device.
#[derive(Debug)]
pub struct Session {
    /// KV caches on the host; they have no capacity in layers whose cache is on a device.
    pub(crate) layers: Vec<LayerCache>,
    /// KV caches on a device, by layer; empty without a device.
    pub(crate) on_device: Vec<Option<GpuCache>>,
    pub(crate) tokens: Vec<u32>,
    /// Tokens that the KV caches have room for.
    pub(crate) context: usize,
}

impl Session {
    /// An empty session of `bundle` for up to `context` tokens, with the KV caches that are on `device`.
    ///
    /// # Errors
    ///
    /// The host or the device has too little memory.
    pub(crate) fn new(
        bundle: &Bundle,
        device: Option<&DeviceModel>,
        context: usize,
    ) -> Result<Self, RuntimeError> {
        let config = bundle.config();
        let format = bundle.plan().budget.kv_cache;
        let on_device = match device {
            Some(device) => device.new_caches(context)?,
            None => Vec::new(),
        };
        Self::with_caches(config, format, context, on_device).ok_or_else(|| RuntimeError::NoRoom {
            tokens: context,
            bytes: kv_bytes(config, context as u64, format)
                .saturating_mul(config.layer_count as u64),
        })
    }

    /// An empty session for up to `context` tokens, with the caches `on_device`; none if there is too little memory.
    /// Unused memory is reserved but not touched.
    fn with_caches(
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
            context,
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

    /// Tokens that there is room for.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Keeps the longest prefix that the session shares with `tokens`, but never all of `tokens`, so that at least the last
    /// one is run. Returns the number of kept tokens.
    pub fn keep_prefix(&mut self, tokens: &[u32]) -> usize {
        let common = self.common_prefix(tokens);
        let kept = common.min(tokens.len().saturating_sub(1));
        self.truncate(kept);
        kept
    }

    /// Removes all tokens from index `tokens` on.
    pub fn truncate(&mut self, tokens: usize) {
        self.tokens.truncate(tokens);
        self.layers
            .iter_mut()
            .for_each(|layer| layer.truncate(tokens));
    }

    /// Replaces the tokens with the first `tokens` tokens of `other`, a session of the same engine whose context may differ.
    ///
    /// # Errors
    ///
    /// If the tokens do not fit the context, or `other` is a session of another engine, the session is unchanged. If the
    /// device fails, the session is left empty.
    ///
    /// # Panics
    ///
    /// Panics if `other` has fewer tokens.
    pub fn copy_from(&mut self, other: &Session, tokens: usize) -> Result<(), RuntimeError> {
        if tokens > self.context {
            let limit = self.context;
            return Err(ModelError::ContextFull { tokens, limit }.into());
        }
        if !self.is_like(other) {
            return Err(RuntimeError::OtherSession);
        }
        self.truncate(0);
        let copied = &other.tokens[..tokens];
        // The steps that can fail come first.
        for (cache, other) in self.on_device.iter_mut().zip(&other.on_device) {
            if let (Some(cache), Some(other)) = (cache, other) {
                cache.copy_from(other, tokens)?;
            }
        }
        for (layer, other) in self.layers.iter_mut().zip(&other.layers) {
            let others = [&other.keys, &other.values];
            for (plane, other) in layer.planes_mut().into_iter().zip(others) {
                // Caches on a device have no positions here.
                plane.copy_from(other, tokens.min(other.positions()));
            }
        }
        self.tokens.extend(copied);
        Ok(())
    }

    /// Whether the KV caches are on the same devices as those of `other` and differ from them at most in context.
    fn is_like(&self, other: &Self) -> bool {
        let on_device = self.on_device.iter().zip(&other.on_device);
        self.on_device.len() == other.on_device.len()
            && on_device.into_iter().all(|caches| match caches {
                (Some(own), Some(other)) => own.is_like(other),
                (own, other) => own.is_none() && other.is_none(),
            })
            && (self.layers.iter().map(LayerCache::shape))
                .eq(other.layers.iter().map(LayerCache::shape))
    }

    /// Whether a model with KV caches in `format`, on `device` if there is one, can run the session.
    pub(crate) fn is_of(
        &self,
        config: &ModelConfig,
        format: CacheFormat,
        device: Option<&DeviceModel>,
    ) -> bool {
        let shape = (format, config.kv_head_count, config.head_size);
        self.layers.len() == config.layer_count
            && self.layers.iter().all(|layer| layer.shape() == shape)
            && match device {
                None => self.on_device.is_empty(),
                Some(device) => device.owns(&self.on_device),
            }
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

/// Keys and values of one layer.
#[derive(Debug)]
pub(crate) struct LayerCache {
    pub(crate) keys: CachePlane,
    pub(crate) values: CachePlane,
}

/// Memory of the tiles of a head: of its keys, and of its values.
pub(crate) type HeadTiles<'a> = [&'a mut [u8]; 2];

/// Empties a list and keeps only its memory.
pub(crate) fn emptied<'b>(mut heads: Vec<HeadTiles<'_>>) -> Vec<HeadTiles<'b>> {
    heads.clear();
    // Collected in place.
    heads
        .into_iter()
        .map(|_| -> HeadTiles<'b> { unreachable!("it is empty") })
        .collect()
}

/// Positions that are appended to a cache.
pub(crate) struct NewPositions<'a> {
    pub(crate) heads: Vec<HeadTiles<'a>>,
    /// Writers of keys and values at the first position.
    pub(crate) writers: [HeadWriter; 2],
    pub(crate) count: usize,
    /// Cost of writing the positions, as the number of bytes that could be read in the same time.
    pub(crate) bytes: usize,
}

/// Writes the key, after rotating it by `rotations [pairs]`, and the value to some `heads` of a [`NewPositions`]. `numbers` holds both,
/// `[heads, head_size]` each.
pub(crate) fn store(
    isa: Isa,
    writers: [HeadWriter; 2],
    heads: &mut [HeadTiles<'_>],
    rotations: &[[f32; 2]],
    numbers: [&[f32]; 2],
) {
    // Without this, stores would wait for their cache lines one by one.
    for head in &*heads {
        for (writer, tile) in writers.iter().zip(head) {
            writer.written(tile).for_each(|bytes| isa.prefetch(bytes));
        }
    }
    let size = numbers[0].len() / heads.len().max(1);
    let [keys, values] = numbers.map(|numbers| numbers.chunks_exact(size.max(1)));
    for (tiles, (key, value)) in heads.iter_mut().zip(keys.zip(values)) {
        rotated(key, size, rotations, |key| writers[0].write(tiles[0], key));
        writers[1].write(tiles[1], value);
    }
}

/// Calls `act` with a rotated copy of the heads of `key`.
fn rotated(key: &[f32], size: usize, rotations: &[[f32; 2]], act: impl FnOnce(&[f32])) {
    ThreadBuffer(&KEYS).empty(|rotated| {
        rotated.extend_from_slice(key);
        rotate(rotations, rotated, size);
        act(rotated);
    });
}

impl LayerCache {
    /// A cache for up to `positions` tokens; none if there is too little memory. Unused memory is reserved but not touched.
    pub(crate) fn new(
        kv_heads: usize,
        head_size: usize,
        format: CacheFormat,
        positions: usize,
    ) -> Option<Self> {
        let plane = |layout| CachePlane::new(layout, format, kv_heads, head_size, positions);
        Some(Self {
            keys: plane(CacheLayout::Keys)?,
            values: plane(CacheLayout::Values)?,
        })
    }

    /// Number format, number of heads, and numbers per head.
    fn shape(&self) -> (CacheFormat, usize, usize) {
        let plane = &self.keys;
        (plane.format(), plane.heads(), plane.head_size())
    }

    /// Keys and values, mutably.
    pub(crate) fn planes_mut(&mut self) -> [&mut CachePlane; 2] {
        [&mut self.keys, &mut self.values]
    }

    /// Bytes reserved.
    pub(crate) fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes()
    }

    /// Bytes of the keys and values of 32 positions.
    pub(crate) fn tile_bytes(&self) -> usize {
        let of = |plane: &CachePlane| {
            let format = plane.format();
            format.plane_bytes(plane.heads(), plane.head_size(), BLOCK)
        };
        of(&self.keys) + of(&self.values)
    }

    /// Appends `tokens` positions. Keys and values are `[tokens, kv_heads, head_size]` each; keys are first rotated by
    /// `rotations [tokens, pairs]`. The heads are divided among threads, because the numbers of a key go to many cache lines.
    pub(crate) fn push_all(
        &mut self,
        threads: &Threads,
        rotations: &[[f32; 2]],
        [keys, values]: [&[f32]; 2],
        tokens: usize,
    ) {
        let (size, pairs) = (self.keys.head_size(), rotations.len() / tokens);
        let width = self.keys.heads() * size;
        let of_token = |token: usize, heads: &Range<usize>| {
            let own = token * width + heads.start * size..token * width + heads.end * size;
            let rotations = &rotations[token * pairs..][..pairs];
            (rotations, [&keys[own.clone()], &values[own]])
        };
        let mut token = 0;
        while token < tokens {
            let Some(mut new) = self.append(Vec::new(), tokens - token) else {
                let (rotations, [key, value]) = of_token(token, &(0..self.keys.heads()));
                self.push(rotations, key, value, threads.isa());
                token += 1;
                continue;
            };
            let (writers, heads) = (new.writers, new.heads.len());
            threads.by_row_groups(&mut new.heads, 1, 1, new.bytes / heads, |all, heads| {
                for index in 0..new.count {
                    let (rotations, numbers) = of_token(token + index, &all);
                    let writers = writers.map(|writer| writer.after(index));
                    store(threads.isa(), writers, heads, rotations, numbers);
                }
            });
            token += new.count;
        }
    }

    /// Keys and values at all positions, head by head, in the byte layout of a device.
    pub(crate) fn to_rows(&self, threads: &Threads) -> [Vec<u8>; 2] {
        [&self.keys, &self.values].map(|plane| {
            let each = plane.rows_bytes();
            let mut rows = vec![0; plane.heads() * each];
            let mut heads: Vec<_> = rows.chunks_exact_mut(each.max(1)).collect();
            threads.by_row_groups(&mut heads, 1, 1, each, |range, heads| {
                for (head, rows) in range.zip(heads) {
                    plane.copy_rows(head, rows);
                }
            });
            rows
        })
    }

    /// Appends one position of a quantised cache: `key`, after rotating it by `rotations [pairs]`, and `value`; both are
    /// `[kv_heads, head_size]`.
    fn push(&mut self, rotations: &[[f32; 2]], key: &[f32], value: &[f32], isa: Isa) {
        for plane in [&self.keys, &self.values] {
            isa.prefetch_next_position(plane);
        }
        let size = self.keys.head_size();
        rotated(key, size, rotations, |key| self.keys.push(key));
        self.values.push(value);
    }

    /// Appends up to `most` positions of one tile for [`store`] to write, reusing the memory of `heads`. Returns `None` if
    /// the format is quantised; use [`Self::push_all`] instead.
    pub(crate) fn append(
        &mut self,
        heads: Vec<HeadTiles<'_>>,
        most: usize,
    ) -> Option<NewPositions<'_>> {
        let bytes = self.keys.heads() * self.keys.head_size() * KEY_WRITE_BYTES;
        let (keys, key_writer, count) = self.keys.append(most)?;
        let (values, value_writer, _) = self.values.append(most)?;
        let keys = keys.chunks_exact_mut(key_writer.head_bytes);
        let values = values.chunks_exact_mut(value_writer.head_bytes);
        let mut heads = emptied(heads);
        heads.extend(keys.zip(values).map(|(key, value)| [key, value]));
        Some(NewPositions {
            heads,
            writers: [key_writer, value_writer],
            count,
            bytes: bytes * count,
        })
    }

    /// Removes all positions from `positions` on.
    pub(crate) fn truncate(&mut self, positions: usize) {
        for plane in self.planes_mut() {
            plane.truncate(positions);
        }
    }
}
