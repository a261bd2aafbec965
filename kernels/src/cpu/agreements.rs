//! Counts of columns in which a row of signs agrees with a vector of signs.

use super::{Operation, Simd};
use powerinfer_tensor::SignMatrix;

/// `out[i]` = number of columns in which row i has the sign of `x`.
pub(crate) struct SignAgreements<'a> {
    pub(crate) signs: &'a SignMatrix<'a>,
    pub(crate) x: &'a [u64],
    pub(crate) out: &'a mut [u32],
}

impl SignAgreements<'_> {
    /// The same code for every instruction set; the compiler chooses how to count bits.
    #[inline(always)]
    fn count(self) {
        let columns = self.signs.columns() as u32;
        let rows = self.signs.word_bytes().chunks_exact(self.x.len().max(1));
        for (row, out) in rows.zip(self.out) {
            let words = row.iter().zip(self.x);
            let differ = |(word, x): (&[u8; 8], &u64)| (u64::from_le_bytes(*word) ^ x).count_ones();
            // Padding bits are zero in both.
            *out = columns - words.map(differ).sum::<u32>();
        }
    }
}

impl Operation for SignAgreements<'_> {
    type Output = ();

    fn run_scalar(self) {
        self.count();
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, _simd: S) {
        self.count();
    }
}
