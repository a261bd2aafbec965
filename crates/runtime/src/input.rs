//! The right-hand sides of matrix products.

use powerinfer_kernels::{
    Arithmetic, Isa, PackedActivations, QuantisedActivations, QuantisedVector, relative_gemm_cost,
};
use powerinfer_tensor::Matrix;

use crate::Threads;

/// Number format of the vectors that matrices are multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ActivationFormat {
    /// 8-bit integers with a scale for every 32 values if weights are quantised; the coefficients of `down` in
    /// 4 bits are rounded to 8 bits of the largest of 128 rows. Float32 for other weights.
    #[default]
    Int8,
    /// Float32 for all weights: slower with quantised ones.
    F32,
}

impl ActivationFormat {
    /// Returns the name used in arguments and headers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::F32 => "f32",
        }
    }
}

/// Memory of an [`Input`], reused from one to the next.
#[derive(Debug, Default)]
pub(crate) struct InputBuffers {
    masked: Vec<f32>,
    rounded: QuantisedActivations,
    packed: PackedActivations,
}

/// The vectors that matrices are multiplied with, `[tokens, columns]`: in float32 and, once for all matrices of a
/// stage, rounded to 8 bits for quantised ones or packed for others.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a> {
    exact: &'a [f32],
    rounded: Option<&'a QuantisedActivations>,
    packed: Option<&'a PackedActivations>,
    columns: usize,
}

impl<'a> Input<'a> {
    /// The vectors of `columns` values in `x`, to be multiplied with `matrix` and others of its format.
    pub(crate) fn new(
        threads: &Threads,
        x: &'a [f32],
        columns: usize,
        matrix: &Matrix<'_>,
        buffers: &'a mut InputBuffers,
    ) -> Self {
        Self::sparse(threads, x, 0.0, columns, matrix, buffers)
    }

    /// As [`Input::new`], with 0 for values that are smaller than `threshold` in magnitude.
    pub(crate) fn sparse(
        threads: &Threads,
        x: &'a [f32],
        threshold: f32,
        columns: usize,
        matrix: &Matrix<'_>,
        buffers: &'a mut InputBuffers,
    ) -> Self {
        let InputBuffers {
            masked,
            rounded,
            packed,
        } = buffers;
        let exact = match threshold {
            0.0 => x,
            _ => {
                masked.clear();
                masked.extend(
                    x.iter()
                        .map(|x| if reaches(*x, threshold) { *x } else { 0.0 }),
                );
                masked
            }
        };
        let is_rounded = rounds(matrix, threads.activations());
        if is_rounded {
            threads.isa().quantise(exact, columns, rounded)
        } else {
            threads.isa().pack(exact, columns, packed)
        }
        Self {
            exact,
            rounded: is_rounded.then_some(&*rounded),
            packed: (!is_rounded).then_some(&*packed),
            columns,
        }
    }

    /// The vectors in float32, `[tokens, columns]`.
    pub(crate) fn exact(&self) -> &'a [f32] {
        self.exact
    }

    /// Whether the vectors are prepared for products with `matrix` too.
    pub(crate) fn suits(&self, matrix: &Matrix<'_>, activations: ActivationFormat) -> bool {
        self.columns == matrix.columns() && self.rounded.is_some() == rounds(matrix, activations)
    }

    /// The rounded vectors, if products with `matrix` use them.
    fn rounded(&self, matrix: &Matrix<'_>) -> Option<&'a QuantisedActivations> {
        self.rounded.filter(|_| matrix.format().is_quantised())
    }

    /// Vector `token`.
    pub(crate) fn vector(&self, token: usize) -> Vector<'a> {
        Vector {
            exact: &self.exact[token * self.columns..][..self.columns],
            rounded: self.rounded.map(|all| all.vector(token)),
        }
    }

    /// `out[t, r] = matrix[r] · x[t]`, on the calling thread.
    pub(crate) fn gemm(&self, isa: Isa, matrix: &Matrix<'_>, out: &mut [f32]) {
        match (self.rounded(matrix), self.packed) {
            (Some(x), _) => isa.gemm_integer(matrix, x, out),
            (None, Some(packed)) => isa.gemm_packed(matrix, self.exact, packed, out),
            (None, None) => isa.gemm(matrix, self.exact, self.tokens(), out),
        }
    }

    /// `out[i, r] = matrix[r] · x[tokens[i]]`, on the calling thread, for all vectors or, if they are rounded, some of them.
    pub(crate) fn gemm_of(&self, isa: Isa, matrix: &Matrix<'_>, tokens: &[u32], out: &mut [f32]) {
        match self.rounded(matrix) {
            Some(x) if tokens.len() < self.tokens() => {
                isa.gemm_integer_of(matrix, x, tokens, out);
            }
            _ => self.gemm(isa, matrix, out),
        }
    }

    /// Whether [`Self::gemm_of`] can multiply `matrix` with some of the vectors.
    pub(crate) fn can_choose(&self, matrix: &Matrix<'_>) -> bool {
        self.rounded(matrix).is_some()
    }

    /// Time of [`Self::gemm_of`] for `tokens` tokens relative to one GEMV after the other.
    pub(crate) fn relative_gemm_cost(&self, matrix: &Matrix<'_>, tokens: usize) -> f64 {
        let product = match self.rounded(matrix) {
            Some(_) => Arithmetic::Integer,
            None => Arithmetic::Float,
        };
        relative_gemm_cost(matrix.format(), tokens, product)
    }

    /// Number of vectors.
    pub(crate) fn tokens(&self) -> usize {
        self.exact.len() / self.columns
    }
}

/// Whether vectors are rounded for products with `matrix`.
fn rounds(matrix: &Matrix<'_>, activations: ActivationFormat) -> bool {
    matrix.format().is_quantised() && activations == ActivationFormat::Int8
}

/// Whether an input counts; NaN does, so that it propagates.
pub(crate) fn reaches(x: f32, threshold: f32) -> bool {
    x.abs() >= threshold || x.is_nan()
}

/// One vector of an [`Input`].
#[derive(Clone, Copy)]
pub(crate) struct Vector<'a> {
    exact: &'a [f32],
    rounded: Option<QuantisedVector<'a>>,
}

impl Vector<'_> {
    /// `out[i] = matrix[i] · x`, on the calling thread.
    pub(crate) fn gemv(&self, isa: Isa, matrix: &Matrix<'_>, out: &mut [f32]) {
        match self.rounded.filter(|_| matrix.format().is_quantised()) {
            Some(x) => isa.gemv_integer(matrix, x, out),
            None => isa.gemv(matrix, self.exact, out),
        }
    }

    /// `out[i] = matrix[rows[i]] · x`, on the calling thread.
    pub(crate) fn gemv_rows(&self, isa: Isa, matrix: &Matrix<'_>, rows: &[u32], out: &mut [f32]) {
        match self.rounded.filter(|_| matrix.format().is_quantised()) {
            Some(x) => isa.gemv_rows_integer(matrix, rows, x, out),
            None => isa.gemv_rows(matrix, rows, self.exact, out),
        }
    }
}
