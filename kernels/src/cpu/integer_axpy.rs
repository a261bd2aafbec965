//! Weighted sums of rows of four-bit numbers in whole numbers: all columns, or the share of one thread.
//! Bytes are not worth it: they come from memory more slowly than floats add them, above all listed rows.
//!
//! Rows come in groups, whose factors (coefficients times scales) are rounded to bytes, block of columns
//! by block of columns. Four rows are then interleaved, so that four bytes of one column lie side by side,
//! which is what multiplying bytes adds up:
//!
//! ```text
//! for a group of rows:            factors  [row / 4, block] of four bytes each
//!   for one token, for 4 rows:    for 64 bytes of each row:     c0a c0b c0c c0d · ka kb kc kd, c1a c1b …
//!   for many, for 64 bytes:       for 4 rows, unpack; for every token, for 4 rows, the same
//! ```

use std::ops::Range;

use super::rows::{KWeights, NibbleRow, Quantised, Scales, Weights};
use super::{Operation, SPAN, Simd, scalar};
use crate::AXPY_GROUP_ROWS;
use crate::activations::rounding;
use powerinfer_tensor::BLOCK;
use powerinfer_tensor::{Matrix, MatrixData};

/// Rows whose factors are rounded together: those whose numbers agree but for the last seven bits,
/// however many of them are listed, so that leaving rows out that count nothing changes nothing.
const GROUP_ROWS: usize = AXPY_GROUP_ROWS;
/// Rows that are interleaved.
const ROWS: usize = 4;
/// How many rows ahead memory is asked for: four rows at once come from memory more slowly than one.
const AHEAD: usize = 32;
/// Bytes of a row that are gone through at once.
const LINE: usize = 64;
/// Blocks of a line.
const LINE_BLOCKS: usize = 4;
/// Registers that the numbers of four lines take.
const REGISTERS: usize = 8;
/// Columns of a line.
const LINE_COLUMNS: usize = LINE_BLOCKS * BLOCK;
/// Words of a register.
const WORDS: usize = LINE / 4;

/// `out[c] += Σ_i coefficients[i] * matrix[rows[i], columns.start + c]`.
pub(crate) struct IntegerAxpy<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) rows: &'a [u32],
    pub(crate) coefficients: &'a [f32],
    pub(crate) columns: Range<usize>,
    pub(crate) out: &'a mut [f32],
}

/// `out[t, c] += Σ_i coefficients[t, i] * matrix[rows[i], columns.start + c]`.
pub(crate) struct IntegerAxpyBatch<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) rows: &'a [u32],
    /// `[tokens, rows]`.
    pub(crate) coefficients: &'a [f32],
    pub(crate) columns: Range<usize>,
    /// `[tokens, columns]`.
    pub(crate) out: &'a mut [f32],
}

/// Bytes that such sums take while they are computed, for at most `columns` columns.
pub(super) const fn bytes(columns: usize) -> usize {
    let spans = columns.div_ceil(BLOCK * SPAN);
    GROUP_ROWS * (spans * size_of::<Scales>() + size_of::<Unpacked>() / ROWS)
}

/// Cuts a list of rows where the group changes, or has as many entries as rows where some are repeated.
fn groups(rows: &[u32]) -> impl Iterator<Item = Range<usize>> {
    let group = |row: &u32| *row as usize / GROUP_ROWS;
    let mut start = 0;
    rows.chunk_by(move |a, b| group(a) == group(b))
        .flat_map(|rows| rows.chunks(GROUP_ROWS))
        .map(move |rows| {
            start += rows.len();
            start - rows.len()..start
        })
}

/// Runs `$body` with `$weights` bound to the [`Weights`] of a four-bit `$matrix`, once per format.
macro_rules! with_nibbles {
    ($matrix:expr, $weights:ident => $body:expr) => {{
        let columns = $matrix.columns();
        match $matrix.data() {
            MatrixData::Q4K {
                quants,
                scales,
                factors,
            } => {
                let $weights = KWeights::new(quants, scales, factors, columns);
                $body
            }
            MatrixData::Q4_0 { quants, scales } => {
                let $weights = Quantised::<[u8; BLOCK / 2]>::new(quants, scales, columns);
                $body
            }
            _ => unreachable!("only four-bit weights are added in whole numbers"),
        }
    }};
}

