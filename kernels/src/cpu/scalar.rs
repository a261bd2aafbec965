//! The specification: what every kernel computes, element by element, in this order of operations.

use std::ops::Range;

use super::SPAN;
use crate::activations::{ActivationSpan, int8_scale, to_int8};
use powerinfer_tensor::BLOCK;
use powerinfer_tensor::Matrix;

/// `row · x`: 32 partial sums, one per column of a block, each a chain of fused multiply-adds over the blocks in order;
/// the last block is padded with zeros; then the [tree sum](sum) of the 32.
pub(super) fn dot_row(matrix: &Matrix<'_>, row: usize, x: &[f32]) -> f32 {
    let mut sums = [0.0; BLOCK];
    for (block, x) in x.chunks(BLOCK).enumerate() {
        let weights = matrix.block(row, block).weights();
        multiply_add(&mut sums, &weights, x);
    }
    sum(sums)
}

/// `row · x` for a quantised `x`: the integer `Σ quant * quant` per block, then 16 partial sums, one per block of a span,
/// each a chain of fused multiply-adds of the integer and the product of both scales over the spans in order; then the
/// tree sum of the 16.
///
/// With minima, the term of a block is the scale of `x` times `Σ quant * quant · scale - minimum · Σ quant of x`, where the
/// second product is rounded, then the difference.
pub(super) fn integer_dot_row(matrix: &Matrix<'_>, row: usize, x: &[ActivationSpan]) -> f32 {
    let mut sums = [0.0f32; SPAN];
    for block in 0..matrix.blocks() {
        let (span, lane) = (&x[block / SPAN], block % SPAN);
        let weights = matrix.block(row, block);
        let x = &span.quants[lane * BLOCK..][..BLOCK];
        let terms = weights
            .unscaled
            .iter()
            .zip(x)
            .map(|(q, x)| *q as i32 * i32::from(*x));
        // At most 32 * 128 * 127: exact in f32.
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
    tree_sum(&mut sums)
}

/// `out[c] += Σ_i coefficients[i] * matrix[rows[i], first_block * 32 + c]` for the rows of one group, in integers.
///
/// In every block of columns, the factor of a row, its coefficient times the block's scale, is quantised to int8 relative
/// to the largest one among the rows. Products with the quants are summed as integers, then scaled by one fused
/// multiply-add. With minima, their sum weighted by the coefficients, a chain of fused multiply-adds, is subtracted.
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
        let (scale, inverse) = int8_scale(largest.unwrap_or(0));
        let (mut sums, mut minimum) = ([0; BLOCK], 0.0f32);
        for (block, x) in terms() {
            let factor = i32::from(to_int8(x * block.scale, inverse));
            for (sum, number) in sums.iter_mut().zip(block.unscaled) {
                *sum += number as i32 * factor;
            }
            minimum = x.mul_add(block.minimum, minimum);
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            // At most 128 * 128 * 127: exact in f32.
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

/// One fused multiply-add per partial sum; `x` is padded with zeros to a block.
fn multiply_add(sums: &mut [f32; BLOCK], weights: &[f32; BLOCK], x: &[f32]) {
    let mut padded = [0.0; BLOCK];
    padded[..x.len()].copy_from_slice(x);
    for ((sum, weight), x) in sums.iter_mut().zip(weights).zip(padded) {
        *sum = weight.mul_add(x, *sum);
    }
}

/// Tree sum: adds the upper half to the lower half until one value is left.
pub(super) fn sum(mut sums: [f32; BLOCK]) -> f32 {
    tree_sum(&mut sums)
}

fn tree_sum(sums: &mut [f32]) -> f32 {
    let mut half = sums.len() / 2;
    while half > 0 {
        for index in 0..half {
            sums[index] += sums[index + half];
        }
        half /= 2;
    }
    sums[0]
}
