//! Prefetching of listed rows.

use super::Simd;

/// Bytes per cache line.
pub(super) const LINE: usize = 64;

/// Prefetches listed rows line by line, one row after the other: what memory delivers fastest. Kernels that read several rows in
/// parallel, a pattern that hardware prefetchers miss, ask for some lines at every step, because a processor tracks few
/// outstanding lines and waits when there are more.
pub(super) struct Reader<'r, F> {
    /// The bytes of row `index` of the list.
    row_of: F,
    /// Index of the next row.
    next: usize,
    /// The rest of the current row.
    lines: &'r [[u8; LINE]],
}

impl<'r, F: Fn(usize) -> Option<&'r [u8]>> Reader<'r, F> {
    #[inline(always)]
    pub(super) fn new(row_of: F) -> Self {
        Self {
            row_of,
            next: 0,
            lines: &[],
        }
    }

    /// Prefetches the next `count` lines of the rows before row `end`.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd>(&mut self, simd: S, end: usize, count: usize) {
        let mut left = count;
        while left > 0 {
            if self.lines.is_empty() {
                if self.next >= end {
                    return;
                }
                let Some(row) = (self.row_of)(self.next) else {
                    return;
                };
                self.next += 1;
                self.lines = row.as_chunks().0;
            }
            let (now, rest) = self.lines.split_at(self.lines.len().min(left));
            for line in now {
                simd.prefetch(std::slice::from_ref(&line[0]));
            }
            (self.lines, left) = (rest, left - now.len().max(1));
        }
    }
}
