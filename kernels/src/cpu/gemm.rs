//! GEMM with float arithmetic.
//!
//! Rows are dequantised once per batch of tokens, then tiles of rows × tokens are multiplied from the caches. The 32
//! partial sums of a dot product are independent, so a tile holds one register of each dot product and passes over the
//! columns once per register of a block: every partial sum keeps the order of the scalar specification, and many dot
//! products fit into the registers. Panel and `x` are stored in the order in which tiles read them:
//!
//! ```text
//! for 128 tokens:                        x        [panel, register, 4 tokens, block, token, lane]
//!   for 12 rows:                         sums     [register, group of rows, 4 tokens, row, token, lane]
//!     for up to 64 blocks of columns:    panel    [register, group of rows, block, row, lane]
//!       for a register, 6 rows:
//!         for 4 tokens, a group of rows: tile     [row, token], one register each
//! ```

use std::cell::Cell;
use std::ops::Range;

use super::rows::{Row, Scales, Weights, with_weights};
use super::{Gemv, Operation, SPAN, Simd, padded};
use crate::PackedActivations;
use crate::activations::Line;
use powerinfer_tensor::BLOCK;
use powerinfer_tensor::{Matrix, MatrixData};

/// Tokens that share a dequantised row.
const BATCH_TOKENS: usize = 128;
/// Rows per batch of sums, a multiple of [`NEAR_ROWS`].
const BATCH_ROWS: usize = 12;
/// Rows that stay in L1 while all tokens pass, a multiple of every `TILE_ROWS`.
const NEAR_ROWS: usize = 6;
/// Tokens per tile.
const TILE_TOKENS: usize = 4;
/// Blocks per row of the panel, at most: more of them mean fewer loads and stores of the sums.
const PANEL_BLOCKS: usize = 64;

/// Scratch memory in bytes, without packed vectors.
pub(super) const BYTES: usize =
    BATCH_ROWS * (PANEL_BLOCKS + BATCH_TOKENS) * BLOCK * size_of::<f32>();

/// `out[t, r] = matrix[r] · x[t]`, with `out` `[tokens, rows]`; `packed` is `x`, packed beforehand.
pub(crate) struct Gemm<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) x: &'a [f32],
    pub(crate) packed: Option<&'a PackedActivations>,
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
        if self.tokens < Self::PANEL_TOKENS || self.matrix.columns() == 0 {
            return self.by_rows().run_simd(simd);
        }
        if let Some(packed) = self.packed {
            assert_eq!(packed.lanes, S::LANES, "packed for this instruction set");
        }
        let mut buffers = BUFFERS.take();
        match S::TILE_ROWS {
            6 => products::<S, 6>(simd, self, &mut buffers),
            _ => products::<S, 3>(simd, self, &mut buffers),
        }
        BUFFERS.set(buffers);
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

/// `out` = the vectors of `columns` elements in `x`, packed.
pub(crate) struct Pack<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) columns: usize,
    pub(crate) out: &'a mut PackedActivations,
}

impl Operation for Pack<'_> {
    type Output = ();

    /// The scalar code reads the vectors themselves.
    fn run_scalar(self) {}

    #[inline(always)]
    fn run_simd<S: Simd>(self, _: S) {
        let Self { x, columns, out } = self;
        if out.tokens < Gemm::PANEL_TOKENS || columns == 0 {
            return;
        }
        out.lanes = S::LANES;
        let vector = columns.next_multiple_of(BLOCK);
        let values = floats(&mut out.lines, out.tokens * vector);
        let batches = values.chunks_mut(BATCH_TOKENS * vector);
        for (x, out) in x.chunks(BATCH_TOKENS * columns).zip(batches) {
            pack_batch::<S>(x, columns, out);
        }
    }
}

/// The first `length` values of `lines`, which are undefined.
fn floats(lines: &mut Vec<Line>, length: usize) -> &mut [f32] {
    let count = length.div_ceil(16);
    if lines.len() < count {
        lines.resize(count, Line([0.0; 16]));
    }
    &mut bytemuck::cast_slice_mut(lines)[..length]
}

/// Memory that a thread reuses from call to call.
#[derive(Default)]
struct Buffers {
    panel: Vec<Line>,
    sums: Vec<Line>,
}

thread_local! {
    static BUFFERS: Cell<Buffers> = Cell::default();
}

