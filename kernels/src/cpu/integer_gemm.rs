//! GEMM of quantised rows with int8 vectors: integer dot products per block, scaled in float.
//!
//! Sixteen rows are interleaved by four bytes, so that a register holds the same columns of all sixteen and every lane is
//! a row; nibbles stay packed until they are multiplied:
//!
//! ```text
//! for 16 rows:              panel    [block, 8 or 4 lines, row, 4]     scales [block, row]
//!                           minima   [block, row], if the format has them
//!   for 8 tokens:           sums     [block of a span, token, row]
//!     for every block:      eight registers of the panel
//!       for every token:    one register of sums of products, then one multiply-add
//! ```

use std::ops::Range;

use half::f16;

use super::rows::KWeights;
use super::{IntegerGemv, KScales, Operation, SPAN, Simd};
use crate::activations::{ActivationSpan, Vectors};
use powerinfer_tensor::BLOCK;
use powerinfer_tensor::{Matrix, MatrixData};

/// Rows per panel, one per lane.
const ROWS: usize = 16;
/// Tokens that share each load of the panel.
const TOKENS: usize = 8;
/// Columns per word.
const WORD: usize = 4;

/// Bytes up to which four vectors and a row stay in L1, so that multiplying row by row is as fast as with a panel.
const NEAR_BYTES: usize = 40 << 10;

/// `out[t, r] = matrix[r] · x[t]`, with `out` `[tokens, rows]`.
pub(crate) struct IntegerGemm<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) x: Vectors<'a>,
    pub(crate) out: &'a mut [f32],
}

/// Scratch memory in bytes for `columns` columns.
pub(super) const fn bytes(columns: usize) -> usize {
    let blocks = columns.div_ceil(BLOCK);
    blocks * (BLOCK / WORD * size_of::<Line>() + 2 * size_of::<[f32; ROWS]>()) + size_of::<Sums>()
}

/// Four bytes of each of sixteen rows.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; ROWS * WORD]);

/// Storage of the quants in a panel.
trait PanelFormat {
    /// Lines per block.
    const LINES: usize;
    /// Whether blocks have minima.
    const HAS_MINIMA: bool = false;

    /// Bias of the stored quants.
    fn bias<S: Simd>() -> i32;

    /// Loads the quants of a block, four columns per register.
    fn words<S: Simd>(simd: S, lines: &[Line]) -> [S::Integers; BLOCK / WORD];

    /// `sums +=` dot product of the columns of a block with those of `x`.
    fn dot<S: Simd>(
        simd: S,
        sums: S::Integers,
        words: &[S::Integers; BLOCK / WORD],
        x: [S::Integers; BLOCK / WORD],
    ) -> S::Integers;
}

/// Signed bytes with the bias of the instruction set.
struct Bytes;

/// Nibbles with bias `BIAS`: the first half of a block in the low bits.
struct Nibbles<const BIAS: i32, const MINIMA: bool>;

impl PanelFormat for Bytes {
    const LINES: usize = BLOCK / WORD;

    #[inline(always)]
    fn bias<S: Simd>() -> i32 {
        S::PANEL_BIAS
    }

    #[inline(always)]
    fn words<S: Simd>(simd: S, lines: &[Line]) -> [S::Integers; BLOCK / WORD] {
        let mut words = [simd.splat_i32(0); BLOCK / WORD];
        for (words, line) in words.iter_mut().zip(lines) {
            *words = simd.load_bytes(&line.0);
        }
        words
    }

    #[inline(always)]
    fn dot<S: Simd>(
        simd: S,
        mut sums: S::Integers,
        words: &[S::Integers; BLOCK / WORD],
        x: [S::Integers; BLOCK / WORD],
    ) -> S::Integers {
        for (words, x) in words.iter().zip(x) {
            sums = simd.dot(sums, *words, x);
        }
        sums
    }
}

impl<const BIAS: i32, const MINIMA: bool> PanelFormat for Nibbles<BIAS, MINIMA> {
    const LINES: usize = BLOCK / WORD / 2;
    const HAS_MINIMA: bool = MINIMA;

    #[inline(always)]
    fn bias<S: Simd>() -> i32 {
        BIAS
    }

    #[inline(always)]
    fn words<S: Simd>(simd: S, lines: &[Line]) -> [S::Integers; BLOCK / WORD] {
        let mut words = [simd.splat_i32(0); BLOCK / WORD];
        let (low, high) = words.split_at_mut(BLOCK / WORD / 2);
        for ((low, high), line) in low.iter_mut().zip(high).zip(lines) {
            [*low, *high] = simd.nibbles(simd.load_bytes(&line.0));
        }
        words
    }

