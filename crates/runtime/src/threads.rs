//! Splits kernels over threads. Rows are independent and sums are split by columns, so a result
//! never depends on the number of threads.

use std::ops::Range;

use powerinfer_bundle::memory::BATCH_THREADS;
use powerinfer_kernels::{BLOCK, Isa, Matrix, SignMatrix};
use powerinfer_pool::Pool;

use crate::RuntimeError;

/// Bytes of weights below which handing work over costs more than it saves.
const WORTH_SPLITTING: usize = 64 << 10;
/// Bytes of a part, about and at least: its start, some 200 ns, is next to nothing.
const PART_BYTES: usize = 32 << 10;
/// Most parts for each thread, so that what one does not get done the others do.
const PARTS_PER_THREAD: usize = 4;
/// The same for sums, whose parts are pieces of all rows: half as long, they are read a tenth slower.
const SUMS_PER_THREAD: usize = 1;
/// Rows that kernels take at once, or a multiple.
const ROW_GROUP: usize = 8;
/// Rows that products with many vectors take at once.
const GEMM_ROWS: usize = 24;

/// Kernels on a number of threads.
#[derive(Debug)]
pub struct Threads {
    isa: Isa,
    pool: Pool,
}

/// What is shared: `out`, which is made of a number of bytes of weights.
struct Work<'a, T> {
    out: &'a mut [T],
    bytes: usize,
    /// Values of `out` that a part has a multiple of.
    step: usize,
    most_parts: usize,
}

impl Threads {
    /// Kernels of `isa` on `count` threads; 0 stands for 1.
    pub fn new(isa: Isa, count: usize) -> Result<Self, RuntimeError> {
        let pool = Pool::new(count).map_err(|source| RuntimeError::Threads {
            threads: count,
            source,
        })?;
        Ok(Self { isa, pool })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Number of threads.
    pub fn count(&self) -> usize {
        self.pool.threads()
    }

    /// Fills `out`, one value per row of `row_bytes`: `kernel` does a range of them.
    fn by_rows<T: Send>(
        &self,
        out: &mut [T],
        row_bytes: usize,
        kernel: impl Fn(Range<usize>, &mut [T]) + Sync,
    ) {
        let work = Work {
            bytes: out.len() * row_bytes,
            step: ROW_GROUP,
            most_parts: PARTS_PER_THREAD * self.count(),
            out,
        };
        self.share(work, kernel);
    }

    /// Calls `kernel` with parts of the work and where they lie in it, on all threads where that is
    /// worth it.
    fn share<T: Send>(&self, work: Work<'_, T>, kernel: impl Fn(Range<usize>, &mut [T]) + Sync) {
        let length = work.out.len();
        let steps = length.div_ceil(work.step);
        let parts = (work.bytes / PART_BYTES).min(work.most_parts).min(steps);
        if self.count() == 1 || work.bytes < WORTH_SPLITTING || parts < 2 {
            return kernel(0..length, work.out);
        }
        let bound = |part: usize| (part * steps / parts * work.step).min(length);
        let bounds: Vec<usize> = (0..=parts).map(bound).collect();
        self.pool
            .run_chunks(work.out, &bounds, &|first, out: &mut [T]| {
                kernel(first..first + out.len(), out);
            });
    }

    /// `out[i] = matrix[i] · x` for all rows.
    pub(crate) fn gemv(&self, matrix: &Matrix<'_>, x: &[f32], out: &mut [f32]) {
        assert_eq!(out.len(), matrix.rows(), "one output per row");
        self.by_rows(out, matrix.row_bytes(), |rows, out| {
            self.isa.gemv(&matrix.rows_range(rows), x, out);
        });
    }

    /// `out[i] = matrix[rows[i]] · x`.
    pub(crate) fn gemv_rows(&self, matrix: &Matrix<'_>, rows: &[u32], x: &[f32], out: &mut [f32]) {
        assert_eq!(out.len(), rows.len(), "one output per listed row");
        self.by_rows(out, matrix.row_bytes(), |listed, out| {
            self.isa.gemv_rows(matrix, &rows[listed], x, out);
        });
    }

    /// `out[i]` = signs of row i that are those of `x`.
    pub(crate) fn agreements(&self, signs: &SignMatrix<'_>, x: &[u64], out: &mut [u32]) {
        assert_eq!(out.len(), signs.rows(), "one output per row");
        self.by_rows(out, SignMatrix::row_bytes(signs.columns()), |rows, out| {
            self.isa.agreements(&signs.rows_range(rows), x, out);
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
        let work = Work {
            out,
            bytes: rows.len() * matrix.row_bytes(),
            step: BLOCK,
            most_parts: SUMS_PER_THREAD * self.count(),
        };
        self.share(work, |columns, out| {
            self.isa.axpy_rows(matrix, rows, coefficients, columns, out);
        });
    }

    /// `out[t, r] = matrix[r] · x[t]` for `tokens` rows of `x`.
    pub(crate) fn gemm(&self, matrix: &Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
        if tokens == 1 {
            return self.gemv(matrix, x, out);
        }
        if tokens == 0 {
            return;
        }
        let rows = matrix.rows();
        let mut transposed = vec![0.0; rows * tokens];
        // A row is used once per token.
        let bytes = rows * matrix.row_bytes() * tokens;
        let work = Work {
            out: &mut transposed,
            bytes,
            step: GEMM_ROWS * tokens,
            // Each thread that is in a part has rows unpacked meanwhile.
            most_parts: match self.count() {
                count if count > BATCH_THREADS => BATCH_THREADS,
                count => PARTS_PER_THREAD * count,
            },
        };
        self.share(work, |values, out| {
            let rows = values.start / tokens..values.end / tokens;
            self.isa.gemm(&matrix.rows_range(rows), x, tokens, out);
        });
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
