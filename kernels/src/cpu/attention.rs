//! Attention over a KV cache: scores, the exponentials of the softmax, and weighted sums of values. A block of the cache is
//! read once for as many queries as the registers hold.

use std::ops::Range;

use bytemuck::Zeroable;
use half::f16;

use super::{Operation, Simd};
use powerinfer_tensor::{
    BLOCK, CacheBlock, CacheData, CacheLayout, CachePlane, KEY_GROUP, KeyBlock,
};

/// Calls a method for groups of queries, as large as the registers of `$simd` allow, up to `$count` queries.
macro_rules! for_query_groups {
    ($simd:ty, $count:expr, $query:ident, $tile:ident.$method:ident($($argument:expr),*)) => {{
        let mut $query = 0;
        if <$simd>::LANES >= 16 {
            while $count - $query >= 8 {
                $tile.$method::<$simd, 8>($($argument),*);
                $query += 8;
            }
            while $count - $query >= 4 {
                $tile.$method::<$simd, 4>($($argument),*);
                $query += 4;
            }
        }
        while $count - $query >= 2 {
            $tile.$method::<$simd, 2>($($argument),*);
            $query += 2;
        }
        if $query < $count {
            $tile.$method::<$simd, 1>($($argument),*);
        }
    }};
}

/// Prefetches the place of the next position, unless it starts a tile.
pub(crate) struct PrefetchNextPosition<'a> {
    pub(crate) plane: &'a CachePlane,
}

impl Operation for PrefetchNextPosition<'_> {
    type Output = ();

    fn run_scalar(self) {}

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        match self.plane.data() {
            CacheData::F32(blocks) => self.run(simd, blocks),
            CacheData::F16(blocks) => self.run(simd, blocks),
            CacheData::Q8_0 { quants, .. } => self.run(simd, quants),
        }
    }
}

impl PrefetchNextPosition<'_> {
    #[inline(always)]
    fn run<S: Simd, T: Element>(self, simd: S, blocks: &[CacheBlock<T>]) {
        let (tile, position) = (
            self.plane.positions() / BLOCK,
            self.plane.positions() % BLOCK,
        );
        for block in &blocks[self.plane.block(0, tile).min(blocks.len())..] {
            match self.plane.layout() {
                CacheLayout::Keys => {
                    let groups: &KeyBlock<T> = bytemuck::cast_ref(block);
                    simd.prefetch(&groups[position / KEY_GROUP]);
                }
                CacheLayout::Values => simd.prefetch(&block[position]),
            }
        }
    }
}

/// Requests the cache lines of some bytes.
pub(crate) struct Prefetch<'a> {
    pub(crate) bytes: &'a [u8],
}

impl Operation for Prefetch<'_> {
    type Output = ();

    fn run_scalar(self) {}

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        simd.prefetch(self.bytes);
    }
}

/// `out[q, p] = queries[q] · keys[head, p]` for the positions of `tiles`.
pub(crate) struct Scores<'a> {
    pub(crate) keys: &'a CachePlane,
    pub(crate) head: usize,
    pub(crate) tiles: Range<usize>,
    /// `[queries, width]`.
    pub(crate) queries: &'a [f32],
    /// `[queries, positions of the tiles]`.
    pub(crate) out: &'a mut [f32],
}

