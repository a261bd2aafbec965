//! Products of quantised rows with many rounded vectors, in whole numbers but for the scales.
//!
//! Sixteen rows are unpacked to signed bytes, four columns of each side by side, so that a register
//! holds four columns of all sixteen and every lane is a row:
//!
//! ```text
//! for 16 rows:              panel    [block, 8 × 4 columns, row, 4]     scales [block, row]
//!                           minima   [block, row], where the format has them
//!   for 8 tokens:           sums     [block of a span, token, row]
//!     for every block:      a register of eight products a token, then one multiply-add
//! ```

use std::ops::Range;

use half::f16;

use super::rows::KWeights;
use super::{KScales, Operation, SPAN, Simd, scalar};
use crate::activations::ActivationSpan;
use crate::format::BLOCK;
use crate::{Activations, Matrix, MatrixData};

/// Rows of a panel: lanes.
const ROWS: usize = 16;
/// Tokens that share what is read of a panel.
const TOKENS: usize = 8;
/// Columns whose bytes lie side by side.
const WORD: usize = 4;

/// `out[t, r] = matrix[r] · x[t]`, with `out` `[tokens, rows]`.
pub(crate) struct IntegerGemm<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) x: &'a Activations,
    pub(crate) out: &'a mut [f32],
}

/// Bytes that such a product takes while it is computed.
pub(super) const fn bytes(columns: usize) -> usize {
    let blocks = columns.div_ceil(BLOCK);
    blocks * (size_of::<PanelBlock>() + 2 * size_of::<[f32; ROWS]>()) + size_of::<Sums>()
}

/// A block of sixteen rows.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct PanelBlock([[u8; ROWS * WORD]; BLOCK / WORD]);

/// Running sums of a tile: one a block of a span, a token and a row.
#[repr(C, align(64))]
struct Sums([[[f32; ROWS]; TOKENS]; SPAN]);

/// Sixteen rows, unpacked.
struct Panel {
    blocks: Vec<PanelBlock>,
    /// One entry a block.
    scales: Vec<[f32; ROWS]>,
    /// The same, or nothing.
    minima: Vec<[f32; ROWS]>,
}

impl Operation for IntegerGemm<'_> {
    type Output = ();

    fn specify(self) {
        let rows = self.matrix.rows().max(1);
        for (token, out) in self.out.chunks_exact_mut(rows).enumerate() {
            for (row, out) in out.iter_mut().enumerate() {
                *out = scalar::integer_dot_row(self.matrix, row, self.x.token(token));
            }
        }
    }

    #[inline(always)]
    fn translate<S: Simd>(self, simd: S) {
        let Self { matrix, x, out } = self;
        let rows = matrix.rows();
        let blocks = matrix.blocks();
        let has_minima = matrix.format().has_minima();
        let mut panel = Panel {
            blocks: vec![PanelBlock([[0; ROWS * WORD]; BLOCK / WORD]); blocks],
            scales: vec![[0.0; ROWS]; blocks],
            minima: vec![[0.0; ROWS]; if has_minima { blocks } else { 0 }],
        };
        let mut sums = Box::new(Sums([[[0.0; ROWS]; TOKENS]; SPAN]));
        for first_row in (0..rows).step_by(ROWS) {
            let part = first_row..rows.min(first_row + ROWS);
            match matrix.data() {
                MatrixData::Q8_0 { quants, scales } => {
                    let unpack =
                        |block: &[i8; BLOCK]| block.map(|quant| quant as u8 ^ S::PANEL_BIAS as u8);
                    panel.fill(part.clone(), quants.as_chunks().0, unpack);
                    panel.fill_scales(part.clone(), scales);
                }
                MatrixData::Q4K {
                    quants,
                    scales,
                    factors,
                } => {
                    panel.fill(part.clone(), quants.as_chunks().0, unpack_nibbles::<S, 0>);
                    let weights = KWeights::new(quants, scales, factors, matrix.columns());
                    for (lane, row) in part.clone().enumerate() {
                        panel.fill_q4_k(simd, lane, weights.whole_row(row).scales);
                    }
                }
                MatrixData::Q4_0 { quants, scales } => {
                    panel.fill(part.clone(), quants.as_chunks().0, unpack_nibbles::<S, 8>);
                    panel.fill_scales(part.clone(), scales);
                }
                _ => unreachable!("only quantised weights are multiplied in whole numbers"),
            }
            for first_token in (0..x.tokens()).step_by(TOKENS) {
                let tokens = first_token..x.tokens().min(first_token + TOKENS);
                let mut tile = [x.token(first_token); TOKENS];
                for (token, tile) in tokens.clone().zip(&mut tile) {
                    *tile = x.token(token);
                }
                let tile = &tile[..tokens.len()];
                if has_minima {
                    multiply_tile::<S, true>(simd, &panel, tile, &mut sums);
                } else {
                    multiply_tile::<S, false>(simd, &panel, tile, &mut sums);
                }
                for token in tokens.clone() {
                    let products = halved(simd, &sums, token - first_token);
                    let out = &mut out[token * rows..][part.clone()];
                    out.copy_from_slice(&products[..part.len()]);
                }
            }
        }
    }
}

/// Nibbles as bytes of a panel, less `BIAS`.
#[inline(always)]
fn unpack_nibbles<S: Simd, const BIAS: u8>(block: &[u8; BLOCK / 2]) -> [u8; BLOCK] {
    let bias = (S::PANEL_BIAS as u8).wrapping_sub(BIAS);
    let mut bytes = [0; BLOCK];
    let (low, high) = bytes.split_at_mut(BLOCK / 2);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(block) {
        *low = (byte & 15).wrapping_add(bias);
        *high = (byte >> 4).wrapping_add(bias);
    }
    bytes
}

