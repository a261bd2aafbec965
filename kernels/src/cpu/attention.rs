//! Attention over a KV cache: products of queries with keys, powers of two, and weighted sums of
//! values. A square of the cache is read once for as many queries as the registers hold.

use std::ops::Range;

use half::f16;

use super::{Operation, Simd};
use crate::CachePlane;
use crate::cache::{PlaneData, Square};
use crate::format::BLOCK;

/// `out[q, p] = queries[q] · keys[p]`, for the positions of some tiles.
pub(crate) struct Scores<'a> {
    pub(crate) keys: &'a CachePlane,
    pub(crate) tiles: Range<usize>,
    /// `[queries, width]`.
    pub(crate) queries: &'a [f32],
    /// `[queries, positions of the tiles]`.
    pub(crate) out: &'a mut [f32],
}

impl Operation for Scores<'_> {
    type Output = ();

    /// Each block of 32 numbers is a chain of fused multiply-adds; its sum times the scale is added
    /// to those of the blocks before.
    fn specify(self) {
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
                        let number = self.keys.number(position, block * BLOCK + row);
                        sum = query.mul_add(number, sum);
                    }
                    *out = self.keys.scale(position, block).mul_add(sum, *out);
                }
            }
        }
    }

    #[inline(always)]
    fn translate<S: Simd>(self, simd: S) {
        match &self.keys.data {
            PlaneData::F32(squares) => self.of(simd, squares, &[]),
            PlaneData::F16(squares) => self.of(simd, squares, &[]),
            PlaneData::Q8_0 { quants, scales } => self.of(simd, quants, scales),
        }
    }
}

impl Scores<'_> {
    /// The translation for one type of number; no scales mean 1.
    #[inline(always)]
    fn of<S: Simd, T: Number>(self, simd: S, squares: &[Square<T>], scales: &[[f16; BLOCK]]) {
        let (head_size, width) = (self.keys.head_size(), self.keys.width());
        let length = self.tiles.len() * BLOCK;
        let blocks = width / BLOCK;
        let count = self.queries.len() / width;
        self.out.fill(0.0);
        for tile in self.tiles.clone() {
            for block in 0..blocks {
                let index = tile * blocks + block;
                let part = Part {
                    square: &squares[index],
                    scale: scale(simd, scales, index),
                    rows: (head_size - block * BLOCK).min(BLOCK),
                    first: block * BLOCK,
                    width,
                    position: (tile - self.tiles.start) * BLOCK,
                    length,
                };
                let (queries, out) = (self.queries, &mut *self.out);
                let mut query = 0;
                if S::LANES >= 16 {
                    while count - query >= 8 {
                        part.scores::<S, 8>(simd, query, queries, out);
                        query += 8;
                    }
                    while count - query >= 4 {
                        part.scores::<S, 4>(simd, query, queries, out);
                        query += 4;
                    }
                }
                while count - query >= 2 {
                    part.scores::<S, 2>(simd, query, queries, out);
                    query += 2;
                }
                if query < count {
                    part.scores::<S, 1>(simd, query, queries, out);
                }
            }
        }
    }
}

/// A square and what it takes part in.
struct Part<'a, T, B> {
    square: &'a Square<T>,
    scale: B,
    /// Rows of the square that count.
    rows: usize,
    /// Number of a head that the square starts with.
    first: usize,
    /// Numbers of a head.
    width: usize,
    /// Position, among those of the tiles, that the square starts with.
    position: usize,
    /// Positions of the tiles.
    length: usize,
}