impl Operation for Scores<'_> {
    type Output = ();

    /// A chain of fused multiply-adds per block of 32 elements; the sum times the block's scale is added to the score.
    fn run_scalar(self) {
        let (head_size, width) = (self.keys.head_size(), self.keys.width());
        let length = self.tiles.len() * BLOCK;
        for (query, out) in self
            .queries
            .chunks_exact(width)
            .zip(self.out.chunks_exact_mut(length))
        {
            for (position, out) in out.iter_mut().enumerate() {
                let position = self.tiles.start * BLOCK + position;
                *out = 0.0;
                for (block, query) in query[..head_size].chunks(BLOCK).enumerate() {
                    let mut sum = 0.0f32;
                    for (row, query) in query.iter().enumerate() {
                        let value = self.keys.value(self.head, position, block * BLOCK + row);
                        sum = query.mul_add(value, sum);
                    }
                    *out = self
                        .keys
                        .scale(self.head, position, block)
                        .mul_add(sum, *out);
                }
            }
        }
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        match self.keys.data() {
            CacheData::F32(blocks) => self.run(simd, blocks, &[]),
            CacheData::F16(blocks) => self.run(simd, blocks, &[]),
            CacheData::Q8_0 { quants, scales } => self.run(simd, quants, scales),
        }
    }
}

impl Scores<'_> {
    /// The generic implementation for one element type; no scales mean 1.
    #[inline(always)]
    fn run<S: Simd, T: Element>(self, simd: S, blocks: &[CacheBlock<T>], scales: &[[f16; BLOCK]]) {
        let mut view = Tile::new(self.keys, self.head, blocks, scales, &self.tiles);
        let count = self.queries.len() / view.width;
        self.out.fill(0.0);
        for (position, tile) in self.tiles.enumerate() {
            view.move_to(tile, position);
            for_query_groups!(
                S,
                count,
                query,
                view.scores(simd, query, self.queries, self.out)
            );
        }
    }
}

/// A view of one head's tile of a cache plane, and its position among the tiles of the call.
struct Tile<'a, T> {
    plane: &'a CachePlane,
    head: usize,
    blocks: &'a [CacheBlock<T>],
    scales: &'a [[f16; BLOCK]],
    /// Index of the tile's first cache block.
    first_block: usize,
    /// First position of the tile among those of all tiles.
    position: usize,
    /// Positions that the tile has.
    count: usize,
    /// Index of the first block of the tile that is read next.
    next_block: usize,
    /// First tile of the call.
    first_tile: usize,
    /// Number of positions of all tiles.
    length: usize,
    /// `head_size` padded to whole blocks.
    width: usize,
}

impl<'a, T: Element> Tile<'a, T> {
    #[inline(always)]
    fn new(
        plane: &'a CachePlane,
        head: usize,
        blocks: &'a [CacheBlock<T>],
        scales: &'a [[f16; BLOCK]],
        tiles: &Range<usize>,
    ) -> Self {
        Tile {
            plane,
            head,
            blocks,
            scales,
            first_block: 0,
            position: 0,
            count: 0,
            next_block: 0,
            first_tile: tiles.start,
            length: tiles.len() * BLOCK,
            width: plane.width(),
        }
    }

    /// Moves to `tile`, the `index`-th of the call.
    #[inline(always)]
    fn move_to(&mut self, tile: usize, index: usize) {
        self.first_block = self.plane.block(self.head, tile);
        self.position = index * BLOCK;
        self.count = BLOCK.min(self.plane.positions() - tile * BLOCK);
        // The next tile, or the first one of the next head.
        self.next_block = if self.position + BLOCK < self.length {
            self.plane.block(self.head, tile + 1)
        } else {
            self.plane.block(self.head + 1, self.first_tile)
        };
    }

