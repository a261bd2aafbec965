//! State shared by the threads of a pool: one job at a time, whose parts are taken by counting down.
//!
//! ```text
//!  caller   job = …   unfinished = n   remaining = n   epoch += 1   take parts …   wait for unfinished = 0
//!  worker                     wait for another epoch                take parts …   unfinished -= parts taken
//! ```
//!
//! **A job outlives its readers.** `run` borrows it until `unfinished` is 0. A thread reads the job only after
//! it has lowered `remaining` from above 0, and lowers `unfinished` when it is done with it; in between `unfinished` is
//! above 0. A late worker finds `remaining` at 0 or below and reads nothing; if the next job has started, it takes a
//! part of that one, since it reads the job after taking the part. Lowering is one atomic subtraction without retries; each
//! thread lowers `remaining` below 0 at most once per job, so it cannot wrap around.
//!
//! **A second stage follows without another start.** Its parts are `closed` at first: threads do not take them until the thread that
//! completes the first stage [opens](Shared::open) them. If there are more threads than processors, some threads leave the job after the
//! first stage.
//!
//! **Waiting costs the others nothing.** A waiting worker reads only `epoch`, whose cache line is written once per job, and announces
//! nothing until it sleeps. Threads that write to one cache line take turns, at a tenth of a microsecond each.
//!
//! **No wake-up is lost.** A worker announces that it sleeps and then checks for work; the caller publishes
//! work and then checks for sleepers. Both are sequentially consistent, so at least one of them sees the
//! other. The same holds for a caller that sleeps until the last part is done. Since the caller takes parts
//! until there are none, workers that stay asleep cost only time.

use std::{
    any::Any,
    cell::UnsafeCell,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicIsize, AtomicU64, AtomicUsize, Ordering::*},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use crate::credit::{Credit, ThreadWork};

/// Time that a worker spins for the next job: about the cost of waking it, so that spinning never costs much
/// more than sleeping.
const WORKER_SPIN: Duration = Duration::from_micros(50);
/// Minimum and maximum time that a caller spins for the last part; in between it is the time of a part of this
/// job, since a thread that takes longer has been preempted.
const CALLER_SPIN: [Duration; 2] = [Duration::from_micros(20), Duration::from_micros(200)];
/// Time that a thread spins for the second stage of a job before it lets other threads run.
const OPEN_SPIN: Duration = Duration::from_micros(200);
/// Checks between two readings of the clock.
const CHECKS_PER_CLOCK_READ: usize = 32;
/// Sleeping workers that one thread wakes; each of them wakes as many, so no thread spends long on it.
const WAKES: usize = 2;

/// Pads a value to avoid false sharing: processors fetch cache lines in pairs.
#[repr(align(128))]
struct CachePadded<T>(T);

/// Epoch after which workers end.
const STOPPED: u64 = u64::MAX;

/// Progress of a job, reported by each thread when no part is left to take.
struct Unfinished {
    /// Parts that are not yet finished.
    parts: AtomicUsize,
    /// Time of the fastest finished part of each stage of this job, in nanoseconds.
    min_nanos: [AtomicU64; 2],
}

/// How a thread reacts if all remaining parts are closed.
#[derive(Clone, Copy)]
enum IfClosed {
    /// Waits until the parts are open.
    Wait,
    /// Leaves the job and waits for the next one.
    Leave,
}

/// Type-erased closure that is called with part numbers.
#[derive(Clone, Copy)]
struct Job {
    closure: *const (),
    call: unsafe fn(*const (), usize),
    parts: usize,
    /// Parts of the first stage; the second has all others.
    first_stage: usize,
}