impl<T: Number, B: Copy> Part<'_, T, B> {
    /// Adds the square's products with `Q` queries.
    #[inline(always)]
    fn scores<S: Simd<Block = B>, const Q: usize>(
        &self,
        simd: S,
        query: usize,
        queries: &[f32],
        out: &mut [f32],
    ) {
        let mut factors = [&[0.0; BLOCK]; Q];
        for (index, factors) in factors.iter_mut().enumerate() {
            let start = (query + index) * self.width + self.first;
            *factors = block_of(&queries[start..]);
        }
        let mut sums = [simd.splat(0.0); Q];
        for (row, numbers) in self.square[..self.rows].iter().enumerate() {
            let numbers = T::load(simd, numbers);
            for index in 0..Q {
                let factor = simd.splat(factors[index][row]);
                sums[index] = simd.multiply_add(factor, numbers, sums[index]);
            }
        }
        for (index, sum) in sums.into_iter().enumerate() {
            let start = (query + index) * self.length + self.position;
            let out = block_of_mut(&mut out[start..]);
            simd.store(simd.multiply_add(self.scale, sum, simd.load(out)), out);
        }
    }

    /// Adds the square's rows, times their weights, to `Q` sums.
    #[inline(always)]
    fn add_values<S: Simd<Block = B>, const Q: usize>(
        &self,
        simd: S,
        query: usize,
        is_scaled: bool,
        weights: &[f32],
        out: &mut [f32],
    ) {
        let mut scaled = [[0.0; BLOCK]; Q];
        let mut sums = [simd.splat(0.0); Q];
        for index in 0..Q {
            let start = (query + index) * self.length + self.position;
            let weights = block_of(&weights[start..]);
            match is_scaled {
                true => simd.store(
                    simd.multiply(simd.load(weights), self.scale),
                    &mut scaled[index],
                ),
                false => scaled[index] = *weights,
            }
            let start = (query + index) * self.width + self.first;
            sums[index] = simd.load(block_of(&out[start..]));
        }
        for (row, numbers) in self.square.iter().enumerate() {
            let numbers = T::load(simd, numbers);
            for index in 0..Q {
                let weight = simd.splat(scaled[index][row]);
                sums[index] = simd.multiply_add(weight, numbers, sums[index]);
            }
        }
        for (index, sum) in sums.into_iter().enumerate() {
            let start = (query + index) * self.width + self.first;
            simd.store(sum, block_of_mut(&mut out[start..]));
        }
    }
}

/// `out[q] += Σ_p weights[q, p] · values[p]`, for the positions of some tiles in order.
pub(crate) struct WeightedValues<'a> {
    pub(crate) values: &'a CachePlane,
    pub(crate) tiles: Range<usize>,
    /// `[queries, positions of the tiles]`.
    pub(crate) weights: &'a [f32],
    /// `[queries, width]`.
    pub(crate) out: &'a mut [f32],
}

impl Operation for WeightedValues<'_> {
    type Output = ();

    /// One fused multiply-add per number, of the product of weight and scale.
    fn specify(self) {
        let width = self.values.width();
        let length = self.tiles.len() * BLOCK;
        for (weights, out) in self
            .weights
            .chunks_exact(length)
            .zip(self.out.chunks_exact_mut(width))
        {
            for (position, weight) in weights.iter().enumerate() {
                let position = self.tiles.start * BLOCK + position;
                for (column, out) in out.iter_mut().enumerate() {
                    let scale = self.values.scale(position, column / BLOCK);
                    let number = self.values.number(position, column);
                    *out = (weight * scale).mul_add(number, *out);
                }
            }
        }
    }

    #[inline(always)]
    fn translate<S: Simd>(self, simd: S) {
        match &self.values.data {
            PlaneData::F32(squares) => self.of(simd, squares, &[]),
            PlaneData::F16(squares) => self.of(simd, squares, &[]),
            PlaneData::Q8_0 { quants, scales } => self.of(simd, quants, scales),
        }
    }
}

impl WeightedValues<'_> {
    /// The translation for one type of number; no scales mean 1.
    #[inline(always)]
    fn of<S: Simd, T: Number>(self, simd: S, squares: &[Square<T>], scales: &[[f16; BLOCK]]) {
        let width = self.values.width();
        let length = self.tiles.len() * BLOCK;
        let blocks = width / BLOCK;
        let count = self.out.len() / width;
        let is_scaled = !scales.is_empty();
        for tile in self.tiles.clone() {
            for block in 0..blocks {
                let index = tile * blocks + block;
                let part = Part {
                    square: &squares[index],
                    scale: scale(simd, scales, index),
                    rows: BLOCK,
                    first: block * BLOCK,
                    width,
                    position: (tile - self.tiles.start) * BLOCK,
                    length,
                };
                let (weights, out) = (self.weights, &mut *self.out);
                let mut query = 0;
                if S::LANES >= 16 {
                    while count - query >= 8 {
                        part.add_values::<S, 8>(simd, query, is_scaled, weights, out);
                        query += 8;
                    }
                    while count - query >= 4 {
                        part.add_values::<S, 4>(simd, query, is_scaled, weights, out);
                        query += 4;
                    }
                }
                while count - query >= 2 {
                    part.add_values::<S, 2>(simd, query, is_scaled, weights, out);
                    query += 2;
                }
                if query < count {
                    part.add_values::<S, 1>(simd, query, is_scaled, weights, out);
                }
            }
        }
    }
}

