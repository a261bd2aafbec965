//! Weighted sums of quantised rows in whole numbers: all columns, or the share of one thread.
//!
//! A row's factor, its coefficient times the scale of a block, is rounded to 15 bits of the largest
//! one in that block of columns and cut into two bytes. Four rows are then interleaved so that four
//! bytes of one column lie side by side, which is what multiplying bytes adds up:
//!
//! ```text
//! for up to 1024 rows:                     sums    [column] of 128 · high and of low bytes
//!   for 32 of them, for 4 blocks:          sums of a tile stay in registers
//!     for 4 rows:                          c0a c0b c0c c0d · ka kb kc kd, c1a c1b …
//! ```

use half::f16;

use super::{Operation, SPAN, Simd, scalar};
use crate::format::BLOCK;
use crate::{Matrix, MatrixData};

/// Rows with one rounding of factors: those whose numbers agree but for the last ten bits, however
/// many of them are listed. So leaving rows out that count nothing changes nothing.
pub(super) const CHUNK_ROWS: usize = 1024;
/// Rows whose factors are made ahead.
const BATCH_ROWS: usize = 32;
/// The largest factor: 127 times 128.
pub(super) const LARGEST: f32 = 16_256.0;
/// Rows that are interleaved.
const ROWS: usize = 4;

/// `out[c] += Σ_i coefficients[i] * matrix[rows[i], first_block * 32 + c]`.
pub(crate) struct IntegerSum<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) rows: &'a [u32],
    pub(crate) coefficients: &'a [f32],
    pub(crate) first_block: usize,
    pub(crate) out: &'a mut [f32],
}

/// Cuts a list of rows where the chunk changes, and calls `act` with every part.
pub(super) fn chunks<'a>(
    rows: &'a [u32],
    coefficients: &'a [f32],
) -> impl Iterator<Item = (&'a [u32], &'a [f32])> {
    let chunk = |row: &u32| *row as usize / CHUNK_ROWS;
    let mut start = 0;
    rows.chunk_by(move |a, b| chunk(a) == chunk(b))
        .map(move |rows| {
            let of_rows = &coefficients[start..start + rows.len()];
            start += rows.len();
            (rows, of_rows)
        })
}

/// What the factors of a block are multiplied by before they are rounded, and what the sums of them
/// after, from the bits of the largest magnitude.
#[inline(always)]
pub(super) fn rounding(largest: u32) -> (f32, f32) {
    match f32::from_bits(largest) {
        largest if !largest.is_finite() => (0.0, f32::NAN),
        largest if largest < 1e-30 => (0.0, 0.0),
        largest => (LARGEST / largest, largest / LARGEST),
    }
}

/// A factor as two bytes, `128 * high + low`.
#[inline(always)]
pub(super) fn cut(factor: f32, inverse: f32) -> (i8, i8) {
    // One that is no number would spoil the sum; its scale tells of it already.
    let scaled = if inverse == 0.0 {
        0.0
    } else {
        factor * inverse
    };
    // Adding 1.5 * 2^23 leaves the nearest whole number, ties to even, in the last bits.
    let whole = (scaled + 12_582_912.0).to_bits() as i16;
    let high = (whole + 64) >> 7;
    (high as i8, (whole - 128 * high) as i8)
}

impl Operation for IntegerSum<'_> {
    type Output = ();

    fn specify(self) {
        for (rows, coefficients) in chunks(self.rows, self.coefficients) {
            scalar::integer_sum(self.matrix, rows, coefficients, self.first_block, self.out);
        }
    }

    #[inline(always)]
    fn translate<S: Simd>(self, simd: S) {
        let blocks = self.matrix.blocks();
        let count = self.out.len().div_ceil(BLOCK);
        let part = self.first_block..self.first_block + count;
        let mut work = Work::new(count);
        for (rows, coefficients) in chunks(self.rows, self.coefficients) {
            match self.matrix.data() {
                MatrixData::Q8_0 { quants, scales } => {
                    let (quants, _) = quants.as_chunks::<BLOCK>();
                    let row = |row: u32| {
                        let start = row as usize * blocks;
                        let row = start + part.start..start + part.end;
                        (&quants[row.clone()], &scales[row])
                    };
                    work.add::<S, _>(simd, row, rows, coefficients, self.out);
                }
                MatrixData::Q4_0 { quants, scales } => {
                    let (quants, _) = quants.as_chunks::<{ BLOCK / 2 }>();
                    let row = |row: u32| {
                        let start = row as usize * blocks;
                        let row = start + part.start..start + part.end;
                        (&quants[row.clone()], &scales[row])
                    };
                    work.add::<S, _>(simd, row, rows, coefficients, self.out);
                }
                _ => unreachable!("only quantised weights are added in whole numbers"),
            }
        }
    }
}