impl Operation for IntegerAxpy<'_> {
    type Output = ();

    fn specify(self) {
        for group in groups(self.rows) {
            let (rows, coefficients) = (&self.rows[group.clone()], &self.coefficients[group]);
            let first_block = self.columns.start / BLOCK;
            scalar::integer_axpy(self.matrix, rows, coefficients, first_block, self.out);
        }
    }

    #[inline(always)]
    fn translate<S: Simd>(self, simd: S) {
        let columns = self.columns;
        with_nibbles!(self.matrix, weights => {
            add_one(simd, Part { weights, columns }, self.rows, self.coefficients, self.out);
        });
    }
}

impl Operation for IntegerAxpyBatch<'_> {
    type Output = ();

    fn specify(self) {
        let tokens = self.coefficients.chunks_exact(self.rows.len().max(1));
        for (coefficients, out) in tokens.zip(self.out.chunks_exact_mut(self.columns.len().max(1)))
        {
            IntegerAxpy {
                matrix: self.matrix,
                rows: self.rows,
                coefficients,
                columns: self.columns.clone(),
                out,
            }
            .specify();
        }
    }

    #[inline(always)]
    fn translate<S: Simd>(self, simd: S) {
        let columns = self.columns;
        if columns.is_empty() || self.rows.is_empty() {
            return;
        }
        with_nibbles!(self.matrix, weights => {
            add_many(simd, Part { weights, columns }, self.rows, self.coefficients, self.out);
        });
    }
}

/// Some columns of a matrix.
struct Part<W> {
    weights: W,
    columns: Range<usize>,
}

impl<W: Weights<Row: NibbleRow>> Part<W> {
    #[inline(always)]
    fn row(&self, index: u32) -> W::Row {
        self.weights.row(index as usize, self.columns.clone())
    }
}

/// Sixteen words or 64 bytes.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

impl Line {
    const ZERO: Self = Self([0; LINE]);
}

/// The numbers of a line of four rows, a byte each.
type Unpacked = [Line; REGISTERS];

/// Sums of the columns of a line, as the registers hold them.
type Sums = [[f32; WORDS]; REGISTERS];

/// Where in a line's columns the four of quarter `quarter` of register `register` lie.
#[inline(always)]
fn columns_of(register: usize, quarter: usize) -> Range<usize> {
    // A quarter is a block, whose low nibbles are the first half of its columns.
    let start = quarter * BLOCK + register * 4;
    start..start + 4
}

/// Puts the columns of a line in the order of registers.
#[inline(always)]
fn arrange(columns: &[f32; LINE_COLUMNS]) -> Sums {
    let mut sums = [[0.0; WORDS]; REGISTERS];
    for (register, sums) in sums.iter_mut().enumerate() {
        for (quarter, sums) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            sums.copy_from_slice(&columns[columns_of(register, quarter)]);
        }
    }
    sums
}

/// The reverse of [`arrange`].
#[inline(always)]
fn restore(sums: &Sums) -> [f32; LINE_COLUMNS] {
    let mut columns = [0.0; LINE_COLUMNS];
    for (register, sums) in sums.iter().enumerate() {
        for (quarter, sums) in sums.as_chunks::<4>().0.iter().enumerate() {
            columns[columns_of(register, quarter)].copy_from_slice(sums);
        }
    }
    columns
}

/// Puts all whole lines of a vector in the order of registers, where they lie.
#[inline(always)]
fn arrange_all(out: &mut [f32]) {
    for line in out.as_chunks_mut::<LINE_COLUMNS>().0 {
        *line = bytemuck::cast(arrange(line));
    }
}

/// The reverse of [`arrange_all`].
#[inline(always)]
fn restore_all(out: &mut [f32]) {
    for line in out.as_chunks_mut::<LINE_COLUMNS>().0 {
        *line = restore(bytemuck::cast_ref(line));
    }
}