impl Panel {
    /// Unpacks the rows `part`; what lacks of sixteen holds anything, for products nobody reads.
    #[inline(always)]
    fn fill<Q>(&mut self, part: Range<usize>, quants: &[Q], unpack: impl Fn(&Q) -> [u8; BLOCK]) {
        let blocks = self.blocks.len();
        for (lane, row) in part.enumerate() {
            let quants = &quants[row * blocks..(row + 1) * blocks];
            for (panel, block) in self.blocks.iter_mut().zip(quants) {
                let bytes = unpack(block);
                for (words, word) in panel.0.iter_mut().zip(bytes.as_chunks::<WORD>().0) {
                    words[lane * WORD..][..WORD].copy_from_slice(word);
                }
            }
        }
    }

    /// Widens the scales of the rows `part`, one a block.
    #[inline(always)]
    fn fill_scales(&mut self, part: Range<usize>, scales: &[f16]) {
        let blocks = self.blocks.len();
        for (lane, row) in part.enumerate() {
            let scales = &scales[row * blocks..(row + 1) * blocks];
            for (of_panel, scale) in self.scales.iter_mut().zip(scales) {
                of_panel[lane] = scale.to_f32();
            }
        }
    }

    /// Widens the scales and minima of the row that lane `lane` is.
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

    /// The scales and, with `MINIMA`, the minima of block `block`.
    #[inline(always)]
    fn scales<S: Simd, const MINIMA: bool>(&self, simd: S, block: usize) -> [S::Lanes; 2] {
        let scales = simd.load_lanes(&self.scales[block]);
        match MINIMA {
            true => [scales, simd.load_lanes(&self.minima[block])],
            false => [scales; 2],
        }
    }
}

/// The running sums of all rows and the tokens of a tile.
#[inline(always)]
fn multiply_tile<S: Simd, const MINIMA: bool>(
    simd: S,
    panel: &Panel,
    tile: &[&[ActivationSpan]],
    sums: &mut Sums,
) {
    if let Ok(whole) = <&[&[ActivationSpan]; TOKENS]>::try_from(tile) {
        return multiply::<S, TOKENS, MINIMA>(simd, panel, whole, sums);
    }
    for (token, x) in tile.iter().enumerate() {
        multiply_one::<S, MINIMA>(simd, panel, x, token, sums);
    }
}

/// The running sums of all rows and `T` tokens.
#[inline(always)]
fn multiply<S: Simd, const T: usize, const MINIMA: bool>(
    simd: S,
    panel: &Panel,
    x: &[&[ActivationSpan]; T],
    sums: &mut Sums,
) {
    sums.0.as_flattened_mut().fill([0.0; ROWS]);
    for (span, blocks) in panel.blocks.chunks(SPAN).enumerate() {
        let x = x.map(|x| &x[span]);
        for (block, of_panel) in blocks.iter().enumerate() {
            let scales = panel.scales::<S, MINIMA>(simd, span * SPAN + block);
            let sums = &mut sums.0[block];
            for token in 0..T {
                let sum = simd.load_lanes(&sums[token]);
                let sum = add_block::<S, MINIMA>(simd, of_panel, scales, x[token], block, sum);
                simd.store_lanes(sum, &mut sums[token]);
            }
        }
    }
}

/// The running sums of all rows and one token, which is number `token` of its tile.
#[inline(always)]
fn multiply_one<S: Simd, const MINIMA: bool>(
    simd: S,
    panel: &Panel,
    x: &[ActivationSpan],
    token: usize,
    sums: &mut Sums,
) {
    for sums in &mut sums.0 {
        sums[token] = [0.0; ROWS];
    }
    for (span, (blocks, x)) in panel.blocks.chunks(SPAN).zip(x).enumerate() {
        for (block, of_panel) in blocks.iter().enumerate() {
            let scales = panel.scales::<S, MINIMA>(simd, span * SPAN + block);
            let sums = &mut sums.0[block][token];
            let sum = simd.load_lanes(sums);
            let sum = add_block::<S, MINIMA>(simd, of_panel, scales, x, block, sum);
            simd.store_lanes(sum, sums);
        }
    }
}

/// `sum` and the products of a block of all rows with block `block` of `x`.
#[inline(always)]
fn add_block<S: Simd, const MINIMA: bool>(
    simd: S,
    panel: &PanelBlock,
    [scales, minima]: [S::Lanes; 2],
    x: &ActivationSpan,
    block: usize,
    sum: S::Lanes,
) -> S::Lanes {
    let words = &x.quants.as_chunks::<WORD>().0[block * (BLOCK / WORD)..][..BLOCK / WORD];
    let mut products = simd.splat_whole(-S::PANEL_BIAS * x.sums[block]);
    for (panel, word) in panel.0.iter().zip(words) {
        let word = i32::from_le_bytes(word.map(|quant| quant as u8));
        products = simd.dot(products, simd.load_whole(panel), simd.splat_whole(word));
    }
    let products = simd.lanes_of(products);
    let x_scale = simd.splat_lanes(x.scales[block]);
    if MINIMA {
        let minima = simd.multiply_lanes(minima, simd.splat_lanes(x.sums[block] as f32));
        let products = simd.multiply_subtract_lanes(products, scales, minima);
        return simd.multiply_add_lanes(products, x_scale, sum);
    }
    simd.multiply_add_lanes(products, simd.multiply_lanes(scales, x_scale), sum)
}

/// The sums of token `token`, added up by halving.
#[inline(always)]
fn halved<S: Simd>(simd: S, sums: &Sums, token: usize) -> [f32; ROWS] {
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