/// A number of the cache.
trait Number: Copy {
    /// Reads 32 of them.
    fn load<S: Simd>(simd: S, numbers: &[Self; BLOCK]) -> S::Block;
}

impl Number for f32 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, numbers: &[f32; BLOCK]) -> S::Block {
        simd.load(numbers)
    }
}

impl Number for f16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, numbers: &[f16; BLOCK]) -> S::Block {
        simd.load_f16(numbers)
    }
}

impl Number for i8 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, numbers: &[i8; BLOCK]) -> S::Block {
        simd.load_q8(numbers)
    }
}

/// The scales of square `index`, 1 where there are none.
#[inline(always)]
fn scale<S: Simd>(simd: S, scales: &[[f16; BLOCK]], index: usize) -> S::Block {
    match scales.is_empty() {
        true => simd.splat(1.0),
        false => simd.load_f16(&scales[index]),
    }
}

/// The first 32 numbers.
#[inline(always)]
fn block_of(numbers: &[f32]) -> &[f32; BLOCK] {
    numbers.first_chunk().expect("rows are whole blocks")
}

/// The first 32 numbers.
#[inline(always)]
fn block_of_mut(numbers: &mut [f32]) -> &mut [f32; BLOCK] {
    numbers.first_chunk_mut().expect("rows are whole blocks")
}

/// Replaces the scores of `valid` by `2^(score - largest)` and all others by 0; returns the largest
/// and the sum.
pub(crate) struct Powers<'a> {
    /// Whole blocks.
    pub(crate) scores: &'a mut [f32],
    pub(crate) valid: Range<usize>,
}

impl Powers<'_> {
    /// Takes out what is not valid.
    #[inline(always)]
    fn mask(&mut self) {
        self.scores[..self.valid.start].fill(f32::NEG_INFINITY);
        self.scores[self.valid.end..].fill(f32::NEG_INFINITY);
    }
}

impl Operation for Powers<'_> {
    type Output = (f32, f32);

    /// 32 running sums, added up by halving.
    fn specify(mut self) -> (f32, f32) {
        self.mask();
        let largest = self.scores.iter().copied();
        let largest = largest.fold(f32::NEG_INFINITY, f32::max);
        let mut sums = [0.0; BLOCK];
        for scores in self.scores.chunks_exact_mut(BLOCK) {
            for (score, sum) in scores.iter_mut().zip(&mut sums) {
                *score = power_of_two(*score - largest);
                *sum += *score;
            }
        }
        (largest, super::scalar::sum(sums))
    }

    #[inline(always)]
    fn translate<S: Simd>(mut self, simd: S) -> (f32, f32) {
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
            let power = powers_of_two(simd, simd.multiply_add(simd.load(block), one, less));
            sums = simd.multiply_add(power, one, sums);
            simd.store(power, block);
        }
        (largest, simd.sum(sums))
    }
}

/// `ln(2)^k / k!` from k = 7 down: the series of `2^r`, good to a rounding for `|r| <= 1/2`.
const SERIES: [f32; 8] = [
    1.525_273_4e-5,
    1.540_353e-4,
    1.333_355_8e-3,
    9.618_129e-3,
    5.550_411e-2,
    0.240_226_51,
    std::f32::consts::LN_2,
    1.0,
];

/// Added to a number of moderate size, leaves its nearest integer in the lowest bits.
const ROUNDING: f32 = 12_582_912.0;

/// The smallest exponent of a normal number; powers below it count as 0.
const SMALLEST: f32 = -126.0;

/// `2^x` for `x <= 0`, to within a few roundings; 0 below `2^-126`. The same bits on every machine.
pub fn power_of_two(x: f32) -> f32 {
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
fn powers_of_two<S: Simd>(simd: S, x: S::Block) -> S::Block {
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
