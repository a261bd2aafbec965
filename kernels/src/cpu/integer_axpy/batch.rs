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
    let mut words = [[[Line::ZERO; QUADS]; TOKENS]; GROUP_ROWS / ROWS / QUADS];
    let mut totals = [[Line::ZERO; TOKENS]; REGISTERS];
    let mut scales_of = [[0.0; WORDS]; TOKENS];
    let bytes_of = |rows: &[u32]| {
        let mut bytes = [[].as_slice(); GROUP_ROWS];
        for (bytes, row) in bytes.iter_mut().zip(rows) {
            *bytes = part.row(*row).bytes();
        }
        bytes
    };
    let (mut group_bytes, mut next_bytes);
    next_bytes = bytes_of(rows);
    let ends_any = ends.contains(&true);
    sums.chunks_exact_mut(width).for_each(to_register_order);
    if ends_any {
        out.chunks_exact_mut(width).for_each(to_register_order);
    }
    for (group, ends) in groups(rows).zip(ends.chunks_exact(tokens)) {
        for (listed, scales) in rows[group.clone()]
            .iter()
            .zip(scales.chunks_exact_mut(spans))
        {
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
        group_bytes = next_bytes;
        next_bytes = bytes_of(&rows[group.end..]);
        for line in 0..lines {
            let block = line * LINE_BLOCKS;
            for (quad, (values, quads)) in values
                .iter_mut()
                .zip(&mut quads)
                .take(quad_count)
                .enumerate()
            {
                let first = quad * ROWS;
                // One line of every row of a group is read in turn, a pattern that hardware prefetchers miss. The next group's
                // lines are prefetched quad by quad: in one burst, most prefetches would be dropped.
                for bytes in &next_bytes[first..first + ROWS] {
                    simd.prefetch(bytes.get(line * LINE..=line * LINE).unwrap_or_default());
                }
                // A partial quad repeats its first row with a factor of 0.
                let mut bytes = [group_bytes[first]; ROWS];
                let mut of_rows = [&[0; 4 * ROWS]; ROWS];
                for index in 0..ROWS.min(group.len() - first) {
                    bytes[index] = group_bytes[first + index];
                    let scales = &scales[(first + index) * spans + block / SPAN].scales;
                    let of_line = &scales.as_chunks::<LINE_BLOCKS>().0[block % SPAN / LINE_BLOCKS];
                    of_rows[index] = bytemuck::cast_ref(of_line);
                }
                *quads = bytemuck::cast(simd.transpose_words(of_rows));
                let unpacked = unpack(simd, load_lines(simd, &bytes, line));
                for (line, unpacked) in values.iter_mut().zip(unpacked) {
                    simd.store_bytes(unpacked, &mut line.0);
                }
            }
            let quads = &quads[..quad_count];
            for first in (0..tokens).step_by(TOKENS) {
                let tile = TOKENS.min(tokens - first);
                for token in 0..tile {
                    let coefficients = token_coefficients(first + token);
                    let factors = Factors::new(simd, coefficients, quads, &mut words, token);
                    let bias = factors.sums.map(|sum| -W::Row::BIAS * sum);
                    for totals in &mut totals {
                        totals[token] = Line(bytemuck::cast(bias));
                    }
                    scales_of[token] = factors.scales;
                }
                let chunks = values[..quad_count].chunks(QUADS).zip(&words);
                for (values, words) in chunks {
                    let words = &words[..tile];
                    for (register, totals) in totals.iter_mut().enumerate() {
                        let totals = &mut totals[..tile];
                        match values.len() {
                            1 => add_products::<S, 1>(simd, values, register, words, totals),
                            2 => add_products::<S, 2>(simd, values, register, words, totals),
                            3 | 4 => add_products::<S, 4>(simd, values, register, words, totals),
                            _ => add_products::<S, QUADS>(simd, values, register, words, totals),
                        }
                    }
                }
                for token in 0..tile {
                    let minima = if W::Row::HAS_MINIMA {
                        let minima = &minima[(first + token) * spans + block / SPAN];
                        per_quarter(&minima[block % SPAN..])
                    } else {
                        [0.0; WORDS]
                    };
                    let mut of_token = [simd.splat_i32(0); REGISTERS];
                    for (total, totals) in of_token.iter_mut().zip(&totals) {
                        *total = simd.load_bytes(&totals[token].0);
                    }
                    let line_columns = line * LINE_COLUMNS..width.min((line + 1) * LINE_COLUMNS);
                    let sums = &mut sums[(first + token) * width..][line_columns];
                    accumulate_line::<S, W::Row>(simd, &of_token, &scales_of[token], &minima, sums);
                }
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
/// Tokens that share each load of a quad.
const TOKENS: usize = 4;

/// For each token, adds the products of register `register` of up to `N` quads and the token's `words` to its `totals`. Missing quads
/// repeat the last one; their words are 0.
#[inline(always)]
fn add_products<S: Simd, const N: usize>(
    simd: S,
    values: &[[Line; REGISTERS]],
    register: usize,
    words: &[[Line; QUADS]],
    totals: &mut [Line],
) {
    let mut nibbles = [&values[0][register].0; N];
    for (quad, nibbles) in nibbles.iter_mut().enumerate() {
        *nibbles = &values[quad.min(values.len() - 1)][register].0;
    }
    simd.add_nibble_products(
        nibbles,
        bytemuck::cast_slice(words),
        bytemuck::cast_slice_mut(totals),
    );
}

/// Four coefficients times the scales of four rows, `[quarter, row]`.
#[inline(always)]
fn factors<S: Simd>(simd: S, coefficients: &[f32; ROWS], scales: &[f32; WORDS]) -> S::Lanes {
    simd.multiply_lanes(
        simd.broadcast_quarters(coefficients),
        simd.load_lanes(scales),
    )
}

/// Scales and sums of the quantised factors of one token for the rows of a group in one line.
struct Factors {
    /// Scale of the factors, per lane.
    scales: [f32; WORDS],
    /// Sum of the quantised factors, per lane.
    sums: [i32; WORDS],
}

impl Factors {
    /// Quantises coefficients times `scales` (`[row / 4, quarter, row % 4]`) into the words of token `token` in `words`
    /// (`[row / 32, token, row / 4]`). Each word of a quarter holds the quarter's four factors. Words of missing rows are 0.
    #[inline(always)]
    fn new<S: Simd>(
        simd: S,
        coefficients: &[f32],
        scales: &[[f32; WORDS]],
        words: &mut [[[Line; QUADS]; TOKENS]],
        token: usize,
    ) -> Self {
        let mut padded = [[0.0; ROWS]; GROUP_ROWS / ROWS];
        let coefficients = match coefficients.as_chunks() {
            (whole, []) => whole,
            _ => {
                padded.as_flattened_mut()[..coefficients.len()].copy_from_slice(coefficients);
                &padded[..scales.len()]
            }
        };
        let mut largest = simd.splat_i32(0);
        for (coefficients, scales) in coefficients.iter().zip(scales) {
            let products = factors(simd, coefficients, scales);
            largest = simd.max_i32(largest, simd.magnitude_bits(products));
        }
        let mut lanes = [0u32; WORDS];
        simd.store_bytes(largest, bytemuck::cast_mut(&mut lanes));
        let (mut scale, mut inverse) = ([0.0; 4], [0.0; 4]);
        for (quarter, [a, b, c, d]) in lanes.as_chunks::<ROWS>().0.iter().enumerate() {
            (scale[quarter], inverse[quarter]) = int8_scale(*a.max(b).max(c.max(d)));
        }
        let inverses = simd.load_lanes(&per_quarter(&inverse));
        let mut sums = simd.splat_i32(0);
        let chunks = coefficients.chunks(QUADS).zip(scales.chunks(QUADS));
        for ((coefficients, scales), words) in chunks.zip(words) {
            let words = &mut words[token];
            for ((coefficients, scales), words) in coefficients.iter().zip(scales).zip(&mut *words)
            {
                let rounded = simd.quantise_lanes(factors(simd, coefficients, scales), inverses);
                sums = simd.add_i32(sums, rounded);
                simd.store_bytes(simd.quarter_bytes(rounded), &mut words.0);
            }
            words[scales.len()..].fill(Line::ZERO);
        }
        let mut lanes = [0i32; WORDS];
        simd.store_bytes(sums, bytemuck::cast_mut(&mut lanes));
        let mut sums = [0; 4];
        for (sum, of_quarter) in sums.iter_mut().zip(lanes.as_chunks::<ROWS>().0) {
            *sum = of_quarter.iter().sum();
        }
        Self {
            scales: per_quarter(&scale),
            sums: per_quarter(&sums),
        }
    }
}