    /// The block to prefetch while block `block` is read, a tile ahead: in less time memory does not deliver it.
    #[inline(always)]
    fn ahead(&self, block: usize) -> &'a CacheBlock<T> {
        &self.blocks[(self.next_block + block).min(self.blocks.len() - 1)]
    }

    /// Scales of cache block `index`; 1 without scales.
    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, index: usize) -> S::Block {
        if self.scales.is_empty() {
            simd.splat(1.0)
        } else {
            simd.load_f16(&self.scales[index])
        }
    }

    /// Adds the dot products of the tile's keys with `Q` queries to the scores. Cache blocks are read in memory order.
    #[inline(always)]
    fn scores<S: Simd, const Q: usize>(
        &self,
        simd: S,
        query: usize,
        queries: &[f32],
        out: &mut [f32],
    ) {
        for block in 0..self.width / BLOCK {
            let index = self.first_block + block;
            let cache_block = &self.blocks[index];
            let mut groups: &KeyBlock<T> = bytemuck::cast_ref(cache_block);
            let used = self.count.div_ceil(KEY_GROUP);
            let padded;
            if used < groups.len() {
                padded = first_groups(groups, used);
                groups = &padded;
            }
            let next = self.ahead(block);
            let [a, b, c, d] = groups;
            let rows = (self.plane.head_size() - block * BLOCK).min(BLOCK);
            let mut factors = [&[0.0; BLOCK]; Q];
            for (q, factors) in factors.iter_mut().enumerate() {
                let start = (query + q) * self.width + block * BLOCK;
                *factors = block_of(&queries[start..]);
            }
            let mut sums = [simd.splat(0.0); Q];
            for row in 0..rows {
                if row < used * KEY_GROUP {
                    simd.prefetch(&next[row]);
                }
                let values = T::load_parts(simd, [&a[row], &b[row], &c[row], &d[row]]);
                for q in 0..Q {
                    let factor = simd.splat(factors[q][row]);
                    sums[q] = simd.multiply_add(factor, values, sums[q]);
                }
            }
            let scale = self.scale(simd, index);
            for (q, sum) in sums.into_iter().enumerate() {
                let out = block_of_mut(&mut out[(query + q) * self.length + self.position..]);
                simd.store(simd.multiply_add(scale, sum, simd.load(out)), out);
            }
        }
    }

    /// Adds the tile's values, times their weights, to the outputs of `Q` queries.
    #[inline(always)]
    fn weighted<S: Simd, const Q: usize>(
        &self,
        simd: S,
        query: usize,
        weights: &[f32],
        out: &mut [f32],
    ) {
        for block in 0..self.width / BLOCK {
            let index = self.first_block + block;
            let cache_block = &self.blocks[index];
            let next = self.ahead(block);
            let mut scaled = [[0.0; BLOCK]; Q];
            let mut factors = [&[0.0; BLOCK]; Q];
            let mut sums = [simd.splat(0.0); Q];
            for q in 0..Q {
                factors[q] = block_of(&weights[(query + q) * self.length + self.position..]);
                if T::SCALED {
                    let product = simd.multiply(simd.load(factors[q]), self.scale(simd, index));
                    simd.store(product, &mut scaled[q]);
                }
                let start = (query + q) * self.width + block * BLOCK;
                sums[q] = simd.load(block_of(&out[start..]));
            }
            for row in 0..self.count {
                simd.prefetch(&next[row]);
                let values = T::load(simd, &cache_block[row]);
                for q in 0..Q {
                    let factor = if T::SCALED {
                        scaled[q][row]
                    } else {
                        factors[q][row]
                    };
                    sums[q] = simd.multiply_add(simd.splat(factor), values, sums[q]);
                }
            }
            for (q, sum) in sums.into_iter().enumerate() {
                let start = (query + q) * self.width + block * BLOCK;
                simd.store(sum, block_of_mut(&mut out[start..]));
            }
        }
    }
}

/// `out[q] += Σ_p weights[q, p] · values[head, p]` for the positions of `tiles`, in order.
pub(crate) struct WeightedValues<'a> {
    pub(crate) values: &'a CachePlane,
    pub(crate) head: usize,
    pub(crate) tiles: Range<usize>,
    /// `[queries, positions of the tiles]`.
    pub(crate) weights: &'a [f32],
    /// `[queries, width]`.
    pub(crate) out: &'a mut [f32],
}

