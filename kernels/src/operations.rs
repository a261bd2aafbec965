//! GEMV, GEMM, axpy and related kernels as methods of an instruction set, which check shapes once per call.

use std::ops::Range;

use crate::cpu::{
    Axpy, AxpyRows, AxpyRowsBatch, Dot, Gemm, Gemv, IntegerAxpy, IntegerAxpyBatch, IntegerGemm,
    IntegerGemv, Normalise, Pack, Quantise, SignAgreements, SumRows, SumWords, UnitSums,
};
use crate::{Isa, PackedActivations, QuantisedActivations, QuantisedVector};
use powerinfer_tensor::{BLOCK, Format, Matrix, NormKind, SignMatrix};

/// LayerNorm or RMSNorm of vectors that are as long as `weight`.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// LayerNorm, which subtracts the mean, or RMSNorm, which does not.
    pub kind: NormKind,
    /// Value added to the variance (LayerNorm) or the mean square (RMSNorm).
    pub epsilon: f32,
    /// One factor per value.
    pub weight: &'a [f32],
    /// One summand per value, added at the end.
    pub bias: Option<&'a [f32]>,
}

/// Rows are computed independently, so that threads may share them in any way. Results have the same bits on every
/// instruction set.
impl Isa {
    /// GEMV: `out[i] = matrix[i] · x` for all rows.
    ///
    /// `x` is `[columns]`, `out` is `[rows]`.
    ///
    /// # Panics
    ///
    /// A shape does not match.
    pub fn gemv(&self, matrix: &Matrix<'_>, x: &[f32], out: &mut [f32]) {
        assert_eq!(x.len(), matrix.columns(), "one x per column");
        assert_eq!(out.len(), matrix.rows(), "one output per row");
        self.run(Gemv {
            matrix,
            rows: None,
            x,
            tokens: 1,
            out,
        });
    }

    /// GEMV over listed rows: `out[i] = matrix[rows[i]] · x`; other rows are never read from memory.
    ///
    /// `x` is `[columns]`, `out` has the length of `rows`. Rows may be in any order and repeated.
    ///
    /// # Panics
    ///
    /// A shape does not match, or a row does not exist.
    pub fn gemv_rows(&self, matrix: &Matrix<'_>, rows: &[u32], x: &[f32], out: &mut [f32]) {
        assert_eq!(x.len(), matrix.columns(), "one x per column");
        assert_eq!(out.len(), rows.len(), "one output per listed row");
        check_rows(matrix, rows);
        self.run(Gemv {
            matrix,
            rows: Some(rows),
            x,
            tokens: 1,
            out,
        });
    }

    /// Quantises `x`, `[tokens, columns]`, to int8.
    ///
    /// # Panics
    ///
    /// The length of `x` is not a multiple of `columns`.
    pub fn quantise(&self, x: &[f32], columns: usize, out: &mut QuantisedActivations) {
        assert_eq!(x.len() % columns.max(1), 0, "whole vectors of {columns}");
        self.run(Quantise { x, columns, out });
    }

    /// Normalises each vector of `x`, `[vectors, size]`, in place. The weight of `norm` has `size` values.
    ///
    /// # Panics
    ///
    /// A length does not match.
    pub fn normalise(&self, norm: Norm<'_>, x: &mut [f32]) {
        let size = norm.weight.len();
        assert_eq!(x.len() % size.max(1), 0, "whole vectors of {size}");
        let bias = norm.bias.map_or(size, <[f32]>::len);
        assert_eq!(bias, size, "one bias per weight");
        self.run(Normalise { norm, x });
    }

    /// [`Isa::gemv`] of a quantised matrix with an int8 vector.
    ///
    /// # Panics
    ///
    /// A shape does not match, or the matrix is not quantised.
    pub fn gemv_integer(&self, matrix: &Matrix<'_>, x: QuantisedVector<'_>, out: &mut [f32]) {
        assert_eq!(out.len(), matrix.rows(), "one output per row");
        check_integer(matrix, x.columns);
        self.run(IntegerGemv {
            matrix,
            rows: None,
            x: x.into(),
            out,
        });
    }