/// Blocks of a panel: of as many bytes per register of a block for wider registers.
#[inline(always)]
fn panel_blocks<S: Simd>() -> usize {
    PANEL_BLOCKS * 8 / S::LANES.max(8)
}

/// Packs a batch of vectors of `columns` values for [`multiply_panel`]; each token outside a whole tile is a separate tile.
#[inline(always)]
fn pack_batch<S: Simd>(x: &[f32], columns: usize, out: &mut [f32]) {
    let (tokens, blocks) = (x.len() / columns, columns.div_ceil(BLOCK));
    for (token, x) in x.chunks_exact(columns).enumerate() {
        let tile = token / TILE_TOKENS * TILE_TOKENS;
        let (tile, width) = if tile + TILE_TOKENS <= tokens {
            (tile, TILE_TOKENS)
        } else {
            (token, 1)
        };
        for first in (0..blocks).step_by(panel_blocks::<S>()) {
            let count = panel_blocks::<S>().min(blocks - first);
            let out = &mut out[first * BLOCK * tokens..][..count * BLOCK * tokens];
            let x = &x[first * BLOCK..columns.min((first + count) * BLOCK)];
            for (block, x) in x.chunks(BLOCK).enumerate() {
                let x = <[f32; BLOCK]>::try_from(x).unwrap_or_else(|_| padded(x));
                for (register, x) in x.chunks_exact(S::LANES).enumerate() {
                    let position =
                        (register * tokens + tile) * count + block * width + token - tile;
                    out[position * S::LANES..][..S::LANES].copy_from_slice(x);
                }
            }
        }
    }
}

/// GEMM with tiles of `R` rows.
#[inline(always)]
fn products<S: Simd, const R: usize>(simd: S, gemm: Gemm<'_>, buffers: &mut Buffers) {
    const { assert!(NEAR_ROWS.is_multiple_of(R) && BATCH_ROWS.is_multiple_of(NEAR_ROWS)) };
    let Gemm {
        matrix,
        x,
        packed,
        tokens,
        out,
    } = gemm;
    let (rows, columns, blocks) = (matrix.rows(), matrix.columns(), matrix.blocks());
    let panel = floats(&mut buffers.panel, BATCH_ROWS * PANEL_BLOCKS * BLOCK);
    let sums = floats(&mut buffers.sums, BATCH_ROWS * BATCH_TOKENS * BLOCK);
    let mut batch = Vec::new();

    for first_token in (0..tokens).step_by(BATCH_TOKENS) {
        let batch_tokens = BATCH_TOKENS.min(tokens - first_token);
        let x = match packed {
            Some(packed) => packed.part(first_token, batch_tokens),
            None => {
                let batch = floats(&mut batch, batch_tokens * blocks * BLOCK);
                let x = &x[first_token * columns..][..batch_tokens * columns];
                pack_batch::<S>(x, columns, batch);
                batch
            }
        };
        for first_row in (0..rows).step_by(BATCH_ROWS) {
            let batch_rows = BATCH_ROWS.min(rows - first_row);
            // Padding rows of the last group are stale; their sums are discarded.
            let groups = batch_rows.div_ceil(R);
            for first in (0..blocks).step_by(panel_blocks::<S>()) {
                let part = first..blocks.min(first + panel_blocks::<S>());
                let panel = &mut panel[..groups * R * part.len() * BLOCK];
                with_weights!(matrix, weights => for row in 0..batch_rows {
                    let weights = weights.row(first_row + row, 0..columns);
                    let start = (row / R * part.len() * R + row % R) * S::LANES;
                    let stride = groups * part.len() * R * S::LANES;
                    dequantise::<S, _, R>(simd, weights, part.clone(), columns / BLOCK, &mut panel[start..], stride);
                });
                let x = &x[first * BLOCK * batch_tokens..][..part.len() * BLOCK * batch_tokens];
                let mut next = Next::after::<S>(matrix, &part, first_row..first_row + batch_rows);
                let tiles = (groups * R).div_ceil(NEAR_ROWS) * batch_tokens.div_ceil(TILE_TOKENS);
                let pieces = next.pieces().div_ceil(tiles * BLOCK / S::LANES);
                multiply_panel::<S, R>(simd, panel, x, part, batch_tokens, sums, || {
                    next.prefetch(simd, pieces);
                });
            }
            for first in (0..batch_tokens).step_by(TILE_TOKENS) {
                for row in 0..batch_rows {
                    let products = sum_row::<S, R>(simd, sums, row, first / TILE_TOKENS);
                    for (token, product) in (first..batch_tokens).zip(products) {
                        out[(first_token + token) * rows + first_row + row] = product;
                    }
                }
            }
        }
    }
}

