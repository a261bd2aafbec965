//! Probes of the read bandwidth of memory, the limits that decoding is compared with: of a stream, and of listed rows.

use std::{
    hint::black_box,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use powerinfer_artifact::mapped_file::FileBytes;
use powerinfer_kernels::Isa;

/// Bytes that a thread takes at a time; a delayed thread leaves the rest to the others.
const PIECE: usize = 1 << 20;
/// Bytes of rows that a thread takes at a time: about a layer's.
const ROWS_PIECE: usize = 512 << 10;
/// Cache lines in flight ahead of the row that is read; machines differ in what is best.
const LINES_AHEAD: [usize; 3] = [32, 64, 128];

/// Bytes per second of one pass over `words` on `threads` threads.
pub(crate) fn read_stream(isa: Isa, threads: usize, words: &[u64]) -> f64 {
    let seconds = seconds_of(threads, words, PIECE / size_of::<u64>(), |piece| {
        isa.sum_words(piece)
    });
    size_of_val(words) as f64 / seconds
}

/// Bytes per second at which `threads` threads read `rows`, rows of `row_bytes` bytes. All of `words` is read in between, so
/// that no row comes from a cache.
///
/// # Panics
///
/// Panics if a row is outside `words`.
pub(crate) fn read_rows(
    isa: Isa,
    threads: usize,
    words: &[u64],
    row_bytes: usize,
    rows: &[u32],
) -> f64 {
    let row_words = (row_bytes / size_of::<u64>()).max(1);
    let piece = (ROWS_PIECE / row_bytes.max(1)).max(1);
    let read = |lines_ahead: usize| {
        read_stream(isa, threads, words);
        let seconds = seconds_of(threads, rows, piece, |rows| {
            isa.sum_rows(words, row_words, rows, lines_ahead)
        });
        (rows.len() * row_words * size_of::<u64>()) as f64 / seconds
    };
    LINES_AHEAD.map(read).into_iter().fold(0.0, f64::max)
}

/// Seconds in which `threads` threads, once all have started, take all pieces of `length` of `all`.
fn seconds_of<T: Sync>(
    threads: usize,
    all: &[T],
    length: usize,
    read: impl Fn(&[T]) -> u64 + Sync,
) -> f64 {
    let (threads, begun, next) = (threads.max(1), AtomicUsize::new(0), AtomicUsize::new(0));
    // Set by the first thread that goes on: the others may be preempted until all pieces are read.
    let started = OnceLock::new();
    let pieces = || {
        begun.fetch_add(1, Ordering::Relaxed);
        while begun.load(Ordering::Relaxed) < threads {
            std::thread::yield_now();
        }
        started.get_or_init(Instant::now);
        while let Some(piece) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            all.chunks(length).nth(index)
        } {
            black_box(read(piece));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(pieces);
        }
        pieces();
    });
    let seconds = started
        .get()
        .map_or(0.0, |started| started.elapsed().as_secs_f64());
    seconds.max(1e-9)
}

/// Memory to read, best many times as large as the caches.
pub struct ReadProbe {
    memory: FileBytes,
}

impl ReadProbe {
    /// Allocates about `bytes` and writes every page.
    ///
    /// # Errors
    ///
    /// Fails if there is not as much memory.
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        let bytes = bytes.max(1).next_multiple_of(size_of::<u64>());
        let memory = FileBytes::in_memory(bytes, |memory| {
            let words: &mut [u64] = bytemuck::cast_slice_mut(memory);
            for (index, word) in words.iter_mut().enumerate() {
                *word = index as u64;
            }
            Ok(())
        })?;
        Ok(Self { memory })
    }

    fn words(&self) -> &[u64] {
        bytemuck::cast_slice(&self.memory)
    }

    /// Bytes that a stream reads.
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// Reads all of it once on `threads` threads; returns bytes per second.
    pub fn stream(&self, isa: Isa, threads: usize) -> f64 {
        read_stream(isa, threads, self.words())
    }

    /// Number of rows of `row_bytes` bytes; at most `u32::MAX`.
    pub fn row_count(&self, row_bytes: usize) -> usize {
        (self.bytes() / row_bytes.max(size_of::<u64>())).min(u32::MAX as usize)
    }

    /// Reads `rows`, each of `row_bytes` bytes, on `threads` threads, with as many cache lines in flight across rows as is
    /// best; returns bytes per second.
    ///
    /// # Panics
    ///
    /// Panics if a row is not below [`Self::row_count`].
    pub fn rows(&self, isa: Isa, threads: usize, row_bytes: usize, rows: &[u32]) -> f64 {
        read_rows(isa, threads, self.words(), row_bytes, rows)
    }
}

impl std::fmt::Debug for ReadProbe {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "ReadProbe({} bytes)", self.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_has_a_speed_on_any_number_of_threads() {
        let isa = Isa::detect().unwrap();
        for bytes in [0, 8, 5 << 20, 16 << 20] {
            let probe = ReadProbe::new(bytes).unwrap();
            for threads in [0, 1, 2, 5] {
                let mut speeds = vec![probe.stream(isa, threads)];
                for row_bytes in [8, 144, 2304] {
                    let rows = 0..probe.row_count(row_bytes) as u32;
                    let rows: Vec<u32> = rows.step_by(7).collect();
                    if !rows.is_empty() {
                        speeds.push(probe.rows(isa, threads, row_bytes, &rows));
                    }
                }
                for speed in speeds {
                    assert!(speed.is_finite() && speed > 0.0, "{speed}");
                }
            }
        }
    }
}
