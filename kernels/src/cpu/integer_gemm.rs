//! Products of quantised rows with many rounded vectors, in whole numbers but for the scales.
//!
//! Sixteen rows are unpacked to signed bytes, four columns of each side by side, so that a register
//! holds four columns of all sixteen and every lane is a row:
//!
//! ```text
//! for 16 rows:              panel    [block, 8 × 4 columns, row, 4]     scales [block, row]
//!   for 8 tokens:           sums     [block of a span, token, row]
//!     for every block:      a register of eight products a token, then one multiply-add
//! ```

use half::f16;

use super::{Operation, SPAN, Simd, scalar};
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
    blocks * (size_of::<PanelBlock>() + size_of::<[f32; ROWS]>()) + size_of::<Sums>()
}

/// A block of sixteen rows.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct PanelBlock([[u8; ROWS * WORD]; BLOCK / WORD]);

/// Running sums of a tile: one a block of a span, a token and a row.
#[repr(C, align(64))]
struct Sums([[[f32; ROWS]; TOKENS]; SPAN]);

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
        let mut panel = vec![PanelBlock([[0; ROWS * WORD]; BLOCK / WORD]); blocks];
        let mut scales = vec![[0.0; ROWS]; blocks];
        let mut sums = Box::new(Sums([[[0.0; ROWS]; TOKENS]; SPAN]));
        for first_row in (0..rows).step_by(ROWS) {
            let part = first_row..rows.min(first_row + ROWS);
            match matrix.data() {
                MatrixData::Q8_0 {
                    quants,
                    scales: all,
                } => {
                    let (quants, _) = quants.as_chunks::<BLOCK>();
                    let unpack =
                        |block: &[i8; BLOCK]| block.map(|quant| quant as u8 ^ S::PANEL_BIAS as u8);
                    fill(&mut panel, &mut scales, part.clone(), quants, all, unpack);
                }
                MatrixData::Q4_0 {
                    quants,
                    scales: all,
                } => {
                    let (quants, _) = quants.as_chunks::<{ BLOCK / 2 }>();
                    let unpack = |block: &[u8; BLOCK / 2]| {
                        let bias = (S::PANEL_BIAS as u8).wrapping_sub(8);
                        let mut bytes = [0; BLOCK];
                        let (low, high) = bytes.split_at_mut(BLOCK / 2);
                        for ((low, high), byte) in low.iter_mut().zip(high).zip(block) {
                            *low = (byte & 15).wrapping_add(bias);
                            *high = (byte >> 4).wrapping_add(bias);
                        }
                        bytes
                    };
                    fill(&mut panel, &mut scales, part.clone(), quants, all, unpack);
                }
                _ => unreachable!("only quantised weights are multiplied in whole numbers"),
            }
            for first_token in (0..x.tokens()).step_by(TOKENS) {
                let tokens = first_token..x.tokens().min(first_token + TOKENS);
                let mut tile = [x.token(first_token); TOKENS];
                for (token, tile) in tokens.clone().zip(&mut tile) {
                    *tile = x.token(token);
                }
                if tokens.len() == TOKENS {
                    multiply::<S, TOKENS>(simd, &panel, &scales, &tile, &mut sums);
                } else {
                    for (token, x) in tile[..tokens.len()].iter().enumerate() {
                        multiply_one(simd, &panel, &scales, x, token, &mut sums);
                    }
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

/// Unpacks the rows `part`; what lacks of sixteen holds anything, for products nobody reads.
#[inline(always)]
fn fill<Q>(
    panel: &mut [PanelBlock],
    panel_scales: &mut [[f32; ROWS]],
    part: std::ops::Range<usize>,
    quants: &[Q],
    scales: &[f16],
    unpack: impl Fn(&Q) -> [u8; BLOCK],
) {
    let blocks = panel.len();
    for (lane, row) in part.enumerate() {
        let row = row * blocks..(row + 1) * blocks;
        let (quants, scales) = (&quants[row.clone()], &scales[row]);
        let of_panel = panel.iter_mut().zip(panel_scales.iter_mut());
        for ((panel, panel_scales), (block, scale)) in of_panel.zip(quants.iter().zip(scales)) {
            panel_scales[lane] = scale.to_f32();
            let bytes = unpack(block);
            for (words, word) in panel.0.iter_mut().zip(bytes.as_chunks::<WORD>().0) {
                words[lane * WORD..][..WORD].copy_from_slice(word);
            }
        }
    }
}

/// The running sums of all rows and `T` tokens.
#[inline(always)]
fn multiply<S: Simd, const T: usize>(
    simd: S,
    panel: &[PanelBlock],
    scales: &[[f32; ROWS]],
    x: &[&[ActivationSpan]; T],
    sums: &mut Sums,
) {
    sums.0.as_flattened_mut().fill([0.0; ROWS]);
    let spans = panel.chunks(SPAN).zip(scales.chunks(SPAN));
    for (span, (panel, scales)) in spans.enumerate() {
        let x = x.map(|x| &x[span]);
        for (block, (panel, scales)) in panel.iter().zip(scales).enumerate() {
            let scales = simd.load_lanes(scales);
            let sums = &mut sums.0[block];
            for token in 0..T {
                let sum = simd.load_lanes(&sums[token]);
                let sum = add_block(simd, panel, scales, x[token], block, sum);
                simd.store_lanes(sum, &mut sums[token]);
            }
        }
    }
}

/// The running sums of all rows and one token, which is number `token` of its tile.
#[inline(always)]
fn multiply_one<S: Simd>(
    simd: S,
    panel: &[PanelBlock],
    scales: &[[f32; ROWS]],
    x: &[ActivationSpan],
    token: usize,
    sums: &mut Sums,
) {
    for sums in &mut sums.0 {
        sums[token] = [0.0; ROWS];
    }
    let spans = panel.chunks(SPAN).zip(scales.chunks(SPAN));
    for ((panel, scales), x) in spans.zip(x) {
        for (block, (panel, scales)) in panel.iter().zip(scales).enumerate() {
            let sums = &mut sums.0[block][token];
            let sum = add_block(
                simd,
                panel,
                simd.load_lanes(scales),
                x,
                block,
                simd.load_lanes(sums),
            );
            simd.store_lanes(sum, sums);
        }
    }
}

/// `sum` and the products of a block of all rows with block `block` of `x`.
#[inline(always)]
fn add_block<S: Simd>(
    simd: S,
    panel: &PanelBlock,
    scales: S::Lanes,
    x: &ActivationSpan,
    block: usize,
    sum: S::Lanes,
) -> S::Lanes {
    let words = &x.quants.as_chunks::<WORD>().0[block * (BLOCK / WORD)..][..BLOCK / WORD];
    let mut products = simd.splat_whole(-S::PANEL_BIAS * x.sums[block]);
    for (panel, word) in panel.0.iter().zip(words) {
        products = simd.dot_panel(products, panel, *word);
    }
    let scales = simd.multiply_lanes(scales, simd.splat_lanes(x.scales[block]));
    simd.multiply_add_lanes(simd.lanes_of(products), scales, sum)
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
