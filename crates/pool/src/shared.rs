//! What the threads of a pool share: one job at a time, whose parts are taken by counting down.
//!
//! ```text
//!  caller   job = …   unfinished = n   remaining = n   take parts …   wait for unfinished = 0
//!  worker              wait for remaining > 0          take parts …   unfinished -= parts taken
//! ```
//!
//! **A job outlives whoever looks at it.** `run` borrows it until `unfinished` is 0. Only who has
//! lowered `remaining` looks at the job, and lowers `unfinished` when it looks no more; between the
//! two `unfinished` is above 0. A worker that comes late finds `remaining` at 0 and looks at nothing;
//! should there be a next job by then, it takes a part of that one, for what it knows of the job it
//! reads after it took the part.
//!
//! **No thread sleeps for good.** A worker says that it sleeps and then looks for work; the caller
//! puts work there and then looks for sleepers. Both are sequentially consistent, so at least one of
//! them sees the other. So it is with a caller that sleeps until the last part is done. Besides, the
//! caller takes parts until there are none: workers that stay asleep cost time only.
#![expect(unsafe_code, reason = "a job borrows from its caller's stack")]

use std::{
    any::Any,
    cell::UnsafeCell,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use crate::credit::{Credit, Own};

/// How long a worker looks out for the next job: about what waking it costs, so that looking out
/// never costs much more than sleeping would have.
const LOOK_OUT: Duration = Duration::from_micros(50);
/// How long a caller looks out for the last part, at least and at most: in between as long as a part
/// of this job takes, for a thread that takes longer has been set aside by the system.
const PATIENCE: [Duration; 2] = [Duration::from_micros(20), Duration::from_micros(200)];
/// Looks between two readings of the clock.
const LOOKS: usize = 32;
/// Sleepers that one thread wakes. Each of them wakes as many, so no thread spends long on it.
const WAKES: usize = 2;

/// Keeps a value apart from what other threads write: processors fetch cache lines in pairs.
#[repr(align(128))]
struct Apart<T>(T);

/// A closure that is called with the numbers of parts, without its type and lifetime.
#[derive(Clone, Copy)]
struct Job {
    closure: *const (),
    call: unsafe fn(*const (), usize),
    parts: usize,
}

pub(crate) struct Shared {
    /// Parts that nobody has taken. Raised by a caller, lowered by those who take.
    remaining: Apart<AtomicUsize>,
    /// Parts that are not known to be done.
    unfinished: Apart<AtomicUsize>,
    /// Nanoseconds of the part of this job that took least, of those that are finished.
    least: AtomicU64,
    /// Written by the caller that holds `taken`, while `remaining` and `unfinished` are 0.
    job: Apart<UnsafeCell<Job>>,
    /// Whether a caller has the pool.
    taken: AtomicBool,
    credit: Credit,
    /// Workers that look out for a job.
    looking: AtomicUsize,
    /// Most workers that may: on more processors than there are, they would be in each other's way.
    may_look: usize,
    /// A bit for every worker, set while it sleeps or is about to.
    asleep: Box<[AtomicU64]>,
    handles: Box<[OnceLock<Thread>]>,
    stopped: AtomicBool,
    /// Whether the caller sleeps until `finished`, or is about to.
    caller_sleeps: AtomicBool,
    lock: Mutex<()>,
    finished: Condvar,
    /// What the first part to panic in a job panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: what is not `Send` and `Sync` already is `job`. It points to a closure that is `Sync`, and
// the module's first lines say why nobody reads it while it is written or after the closure is gone.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    pub(crate) fn new(workers: usize) -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let nothing = Job {
            closure: std::ptr::null(),
            call: call::<fn(usize)>,
            parts: 0,
        };
        Self {
            remaining: Apart(AtomicUsize::new(0)),
            unfinished: Apart(AtomicUsize::new(0)),
            least: AtomicU64::new(0),
            job: Apart(UnsafeCell::new(nothing)),
            taken: AtomicBool::new(false),
            credit: Credit::new(),
            looking: AtomicUsize::new(0),
            may_look: processors - 1,
            asleep: (0..workers.div_ceil(64))
                .map(|_| AtomicU64::new(0))
                .collect(),
            handles: (0..workers).map(|_| OnceLock::new()).collect(),
            stopped: AtomicBool::new(false),
            caller_sleeps: AtomicBool::new(false),
            lock: Mutex::new(()),
            finished: Condvar::new(),
            panic: Mutex::new(None),
        }
    }

    /// Shares out the parts of `work`, or does them by `alone` where that is better or the pool is in
    /// use.
    pub(crate) fn run<F: Fn(usize) + Sync>(&self, parts: usize, work: &F, alone: impl FnOnce()) {
        if self.taken.swap(true, Acquire) {
            return alone();
        }
        let started = Instant::now();
        let panic = if self.credit.allows_sharing() {
            let own = self.share(parts, work);
            self.credit
                .shared(&own, parts - own.parts, started.elapsed());
            lock(&self.panic).take()
        } else {
            let result = catch_unwind(AssertUnwindSafe(alone));
            self.credit.alone(started.elapsed());
            result.err()
        };
        self.taken.store(false, Release);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Shares out the parts of `work` and waits for them; the caller has the pool. Returns what the
    /// caller did, and what a part took at least, whoever did it.
    fn share<F: Fn(usize) + Sync>(&self, parts: usize, work: &F) -> Own {
        let job = Job {
            closure: std::ptr::from_ref(work).cast(),
            call: call::<F>,
            parts,
        };
        // SAFETY: this thread alone has the pool, whose last job is finished: `unfinished` was 0, so
        // whoever took a part has looked at the job for the last time, and the next part to be taken
        // is one of this job.
        unsafe {
            *self.job.0.get() = job;
        }
        self.least.store(u64::MAX, Relaxed);
        self.unfinished.0.store(parts, Relaxed);
        // Publishes them all: who takes a part reads this value or one that was made of it.
        self.remaining.0.store(parts, SeqCst);
        self.wake(parts - 1);
        let mut own = self.take_parts();
        self.finish(&own);
        self.wait(own.least.clamp(PATIENCE[0], PATIENCE[1]));
        own.least = Duration::from_nanos(self.least.load(Relaxed));
        own
    }

    /// The life of a worker.
    pub(crate) fn serve(&self, worker: usize) {
        self.handles[worker].get_or_init(thread::current);
        while self.wait_for_job(worker) {
            let own = self.take_parts();
            if own.parts > 0 {
                self.finish(&own);
            }
        }
    }

    /// Tells workers to end, once they are awake.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, SeqCst);
    }

    /// Does parts until nobody has any left to take.
    fn take_parts(&self) -> Own {
        let mut own = Own::default();
        let mut before = Instant::now();
        let take = |left: usize| left.checked_sub(1);
        while let Ok(left) = self.remaining.0.fetch_update(Acquire, Relaxed, take) {
            // SAFETY: a part was taken and is not yet counted as finished, so the caller is in `run`
            // and leaves the job as it is; taking the part synchronised with the job's writing.
            let job = unsafe { *self.job.0.get() };
            let part = job.parts - left;
            // SAFETY: as above, the closure is borrowed until this part is finished; `call` is the
            // one for its type.
            let call = || unsafe { (job.call)(job.closure, part) };
            // What a closure leaves behind when it panics is seen by the caller alone, which panics.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(call)) {
                self.keep(panic);
            }
            let now = Instant::now();
            let time = now.duration_since(before);
            before = now;
            own.least = if own.parts == 0 {
                time
            } else {
                own.least.min(time)
            };
            own.time += time;
            own.parts += 1;
        }
        own
    }

    /// Keeps what the first part to panic panicked with, for the caller.
    fn keep(&self, panic: Box<dyn Any + Send>) {
        let mut first = lock(&self.panic);
        if first.is_none() {
            *first = Some(panic);
        } else if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
            // It panics whenever it is dropped, so it is not.
            std::mem::forget(panic);
        }
    }

    /// Counts parts as finished; this thread does not look at their job again.
    fn finish(&self, own: &Own) {
        if own.parts > 0 {
            let least = u64::try_from(own.least.as_nanos()).unwrap_or(u64::MAX);
            self.least.fetch_min(least, Relaxed);
        }
        let last = self.unfinished.0.fetch_sub(own.parts, SeqCst) == own.parts;
        if last && self.caller_sleeps.load(SeqCst) {
            // Between its looking and its sleeping the caller holds the lock.
            drop(lock(&self.lock));
            self.finished.notify_one();
        }
    }

    /// Waits until all parts are finished, at first without sleeping.
    fn wait(&self, patience: Duration) {
        let finished = || self.unfinished.0.load(SeqCst) == 0;
        if finished() || (self.may_look > 0 && look_out(patience, finished)) {
            return;
        }
        let mut guard = lock(&self.lock);
        self.caller_sleeps.store(true, SeqCst);
        while !finished() {
            let woken = self.finished.wait(guard);
            guard = woken.unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_sleeps.store(false, SeqCst);
    }

    /// Waits for parts to take, at first without sleeping; `false` where the worker is to end.
    fn wait_for_job(&self, worker: usize) -> bool {
        let awaited = || self.remaining.0.load(SeqCst) > 0 || self.stopped.load(SeqCst);
        let (word, bit) = (&self.asleep[worker / 64], 1 << (worker % 64));
        loop {
            if self.looking.fetch_add(1, SeqCst) < self.may_look {
                look_out(LOOK_OUT, awaited);
            }
            self.looking.fetch_sub(1, SeqCst);
            if awaited() {
                return !self.stopped.load(SeqCst);
            }
            word.fetch_or(bit, SeqCst);
            if !awaited() {
                thread::park();
            }
            word.fetch_and(!bit, SeqCst);
            self.wake(self.remaining.0.load(SeqCst).saturating_sub(1));
        }
    }

    /// Wakes some sleepers, where parts are for more workers than look out for them.
    fn wake(&self, parts: usize) {
        let mut wanted = parts
            .saturating_sub(self.looking.load(SeqCst).min(self.may_look))
            .min(WAKES);
        for (word, handles) in self.asleep.iter().zip(self.handles.chunks(64)) {
            while wanted > 0 {
                let sleepers = word.load(SeqCst);
                if sleepers == 0 {
                    break;
                }
                // Who clears the bit wakes the worker, and nobody else.
                let bit = sleepers & sleepers.wrapping_neg();
                if word.fetch_and(!bit, SeqCst) & bit != 0 {
                    let handle = handles[bit.trailing_zeros() as usize].get();
                    handle.expect("set before the bit").unpark();
                    wanted -= 1;
                }
            }
        }
    }
}

