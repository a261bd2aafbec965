//! Large matrices that repeat the rows of a small one, which are quick to make and to check.

use std::sync::Arc;

use powerinfer_kernels::{
    Isa,
    cuda::{Device, GpuMatrix},
};
use powerinfer_tensor::{Format, Matrix, MatrixData, OwnedMatrix, pack};

use crate::{Outcome, noise::noise};

/// A large matrix that repeats the rows of a small one.
pub(crate) struct Tiled {
    rows: usize,
    columns: usize,
    small: OwnedMatrix,
}

/// Rows of the small matrix.
pub(crate) const TILE: usize = 64;

impl Tiled {
    pub(crate) fn new(format: Format, rows: usize, columns: usize, seed: u64) -> Self {
        let values: Vec<f32> = noise(seed, TILE * columns)
            .into_iter()
            .map(|value| 0.02 * value)
            .collect();
        Self {
            rows,
            columns,
            small: pack(format, TILE, columns, &values),
        }
    }

    /// A plane of the large matrix.
    fn repeat<T: Copy>(&self, plane: &[T]) -> Vec<T> {
        let count = plane.len() / TILE * self.rows;
        plane.iter().copied().cycle().take(count).collect()
    }

    pub(crate) fn upload(&self, device: &Arc<dyn Device>) -> Outcome<GpuMatrix> {
        let upload = |data: MatrixData<'_>| -> Outcome<GpuMatrix> {
            let matrix = Matrix::new(self.rows, self.columns, data)?;
            Ok(GpuMatrix::upload(device, &matrix)?)
        };
        match self.small.as_view().data() {
            MatrixData::F32(values) => upload(MatrixData::F32(&self.repeat(values))),
            MatrixData::F16(values) => upload(MatrixData::F16(&self.repeat(values))),
            MatrixData::Bf16(values) => upload(MatrixData::Bf16(&self.repeat(values))),
            MatrixData::Q8_0 { quants, scales } => upload(MatrixData::Q8_0 {
                quants: &self.repeat(quants),
                scales: &self.repeat(scales),
            }),
            MatrixData::Q4K {
                quants,
                scales,
                factors,
            } => upload(MatrixData::Q4K {
                quants: &self.repeat(quants),
                scales: &self.repeat(scales),
                factors: &self.repeat(factors),
            }),
            MatrixData::Q4_0 { quants, scales } => upload(MatrixData::Q4_0 {
                quants: &self.repeat(quants),
                scales: &self.repeat(scales),
            }),
        }
    }

    /// GEMV of the small matrix.
    pub(crate) fn products(&self, x: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; TILE];
        Isa::SCALAR.gemv(&self.small.as_view(), x, &mut out);
        out
    }
}

impl Tiled {
    /// Axpy over all rows: `Σ factors[i] * row[i]`.
    pub(crate) fn sums(&self, factors: &[f32]) -> Vec<f32> {
        let mut row_factors = [0.0; TILE];
        for (row, factor) in factors.iter().enumerate() {
            row_factors[row % TILE] += factor;
        }
        let (mut sums, mut row) = (vec![0.0; self.columns], vec![0.0; self.columns]);
        for (index, factor) in row_factors.into_iter().enumerate() {
            self.small.as_view().dequantise_row(index, &mut row);
            for (sum, weight) in sums.iter_mut().zip(&row) {
                *sum += factor * weight;
            }
        }
        sums
    }
}
