//! How many signs of each row agree with those of a vector.

use super::{Operation, Simd};
use powerinfer_tensor::SignMatrix;

/// `out[i]` = signs of row i that are those of `x`.
pub(crate) struct Agreements<'a> {
    pub(crate) signs: &'a SignMatrix<'a>,
    pub(crate) x: &'a [u64],
    pub(crate) out: &'a mut [u32],
}

impl Agreements<'_> {
    /// The same code for all: what differs is how the compiler counts bits.
    #[inline(always)]
    fn count(self) {
        let columns = self.signs.columns() as u32;
        let rows = self.signs.word_bytes().chunks_exact(self.x.len().max(1));
        for (row, out) in rows.zip(self.out) {
            let words = row.iter().zip(self.x);
            let differ = |(word, x): (&[u8; 8], &u64)| (u64::from_le_bytes(*word) ^ x).count_ones();
            // Bits beyond the columns are zero in both and do not differ.
            *out = columns - words.map(differ).sum::<u32>();
        }
    }
}

impl Operation for Agreements<'_> {
    type Output = ();

    fn specify(self) {
        self.count();
    }

    #[inline(always)]
    fn translate<S: Simd>(self, _simd: S) {
        self.count();
    }
}
