//! Splits kernels over threads. Rows are independent, and sums are split at fixed rows or by columns, so results do
//! not depend on the number of threads.

mod axpy;

use std::{cell::Cell, ops::Range};

pub(crate) use self::axpy::Parts;
use crate::memory::BATCH_THREADS;
use powerinfer_kernels::Isa;
use powerinfer_pool::{Pool, RecordedJob};
use powerinfer_tensor::Matrix;

use crate::{ActivationFormat, RuntimeError, input::Input, scratch::ThreadBuffer};

/// Bytes of weights below which sharing costs more than it saves.
const WORTH_SPLITTING: usize = 64 << 10;
/// Minimum number of bytes of a part: starting one takes some 200 ns, and reading this many bytes 1 to 2 µs.
const PART_BYTES: usize = 16 << 10;
/// Parts per thread, at most, so that other threads can take over from a delayed one.
const PARTS_PER_THREAD: usize = 4;
/// Parts of one call, at most.
const MAX_PARTS: usize = 512;
/// Parts per thread of sums that are split by columns: half as long stripes are read 10% slower.
const SUMS_PER_THREAD: usize = 1;
/// Rows that kernels process together, or a multiple.
const ROW_GROUP: usize = 8;

/// Rows that a GEMM processes together, or a multiple.
const GEMM_ROWS: usize = 48;

thread_local! {
    /// Products of some rows.
    static PRODUCTS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Kernels that run on several threads.
#[derive(Debug)]
pub struct Threads {
    isa: Isa,
    activations: ActivationFormat,
    pool: Pool,
}

/// Work to share: `out`, and the bytes of weights that are read for it.
struct Work<'a, T> {
    out: &'a mut [T],
    bytes: usize,
    /// Parts are multiples of this number of values of `out`.
    step: usize,
    most_parts: usize,
}

impl Threads {
    /// Kernels of `isa` on `count` threads; 0 means 1.
    ///
    /// # Errors
    ///
    /// Fails if the system starts no more threads.
    pub fn new(isa: Isa, count: usize) -> Result<Self, RuntimeError> {
        let pool = Pool::new(count).map_err(|source| RuntimeError::Threads {
            threads: count,
            source,
        })?;
        Ok(Self {
            isa,
            activations: ActivationFormat::default(),
            pool,
        })
    }

    /// Kernels of `isa` whose work is divided as for `threads` threads, but run and timed part by part on one thread.
    pub fn recording(isa: Isa, threads: usize) -> Self {
        Self {
            isa,
            activations: ActivationFormat::default(),
            pool: Pool::recording(threads),
        }
    }

    /// Takes the jobs recorded since the last call; empty unless the kernels are [recording](Self::recording).
    pub(crate) fn take_jobs(&self) -> Vec<RecordedJob> {
        self.pool.take_jobs()
    }

    /// Sets the number format of the vectors that matrices are multiplied with.
    pub fn with_activations(self, activations: ActivationFormat) -> Self {
        Self {
            activations,
            ..self
        }
    }

    /// Number format of the vectors that matrices are multiplied with.
    pub fn activations(&self) -> ActivationFormat {
        self.activations
    }

    /// The setting that results depend on: neither the instruction set nor the number of threads matters.
    pub(crate) fn arithmetic(&self) -> ActivationFormat {
        let Self {
            isa: _,
            activations,
            pool: _,
        } = self;
        *activations
    }

    /// Instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Number of threads.
    pub fn count(&self) -> usize {
        self.pool.threads()
    }

