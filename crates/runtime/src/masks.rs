//! Bit masks of the neurons to compute, one per token of a batch.

use std::ops::Range;

/// Neurons of a word.
pub(crate) const WORD: usize = u64::BITS as usize;

/// A bit per neuron and token, the lowest neuron in the lowest bit.
#[derive(Debug, Default)]
pub(crate) struct Masks {
    tokens: usize,
    /// `[words, tokens]`, so that threads can share ranges of neurons.
    words: Vec<u64>,
}

/// Packs the decisions for up to 64 neurons.
pub(crate) fn pack_decisions<T: Copy>(from: &[T], is_computed: impl Fn(T) -> bool) -> u64 {
    /// Moves the lowest bit of byte i to bit 56 + i.
    const TO_HIGHEST: u64 = 0x0102_0408_1020_4080;
    // Decisions of a byte each are vectorised, and packed eight at a time.
    let mut bytes = [0u8; WORD];
    for (byte, value) in bytes.iter_mut().zip(from) {
        *byte = u8::from(is_computed(*value));
    }
    let eights = bytes.as_chunks::<8>().0.iter().enumerate();
    eights.fold(0, |word, (index, eight)| {
        let bits = u64::from_le_bytes(*eight).wrapping_mul(TO_HIGHEST) >> 56;
        word | bits << (8 * index)
    })
}

impl Masks {
    /// Clears all bits; returns the words, `[words, tokens]`.
    pub(crate) fn reset(&mut self, neurons: usize, tokens: usize) -> &mut [u64] {
        self.tokens = tokens;
        self.words.clear();
        self.words.resize(neurons.div_ceil(WORD) * tokens, 0);
        &mut self.words
    }

    /// Sets the masks from `[tokens, ⌈neurons / 32⌉]` words of 32 neurons.
    pub(crate) fn set_words(&mut self, neurons: usize, tokens: usize, words32: &[u32]) {
        let words = self.reset(neurons, tokens);
        let of_tokens = words32.chunks_exact(neurons.div_ceil(32).max(1));
        for (token, words32) in of_tokens.enumerate() {
            let own = words.iter_mut().skip(token).step_by(tokens.max(1));
            for (word, words32) in own.zip(words32.chunks(2)) {
                let high = words32.get(1).map_or(0, |high| u64::from(*high) << 32);
                *word = u64::from(words32[0]) | high;
            }
        }
    }

    /// Clears the bits that are not set in `words [words, tokens]`.
    pub(crate) fn intersect(&mut self, words: &[u64]) {
        for (own, other) in self.words.iter_mut().zip(words) {
            *own &= other;
        }
    }

    /// Clears the bits of all tokens that are set in `words`.
    pub(crate) fn remove(&mut self, words: &[u64]) {
        for (own, removed) in self.words.chunks_exact_mut(self.tokens.max(1)).zip(words) {
            own.iter_mut().for_each(|word| *word &= !removed);
        }
    }

    /// The masks as `[tokens, ⌈neurons / 32⌉]` words of 32 neurons.
    pub(crate) fn words32(&self, neurons: usize) -> Vec<u32> {
        let tokens = (0..self.tokens).flat_map(|token| {
            let own = self.words.iter().skip(token).step_by(self.tokens);
            let words = own.flat_map(|word| [*word as u32, (word >> 32) as u32]);
            words.take(neurons.div_ceil(32))
        });
        tokens.collect()
    }

    /// Sets the masks of all tokens to `neurons`, in ascending order.
    pub(crate) fn set_listed(&mut self, neurons: &[u32], tokens: usize) {
        let count = neurons.last().map_or(0, |last| *last as usize + 1);
        let words = self.reset(count, tokens);
        for neuron in neurons {
            let word = *neuron as usize / WORD;
            for word in &mut words[word * tokens..][..tokens] {
                *word |= 1 << (neuron % WORD as u32);
            }
        }
    }

    /// The words of the neurons in `range`: first neuron, bits within `range`, and one word per token.
    fn words_of(&self, range: Range<usize>) -> impl Iterator<Item = (usize, u64, &[u64])> {
        let indices = range.start / WORD..range.end.div_ceil(WORD);
        let words = self.words.chunks_exact(self.tokens.max(1));
        let words = words.enumerate().take(indices.end).skip(indices.start);
        words.map(move |(index, words)| {
            let first = index * WORD;
            let from = u64::MAX << range.start.saturating_sub(first);
            let until = match range.end - first {
                end @ 0..WORD => (1 << end) - 1,
                _ => u64::MAX,
            };
            (first, from & until, words)
        })
    }