    #[inline(always)]
    fn dot<S: Simd>(
        simd: S,
        sums: S::Integers,
        words: &[S::Integers; BLOCK / WORD],
        x: [S::Integers; BLOCK / WORD],
    ) -> S::Integers {
        simd.dot_nibbles(sums, *words, x)
    }
}

/// Partial sums of a tile, `[block of a span, token, row]`.
#[repr(C, align(64))]
struct Sums([[[f32; ROWS]; TOKENS]; SPAN]);

/// Sixteen interleaved rows.
struct Panel {
    lines: Vec<Line>,
    /// `[block, row]`.
    scales: Vec<[f32; ROWS]>,
    /// `[block, row]`, or empty without minima.
    minima: Vec<[f32; ROWS]>,
}

impl Operation for IntegerGemm<'_> {
    type Output = ();

    fn run_scalar(self) {
        self.by_rows().run_scalar();
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        if self.x.count < panel_tokens::<S>(self.matrix) {
            return self.by_rows().run_simd(simd);
        }
        let (rows, blocks) = (self.matrix.rows(), self.matrix.blocks());
        match self.matrix.data() {
            MatrixData::Q8_0 { quants, scales } => {
                let quants: &[u8] = bytemuck::cast_slice(quants);
                let bias = S::PANEL_BIAS as u8;
                self.multiply::<S, Bytes>(simd, |panel, part| {
                    panel.fill(simd, part.clone(), &quants[..rows * blocks * BLOCK], bias);
                    panel.fill_scales(simd, part, scales);
                });
            }
            MatrixData::Q4K {
                quants,
                scales,
                factors,
            } => {
                let weights = KWeights::new(quants, scales, factors, self.matrix.columns());
                self.multiply::<S, Nibbles<0, true>>(simd, |panel, part| {
                    panel.fill(simd, part.clone(), &quants[..rows * blocks * BLOCK / 2], 0);
                    for (lane, row) in part.enumerate() {
                        panel.fill_q4_k(simd, lane, weights.whole_row(row).scales);
                    }
                });
            }
            MatrixData::Q4_0 { quants, scales } => {
                self.multiply::<S, Nibbles<8, false>>(simd, |panel, part| {
                    panel.fill(simd, part.clone(), &quants[..rows * blocks * BLOCK / 2], 0);
                    panel.fill_scales(simd, part, scales);
                });
            }
            _ => unreachable!("integer arithmetic needs quantised weights"),
        }
    }
}

/// Tokens from which interleaving the rows of `matrix` pays.
fn panel_tokens<S: Simd>(matrix: &Matrix<'_>) -> usize {
    match S::TILE_ROWS {
        6 if 4 * matrix.columns() + matrix.row_bytes() <= NEAR_BYTES => IntegerGemm::PANEL_TOKENS,
        6 => 12,
        _ => 5,
    }
}

impl<'a> IntegerGemm<'a> {
    /// Tokens from which interleaving rows pays, if registers hold the products of four tokens and L1 their vectors.
    pub(crate) const PANEL_TOKENS: usize = 32;

    /// The same, row by row.
    #[inline(always)]
    fn by_rows(self) -> IntegerGemv<'a> {
        IntegerGemv {
            matrix: self.matrix,
            rows: None,
            x: self.x,
            out: self.out,
        }
    }

    /// Multiplies panel by panel; `fill` fills a panel with a range of rows.
    #[inline(always)]
    fn multiply<S: Simd, N: PanelFormat>(self, simd: S, fill: impl Fn(&mut Panel, Range<usize>)) {
        let Self { matrix, x, out } = self;
        let (rows, blocks) = (matrix.rows(), matrix.blocks());
        let mut panel = Panel {
            lines: vec![Line([0; ROWS * WORD]); blocks * N::LINES],
            scales: vec![[0.0; ROWS]; blocks],
            minima: vec![[0.0; ROWS]; if N::HAS_MINIMA { blocks } else { 0 }],
        };
        let mut sums = Box::new(Sums([[[0.0; ROWS]; TOKENS]; SPAN]));
        for first_row in (0..rows).step_by(ROWS) {
            let part = first_row..rows.min(first_row + ROWS);
            fill(&mut panel, part.clone());
            for first_token in (0..x.count).step_by(TOKENS) {
                let tokens = first_token..x.count.min(first_token + TOKENS);
                let mut tile = [x.get(first_token); TOKENS];
                for (token, tile) in tokens.clone().zip(&mut tile) {
                    *tile = x.get(token);
                }
                // The vectors of the next tile or, after the last tile, the first vectors, which the next panel needs.
                let mut next = [x.get(0); TOKENS];
                for (place, next) in next.iter_mut().enumerate() {
                    *next = x.get((tokens.end + place) % x.count);
                }
                let next = if x.count > TOKENS { &next[..] } else { &[] };
                multiply_tile::<S, N>(simd, &panel, &tile[..tokens.len()], next, &mut sums);
                for token in tokens.clone() {
                    let products = tree_sum(simd, &sums, token - first_token);
                    let out = &mut out[token * rows..][part.clone()];
                    out.copy_from_slice(&products[..part.len()]);
                }
            }
        }
    }
}