pub(crate) struct Shared {
    /// Parts that no thread has taken, or less than 0. Set by a caller, lowered by threads that take parts.
    remaining: CachePadded<AtomicIsize>,
    /// Number of parts that must not be taken yet, because they read what other parts compute. Usually 0.
    closed: CachePadded<AtomicIsize>,
    /// Number of jobs so far, or [`STOPPED`]. Workers wait for it to change.
    epoch: CachePadded<AtomicU64>,
    unfinished: CachePadded<Unfinished>,
    /// Written by the caller that has set `in_use`, while `unfinished` is 0 and `remaining` is at most 0.
    job: CachePadded<UnsafeCell<Job>>,
    /// Whether a caller uses the pool.
    in_use: AtomicBool,
    credit: Credit,
    /// Workers with a lower number spin while they wait for a job, and wait for its second stage instead of leaving. Spinning threads
    /// delay each other if there are more of them than processors.
    max_spinning: usize,
    /// One bit per worker, set while it sleeps or is about to.
    asleep: Box<[AtomicU64]>,
    handles: Box<[OnceLock<Thread>]>,
    /// Whether the caller sleeps on `finished`, or is about to.
    caller_sleeps: AtomicBool,
    lock: Mutex<()>,
    finished: Condvar,
    /// Payload of the first part of a job that panicked.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: only `job` is not already `Send` and `Sync`. It points to a closure that is `Sync`, and the module
// documentation explains why it is never read while it is written or after the closure is gone.
#[expect(unsafe_code, reason = "a job borrows from its caller's stack")]
unsafe impl Send for Shared {}
// SAFETY: as above.
#[expect(unsafe_code, reason = "a job borrows from its caller's stack")]
unsafe impl Sync for Shared {}

impl Shared {
    pub(crate) fn new(workers: usize) -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let no_job = Job {
            closure: std::ptr::null(),
            call: call::<fn(usize)>,
            parts: 0,
            first_stage: 0,
        };
        Self {
            remaining: CachePadded(AtomicIsize::new(0)),
            closed: CachePadded(AtomicIsize::new(0)),
            epoch: CachePadded(AtomicU64::new(0)),
            unfinished: CachePadded(Unfinished {
                parts: AtomicUsize::new(0),
                min_nanos: Default::default(),
            }),
            job: CachePadded(UnsafeCell::new(no_job)),
            in_use: AtomicBool::new(false),
            credit: Credit::new(),
            max_spinning: processors - 1,
            asleep: (0..workers.div_ceil(64))
                .map(|_| AtomicU64::new(0))
                .collect(),
            handles: (0..workers).map(|_| OnceLock::new()).collect(),
            caller_sleeps: AtomicBool::new(false),
            lock: Mutex::new(()),
            finished: Condvar::new(),
            panic: Mutex::new(None),
        }
    }

