//! Parallel writes to disjoint parts of a slice.

use crate::Pool;

/// Start of a slice whose disjoint parts are written by different threads.
struct Start<T>(*mut T);

// SAFETY: the slice is handed out in parts that do not overlap, each to one thread; `T: Send` allows that.
#[expect(
    unsafe_code,
    reason = "disjoint parts chosen at run time go to threads chosen at run time"
)]
unsafe impl<T: Send> Sync for Start<T> {}

impl<T> Start<T> {
    /// Returns the `length` values from `first` on.
    ///
    /// # Safety
    ///
    /// The range is within the slice, the slice is borrowed for `'a`, and no other reference to the range exists.
    #[expect(unsafe_code, reason = "see above")]
    unsafe fn part<'a>(&self, first: usize, length: usize) -> &'a mut [T] {
        // SAFETY: guaranteed by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(first), length) }
    }
}

impl Pool {
    /// Calls `work` with disjoint parts of `out` and the index of their first value, as [`Pool::run`] does: with
    /// `out[bounds[i]..bounds[i + 1]]` for every `i`, or with all of these as one part if sharing does not
    /// pay. Values outside the bounds are not touched.
    ///
    /// # Panics
    ///
    /// If `bounds` are not ascending or exceed `out`, or as [`Pool::run`].
    pub fn run_chunks<T: Send>(
        &self,
        out: &mut [T],
        bounds: &[usize],
        work: &(impl Fn(usize, &mut [T]) + Sync),
    ) {
        assert!(bounds.is_sorted(), "bounds are ascending");
        let [first, .., end] = *bounds else {
            return;
        };
        assert!(end <= out.len(), "a bound at {end} of {} values", out.len());
        let start = Start(out.as_mut_ptr());
        let part = |first: usize, end: usize| {
            // SAFETY: bounds ascend up to the length of `out`, so parts are within it and disjoint. Either one call
            // has all of them, or each call has a different one, and `run_or` returns after all calls, while `out` is
            // borrowed.
            #[expect(unsafe_code, reason = "see above")]
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
