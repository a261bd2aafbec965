//! Sums of words, bounded by read bandwidth: used to measure it.

use super::{
    Operation, Simd,
    reader::{LINE, Reader},
};

/// Words that are added in parallel: eight registers of the widest instruction set.
const LANES: usize = 64;
/// Words of a cache line.
const LINE_WORDS: usize = LINE / size_of::<u64>();

/// Wrapping sum of all words.
pub(crate) struct SumWords<'a> {
    pub(crate) words: &'a [u64],
}

impl SumWords<'_> {
    /// The same code for every instruction set; the compiler vectorises it.
    #[inline(always)]
    fn add(self) -> u64 {
        let (blocks, rest) = self.words.as_chunks::<LANES>();
        let mut sums = [0u64; LANES];
        for block in blocks {
            for (sum, word) in sums.iter_mut().zip(block) {
                *sum = sum.wrapping_add(*word);
            }
        }
        let sums = sums.iter().chain(rest);
        sums.fold(0, |sum, word| sum.wrapping_add(*word))
    }
}

impl Operation for SumWords<'_> {
    type Output = u64;

    fn run_scalar(self) -> u64 {
        self.add()
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, _simd: S) -> u64 {
        self.add()
    }
}

/// Wrapping sum of all words of listed rows, each as long as `row_words`.
pub(crate) struct SumRows<'a> {
    pub(crate) words: &'a [u64],
    pub(crate) row_words: usize,
    pub(crate) rows: &'a [u32],
    /// Cache lines in flight ahead of the sum, across rows.
    pub(crate) lines_ahead: usize,
}

impl<'a> SumRows<'a> {
    fn row(&self, row: u32) -> &'a [u64] {
        &self.words[row as usize * self.row_words..][..self.row_words]
    }
}

impl Operation for SumRows<'_> {
    type Output = u64;

    fn run_scalar(self) -> u64 {
        let words = self.rows.iter().flat_map(|row| self.row(*row));
        words.fold(0, |sum, word| sum.wrapping_add(*word))
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, simd: S) -> u64 {
        let bytes = |index: usize| {
            let row = self.rows.get(index)?;
            Some(bytemuck::cast_slice(self.row(*row)))
        };
        let mut reader = Reader::new(bytes);
        reader.prefetch(simd, self.rows.len(), self.lines_ahead);
        let mut sums = [0u64; LINE_WORDS];
        for row in self.rows {
            let (lines, rest) = self.row(*row).as_chunks::<LINE_WORDS>();
            for line in lines {
                if self.lines_ahead > 0 {
                    reader.prefetch(simd, self.rows.len(), 1);
                }
                for (sum, word) in sums.iter_mut().zip(line) {
                    *sum = sum.wrapping_add(*word);
                }
            }
            for (sum, word) in sums.iter_mut().zip(rest) {
                *sum = sum.wrapping_add(*word);
            }
        }
        sums.into_iter().fold(0, u64::wrapping_add)
    }
}

#[cfg(test)]
mod tests {
    use crate::Isa;

    #[test]
    fn every_word_is_added_once() {
        let words: Vec<u64> = (0..1000).map(|word| word << 50 | word).collect();
        for isa in Isa::available() {
            for length in [0, 1, 63, 64, 65, 127, 128, 1000] {
                let want = words[..length]
                    .iter()
                    .fold(0u64, |sum, word| sum.wrapping_add(*word));
                assert_eq!(isa.sum_words(&words[..length]), want, "{isa} {length}");
            }
        }
    }

    #[test]
    fn every_word_of_listed_rows_is_added_once() {
        let words: Vec<u64> = (0..1000).map(|word| word << 50 | word).collect();
        for isa in Isa::available() {
            for row_words in [1, 7, 8, 36, 100] {
                let rows: Vec<u32> = (0..1000 / row_words as u32).step_by(3).collect();
                let of_row = |row: &u32| &words[*row as usize * row_words..][..row_words];
                let want = rows.iter().flat_map(of_row);
                let want = want.fold(0u64, |sum, word| sum.wrapping_add(*word));
                for lines_ahead in [0, 1, 32, 5000] {
                    let sum = isa.sum_rows(&words, row_words, &rows, lines_ahead);
                    assert_eq!(sum, want, "{isa} {row_words} {lines_ahead}");
                }
            }
        }
    }
}