/// Adds to a line of a vector what `whole` sums stand for; whole lines are in the order of registers.
#[inline(always)]
fn finish_line<S: Simd, R: NibbleRow>(
    simd: S,
    whole: &[S::Whole; REGISTERS],
    scales: &[f32; WORDS],
    minima: &[f32; WORDS],
    line: &mut [f32],
) {
    if let Ok(line) = <&mut [f32; LINE_COLUMNS]>::try_from(&mut *line) {
        let sums: &mut Sums = bytemuck::cast_mut(line);
        for index in 0..REGISTERS {
            finish::<S, R>(simd, whole[index], scales, minima, &mut sums[index]);
        }
        return;
    }
    let mut last = [0.0; LINE_COLUMNS];
    last[..line.len()].copy_from_slice(line);
    let mut sums = arrange(&last);
    for index in 0..REGISTERS {
        finish::<S, R>(simd, whole[index], scales, minima, &mut sums[index]);
    }
    line.copy_from_slice(&restore(&sums)[..line.len()]);
}

/// Line `index` of four rows, filled up with zeros.
#[inline(always)]
fn load_lines<S: Simd>(simd: S, rows: &[&[u8]; ROWS], index: usize) -> [S::Whole; ROWS] {
    let mut lines = [simd.splat_whole(0); ROWS];
    for (line, row) in lines.iter_mut().zip(rows) {
        *line = match row.as_chunks::<LINE>().0.get(index) {
            Some(whole) => simd.load_whole(whole),
            None => simd.load_whole(&last_line(row).0),
        };
    }
    lines
}

/// The last line of a row, where that is no whole one.
fn last_line(row: &[u8]) -> Line {
    let mut line = Line::ZERO;
    let (_, rest) = row.as_chunks::<LINE>();
    line.0[..rest.len()].copy_from_slice(rest);
    line
}

/// The numbers of four lines side by side, a byte each.
#[inline(always)]
fn unpack<S: Simd>(simd: S, lines: [S::Whole; ROWS]) -> [S::Whole; REGISTERS] {
    let mut numbers = [simd.splat_whole(0); REGISTERS];
    for (index, bytes) in simd.interleave(lines).into_iter().enumerate() {
        [numbers[index], numbers[index + 4]] = simd.nibbles(bytes);
    }
    numbers
}

/// Adds to `out` what the whole `sums` stand for, one `scale` and one `minimum` a lane.
#[inline(always)]
fn finish<S: Simd, R: NibbleRow>(
    simd: S,
    sums: S::Whole,
    scales: &[f32; WORDS],
    minima: &[f32; WORDS],
    out: &mut [f32; WORDS],
) {
    let scales = simd.load_lanes(scales);
    let sum = simd.multiply_add_lanes(scales, simd.lanes_of(sums), simd.load_lanes(out));
    let sum = match R::HAS_MINIMA {
        true => simd.multiply_subtract_lanes(sum, simd.splat_lanes(1.0), simd.load_lanes(minima)),
        false => sum,
    };
    simd.store_lanes(sum, out);
}

/// One entry per word, of values for each quarter.
#[inline(always)]
fn spread<T: Copy + Default>(values: &[T]) -> [T; WORDS] {
    let values: &[T; 4] = values.first_chunk().expect("one a quarter");
    let mut words = [T::default(); WORDS];
    for (index, word) in words.iter_mut().enumerate() {
        *word = values[index / 4];
    }
    words
}

/// What there is of the rows of a group for each span of blocks.
#[derive(Clone, Copy)]
struct Span {
    /// Bits of the largest magnitude of a factor.
    largest: [u32; SPAN],
    scales: [f32; SPAN],
    inverses: [f32; SPAN],
    /// Minima times coefficients, added up.
    minima: [f32; SPAN],
    /// Sums of rounded factors.
    factors: [i32; SPAN],
}

impl Span {
    const EMPTY: Self = Self {
        largest: [0; SPAN],
        scales: [0.0; SPAN],
        inverses: [0.0; SPAN],
        minima: [0.0; SPAN],
        factors: [0; SPAN],
    };

