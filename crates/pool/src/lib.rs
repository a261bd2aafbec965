//! Thread pool whose threads start a job within microseconds.
//!
//! The parts of a job are taken one at a time, also by the caller, so a preempted thread delays only the part
//! it is in. Idle threads spin for a few microseconds and then sleep, so an idle pool uses no CPU time.
//!
//! ```
//! # fn main() -> std::io::Result<()> {
//! let pool = powerinfer_pool::Pool::new(2)?;
//! let mut squares = [0, 1, 2, 3, 4, 5, 6];
//! pool.run_chunks(&mut squares, &[0, 3, 7], &|_first, values: &mut [i32]| {
//!     values.iter_mut().for_each(|value| *value *= *value);
//! });
//! assert_eq!(squares, [0, 1, 4, 9, 16, 25, 36]);
//! # Ok(())
//! # }
//! ```
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod chunks;
mod cores;
mod credit;
pub mod environment;
mod recording;
mod shared;
mod stages;
pub mod system;

use std::{
    fmt, io,
    sync::Arc,
    thread::{self, JoinHandle},
};

pub use cores::{memory_nodes, usable_cores};
pub use recording::RecordedJob;
use recording::Recording;
use shared::Shared;

/// Thread pool; its threads end when it is dropped.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    recording: Option<Recording>,
}

impl Pool {
    /// Starts a pool of `threads` threads, including the caller of [`Pool::run`]; 0 counts as 1.
    ///
    /// # Errors
    ///
    /// The system cannot start that many threads.
    pub fn new(threads: usize) -> io::Result<Self> {
        let workers = threads.max(1) - 1;
        let mut pool = Self {
            shared: Arc::new(Shared::new(workers)),
            workers: Vec::with_capacity(workers),
            recording: None,
        };
        for worker in 0..workers {
            let shared = Arc::clone(&pool.shared);
            let builder = thread::Builder::new().name(format!("pool-{}", worker + 1));
            pool.workers
                .push(builder.spawn(move || shared.serve(worker))?);
        }
        Ok(pool)
    }

    /// A pool that divides jobs as for `threads` threads, but runs all parts on the caller, one after the other, and times them.
    pub fn recording(threads: usize) -> Self {
        Self {
            shared: Arc::new(Shared::new(0)),
            workers: Vec::new(),
            recording: Some(Recording::new(threads)),
        }
    }

    /// Takes the jobs recorded since the last call, in order; empty unless the pool is [recording](Self::recording).
    pub fn take_jobs(&self) -> Vec<RecordedJob> {
        let recording = self.recording.as_ref();
        recording.map(Recording::take).unwrap_or_default()
    }

    /// Returns the number of threads, including the caller's.
    pub fn threads(&self) -> usize {
        let recording = self.recording.as_ref();
        recording.map_or(self.workers.len() + 1, Recording::threads)
    }

    /// Calls `work` once with every number below `parts`, in any order and on any thread, and returns when all
    /// calls have returned. Calls must not wait for each other, since they may run sequentially.
    ///
    /// A call of `run` within a job, or while another thread runs one, runs on its caller alone.
    ///
    /// # Panics
    ///
    /// If a call panics, with its payload, after all running calls have ended. Some parts may then not have been
    /// called; the pool remains usable.
    pub fn run(&self, parts: usize, work: &(impl Fn(usize) + Sync)) {
        self.run_or(&[parts], work, || (0..parts).for_each(work));
    }

    /// Runs `work` on all threads, or `alone` if sharing does not pay. `stages` holds the number of parts per stage, in order.
    fn run_or(&self, stages: &[usize], work: &(impl Fn(usize) + Sync), alone: impl FnOnce()) {
        let is_divided = stages.iter().any(|parts| *parts > 1);
        match &self.recording {
            Some(recording) if is_divided => recording.run(stages, work),
            None if is_divided && !self.workers.is_empty() => {
                let parts = stages.iter().sum();
                self.shared.run((parts, stages[0]), work, alone);
            }
            _ => alone(),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop();
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // Panics of parts are caught in the worker, so there is none to propagate.
            let _ = worker.join();
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Pool")
            .field("threads", &self.threads())
            .finish()
    }
}