/// `out` and what the sums of the high and low bytes of factors stand for.
#[inline(always)]
pub(super) fn scaled_sum(high: i32, low: i32, scale: f32, out: f32) -> f32 {
    let whole = 128.0f32.mul_add(high as f32, low as f32);
    scale.mul_add(whole, out)
}

/// A block of quants whose bytes are multiplied.
trait SumQuants: Sized {
    /// Numbers in a byte.
    const FOLDS: usize;
    /// Quarters of 16 bytes that a block takes.
    const QUARTERS: usize;
    /// Reads one word a block and writes it to all lanes of its quarters.
    fn spread<S: Simd>(simd: S, words: &[u32]) -> S::Integers;
    /// The bytes of some blocks.
    fn bytes(blocks: &[Self]) -> &[u8];
    /// Adds the products of four interleaved rows to the sums.
    fn dot<S: Simd>(
        simd: S,
        bytes: S::Integers,
        factors: S::Integers,
        sums: [S::Integers; 2],
    ) -> [S::Integers; 2];
    /// What every number is larger than its weight while it is multiplied.
    fn bias<S: Simd>() -> i32;
}

impl SumQuants for [i8; BLOCK] {
    const FOLDS: usize = 1;
    const QUARTERS: usize = 2;

    #[inline(always)]
    fn spread<S: Simd>(simd: S, words: &[u32]) -> S::Integers {
        simd.spread_over_two(words)
    }

    #[inline(always)]
    fn bytes(blocks: &[Self]) -> &[u8] {
        bytemuck::cast_slice(blocks)
    }

    #[inline(always)]
    fn dot<S: Simd>(
        simd: S,
        bytes: S::Integers,
        factors: S::Integers,
        [sums, none]: [S::Integers; 2],
    ) -> [S::Integers; 2] {
        [simd.dot_signed(sums, bytes, factors), none]
    }

    #[inline(always)]
    fn bias<S: Simd>() -> i32 {
        S::SIGNED_BIAS
    }
}

impl SumQuants for [u8; BLOCK / 2] {
    const FOLDS: usize = 2;
    const QUARTERS: usize = 1;

    #[inline(always)]
    fn spread<S: Simd>(simd: S, words: &[u32]) -> S::Integers {
        simd.spread_over_one(words)
    }

    #[inline(always)]
    fn bytes(blocks: &[Self]) -> &[u8] {
        blocks.as_flattened()
    }

    #[inline(always)]
    fn dot<S: Simd>(
        simd: S,
        bytes: S::Integers,
        factors: S::Integers,
        sums: [S::Integers; 2],
    ) -> [S::Integers; 2] {
        [
            simd.dot_unsigned(sums[0], simd.low_nibbles(bytes), factors),
            simd.dot_unsigned(sums[1], simd.high_nibbles(bytes), factors),
        ]
    }

    #[inline(always)]
    fn bias<S: Simd>() -> i32 {
        8
    }
}

/// A cache line of whole numbers.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([i32; 16]);

/// Memory of a sum.
struct Work {
    /// `[blocks]`, filled up to whole spans, as are the next four.
    largest: Vec<u32>,
    inverses: Vec<f32>,
    /// Sums of the high and of the low bytes of factors.
    factor_sums: [Vec<i32>; 2],
    /// `[rows / 4, blocks]`: four bytes each, of the high and of the low bytes.
    factors: [Vec<u32>; 2],
    /// Sums, 32 a block, as they lie in registers: first of the high, then of the low bytes.
    sums: Vec<Line>,
}

impl Work {
    fn new(blocks: usize) -> Self {
        let padded = blocks.next_multiple_of(SPAN);
        Self {
            largest: vec![0; padded],
            inverses: vec![0.0; padded],
            factor_sums: [vec![0; padded], vec![0; padded]],
            factors: [(); 2].map(|()| vec![0; padded * BATCH_ROWS / ROWS]),
            sums: vec![Line([0; 16]); padded * BLOCK / 16 * 2],
        }
    }

