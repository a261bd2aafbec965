//! Which neurons are to be computed of each token of a batch, a bit each.

use std::ops::Range;

/// Neurons of a word.
pub(crate) const WORD: usize = u64::BITS as usize;

/// A bit per neuron and token, that of the lowest neuron lowest: whether it is to be computed.
#[derive(Debug, Default)]
pub(crate) struct Masks {
    tokens: usize,
    /// `[words, tokens]`: what is decided of some neurons lies together, and so threads share it.
    words: Vec<u64>,
}

/// Packs the decisions for up to 64 neurons.
pub(crate) fn pack_decisions<T: Copy>(from: &[T], is_computed: impl Fn(T) -> bool) -> u64 {
    let bits = from.iter().enumerate();
    bits.fold(0, |word, (bit, value)| {
        word | u64::from(is_computed(*value)) << bit
    })
}

impl Masks {
    /// Forgets all; returns the words to be filled, `[words, tokens]`.
    pub(crate) fn reset(&mut self, neurons: usize, tokens: usize) -> &mut [u64] {
        self.tokens = tokens;
        self.words.clear();
        self.words.resize(neurons.div_ceil(WORD) * tokens, 0);
        &mut self.words
    }

    /// Takes over what was decided, `[tokens, ⌈neurons / 32⌉]`, 32 neurons a word.
    pub(crate) fn set_words(&mut self, neurons: usize, tokens: usize, halves: &[u32]) {
        let words = self.reset(neurons, tokens);
        let of_tokens = halves.chunks_exact(neurons.div_ceil(32).max(1));
        for (token, halves) in of_tokens.enumerate() {
            let own = words.iter_mut().skip(token).step_by(tokens.max(1));
            for (word, halves) in own.zip(halves.chunks(2)) {
                let high = halves.get(1).map_or(0, |high| u64::from(*high) << 32);
                *word = u64::from(halves[0]) | high;
            }
        }
    }

    /// What was decided, `[tokens, ⌈neurons / 32⌉]`, 32 neurons a word.
    pub(crate) fn halves(&self, neurons: usize) -> Vec<u32> {
        let tokens = (0..self.tokens).flat_map(|token| {
            let own = self.words.iter().skip(token).step_by(self.tokens);
            let halves = own.flat_map(|word| [*word as u32, (word >> 32) as u32]);
            halves.take(neurons.div_ceil(32))
        });
        tokens.collect()
    }

    /// Decides for `neurons`, in ascending order, whatever the token.
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

    /// The words that have neurons of `side`: the first neuron, the bits that are of `side`, and what
    /// was decided of each token.
    fn words_of(&self, side: Range<usize>) -> impl Iterator<Item = (usize, u64, &[u64])> {
        let indices = side.start / WORD..side.end.div_ceil(WORD);
        let words = self.words.chunks_exact(self.tokens.max(1));
        let words = words.enumerate().take(indices.end).skip(indices.start);
        words.map(move |(index, words)| {
            let first = index * WORD;
            let from = u64::MAX << side.start.saturating_sub(first);
            let until = match side.end - first {
                end @ 0..WORD => (1 << end) - 1,
                _ => u64::MAX,
            };
            (first, from & until, words)
        })
    }

    /// How many neurons of `side` are to be computed, of all tokens together.
    pub(crate) fn count(&self, side: Range<usize>) -> usize {
        let words = self.words_of(side).flat_map(|(_, own, words)| {
            let words = words.iter();
            words.map(move |word| (word & own).count_ones() as usize)
        });
        words.sum()
    }

    /// Lists the neurons of `side` that are to be computed of `token`, in ascending order.
    pub(crate) fn list(&self, token: usize, side: Range<usize>, rows: &mut Vec<u32>) {
        for (first, own, words) in self.words_of(side) {
            let mut left = words[token] & own;
            while left != 0 {
                rows.push((first + left.trailing_zeros() as usize) as u32);
                left &= left - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn as_many_neurons_are_counted_as_are_listed() {
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
                    prop_assert_eq!(rows, expected);
                }
            }
        }
    }
}
