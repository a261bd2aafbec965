//! Parallel writes to disjoint parts of a slice.
#![expect(
    unsafe_code,
    reason = "disjoint parts chosen at run time go to threads chosen at run time"
)]

use std::marker::PhantomData;

use crate::Pool;

/// A slice that is handed out in parts: `[bounds[i]..bounds[i + 1]]` for every `i`.
pub(crate) struct Chunks<'a, 'b, T> {
    start: *mut T,
    length: usize,
    bounds: &'b [usize],
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: the slice is handed out in parts that do not overlap, each to one thread; `T: Send` allows that.
unsafe impl<T: Send> Sync for Chunks<'_, '_, T> {}

impl<'a, 'b, T> Chunks<'a, 'b, T> {
    /// # Panics
    ///
    /// If `bounds` are not ascending or exceed `out`.
    pub(crate) fn new(out: &'a mut [T], bounds: &'b [usize]) -> Self {
        let length = out.len();
        assert!(bounds.is_sorted(), "bounds are ascending");
        let end = bounds.last().copied().unwrap_or(0);
        assert!(end <= length, "a bound at {end} of {length} values");
        Self {
            start: out.as_mut_ptr(),
            length,
            bounds,
            slice: PhantomData,
        }
    }

    /// Number of parts.
    pub(crate) fn count(&self) -> usize {
        self.bounds.len().saturating_sub(1)
    }

    /// Part `index`, counted from the last, and the index of its first value in the slice. Rows are sorted by activation frequency: the
    /// active rows of the last parts are far apart and take the longest to read, so the last parts start first.
    ///
    /// # Safety
    ///
    /// No other reference to the part exists.
    pub(crate) unsafe fn part(&self, index: usize) -> (usize, &'a mut [T]) {
        let index = self.count() - 1 - index;
        let (first, end) = (self.bounds[index], self.bounds[index + 1]);
        // SAFETY: bounds ascend up to the length of the slice, which is borrowed for `'a`; the caller excludes other references.
        let values = unsafe { std::slice::from_raw_parts_mut(self.start.add(first), end - first) };
        (first, values)
    }

    /// All parts as one; `None` if there are none.
    ///
    /// # Safety
    ///
    /// No other reference to a part exists.
    pub(crate) unsafe fn parts(&self) -> Option<(usize, &'a mut [T])> {
        let [first, .., end] = *self.bounds else {
            return None;
        };
        // SAFETY: as in `part`.
        let values = unsafe { std::slice::from_raw_parts_mut(self.start.add(first), end - first) };
        Some((first, values))
    }

    /// The slice.
    ///
    /// # Safety
    ///
    /// No other reference to it or to a part exists.
    pub(crate) unsafe fn slice(&self) -> &'a mut [T] {
        // SAFETY: it is borrowed for `'a`, and the caller excludes other references.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.length) }
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
        let chunks = Chunks::new(out, bounds);
        let part = |index| {
            // SAFETY: each part is taken once, or `alone` has all of them, and `run_or` returns after all calls.
            let (first, values) = unsafe { chunks.part(index) };
            work(first, values);
        };
        self.run_or(&[chunks.count()], &part, || {
            // SAFETY: as above.
            if let Some((first, values)) = unsafe { chunks.parts() } {
                work(first, values);
            }
        });
    }
}