impl Operation for WeightedValues<'_> {
    type Output = ();

    /// One fused multiply-add per element of a position, with the product of weight and scale.
    fn run_scalar(self) {
        let width = self.values.width();
        let count = self.values.positions() - self.tiles.start * BLOCK;
        let length = self.tiles.len() * BLOCK;
        for (weights, out) in self
            .weights
            .chunks_exact(length)
            .zip(self.out.chunks_exact_mut(width))
        {
            for (position, weight) in weights.iter().take(count).enumerate() {
                let position = self.tiles.start * BLOCK + position;
                for (column, out) in out.iter_mut().enumerate() {
                    let scale = self.values.scale(self.head, position, column / BLOCK);
                    let value = self.values.value(self.head, position, column);
                    *out = (weight * scale).mul_add(value, *out);
                }
            }
        }
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        match self.values.data() {
            CacheData::F32(blocks) => self.run(simd, blocks, &[]),
            CacheData::F16(blocks) => self.run(simd, blocks, &[]),
            CacheData::Q8_0 { quants, scales } => self.run(simd, quants, scales),
        }
    }
}

impl WeightedValues<'_> {
    /// The generic implementation for one element type; no scales mean 1.
    #[inline(always)]
    fn run<S: Simd, T: Element>(self, simd: S, blocks: &[CacheBlock<T>], scales: &[[f16; BLOCK]]) {
        let mut view = Tile::new(self.values, self.head, blocks, scales, &self.tiles);
        let count = self.out.len() / view.width;
        for (position, tile) in self.tiles.enumerate() {
            view.move_to(tile, position);
            for_query_groups!(
                S,
                count,
                query,
                view.weighted(simd, query, self.weights, self.out)
            );
        }
    }
}

/// Element type of a cache.
trait Element: bytemuck::Pod {
    /// Whether elements are multiplied by a scale.
    const SCALED: bool;

    /// Loads and widens 32 elements from four places.
    fn load_parts<S: Simd>(simd: S, parts: [&[Self; KEY_GROUP]; BLOCK / KEY_GROUP]) -> S::Block;

    /// Loads and widens 32 elements.
    fn load<S: Simd>(simd: S, values: &[Self; BLOCK]) -> S::Block;
}

impl Element for f32 {
    const SCALED: bool = false;

    #[inline(always)]
    fn load_parts<S: Simd>(simd: S, parts: [&[f32; KEY_GROUP]; BLOCK / KEY_GROUP]) -> S::Block {
        simd.load_parts(parts)
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, values: &[f32; BLOCK]) -> S::Block {
        simd.load(values)
    }
}

impl Element for f16 {
    const SCALED: bool = false;

    #[inline(always)]
    fn load_parts<S: Simd>(simd: S, parts: [&[f16; KEY_GROUP]; BLOCK / KEY_GROUP]) -> S::Block {
        simd.load_f16_parts(parts)
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, values: &[f16; BLOCK]) -> S::Block {
        simd.load_f16(values)
    }
}

impl Element for i8 {
    const SCALED: bool = true;

    #[inline(always)]
    fn load_parts<S: Simd>(simd: S, parts: [&[i8; KEY_GROUP]; BLOCK / KEY_GROUP]) -> S::Block {
        simd.load_q8_parts(parts)
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, values: &[i8; BLOCK]) -> S::Block {
        simd.load_q8(values)
    }
}

/// The first `used` groups, then zeros: groups without positions are not read from memory.
fn first_groups<T: Element>(groups: &KeyBlock<T>, used: usize) -> KeyBlock<T> {
    let mut padded = KeyBlock::<T>::zeroed();
    padded[..used].copy_from_slice(&groups[..used]);
    padded
}

/// The first 32 elements.
#[inline(always)]
fn block_of(values: &[f32]) -> &[f32; BLOCK] {
    values.first_chunk().expect("rows are whole blocks")
}

/// The first 32 elements.
#[inline(always)]
fn block_of_mut(values: &mut [f32]) -> &mut [f32; BLOCK] {
    values.first_chunk_mut().expect("rows are whole blocks")
}

/// Replaces the scores of `valid` by `2^(score - largest)`, all others by 0; returns the largest score and the sum.
pub(crate) struct Exp2MinusMax<'a> {
    /// Whole blocks of 32.
    pub(crate) scores: &'a mut [f32],
    pub(crate) valid: Range<usize>,
}