    /// Runs `work` on all threads, or `alone` if that is faster or the pool is in use. The first `first_stage` of the `parts` are the
    /// first stage; the others are usually not taken before [`open`](Self::open) is called.
    pub(crate) fn run<F: Fn(usize) + Sync>(
        &self,
        (parts, first_stage): (usize, usize),
        work: &F,
        alone: impl FnOnce(),
    ) {
        if self.in_use.swap(true, Acquire) {
            return alone();
        }
        let started = Instant::now();
        let panic = if self.credit.allows_sharing() {
            let [first, second] = self.share((parts, first_stage), work);
            let counts = [first_stage, parts - first_stage];
            let others = [counts[0] - first.parts, counts[1] - second.parts];
            let stages = [(first, others[0]), (second, others[1])];
            self.credit.record_shared(&stages, started.elapsed());
            lock(&self.panic).take()
        } else {
            let result = catch_unwind(AssertUnwindSafe(alone));
            self.credit.record_alone(started.elapsed());
            result.err()
        };
        self.in_use.store(false, Release);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Shares the parts of `work` and waits for them; the caller uses the pool. Returns the caller's work in both stages, with the
    /// time of each stage's fastest part on any thread.
    fn share<F: Fn(usize) + Sync>(
        &self,
        (parts, first_stage): (usize, usize),
        work: &F,
    ) -> [ThreadWork; 2] {
        let job = Job {
            closure: std::ptr::from_ref(work).cast(),
            call: call::<F>,
            parts,
            first_stage,
        };
        // SAFETY: only this thread uses the pool, whose last job is finished: `unfinished` was 0, so every thread
        // that took a part has read the job for the last time, and the next part taken belongs to this job.
        #[expect(unsafe_code, reason = "see above")]
        unsafe {
            *self.job.0.get() = job;
        }
        let unfinished = &self.unfinished.0;
        for least in &unfinished.min_nanos {
            least.store(u64::MAX, Relaxed);
        }
        unfinished.parts.store(parts, Relaxed);
        self.closed
            .0
            .store((parts - first_stage).cast_signed(), Relaxed);
        // Publishes the above: a thread that takes a part reads this value or one derived from it.
        self.remaining.0.store(parts.cast_signed(), Release);
        self.epoch.0.fetch_add(1, SeqCst);
        let asleep = self.asleep.iter();
        let asleep: u32 = asleep.map(|word| word.load(SeqCst).count_ones()).sum();
        // Workers that are awake take parts without being woken.
        let awake = self.handles.len() - asleep as usize;
        self.wake((parts - 1).saturating_sub(awake));
        let (mut own, taken) = self.take_parts(IfClosed::Wait);
        self.finish(&own, taken);
        let slowest_stage = own[0].min_time.max(own[1].min_time);
        self.wait(slowest_stage.clamp(CALLER_SPIN[0], CALLER_SPIN[1]));
        for (own, least) in own.iter_mut().zip(&unfinished.min_nanos) {
            // A stage without parts has no fastest part.
            let least = Some(least.load(Relaxed)).filter(|least| *least < u64::MAX);
            own.min_time = Duration::from_nanos(least.unwrap_or(0));
        }
        own
    }

    /// Main loop of a worker thread.
    pub(crate) fn serve(&self, worker: usize) {
        self.handles[worker].get_or_init(thread::current);
        let mut epoch = 0;
        // If more threads waited than there are processors, they would delay the threads they wait for.
        let if_closed = if worker < self.max_spinning {
            IfClosed::Wait
        } else {
            IfClosed::Leave
        };
        while self.wait_for_job(worker, &mut epoch) {
            let (own, taken) = self.take_parts(if_closed);
            if taken > 0 {
                self.finish(&own, taken);
            }
        }
    }

    /// Asks the workers to end; sleeping ones must be woken.
    pub(crate) fn stop(&self) {
        self.epoch.0.store(STOPPED, SeqCst);
    }

    /// Takes and runs parts until none are left; returns the work in both stages, and the number of parts.
    fn take_parts(&self, if_closed: IfClosed) -> ([ThreadWork; 2], usize) {
        let (mut own, mut taken) = <([ThreadWork; 2], usize)>::default();
        let mut before = Instant::now();
        while let Some((left, has_waited)) = self.take_part(if_closed) {
            if has_waited {
                before = Instant::now();
            }
            // SAFETY: a part was taken and is not yet finished, so the caller is in `run` and does not change the job;
            // taking the part synchronised with the writing of the job.
            #[expect(unsafe_code, reason = "see above")]
            let job = unsafe { *self.job.0.get() };
            let part = job.parts - left;
            // SAFETY: as above, the closure is borrowed until this part is finished; `call` matches its type.
            #[expect(unsafe_code, reason = "see above")]
            let call = || unsafe { (job.call)(job.closure, part) };
            // State that a panicking closure leaves behind is seen only by the caller, which panics too.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(call)) {
                self.keep_panic(panic);
            }
            taken += 1;
            let now = Instant::now();
            let time = now.duration_since(before);
            before = now;
            let stage = &mut own[usize::from(part >= job.first_stage)];
            stage.min_time = if stage.parts == 0 {
                time
            } else {
                stage.min_time.min(time)
            };
            stage.time += time;
            stage.parts += 1;
        }
        (own, taken)
    }

    /// Takes a part; returns how many were left, including it, and whether the thread had to wait for it. Returns `None` if all are
    /// taken or the thread leaves the job.
    ///
    /// A thread that waits for a part has not taken it, so another thread can take the part if the waiting one is preempted. If two threads
    /// find the same last open part, one of them may still take a closed part.
    fn take_part(&self, if_closed: IfClosed) -> Option<(usize, bool)> {
        let remaining = &self.remaining.0;
        let is_closed = |left: isize| left > 0 && left <= self.closed.0.load(Acquire);
        // Reads first, so that threads do not write to the cache line of a job whose parts are all taken.
        let has_waited = is_closed(remaining.load(Relaxed));
        match if_closed {
            IfClosed::Leave if has_waited => return None,
            IfClosed::Wait if has_waited => {
                self.wait_until_open(|| !is_closed(remaining.load(Relaxed)));
            }
            _ => {}
        }
        let left = (remaining.load(Relaxed) > 0).then(|| remaining.fetch_sub(1, Acquire))?;
        let left = usize::try_from(left).ok().filter(|left| *left > 0)?;
        Some((left, has_waited))
    }

    /// Spins until `is_open` returns true. Lets other threads run now and then, because one of them may need this thread's processor.
    pub(crate) fn wait_until_open(&self, is_open: impl Fn() -> bool) {
        // On a single processor, spinning only delays the other threads.
        let spin_time = OPEN_SPIN * u32::from(self.max_spinning > 0);
        while !spin_until(spin_time, &is_open) {
            thread::yield_now();
        }
    }

    /// Opens all parts of the running job.
    pub(crate) fn open(&self) {
        self.closed.0.store(0, Release);
    }