    /// [`Isa::gemv_rows`] of a quantised matrix with an int8 vector.
    ///
    /// # Panics
    ///
    /// A shape does not match, a row does not exist, or the matrix is not quantised.
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
            x: x.into(),
            out,
        });
    }

    /// Axpy over listed rows: `out[c] += Σ_i coefficients[i] * matrix[rows[i], columns.start + c]`, in the order of the list;
    /// other rows are never read from memory.
    ///
    /// `coefficients` has the length of `rows`, `out` that of `columns`. The range starts at a multiple of 32; the result of
    /// a column does not depend on the range, so that threads can share the columns. Omitting a row with finite weights is
    /// equivalent to a coefficient of 0, up to the sign of a zero.
    ///
    /// # Panics
    ///
    /// A shape does not match, a row does not exist, or the range does not start with a block.
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
        check_axpy(matrix, rows, &columns);
        self.run(AxpyRows {
            matrix,
            rows,
            coefficients,
            columns,
            out,
        });
    }

    /// [`Isa::axpy_rows`] for several tokens, with the same bits per token:
    /// `out[t, c] += Σ_i coefficients[t, i] * matrix[rows[i], columns.start + c]`.
    ///
    /// `coefficients` is `[tokens, rows]`, `out` is `[tokens, columns]`.
    ///
    /// # Panics
    ///
    /// As [`Isa::axpy_rows`].
    pub fn axpy_rows_batch(
        &self,
        matrix: &Matrix<'_>,
        rows: &[u32],
        coefficients: &[f32],
        columns: Range<usize>,
        out: &mut [f32],
    ) {
        check_axpy_batch(matrix, rows, coefficients, &columns, out);
        self.run(AxpyRowsBatch {
            matrix,
            rows,
            coefficients,
            columns,
            out,
        });
    }

    /// [`Isa::axpy_rows`] of a matrix of four-bit weights with integer arithmetic.
    ///
    /// Coefficients times block scales are quantised to int8, relative to the largest one in a block of columns among the
    /// consecutive entries of the list from one group of [`AXPY_GROUP_ROWS`] rows. A result with a NaN or an infinity is
    /// NaN. Omitting a row is equivalent to a coefficient of 0, up to the sign of a zero.
    ///
    /// `next` are the rows that the caller reads afterwards: the first ones are prefetched.
    ///
    /// # Panics
    ///
    /// As [`Isa::axpy_rows`], or the weights do not have four bits.
    pub fn axpy_rows_integer(
        &self,
        matrix: &Matrix<'_>,
        rows: &[u32],
        coefficients: &[f32],
        next: &[u32],
        columns: Range<usize>,
        out: &mut [f32],
    ) {
        assert_eq!(coefficients.len(), rows.len(), "one coefficient per row");
        assert_eq!(out.len(), columns.len(), "one output per column");
        check_axpy(matrix, rows, &columns);
        check_axpy(matrix, next, &columns);
        check_nibbles(matrix);
        self.run(IntegerAxpy {
            matrix,
            rows,
            coefficients,
            next,
            columns,
            out,
        });
    }

    /// Adds the weights of a predictor's active hidden units to logits, in whole numbers: `out[c] += scale * scales[c] * Σ_i
    /// values[i] * units[rows[i], columns.start + c]`, of the numbers of `units` without their scales. `next` are the rows that
    /// the caller reads afterwards, which are prefetched: line by line, or without `rows` at once.
    ///
    /// # Panics
    ///
    /// `units` is neither of [`Format::Q8_0`] nor of [`Format::Q4_0`], there are more than 32 rows, a value exceeds 127, a row or
    /// a column does not exist, `columns` does not start at a multiple of 32, or lengths differ.
    #[expect(
        clippy::too_many_arguments,
        reason = "a sum of products of three factors"
    )]
    pub fn add_units(
        &self,
        units: &Matrix<'_>,
        rows: &[u32],
        values: &[u8],
        next: &[u32],
        columns: Range<usize>,
        scale: f32,
        scales: &[f32],
        out: &mut [f32],
    ) {
        let format = units.format();
        assert!(
            matches!(format, Format::Q8_0 | Format::Q4_0),
            "units in {format}"
        );
        assert!(rows.len() <= BLOCK, "{} rows", rows.len());
        assert_eq!(values.len(), rows.len(), "one value per row");
        assert!(values.iter().all(|value| *value <= 127), "values of 7 bits");
        assert_eq!(out.len(), columns.len(), "one output per column");
        assert_eq!(scales.len(), columns.len(), "one scale per column");
        check_axpy(units, rows, &columns);
        check_axpy(units, next, &columns);
        self.run(UnitSums {
            units,
            rows,
            values,
            next,
            columns,
            scale,
            scales,
            out,
        });
    }

    /// [`Isa::axpy_rows_integer`] for several tokens, with the same bits per token, into `sums`; shapes as [`Isa::axpy_rows_batch`].
    ///
    /// If an entry of `ends [groups, tokens]` is true, the token's sum is added to its row of `out [tokens, columns]` after that group and
    /// starts again from 0. A group consists of the consecutive entries of `rows` that are in the same [`AXPY_GROUP_ROWS`] rows of
    /// the matrix.
    ///
    /// # Panics
    ///
    /// As [`Isa::axpy_rows_integer`]. Also panics if a group has more than [`AXPY_GROUP_ROWS`] entries or `ends` has another length.
    #[expect(clippy::too_many_arguments, reason = "two levels of sums")]
    pub fn axpy_rows_batch_integer(
        &self,
        matrix: &Matrix<'_>,
        rows: &[u32],
        coefficients: &[f32],
        columns: Range<usize>,
        ends: &[bool],
        sums: &mut [f32],
        out: &mut [f32],
    ) {
        check_axpy_batch(matrix, rows, coefficients, &columns, sums);
        check_nibbles(matrix);
        assert_eq!(out.len(), sums.len(), "as many tokens in both sums");
        let group = |row: &u32| *row as usize / AXPY_GROUP_ROWS;
        let mut groups = 0;
        for group in rows.chunk_by(|a, b| group(a) == group(b)) {
            assert!(
                group.len() <= AXPY_GROUP_ROWS,
                "rows of a group are distinct"
            );
            groups += 1;
        }
        let tokens = sums.len() / columns.len().max(1);
        assert_eq!(ends.len(), groups * tokens, "one end per group and token");
        self.run(IntegerAxpyBatch {
            matrix,
            rows,
            coefficients,
            columns,
            ends,
            sums,
            out,
        });
    }

    /// GEMM: `out[t, r] = matrix[r] · x[t]`, with the bits of [`Isa::gemv`] per token.
    ///
    /// `x` is `[tokens, columns]`, `out` is `[tokens, rows]`.
    ///
    /// # Panics
    ///
    /// A shape does not match.
    pub fn gemm(&self, matrix: &Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
        check_gemm(matrix, x, tokens, out);
        if !out.is_empty() {
            self.run(Gemm {
                matrix,
                x,
                packed: None,
                tokens,
                out,
            });
        }
    }

    /// Packs `x`, `[tokens, columns]`, for [`Isa::gemm_packed`].
    ///
    /// # Panics
    ///
    /// The length of `x` is not a multiple of `columns`.
    pub fn pack(&self, x: &[f32], columns: usize, out: &mut PackedActivations) {
        assert_eq!(x.len() % columns.max(1), 0, "whole vectors of {columns}");
        *out = PackedActivations {
            tokens: x.len() / columns.max(1),
            columns,
            lanes: 0,
            lines: std::mem::take(&mut out.lines),
        };
        self.run(Pack { x, columns, out });
    }

    /// [`Isa::gemm`] of `x`, which [`Isa::pack`] has packed: for several calls with the same vectors.
    ///
    /// # Panics
    ///
    /// A shape does not match, or `x` was packed for another instruction set.
    pub fn gemm_packed(
        &self,
        matrix: &Matrix<'_>,
        x: &[f32],
        packed: &PackedActivations,
        out: &mut [f32],
    ) {
        let tokens = packed.tokens;
        check_gemm(matrix, x, tokens, out);
        assert_eq!(packed.columns, matrix.columns(), "one x per column");
        if !out.is_empty() {
            self.run(Gemm {
                matrix,
                x,
                packed: Some(packed),
                tokens,
                out,
            });
        }
    }

    /// [`Isa::gemm`] of a quantised matrix with int8 vectors, with the bits of [`Isa::gemv_integer`] per token.
    ///
    /// `out` is `[tokens, rows]`.
    ///
    /// # Panics
    ///
    /// A shape does not match, or the matrix is not quantised.
    pub fn gemm_integer(&self, matrix: &Matrix<'_>, x: &QuantisedActivations, out: &mut [f32]) {
        self.multiply_integer(matrix, x, None, out);
    }

    /// [`Isa::gemm_integer`] of the vectors `tokens` of `x`, in this order.
    ///
    /// # Panics
    ///
    /// A shape does not match, a token does not exist, or the matrix is not quantised.
    pub fn gemm_integer_of(
        &self,
        matrix: &Matrix<'_>,
        x: &QuantisedActivations,
        tokens: &[u32],
        out: &mut [f32],
    ) {
        let exist = tokens.iter().all(|token| (*token as usize) < x.tokens());
        assert!(exist, "tokens of the vectors");
        self.multiply_integer(matrix, x, Some(tokens), out);
    }

    fn multiply_integer(
        &self,
        matrix: &Matrix<'_>,
        x: &QuantisedActivations,
        tokens: Option<&[u32]>,
        out: &mut [f32],
    ) {
        check_integer(matrix, x.columns());
        let x = x.vectors(tokens);
        let expected = x.count.checked_mul(matrix.rows());
        assert_eq!(Some(out.len()), expected, "tokens times rows of output");
        if !out.is_empty() {
            self.run(IntegerGemm { matrix, x, out });
        }
    }

    /// Dot product of `a` and `b`, with the bits of [`Isa::gemv`] on a row of `f32`.
    ///
    /// # Panics
    ///
    /// The lengths differ.
    pub fn dot(&self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len(), "vectors of one length");
        self.run(Dot { a, b })
    }

    /// `out[i]` = number of columns in which row i of `signs` has the sign of `x`.
    ///
    /// `x` is one row of words from [`pack_signs`](powerinfer_tensor::pack_signs), `out` is `[rows]`.
    ///
    /// # Panics
    ///
    /// A shape does not match.
    pub fn sign_agreements(&self, signs: &SignMatrix<'_>, x: &[u64], out: &mut [u32]) {
        assert_eq!(x.len(), signs.row_words(), "one sign per column");
        assert_eq!(out.len(), signs.rows(), "one output per row");
        self.run(SignAgreements { signs, x, out });
    }

    /// Wrapping sum of all words, at the read bandwidth of a stream.
    pub fn sum_words(&self, words: &[u64]) -> u64 {
        self.run(SumWords { words })
    }

    /// Wrapping sum of all words of `rows`, row `r` being `words[r * row_words..][..row_words]`, with `lines_ahead` cache lines
    /// in flight across rows: at the read bandwidth of scattered rows.
    ///
    /// # Panics
    ///
    /// A row is outside `words`.
    pub fn sum_rows(
        &self,
        words: &[u64],
        row_words: usize,
        rows: &[u32],
        lines_ahead: usize,
    ) -> u64 {
        self.run(SumRows {
            words,
            row_words,
            rows,
            lines_ahead,
        })
    }

    /// Axpy: `y += alpha * x`, with fused multiply-adds.
    ///
    /// # Panics
    ///
    /// The lengths differ.
    pub fn axpy(&self, alpha: f32, x: &[f32], y: &mut [f32]) {
        assert_eq!(x.len(), y.len(), "vectors of one length");
        self.run(Axpy { alpha, x, y });
    }
}

