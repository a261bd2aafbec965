//! Sums of hidden units' weights, the second product of a predictor, in whole numbers.
//!
//! Four rows are interleaved, as in [`super::integer_axpy`]; a column's factors are the same in all columns, and the sums of up to
//! 32 rows stay in registers.

use std::ops::Range;

use powerinfer_tensor::{BLOCK, Matrix, MatrixData};

use super::{
    Operation, SPAN, Simd,
    integer_axpy::line::{Line, last_line, unpack},
    reader::{LINE, Reader},
};

/// Interleaved rows.
const ROWS: usize = 4;
/// Registers of sums, at most.
const REGISTERS: usize = 8;

/// `out[c] += scale * scales[c] * Σ_i values[i] * units[rows[i], columns.start + c]`, of the numbers of `units` without their
/// scales.
pub(crate) struct UnitSums<'a> {
    pub(crate) units: &'a Matrix<'a>,
    /// At most 32.
    pub(crate) rows: &'a [u32],
    /// At most 127 each.
    pub(crate) values: &'a [u8],
    /// Rows that are read afterwards, which are prefetched: line by line, or without `rows` at once.
    pub(crate) next: &'a [u32],
    pub(crate) columns: Range<usize>,
    pub(crate) scale: f32,
    pub(crate) scales: &'a [f32],
    pub(crate) out: &'a mut [f32],
}

impl Operation for UnitSums<'_> {
    type Output = ();

    fn run_scalar(self) {
        let first_block = self.columns.start / BLOCK;
        let blocks = self.out.chunks_mut(BLOCK).zip(self.scales.chunks(BLOCK));
        for (index, (out, scales)) in blocks.enumerate() {
            let mut sums = [0; BLOCK];
            for (row, value) in self.rows.iter().zip(self.values) {
                let block = self.units.block(*row as usize, first_block + index);
                for (sum, number) in sums.iter_mut().zip(block.unscaled) {
                    *sum += number as i32 * i32::from(*value);
                }
            }
            for ((out, sum), scale) in out.iter_mut().zip(sums).zip(scales) {
                // At most 32 * 127 * 128: exact in f32.
                *out = (self.scale * scale).mul_add(sum as f32, *out);
            }
        }
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        match self.units.data() {
            MatrixData::Q8_0 { quants, .. } => {
                self.add::<S, Bytes>(simd, bytemuck::cast_slice(quants));
            }
            MatrixData::Q4_0 { quants, .. } => self.add::<S, Nibbles>(simd, quants),
            _ => unreachable!("units of whole numbers"),
        }
    }
}

impl UnitSums<'_> {
    #[inline(always)]
    fn add<S: Simd, N: Numbers>(self, simd: S, numbers: &[u8]) {
        let row_bytes = self.units.blocks() * BLOCK / N::PER_BYTE;
        let part = self.columns.start / N::PER_BYTE
            ..self.columns.end.next_multiple_of(BLOCK) / N::PER_BYTE;
        let row = |row: u32| &numbers[row as usize * row_bytes..][..row_bytes][part.clone()];
        let mut reader = Reader::new(|index| self.next.get(index).map(|next| row(*next)));
        if self.rows.is_empty() {
            return reader.prefetch(simd, self.next.len(), usize::MAX);
        }
        let mut quads = [Quad::EMPTY; BLOCK / ROWS];
        let mut last_lines = [[Line::ZERO; ROWS]; BLOCK / ROWS];
        let mut bias = 0;
        let quads = &mut quads[..self.rows.len().div_ceil(ROWS)];
        for (index, quad) in quads.iter_mut().enumerate() {
            let mut factors = [0; ROWS];
            for place in 0..ROWS {
                // A partial quad repeats its last row with a factor of 0.
                let listed = (index * ROWS + place).min(self.rows.len() - 1);
                let bytes = row(self.rows[listed]);
                quad.lines[place] = bytes.as_chunks().0;
                last_lines[index][place] = last_line(bytes);
                if listed == index * ROWS + place {
                    factors[place] = self.values[listed];
                    bias -= N::BIAS * i32::from(self.values[listed]);
                }
            }
            quad.factors = i32::from_le_bytes(factors);
        }
        let per_line = LINE * N::PER_BYTE;
        let whole = part.len() / LINE;
        let outputs = self.out.chunks_mut(per_line);
        let lines = outputs.zip(self.scales.chunks(per_line));
        for (line, (out, scales)) in lines.enumerate() {
            reader.prefetch(simd, self.next.len(), self.next.len());
            let mut sums = [simd.splat_i32(bias); REGISTERS];
            if line < whole {
                for quad in &*quads {
                    let mut lines = [simd.splat_i32(0); ROWS];
                    for (value, row) in lines.iter_mut().zip(quad.lines) {
                        *value = simd.load_bytes(&row[line]);
                    }
                    N::add(simd, lines, simd.splat_i32(quad.factors), &mut sums);
                }
            } else {
                for (quad, last) in quads.iter().zip(&last_lines) {
                    let mut lines = [simd.splat_i32(0); ROWS];
                    for (value, row) in lines.iter_mut().zip(last) {
                        *value = simd.load_bytes(&row.0);
                    }
                    N::add(simd, lines, simd.splat_i32(quad.factors), &mut sums);
                }
            }
            let sums = N::to_columns(simd, sums);
            if out.len() == per_line {
                add_scaled(simd, &sums, self.scale, scales, out);
                continue;
            }
            let (mut padded, mut scales_padded) = ([0.0; 2 * LINE], [0.0; 2 * LINE]);
            padded[..out.len()].copy_from_slice(out);
            scales_padded[..out.len()].copy_from_slice(scales);
            let (values, scales) = (&mut padded[..per_line], &scales_padded[..per_line]);
            add_scaled(simd, &sums, self.scale, scales, values);
            out.copy_from_slice(&padded[..out.len()]);
        }
    }
}

