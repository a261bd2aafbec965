//! Axpy over listed rows of four-bit weights with integer arithmetic, over a range of columns. For int8 weights it does not
//! pay: they are bound by memory even with float arithmetic.
//!
//! The factors of a group of rows, coefficients times scales, are quantised to int8 per block of columns. Four rows are
//! interleaved, so that the four bytes of a column are adjacent, as integer dot product instructions need them:
//!
//! ```text
//! for a group of rows:                 factors  [row / 4, block] of four bytes each
//!   one token:  for 4 rows:            for 64 bytes of each row:   c0a c0b c0c c0d · ka kb kc kd, c1a c1b …
//!   a batch:    for 64 bytes per row:  for 4 rows, unpack; for every token, for 4 rows, multiply
//! ```

mod batch;
pub(super) mod line;
mod token;

use std::ops::Range;

use powerinfer_tensor::{BLOCK, Matrix, MatrixData};

use self::{batch::axpy_tokens, line::Unpacked, token::axpy_token};
use super::{
    Operation, SPAN, Simd,
    rows::{KWeights, NibbleRow, Quantised, Scales, Weights},
    scalar,
};
use crate::AXPY_GROUP_ROWS;

/// Rows per quantisation group, by row index, so that omitting rows with a coefficient of 0 does not change the grouping.
const GROUP_ROWS: usize = AXPY_GROUP_ROWS;
/// Interleaved rows.
const ROWS: usize = 4;
/// Prefetch distance in listed rows.
const PREFETCH_ROWS: usize = 16;
/// Blocks per line.
const LINE_BLOCKS: usize = 4;
/// Registers of the unpacked quants of four lines.
const REGISTERS: usize = 8;
/// Columns per line.
const LINE_COLUMNS: usize = LINE_BLOCKS * BLOCK;
/// Words per register.
const WORDS: usize = super::reader::LINE / 4;

/// `out[c] += Σ_i coefficients[i] * matrix[rows[i], columns.start + c]`.
pub(crate) struct IntegerAxpy<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) rows: &'a [u32],
    pub(crate) coefficients: &'a [f32],
    /// Rows that are read afterwards, which are prefetched.
    pub(crate) next: &'a [u32],
    pub(crate) columns: Range<usize>,
    pub(crate) out: &'a mut [f32],
}

/// `sums[t, c] += Σ_i coefficients[t, i] * matrix[rows[i], columns.start + c]`; when a part ends, its sum is moved to `out`.
pub(crate) struct IntegerAxpyBatch<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) rows: &'a [u32],
    /// `[tokens, rows]`.
    pub(crate) coefficients: &'a [f32],
    pub(crate) columns: Range<usize>,
    /// Whether a token's part ends with a group of rows, `[groups, tokens]`.
    pub(crate) ends: &'a [bool],
    /// `[tokens, columns]`.
    pub(crate) sums: &'a mut [f32],
    /// `[tokens, columns]`.
    pub(crate) out: &'a mut [f32],
}

/// Scratch memory in bytes for at most `columns` columns.
pub(super) const fn bytes(columns: usize) -> usize {
    let spans = columns.div_ceil(BLOCK * SPAN);
    GROUP_ROWS * (spans * size_of::<Scales>() + size_of::<Unpacked>() / ROWS)
}

/// Splits a list of rows where the group changes, or after as many entries as a group has rows if some are repeated.
fn groups(rows: &[u32]) -> impl Iterator<Item = Range<usize>> {
    let group = |row: &u32| *row as usize / GROUP_ROWS;
    let mut start = 0;
    rows.chunk_by(move |a, b| group(a) == group(b))
        .flat_map(|rows| rows.chunks(GROUP_ROWS))
        .map(move |rows| {
            start += rows.len();
            start - rows.len()..start
        })
}

/// Runs `$body` with `$weights` bound to the [`Weights`] of a four-bit `$matrix`, once per format.
macro_rules! with_nibble_weights {
    ($matrix:expr, $weights:ident => $body:expr) => {{
        let columns = $matrix.columns();
        match $matrix.data() {
            MatrixData::Q4K {
                quants,
                scales,
                factors,
            } => {
                let $weights = KWeights::new(quants, scales, factors, columns);
                $body
            }
            MatrixData::Q4_0 { quants, scales } => {
                let $weights = Quantised::<[u8; BLOCK / 2]>::new(quants, scales, columns);
                $body
            }
            _ => unreachable!("integer axpy needs quad-bit weights"),
        }
    }};
}

impl Operation for IntegerAxpy<'_> {
    type Output = ();

    fn run_scalar(self) {
        for group in groups(self.rows) {
            let (rows, coefficients) = (&self.rows[group.clone()], &self.coefficients[group]);
            let first_block = self.columns.start / BLOCK;
            scalar::integer_axpy(self.matrix, rows, coefficients, first_block, self.out);
        }
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        let columns = self.columns;
        with_nibble_weights!(self.matrix, weights => {
            let part = Columns { weights, columns };
            axpy_token(simd, part, self.rows, self.coefficients, self.next, self.out);
        });
    }
}

impl Operation for IntegerAxpyBatch<'_> {
    type Output = ();

    fn run_scalar(self) {
        let width = self.columns.len().max(1);
        let tokens = self.coefficients.chunks_exact(self.rows.len().max(1));
        let sums = self
            .sums
            .chunks_exact_mut(width)
            .zip(self.out.chunks_exact_mut(width));
        let count = sums.len();
        for (token, (coefficients, (sum, out))) in tokens.zip(sums).enumerate() {
            for (index, group) in groups(self.rows).enumerate() {
                IntegerAxpy {
                    matrix: self.matrix,
                    rows: &self.rows[group.clone()],
                    coefficients: &coefficients[group],
                    next: &[],
                    columns: self.columns.clone(),
                    out: sum,
                }
                .run_scalar();
                if self.ends[index * count + token] {
                    end_part(sum, out);
                }
            }
        }
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) {
        let columns = self.columns;
        if self.sums.is_empty() || self.rows.is_empty() {
            return;
        }
        with_nibble_weights!(self.matrix, weights => {
            let part = Columns { weights, columns };
            axpy_tokens(simd, part, self.rows, self.coefficients, self.ends, self.sums, self.out);
        });
    }
}

/// Adds the sum of a part to `out` and resets it to 0.
#[inline(always)]
fn end_part(sum: &mut [f32], out: &mut [f32]) {
    for (out, sum) in out.iter_mut().zip(sum) {
        *out += std::mem::take(sum);
    }
}

/// A range of columns of a matrix.
struct Columns<W> {
    weights: W,
    columns: Range<usize>,
}

impl<W: Weights<Row: NibbleRow>> Columns<W> {
    #[inline(always)]
    fn row(&self, index: u32) -> W::Row {
        self.weights.row(index as usize, self.columns.clone())
    }
}