    /// Keeps the first panic payload of a job for the caller.
    fn keep_panic(&self, panic: Box<dyn Any + Send>) {
        let mut first = lock(&self.panic);
        if first.is_none() {
            *first = Some(panic);
        } else if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
            // Its destructor panics, so it is leaked.
            std::mem::forget(panic);
        }
    }

    /// Counts the `taken` parts as finished; this thread does not read their job again.
    fn finish(&self, own: &[ThreadWork; 2], taken: usize) {
        for (own, all) in own.iter().zip(&self.unfinished.0.min_nanos) {
            if own.parts > 0 {
                let least = u64::try_from(own.min_time.as_nanos()).unwrap_or(u64::MAX);
                all.fetch_min(least, Relaxed);
            }
        }
        let unfinished = &self.unfinished.0.parts;
        let last = unfinished.fetch_sub(taken, SeqCst) == taken;
        if last && self.caller_sleeps.load(SeqCst) {
            // The caller holds the lock between checking and sleeping.
            drop(lock(&self.lock));
            self.finished.notify_one();
        }
    }

    /// Waits until all parts are finished, spinning for `spin_time` before sleeping.
    fn wait(&self, spin_time: Duration) {
        let finished = || self.unfinished.0.parts.load(SeqCst) == 0;
        if finished() || (self.max_spinning > 0 && spin_until(spin_time, finished)) {
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

    /// Waits for a job after `epoch`, spinning before sleeping, and sets `epoch` to the job's; returns `false` if the worker is to end.
    fn wait_for_job(&self, worker: usize, epoch: &mut u64) -> bool {
        let awaited = || self.epoch.0.load(SeqCst) != *epoch;
        let (word, bit) = (&self.asleep[worker / 64], 1 << (worker % 64));
        if worker < self.max_spinning {
            spin_until(WORKER_SPIN, awaited);
        }
        while !awaited() {
            word.fetch_or(bit, SeqCst);
            if !awaited() {
                thread::park();
            }
            word.fetch_and(!bit, SeqCst);
            let left = usize::try_from(self.remaining.0.load(SeqCst)).unwrap_or(0);
            self.wake(left.saturating_sub(1));
        }
        *epoch = self.epoch.0.load(SeqCst);
        *epoch != STOPPED
    }

    /// Wakes up to `workers` sleeping workers, or [`WAKES`] if that is less.
    fn wake(&self, workers: usize) {
        let mut wanted = workers.min(WAKES);
        for (word, handles) in self.asleep.iter().zip(self.handles.chunks(64)) {
            while wanted > 0 {
                let sleepers = word.load(SeqCst);
                if sleepers == 0 {
                    break;
                }
                // The thread that clears the bit wakes the worker.
                let bit = sleepers & sleepers.wrapping_neg();
                if word.fetch_and(!bit, SeqCst) & bit != 0 {
                    let handle = handles[bit.trailing_zeros() as usize].get();
                    handle.expect("the handle is set before the bit").unpark();
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
/// `closure` points to a live `F` for the time of the call.
#[expect(unsafe_code, reason = "type erasure")]
unsafe fn call<F: Fn(usize) + Sync>(closure: *const (), part: usize) {
    // SAFETY: guaranteed by the caller.
    let closure = unsafe { &*closure.cast::<F>() };
    closure(part);
}

/// Spins until `condition` holds, at most for `spin_time`; returns whether it holds.
fn spin_until(spin_time: Duration, condition: impl Fn() -> bool) -> bool {
    let mut started = None;
    loop {
        for _ in 0..CHECKS_PER_CLOCK_READ {
            if condition() {
                return true;
            }
            std::hint::spin_loop();
        }
        if started.get_or_insert_with(Instant::now).elapsed() >= spin_time {
            return false;
        }
    }
}

/// Locks a mutex, ignoring poisoning: its content is valid in any case.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use crate::Pool;

    use super::*;

    #[test]
    fn spinning_and_sleeping_threads_take_parts() {
        for threads in [2, 5, 40, 70] {
            let pool = Pool::new(threads).unwrap();
            let sleeping = || {
                let words = pool.shared.asleep.iter();
                words
                    .map(|word| word.load(SeqCst).count_ones())
                    .sum::<u32>()
            };
            for sleepers in [0, threads as u32 - 1, 0, threads as u32 - 1] {
                while sleeping() < sleepers {
                    thread::yield_now();
                }
                // The barrier needs all threads, so each part runs on a thread of its own.
                let barrier = Barrier::new(threads);
                let [own, _] = pool.shared.share((threads, threads), &|_| {
                    barrier.wait();
                });
                assert_eq!(own.parts, 1);
            }
        }
    }
}