    /// Set bits in `range`, summed over all tokens.
    pub(crate) fn count(&self, range: Range<usize>) -> usize {
        let words = self.words_of(range).flat_map(|(_, own, words)| {
            let words = words.iter();
            words.map(move |word| (word & own).count_ones() as usize)
        });
        words.sum()
    }

    /// Set bits of `token` in `range`.
    pub(crate) fn count_of(&self, token: usize, range: Range<usize>) -> usize {
        let words = self.words_of(range);
        let counts = words.map(|(_, own, words)| (words[token] & own).count_ones() as usize);
        counts.sum()
    }

    /// Appends the neurons in `range` whose bit is set for `token` to `rows`, in ascending order.
    pub(crate) fn list(&self, token: usize, range: Range<usize>, rows: &mut Vec<u32>) {
        self.list_some(token, range, 0..usize::MAX, rows);
    }

    /// The neurons of `neurons` whose bit is set for `token`, in ascending order.
    pub(crate) fn listed(&self, token: usize, neurons: usize) -> Vec<u32> {
        let mut rows = Vec::new();
        self.list(token, 0..neurons, &mut rows);
        rows
    }

    /// Appends only the entries `part` of the list that [`Self::list`] appends.
    pub(crate) fn list_some(
        &self,
        token: usize,
        range: Range<usize>,
        part: Range<usize>,
        rows: &mut Vec<u32>,
    ) {
        let mut listed = 0;
        for (first, own, words) in self.words_of(range) {
            let mut left = words[token] & own;
            let before = listed;
            listed += left.count_ones() as usize;
            if listed <= part.start {
                continue;
            }
            for _ in before..part.start {
                left &= left - 1;
            }
            for _ in before.max(part.start)..listed.min(part.end) {
                rows.push((first + left.trailing_zeros() as usize) as u32);
                left &= left - 1;
            }
            if listed >= part.end {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn count_equals_the_length_of_the_list() {
        let mut masks = Masks::default();
        masks.set_listed(&[0, 3, 63, 64, 65, 127, 130, 199], 2);
        for start in 0..210 {
            for end in start..210 {
                let mut listed = Vec::new();
                masks.list(0, start..end, &mut listed);
                masks.list(1, start..end, &mut listed);
                assert_eq!(masks.count(start..end), listed.len(), "{start}..{end}");
            }
        }
    }

    proptest! {
        #[test]
        fn masks_list_each_tokens_neurons_of_each_side(
            neurons in 1usize..300, tokens in 1usize..5, cut in 0usize..300, seed: [u64; 5],
        ) {
            let cut = cut.min(neurons);
            let decide = |token: usize, neuron: usize| {
                seed[(token + neuron / 64) % 5] >> ((neuron + token) % 64) & 1 == 1
            };
            let mut masks = Masks::default();
            let words = masks.reset(neurons, tokens);
            for (index, words) in words.chunks_exact_mut(tokens).enumerate() {
                for (token, word) in words.iter_mut().enumerate() {
                    let group = index * WORD..neurons.min((index + 1) * WORD);
                    let decisions: Vec<bool> = group.map(|neuron| decide(token, neuron)).collect();
                    *word = pack_decisions(&decisions, |decision| decision);
                }
            }
            for side in [0..cut, cut..neurons] {
                for token in 0..tokens {
                    let mut rows = Vec::new();
                    masks.list(token, side.clone(), &mut rows);
                    let expected = side.clone().filter(|neuron| decide(token, *neuron));
                    let expected: Vec<u32> = expected.map(|neuron| neuron as u32).collect();
                    prop_assert_eq!(&rows, &expected);
                    for (start, end) in [(0, 0), (0, 1), (cut % 50, 60), (3, usize::MAX)] {
                        let mut some = Vec::new();
                        masks.list_some(token, side.clone(), start..end, &mut some);
                        let end = end.min(expected.len());
                        prop_assert_eq!(&some, &expected[start.min(end)..end]);
                    }
                }
            }
        }
    }
}
