//! A batch of tokens.

use powerinfer_tensor::BLOCK;

use super::{
    Columns, GROUP_ROWS, LINE_BLOCKS, LINE_COLUMNS, REGISTERS, ROWS, WORDS, end_part, groups,
    line::{
        Line, accumulate_line, load_lines, per_quarter, to_column_order, to_register_order, unpack,
    },
};
use crate::{
    activations::int8_scale,
    cpu::{
        SPAN, Simd,
        reader::LINE,
        rows::{NibbleRow, Scales, Weights},
    },
};

/// Axpy of several tokens: rows are unpacked once for all tokens. `sums` and `out` are `[tokens, width]`; `ends [groups, tokens]` says
/// whether a token's sum is moved to `out` after a group.
#[inline(always)]
pub(super) fn axpy_tokens<S: Simd, W: Weights<Row: NibbleRow>>(
    simd: S,
    part: Columns<W>,
    rows: &[u32],
    coefficients: &[f32],
    ends: &[bool],
    sums: &mut [f32],
    out: &mut [f32],
) {
    let width = part.columns.len();
    let tokens = sums.len() / width;
    let blocks = width.div_ceil(BLOCK);
    let lines = blocks.div_ceil(LINE_BLOCKS);
    let spans = blocks.div_ceil(SPAN);
    let mut scales = vec![Scales::ONES; GROUP_ROWS * spans];
    let mut minima = vec![[0.0; SPAN]; tokens * spans * usize::from(W::Row::HAS_MINIMA)];
    let mut values = [[Line::ZERO; REGISTERS]; GROUP_ROWS / ROWS];
    let mut quads = [[0.0; WORDS]; GROUP_ROWS / ROWS];
    let ends_any = ends.contains(&true);
    sums.chunks_exact_mut(width).for_each(to_register_order);
    if ends_any {
        out.chunks_exact_mut(width).for_each(to_register_order);
    }
    for (group, ends) in groups(rows).zip(ends.chunks_exact(tokens)) {
        let group_rows = &rows[group.clone()];
        for (listed, scales) in group_rows.iter().zip(scales.chunks_exact_mut(spans)) {
            let row = part.row(*listed);
            for (span, stored) in scales.iter_mut().enumerate() {
                let [scales, minima] = row.span_scales(simd, span);
                simd.store_lanes(scales, &mut stored.scales);
                if W::Row::HAS_MINIMA {
                    simd.store_lanes(minima, &mut stored.minima);
                }
            }
        }
        let token_coefficients = |token: usize| &coefficients[token * rows.len()..][group.clone()];
        if W::Row::HAS_MINIMA {
            for (token, minima) in minima.chunks_exact_mut(spans).enumerate() {
                for (span, sums) in minima.iter_mut().enumerate() {
                    let mut sum = simd.splat_lanes(0.0);
                    let row_scales = scales.iter().skip(span).step_by(spans);
                    for (coefficient, scales) in token_coefficients(token).iter().zip(row_scales) {
                        let coefficient = simd.splat_lanes(*coefficient);
                        let minima = simd.load_lanes(&scales.minima);
                        sum = simd.multiply_add_lanes(coefficient, minima, sum);
                    }
                    simd.store_lanes(sum, sums);
                }
            }
        }
        let quad_count = group.len().div_ceil(ROWS);
        let next_group = &rows[group.end..];
        for line in 0..lines {
            let block = line * LINE_BLOCKS;
            for (quad, (values, quads)) in values
                .iter_mut()
                .zip(&mut quads)
                .take(quad_count)
                .enumerate()
            {
                *quads = [0.0; WORDS];
                let quad_rows = &group_rows[quad * ROWS..];
                let mut bytes = [[].as_slice(); ROWS];
                for index in 0..ROWS {
                    // A partial quad repeats its last row with a factor of 0.
                    bytes[index] = part.row(quad_rows[index.min(quad_rows.len() - 1)]).bytes();
                }
                // One line of every row of a group is read in turn, a pattern that hardware prefetchers miss. The next group's
                // lines are prefetched quad by quad: in one burst, most prefetches would be dropped.
                for listed in next_group.iter().skip(quad * ROWS).take(ROWS) {
                    let bytes = part.row(*listed).bytes();
                    simd.prefetch(
                        &bytes[bytes.len().min(line * LINE)..bytes.len().min(line * LINE + 1)],
                    );
                }
                for index in 0..ROWS.min(quad_rows.len()) {
                    let scales = &scales[(quad * ROWS + index) * spans + block / SPAN].scales;
                    for (quarter, scale) in scales[block % SPAN..][..4].iter().enumerate() {
                        quads[quarter * ROWS + index] = *scale;
                    }
                }
                let unpacked = unpack(simd, load_lines(simd, &bytes, line));
                for (line, unpacked) in values.iter_mut().zip(unpacked) {
                    simd.store_bytes(unpacked, &mut line.0);
                }
            }
            let (values, quads) = (&values[..quad_count], &quads[..quad_count]);
            for token in 0..tokens {
                let factors = Factors::new(simd, token_coefficients(token), quads);
                let minima = if W::Row::HAS_MINIMA {
                    let minima = &minima[token * spans + block / SPAN];
                    per_quarter(&minima[block % SPAN..])
                } else {
                    [0.0; WORDS]
                };
                let bias = factors.sums.map(|sum| -W::Row::BIAS * sum);
                let mut totals = [simd.load_bytes(bytemuck::cast_ref(&bias)); REGISTERS];
                for (half, totals) in totals.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let (mut values, mut words) = (values, &factors.words[..]);
                    if S::SUMS_PAIRS {
                        let (several, rest) = values.as_chunks::<QUADS>();
                        let of_several = words.as_chunks::<QUADS>().0;
                        for (values, words) in several.iter().zip(of_several) {
                            add_quads(simd, values, words, half, totals);
                        }
                        (values, words) = (rest, &words[several.len() * QUADS..]);
                    }
                    for (values, words) in values.iter().zip(words) {
                        let words = simd.broadcast_words(words);
                        for (total, values) in totals.iter_mut().zip(&values[4 * half..]) {
                            let values = simd.load_bytes(&values.0);
                            *total = simd.dot_unsigned(*total, values, words);
                        }
                    }
                }
                let line_columns = line * LINE_COLUMNS..width.min((line + 1) * LINE_COLUMNS);
                let sums = &mut sums[token * width..][line_columns];
                accumulate_line::<S, W::Row>(simd, &totals, &factors.scales, &minima, sums);
            }
        }
        let both = sums
            .chunks_exact_mut(width)
            .zip(out.chunks_exact_mut(width));
        for ((sum, out), _) in both.zip(ends).filter(|(_, ends)| **ends) {
            end_part(sum, out);
        }
    }
    sums.chunks_exact_mut(width).for_each(to_column_order);
    if ends_any {
        out.chunks_exact_mut(width).for_each(to_column_order);
    }
}

