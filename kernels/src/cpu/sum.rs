//! A sum of words, bounded by read bandwidth: used to measure it.

use super::{Operation, Simd};

/// Words that are added in parallel: eight registers of the widest instruction set.
const LANES: usize = 64;

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
}