    /// Adds the rows of one chunk to `out`.
    #[inline(always)]
    fn add<'a, S: Simd, Q: SumQuants + 'a>(
        &mut self,
        simd: S,
        row: impl Fn(u32) -> (&'a [Q], &'a [f16]) + Copy,
        rows: &[u32],
        coefficients: &[f32],
        out: &mut [f32],
    ) {
        self.find_largest(simd, row, rows, coefficients);
        self.sums.fill(Line([0; 16]));
        self.factor_sums.iter_mut().for_each(|sums| sums.fill(0));
        let coefficients = coefficients.chunks(BATCH_ROWS);
        let batches = rows.chunks(BATCH_ROWS).zip(coefficients);
        for (index, (batch, coefficients)) in batches.enumerate() {
            let next = rows.get((index + 1) * BATCH_ROWS..).unwrap_or_default();
            let next = &next[..next.len().min(BATCH_ROWS)];
            self.cut_factors(simd, row, batch, coefficients);
            self.multiply(simd, row, batch, next);
        }
        self.finish::<S, Q>(simd, out);
    }

    /// The largest factor of every block.
    #[inline(always)]
    fn find_largest<'a, S: Simd, Q: 'a>(
        &mut self,
        simd: S,
        row: impl Fn(u32) -> (&'a [Q], &'a [f16]),
        rows: &[u32],
        coefficients: &[f32],
    ) {
        self.largest.fill(0);
        let mut wide = [0.0; SPAN];
        for (index, coefficient) in coefficients.iter().enumerate() {
            if let Some(next) = rows.get(index + BATCH_ROWS) {
                simd.prefetch(row(*next).1);
            }
            let (quants, scales) = row(rows[index]);
            if index < BATCH_ROWS {
                simd.prefetch(quants);
            }
            for (scales, largest) in scales
                .chunks(SPAN)
                .zip(self.largest.as_chunks_mut::<SPAN>().0)
            {
                simd.widen(scales, &mut wide);
                wide[scales.len()..].fill(0.0);
                for (largest, scale) in largest.iter_mut().zip(&wide) {
                    *largest = (*largest).max((coefficient * scale).to_bits() & 0x7fff_ffff);
                }
            }
        }
        for (largest, inverse) in self.largest.iter().zip(&mut self.inverses) {
            *inverse = rounding(*largest).0;
        }
    }

    /// Rounds and cuts the factors of a batch of rows.
    #[inline(always)]
    fn cut_factors<'a, S: Simd, Q: 'a>(
        &mut self,
        simd: S,
        row: impl Fn(u32) -> (&'a [Q], &'a [f16]),
        rows: &[u32],
        coefficients: &[f32],
    ) {
        let padded = self.largest.len();
        let [high, low] = &mut self.factors;
        let [high_sums, low_sums] = &mut self.factor_sums;
        let mut wide = [0.0; SPAN];
        for (group, (rows, coefficients)) in
            rows.chunks(ROWS).zip(coefficients.chunks(ROWS)).enumerate()
        {
            let place = group * padded..(group + 1) * padded;
            let (high, low) = (&mut high[place.clone()], &mut low[place]);
            high.fill(0);
            low.fill(0);
            for (index, (listed, coefficient)) in rows.iter().zip(coefficients).enumerate() {
                let (_, scales) = row(*listed);
                let shift = 8 * index;
                for (span, scales) in scales.chunks(SPAN).enumerate() {
                    simd.widen(scales, &mut wide);
                    wide[scales.len()..].fill(0.0);
                    let place = span * SPAN..(span + 1) * SPAN;
                    let (high, low) = (&mut high[place.clone()], &mut low[place.clone()]);
                    let (high_sums, low_sums) =
                        (&mut high_sums[place.clone()], &mut low_sums[place.clone()]);
                    let inverses = &self.inverses[place];
                    for block in 0..SPAN {
                        let (h, l) = cut(coefficient * wide[block], inverses[block]);
                        high[block] |= u32::from(h as u8) << shift;
                        low[block] |= u32::from(l as u8) << shift;
                        high_sums[block] += i32::from(h);
                        low_sums[block] += i32::from(l);
                    }
                }
            }
        }
    }

