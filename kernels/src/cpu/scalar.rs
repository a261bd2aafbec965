//! The specification: what every kernel computes, element by element and in this order.

use std::ops::Range;

use super::SPAN;
use crate::activations::{ActivationSpan, round, rounding};
use powerinfer_tensor::BLOCK;
use powerinfer_tensor::Matrix;

/// `row · x`: 32 running sums of fused multiply-adds, one per column of a block, over the blocks
/// in order; the last block is padded with zeros; then the halving sum of the 32.
pub(super) fn dot_row(matrix: &Matrix<'_>, row: usize, x: &[f32]) -> f32 {
    let mut sums = [0.0; BLOCK];
    for (block, x) in x.chunks(BLOCK).enumerate() {
        let weights = matrix.block(row, block).weights();
        multiply_add(&mut sums, &weights, x);
    }
    sum(sums)
}

/// `row · x` for a rounded `x`: per block the whole number `Σ quant * quant`, then 16 running sums of
/// fused multiply-adds of that and the product of both scales, one sum per block of a span, over
/// the spans in order; then the halving sum of the 16.
///
/// With minima, what is added to a block's sum is the scale of `x` times `Σ quant * quant · scale -
/// minimum · Σ quant of x`, where the second product is rounded, then the difference.
pub(super) fn integer_dot_row(matrix: &Matrix<'_>, row: usize, x: &[ActivationSpan]) -> f32 {
    let mut sums = [0.0f32; SPAN];
    for block in 0..matrix.blocks() {
        let (span, lane) = (&x[block / SPAN], block % SPAN);
        let weights = matrix.block(row, block);
        let x = &span.quants[lane * BLOCK..][..BLOCK];
        let terms = weights
            .numbers
            .iter()
            .zip(x)
            .map(|(q, x)| *q as i32 * i32::from(*x));
        // At most 32 * 128 * 127, which a float holds exactly.
        let product = terms.sum::<i32>() as f32;
        let (scale, x_scale) = (weights.scale, span.scales[lane]);
        sums[lane] = if matrix.format().has_minima() {
            let minimum = weights.minimum * span.sums[lane] as f32;
            product
                .mul_add(scale, -minimum)
                .mul_add(x_scale, sums[lane])
        } else {
            product.mul_add(scale * x_scale, sums[lane])
        };
    }
    halved(&mut sums)
}

/// Adds `Σ_i coefficients[i] * matrix[rows[i], first_block * 32 + c]` to `out[c]` for rows of one group.
///
/// In every block of columns, a row's factor, its coefficient times the block's scale, is rounded to a
/// byte of the largest one among the rows; products with the numbers are added up whole; one fused
/// multiply-add with what a whole factor stands for; and then minima times coefficients are taken off,
/// added up row after row with fused multiply-adds.
pub(super) fn integer_axpy(
    matrix: &Matrix<'_>,
    rows: &[u32],
    coefficients: &[f32],
    first_block: usize,
    out: &mut [f32],
) {
    for (index, out) in out.chunks_mut(BLOCK).enumerate() {
        let block = |row: &u32| matrix.block(*row as usize, first_block + index);
        let terms = || rows.iter().map(block).zip(coefficients);
        let magnitude = |factor: f32| factor.to_bits() & 0x7fff_ffff;
        let largest = terms().map(|(block, x)| magnitude(x * block.scale)).max();
        let (scale, inverse) = rounding(largest.unwrap_or(0));
        let (mut sums, mut minimum) = ([0; BLOCK], 0.0f32);
        for (block, x) in terms() {
            let factor = i32::from(round(x * block.scale, inverse));
            for (sum, number) in sums.iter_mut().zip(block.numbers) {
                *sum += number as i32 * factor;
            }
            minimum = x.mul_add(block.minimum, minimum);
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            // At most 128 * 128 * 127, which a float holds exactly.
            *out = scale.mul_add(sum as f32, *out);
            if matrix.format().has_minima() {
                *out -= minimum;
            }
        }
    }
}

/// `a · b`, as [`dot_row`] of a row of `f32`.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; BLOCK];
    for (a, b) in a.chunks(BLOCK).zip(b.chunks(BLOCK)) {
        let mut weights = [0.0; BLOCK];
        weights[..a.len()].copy_from_slice(a);
        multiply_add(&mut sums, &weights, b);
    }
    sum(sums)
}

/// Adds `coefficient * matrix[row, columns]` to `out`: one fused multiply-add per column.
pub(super) fn axpy_row(
    matrix: &Matrix<'_>,
    row: usize,
    coefficient: f32,
    columns: Range<usize>,
    out: &mut [f32],
) {
    let first_block = columns.start / BLOCK;
    for (offset, out) in out.chunks_mut(BLOCK).enumerate() {
        let weights = matrix.block(row, first_block + offset).weights();
        axpy(coefficient, &weights[..out.len()], out);
    }
}

/// `y += alpha * x`, one fused multiply-add per element.
pub(super) fn axpy(alpha: f32, x: &[f32], y: &mut [f32]) {
    for (x, y) in x.iter().zip(y) {
        *y = alpha.mul_add(*x, *y);
    }
}

/// One block of the running sums. What `x` lacks of a block is zero.
fn multiply_add(sums: &mut [f32; BLOCK], weights: &[f32; BLOCK], x: &[f32]) {
    let mut padded = [0.0; BLOCK];
    padded[..x.len()].copy_from_slice(x);
    for ((sum, weight), x) in sums.iter_mut().zip(weights).zip(padded) {
        *sum = weight.mul_add(x, *sum);
    }
}

/// Adds the upper half to the lower half until one number is left.
pub(super) fn sum(mut sums: [f32; BLOCK]) -> f32 {
    halved(&mut sums)
}

fn halved(sums: &mut [f32]) -> f32 {
    let mut half = sums.len() / 2;
    while half > 0 {
        for index in 0..half {
            sums[index] += sums[index + half];
        }
        half /= 2;
    }
    sums[0]
}
