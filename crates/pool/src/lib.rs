//! A pool of threads that takes the parts of a job within microseconds.
//!
//! Parts are taken one by one, by the caller too, so a thread that the system has set aside holds up
//! the part it is in and no other. Threads without work look out for more for a few microseconds and
//! then sleep, so that a pool at rest takes nothing from other processes.
//!
//! ```
//! # fn main() -> std::io::Result<()> {
//! let pool = powerinfer_pool::Pool::new(2)?;
//! let mut squares = [0, 1, 2, 3, 4, 5, 6];
//! pool.run_chunks(&mut squares, &[0, 3, 7], &|_first, numbers: &mut [i32]| {
//!     numbers.iter_mut().for_each(|number| *number *= *number);
//! });
//! assert_eq!(squares, [0, 1, 4, 9, 16, 25, 36]);
//! # Ok(())
//! # }
//! ```

mod chunks;
mod cores;
mod credit;
mod shared;
pub mod system;

use std::{
    fmt, io,
    sync::Arc,
    thread::{self, JoinHandle},
};

pub use cores::usable_cores;
use shared::Shared;

/// Threads that wait for jobs; dropping it ends them.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts a pool of `threads` threads, of which the caller of [`Pool::run`] is one; 0 stands for 1.
    ///
    /// Fails where the system starts no more threads.
    pub fn new(threads: usize) -> io::Result<Self> {
        let workers = threads.max(1) - 1;
        let mut pool = Self {
            shared: Arc::new(Shared::new(workers)),
            workers: Vec::with_capacity(workers),
        };
        for worker in 0..workers {
            let shared = Arc::clone(&pool.shared);
            let builder = thread::Builder::new().name(format!("pool-{}", worker + 1));
            pool.workers
                .push(builder.spawn(move || shared.serve(worker))?);
        }
        Ok(pool)
    }

    /// Number of threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work` with every number below `parts`, each once, in any order and on any thread;
    /// returns when all calls have. Calls must not wait for each other: where sharing does not pay,
    /// they come one after the other.
    ///
    /// A call that panics makes this panic alike, once no call is running any more; some may then not
    /// have been made, and the pool stays fit for use. While a job runs, another one, from inside it
    /// or from another thread, is done by its caller alone.
    pub fn run(&self, parts: usize, work: &(impl Fn(usize) + Sync)) {
        self.run_or(parts, work, || (0..parts).for_each(work));
    }

    /// Shares out `work`, or does it by `alone` where sharing does not pay.
    fn run_or(&self, parts: usize, work: &(impl Fn(usize) + Sync), alone: impl FnOnce()) {
        if self.workers.is_empty() || parts < 2 {
            alone();
        } else {
            self.shared.run(parts, work, alone);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop();
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // Panics of parts are caught where they happen, so there is none to pass on.
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
