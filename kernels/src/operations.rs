//! The kernels as methods of an instruction set: shapes are checked here, once per call.

use std::ops::Range;

use crate::cpu::{
    Agreements, Axpy, AxpyRows, AxpyRowsBatch, Dot, Gemm, Gemv, IntegerAxpy, IntegerAxpyBatch,
    IntegerGemm, IntegerGemv, Quantise, Sum,
};
use crate::{Isa, QuantisedActivations, QuantisedVector};
use powerinfer_tensor::{BLOCK, Format};
use powerinfer_tensor::{Matrix, SignMatrix};

/// Every kernel panics when its slices do not fit each other. Rows are computed independently,
/// so threads may share them in any way; a sum has the same bits on every instruction set.
impl Isa {
    /// `out[i] = matrix[i] · x` for all rows.
    ///
    /// `x` holds `columns` numbers, `out` holds `rows`.
    pub fn gemv(&self, matrix: &Matrix<'_>, x: &[f32], out: &mut [f32]) {
        assert_eq!(x.len(), matrix.columns(), "one x per column");
        assert_eq!(out.len(), matrix.rows(), "one output per row");
        self.run(Gemv {
            matrix,
            rows: None,
            x,
            out,
        });
    }

    /// `out[i] = matrix[rows[i]] · x`; rows that are not listed are never read from memory.
    ///
    /// `x` holds `columns` numbers, `out` one per entry of `rows`. Rows may come in any order,
    /// and more than once; one that the matrix does not have is a panic.
    pub fn gemv_rows(&self, matrix: &Matrix<'_>, rows: &[u32], x: &[f32], out: &mut [f32]) {
        assert_eq!(x.len(), matrix.columns(), "one x per column");
        assert_eq!(out.len(), rows.len(), "one output per listed row");
        check_rows(matrix, rows);
        self.run(Gemv {
            matrix,
            rows: Some(rows),
            x,
            out,
        });
    }

    /// Rounds the vectors of `columns` numbers that `x` holds to bytes.
    ///
    /// Panics when `x` is no whole number of vectors.
    pub fn quantise(&self, x: &[f32], columns: usize, out: &mut QuantisedActivations) {
        assert_eq!(x.len() % columns.max(1), 0, "whole vectors of {columns}");
        self.run(Quantise { x, columns, out });
    }

    /// `out[i] = matrix[i] · x` for all rows of a quantised matrix.
    pub fn gemv_integer(&self, matrix: &Matrix<'_>, x: QuantisedVector<'_>, out: &mut [f32]) {
        assert_eq!(out.len(), matrix.rows(), "one output per row");
        check_integer(matrix, x.columns);
        self.run(IntegerGemv {
            matrix,
            rows: None,
            x: x.spans,
            out,
        });
    }

    /// `out[i] = matrix[rows[i]] · x` of a quantised matrix; rows that are not listed are never read
    /// from memory. Rows may come in any order, and more than once.
    pub fn gemv_rows_integer(
        &self,
        matrix: &Matrix<'_>,
        rows: &[u32],
        x: QuantisedVector<'_>,
        out: &mut [f32],
    ) {
        assert_eq!(out.len(), rows.len(), "one output per listed row");
        check_integer(matrix, x.columns);
        check_rows(matrix, rows);
        self.run(IntegerGemv {
            matrix,
            rows: Some(rows),
            x: x.spans,
            out,
        });
    }

    /// `out[c] += Σ_i coefficients[i] * matrix[rows[i], columns.start + c]`, adding the rows in
    /// the order of the list; rows that are not listed are never read from memory.
    ///
    /// `coefficients` holds one number per entry of `rows`, `out` one per column of the range.
    /// The range starts at a multiple of 32, so that threads can share the columns: the result
    /// of a column does not depend on the range. As long as the weights of a row are finite, its
    /// coefficient may be 0 instead of its being left out, up to the sign of a zero.
    pub fn axpy_rows(
        &self,
        matrix: &Matrix<'_>,
        rows: &[u32],
        coefficients: &[f32],
        columns: Range<usize>,
        out: &mut [f32],
    ) {
        assert_eq!(coefficients.len(), rows.len(), "one coefficient per row");
        assert_eq!(out.len(), columns.len(), "one output per column");
        check_sum(matrix, rows, &columns);
        self.run(AxpyRows {
            matrix,
            rows,
            coefficients,
            columns,
            out,
        });
    }

    /// `out[t, c] += Σ_i coefficients[t, i] * matrix[rows[i], columns.start + c]`, each token with the
    /// bits of [`Isa::axpy_rows`]: `coefficients` is `[tokens, rows]`, `out` `[tokens, columns]`.
    pub fn axpy_rows_batch(
        &self,
        matrix: &Matrix<'_>,
        rows: &[u32],
        coefficients: &[f32],
        columns: Range<usize>,
        out: &mut [f32],
    ) {
        check_sums(matrix, rows, coefficients, &columns, out);
        self.run(AxpyRowsBatch {
            matrix,
            rows,
            coefficients,
            columns,
            out,
        });
    }