impl Panel {
    /// Interleaves the rows `part` of `quants`, with every byte XORed with `flip`. Missing rows repeat the last one; their
    /// products are discarded.
    #[inline(always)]
    fn fill<S: Simd>(&mut self, simd: S, part: Range<usize>, quants: &[u8], flip: u8) {
        const FOUR: usize = ROWS / WORD;
        let row_bytes = self.lines.len() * WORD;
        let row = |lane: usize| {
            let row = (part.start + lane).min(part.end - 1);
            quants[row * row_bytes..][..row_bytes].as_chunks().0
        };
        for first in (0..ROWS).step_by(FOUR) {
            let rows = [row(first), row(first + 1), row(first + 2), row(first + 3)];
            let [a, b, c, d] = rows;
            let four = a.iter().zip(b).zip(c).zip(d);
            for ((((a, b), c), d), lines) in four.zip(self.lines.as_chunks_mut::<FOUR>().0) {
                let columns = simd.transpose_words([a, b, c, d]);
                for (line, bytes) in lines.iter_mut().zip(columns) {
                    line.0[first * WORD..][..ROWS].copy_from_slice(&bytes.map(|byte| byte ^ flip));
                }
            }
        }
    }

    /// Widens the block scales of the rows `part`.
    #[inline(always)]
    fn fill_scales<S: Simd>(&mut self, simd: S, part: Range<usize>, scales: &[f16]) {
        let blocks = self.scales.len();
        for (lane, row) in part.enumerate() {
            let scales = &scales[row * blocks..(row + 1) * blocks];
            for (scales, of_panel) in scales.chunks(SPAN).zip(self.scales.chunks_mut(SPAN)) {
                let mut wide = [0.0; SPAN];
                simd.store_lanes(simd.widen_lanes(scales), &mut wide);
                for (of_panel, scale) in of_panel.iter_mut().zip(wide) {
                    of_panel[lane] = scale;
                }
            }
        }
    }

    /// Widens the scales and minima of the row in lane `lane`.
    #[inline(always)]
    fn fill_q4_k<S: Simd>(&mut self, simd: S, lane: usize, scales: KScales<'_>) {
        let spans = self
            .scales
            .chunks_mut(SPAN)
            .zip(self.minima.chunks_mut(SPAN));
        for (span, of_panel) in spans.enumerate() {
            let part = scales.part(span * SPAN, of_panel.0.len());
            let mut wide = [[0.0; SPAN]; 2];
            let [scales, minima] = simd.widen_q4_k(&part);
            simd.store_lanes(scales, &mut wide[0]);
            simd.store_lanes(minima, &mut wide[1]);
            for (of_panel, wide) in [of_panel.0, of_panel.1].into_iter().zip(wide) {
                for (of_panel, wide) in of_panel.iter_mut().zip(wide) {
                    of_panel[lane] = wide;
                }
            }
        }
    }

    /// Loads the scales and, if the format has them, the minima of block `block`.
    #[inline(always)]
    fn scales<S: Simd, N: PanelFormat>(&self, simd: S, block: usize) -> [S::Lanes; 2] {
        let scales = simd.load_lanes(&self.scales[block]);
        if N::HAS_MINIMA {
            [scales, simd.load_lanes(&self.minima[block])]
        } else {
            [scales; 2]
        }
    }
}

