//! Two stages in one job: the second begins as soon as the first has ended, without starting the threads again.
//!
//! The thread that ends the last part of the first stage links the stages and opens the second. Usually, other threads wait for that before
//! they take a part of the second; a thread that has already taken one waits within the part. So a thread waits only for work that runs on
//! another thread.
#![expect(unsafe_code, reason = "hands out disjoint parts, as `chunks` does")]

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering::*},
    },
};

use crate::{
    Pool,
    chunks::Chunks,
    shared::{Shared, lock},
};

impl Pool {
    /// Like two calls of [`Pool::run_chunks`], but in one job: calls `work` with parts of `out` between its bounds; then `link` once, with
    /// all of `out`; then `next_work` with parts of `next` and the result of `link`.
    ///
    /// # Panics
    ///
    /// Panics like [`Pool::run_chunks`]. The second stage is not run if the first stage or `link` panics.
    pub fn run_stages<'a, T: Send, Link: Send + Sync, U: Send>(
        &self,
        (out, bounds): (&'a mut [T], &[usize]),
        work: &(impl Fn(usize, &mut [T]) + Sync),
        link: impl FnOnce(&'a mut [T]) -> Link + Send,
        (next, next_bounds): (&mut [U], &[usize]),
        next_work: &(impl Fn(usize, &mut [U], &Link) + Sync),
    ) {
        let (chunks, next_chunks) = (Chunks::new(out, bounds), Chunks::new(next, next_bounds));
        // A first stage without parts gets one, which links the stages.
        let first_stage = chunks.count().max(1);
        let unfinished = AtomicUsize::new(first_stage);
        let [has_failed, is_open] = [false; 2].map(AtomicBool::new);
        let (linked, link) = (OnceLock::new(), Mutex::new(Some(link)));
        let take_link = || lock(&link).take().expect("stages are linked once");
        let end_part = |has_panicked: bool| {
            if has_panicked {
                has_failed.store(true, Relaxed);
            }
            if unfinished.fetch_sub(1, AcqRel) > 1 {
                return;
            }
            let _opens = OpensOnDrop(&is_open, &self.shared);
            if !has_failed.load(Relaxed) {
                // SAFETY: the parts of the first stage have ended, and only `Link` keeps a reference.
                let link = take_link()(unsafe { chunks.slice() });
                let _: Result<(), Link> = linked.set(link);
            }
        };
        // SAFETY, for all parts below: each is taken once, or `alone` has all of them, and `run_or` returns after all calls.
        let part = |part: usize| {
            if let Some(part) = part.checked_sub(first_stage) {
                self.shared.wait_until_open(|| is_open.load(Acquire));
                if let Some(link) = linked.get() {
                    // SAFETY: see above.
                    let (start, values) = unsafe { next_chunks.part(part) };
                    next_work(start, values, link);
                }
                return;
            }
            let result = catch_unwind(AssertUnwindSafe(|| {
                if part < chunks.count() {
                    // SAFETY: see above.
                    let (start, values) = unsafe { chunks.part(part) };
                    work(start, values);
                }
            }));
            end_part(result.is_err());
            if let Err(panic) = result {
                resume_unwind(panic);
            }
        };
        self.run_or(&[first_stage, next_chunks.count()], &part, || {
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

/// Opens the second stage when it is dropped, even during a panic.
struct OpensOnDrop<'a>(&'a AtomicBool, &'a Shared);

impl Drop for OpensOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Release);
        self.1.open();
    }
}
