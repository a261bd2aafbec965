//! Products of all rows with many vectors.
//!
//! Rows are dequantised once for a batch of tokens, then tiles of rows × tokens are multiplied
//! from the caches. The 32 running sums of a product are independent of each other, so a tile
//! keeps one register of each product at a time and goes over the columns once per register of a
//! block: every sum is still the chain of the specification, and many products fit the registers.
//!
//! ```text
//! for 64 tokens, for 24 rows:          sums     [row, token, 32]
//!   for 16 blocks of columns:          panel    [group of rows, register, block, row, lanes]
//!     for a group of rows, 4 tokens:   tile     one register per row and token
//! ```

use std::slice;

use super::dot::gemv;
use super::rows::{Row, Weights, with_weights};
use super::{Operation, SPAN, Simd, padded, scalar};
use crate::Matrix;
use crate::format::BLOCK;

/// Tokens that share a dequantised row.
const BATCH_TOKENS: usize = 64;
/// Rows whose sums are kept at a time: a multiple of every [`Simd::TILE_ROWS`].
const BATCH_ROWS: usize = 24;
/// Tokens of a tile.
const TILE_TOKENS: usize = 4;
/// Numbers of a dequantised row in the panel.
const SPAN_COLUMNS: usize = SPAN * BLOCK;

/// `out[r, t] = matrix[r] · x[t]`, with `out` `[rows, tokens]`.
pub(crate) struct Gemm<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) x: &'a [f32],
    pub(crate) tokens: usize,
    pub(crate) out: &'a mut [f32],
}

impl Operation for Gemm<'_> {
    type Output = ();

    fn specify(self) {
        let columns = self.matrix.columns();
        for (row, out) in self.out.chunks_exact_mut(self.tokens).enumerate() {
            for (token, out) in out.iter_mut().enumerate() {
                let x = &self.x[token * columns..][..columns];
                *out = scalar::dot_row(self.matrix, row, x);
            }
        }
    }

    #[inline(always)]
    fn translate<S: Simd>(self, simd: S) {
        if self.tokens == 1 {
            gemv(simd, self.matrix, self.x, self.out);
            return;
        }
        with_weights!(self.matrix, weights => match S::TILE_ROWS {
            6 => products::<S, _, 6>(simd, weights, columns, self.x, self.tokens, self.out),
            _ => products::<S, _, 3>(simd, weights, columns, self.x, self.tokens, self.out),
        });
    }
}

/// The whole product, with tiles of `R` rows.
#[inline(always)]
fn products<S: Simd, W: Weights, const R: usize>(
    simd: S,
    weights: W,
    columns: usize,
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
) {
    const { assert!(BATCH_ROWS.is_multiple_of(R)) };
    let row_count = out.len() / tokens;
    let whole = columns / BLOCK;
    let mut panel = vec![0.0; BATCH_ROWS * SPAN_COLUMNS];
    let mut sums = vec![[0.0; BLOCK]; BATCH_ROWS * BATCH_TOKENS];
    let mut x_rows: Vec<&[[f32; BLOCK]]> = Vec::with_capacity(BATCH_TOKENS);
    let mut x_rests = [[0.0; BLOCK]; BATCH_TOKENS];

    for first_token in (0..tokens).step_by(BATCH_TOKENS) {
        let batch_tokens = BATCH_TOKENS.min(tokens - first_token);
        x_rows.clear();
        for token in 0..batch_tokens {
            let x = &x[(first_token + token) * columns..][..columns];
            let (blocks, rest) = x.as_chunks();
            x_rows.push(blocks);
            x_rests[token] = padded(rest);
        }
        for first_row in (0..row_count).step_by(BATCH_ROWS) {
            let batch_rows = BATCH_ROWS.min(row_count - first_row);
            // Rows that fill up the last group hold whatever they held, for sums nobody reads.
            let groups = batch_rows.div_ceil(R);
            sums.fill([0.0; BLOCK]);

            for first_block in (0..whole).step_by(SPAN) {
                let count = SPAN.min(whole - first_block);
                for row in 0..batch_rows {
                    let weights = weights.row(first_row + row, 0..columns);
                    let group = &mut panel[row / R * R * SPAN_COLUMNS..][..R * SPAN_COLUMNS];
                    dequantise::<S, W::Row, R>(simd, weights, first_block..first_block + count, row % R, group);
                }
                for group in 0..groups {
                    let panel = &panel[group * R * SPAN_COLUMNS..][..R * SPAN_COLUMNS];
                    let sums = &mut sums[group * R * BATCH_TOKENS..][..R * BATCH_TOKENS];
                    for token in 0..batch_tokens {
                        let _ = (panel, &sums, token);
                    }
                }
            }
        }
    }
    let _ = (out, slice::from_ref(&x_rests));
}
