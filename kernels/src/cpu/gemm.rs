//! GEMM with float arithmetic.
//!
//! Rows are dequantised once per batch of tokens, then tiles of rows × tokens are multiplied from the caches. The 32
//! partial sums of a dot product are independent, so a tile holds one register of each dot product and passes over the
//! columns once per register of a block: every partial sum keeps the order of the scalar specification, and many dot
//! products fit into the registers.
//!
//! ```text
//! for 64 tokens, for 12 rows:          sums     [group of rows, 4 tokens, row, token, 32]
//!   for 32 blocks of columns:          panel    [group of rows, register, block, row, lane]
//!     for a group of rows, 4 tokens:   tile     [row, token], one register each
//! ```

use std::slice;

use super::rows::{Row, Scales, Weights, with_weights};
use super::{Gemv, Operation, SPAN, Simd, padded};
use powerinfer_tensor::BLOCK;
use powerinfer_tensor::Matrix;

/// Tokens that share a dequantised row.
const BATCH_TOKENS: usize = 64;
/// Rows per batch of sums, a multiple of every `TILE_ROWS`.
const BATCH_ROWS: usize = 12;
/// Tokens per tile.
const TILE_TOKENS: usize = 4;
/// Blocks per row of the panel: more of them mean fewer loads and stores of the sums.
const PANEL_BLOCKS: usize = 2 * SPAN;
/// Columns per row of the panel.
const PANEL_COLUMNS: usize = PANEL_BLOCKS * BLOCK;

/// Scratch memory in bytes.
pub(super) const BYTES: usize =
    BATCH_ROWS * (PANEL_COLUMNS + BATCH_TOKENS * BLOCK) * size_of::<f32>();

/// `out[t, r] = matrix[r] · x[t]`, with `out` `[tokens, rows]`.
pub(crate) struct Gemm<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) x: &'a [f32],
    pub(crate) tokens: usize,
    pub(crate) out: &'a mut [f32],
}

impl Operation for Gemm<'_> {
    type Output = ();

    fn run_scalar(self) {
        self.by_rows().run_scalar();
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        if self.tokens < Self::PANEL_TOKENS {
            return self.by_rows().run_simd(simd);
        }
        match S::TILE_ROWS {
            6 => products::<S, 6>(simd, self),
            _ => products::<S, 3>(simd, self),
        }
    }
}

impl<'a> Gemm<'a> {
    /// Tokens from which writing dequantised rows to a panel pays.
    pub(crate) const PANEL_TOKENS: usize = 8;

    /// The same, row by row.
    #[inline(always)]
    fn by_rows(self) -> Gemv<'a> {
        Gemv {
            matrix: self.matrix,
            rows: None,
            x: self.x,
            tokens: self.tokens,
            out: self.out,
        }
    }
}

/// A cache line; aligned, so that no register load crosses one.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// GEMM with tiles of `R` rows.
#[inline(always)]
fn products<S: Simd, const R: usize>(simd: S, gemm: Gemm<'_>) {
    const { assert!(BATCH_ROWS.is_multiple_of(R)) };
    let Gemm {
        matrix,
        x,
        tokens,
        out,
    } = gemm;
    let columns = matrix.columns();
    let whole = columns / BLOCK;
    let rest = (!columns.is_multiple_of(BLOCK)).then_some(whole);
    let mut panel = vec![Line([0.0; 16]); BATCH_ROWS * PANEL_COLUMNS / 16];
    let panel: &mut [f32] = bytemuck::cast_slice_mut(&mut panel);
    let mut sums = vec![Line([0.0; 16]); BATCH_ROWS * BATCH_TOKENS * BLOCK / 16];
    let sums: &mut [[f32; BLOCK]] = bytemuck::cast_slice_mut(&mut sums);
    let mut x_rests = [[0.0; BLOCK]; BATCH_TOKENS];

    for first_token in (0..tokens).step_by(BATCH_TOKENS) {
        let batch_tokens = BATCH_TOKENS.min(tokens - first_token);
        let mut x_blocks = [[].as_slice(); BATCH_TOKENS];
        for token in 0..batch_tokens {
            let x = &x[(first_token + token) * columns..][..columns];
            let (blocks, rest) = x.as_chunks();
            x_blocks[token] = blocks;
            x_rests[token] = padded(rest);
        }
        for first_row in (0..matrix.rows()).step_by(BATCH_ROWS) {
            let batch_rows = BATCH_ROWS.min(matrix.rows() - first_row);
            sums.fill([0.0; BLOCK]);
            for first in (0..whole).step_by(PANEL_BLOCKS).chain(rest) {
                let count = PANEL_BLOCKS.min(whole - first);
                let mut x_span = [[].as_slice(); BATCH_TOKENS];
                for token in 0..batch_tokens {
                    x_span[token] = match count {
                        0 => slice::from_ref(&x_rests[token]),
                        _ => &x_blocks[token][first..first + count],
                    };
                }
                with_weights!(matrix, weights => for row in 0..batch_rows {
                    let row_at = |row: usize| weights.row(row, 0..columns);
                    dequantise::<S, _, R>(simd, row_at(first_row + row), first, count, panel, row);
                    // Prefetch the next panel.
                    let end = first + count;
                    let (next_row, next) = match end < whole {
                        true => (first_row + row, end),
                        false => (first_row + BATCH_ROWS + row, 0),
                    };
                    if next_row < matrix.rows() {
                        let count = PANEL_BLOCKS.min(whole - next);
                        row_at(next_row).span(next, count).prefetch(simd);
                    }
                });
                // Padding rows of the last group are stale; their sums are discarded.
                let groups = batch_rows.div_ceil(R);
                multiply_panel::<S, R>(simd, panel, groups, &x_span[..batch_tokens], sums);
            }
            for first in (0..batch_tokens).step_by(TILE_TOKENS) {
                for row in 0..batch_rows {
                    let tile = &sums[tile_start::<R>(row / R, first / TILE_TOKENS)..];
                    let row_sums = &tile[row % R * TILE_TOKENS..][..TILE_TOKENS];
                    let mut blocks = [simd.splat(0.0); TILE_TOKENS];
                    for (block, sums) in blocks.iter_mut().zip(row_sums) {
                        *block = simd.load(sums);
                    }
                    let products = simd.sum_four(blocks);
                    for (token, product) in (first..batch_tokens).zip(products) {
                        out[(first_token + token) * matrix.rows() + first_row + row] = product;
                    }
                }
            }
        }
    }
}

