//! Attention over the KV cache: the kernels of `attention.cu`.

use powerinfer_tensor::{BLOCK, CacheFormat};

use super::{
    Buffer, CachePlace, CacheShape, DeviceError, Gpu, GpuNorm, arguments,
    gpu::{MAX_MULTIPROCESSORS, WARP, kernel, width},
};

/// Threads per block.
const ATTENTION_THREADS: usize = 128;
/// Positions per tile, one per lane; the most splits, too.
const TILE: usize = WARP;
/// Query heads of a thread block, if several share a KV head.
const QUERIES: usize = ATTENTION_THREADS / WARP;
/// Queries per thread block in a prompt, without tensor cores.
const PROMPT_QUERIES: usize = 16;
/// Queries per thread block in a prompt, on tensor cores.
const TILE_QUERIES: usize = 64;
/// Thread blocks per multiprocessor: each has one tile of keys or values in flight.
const BLOCKS: usize = 4;

/// Norms of each head's query and key.
#[derive(Debug)]
pub struct HeadNorms {
    /// Norm of queries, over `head_size` elements.
    pub query: GpuNorm,
    /// Norm of keys, over `head_size` elements.
    pub key: GpuNorm,
}

/// Inputs of the attention of one layer, for tokens of one sequence or, up to [`Gpu::BATCH`], of several; those of a sequence are
/// consecutive.
#[derive(Debug)]
pub struct Attention<'a> {
    /// Number of tokens.
    pub tokens: usize,
    /// `[tokens, heads, head_size]`.
    pub query: &'a Buffer<f32>,
    /// `[tokens, kv_heads, head_size]`.
    pub key: &'a Buffer<f32>,
    /// `[tokens, kv_heads, head_size]`.
    pub value: &'a Buffer<f32>,
    /// Norms of query and key heads, if the model has them.
    pub norms: Option<&'a HeadNorms>,
    /// `[tokens, pairs]`: sine and cosine of the rotary angles; empty without rotary embedding.
    pub sin_cos: &'a Buffer<[f32; 2]>,
    /// `[heads]`: ALiBi slopes, if the model uses ALiBi.
    pub alibi_slopes: Option<&'a Buffer<f32>>,
    /// `[heads]`: attention sinks, if the model has them.
    pub sinks: Option<&'a Buffer<f32>>,
    /// Sliding window in positions, including the token's own; `None` means no window.
    pub window: Option<usize>,
    /// `[tokens]`: position of each token.
    pub positions: &'a Buffer<u32>,
    /// `[tokens, layers]`: [places](super::GpuCache::place) of the caches of each token's sequence.
    pub caches: &'a Buffer<CachePlace>,
    /// Index among the layers of `caches`.
    pub layer: usize,
    /// Shape of the caches of `layer`, with the most positions that any sequence may have. Launches depend on nothing else of a
    /// sequence, so launches of one sequence can be replayed for another.
    pub shape: CacheShape,
}