/// Quads whose products are added together.
const QUADS: usize = 8;

/// Adds the products of several quads to `totals`, for half `half` of the registers.
#[inline(always)]
fn add_quads<S: Simd>(
    simd: S,
    values: &[[Line; REGISTERS]; QUADS],
    words: &[[u32; 4]; QUADS],
    half: usize,
    totals: &mut [S::Integers; REGISTERS / 2],
) {
    let mut factors = [simd.splat_i32(0); QUADS];
    for quad in 0..QUADS {
        factors[quad] = simd.broadcast_words(&words[quad]);
    }
    for index in 0..REGISTERS / 2 {
        let mut numbers = [simd.splat_i32(0); QUADS];
        for quad in 0..QUADS {
            numbers[quad] = simd.load_bytes(&values[quad][4 * half + index].0);
        }
        totals[index] = simd.dot_nibbles(totals[index], numbers, factors);
    }
}

/// Four coefficients times the scales of four rows, `[quarter, row]`.
#[inline(always)]
fn factors<S: Simd>(simd: S, coefficients: &[f32; ROWS], scales: &[f32; WORDS]) -> S::Lanes {
    simd.multiply_lanes(
        simd.broadcast_quarters(coefficients),
        simd.load_lanes(scales),
    )
}

/// Quantised factors of one token for the rows of a group in one line.
struct Factors {
    /// Factors of four rows, one word per quarter.
    words: [[u32; 4]; GROUP_ROWS / ROWS],
    /// Scale of the factors, per lane.
    scales: [f32; WORDS],
    /// Sum of the quantised factors, per lane.
    sums: [i32; WORDS],
}

impl Factors {
    /// Quantises coefficients times `scales`, `[row / 4, quarter, row % 4]`.
    #[inline(always)]
    fn new<S: Simd>(simd: S, coefficients: &[f32], scales: &[[f32; WORDS]]) -> Self {
        let mut padded = [[0.0; ROWS]; GROUP_ROWS / ROWS];
        padded.as_flattened_mut()[..coefficients.len()].copy_from_slice(coefficients);
        let mut largest = simd.splat_i32(0);
        for quad in 0..scales.len() {
            largest = simd.max_i32(
                largest,
                simd.magnitude_bits(factors(simd, &padded[quad], &scales[quad])),
            );
        }
        let mut lanes = [0u32; WORDS];
        simd.store_bytes(largest, bytemuck::cast_mut(&mut lanes));
        let (mut scale, mut inverse) = ([0.0; 4], [0.0; 4]);
        for (quarter, [a, b, c, d]) in lanes.as_chunks::<ROWS>().0.iter().enumerate() {
            (scale[quarter], inverse[quarter]) = int8_scale(*a.max(b).max(c.max(d)));
        }
        let inverses = simd.load_lanes(&per_quarter(&inverse));
        let mut words = [[0u32; 4]; GROUP_ROWS / ROWS];
        let mut sums = simd.splat_i32(0);
        for (quad, words) in words[..scales.len()].iter_mut().enumerate() {
            let rounded =
                simd.quantise_lanes(factors(simd, &padded[quad], &scales[quad]), inverses);
            sums = simd.add_i32(sums, rounded);
            *words = bytemuck::cast(simd.low_bytes(rounded));
        }
        let mut lanes = [0i32; WORDS];
        simd.store_bytes(sums, bytemuck::cast_mut(&mut lanes));
        let mut sums = [0; 4];
        for (sum, of_quarter) in sums.iter_mut().zip(lanes.as_chunks::<ROWS>().0) {
            *sum = of_quarter.iter().sum();
        }
        Self {
            words,
            scales: per_quarter(&scale),
            sums: per_quarter(&sums),
        }
    }
}