    /// Looks at the scales and minima of one more row.
    #[inline(always)]
    fn see<S: Simd, R: NibbleRow>(
        &mut self,
        simd: S,
        coefficient: S::Lanes,
        [scales, minima]: [S::Lanes; 2],
    ) {
        let factors = simd.multiply_lanes(coefficient, scales);
        let largest = simd.load_whole(bytemuck::cast_ref(&self.largest));
        let largest = simd.larger_whole(largest, simd.magnitudes(factors));
        simd.store_whole(largest, bytemuck::cast_mut(&mut self.largest));
        if R::HAS_MINIMA {
            let sums = simd.load_lanes(&self.minima);
            let sums = simd.multiply_add_lanes(coefficient, minima, sums);
            simd.store_lanes(sums, &mut self.minima);
        }
    }

    /// Says how factors are rounded, once all rows were seen.
    #[inline(always)]
    fn choose(&mut self) {
        for (index, largest) in self.largest.into_iter().enumerate() {
            (self.scales[index], self.inverses[index]) = rounding(largest);
        }
    }
}

/// The sum for one token: rows come from memory four by four, and sums wait in the cache.
#[inline(always)]
fn add_one<S: Simd, W: Weights<Row: NibbleRow>>(
    simd: S,
    part: Part<W>,
    rows: &[u32],
    coefficients: &[f32],
    out: &mut [f32],
) {
    let blocks = out.len().div_ceil(BLOCK);
    let lines = blocks.div_ceil(LINE_BLOCKS);
    let mut spans = vec![Span::EMPTY; blocks.div_ceil(SPAN)];
    let mut factors = vec![[0u32; SPAN]; spans.len() * GROUP_ROWS / ROWS];
    let mut whole = vec![[Line::ZERO; REGISTERS]; lines];
    arrange_all(out);
    for group in groups(rows) {
        make_factors(
            simd,
            &part,
            rows,
            coefficients,
            group.clone(),
            &mut spans,
            &mut factors,
        );
        for (line, whole) in whole.iter_mut().enumerate() {
            let block = line * LINE_BLOCKS;
            let of_span = &spans[block / SPAN].factors;
            let less = spread(&of_span[block % SPAN..]);
            let less = less.map(|sum| -W::Row::BIAS * sum);
            whole.fill(Line(bytemuck::cast(less)));
        }
        let quads = (group.start..group.end).step_by(ROWS);
        for (first, factors) in quads.zip(factors.chunks_exact(spans.len().max(1))) {
            // A group that does not end with four rows is filled up with one whose factor is 0.
            let (mut four, mut next) = ([[].as_slice(); ROWS], [[].as_slice(); ROWS]);
            for index in 0..ROWS {
                let (listed, ahead) = (first + index, first + index + AHEAD);
                four[index] = part.row(rows[listed.min(group.end - 1)]).bytes();
                next[index] = part.row(rows[ahead.min(rows.len() - 1)]).bytes();
            }
            add_quad(simd, four, next, factors.as_flattened(), &mut whole);
        }
        let places = whole.iter().zip(out.chunks_mut(LINE_COLUMNS));
        for (line, (whole, out)) in places.enumerate() {
            let block = line * LINE_BLOCKS;
            let (span, within) = (&spans[block / SPAN], block % SPAN);
            let scales = spread(&span.scales[within..]);
            let minima = spread(&span.minima[within..]);
            let mut sums = [simd.splat_whole(0); REGISTERS];
            for index in 0..REGISTERS {
                sums[index] = simd.load_whole(&whole[index].0);
            }
            finish_line::<S, W::Row>(simd, &sums, &scales, &minima, out);
        }
    }
    restore_all(out);
}