/// Rows per quantisation group of [`Isa::axpy_rows_integer`]: group `k` holds rows `k * AXPY_GROUP_ROWS` up to the next
/// group. Splitting a list between groups does not change the result.
pub const AXPY_GROUP_ROWS: usize = 128;

/// Arithmetic of dot products and axpys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// Weights are dequantised and multiplied in `f32`.
    Float,
    /// Quantised weights are multiplied with int8 inputs in integers.
    Integer,
}

/// Cost of a GEMM with `tokens` tokens, relative to one GEMV per token: up to four tokens share the unpacking of each row, many
/// that of a panel of rows.
///
/// The model's constants: the share of a GEMV that is unpacking; for panels, nanoseconds for 16 rows of 4096 columns, measured
/// with AVX-512 on a Zen 4 core at 3.6 GHz:
///
/// ```text
///               share of   panel:
///              unpacking   unpacking   tile of 8 tokens   further token   GEMV
/// Q4_0, integer      0.6        2600               3600             720    980
/// Q4_K, integer      0.6        4300               3450             620   1900
/// Q8_0, integer      0.5        3900               4100             880   1700
/// float              0.4        8000              11000            2000   3300
/// ```
pub fn relative_gemm_cost(format: Format, tokens: usize, arithmetic: Arithmetic) -> f64 {
    let panel_tokens = match arithmetic {
        Arithmetic::Integer => IntegerGemm::PANEL_TOKENS,
        Arithmetic::Float => Gemm::PANEL_TOKENS,
    };
    let (share, [unpacking, tile, token, gemv]) = match (arithmetic, format) {
        (Arithmetic::Integer, Format::Q4_0) => (0.6, [2600.0, 3600.0, 720.0, 980.0]),
        (Arithmetic::Integer, Format::Q4K) => (0.6, [4300.0, 3450.0, 620.0, 1900.0]),
        (Arithmetic::Integer, _) => (0.5, [3900.0, 4100.0, 880.0, 1700.0]),
        (Arithmetic::Float, _) => (0.4, [8000.0, 11000.0, 2000.0, 3300.0]),
    };
    if tokens < panel_tokens {
        return share / tokens.clamp(1, 4) as f64 + (1.0 - share);
    }
    let (tiles, rest) = ((tokens / 8) as f64, (tokens % 8) as f64);
    (unpacking + tiles * tile + rest * token) / (gemv * tokens as f64)
}