    /// Adds the products of a batch of rows to the sums; asks for the `next` ones meanwhile.
    #[inline(always)]
    fn multiply<'a, S: Simd, Q: SumQuants + 'a>(
        &mut self,
        simd: S,
        row: impl Fn(u32) -> (&'a [Q], &'a [f16]),
        rows: &[u32],
        next: &[u32],
    ) {
        let padded = self.largest.len();
        let mut quants = [[].as_slice(); BATCH_ROWS];
        let mut next_quants = [[].as_slice(); BATCH_ROWS];
        for (quants, listed) in quants.iter_mut().zip(rows) {
            *quants = row(*listed).0;
        }
        for (quants, listed) in next_quants.iter_mut().zip(next) {
            *quants = row(*listed).0;
        }
        // A group that is not full is filled up with rows whose factors are zero.
        for index in rows.len()..rows.len().next_multiple_of(ROWS) {
            quants[index] = quants[rows.len() - 1];
        }
        let (groups, _) = quants.as_chunks::<ROWS>();
        let groups = &groups[..rows.len().div_ceil(ROWS)];
        let blocks = quants[0].len();
        let step = S::QUARTERS / Q::QUARTERS;
        let sums: &mut [i32] = bytemuck::cast_slice_mut(&mut self.sums);
        let tiles = sums.chunks_exact_mut(step * BLOCK * 2);
        for (first, sums) in (0..blocks).step_by(step).zip(tiles) {
            let part = first..blocks.min(first + step);
            for next in &next_quants[..next.len()] {
                simd.prefetch(&next[part.clone()]);
            }
            let (registers, _) = sums.as_chunks_mut::<16>();
            let mut tile = [[[simd.zero_integers(); 4]; 2]; 2];
            for (byte, tile) in tile.iter_mut().enumerate() {
                for (fold, tile) in tile.iter_mut().take(Q::FOLDS).enumerate() {
                    for (register, tile) in tile.iter_mut().enumerate() {
                        let place = (byte * Q::FOLDS + fold) * 4 + register;
                        *tile = simd.load_integers(registers, place);
                    }
                }
            }
            for (group, quants) in groups.iter().enumerate() {
                let mut bytes = [simd.zero_integers(); ROWS];
                for (bytes, quants) in bytes.iter_mut().zip(quants) {
                    *bytes = simd.load_bytes(Q::bytes(&quants[part.clone()]));
                }
                let bytes = simd.interleave(bytes);
                for (tile, factors) in tile.iter_mut().zip(&self.factors) {
                    let words = &factors[group * padded + first..][..step];
                    let factors = Q::spread(simd, words);
                    for (register, bytes) in bytes.into_iter().enumerate() {
                        let sums = [tile[0][register], tile[1][register]];
                        [tile[0][register], tile[1][register]] = Q::dot(simd, bytes, factors, sums);
                    }
                }
            }
            for (byte, tile) in tile.into_iter().enumerate() {
                for (fold, tile) in tile.into_iter().take(Q::FOLDS).enumerate() {
                    for (register, tile) in tile.into_iter().enumerate() {
                        let place = (byte * Q::FOLDS + fold) * 4 + register;
                        simd.store_integers(tile, registers, place);
                    }
                }
            }
        }
    }

    /// Adds what the sums stand for to `out`.
    #[inline(always)]
    fn finish<S: Simd, Q: SumQuants>(&mut self, simd: S, out: &mut [f32]) {
        let step = S::QUARTERS / Q::QUARTERS;
        let sums: &[i32] = bytemuck::cast_slice(&self.sums);
        let tiles = sums.chunks_exact(step * BLOCK * 2);
        let bias = Q::bias::<S>();
        for (tile, (sums, out)) in tiles.zip(out.chunks_mut(step * BLOCK)).enumerate() {
            let (registers, _) = sums.as_chunks::<16>();
            let mut natural = [[0; 4 * BLOCK]; 2];
            for (byte, natural) in natural.iter_mut().enumerate() {
                for fold in 0..Q::FOLDS {
                    let mut four = [simd.zero_integers(); 4];
                    for (register, integers) in four.iter_mut().enumerate() {
                        let place = (byte * Q::FOLDS + fold) * 4 + register;
                        *integers = simd.load_integers(registers, place);
                    }
                    let mut quarters = [[0; 16]; 4];
                    simd.store_quarters(four, &mut quarters);
                    for (quarter, numbers) in quarters.iter().take(S::QUARTERS).enumerate() {
                        let place = (quarter * Q::FOLDS + fold) * 16;
                        natural[place..][..16].copy_from_slice(numbers);
                    }
                }
            }
            for (index, out) in out.chunks_mut(BLOCK).enumerate() {
                let block = tile * step + index;
                let [high_sum, low_sum] = [0, 1].map(|byte| bias * self.factor_sums[byte][block]);
                let (_, scale) = rounding(self.largest[block]);
                let high = &natural[0][index * BLOCK..][..BLOCK];
                let low = &natural[1][index * BLOCK..][..BLOCK];
                for ((out, high), low) in out.iter_mut().zip(high).zip(low) {
                    let (high, low) = (high - high_sum, low - low_sum);
                    *out = scaled_sum(high, low, scale, *out);
                }
            }
        }
    }
}