/// Adds the products of four rows with their `factors`, one word a block, to `whole`, one entry a line;
/// asks for the `next` rows meanwhile, in the order they lie in, a row after the other.
#[inline(always)]
fn add_quad<S: Simd>(
    simd: S,
    four: [&[u8]; ROWS],
    next: [&[u8]; ROWS],
    factors: &[u32],
    whole: &mut [Unpacked],
) {
    let count = four[0].len() / LINE;
    let (whole, last) = whole.split_at_mut(count);
    let mut lines = [[].as_slice(); ROWS];
    for (lines, row) in lines.iter_mut().zip(four) {
        *lines = &row.as_chunks::<LINE>().0[..count];
    }
    let at_once = count.div_ceil(ROWS).max(1);
    for (index, whole) in whole.chunks_mut(at_once).enumerate() {
        let part = index * at_once..index * at_once + whole.len();
        let words = &factors[part.start * LINE_BLOCKS..part.end * LINE_BLOCKS];
        let mut of_part = [[].as_slice(); ROWS];
        for (of_part, lines) in of_part.iter_mut().zip(lines) {
            *of_part = &lines[part.clone()];
        }
        add_lines(simd, of_part, next[index], words, whole);
    }
    if let Some(last) = last.first_mut() {
        let lines = four.map(last_line);
        let lines = [0, 1, 2, 3].map(|row| std::slice::from_ref(&lines[row].0));
        let words = &factors[count * LINE_BLOCKS..][..LINE_BLOCKS];
        add_lines(simd, lines, &[], words, std::slice::from_mut(last));
    }
}

/// The same of some lines.
#[inline(always)]
fn add_lines<S: Simd>(
    simd: S,
    [a, b, c, d]: [&[[u8; LINE]]; ROWS],
    next: &[u8],
    factors: &[u32],
    whole: &mut [Unpacked],
) {
    let asked = next.as_chunks::<{ ROWS * LINE }>().0;
    let lines = a.iter().zip(b).zip(c.iter().zip(d));
    let places = factors.as_chunks::<LINE_BLOCKS>().0.iter().zip(whole);
    for (index, (((a, b), (c, d)), (words, whole))) in lines.zip(places).enumerate() {
        if let Some(asked) = asked.get(index) {
            simd.prefetch(asked);
        }
        let words = simd.spread_words(words);
        let lines = [
            simd.load_whole(a),
            simd.load_whole(b),
            simd.load_whole(c),
            simd.load_whole(d),
        ];
        let numbers = unpack(simd, lines);
        for index in 0..REGISTERS {
            let sum = simd.load_whole(&whole[index].0);
            let sum = simd.dot_nibbles(sum, numbers[index], words);
            simd.store_whole(sum, &mut whole[index].0);
        }
    }
}

/// Rounds the factors of a group of rows: `factors` is `[row / 4, span]`.
#[inline(always)]
fn make_factors<S: Simd, W: Weights<Row: NibbleRow>>(
    simd: S,
    part: &Part<W>,
    rows: &[u32],
    coefficients: &[f32],
    group: Range<usize>,
    spans: &mut [Span],
    factors: &mut [[u32; SPAN]],
) {
    spans.fill(Span::EMPTY);
    for index in group.clone() {
        let next = rows[(index + GROUP_ROWS).min(rows.len() - 1)];
        part.row(next).prefetch_scales(simd);
        let row = part.row(rows[index]);
        let coefficient = simd.splat_lanes(coefficients[index]);
        for (span, of_span) in spans.iter_mut().enumerate() {
            of_span.see::<S, W::Row>(simd, coefficient, row.span_scales(simd, span));
        }
    }
    spans.iter_mut().for_each(Span::choose);
    let quads = (0..group.len()).step_by(ROWS);
    for (quad, factors) in quads.zip(factors.chunks_exact_mut(spans.len().max(1))) {
        let first = group.start + quad;
        let mut four = [part.row(rows[first]); ROWS];
        let mut by = [simd.splat_lanes(0.0); ROWS];
        for index in 0..ROWS.min(group.end - first) {
            four[index] = part.row(rows[first + index]);
            by[index] = simd.splat_lanes(coefficients[first + index]);
        }
        for (span, (of_span, words)) in spans.iter_mut().zip(factors).enumerate() {
            let inverses = simd.load_lanes(&of_span.inverses);
            let mut sums = simd.load_whole(bytemuck::cast_ref(&of_span.factors));
            let mut bytes = [simd.splat_whole(0); ROWS];
            for index in 0..ROWS {
                let [scales, _] = four[index].span_scales(simd, span);
                let factors = simd.multiply_lanes(by[index], scales);
                bytes[index] = simd.round_lanes(factors, inverses);
                sums = simd.add_whole(sums, bytes[index]);
            }
            simd.store_whole(sums, bytemuck::cast_mut(&mut of_span.factors));
            let joined = simd.join_bytes(bytes);
            simd.store_whole(joined, bytemuck::cast_mut(words));
        }
    }
}

