//! A slice whose parts are written by different threads.
#![expect(
    unsafe_code,
    reason = "threads chosen at run time write to parts chosen at run time"
)]

use crate::Pool;

/// Where a slice starts, for threads that each write another part of it.
struct Start<T>(*mut T);

// SAFETY: what lies there is handed out in parts that do not overlap, each to one thread, which may
// have it because it is `Send`.
unsafe impl<T: Send> Sync for Start<T> {}

impl<T> Start<T> {
    /// The `length` values from `first` on.
    ///
    /// # Safety
    ///
    /// They lie in the slice, which is borrowed for `'a`, and nobody else has them meanwhile.
    unsafe fn part<'a>(&self, first: usize, length: usize) -> &'a mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(first), length) }
    }
}

impl Pool {
    /// Calls `work` with parts of `out` and where they start, as [`Pool::run`] does with numbers: with
    /// `out[bounds[i]..bounds[i + 1]]` for every i, or, where sharing does not pay, with all of these
    /// as one.
    ///
    /// Panics where bounds descend or pass the end of `out`; what lies before the first bound or from
    /// the last one on is left alone.
    pub fn run_chunks<T: Send>(
        &self,
        out: &mut [T],
        bounds: &[usize],
        work: &(impl Fn(usize, &mut [T]) + Sync),
    ) {
        assert!(bounds.is_sorted(), "bounds in ascending order");
        let [first, .., end] = *bounds else {
            return;
        };
        assert!(end <= out.len(), "a bound at {end} of {} values", out.len());
        let start = Start(out.as_mut_ptr());
        let part = |first: usize, end: usize| {
            // SAFETY: bounds ascend up to the length of `out`, so parts lie in it and do not overlap.
            // One call has all of them, or each call another one, and `run_or` returns after all
            // calls, while `out` is borrowed.
            let values = unsafe { start.part(first, end - first) };
            work(first, values);
        };
        self.run_or(
            bounds.len() - 1,
            &|index| part(bounds[index], bounds[index + 1]),
            || part(first, end),
        );
    }
}