    /// [`Isa::axpy_rows`] of a matrix of four-bit numbers in whole numbers: coefficients times scales are rounded to
    /// bytes of the largest one among those of 128 rows ([`AXPY_GROUP_ROWS`]; rows `128 k..128 (k + 1)` that
    /// follow one another in the list) in a block of columns.
    ///
    /// A sum with a NaN or an infinity is NaN. A row whose coefficient is 0 may be left out: the result
    /// is the same, up to the sign of a zero.
    pub fn axpy_rows_integer(
        &self,
        matrix: &Matrix<'_>,
        rows: &[u32],
        coefficients: &[f32],
        columns: Range<usize>,
        out: &mut [f32],
    ) {
        assert_eq!(coefficients.len(), rows.len(), "one coefficient per row");
        assert_eq!(out.len(), columns.len(), "one output per column");
        check_sum(matrix, rows, &columns);
        check_nibbles(matrix);
        self.run(IntegerAxpy {
            matrix,
            rows,
            coefficients,
            columns,
            out,
        });
    }

    /// [`Isa::axpy_rows_batch`] of a matrix of four-bit numbers, each token with the bits of
    /// [`Isa::axpy_rows_integer`].
    pub fn axpy_rows_batch_integer(
        &self,
        matrix: &Matrix<'_>,
        rows: &[u32],
        coefficients: &[f32],
        columns: Range<usize>,
        out: &mut [f32],
    ) {
        check_sums(matrix, rows, coefficients, &columns, out);
        check_nibbles(matrix);
        self.run(IntegerAxpyBatch {
            matrix,
            rows,
            coefficients,
            columns,
            out,
        });
    }

    /// `out[t, r] = matrix[r] · x[t]` for all rows and tokens, each with the bits of [`Isa::gemv`].
    ///
    /// `x` is `[tokens, columns]` and `out` is `[tokens, rows]`, both row-major.
    pub fn gemm(&self, matrix: &Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
        let expected = |length: usize| tokens.checked_mul(length);
        assert_eq!(
            Some(x.len()),
            expected(matrix.columns()),
            "tokens times columns of x"
        );
        assert_eq!(
            Some(out.len()),
            expected(matrix.rows()),
            "rows times tokens of output"
        );
        if tokens <= 1 || relative_gemm_cost(matrix.format(), tokens, Arithmetic::Float) >= 1.0 {
            let columns = matrix.columns();
            self.by_vector(matrix, tokens, out, |isa, rows, token, out| {
                isa.gemv(rows, &x[token * columns..][..columns], out);
            });
        } else if !out.is_empty() {
            self.run(Gemm {
                matrix,
                x,
                tokens,
                out,
            });
        }
    }

    /// `out[t, r] = matrix[r] · x[t]` for all rows of a quantised matrix and all vectors of `x`, each
    /// with the bits of [`Isa::gemv_integer`]; `out` is `[tokens, rows]`.
    pub fn gemm_integer(&self, matrix: &Matrix<'_>, x: &QuantisedActivations, out: &mut [f32]) {
        let expected = x.tokens().checked_mul(matrix.rows());
        assert_eq!(Some(out.len()), expected, "tokens times rows of output");
        check_integer(matrix, x.columns());
        if x.tokens() <= 1
            || relative_gemm_cost(matrix.format(), x.tokens(), Arithmetic::Integer) >= 1.0
        {
            self.by_vector(matrix, x.tokens(), out, |isa, rows, token, out| {
                isa.gemv_integer(rows, x.vector(token), out);
            });
        } else if !out.is_empty() {
            self.run(IntegerGemm { matrix, x, out });
        }
    }

    /// Calls `multiply` for a few rows, with one token after the other and its part of `out [tokens,
    /// rows]`: they stay in the cache meanwhile.
    fn by_vector(
        &self,
        matrix: &Matrix<'_>,
        tokens: usize,
        out: &mut [f32],
        multiply: impl Fn(&Self, &Matrix<'_>, usize, &mut [f32]),
    ) {
        let rows = matrix.rows();
        let at_once = (CACHED_BYTES / matrix.row_bytes().max(1)).max(8);
        for start in (0..rows).step_by(at_once) {
            let part = start..rows.min(start + at_once);
            let few = matrix.rows_range(part.clone());
            for token in 0..tokens {
                multiply(self, &few, token, &mut out[token * rows..][part.clone()]);
            }
        }
    }

    /// `a · b`, with the bits of [`Isa::gemv`] on one row of `f32`.
    pub fn dot(&self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len(), "vectors of one length");
        self.run(Dot { a, b })
    }

    /// `out[i]` = in how many columns row i of `signs` has the sign that `x` has, of [`pack_signs`](powerinfer_tensor::pack_signs).
    ///
    /// `x` holds the words of one row, `out` one number per row.
    pub fn sign_agreements(&self, signs: &SignMatrix<'_>, x: &[u64], out: &mut [u32]) {
        assert_eq!(x.len(), signs.row_words(), "one sign per column");
        assert_eq!(out.len(), signs.rows(), "one output per row");
        self.run(Agreements { signs, x, out });
    }

    /// The sum of all words, wrapping: plain loads, as fast as memory can be read in a stream.
    pub fn sum_words(&self, words: &[u64]) -> u64 {
        self.run(Sum { words })
    }

