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
    /// Times of the parts, in the order in which threads take them.
    pub parts: Vec<Duration>,
}

impl RecordedJob {
    /// Time of all parts.
    pub fn total(&self) -> Duration {
        self.parts.iter().sum()
    }

    /// Time until the last part ends, if each of `threads` threads takes the next part as soon as it is free.
    ///
    /// # Panics
    ///
    /// Panics if `threads` is 0.
    pub fn makespan(&self, threads: usize) -> Duration {
        let mut busy = vec![Duration::ZERO; threads];
        for part in &self.parts {
            *busy.iter_mut().min().expect("a thread") += *part;
        }
        busy.into_iter().max().expect("a thread")
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

    pub(crate) fn run(&self, parts: usize, work: &(impl Fn(usize) + Sync)) {
        let started = Instant::now();
        let mut times = Vec::with_capacity(parts);
        let mut before = started;
        for part in 0..parts {
            work(part);
            let now = Instant::now();
            times.push(now - before);
            before = now;
        }
        let job = RecordedJob {
            started,
            parts: times,
        };
        lock(&self.jobs).push(job);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;

    #[test]
    fn threads_take_parts_in_order() {
        let job = |parts: &[u64]| RecordedJob {
            started: Instant::now(),
            parts: parts
                .iter()
                .map(|micros| Duration::from_micros(*micros))
                .collect(),
        };
        let makespan = |parts: &[u64], threads| job(parts).makespan(threads).as_micros();
        assert_eq!(makespan(&[4, 1, 1, 1, 3], 2), 6);
        assert_eq!(makespan(&[4, 1, 1, 1, 3], 1), 10);
        assert_eq!(makespan(&[4, 1, 1, 1, 3], 8), 4);
        assert_eq!(makespan(&[], 3), 0);
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
        assert!(out.iter().enumerate().all(|(index, value)| index == *value));
        let jobs = pool.take_jobs();
        assert_eq!(
            jobs.iter().map(|job| job.parts.len()).collect::<Vec<_>>(),
            [3]
        );
        assert!(pool.take_jobs().is_empty());
    }
}