    /// Sets `out`, one value per row of `row_bytes`: `kernel` computes a range of rows.
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
        self.share_values(work, kernel);
    }

    /// Calls `kernel` with ranges of `work.out` and their values, on all threads if that pays.
    fn share_values<T: Send>(
        &self,
        work: Work<'_, T>,
        kernel: impl Fn(Range<usize>, &mut [T]) + Sync,
    ) {
        let (bounds, parts) = self.bounds(&work);
        if parts == 1 {
            return kernel(0..work.out.len(), work.out);
        }
        self.pool
            .run_chunks(work.out, &bounds[..=parts], &|first, out: &mut [T]| {
                kernel(first..first + out.len(), out);
            });
    }

    /// Bounds of the parts of `work`, and the number of parts: 1 if sharing does not pay.
    fn bounds<T>(&self, work: &Work<'_, T>) -> ([usize; MAX_PARTS + 1], usize) {
        let length = work.out.len();
        let steps = length.div_ceil(work.step);
        let parts = (work.bytes / PART_BYTES)
            .min(work.most_parts)
            .min(steps)
            .min(MAX_PARTS);
        let shares = self.count() > 1 && work.bytes >= WORTH_SPLITTING;
        let parts = if shares { parts.max(1) } else { 1 };
        let mut bounds = [0; MAX_PARTS + 1];
        for (part, bound) in bounds[..=parts].iter_mut().enumerate() {
            *bound = (part * steps / parts * work.step).min(length);
        }
        (bounds, parts)
    }

    /// Like two calls of [`Self::share_values`], but in one job: in between, `link` is called with all values of `out`, and `next_kernel`
    /// gets its result.
    fn share_stages<'a, T: Send, Link: Send + Sync, U: Send>(
        &self,
        (out, bounds): (&'a mut [T], &[usize]),
        kernel: impl Fn(Range<usize>, &mut [T]) + Sync,
        link: impl FnOnce(&'a mut [T]) -> Link + Send,
        next: Work<'_, U>,
        next_kernel: impl Fn(Range<usize>, &mut [U], &Link) + Sync,
    ) {
        let (next_bounds, next_parts) = self.bounds(&next);
        self.pool.run_stages(
            (out, bounds),
            &|first, out: &mut [T]| kernel(first..first + out.len(), out),
            link,
            (next.out, &next_bounds[..=next_parts]),
            &|first, out: &mut [U], link: &Link| next_kernel(first..first + out.len(), out, link),
        );
    }

    /// Calls `act` with the index and the values of every chunk of `chunk` values of `out`, on all threads if
    /// `bytes` of work are worth sharing; at most [`BATCH_THREADS`] chunks at a time.
    pub(crate) fn by_chunks<T: Send>(
        &self,
        out: &mut [T],
        chunk: usize,
        bytes: usize,
        act: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let work = Work {
            bytes,
            step: chunk,
            most_parts: self.most_parts(),
            out,
        };
        self.share_values(work, |values, out| {
            for (index, out) in (values.start / chunk..).zip(out.chunks_mut(chunk)) {
                act(index, out);
            }
        });
    }

    /// Parts of work for which a thread takes buffers, at most.
    fn most_parts(&self) -> usize {
        match self.count() {
            count if count > BATCH_THREADS => BATCH_THREADS,
            count => PARTS_PER_THREAD * count,
        }
    }

    /// Copies bytes, on all threads if that pays.
    pub(crate) fn copy(&self, to: &mut [u8], from: &[u8]) {
        self.by_rows(to, 1, |range, to| to.copy_from_slice(&from[range]));
    }

    /// `out[i] = matrix[i] · x` for all rows.
    pub(crate) fn gemv(&self, matrix: &Matrix<'_>, x: &Input<'_>, out: &mut [f32]) {
        assert_eq!(out.len(), matrix.rows(), "one output per row");
        let x = x.vector(0);
        self.by_rows(out, matrix.row_bytes(), |rows, out| {
            x.gemv(self.isa, &matrix.rows_range(rows), out);
        });
    }

    /// Adds `matrix[i] · x + bias[i]` to `out[i]` for all rows.
    pub(crate) fn add_gemv(
        &self,
        matrix: &Matrix<'_>,
        bias: Option<&[f32]>,
        x: &Input<'_>,
        out: &mut [f32],
    ) {
        assert_eq!(out.len(), matrix.rows(), "one output per row");
        let x = x.vector(0);
        self.by_rows(out, matrix.row_bytes(), |rows, out| {
            ThreadBuffer(&PRODUCTS).stale(out.len(), |products| {
                x.gemv(self.isa, &matrix.rows_range(rows.clone()), products);
                if let Some(bias) = bias {
                    add(products, &bias[rows]);
                }
                add(out, products);
            });
        });
    }

    /// Computes the products of all rows of all `matrices` with `x`, one matrix after the other. The same job then calls `link` with all
    /// products, and then `next_kernel` with ranges of `next` and the result of `link`. `next_kernel` reads `next_bytes` in all.
    pub(crate) fn gemv_each_then<'a, Link: Send + Sync, U: Send>(
        &self,
        matrices: &[&Matrix<'_>],
        x: &Input<'_>,
        out: &'a mut [f32],
        link: impl FnOnce(&'a mut [f32]) -> Link + Send,
        (next, next_bytes): (&mut [U], usize),
        next_kernel: impl Fn(Range<usize>, &mut [U], &Link) + Sync,
    ) {
        let rows: usize = matrices.iter().map(|matrix| matrix.rows()).sum();
        assert_eq!(out.len(), rows, "one output per row");
        let row_bytes = matrices.iter().map(|matrix| matrix.row_bytes());
        let x = x.vector(0);
        let work = Work {
            bytes: out.len() * row_bytes.max().unwrap_or(0),
            step: ROW_GROUP,
            most_parts: PARTS_PER_THREAD * self.count(),
            out,
        };
        let next = Work {
            out: next,
            bytes: next_bytes,
            step: 1,
            most_parts: SUMS_PER_THREAD * self.count(),
        };
        let (bounds, parts) = self.bounds(&work);
        let kernel = |rows: Range<usize>, out: &mut [f32]| {
            // Computes the part of `rows` that lies in each matrix.
            let (mut first, mut out) = (0, out);
            for matrix in matrices {
                let end = first + matrix.rows();
                let own = rows.start.clamp(first, end)..rows.end.clamp(first, end);
                let (products, rest) = out.split_at_mut(own.len());
                if !own.is_empty() {
                    let own = own.start - first..own.end - first;
                    x.gemv(self.isa, &matrix.rows_range(own), products);
                }
                (first, out) = (end, rest);
            }
        };
        let bounds = &bounds[..=parts];
        self.share_stages((work.out, bounds), kernel, link, next, next_kernel);
    }

    /// `out[i] = matrix[rows[i]] · x`.
    pub(crate) fn gemv_rows(
        &self,
        matrix: &Matrix<'_>,
        rows: &[u32],
        x: &Input<'_>,
        out: &mut [f32],
    ) {
        assert_eq!(out.len(), rows.len(), "one output per listed row");
        let x = x.vector(0);
        self.by_rows(out, matrix.row_bytes(), |listed, out| {
            x.gemv_rows(self.isa, matrix, &rows[listed], out);
        });
    }

    /// Calls `act` with ranges of rows, multiples of `step` except for the last, and `width` slots per row; a row
    /// takes up to `row_bytes`.
    pub(crate) fn by_row_groups<T: Send>(
        &self,
        places: &mut [T],
        width: usize,
        step: usize,
        row_bytes: usize,
        act: impl Fn(Range<usize>, &mut [T]) + Sync,
    ) {
        let work = Work {
            bytes: places.len() / width.max(1) * row_bytes,
            step: step * width,
            most_parts: PARTS_PER_THREAD * self.count(),
            out: places,
        };
        self.share_values(work, |part, places| {
            act(part.start / width..part.end / width, places);
        });
    }

    /// Calls `act` with ranges of column groups and `tokens` slots per group, for sums of several tokens that read `bytes` in all.
    pub(crate) fn by_column_groups<T: Send>(
        &self,
        places: &mut [T],
        tokens: usize,
        bytes: usize,
        act: impl Fn(Range<usize>, &mut [T]) + Sync,
    ) {
        let work = Work {
            bytes,
            step: tokens,
            most_parts: self.most_parts(),
            out: places,
        };
        self.share_values(work, |part, places| {
            act(part.start / tokens..part.end / tokens, places);
        });
    }

    /// `out[t, r] = matrix[r] · x[t]` for all vectors of `x`.
    pub(crate) fn gemm(&self, matrix: &Matrix<'_>, x: &Input<'_>, out: &mut [f32]) {
        let tokens = x.tokens();
        if tokens == 1 {
            return self.gemv(matrix, x, out);
        }
        if tokens == 0 {
            return;
        }
        let rows = matrix.rows();
        // Groups of rows, each `[tokens, rows of the group]`.
        let mut groups = vec![0.0; rows * tokens];
        let work = Work {
            out: &mut groups,
            // A row is used for every token.
            bytes: rows * matrix.row_bytes() * tokens,
            step: GEMM_ROWS * tokens,
            most_parts: self.most_parts(),
        };
        self.share_values(work, |values, out| {
            let starts = (values.start / tokens..).step_by(GEMM_ROWS);
            for (start, out) in starts.zip(out.chunks_mut(GEMM_ROWS * tokens)) {
                let width = out.len() / tokens;
                let group = matrix.rows_range(start..start + width);
                x.gemm(self.isa, &group, out);
            }
        });
        let bytes = size_of_val(out);
        self.by_chunks(out, rows, bytes, |token, out| {
            for (start, out) in (0..rows).step_by(GEMM_ROWS).zip(out.chunks_mut(GEMM_ROWS)) {
                let group = &groups[start * tokens + token * out.len()..];
                out.copy_from_slice(&group[..out.len()]);
            }
        });
    }
}

/// `sum += x`.
pub(crate) fn add(sum: &mut [f32], x: &[f32]) {
    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
}

#[cfg(test)]
mod tests;
