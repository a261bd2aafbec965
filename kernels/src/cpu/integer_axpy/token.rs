//! One token.

use std::{cell::Cell, ops::Range};

use powerinfer_tensor::BLOCK;

use super::{
    Columns, GROUP_ROWS, LINE, LINE_BLOCKS, LINE_COLUMNS, PREFETCH_ROWS, REGISTERS, ROWS, groups,
    line::{
        Line, Unpacked, accumulate_line, last_line, per_quarter, to_column_order,
        to_register_order, unpack,
    },
};
use crate::{
    activations::int8_scale,
    cpu::{
        SPAN, Simd,
        rows::{NibbleRow, Weights},
    },
};

/// Quantisation of a group's factors in a span of blocks.
#[derive(Clone, Copy)]
struct SpanFactors {
    /// Bits of the largest factor magnitude of each block.
    largest: [u32; SPAN],
    scales: [f32; SPAN],
    inverses: [f32; SPAN],
    /// Sum of minima times coefficients.
    minima: [f32; SPAN],
    /// Sum of the quantised factors.
    factors: [i32; SPAN],
}

impl SpanFactors {
    const EMPTY: Self = Self {
        largest: [0; SPAN],
        scales: [0.0; SPAN],
        inverses: [0.0; SPAN],
        minima: [0.0; SPAN],
        factors: [0; SPAN],
    };

    /// Accumulates the scales and minima of a row.
    #[inline(always)]
    fn add_row<S: Simd, R: NibbleRow>(
        &mut self,
        simd: S,
        coefficient: S::Lanes,
        [scales, minima]: [S::Lanes; 2],
    ) {
        let factors = simd.multiply_lanes(coefficient, scales);
        let largest = simd.load_bytes(bytemuck::cast_ref(&self.largest));
        let largest = simd.max_i32(largest, simd.magnitude_bits(factors));
        simd.store_bytes(largest, bytemuck::cast_mut(&mut self.largest));
        if R::HAS_MINIMA {
            let sums = simd.load_lanes(&self.minima);
            let sums = simd.multiply_add_lanes(coefficient, minima, sums);
            simd.store_lanes(sums, &mut self.minima);
        }
    }

    /// Sets the scales of the factors, after all rows.
    #[inline(always)]
    fn set_scales(&mut self) {
        for (index, largest) in self.largest.into_iter().enumerate() {
            (self.scales[index], self.inverses[index]) = int8_scale(largest);
        }
    }
}

/// Memory of [`axpy_token`], which a thread reuses from call to call so that decoding allocates nothing.
#[derive(Default)]
struct Buffers {
    spans: Vec<SpanFactors>,
    factors: Vec<[u32; SPAN]>,
    sums: Vec<Unpacked>,
}

thread_local! {
    static BUFFERS: Cell<Buffers> = Cell::default();
}

/// Sets `buffer` to `length` copies of `value`.
fn fill<T: Copy>(buffer: &mut Vec<T>, length: usize, value: T) {
    buffer.clear();
    buffer.resize(length, value);
}

/// Axpy of one token: rows are read four at a time, sums stay in the cache.
#[inline(always)]
pub(super) fn axpy_token<S: Simd, W: Weights<Row: NibbleRow>>(
    simd: S,
    part: Columns<W>,
    rows: &[u32],
    coefficients: &[f32],
    out: &mut [f32],
) {
    let blocks = out.len().div_ceil(BLOCK);
    let lines = blocks.div_ceil(LINE_BLOCKS);
    let mut buffers = BUFFERS.take();
    let Buffers {
        spans,
        factors,
        sums,
    } = &mut buffers;
    fill(spans, blocks.div_ceil(SPAN), SpanFactors::EMPTY);
    fill(factors, spans.len() * GROUP_ROWS / ROWS, [0; SPAN]);
    fill(sums, lines, [Line::ZERO; REGISTERS]);
    to_register_order(out);
    for group in groups(rows) {
        quantise_factors(
            simd,
            &part,
            rows,
            coefficients,
            group.clone(),
            spans,
            factors,
        );
        for (line, sums) in sums.iter_mut().enumerate() {
            let block = line * LINE_BLOCKS;
            let span_factors = &spans[block / SPAN].factors;
            let bias = per_quarter(&span_factors[block % SPAN..]);
            let bias = bias.map(|sum| -W::Row::BIAS * sum);
            sums.fill(Line(bytemuck::cast(bias)));
        }
        let quads = (group.start..group.end).step_by(ROWS);
        for (first, factors) in quads.zip(factors.chunks_exact(spans.len().max(1))) {
            // A partial quad repeats its last row with a factor of 0.
            let (mut quad, mut next) = ([[].as_slice(); ROWS], [[].as_slice(); ROWS]);
            for index in 0..ROWS {
                let (listed, ahead) = (first + index, first + index + PREFETCH_ROWS);
                quad[index] = part.row(rows[listed.min(group.end - 1)]).bytes();
                next[index] = part.row(rows[ahead.min(rows.len() - 1)]).bytes();
            }
            axpy_quad(simd, quad, next, factors.as_flattened(), sums);
        }
        let lines = sums.iter().zip(out.chunks_mut(LINE_COLUMNS));
        for (line, (line_sums, out)) in lines.enumerate() {
            let block = line * LINE_BLOCKS;
            let (span, within) = (&spans[block / SPAN], block % SPAN);
            let scales = per_quarter(&span.scales[within..]);
            let minima = per_quarter(&span.minima[within..]);
            let mut registers = [simd.splat_i32(0); REGISTERS];
            for index in 0..REGISTERS {
                registers[index] = simd.load_bytes(&line_sums[index].0);
            }
            accumulate_line::<S, W::Row>(simd, &registers, &scales, &minima, out);
        }
    }
    to_column_order(out);
    BUFFERS.set(buffers);
}