/// Cost of a batched axpy over the union of the tokens' rows, relative to one axpy per token over the same rows.
///
/// The model's constants, in nanoseconds for a row of 4096 columns, measured as for [`relative_gemm_cost`]:
///
/// ```text
///                 unpacking   tile of 6 tokens   further token   axpy
/// Q4_0, integer         150                                 52    110
/// Q4_K, integer         390                                 60    170
/// Q4_0, float           500                470                    200
/// Q4_K, float           500                510                    330
/// others                400                530                    250
/// ```
pub fn relative_axpy_cost(format: Format, tokens: usize, arithmetic: Arithmetic) -> f64 {
    let tiles = tokens.div_ceil(6) as f64;
    let [unpacking, batch, axpy] = match (arithmetic, format) {
        (Arithmetic::Integer, Format::Q4_0) => [150.0, 52.0 * tokens as f64, 110.0],
        (Arithmetic::Integer, _) => [390.0, 60.0 * tokens as f64, 170.0],
        (Arithmetic::Float, Format::Q4_0) => [500.0, 470.0 * tiles, 200.0],
        (Arithmetic::Float, Format::Q4K) => [500.0, 510.0 * tiles, 330.0],
        (Arithmetic::Float, _) => [400.0, 530.0 * tiles, 250.0],
    };
    (unpacking + batch) / (axpy * tokens as f64).max(1.0)
}

