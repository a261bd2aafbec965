//! Latency of starting a job after work and after rest, and of starting its second stage; and the speed-up of two threads under contention:
//! `cargo bench -p powerinfer-pool`.
#![expect(clippy::print_stdout, reason = "a benchmark reports on stdout")]

use std::{
    hint::{black_box, spin_loop},
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use powerinfer_pool::Pool;

/// Size of the data read: exceeds all caches.
const BYTES: usize = 192 << 20;

/// Maximum time that two threads wait for each other.
const MEETING: Duration = Duration::from_millis(2);

fn main() {
    sync();
    stages();
    contention();
}

/// Measures jobs of two parts: empty ones, and ones whose parts wait for each other, so that both threads must
/// take part.
fn sync() {
    let pool = Pool::new(2).expect("two threads");
    println!(
        "synchronisation to 2 threads, µs        empty: median    p95   both awake: median    p95"
    );
    for gap in [0, 10, 100, 1000] {
        let gap = Duration::from_micros(gap);
        let rounds = if gap.as_micros() < 1000 { 5000 } else { 1000 };
        let empty = times(rounds, gap, || {
            pool.run(2, &|part| {
                black_box(part);
            })
        });
        let met = times(rounds, gap, || {
            let arrived = AtomicUsize::new(0);
            pool.run(2, &|_| {
                arrived.fetch_add(1, Relaxed);
                let started = Instant::now();
                while arrived.load(Relaxed) < 2 && started.elapsed() < MEETING {
                    spin_loop();
                }
            });
        });
        println!(
            "after {gap:>6?} of other work {:>21.2} {:>6.2} {:>21.2} {:>6.2}",
            quantile(&empty, 0.5),
            quantile(&empty, 0.95),
            quantile(&met, 0.5),
            quantile(&met, 0.95),
        );
    }
}

/// Measures the same work as two jobs and as one job of two stages. It needs all threads, because the parts of a stage wait for each other.
fn stages() {
    let pool = Pool::new(2).expect("two threads");
    let meet = |arrived: &AtomicUsize| {
        arrived.fetch_add(1, Relaxed);
        let started = Instant::now();
        while arrived.load(Relaxed) < 2 && started.elapsed() < MEETING {
            spin_loop();
        }
    };
    let separate = times(20_000, Duration::ZERO, || {
        for _ in 0..2 {
            let arrived = AtomicUsize::new(0);
            pool.run(2, &|_| meet(&arrived));
        }
    });
    let together = times(20_000, Duration::ZERO, || {
        let arrived = [0; 2].map(AtomicUsize::new);
        let (mut first, mut second) = ([0u8; 2], [0u8; 2]);
        let bounds = &[0, 1, 2];
        pool.run_stages(
            (&mut first, bounds),
            &|_, _: &mut [u8]| meet(&arrived[0]),
            |_| (),
            (&mut second, bounds),
            &|_, _: &mut [u8], ()| meet(&arrived[1]),
        );
    });
    for (name, found) in [("two jobs", separate), ("one job of two stages", together)] {
        let [median, late] = [0.5, 0.95].map(|share| quantile(&found, share));
        println!("{name:21} {median:>6.2} µs, p95 {late:.2}");
    }
}

/// Measures reading memory in jobs of several shapes, alternately on one and two threads, while other threads
/// keep processors busy.
fn contention() {
    let words: Vec<u64> = (0..BYTES as u64 / 8).collect();
    let one = Pool::new(1).expect("one thread");
    let two = Pool::new(2).expect("two threads");
    println!(
        "\nread bandwidth, GB/s          busy others   1 thread  2 threads   ratio  jobs' p95 µs"
    );
    for (parts, bytes) in [(16, 1 << 20), (8, 128 << 10), (4, 32 << 10)] {
        for others in [0, 1, 2] {
            let stop = AtomicBool::new(false);
            let mut speeds = [Vec::new(), Vec::new()];
            let mut slow = [Vec::new(), Vec::new()];
            thread::scope(|scope| {
                for _ in 0..others {
                    scope.spawn(|| {
                        while !stop.load(Relaxed) {
                            spin_loop();
                        }
                    });
                }
                for _ in 0..15 {
                    for (index, pool) in [&one, &two].into_iter().enumerate() {
                        let (speed, times) = read(pool, &words, parts, bytes);
                        speeds[index].push(speed);
                        slow[index].push(quantile(&times, 0.95));
                    }
                }
                stop.store(true, Relaxed);
            });
            // Ratios of consecutive measurements, since the load varies.
            let [one, two] = &speeds;
            let mut ratios: Vec<f64> = two.iter().zip(one).map(|(two, one)| two / one).collect();
            ratios.sort_by(f64::total_cmp);
            for values in speeds.iter_mut().chain(&mut slow) {
                values.sort_by(f64::total_cmp);
            }
            let [one, two] = [quantile(&speeds[0], 0.5), quantile(&speeds[1], 0.5)];
            println!(
                "{parts:>2} parts of {:>5} KiB {others:>20} {one:>10.2} {two:>10.2} {:>7.2} {:>6.0} {:>6.0}",
                bytes >> 10,
                quantile(&ratios, 0.5),
                quantile(&slow[0], 0.5),
                quantile(&slow[1], 0.5),
            );
        }
    }
}

/// Returns the bandwidth in GB/s over 0.1 s, and the sorted times of jobs in µs.
fn read(pool: &Pool, words: &[u64], parts: usize, bytes: usize) -> (f64, Vec<f64>) {
    let job_words = parts * bytes / 8;
    let sum = AtomicU64::new(0);
    let started = Instant::now();
    let mut times = Vec::new();
    for job in words.chunks_exact(job_words).cycle() {
        let job_started = Instant::now();
        pool.run(parts, &|part| {
            let mut sums = [0u64; 32];
            for line in job[part * bytes / 8..][..bytes / 8].chunks_exact(32) {
                for (sum, word) in sums.iter_mut().zip(line) {
                    *sum = sum.wrapping_add(*word);
                }
            }
            sum.fetch_add(sums.iter().fold(0, |a, b| a.wrapping_add(*b)), Relaxed);
        });
        times.push(job_started.elapsed().as_secs_f64() * 1e6);
        // Time between the kernels of a model.
        wait(Duration::from_micros(5));
        if started.elapsed() > Duration::from_millis(100) {
            break;
        }
    }
    black_box(sum);
    let read = times.len() * job_words * 8;
    let speed = read as f64 / started.elapsed().as_secs_f64() / 1e9;
    times.sort_by(f64::total_cmp);
    (speed, times)
}

/// Returns the sorted times of `act` in µs, each after `gap` of other work.
fn times(rounds: usize, gap: Duration, act: impl Fn()) -> Vec<f64> {
    let mut times: Vec<f64> = (0..rounds)
        .map(|_| {
            wait(gap);
            let started = Instant::now();
            act();
            started.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times
}

fn wait(gap: Duration) {
    let started = Instant::now();
    while started.elapsed() < gap {
        spin_loop();
    }
}

/// Quantile of the sorted `values`.
fn quantile(values: &[f64], share: f64) -> f64 {
    values[((values.len() - 1) as f64 * share) as usize]
}