/// Float weights of the panel that follows, which are prefetched between tiles: a panel is a part of many rows, at each of which
/// hardware prefetchers restart.
struct Next<'a> {
    weights: &'a [u8],
    row_bytes: usize,
    rows: Range<usize>,
    /// The bytes of each row.
    part: Range<usize>,
    /// Pieces that have been prefetched.
    done: usize,
}

impl<'a> Next<'a> {
    /// Bytes of a row that are prefetched at a time.
    const PIECE: usize = 512;

    /// The panel after that of the blocks `part` of the rows `batch`. The last one is followed by the first, for the next tokens.
    #[inline(always)]
    fn after<S: Simd>(matrix: &'a Matrix<'_>, part: &Range<usize>, batch: Range<usize>) -> Self {
        let (weights, size): (&[u8], _) = match matrix.data() {
            MatrixData::F32(values) => (bytemuck::cast_slice(values), 4),
            MatrixData::F16(values) => (bytemuck::cast_slice(values), 2),
            MatrixData::Bf16(values) => (bytemuck::cast_slice(values), 2),
            _ => (&[], 0),
        };
        let rows = matrix.rows();
        let (row, first) = match (part.end < matrix.blocks(), batch.end < rows) {
            (true, _) => (batch.start, part.end),
            (false, true) => (batch.end, 0),
            (false, false) => (0, 0),
        };
        let end = matrix.columns().min((first + panel_blocks::<S>()) * BLOCK);
        Self {
            weights,
            row_bytes: matrix.columns() * size,
            rows: row..rows.min(row + BATCH_ROWS),
            part: first * BLOCK * size..end * size,
            done: 0,
        }
    }

    #[inline(always)]
    fn pieces(&self) -> usize {
        self.rows.len() * self.part.len().div_ceil(Self::PIECE)
    }

    /// Prefetches the next `count` pieces.
    #[inline(always)]
    fn prefetch<S: Simd>(&mut self, simd: S, count: usize) {
        let end = self.pieces().min(self.done + count);
        for piece in self.done..end {
            let row = self.rows.start + piece % self.rows.len();
            let start = self.part.start + piece / self.rows.len() * Self::PIECE;
            let row = &self.weights[row * self.row_bytes..][..self.row_bytes];
            simd.prefetch(&row[start..self.part.end.min(start + Self::PIECE)]);
        }
        self.done = end;
    }
}

/// Dequantises the blocks `part` of a row, the first `whole` ones of which are whole, into every `R`th register of the panel;
/// `stride` values lie between the registers of a block.
#[inline(always)]
fn dequantise<S: Simd, W: Row, const R: usize>(
    simd: S,
    weights: W,
    part: Range<usize>,
    whole: usize,
    panel: &mut [f32],
    stride: usize,
) {
    let mut scales = Scales::ONES;
    let end = whole.min(part.end);
    for first in (part.start..end).step_by(SPAN) {
        let count = SPAN.min(end - first);
        let span = weights.span(first, count);
        span.scales(simd, &mut scales);
        for block in 0..count {
            let weights = span.weights(simd, block, &scales);
            let start = (first - part.start + block) * R * S::LANES;
            write_block(simd, weights, &mut panel[start..], stride);
        }
    }
    if end < part.end {
        let start = (end - part.start) * R * S::LANES;
        write_block(simd, weights.rest(simd, whole), &mut panel[start..], stride);
    }
}

/// Stores a block register by register, `stride` values apart.
#[inline(always)]
fn write_block<S: Simd>(simd: S, weights: S::Block, panel: &mut [f32], stride: usize) {
    let mut values = [0.0; BLOCK];
    simd.store(weights, &mut values);
    for (register, values) in values.chunks_exact(S::LANES).enumerate() {
        panel[register * stride..][..S::LANES].copy_from_slice(values);
    }
}