/// Computes the partial sums of a tile and prefetches the vectors of the `next` tile.
#[inline(always)]
fn multiply_tile<S: Simd, N: PanelFormat>(
    simd: S,
    panel: &Panel,
    tile: &[&[ActivationSpan]],
    next: &[&[ActivationSpan]],
    sums: &mut Sums,
) {
    if let Ok(whole) = <&[&[ActivationSpan]; TOKENS]>::try_from(tile) {
        return multiply::<S, N, TOKENS>(simd, panel, whole, next, 0, sums);
    }
    let (fours, rest) = tile.as_chunks::<4>();
    for (index, four) in fours.iter().enumerate() {
        multiply::<S, N, 4>(simd, panel, four, &[], 4 * index, sums);
    }
    for (token, x) in rest.iter().enumerate() {
        multiply::<S, N, 1>(simd, panel, &[*x], &[], 4 * fours.len() + token, sums);
    }
}

/// Computes the partial sums of `T` tokens from token `first` of a tile.
#[inline(always)]
fn multiply<S: Simd, N: PanelFormat, const T: usize>(
    simd: S,
    panel: &Panel,
    x: &[&[ActivationSpan]; T],
    next: &[&[ActivationSpan]],
    first: usize,
    sums: &mut Sums,
) {
    for sums in &mut sums.0 {
        sums[first..first + T].fill([0.0; ROWS]);
    }
    for (span, blocks) in panel.lines.chunks(SPAN * N::LINES).enumerate() {
        for next in next {
            let next = &next[span];
            simd.prefetch(&next.quants);
            simd.prefetch(&next.scales);
            simd.prefetch(&next.sums);
        }
        let mut of_span = [&x[0][span]; T];
        let mut biases = [[0; SPAN]; T];
        for token in 0..T {
            of_span[token] = &x[token][span];
            for (bias, sum) in biases[token].iter_mut().zip(&of_span[token].sums) {
                *bias = -N::bias::<S>() * sum;
            }
        }
        for (block, lines) in blocks.chunks_exact(N::LINES).enumerate() {
            let scales = panel.scales::<S, N>(simd, span * SPAN + block);
            // The block stays in registers for all tokens.
            let words = N::words(simd, lines);
            let sums = &mut sums.0[block][first..first + T];
            for token in 0..T {
                let sum = simd.load_lanes(&sums[token]);
                let (x, bias) = (of_span[token], biases[token][block]);
                let sum = add_block::<S, N>(simd, &words, scales, x, block, bias, sum);
                simd.store_lanes(sum, &mut sums[token]);
            }
        }
    }
}

/// `sum` plus the scaled dot products of a block of all rows with block `block` of `x`; the integer sums start at `bias`.
#[inline(always)]
fn add_block<S: Simd, N: PanelFormat>(
    simd: S,
    panel: &[S::Integers; BLOCK / WORD],
    [scales, minima]: [S::Lanes; 2],
    x: &ActivationSpan,
    block: usize,
    bias: i32,
    sum: S::Lanes,
) -> S::Lanes {
    let words = &x.quants.as_chunks::<WORD>().0[block * (BLOCK / WORD)..][..BLOCK / WORD];
    let mut columns = [simd.splat_i32(0); BLOCK / WORD];
    for (columns, word) in columns.iter_mut().zip(words) {
        *columns = simd.splat_i32(i32::from_le_bytes(word.map(|quant| quant as u8)));
    }
    let products = N::dot(simd, simd.splat_i32(bias), panel, columns);
    let products = simd.to_f32_lanes(products);
    let x_scale = simd.splat_lanes(x.scales[block]);
    if N::HAS_MINIMA {
        let minima = simd.multiply_lanes(minima, simd.splat_lanes(x.sums[block] as f32));
        let products = simd.multiply_subtract_lanes(products, scales, minima);
        return simd.multiply_add_lanes(products, x_scale, sum);
    }
    simd.multiply_add_lanes(products, simd.multiply_lanes(scales, x_scale), sum)
}

/// Tree sums of token `token`.
#[inline(always)]
fn tree_sum<S: Simd>(simd: S, sums: &Sums, token: usize) -> [f32; ROWS] {
    let mut lanes = [simd.splat_lanes(0.0); SPAN];
    for (lanes, sums) in lanes.iter_mut().zip(&sums.0) {
        *lanes = simd.load_lanes(&sums[token]);
    }
    let mut half = SPAN / 2;
    while half > 0 {
        for index in 0..half {
            lanes[index] = simd.add_lanes(lanes[index], lanes[index + half]);
        }
        half /= 2;
    }
    let mut out = [0.0; ROWS];
    simd.store_lanes(lanes[0], &mut out);
    out
}