/// Four rows, and a factor of each, one byte of a word.
#[derive(Clone, Copy)]
struct Quad<'r> {
    lines: [&'r [[u8; LINE]]; ROWS],
    factors: i32,
}

impl Quad<'_> {
    const EMPTY: Self = Quad {
        lines: [&[]; ROWS],
        factors: 0,
    };
}

/// `out += scale * scales * sums`, for the columns of a line.
#[inline(always)]
fn add_scaled<S: Simd>(
    simd: S,
    sums: &[S::Integers; REGISTERS],
    scale: f32,
    scales: &[f32],
    out: &mut [f32],
) {
    let scale = simd.splat_lanes(scale);
    let registers = out.as_chunks_mut::<SPAN>().0.iter_mut();
    let registers = registers.zip(scales.as_chunks::<SPAN>().0);
    for (index, (out, scales)) in registers.enumerate() {
        simd.prefetch_ahead(scales);
        let scales = simd.multiply_lanes(scale, simd.load_lanes(scales));
        let sums = simd.to_f32_lanes(sums[index]);
        let sum = simd.multiply_add_lanes(scales, sums, simd.load_lanes(out));
        simd.store_lanes(sum, out);
    }
}

/// How numbers are packed in bytes.
trait Numbers {
    const PER_BYTE: usize;
    /// Bias of the packed numbers.
    const BIAS: i32;

    /// Adds a line of four rows times their factors.
    fn add<S: Simd>(
        simd: S,
        lines: [S::Integers; ROWS],
        factors: S::Integers,
        sums: &mut [S::Integers; REGISTERS],
    );

    /// Brings the sums in the order of the columns.
    fn to_columns<S: Simd>(simd: S, sums: [S::Integers; REGISTERS]) -> [S::Integers; REGISTERS];
}

/// Signed bytes.
struct Bytes;

impl Numbers for Bytes {
    const PER_BYTE: usize = 1;
    const BIAS: i32 = 0;

    #[inline(always)]
    fn add<S: Simd>(
        simd: S,
        lines: [S::Integers; ROWS],
        factors: S::Integers,
        sums: &mut [S::Integers; REGISTERS],
    ) {
        let numbers = simd.interleave_bytes(lines);
        for index in 0..ROWS {
            sums[index] = simd.dot_unsigned(sums[index], factors, numbers[index]);
        }
    }

    #[inline(always)]
    fn to_columns<S: Simd>(simd: S, sums: [S::Integers; REGISTERS]) -> [S::Integers; REGISTERS] {
        let [a, b, c, d, rest @ ..] = sums;
        let [a, b, c, d] = simd.transpose_quarters([a, b, c, d]);
        let [e, f, g, h] = rest;
        [a, b, c, d, e, f, g, h]
    }
}

/// Nibbles biased by 8: a byte has a column and the sixteenth after it, a quarter of a line has a block.
struct Nibbles;

impl Numbers for Nibbles {
    const PER_BYTE: usize = 2;
    const BIAS: i32 = 8;

    #[inline(always)]
    fn add<S: Simd>(
        simd: S,
        lines: [S::Integers; ROWS],
        factors: S::Integers,
        sums: &mut [S::Integers; REGISTERS],
    ) {
        let numbers = unpack(simd, lines);
        for index in 0..REGISTERS {
            sums[index] = simd.dot_unsigned(sums[index], numbers[index], factors);
        }
    }

    #[inline(always)]
    fn to_columns<S: Simd>(simd: S, sums: [S::Integers; REGISTERS]) -> [S::Integers; REGISTERS] {
        let [a, b, c, d, e, f, g, h] = sums;
        let [a, b, c, d] = simd.transpose_quarters([a, b, c, d]);
        let [e, f, g, h] = simd.transpose_quarters([e, f, g, h]);
        [a, e, b, f, c, g, d, h]
    }
}
