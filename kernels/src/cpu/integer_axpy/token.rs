//! One token.

use std::{cell::Cell, ops::Range};

use powerinfer_tensor::BLOCK;

use super::{
    Columns, GROUP_ROWS, LINE_BLOCKS, LINE_COLUMNS, PREFETCH_ROWS, REGISTERS, ROWS, groups,
    line::{
        Line, Unpacked, accumulate_line, last_line, per_quarter, to_column_order,
        to_register_order, unpack,
    },
};
use crate::{
    activations::int8_scale,
    cpu::{
        SPAN, Simd,
        reader::{LINE, Reader},
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
        let factors = self.largest.iter().zip(&mut self.scales);
        for ((largest, scale), inverse) in factors.zip(&mut self.inverses) {
            (*scale, *inverse) = int8_scale(*largest);
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

/// The first `length` values of `buffer`, which are undefined; new ones are `value`.
fn first<T: Copy>(buffer: &mut Vec<T>, length: usize, value: T) -> &mut [T] {
    if buffer.len() < length {
        buffer.resize(length, value);
    }
    &mut buffer[..length]
}

/// Axpy of one token: rows are read four at a time, sums stay in the cache. The first of the `next` rows are prefetched.
#[inline(always)]
pub(super) fn axpy_token<S: Simd, W: Weights<Row: NibbleRow>>(
    simd: S,
    part: Columns<W>,
    rows: &[u32],
    coefficients: &[f32],
    next: &[u32],
    out: &mut [f32],
) {
    let ahead = |index: usize| match index.checked_sub(rows.len()) {
        None => Some(part.row(rows[index])),
        Some(index) => next.get(index).map(|row| part.row(*row)),
    };
    let blocks = out.len().div_ceil(BLOCK);
    let lines = blocks.div_ceil(LINE_BLOCKS);
    let mut buffers = BUFFERS.take();
    let spans = first(
        &mut buffers.spans,
        blocks.div_ceil(SPAN),
        SpanFactors::EMPTY,
    );
    let factors = spans.len() * GROUP_ROWS / ROWS;
    let factors = first(&mut buffers.factors, factors, [0; SPAN]);
    let sums = first(&mut buffers.sums, lines, [Line::ZERO; REGISTERS]);
    for row in (0..PREFETCH_ROWS).map_while(ahead) {
        row.prefetch_scales(simd);
    }
    let mut reader = Reader::new(|index| ahead(index).map(NibbleRow::bytes));
    reader.prefetch(simd, PREFETCH_ROWS, usize::MAX);
    to_register_order(out);
    for group in groups(rows) {
        quantise_factors(
            simd,
            ahead,
            coefficients,
            group.clone(),
            &mut |count| reader.prefetch(simd, group.start + PREFETCH_ROWS, count),
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
        // Lines to prefetch for every line that is added or scaled, so that memory is always busy.
        let step = group.len().div_ceil(group.len().div_ceil(ROWS) + 1);
        let quads = (group.start..group.end).step_by(ROWS);
        for (first, factors) in quads.zip(factors.chunks_exact(spans.len().max(1))) {
            // A partial quad repeats its last row with a factor of 0.
            let mut quad = [[].as_slice(); ROWS];
            for (listed, row) in (first..).zip(&mut quad) {
                *row = part.row(rows[listed.min(group.end - 1)]).bytes();
            }
            let mut prefetch = || reader.prefetch(simd, first + PREFETCH_ROWS, step);
            axpy_quad(simd, quad, &mut prefetch, factors.as_flattened(), sums);
        }
        let lines = sums.iter().zip(out.chunks_mut(LINE_COLUMNS));
        for (line, (line_sums, out)) in lines.enumerate() {
            reader.prefetch(simd, group.end + PREFETCH_ROWS, step);
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

/// Adds four rows times their `factors`, one word per block, to `sums`, one entry per line; calls `prefetch` for each line.
#[inline(always)]
fn axpy_quad<S: Simd>(
    simd: S,
    quad: [&[u8]; ROWS],
    prefetch: &mut impl FnMut(),
    factors: &[u32],
    sums: &mut [Unpacked],
) {
    let count = quad[0].len() / LINE;
    let (sums, last) = sums.split_at_mut(count);
    let mut lines = [[].as_slice(); ROWS];
    for (lines, row) in lines.iter_mut().zip(quad) {
        *lines = &row.as_chunks::<LINE>().0[..count];
    }
    axpy_lines(simd, lines, prefetch, &factors[..count * LINE_BLOCKS], sums);
    if let Some(last) = last.first_mut() {
        let lines = quad.map(last_line);
        let lines = [0, 1, 2, 3].map(|row| std::slice::from_ref(&lines[row].0));
        let words = &factors[count * LINE_BLOCKS..][..LINE_BLOCKS];
        axpy_lines(simd, lines, prefetch, words, std::slice::from_mut(last));
    }
}

/// [`axpy_quad`] over consecutive lines.
#[inline(always)]
fn axpy_lines<S: Simd>(
    simd: S,
    [a, b, c, d]: [&[[u8; LINE]]; ROWS],
    prefetch: &mut impl FnMut(),
    factors: &[u32],
    sums: &mut [Unpacked],
) {
    let lines = a.iter().zip(b).zip(c.iter().zip(d));
    let operands = factors.as_chunks::<LINE_BLOCKS>().0.iter().zip(sums);
    for (((a, b), (c, d)), (words, sums)) in lines.zip(operands) {
        prefetch();
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
            let sum = simd.dot_unsigned(sum, values[index], words);
            simd.store_bytes(sum, &mut sums[index].0);
        }
    }
}

/// Quantises the factors of a group of the rows `row_of`; `factors` is `[row / 4, span]`. Prefetches the scales of later rows.
#[inline(always)]
fn quantise_factors<S: Simd, R: NibbleRow>(
    simd: S,
    row_of: impl Fn(usize) -> Option<R>,
    coefficients: &[f32],
    group: Range<usize>,
    prefetch: &mut impl FnMut(usize),
    spans: &mut [SpanFactors],
    factors: &mut [[u32; SPAN]],
) {
    spans.fill(SpanFactors::EMPTY);
    for (index, coefficient) in group.clone().zip(&coefficients[group.clone()]) {
        if let Some(row) = row_of(index + PREFETCH_ROWS) {
            row.prefetch_scales(simd);
        }
        prefetch(3);
        let Some(row) = row_of(index) else { break };
        let coefficient = simd.splat_lanes(*coefficient);
        for (span, span_factors) in spans.iter_mut().enumerate() {
            span_factors.add_row::<S, R>(simd, coefficient, row.span_scales(simd, span));
        }
    }
    for span in spans.iter_mut() {
        // Opaque, so that the blocks of a span are vectorised instead of the spans.
        std::hint::black_box(span).set_scales();
    }
    let quads = (0..group.len()).step_by(ROWS);
    for (quad, factors) in quads.zip(factors.chunks_exact_mut(spans.len().max(1))) {
        let first = group.start + quad;
        let Some(row) = row_of(first) else { break };
        let mut quad = [row; ROWS];
        let mut factor_coefficients = [simd.splat_lanes(0.0); ROWS];
        prefetch(3 * ROWS);
        for (place, index) in (first..group.end).take(ROWS).enumerate() {
            quad[place] = row_of(index).unwrap_or(row);
            factor_coefficients[place] = simd.splat_lanes(coefficients[index]);
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
