//! What this machine is: processor, memory, graphics card.

use std::{fs, hint::black_box, time::Instant};

use powerinfer_kernels::{Format, Isa, pack};

/// The processor's name.
pub(crate) fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or_else(
        || std::env::consts::ARCH.to_owned(),
        |(_, name)| name.trim().to_owned(),
    )
}

/// Bytes of memory: all of it, and what is free for use; `None` where the system does not tell.
pub(crate) fn memory() -> Option<(u64, u64)> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kibibytes = |key: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim_start_matches(':')
            .split_whitespace()
            .next()?
            .parse()
            .ok()
    };
    Some((
        kibibytes("MemTotal")? << 10,
        kibibytes("MemAvailable")? << 10,
    ))
}

/// The most memory that this process has held; `None` where the system does not tell.
pub(crate) fn peak_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes << 10)
}

/// The graphics card, or why there is none, in words that fit behind a colon.
pub(crate) fn gpu_status() -> String {
    let Ok(version) = fs::read_to_string("/proc/driver/nvidia/version") else {
        return "no NVIDIA driver is loaded on this machine".to_owned();
    };
    let driver = version
        .split_whitespace()
        .find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
    format!(
        "NVIDIA driver {} found, but this build has no CUDA kernels yet",
        driver.unwrap_or("of unknown version")
    )
}

/// Bytes per second that `threads` threads read from memory together: the best of some passes
/// over a buffer that fits no cache.
pub(crate) fn read_bandwidth(threads: usize) -> f64 {
    const WORDS: usize = 32 << 20; // 256 MiB
    const PASSES: usize = 5;
    let buffer: Vec<u64> = (0..WORDS as u64).collect();
    let chunk = WORDS.div_ceil(threads.max(1));
    let mut best = 0f64;
    for _ in 0..PASSES {
        let started = Instant::now();
        std::thread::scope(|scope| {
            for part in buffer.chunks(chunk) {
                scope.spawn(move || {
                    let mut sums = [0u64; 16];
                    for words in part.chunks_exact(16) {
                        for (sum, word) in sums.iter_mut().zip(words) {
                            *sum = sum.wrapping_add(*word);
                        }
                    }
                    black_box(sums);
                });
            }
        });
        best = best.max((WORDS * 8) as f64 / started.elapsed().as_secs_f64());
    }
    best
}

/// What a row of a matrix costs beside its bytes, and what a kernel costs beside its rows: seconds on
/// one thread, of matrices in the cache.
pub(crate) fn row_and_kernel_seconds(isa: Isa) -> (f64, f64) {
    const ROWS: usize = 4096;
    const PASSES: usize = 201;
    let median = |rows: usize, columns: usize| {
        let matrix = pack(Format::Q8_0, rows, columns, &vec![0.5; rows * columns]);
        let (x, mut out) = (vec![0.25; columns], vec![0.0; rows]);
        let mut times: Vec<f64> = (0..PASSES)
            .map(|_| {
                let started = Instant::now();
                isa.gemv(&matrix.as_view(), black_box(&x), &mut out);
                black_box(&out);
                started.elapsed().as_secs_f64()
            })
            .collect();
        times.sort_unstable_by(f64::total_cmp);
        times[PASSES / 2]
    };
    // Rows of one block and of two: what is left of the time where there are no blocks.
    let per_row = (2.0 * median(ROWS, 32) - median(ROWS, 64)) / ROWS as f64;
    (per_row.max(0.0), median(1, 32))
}