    /// `y += alpha * x`, each element rounded once.
    pub fn axpy(&self, alpha: f32, x: &[f32], y: &mut [f32]) {
        assert_eq!(x.len(), y.len(), "vectors of one length");
        self.run(Axpy { alpha, x, y });
    }
}

/// Rows whose factors [`Isa::axpy_rows_integer`] rounds together: lists that are cut between rows `AXPY_GROUP_ROWS
/// k - 1` and `AXPY_GROUP_ROWS k` have the same sums.
pub const AXPY_GROUP_ROWS: usize = 128;

/// Bytes of rows that stay in the second-level cache.
const CACHED_BYTES: usize = 256 << 10;

/// How numbers are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// Weights as they are stored, in floating point.
    Float,
    /// Quantised weights and rounded vectors, in whole numbers.
    Integer,
}

/// What products of rows with `tokens` vectors at once cost, as a multiple of those with one vector
/// after the other: below 1 from some number of vectors on, for rows are unpacked first.
///
/// In nanoseconds for 16 rows of 4096 columns, measured with AVX-512 on a Zen 4 core at 3.6 GHz:
///
/// ```text
///             unpacking   a tile of 8   a token beside   a token alone
/// Q4_0, integer    2600          3600              720             980
/// Q4_K, integer    4300          3450              620            1900
/// Q8_0, integer    3900          4100              880            1700
/// float            8000         11000             2000            3300
/// ```
pub fn relative_gemm_cost(format: Format, tokens: usize, product: Arithmetic) -> f64 {
    let [unpacking, tile, beside, alone] = match (product, format) {
        (Arithmetic::Integer, Format::Q4_0) => [2600.0, 3600.0, 720.0, 980.0],
        (Arithmetic::Integer, Format::Q4K) => [4300.0, 3450.0, 620.0, 1900.0],
        (Arithmetic::Integer, _) => [3900.0, 4100.0, 880.0, 1700.0],
        (Arithmetic::Float, _) => [8000.0, 11000.0, 2000.0, 3300.0],
    };
    let (tiles, rest) = ((tokens / 8) as f64, (tokens % 8) as f64);
    (unpacking + tiles * tile + rest * beside) / (alone * tokens as f64).max(1.0)
}

/// What sums of rows for `tokens` tokens at once cost, those that a token lacks times 0, as a multiple of
/// one token after the other that all have all rows.
///
/// In nanoseconds for a row of 4096 columns, measured like [`relative_gemm_cost`]:
///
/// ```text
///                 unpacking   a tile of 6 tokens   a token beside   a token alone
/// Q4_0, integer         150                                    52             110
/// Q4_K, integer         390                                    60             170
/// Q4_0, float           500                  470                              200
/// Q4_K, float           500                  510                              330
/// others                400                  530                              250
/// ```
pub fn relative_axpy_cost(format: Format, tokens: usize, product: Arithmetic) -> f64 {
    let tiles = tokens.div_ceil(6) as f64;
    let [unpacking, beside, alone] = match (product, format) {
        (Arithmetic::Integer, Format::Q4_0) => [150.0, 52.0 * tokens as f64, 110.0],
        (Arithmetic::Integer, _) => [390.0, 60.0 * tokens as f64, 170.0],
        (Arithmetic::Float, Format::Q4_0) => [500.0, 470.0 * tiles, 200.0],
        (Arithmetic::Float, Format::Q4K) => [500.0, 510.0 * tiles, 330.0],
        (Arithmetic::Float, _) => [400.0, 530.0 * tiles, 250.0],
    };
    (unpacking + beside) / (alone * tokens as f64).max(1.0)
}

fn check_sum(matrix: &Matrix<'_>, rows: &[u32], columns: &Range<usize>) {
    assert!(
        columns.start <= columns.end && columns.end <= matrix.columns(),
        "columns {columns:?} of a matrix of {}",
        matrix.columns()
    );
    assert_eq!(columns.start % BLOCK, 0, "columns start with a block");
    check_rows(matrix, rows);
}

fn check_sums(
    matrix: &Matrix<'_>,
    rows: &[u32],
    coefficients: &[f32],
    columns: &Range<usize>,
    out: &[f32],
) {
    check_sum(matrix, rows, columns);
    assert_eq!(
        coefficients.len().checked_mul(columns.len()),
        out.len().checked_mul(rows.len()),
        "as many tokens in both"
    );
}

fn check_nibbles(matrix: &Matrix<'_>) {
    let format = matrix.format();
    assert!(format.has_nibbles(), "{format} has no four-bit numbers");
}

fn check_integer(matrix: &Matrix<'_>, columns: usize) {
    let format = matrix.format();
    assert!(format.is_quantised(), "{format} is not quantised");
    assert_eq!(columns, matrix.columns(), "one x per column");
}

fn check_rows(matrix: &Matrix<'_>, rows: &[u32]) {
    if let Some(row) = rows.iter().find(|&&row| row as usize >= matrix.rows()) {
        panic!("row {row} of a matrix of {}", matrix.rows());
    }
}