fn check_axpy(matrix: &Matrix<'_>, rows: &[u32], columns: &Range<usize>) {
    assert!(
        columns.start <= columns.end && columns.end <= matrix.columns(),
        "columns {columns:?} of a matrix of {}",
        matrix.columns()
    );
    assert_eq!(columns.start % BLOCK, 0, "columns start with a block");
    check_rows(matrix, rows);
}

fn check_axpy_batch(
    matrix: &Matrix<'_>,
    rows: &[u32],
    coefficients: &[f32],
    columns: &Range<usize>,
    out: &[f32],
) {
    check_axpy(matrix, rows, columns);
    assert_eq!(
        coefficients.len().checked_mul(columns.len()),
        out.len().checked_mul(rows.len()),
        "as many tokens in both"
    );
}

fn check_nibbles(matrix: &Matrix<'_>) {
    let format = matrix.format();
    assert!(format.has_nibbles(), "{format} is not a four-bit format");
}

fn check_integer(matrix: &Matrix<'_>, columns: usize) {
    let format = matrix.format();
    assert!(format.is_quantised(), "{format} is not quantised");
    assert_eq!(columns, matrix.columns(), "one x per column");
}

/// Checks the shapes of a GEMM.
fn check_gemm(matrix: &Matrix<'_>, x: &[f32], tokens: usize, out: &[f32]) {
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
}

fn check_rows(matrix: &Matrix<'_>, rows: &[u32]) {
    if let Some(row) = rows.iter().find(|&&row| row as usize >= matrix.rows()) {
        panic!("row {row} of a matrix of {}", matrix.rows());
    }
}
