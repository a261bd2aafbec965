//! A slice whose parts are written by different threads.

use crate::Pool;

/// Where a slice starts, for threads that each write another part of it.
struct Start<T>(*mut T);

// SAFETY: what lies there is handed out in parts that do not overlap, each to one thread, which may
// have it because it is `Send`.
#[allow(unsafe_code)] // the only way to give parts chosen at run time to threads chosen at run time
unsafe impl<T: Send> Sync for Start<T> {}

impl<T> Start<T> {
    /// The `length` values from `first` on.
    ///
    /// # Safety
    ///
    /// They lie in the slice, which is borrowed for `'a`, and nobody else has them meanwhile.
    #[allow(unsafe_code)]
    #[allow(clippy::mut_from_ref)] // the contract above is what makes it unique
    unsafe fn part<'a>(&self, first: usize, length: usize) -> &'a mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(first), length) }
    }
}

impl Pool {
    /// Like [`Pool::run`], with part i of `out` for call i: `out[bounds[i]..bounds[i + 1]]`.
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
        let last = bounds.last().copied().unwrap_or(0);
        assert!(
            last <= out.len(),
            "a bound at {last} of {} values",
            out.len()
        );
        let start = Start(out.as_mut_ptr());
        self.run(bounds.len().saturating_sub(1), &|part| {
            let (first, end) = (bounds[part], bounds[part + 1]);
            // SAFETY: bounds ascend up to the length of `out`, so parts lie in it and do not overlap;
            // `run` calls every part once and returns after all of them, while `out` is borrowed.
            #[allow(unsafe_code)]
            let values = unsafe { start.part(first, end - first) };
            work(part, values);
        });
    }
}
