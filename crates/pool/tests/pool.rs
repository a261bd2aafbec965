//! Every part runs once; panics are propagated; jobs nest; pools start and stop.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicUsize, Ordering::*},
    thread,
    time::{Duration, Instant},
};

use powerinfer_pool::Pool;

/// Miri interprets some hundred times slower than a processor runs.
const SLOWNESS: usize = if cfg!(miri) { 100 } else { 1 };

/// Xorshift generator.
fn next(state: &mut u64) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 16) as usize
}

/// Spins for `microseconds`.
fn spin(microseconds: u64) {
    let started = Instant::now();
    while started.elapsed() < Duration::from_micros(microseconds) {
        std::hint::spin_loop();
    }
}

/// Spins for about as long as idle threads spin before they sleep, or not at all.
fn pause(state: &mut u64) {
    if next(state).is_multiple_of(4) {
        spin(next(state) as u64 % 200);
    }
}

#[test]
fn every_part_is_run_once_on_any_number_of_threads() {
    for threads in [0, 1, 2, 3, 7, 64, 130] {
        let pool = Pool::new(threads).unwrap();
        assert_eq!(pool.threads(), threads.max(1));
        for parts in [0, 1, 2, 3, 5, 64, 1000] {
            let calls: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
            pool.run(parts, &|part| {
                calls[part].fetch_add(1, Relaxed);
            });
            let calls = calls.into_iter().map(AtomicUsize::into_inner);
            assert!(calls.eq(std::iter::repeat_n(1, parts)), "{threads} {parts}");
        }
    }
}

#[test]
fn thousands_of_tiny_jobs_run_every_part_in_time() {
    for (threads, jobs) in [(2, 40_000), (3, 20_000), (16, 3_000)] {
        let pool = Pool::new(threads).unwrap();
        let mut state = 88_172_645_463_325_252;
        for job in 0..jobs / SLOWNESS {
            let parts = next(&mut state) % 9;
            // On the stack: a part that ran late would write to a dead frame.
            let mut numbers = [0; 8];
            let bounds: Vec<usize> = (0..=parts).collect();
            pool.run_chunks(&mut numbers, &bounds, &|first, numbers| {
                for (index, number) in numbers.iter_mut().enumerate() {
                    *number += job * 10 + first + index + 1;
                }
            });
            for (part, number) in numbers.iter().enumerate() {
                assert_eq!(*number, if part < parts { job * 10 + part + 1 } else { 0 });
            }
            if job % 4 == 0 {
                pause(&mut state);
            }
        }
    }
}

#[test]
fn chunks_follow_the_bounds() {
    let pool = Pool::new(3).unwrap();
    let mut out = vec![0; 20];
    pool.run_chunks(&mut out, &[2, 2, 7, 19], &|first, values| {
        let whole = values.len() == 17;
        assert!(whole || [(2, 0), (2, 5), (7, 12)].contains(&(first, values.len())));
        for (index, value) in values.iter_mut().enumerate() {
            *value += first + index;
        }
    });
    let expected: Vec<usize> = (0..20)
        .map(|i| if (2..19).contains(&i) { i } else { 0 })
        .collect();
    assert_eq!(out, expected);
    pool.run_chunks(&mut out, &[], &|_, _| unreachable!());
    pool.run_chunks(&mut out, &[4], &|_, _| unreachable!());
    for bounds in [[0, 21], [3, 2]] {
        let out = &mut out;
        let run = AssertUnwindSafe(|| pool.run_chunks(out, &bounds, &|_, _| ()));
        assert!(catch_unwind(run).is_err(), "{bounds:?}");
    }
}

