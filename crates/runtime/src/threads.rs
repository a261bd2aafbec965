//! Splits kernels over threads. Rows are independent and sums are split by columns, so a result
//! never depends on the number of threads.

use powerinfer_bundle::memory::BATCH_THREADS;
use powerinfer_kernels::{BLOCK, Isa, Matrix, SignMatrix};
use rayon::prelude::*;

use crate::RuntimeError;

/// Bytes of weights below which handing work over costs more than it saves.
const WORTH_SPLITTING: usize = 512 << 10;

/// Kernels on a number of threads.
#[derive(Debug)]
pub struct Threads {
    isa: Isa,
    count: usize,
    pool: Option<rayon::ThreadPool>,
}

impl Threads {
    /// Kernels of `isa` on `count` threads; 0 stands for 1.
    pub fn new(isa: Isa, count: usize) -> Result<Self, RuntimeError> {
        let count = count.max(1);
        let build = || rayon::ThreadPoolBuilder::new().num_threads(count).build();
        let pool = (count > 1).then(build).transpose();
        Ok(Self {
            isa,
            count,
            pool: pool.map_err(|source| RuntimeError::Threads {
                threads: count,
                source,
            })?,
        })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Number of threads.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The pool, where `bytes` of work are worth sharing.
    fn pool_for(&self, bytes: usize) -> Option<&rayon::ThreadPool> {
        self.pool.as_ref().filter(|_| bytes >= WORTH_SPLITTING)
    }

    /// Runs `act` on every part, on all threads where `work` bytes are worth sharing; at most
    /// [`BATCH_THREADS`] parts at once. Parts are independent of each other.
    pub(crate) fn share<T: Send>(&self, work: usize, parts: Vec<T>, act: impl Fn(T) + Sync + Send) {
        match self.pool_for(work) {
            Some(pool) if parts.len() > 1 => {
                let least = match self.count > BATCH_THREADS {
                    true => parts.len().div_ceil(BATCH_THREADS),
                    false => 1,
                };
                pool.install(|| parts.into_par_iter().with_min_len(least).for_each(act));
            }
            _ => parts.into_iter().for_each(act),
        }
    }

    /// `out[i] = matrix[i] · x` for all rows.
    pub(crate) fn gemv(&self, matrix: &Matrix<'_>, x: &[f32], out: &mut [f32]) {
        let Some(pool) = self.pool_for(matrix.rows() * matrix.row_bytes()) else {
            return self.isa.gemv(matrix, x, out);
        };
        let chunk = matrix.rows().div_ceil(self.count);
        pool.install(|| {
            out.par_chunks_mut(chunk)
                .enumerate()
                .for_each(|(index, out)| {
                    let start = index * chunk;
                    self.isa
                        .gemv(&matrix.rows_range(start..start + out.len()), x, out);
                });
        });
    }

    /// `out[i] = matrix[rows[i]] · x`.
    pub(crate) fn gemv_rows(&self, matrix: &Matrix<'_>, rows: &[u32], x: &[f32], out: &mut [f32]) {
        let Some(pool) = self.pool_for(rows.len() * matrix.row_bytes()) else {
            return self.isa.gemv_rows(matrix, rows, x, out);
        };
        let chunk = rows.len().div_ceil(self.count);
        pool.install(|| {
            out.par_chunks_mut(chunk)
                .zip(rows.par_chunks(chunk))
                .for_each(|(out, rows)| self.isa.gemv_rows(matrix, rows, x, out));
        });
    }

    /// `out[i]` = signs of row i that are those of `x`.
    pub(crate) fn agreements(&self, signs: &SignMatrix<'_>, x: &[u64], out: &mut [u32]) {
        let Some(pool) = self.pool_for(signs.bytes()) else {
            return self.isa.agreements(signs, x, out);
        };
        let chunk = signs.rows().div_ceil(self.count);
        pool.install(|| {
            out.par_chunks_mut(chunk)
                .enumerate()
                .for_each(|(index, out)| {
                    let start = index * chunk;
                    let part = signs.rows_range(start..start + out.len());
                    self.isa.agreements(&part, x, out);
                });
        });
    }

    /// `out += Σ_i coefficients[i] · matrix[rows[i]]`, rows in the order given.
    pub(crate) fn axpy_rows(
        &self,
        matrix: &Matrix<'_>,
        rows: &[u32],
        coefficients: &[f32],
        out: &mut [f32],
    ) {
        let columns = matrix.columns();
        let Some(pool) = self.pool_for(rows.len() * matrix.row_bytes()) else {
            return self
                .isa
                .axpy_rows(matrix, rows, coefficients, 0..columns, out);
        };
        let chunk = columns.div_ceil(self.count).next_multiple_of(BLOCK);
        pool.install(|| {
            out.par_chunks_mut(chunk)
                .enumerate()
                .for_each(|(index, out)| {
                    let start = index * chunk;
                    self.isa
                        .axpy_rows(matrix, rows, coefficients, start..start + out.len(), out);
                });
        });
    }

    /// `out[t, r] = matrix[r] · x[t]` for `tokens` rows of `x`.
    pub(crate) fn gemm(&self, matrix: &Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
        if tokens == 1 {
            return self.gemv(matrix, x, out);
        }
        let rows = matrix.rows();
        let mut transposed = vec![0.0; rows * tokens];
        match self.pool_for(rows * matrix.row_bytes()) {
            None => self.isa.gemm(matrix, x, tokens, &mut transposed),
            Some(pool) => {
                let chunk = rows.div_ceil(self.count.min(BATCH_THREADS));
                pool.install(|| {
                    transposed
                        .par_chunks_mut(chunk * tokens)
                        .enumerate()
                        .for_each(|(index, out)| {
                            let start = index * chunk;
                            let part = matrix.rows_range(start..start + out.len() / tokens);
                            self.isa.gemm(&part, x, tokens, out);
                        });
                });
            }
        }
        for (token, out) in out.chunks_exact_mut(rows).enumerate() {
            for (row, out) in out.iter_mut().enumerate() {
                *out = transposed[row * tokens + token];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::random::Random;
    use powerinfer_kernels::{Format, pack};

    use super::*;

    #[test]
    fn results_have_the_same_bits_on_any_number_of_threads() {
        let mut random = Random::new(1);
        let mut normal = |count: usize| {
            (0..count)
                .map(|_| random.normal() as f32)
                .collect::<Vec<_>>()
        };
        let (rows, columns, tokens) = (1031, 800, 3);
        let matrix = pack(Format::Q8_0, rows, columns, &normal(rows * columns));
        let (matrix, x, coefficients) = (matrix.as_view(), normal(tokens * columns), normal(rows));
        let listed: Vec<u32> = (0..rows as u32).collect();
        let run = |count| {
            let threads = Threads::new(Isa::SCALAR, count).unwrap();
            let mut out = [
                vec![0.0; rows],
                vec![0.0; rows],
                vec![0.0; columns],
                vec![0.0; tokens * rows],
            ];
            threads.gemv(&matrix, &x[..columns], &mut out[0]);
            threads.gemv_rows(&matrix, &listed, &x[..columns], &mut out[1]);
            threads.axpy_rows(&matrix, &listed, &coefficients, &mut out[2]);
            threads.gemm(&matrix, &x, tokens, &mut out[3]);
            out.concat()
                .into_iter()
                .map(f32::to_bits)
                .collect::<Vec<_>>()
        };
        assert!(
            matrix.rows() * matrix.row_bytes() >= WORTH_SPLITTING,
            "large enough to be shared"
        );
        assert_eq!(run(1), run(2));
        assert_eq!(run(1), run(7));
    }
}