/// Calls the closure of type `F` at `closure`.
///
/// # Safety
///
/// There is one, and it is borrowed for the time of the call.
unsafe fn call<F: Fn(usize) + Sync>(closure: *const (), part: usize) {
    // SAFETY: the caller's promise.
    let closure = unsafe { &*closure.cast::<F>() };
    closure(part);
}

/// Looks whether something `is_so`, for so long at most, without giving up the processor.
fn look_out(at_most: Duration, is_so: impl Fn() -> bool) -> bool {
    let mut started = None;
    loop {
        for _ in 0..LOOKS {
            if is_so() {
                return true;
            }
            std::hint::spin_loop();
        }
        if started.get_or_insert_with(Instant::now).elapsed() >= at_most {
            return false;
        }
    }
}

/// Locks; that a thread panicked with the lock says nothing about what is in it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use crate::Pool;

    use super::*;

    #[test]
    fn all_threads_take_part_whether_they_wait_or_sleep() {
        for threads in [2, 5, 40, 70] {
            let pool = Pool::new(threads).unwrap();
            for gap in [0, 20, 300, 3_000] {
                thread::sleep(Duration::from_micros(gap));
                // Nobody passes before everybody is there, so each part needs a thread of its own.
                let barrier = Barrier::new(threads);
                let own = pool.shared.share(threads, &|_| {
                    barrier.wait();
                });
                assert_eq!(own.parts, 1);
            }
        }
    }
}