/// `sums += panel · x` for the blocks `part` of a batch of tokens; the first ones start the sums.
#[inline(always)]
fn multiply_panel<S: Simd, const R: usize>(
    simd: S,
    panel: &[f32],
    x: &[f32],
    part: Range<usize>,
    tokens: usize,
    sums: &mut [f32],
    mut between_tiles: impl FnMut(),
) {
    let values = part.len() * S::LANES;
    let groups = panel.len() / (part.len() * BLOCK * R);
    let registers = x.chunks_exact(tokens * values);
    for (register, (x, panel)) in registers
        .zip(panel.chunks_exact(groups * R * values))
        .enumerate()
    {
        for (near, panel) in panel.chunks(NEAR_ROWS * values).enumerate() {
            for (tile, x) in x.chunks(TILE_TOKENS * values).enumerate() {
                between_tiles();
                for (group, panel) in panel.chunks_exact(R * values).enumerate() {
                    let start = tile_start::<S, R>(register, near * (NEAR_ROWS / R) + group, tile);
                    let sums = &mut sums[start..][..R * TILE_TOKENS * S::LANES];
                    let is_first = part.start == 0;
                    if x.len() == TILE_TOKENS * values {
                        multiply_tile::<S, R, TILE_TOKENS>(simd, panel, x, is_first, sums);
                        continue;
                    }
                    for (token, x) in x.chunks_exact(values).enumerate() {
                        let sums = &mut sums[token * S::LANES..];
                        multiply_tile::<S, R, 1>(simd, panel, x, is_first, sums);
                    }
                }
            }
        }
    }
}

/// Index of the first sum of register `register` of a tile.
#[inline(always)]
fn tile_start<S: Simd, const R: usize>(register: usize, group: usize, tile: usize) -> usize {
    let group = register * (BATCH_ROWS / R) + group;
    (group * (BATCH_TOKENS / TILE_TOKENS) + tile) * R * TILE_TOKENS * S::LANES
}

/// Multiplies `R` rows × `T` tokens: `panel` is `[block, row, lane]`, `x` `[block, token, lane]`, `sums` `[row, token, lane]`
/// from the first token of `x`.
#[inline(always)]
fn multiply_tile<S: Simd, const R: usize, const T: usize>(
    simd: S,
    panel: &[f32],
    x: &[f32],
    is_first: bool,
    sums: &mut [f32],
) {
    let mut tile = [[simd.splat_vector(0.0); T]; R];
    if !is_first {
        for (row, sums) in tile.iter_mut().zip(sums.chunks(TILE_TOKENS * S::LANES)) {
            for (sum, sums) in row.iter_mut().zip(sums.chunks_exact(S::LANES)) {
                *sum = simd.load_vector(sums);
            }
        }
    }
    let blocks = panel.chunks_exact(R * S::LANES);
    for (panel, x) in blocks.zip(x.chunks_exact(T * S::LANES)) {
        let mut weights = [simd.load_vector(panel); R];
        for row in 1..R {
            weights[row] = simd.load_vector(&panel[row * S::LANES..]);
        }
        for token in 0..T {
            let x = simd.load_vector(&x[token * S::LANES..]);
            for row in 0..R {
                tile[row][token] = simd.multiply_add_vector(weights[row], x, tile[row][token]);
            }
        }
    }
    for (row, sums) in tile.iter().zip(sums.chunks_mut(TILE_TOKENS * S::LANES)) {
        for (sum, sums) in row.iter().zip(sums.chunks_exact_mut(S::LANES)) {
            simd.store_vector(*sum, sums);
        }
    }
}

/// Tree sums of the dot products of row `row` with the tokens of tile `tile`.
#[inline(always)]
fn sum_row<S: Simd, const R: usize>(
    simd: S,
    sums: &[f32],
    row: usize,
    tile: usize,
) -> [f32; TILE_TOKENS] {
    let mut blocks = [simd.splat(0.0); TILE_TOKENS];
    for (token, block) in blocks.iter_mut().enumerate() {
        let mut values = [0.0; BLOCK];
        for (register, values) in values.chunks_exact_mut(S::LANES).enumerate() {
            let start = tile_start::<S, R>(register, row / R, tile)
                + (row % R * TILE_TOKENS + token) * S::LANES;
            values.copy_from_slice(&sums[start..][..S::LANES]);
        }
        *block = simd.load(&values);
    }
    simd.sum_four(blocks)
}
