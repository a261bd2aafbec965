//! Probe of the read bandwidth of memory, the limit that decoding is compared with.

use std::{
    hint::black_box,
    sync::atomic::{AtomicUsize, Ordering},
    time::Instant,
};

use powerinfer_kernels::Isa;

/// Words that a thread takes at a time; a delayed thread leaves the rest to the others.
const PIECE: usize = (4 << 20) / size_of::<u64>();

/// Memory to read, best many times as large as the caches.
pub struct ReadProbe {
    words: Vec<u64>,
}

impl ReadProbe {
    /// Allocates about `bytes` and writes every page.
    pub fn new(bytes: usize) -> Self {
        let count = (bytes / size_of::<u64>()).max(1);
        Self {
            words: (0..count as u64).collect(),
        }
    }

    /// Bytes that one pass reads.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.words)
    }

    /// Reads all of it once on `threads` threads; returns bytes per second.
    pub fn pass(&self, isa: Isa, threads: usize) -> f64 {
        let next = AtomicUsize::new(0);
        let pieces = || {
            while let Some(piece) = {
                let index = next.fetch_add(1, Ordering::Relaxed);
                self.words.chunks(PIECE).nth(index)
            } {
                black_box(isa.sum_words(piece));
            }
        };
        let started = Instant::now();
        std::thread::scope(|scope| {
            for _ in 1..threads.max(1) {
                scope.spawn(pieces);
            }
            pieces();
        });
        self.bytes() as f64 / started.elapsed().as_secs_f64().max(1e-9)
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
        for bytes in [0, 8, 5 << 20, 16 << 20] {
            let probe = ReadProbe::new(bytes);
            for threads in [0, 1, 2, 5] {
                let speed = probe.pass(Isa::detect().unwrap(), threads);
                assert!(speed.is_finite() && speed > 0.0, "{speed}");
            }
        }
    }
}