/// The sums for many tokens, `out [tokens, width]`: rows are unpacked once for all.
#[inline(always)]
fn add_many<S: Simd, W: Weights<Row: NibbleRow>>(
    simd: S,
    part: Part<W>,
    rows: &[u32],
    coefficients: &[f32],
    out: &mut [f32],
) {
    let width = part.columns.len();
    let tokens = out.len() / width;
    let blocks = width.div_ceil(BLOCK);
    let lines = blocks.div_ceil(LINE_BLOCKS);
    let spans = blocks.div_ceil(SPAN);
    let mut scales = vec![Scales::ONES; GROUP_ROWS * spans];
    let mut minima = vec![[0.0; SPAN]; tokens * spans * usize::from(W::Row::HAS_MINIMA)];
    let mut numbers = [[Line::ZERO; REGISTERS]; GROUP_ROWS / ROWS];
    let mut quads = [[0.0; WORDS]; GROUP_ROWS / ROWS];
    out.chunks_exact_mut(width).for_each(arrange_all);
    for group in groups(rows) {
        let of_group = &rows[group.clone()];
        for (listed, scales) in of_group.iter().zip(scales.chunks_exact_mut(spans)) {
            let row = part.row(*listed);
            for (span, stored) in scales.iter_mut().enumerate() {
                let [scales, minima] = row.span_scales(simd, span);
                simd.store_lanes(scales, &mut stored.scales);
                if W::Row::HAS_MINIMA {
                    simd.store_lanes(minima, &mut stored.minima);
                }
            }
        }
        let of_token = |token: usize| &coefficients[token * rows.len()..][group.clone()];
        if W::Row::HAS_MINIMA {
            for (token, minima) in minima.chunks_exact_mut(spans).enumerate() {
                for (span, sums) in minima.iter_mut().enumerate() {
                    let mut sum = simd.splat_lanes(0.0);
                    let of_rows = scales.iter().skip(span).step_by(spans);
                    for (coefficient, scales) in of_token(token).iter().zip(of_rows) {
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
            for (quad, (numbers, quads)) in numbers
                .iter_mut()
                .zip(&mut quads)
                .take(quad_count)
                .enumerate()
            {
                *quads = [0.0; WORDS];
                let of_quad = &of_group[quad * ROWS..];
                let mut bytes = [[].as_slice(); ROWS];
                for index in 0..ROWS {
                    // As above: what fills up counts nothing.
                    bytes[index] = part.row(of_quad[index.min(of_quad.len() - 1)]).bytes();
                }
                // A line is read of all rows of a group, which no processor predicts, so the next group's is
                // asked for meanwhile; all at once, most would be left out.
                for listed in next_group.iter().skip(quad * ROWS).take(ROWS) {
                    let bytes = part.row(*listed).bytes();
                    simd.prefetch(
                        &bytes[bytes.len().min(line * LINE)..bytes.len().min(line * LINE + 1)],
                    );
                }
                for index in 0..ROWS.min(of_quad.len()) {
                    let scales = &scales[(quad * ROWS + index) * spans + block / SPAN].scales;
                    for (quarter, scale) in scales[block % SPAN..][..4].iter().enumerate() {
                        quads[quarter * ROWS + index] = *scale;
                    }
                }
                let unpacked = unpack(simd, load_lines(simd, &bytes, line));
                for (line, unpacked) in numbers.iter_mut().zip(unpacked) {
                    simd.store_whole(unpacked, &mut line.0);
                }
            }
            let (numbers, quads) = (&numbers[..quad_count], &quads[..quad_count]);
            for token in 0..tokens {
                let factors = Factors::new(simd, of_token(token), quads);
                let minima = match W::Row::HAS_MINIMA {
                    true => {
                        let minima = &minima[token * spans + block / SPAN];
                        spread(&minima[block % SPAN..])
                    }
                    false => [0.0; WORDS],
                };
                let less = factors.sums.map(|sum| -W::Row::BIAS * sum);
                let mut totals = [simd.load_whole(bytemuck::cast_ref(&less)); REGISTERS];
                for (half, totals) in totals.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    for (numbers, words) in numbers.iter().zip(&factors.words) {
                        let words = simd.spread_words(words);
                        for (total, numbers) in totals.iter_mut().zip(&numbers[4 * half..]) {
                            let numbers = simd.load_whole(&numbers.0);
                            *total = simd.dot_nibbles(*total, numbers, words);
                        }
                    }
                }
                let of_line = line * LINE_COLUMNS..width.min((line + 1) * LINE_COLUMNS);
                let out = &mut out[token * width..][of_line];
                finish_line::<S, W::Row>(simd, &totals, &factors.scales, &minima, out);
            }
        }
    }
    out.chunks_exact_mut(width).for_each(restore_all);
}

/// Four coefficients times the scales of four rows, `[quarter, row]`.
#[inline(always)]
fn factors<S: Simd>(simd: S, coefficients: &[f32; ROWS], scales: &[f32; WORDS]) -> S::Lanes {
    simd.multiply_lanes(simd.repeat(coefficients), simd.load_lanes(scales))
}

/// The rounded factors of one token and the rows of a group in a line.
struct Factors {
    /// Four bytes of four rows, one word a quarter.
    words: [[u32; 4]; GROUP_ROWS / ROWS],
    /// What a whole factor stands for, one a lane.
    scales: [f32; WORDS],
    /// Sums of rounded factors, one a lane.
    sums: [i32; WORDS],
}

impl Factors {
    /// Rounds coefficients times `scales [row / 4, quarter, row % 4]`.
    #[inline(always)]
    fn new<S: Simd>(simd: S, coefficients: &[f32], scales: &[[f32; WORDS]]) -> Self {
        let mut padded = [[0.0; ROWS]; GROUP_ROWS / ROWS];
        padded.as_flattened_mut()[..coefficients.len()].copy_from_slice(coefficients);
        let mut largest = simd.splat_whole(0);
        for quad in 0..scales.len() {
            largest = simd.larger_whole(
                largest,
                simd.magnitudes(factors(simd, &padded[quad], &scales[quad])),
            );
        }
        let mut lanes = [0u32; WORDS];
        simd.store_whole(largest, bytemuck::cast_mut(&mut lanes));
        let (mut scale, mut inverse) = ([0.0; 4], [0.0; 4]);
        for (quarter, [a, b, c, d]) in lanes.as_chunks::<ROWS>().0.iter().enumerate() {
            (scale[quarter], inverse[quarter]) = rounding(*a.max(b).max(c.max(d)));
        }
        let inverses = simd.load_lanes(&spread(&inverse));
        let mut words = [[0u32; 4]; GROUP_ROWS / ROWS];
        let mut sums = simd.splat_whole(0);
        for (quad, words) in words[..scales.len()].iter_mut().enumerate() {
            let rounded = simd.round_lanes(factors(simd, &padded[quad], &scales[quad]), inverses);
            sums = simd.add_whole(sums, rounded);
            *words = bytemuck::cast(simd.narrow(rounded));
        }
        let mut lanes = [0i32; WORDS];
        simd.store_whole(sums, bytemuck::cast_mut(&mut lanes));
        let mut sums = [0; 4];
        for (sum, of_quarter) in sums.iter_mut().zip(lanes.as_chunks::<ROWS>().0) {
            *sum = of_quarter.iter().sum();
        }
        Self {
            words,
            scales: spread(&scale),
            sums: spread(&sums),
        }
    }
}
