//! Two stages in one job: the second begins as soon as the first has ended, without another start of the threads.
//!
//! Parts are taken in order: those of the first stage, one that links the stages, and those of the second. The link waits for the
//! first stage, and the second stage for the link. So whatever a thread waits for is running on another.
#![expect(unsafe_code, reason = "hands out disjoint parts, as `chunks` does")]

use std::{
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering::*},
    },
    thread,
};

use crate::{Pool, chunks::Chunks, shared::lock};

/// Checks of a waiting thread before it lets others run.
const CHECKS_PER_YIELD: usize = 4096;

impl Pool {
    /// As [`Pool::run_chunks`] twice, in one job: `work` with parts of `out` between its bounds; then `link` once, with all of
    /// `out`; then `next_work` with parts of `next` and what `link` has returned.
    ///
    /// # Panics
    ///
    /// As [`Pool::run_chunks`]. After a panic in the first stage or in `link`, the second stage is not run.
    pub fn run_stages<'a, T: Send, Link: Send + Sync, U: Send>(
        &self,
        (out, bounds): (&'a mut [T], &[usize]),
        work: &(impl Fn(usize, &mut [T]) + Sync),
        link: impl FnOnce(&'a mut [T]) -> Link + Send,
        (next, next_bounds): (&mut [U], &[usize]),
        next_work: &(impl Fn(usize, &mut [U], &Link) + Sync),
    ) {
        let (chunks, next_chunks) = (Chunks::new(out, bounds), Chunks::new(next, next_bounds));
        let stages = [chunks.count(), 1, next_chunks.count()];
        let first = Progress {
            unfinished: AtomicUsize::new(stages[0]),
            has_failed: AtomicBool::new(false),
        };
        let between = Progress {
            unfinished: AtomicUsize::new(1),
            has_failed: AtomicBool::new(false),
        };
        let (linked, link) = (OnceLock::new(), Mutex::new(Some(link)));
        let take_link = || lock(&link).take().expect("stages are linked once");
        // SAFETY, of all parts below: each is taken once, or `alone` has all of them, and `run_or` returns after all calls.
        let part = |part: usize| {
            if part < stages[0] {
                let _ends = first.part();
                // SAFETY: see above.
                let (start, values) = unsafe { chunks.part(part) };
                work(start, values);
            } else if part == stages[0] {
                let _ends = between.part();
                if first.wait() {
                    // SAFETY: the parts of the first stage have ended, and only `Link` keeps a reference.
                    let link = take_link()(unsafe { chunks.slice() });
                    let _: Result<(), Link> = linked.set(link);
                }
            } else if let (true, Some(link)) = (between.wait(), linked.get()) {
                // SAFETY: see above.
                let (start, values) = unsafe { next_chunks.part(part - stages[0] - 1) };
                next_work(start, values, link);
            }
        };
        self.run_or(&stages, &part, || {
            // SAFETY: see above.
            if let Some((start, values)) = unsafe { chunks.parts() } {
                work(start, values);
            }
            // SAFETY: the first stage has ended.
            let link = take_link()(unsafe { chunks.slice() });
            // SAFETY: see above.
            if let Some((start, values)) = unsafe { next_chunks.parts() } {
                next_work(start, values, &link);
            }
        });
    }
}

/// How far a stage is.
struct Progress {
    /// Parts that have not ended.
    unfinished: AtomicUsize,
    /// Whether one of them has panicked.
    has_failed: AtomicBool,
}

/// A part that runs, and ends when this is dropped.
struct RunningPart<'a>(&'a Progress);

impl Progress {
    fn part(&self) -> RunningPart<'_> {
        RunningPart(self)
    }

    /// Waits until the stage has ended; returns whether no part has panicked.
    fn wait(&self) -> bool {
        while self.unfinished.load(Acquire) > 0 {
            for _ in 0..CHECKS_PER_YIELD {
                if self.unfinished.load(Acquire) == 0 {
                    break;
                }
                std::hint::spin_loop();
            }
            if self.unfinished.load(Acquire) > 0 {
                // The thread that is awaited may need this one's processor.
                thread::yield_now();
            }
        }
        !self.has_failed.load(Relaxed)
    }
}

impl Drop for RunningPart<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.has_failed.store(true, Relaxed);
        }
        self.0.unfinished.fetch_sub(1, AcqRel);
    }
}
