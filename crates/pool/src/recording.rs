//! Jobs whose parts are run and timed one after the other, so that the work of many threads can be estimated on few cores.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use crate::shared::lock;

/// A job, and the time of each of its parts.
#[derive(Debug, Clone)]
pub struct RecordedJob {
    /// When the first part began.
    pub started: Instant,
    /// Times of the parts of each stage, in the order in which threads take them. A stage begins when the one before has ended.
    pub stages: Vec<Vec<Duration>>,
}

impl RecordedJob {
    /// Time of all parts.
    pub fn total(&self) -> Duration {
        self.stages.iter().flatten().sum()
    }

    /// Time until the last part ends, if each of `threads` threads takes the next part of a stage as soon as it is free.
    ///
    /// # Panics
    ///
    /// Panics if `threads` is 0.
    pub fn makespan(&self, threads: usize) -> Duration {
        let of_stage = |parts: &Vec<Duration>| {
            let mut busy = vec![Duration::ZERO; threads];
            for part in parts {
                *busy.iter_mut().min().expect("a thread") += *part;
            }
            busy.into_iter().max().expect("a thread")
        };
        self.stages.iter().map(of_stage).sum()
    }
}

/// Jobs that the caller of a pool ran alone, divided as for `threads` threads.
pub(crate) struct Recording {
    threads: usize,
    jobs: Mutex<Vec<RecordedJob>>,
}

impl Recording {
    pub(crate) fn new(threads: usize) -> Self {
        Self {
            threads,
            jobs: Mutex::default(),
        }
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    pub(crate) fn take(&self) -> Vec<RecordedJob> {
        std::mem::take(&mut *lock(&self.jobs))
    }

    pub(crate) fn run(&self, stages: &[usize], work: &(impl Fn(usize) + Sync)) {
        let started = Instant::now();
        let mut parts = 0..;
        let mut before = started;
        let mut time = |part| {
            work(part);
            let now = Instant::now();
            now - std::mem::replace(&mut before, now)
        };
        let times = |count: &usize| parts.by_ref().take(*count).map(&mut time).collect();
        let stages = stages.iter().map(times).collect();
        lock(&self.jobs).push(RecordedJob { started, stages });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;

    #[test]
    fn threads_take_parts_in_order() {
        let stage = |parts: &&[u64]| {
            let parts = parts.iter().copied();
            parts.map(Duration::from_micros).collect()
        };
        let makespan = |stages: &[&[u64]], threads| {
            let job = RecordedJob {
                started: Instant::now(),
                stages: stages.iter().map(stage).collect(),
            };
            job.makespan(threads).as_micros()
        };
        assert_eq!(makespan(&[&[4, 1, 1, 1, 3]], 2), 6);
        assert_eq!(makespan(&[&[4, 1, 1, 1, 3]], 1), 10);
        assert_eq!(makespan(&[&[4, 1, 1, 1, 3]], 8), 4);
        assert_eq!(makespan(&[&[4, 1], &[1], &[1, 3]], 2), 8);
        assert_eq!(makespan(&[&[]], 3), 0);
    }

    #[test]
    fn parts_are_those_of_many_threads_and_run_on_the_caller() {
        let pool = Pool::recording(16);
        assert_eq!(pool.threads(), 16);
        let caller = std::thread::current().id();
        let mut out = [0; 100];
        pool.run_chunks(
            &mut out,
            &[0, 10, 50, 100],
            &|first, values: &mut [usize]| {
                assert_eq!(std::thread::current().id(), caller);
                (first..)
                    .zip(values)
                    .for_each(|(index, value)| *value = index);
            },
        );
        pool.run(1, &|_| ());
        // Nothing to share in either stage.
        let (mut one, mut other) = ([0], [0]);
        pool.run_stages(
            (&mut one, &[0, 1]),
            &|_, _: &mut [u8]| (),
            |_| (),
            (&mut other, &[0, 1]),
            &|_, _: &mut [u8], ()| (),
        );
        assert!(out.iter().enumerate().all(|(index, value)| index == *value));
        let jobs = pool.take_jobs();
        assert_eq!(
            jobs.iter()
                .map(|job| job.stages[0].len())
                .collect::<Vec<_>>(),
            [3]
        );
        assert!(pool.take_jobs().is_empty());
    }
}