/// Adds four rows times their `factors`, one word per block, to `sums`, one entry per line; prefetches the `next` rows, one
/// row after the other.
#[inline(always)]
fn axpy_quad<S: Simd>(
    simd: S,
    quad: [&[u8]; ROWS],
    next: [&[u8]; ROWS],
    factors: &[u32],
    sums: &mut [Unpacked],
) {
    let count = quad[0].len() / LINE;
    let (sums, last) = sums.split_at_mut(count);
    let mut lines = [[].as_slice(); ROWS];
    for (lines, row) in lines.iter_mut().zip(quad) {
        *lines = &row.as_chunks::<LINE>().0[..count];
    }
    let part_lines_count = count.div_ceil(ROWS).max(1);
    for (index, sums) in sums.chunks_mut(part_lines_count).enumerate() {
        let part = index * part_lines_count..index * part_lines_count + sums.len();
        let words = &factors[part.start * LINE_BLOCKS..part.end * LINE_BLOCKS];
        let mut part_lines = [[].as_slice(); ROWS];
        for (part_lines, lines) in part_lines.iter_mut().zip(lines) {
            *part_lines = &lines[part.clone()];
        }
        axpy_lines(simd, part_lines, next[index], words, sums);
    }
    if let Some(last) = last.first_mut() {
        let lines = quad.map(last_line);
        let lines = [0, 1, 2, 3].map(|row| std::slice::from_ref(&lines[row].0));
        let words = &factors[count * LINE_BLOCKS..][..LINE_BLOCKS];
        axpy_lines(simd, lines, &[], words, std::slice::from_mut(last));
    }
}

/// [`axpy_quad`] over consecutive lines.
#[inline(always)]
fn axpy_lines<S: Simd>(
    simd: S,
    [a, b, c, d]: [&[[u8; LINE]]; ROWS],
    next: &[u8],
    factors: &[u32],
    sums: &mut [Unpacked],
) {
    let prefetched = next.as_chunks::<{ ROWS * LINE }>().0;
    let lines = a.iter().zip(b).zip(c.iter().zip(d));
    let operands = factors.as_chunks::<LINE_BLOCKS>().0.iter().zip(sums);
    for (index, (((a, b), (c, d)), (words, sums))) in lines.zip(operands).enumerate() {
        if let Some(prefetched) = prefetched.get(index) {
            simd.prefetch(prefetched);
        }
        let words = simd.broadcast_words(words);
        let lines = [
            simd.load_bytes(a),
            simd.load_bytes(b),
            simd.load_bytes(c),
            simd.load_bytes(d),
        ];
        let values = unpack(simd, lines);
        for index in 0..REGISTERS {
            let sum = simd.load_bytes(&sums[index].0);
            let sum = simd.dot_nibbles(sum, values[index], words);
            simd.store_bytes(sum, &mut sums[index].0);
        }
    }
}

/// Quantises the factors of a group of rows; `factors` is `[row / 4, span]`.
#[inline(always)]
fn quantise_factors<S: Simd, W: Weights<Row: NibbleRow>>(
    simd: S,
    part: &Columns<W>,
    rows: &[u32],
    coefficients: &[f32],
    group: Range<usize>,
    spans: &mut [SpanFactors],
    factors: &mut [[u32; SPAN]],
) {
    spans.fill(SpanFactors::EMPTY);
    for index in group.clone() {
        let next = rows[(index + GROUP_ROWS).min(rows.len() - 1)];
        part.row(next).prefetch_scales(simd);
        let row = part.row(rows[index]);
        let coefficient = simd.splat_lanes(coefficients[index]);
        for (span, span_factors) in spans.iter_mut().enumerate() {
            span_factors.add_row::<S, W::Row>(simd, coefficient, row.span_scales(simd, span));
        }
    }
    spans.iter_mut().for_each(SpanFactors::set_scales);
    let quads = (0..group.len()).step_by(ROWS);
    for (quad, factors) in quads.zip(factors.chunks_exact_mut(spans.len().max(1))) {
        let first = group.start + quad;
        let mut quad = [part.row(rows[first]); ROWS];
        let mut factor_coefficients = [simd.splat_lanes(0.0); ROWS];
        for index in 0..ROWS.min(group.end - first) {
            quad[index] = part.row(rows[first + index]);
            factor_coefficients[index] = simd.splat_lanes(coefficients[first + index]);
        }
        for (span, (span_factors, words)) in spans.iter_mut().zip(factors).enumerate() {
            let inverses = simd.load_lanes(&span_factors.inverses);
            let mut sums = simd.load_bytes(bytemuck::cast_ref(&span_factors.factors));
            let mut bytes = [simd.splat_i32(0); ROWS];
            for index in 0..ROWS {
                let [scales, _] = quad[index].span_scales(simd, span);
                let factors = simd.multiply_lanes(factor_coefficients[index], scales);
                bytes[index] = simd.quantise_lanes(factors, inverses);
                sums = simd.add_i32(sums, bytes[index]);
            }
            simd.store_bytes(sums, bytemuck::cast_mut(&mut span_factors.factors));
            let joined = simd.pack_bytes(bytes);
            simd.store_bytes(joined, bytemuck::cast_mut(words));
        }
    }
}
