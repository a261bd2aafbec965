//! Lines of 64 bytes per row: unpacking, and the order of columns in registers.

use std::ops::Range;

use powerinfer_tensor::BLOCK;

use super::{LINE_COLUMNS, REGISTERS, ROWS, WORDS};
use crate::cpu::{Simd, reader::LINE, rows::NibbleRow};

/// 64 bytes: 16 words.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(in crate::cpu) struct Line(pub(in crate::cpu) [u8; LINE]);

impl Line {
    pub(in crate::cpu) const ZERO: Self = Self([0; LINE]);
}

/// The quants of a line of four rows, one byte each.
pub(super) type Unpacked = [Line; REGISTERS];

/// Sums of the columns of a line, in register order.
pub(super) type Sums = [[f32; WORDS]; REGISTERS];

/// Columns of a line in quarter `quarter` of register `register`.
#[inline(always)]
pub(super) fn lane_columns(register: usize, quarter: usize) -> Range<usize> {
    // A quarter is a block; its low nibbles are the first half of its columns.
    let start = quarter * BLOCK + register * 4;
    start..start + 4
}

/// Permutes the columns of a line to register order.
#[inline(always)]
pub(super) fn line_to_registers(columns: &[f32; LINE_COLUMNS]) -> Sums {
    let mut sums = [[0.0; WORDS]; REGISTERS];
    for (register, sums) in sums.iter_mut().enumerate() {
        for (quarter, sums) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            sums.copy_from_slice(&columns[lane_columns(register, quarter)]);
        }
    }
    sums
}

/// Inverse of [`line_to_registers`].
#[inline(always)]
pub(super) fn registers_to_line(sums: &Sums) -> [f32; LINE_COLUMNS] {
    let mut columns = [0.0; LINE_COLUMNS];
    for (register, sums) in sums.iter().enumerate() {
        for (quarter, sums) in sums.as_chunks::<4>().0.iter().enumerate() {
            columns[lane_columns(register, quarter)].copy_from_slice(sums);
        }
    }
    columns
}

/// Permutes all whole lines of a vector to register order, in place.
#[inline(always)]
pub(super) fn to_register_order(out: &mut [f32]) {
    for line in out.as_chunks_mut::<LINE_COLUMNS>().0 {
        *line = bytemuck::cast(line_to_registers(line));
    }
}

/// Inverse of [`to_register_order`].
#[inline(always)]
pub(super) fn to_column_order(out: &mut [f32]) {
    for line in out.as_chunks_mut::<LINE_COLUMNS>().0 {
        *line = registers_to_line(bytemuck::cast_ref(line));
    }
}

/// Scales the integer sums of a line and adds them to the output; whole lines of the output are in register order.
#[inline(always)]
pub(super) fn accumulate_line<S: Simd, R: NibbleRow>(
    simd: S,
    integer_sums: &[S::Integers; REGISTERS],
    scales: &[f32; WORDS],
    minima: &[f32; WORDS],
    line: &mut [f32],
) {
    if let Ok(line) = <&mut [f32; LINE_COLUMNS]>::try_from(&mut *line) {
        let sums: &mut Sums = bytemuck::cast_mut(line);
        for index in 0..REGISTERS {
            accumulate::<S, R>(simd, integer_sums[index], scales, minima, &mut sums[index]);
        }
        return;
    }
    let mut last = [0.0; LINE_COLUMNS];
    last[..line.len()].copy_from_slice(line);
    let mut sums = line_to_registers(&last);
    for index in 0..REGISTERS {
        accumulate::<S, R>(simd, integer_sums[index], scales, minima, &mut sums[index]);
    }
    line.copy_from_slice(&registers_to_line(&sums)[..line.len()]);
}

/// Loads line `index` of four rows, padded with zeros.
#[inline(always)]
pub(super) fn load_lines<S: Simd>(
    simd: S,
    rows: &[&[u8]; ROWS],
    index: usize,
) -> [S::Integers; ROWS] {
    let mut lines = [simd.splat_i32(0); ROWS];
    for (line, row) in lines.iter_mut().zip(rows) {
        *line = match row.as_chunks::<LINE>().0.get(index) {
            Some(whole) => simd.load_bytes(whole),
            None => simd.load_bytes(&last_line(row).0),
        };
    }
    lines
}

/// The partial last line of a row, padded with zeros.
pub(in crate::cpu) fn last_line(row: &[u8]) -> Line {
    let mut line = Line::ZERO;
    let (_, rest) = row.as_chunks::<LINE>();
    line.0[..rest.len()].copy_from_slice(rest);
    line
}

/// Interleaves four lines and unpacks their nibbles to bytes.
#[inline(always)]
pub(in crate::cpu) fn unpack<S: Simd>(
    simd: S,
    lines: [S::Integers; ROWS],
) -> [S::Integers; REGISTERS] {
    let mut values = [simd.splat_i32(0); REGISTERS];
    for (index, bytes) in simd.interleave_bytes(lines).into_iter().enumerate() {
        [values[index], values[index + 4]] = simd.nibbles(bytes);
    }
    values
}

/// `out += scales * sums - minima`, lane by lane.
#[inline(always)]
pub(super) fn accumulate<S: Simd, R: NibbleRow>(
    simd: S,
    sums: S::Integers,
    scales: &[f32; WORDS],
    minima: &[f32; WORDS],
    out: &mut [f32; WORDS],
) {
    let scales = simd.load_lanes(scales);
    let sum = simd.multiply_add_lanes(scales, simd.to_f32_lanes(sums), simd.load_lanes(out));
    let sum = if R::HAS_MINIMA {
        simd.multiply_subtract_lanes(sum, simd.splat_lanes(1.0), simd.load_lanes(minima))
    } else {
        sum
    };
    simd.store_lanes(sum, out);
}

/// Repeats one value per quarter in each of its words.
#[inline(always)]
pub(super) fn per_quarter<T: Copy + Default>(values: &[T]) -> [T; WORDS] {
    let values: &[T; 4] = values.first_chunk().expect("one value per quarter");
    let mut words = [T::default(); WORDS];
    for (index, word) in words.iter_mut().enumerate() {
        *word = values[index / 4];
    }
    words
}