impl Exp2MinusMax<'_> {
    /// Sets scores outside of `valid` to minus infinity.
    #[inline(always)]
    fn mask(&mut self) {
        self.scores[..self.valid.start].fill(f32::NEG_INFINITY);
        self.scores[self.valid.end..].fill(f32::NEG_INFINITY);
    }
}

impl Operation for Exp2MinusMax<'_> {
    type Output = (f32, f32);

    /// 32 partial sums, then their tree sum.
    fn run_scalar(mut self) -> (f32, f32) {
        self.mask();
        let largest = self.scores.iter().copied();
        let largest = largest.fold(f32::NEG_INFINITY, f32::max);
        let mut sums = [0.0; BLOCK];
        for scores in self.scores.chunks_exact_mut(BLOCK) {
            for (score, sum) in scores.iter_mut().zip(&mut sums) {
                *score = exp2(*score - largest);
                *sum += *score;
            }
        }
        (largest, super::scalar::sum(sums))
    }

    #[inline(always)]
    fn run_simd<S: Simd>(mut self, simd: S) -> (f32, f32) {
        self.mask();
        let (blocks, _) = self.scores.as_chunks_mut::<BLOCK>();
        let mut largest = simd.splat(f32::NEG_INFINITY);
        for block in blocks.iter() {
            largest = simd.maximum(simd.load(block), largest);
        }
        let mut lanes = [0.0; BLOCK];
        simd.store(largest, &mut lanes);
        let largest = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
        let (one, less) = (simd.splat(1.0), simd.splat(-largest));
        let mut sums = simd.splat(0.0);
        for block in blocks {
            let power = exp2_block(simd, simd.multiply_add(simd.load(block), one, less));
            sums = simd.multiply_add(power, one, sums);
            simd.store(power, block);
        }
        (largest, simd.sum(sums))
    }
}

/// `ln(2)^k / k!` from k = 7 down: the Taylor series of `2^r`, accurate to one rounding for `|r| <= 1/2`.
const SERIES: [f32; 8] = [
    1.525_273_4e-5,
    1.540_353e-4,
    1.333_355_8e-3,
    9.618_129e-3,
    5.550_411e-2,
    0.240_226_5,
    std::f32::consts::LN_2,
    1.0,
];

/// 1.5 * 2^23: added to an `f32` of moderate size, leaves the nearest integer in the low bits.
const ROUNDING: f32 = 12_582_912.0;

/// Smallest exponent of a normal `f32`; smaller powers are flushed to 0.
const SMALLEST: f32 = -126.0;

/// `2^x` for `x <= 0`, accurate to a few ULPs; 0 below `2^-126`. The same bits on every machine.
pub fn exp2(x: f32) -> f32 {
    if x < SMALLEST {
        return 0.0;
    }
    let rounded = x + ROUNDING;
    let rest = x - (rounded - ROUNDING);
    let mut power = SERIES[0];
    for coefficient in &SERIES[1..] {
        power = power.mul_add(rest, *coefficient);
    }
    f32::from_bits(power.to_bits().wrapping_add(rounded.to_bits() << 23))
}

#[inline(always)]
fn exp2_block<S: Simd>(simd: S, x: S::Block) -> S::Block {
    let one = simd.splat(1.0);
    let rounded = simd.multiply_add(x, one, simd.splat(ROUNDING));
    let whole = simd.multiply_add(rounded, one, simd.splat(-ROUNDING));
    let rest = simd.multiply_add(whole, simd.splat(-1.0), x);
    let mut power = simd.splat(SERIES[0]);
    for coefficient in &SERIES[1..] {
        power = simd.multiply_add(power, rest, simd.splat(*coefficient));
    }
    simd.zero_below(x, SMALLEST, simd.add_exponent(power, rounded))
}