impl Gpu {
    /// Appends keys and values of the tokens to the caches of `layer` and computes their attention: `out` is
    /// `[tokens, heads, head_size]`. For up to [`BATCH`](Self::BATCH) tokens, results are bit-identical to running each alone.
    ///
    /// `partial` holds [`Gpu::attention_scratch_len`] elements, `counters` `tokens * heads` zeros.
    ///
    /// # Errors
    ///
    /// A launch fails, or a group of heads exceeds the shared memory of a thread block.
    ///
    /// # Panics
    ///
    /// A shape does not match.
    ///
    /// # Safety
    ///
    /// The places in `attention.caches` are those of caches that exist until the device has finished. The caches have the shape
    /// `attention.shape`, except for their contexts, and contain the token's position.
    #[expect(unsafe_code, reason = "kernels follow addresses in device memory")]
    pub unsafe fn attend(
        &self,
        attention: &Attention<'_>,
        partial: &mut Buffer<f32>,
        counters: &mut Buffer<u32>,
        out: &mut Buffer<f32>,
    ) -> Result<(), DeviceError> {
        let shape = &attention.shape;
        let (kv_heads, size) = (shape.kv_heads, shape.head_size);
        let (tokens, layer) = (attention.tokens, attention.layer);
        let layers = attention.caches.len() / tokens;
        assert!(layer < layers);
        let heads = attention.query.len() / size / tokens;
        let group = heads / kv_heads;
        let splits = attention_splits(self.multiprocessors(), tokens, heads, shape);
        let words = self.attention_scratch_len(tokens, heads, shape);
        assert!(partial.len() >= words && counters.len() >= tokens * heads);
        assert!(
            attention.query.len() == tokens * heads * size && out.len() == tokens * heads * size
        );
        assert!(attention.key.len() == tokens * kv_heads * size);
        assert!(attention.value.len() == tokens * kv_heads * size);
        let pairs = attention.sin_cos.len() / tokens;
        assert!(2 * pairs <= size && attention.positions.len() >= tokens);
        let slopes = attention.alibi_slopes;
        let sinks = attention.sinks;
        let mut of_heads = slopes.into_iter().chain(sinks);
        assert!(of_heads.all(|values| values.len() == heads));
        let norm =
            |pick: fn(&HeadNorms) -> &GpuNorm| GpuNorm::argument(attention.norms.map(pick), size);
        let arguments = arguments::Attention {
            query: attention.query.address(),
            key: attention.key.address(),
            value: attention.value.address(),
            query_norm: norm(|norms| &norms.query),
            key_norm: norm(|norms| &norms.key),
            sin_cos: attention.sin_cos.address(),
            pairs: pairs as i32,
            padding: 0,
            alibi_slopes: slopes.map_or(0, Buffer::address),
            sinks: sinks.map_or(0, Buffer::address),
            cache: attention.caches.address() + (layer * size_of::<CachePlace>()) as u64,
            cache_stride: layers as i32,
            heads: heads as i32,
            kv_heads: kv_heads as i32,
            head_size: size as i32,
            window: attention.window.unwrap_or(0) as i32,
            is_stored: (tokens > 1).into(),
            position: attention.positions.address(),
            scale: std::f32::consts::LOG2_E / (size as f32).sqrt(),
            last_padding: 0,
            partial: partial.address(),
            counters: counters.address(),
            out: out.address(),
            tokens: tokens as i32,
            end_padding: 0,
        };
        let floats = |count: usize| (count * 4).next_multiple_of(16);
        let (attend, queries) = match group {
            1 => ("attention", 1),
            _ => ("attention_grouped", QUERIES),
        };
        let format = shape.number_format();
        let width = width(format);
        // Quantised heads are padded to whole blocks, which have a scale per position.
        let (stored, scales) = if format.is_quantised() {
            (size.next_multiple_of(BLOCK), size.div_ceil(BLOCK) * TILE)
        } else {
            (size, 0)
        };
        let pieces = stored.div_ceil(width);
        let fours = pieces * width / 4;
        assert!(fours <= ATTENTION_THREADS, "a thread per four columns");
        let tiles = 2 * TILE * (pieces | 1) * 16;
        let sums = ATTENTION_THREADS / fours * queries * fours * 16;
        let shared = floats(queries * pieces * width)
            + 2 * floats(pieces * width)
            + floats(ATTENTION_THREADS * queries)
            + floats(queries * TILE)
            + 2 * floats(queries)
            + 16
            + 2 * floats(scales)
            + tiles.max(sums);
        if tokens > 1 {
            // All tokens first: their attention runs in any order.
            let grid = [kv_heads as u32, tokens as u32, 1];
            let shared = floats(stored) + floats(if scales > 0 { stored } else { 0 });
            let append = kernel("append_kv", format);
            self.launch(&append, grid, WARP, shared, "a head", &arguments)?;
        }
        if Self::uses_tiles(tokens, shape) {
            let pitch = (pieces | 1) * 8;
            let shared = 2 * TILE_QUERIES * pitch * size_of::<u16>()
                + floats(ATTENTION_THREADS / WARP * size)
                + tiles;
            let queries = (tokens * group).div_ceil(TILE_QUERIES);
            let grid = [kv_heads as u32, queries as u32, 1];
            let name = kernel("attention_tiles", format);
            let threads = ATTENTION_THREADS;
            return self.launch(&name, grid, threads, shared, "attention", &arguments);
        }
        if Self::is_prompt(tokens, size) {
            let shared = floats(PROMPT_QUERIES * pieces * width)
                + PROMPT_QUERIES * TILE * 4
                + 2 * floats(scales)
                + tiles;
            let grid = [
                kv_heads as u32,
                (tokens * group).div_ceil(PROMPT_QUERIES) as u32,
                1,
            ];
            let name = kernel("attention_prompt", format);
            return self.launch(
                &name,
                grid,
                ATTENTION_THREADS,
                shared,
                "attention",
                &arguments,
            );
        }
        let blocks = kv_heads * group.div_ceil(queries);
        let grid = [blocks as u32, splits as u32, tokens as u32];
        self.launch(
            &kernel(attend, format),
            grid,
            ATTENTION_THREADS,
            shared,
            "attention",
            &arguments,
        )
    }

    /// Elements of the scratch buffer `partial` of [`Gpu::attend`].
    pub fn attention_scratch_len(&self, tokens: usize, heads: usize, shape: &CacheShape) -> usize {
        scratch_len(self.multiprocessors(), tokens, heads, shape)
    }

    /// Upper bound of [`attention_scratch_len`](Self::attention_scratch_len) on any GPU.
    pub fn max_attention_scratch(tokens: usize, heads: usize, shape: &CacheShape) -> usize {
        scratch_len(MAX_MULTIPROCESSORS, tokens, heads, shape)
    }

    /// Whether attention runs on tensor cores: only in prompts, for the cache format and head sizes that the kernel supports.
    fn uses_tiles(tokens: usize, shape: &CacheShape) -> bool {
        let is_supported = shape.head_size.is_multiple_of(16) && shape.head_size <= 128;
        shape.format == CacheFormat::F16 && is_supported && tokens > Self::BATCH
    }

    /// Whether tokens share tiles of keys and values: not in a batch, whose results are bit-identical to running each token
    /// alone, and only if heads are not too large for the kernel.
    fn is_prompt(tokens: usize, head_size: usize) -> bool {
        tokens > Self::BATCH && head_size <= 256
    }
}

fn scratch_len(multiprocessors: usize, tokens: usize, heads: usize, shape: &CacheShape) -> usize {
    if Gpu::is_prompt(tokens, shape.head_size) {
        return 0;
    }
    let splits = attention_splits(multiprocessors, tokens, heads, shape);
    splits * tokens * heads * (shape.head_size + 2)
}

/// Thread blocks that split the positions of a KV head: enough to fill the device if the context is long enough.
/// More tokens than a batch fill it without splits. If fewer positions are visible, the kernel uses fewer splits: results do not
/// depend on `shape.context`.
fn attention_splits(
    multiprocessors: usize,
    tokens: usize,
    heads: usize,
    shape: &CacheShape,
) -> usize {
    if tokens > Gpu::BATCH {
        return 1;
    }
    let CacheShape {
        kv_heads, context, ..
    } = *shape;
    let heads = kv_heads * (heads / kv_heads).div_ceil(QUERIES);
    let limit = context.div_ceil(TILE).clamp(1, TILE);
    (BLOCKS * multiprocessors).div_ceil(heads).clamp(1, limit)
}
