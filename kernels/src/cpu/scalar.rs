//! The specification: what every kernel computes, element by element and in this order.

use std::ops::Range;

use super::SPAN;
use crate::Matrix;
use crate::activations::ActivationSpan;
use crate::format::BLOCK;

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