#[test]
fn the_second_stage_reads_all_of_the_first() {
    for (threads, jobs) in [(1, 300), (2, 20_000), (3, 20_000), (16, 3_000)] {
        let pool = Pool::new(threads).unwrap();
        let mut state = 88_172_645_463_325_252;
        for job in 0..jobs / SLOWNESS {
            let [parts, next_parts] = [0; 2].map(|_| next(&mut state) % 5);
            let bounds: Vec<usize> = (0..=parts).map(|part| part * 3).collect();
            let next_bounds: Vec<usize> = (0..=next_parts).map(|part| 1 + part * 2).collect();
            let (mut out, mut sums) = (vec![0; parts * 3 + 1], vec![0; next_parts * 2 + 2]);
            pool.run_stages(
                (&mut out, &bounds),
                &|first, values: &mut [usize]| {
                    (first..)
                        .zip(values)
                        .for_each(|(index, value)| *value = job + index);
                },
                |values| {
                    values[parts * 3] = 7;
                    &*values
                },
                (&mut sums, &next_bounds),
                &|first, sums: &mut [usize], values: &&[usize]| {
                    let all: usize = values.iter().sum();
                    (first..)
                        .zip(sums)
                        .for_each(|(index, sum)| *sum = all + index);
                },
            );
            let all = 7 + (0..parts * 3).map(|index| job + index).sum::<usize>();
            let is_set = |index: usize| (1..=next_parts * 2).contains(&index);
            let want =
                (0..next_parts * 2 + 2).map(|index| (all + index) * usize::from(is_set(index)));
            assert!(want.eq(sums), "{threads} threads, job {job}");
            pause(&mut state);
        }
    }
}

#[test]
fn a_panic_of_a_stage_reaches_the_caller() {
    for threads in [1, 2, 8] {
        let pool = Pool::new(threads).unwrap();
        for round in 0..300 / SLOWNESS {
            let (mut out, mut sums) = ([0; 4], [0; 4]);
            let fails = |stage: usize, first: usize| {
                if stage == round % 3 && first == round % 4 {
                    std::panic::panic_any(stage);
                }
            };
            let run = AssertUnwindSafe(|| {
                pool.run_stages(
                    (&mut out, &[0, 1, 2, 3, 4]),
                    &|first, values: &mut [usize]| {
                        (first..first + values.len()).for_each(|first| fails(0, first));
                    },
                    |_| fails(1, round % 4),
                    (&mut sums, &[0, 1, 2, 3, 4]),
                    &|first, sums: &mut [usize], ()| {
                        sums.fill(1);
                        (first..first + sums.len()).for_each(|first| fails(2, first));
                    },
                );
            });
            let panic = catch_unwind(run).unwrap_err();
            assert_eq!(panic.downcast_ref::<usize>(), Some(&(round % 3)));
            assert!(round % 3 == 2 || sums == [0; 4], "no second stage");
        }
    }
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_remains_usable() {
    for threads in [1, 2, 8] {
        let pool = Pool::new(threads).unwrap();
        for round in 0..200 / SLOWNESS {
            let run = AssertUnwindSafe(|| {
                pool.run(10, &|part| {
                    if part % 5 == round % 5 {
                        std::panic::panic_any(part % 5);
                    }
                });
            });
            let panic = catch_unwind(run).unwrap_err();
            assert_eq!(panic.downcast_ref::<usize>(), Some(&(round % 5)));
            let sum = AtomicUsize::new(0);
            pool.run(10, &|part| {
                sum.fetch_add(part, Relaxed);
            });
            assert_eq!(sum.into_inner(), 45);
        }
    }
}

#[test]
fn nested_jobs_run() {
    let pool = Pool::new(4).unwrap();
    let calls = AtomicUsize::new(0);
    pool.run(10, &|_| {
        pool.run(10, &|_| {
            pool.run(3, &|_| {
                calls.fetch_add(1, Relaxed);
            });
        });
    });
    assert_eq!(calls.into_inner(), 300);
}

#[test]
fn callers_on_many_threads_can_share_a_pool() {
    let pool = Pool::new(3).unwrap();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..2_000 / SLOWNESS {
                    let mut out = [0; 6];
                    pool.run_chunks(&mut out, &[0, 1, 2, 3, 4, 5, 6], &|first, values| {
                        for (index, value) in values.iter_mut().enumerate() {
                            *value = first + index;
                        }
                    });
                    assert_eq!(out, [0, 1, 2, 3, 4, 5]);
                }
            });
        }
    });
}

#[test]
fn a_pool_stops_whether_its_threads_spin_or_sleep() {
    for round in 0..200 / SLOWNESS {
        let pool = Pool::new(1 + round % 5).unwrap();
        if round % 2 == 0 {
            pool.run(4, &|_| ());
        }
        spin([0, 30, 300][round % 3]);
        drop(pool);
    }
}
