//! What handing a job over costs, after work and after rest, and what two threads bring where other
//! threads want the processors: `cargo bench -p powerinfer-pool`.
#![expect(clippy::print_stdout, reason = "a benchmark reports on stdout")]

use std::{
    hint::{black_box, spin_loop},
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use powerinfer_pool::Pool;

/// More than caches hold.
const BYTES: usize = 192 << 20;

/// How long two threads wait for each other at most.
const MEETING: Duration = Duration::from_millis(2);

fn main() {
    sync();
    contention();
}

/// Microseconds of a job of two parts: empty ones, and ones of which each waits for the other, so that
/// both threads have to be there.
fn sync() {
    let pool = Pool::new(2).expect("two threads");
    println!(
        "synchronisation to 2 threads, µs        empty: median    p95   both there: median    p95"
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
            let there = AtomicUsize::new(0);
            pool.run(2, &|_| {
                there.fetch_add(1, Relaxed);
                let started = Instant::now();
                while there.load(Relaxed) < 2 && started.elapsed() < MEETING {
                    spin_loop();
                }
            });
        });
        println!(
            "after {gap:>6?} of other work {:>21.2} {:>6.2} {:>21.2} {:>6.2}",
            at(&empty, 0.5),
            at(&empty, 0.95),
            at(&met, 0.5),
            at(&met, 0.95),
        );
    }
}

/// Reads memory in jobs of several shapes on one and on two threads, by turns, beside threads that are
/// always busy.
fn contention() {
    let words: Vec<u64> = (0..BYTES as u64 / 8).collect();
    let one = Pool::new(1).expect("one thread");
    let two = Pool::new(2).expect("two threads");
    println!(
        "\nGB/s that are read            busy others   1 thread  2 threads   ratio  jobs' p95 µs"
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
                        slow[index].push(at(&times, 0.95));
                    }
                }
                stop.store(true, Relaxed);
            });
            // Of two that were measured one after the other: others come and go.
            let [one, two] = &speeds;
            let mut ratios: Vec<f64> = two.iter().zip(one).map(|(two, one)| two / one).collect();
            ratios.sort_by(f64::total_cmp);
            for values in speeds.iter_mut().chain(&mut slow) {
                values.sort_by(f64::total_cmp);
            }
            let [one, two] = [at(&speeds[0], 0.5), at(&speeds[1], 0.5)];
            println!(
                "{parts:>2} parts of {:>5} KiB {others:>20} {one:>10.2} {two:>10.2} {:>7.2} {:>6.0} {:>6.0}",
                bytes >> 10,
                at(&ratios, 0.5),
                at(&slow[0], 0.5),
                at(&slow[1], 0.5),
            );
        }
    }
}

/// GB/s over a tenth of a second, and the sorted times of jobs in µs.
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
        // What lies between the kernels of a model.
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

/// Sorted times of `act` in µs, with `gap` of other work before each.
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

/// The value that a share of the sorted `values` lies below.
fn at(values: &[f64], share: f64) -> f64 {
    values[((values.len() - 1) as f64 * share) as usize]
}
