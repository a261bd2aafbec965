//! What matrices are multiplied with.

use std::borrow::Cow;

use powerinfer_kernels::{
    Arithmetic, Isa, QuantisedActivations, QuantisedVector, relative_gemm_cost,
};
use powerinfer_tensor::Matrix;

use crate::Threads;

/// How the numbers are stored that matrices are multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ActivationFormat {
    /// For quantised weights bytes with a scale for every 32, and bytes of the largest of 128 rows, scales
    /// included, where rows of four-bit weights are added up; as they are for others.
    #[default]
    Int8,
    /// As they are: slower with quantised weights, and as exact as these.
    F32,
}

/// Some vectors: as they are and, for quantised matrices, rounded to bytes, once for all matrices of
/// a stage.
pub(crate) struct Input<'a> {
    exact: Cow<'a, [f32]>,
    rounded: Option<QuantisedActivations>,
    columns: usize,
}

impl<'a> Input<'a> {
    /// The vectors of `columns` numbers in `x`, to be multiplied with `matrix` and others of its format.
    pub(crate) fn new(
        threads: &Threads,
        x: impl Into<Cow<'a, [f32]>>,
        columns: usize,
        matrix: &Matrix<'_>,
    ) -> Self {
        let exact = x.into();
        let is_rounded =
            matrix.format().is_quantised() && threads.activations() == ActivationFormat::Int8;
        let rounded = is_rounded.then(|| {
            let mut rounded = QuantisedActivations::default();
            threads.isa().quantise(&exact, columns, &mut rounded);
            rounded
        });
        Self {
            exact,
            rounded,
            columns,
        }
    }

    /// The numbers as they are, `[tokens, columns]`.
    pub(crate) fn exact(&self) -> &[f32] {
        &self.exact
    }

    /// The vectors rounded, where products with `matrix` take them so.
    pub(crate) fn rounded(&self, matrix: &Matrix<'_>) -> Option<&QuantisedActivations> {
        let rounded = self.rounded.as_ref();
        rounded.filter(|_| matrix.format().is_quantised())
    }

    /// Vector `token`.
    pub(crate) fn vector(&self, token: usize) -> Vector<'_> {
        Vector {
            exact: &self.exact[token * self.columns..][..self.columns],
            rounded: self.rounded.as_ref().map(|all| all.vector(token)),
        }
    }

    /// `out[t, r] = matrix[r] · x[t]`, on the calling thread.
    pub(crate) fn multiply_all(&self, isa: Isa, matrix: &Matrix<'_>, out: &mut [f32]) {
        match self.rounded(matrix) {
            Some(x) => isa.gemm_integer(matrix, x, out),
            None => isa.gemm(matrix, &self.exact, self.tokens(), out),
        }
    }

    /// What [`Self::multiply_all`] costs, as a multiple of one vector after the other.
    pub(crate) fn relative_gemm_cost(&self, matrix: &Matrix<'_>) -> f64 {
        let product = match self.rounded(matrix) {
            Some(_) => Arithmetic::Integer,
            None => Arithmetic::Float,
        };
        relative_gemm_cost(matrix.format(), self.tokens(), product)
    }

    /// Number of vectors.
    pub(crate) fn tokens(&self) -> usize {
        self.exact.len() / self.columns
    }
}

/// One vector of an [`Input`].
#[derive(Clone, Copy)]
pub(crate) struct Vector<'a> {
    exact: &'a [f32],
    rounded: Option<QuantisedVector<'a>>,
}

impl Vector<'_> {
    /// `out[i] = matrix[i] · x`, on the calling thread.
    pub(crate) fn multiply(&self, isa: Isa, matrix: &Matrix<'_>, out: &mut [f32]) {
        match self.rounded.filter(|_| matrix.format().is_quantised()) {
            Some(x) => isa.gemv_integer(matrix, x, out),
            None => isa.gemv(matrix, self.exact, out),
        }
    }

    /// `out[i] = matrix[rows[i]] · x`, on the calling thread.
    pub(crate) fn multiply_rows(
        &self,
        isa: Isa,
        matrix: &Matrix<'_>,
        rows: &[u32],
        out: &mut [f32],
    ) {
        match self.rounded.filter(|_| matrix.format().is_quantised()) {
            Some(x) => isa.gemv_rows_integer(matrix, rows, x, out),
            None => isa.gemv_rows(matrix, rows, self.exact, out),
        }
    }
}