/// Dequantises `count` blocks from `first`, or the partial last block if `count` is 0, into row `row` of the panel.
#[inline(always)]
fn dequantise<S: Simd, W: Row, const R: usize>(
    simd: S,
    weights: W,
    first: usize,
    count: usize,
    panel: &mut [f32],
    row: usize,
) {
    if count == 0 {
        let weights = weights.rest(simd, first);
        write_block::<S, R>(simd, weights, panel, row, 0, 1);
    } else {
        let mut scales = Scales::ONES;
        for start in (0..count).step_by(SPAN) {
            let of_span = SPAN.min(count - start);
            let weights = weights.span(first + start, of_span);
            weights.scales(simd, &mut scales);
            for block in 0..of_span {
                let weights = weights.weights(simd, block, &scales);
                write_block::<S, R>(simd, weights, panel, row, start + block, count);
            }
        }
    }
}

/// Stores block `block` of `count` of row `row` in the panel, register by register.
#[inline(always)]
fn write_block<S: Simd, const R: usize>(
    simd: S,
    weights: S::Block,
    panel: &mut [f32],
    row: usize,
    block: usize,
    count: usize,
) {
    let mut values = [0.0; BLOCK];
    simd.store(weights, &mut values);
    let group = &mut panel[row / R * R * PANEL_COLUMNS..];
    for (register, values) in values.chunks_exact(S::LANES).enumerate() {
        let position = (register * count + block) * R + row % R;
        group[position * S::LANES..][..S::LANES].copy_from_slice(values);
    }
}

/// `sums += panel · x` for all groups of `R` rows; `x` is `[tokens, count]` blocks.
#[inline(always)]
fn multiply_panel<S: Simd, const R: usize>(
    simd: S,
    panel: &[f32],
    groups: usize,
    x: &[&[[f32; BLOCK]]],
    sums: &mut [[f32; BLOCK]],
) {
    let register_values = x[0].len() * R * S::LANES;
    for group in 0..groups {
        let panel = &panel[group * R * PANEL_COLUMNS..][..R * PANEL_COLUMNS];
        for (register, panel) in panel
            .chunks_exact(register_values)
            .take(BLOCK / S::LANES)
            .enumerate()
        {
            let lane = register * S::LANES;
            for (tile, x) in x.chunks(TILE_TOKENS).enumerate() {
                let sums = &mut sums[tile_start::<R>(group, tile)..][..R * TILE_TOKENS];
                if let Ok(x) = <&[_; TILE_TOKENS]>::try_from(x) {
                    multiply_tile::<S, R, _>(simd, panel, x, lane, 0, sums);
                    continue;
                }
                for (token, &x) in x.iter().enumerate() {
                    multiply_tile::<S, R, _>(simd, panel, &[x], lane, token, sums);
                }
            }
        }
    }
}

/// Index of the first sum of a tile of `R` rows × [`TILE_TOKENS`] tokens, which are contiguous.
#[inline(always)]
fn tile_start<const R: usize>(group: usize, tile: usize) -> usize {
    (group * (BATCH_TOKENS / TILE_TOKENS) + tile) * R * TILE_TOKENS
}

/// Multiplies `R` rows × `T` tokens from `token` of a tile, in the lanes of the register from `lane`.
#[inline(always)]
fn multiply_tile<S: Simd, const R: usize, const T: usize>(
    simd: S,
    panel: &[f32],
    x: &[&[[f32; BLOCK]]; T],
    lane: usize,
    token: usize,
    sums: &mut [[f32; BLOCK]],
) {
    let mut tile = [[simd.load_vector(&[0.0; BLOCK]); T]; R];
    for row in 0..R {
        for index in 0..T {
            let sums = &sums[row * TILE_TOKENS + token + index];
            tile[row][index] = simd.load_vector(&sums[lane..]);
        }
    }
    // Slices of one length, so that the loop checks nothing.
    let count = panel.len() / (R * S::LANES);
    let mut x = *x;
    for x in &mut x {
        *x = &x[..count];
    }
    for (block, panel) in (0..count).zip(panel.chunks_exact(R * S::LANES)) {
        let mut weights = [simd.load_vector(panel); R];
        for row in 1..R {
            weights[row] = simd.load_vector(&panel[row * S::LANES..]);
        }
        for index in 0..T {
            let x = simd.load_vector(&x[index][block][lane..]);
            for row in 0..R {
                tile[row][index] = simd.multiply_add_vector(weights[row], x, tile[row][index]);
            }
        }
    }
    for row in 0..R {
        for index in 0..T {
            let sums = &mut sums[row * TILE_TOKENS + token + index];
            simd.store_vector(tile[row][index], &mut sums[lane..]);
        }
    }
}
