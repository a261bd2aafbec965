//! SplitMix64: a small pseudo-random generator with the same stream on every platform.

/// Pseudo-random generator; equal seeds give equal streams.
#[derive(Debug, Clone)]
pub struct Random {
    state: u64,
}

impl Random {
    /// Creates a generator from `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Returns 64 random bits.
    pub fn next_bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Samples uniformly from [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next_bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Samples from the standard normal distribution (Box–Muller).
    pub fn normal(&mut self) -> f64 {
        let (radius, angle) = (1.0 - self.unit(), self.unit());
        (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
    }

    /// Samples an integer uniformly from `0..bound`.
    ///
    /// # Panics
    ///
    /// If `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        assert!(bound > 0, "an empty range has no elements");
        // The high 64 bits of the product: bias is negligible for any bound far below 2^64.
        let product = u128::from(self.next_bits()) * bound as u128;
        (product >> 64) as usize
    }

    /// Samples an integer uniformly from `low..=high`.
    ///
    /// # Panics
    ///
    /// If `high < low`.
    pub fn between(&mut self, low: i64, high: i64) -> i64 {
        low + self.below((high - low + 1) as usize) as i64
    }

    /// Returns `true` with a probability of `percent` / 100.
    pub fn chance(&mut self, percent: u32) -> bool {
        self.below(100) < percent as usize
    }

    /// Picks one of `choices` uniformly.
    ///
    /// # Panics
    ///
    /// If `choices` is empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Samples an index with a probability proportional to its weight.
    ///
    /// # Panics
    ///
    /// If the weights sum to 0 or overflow.
    pub fn weighted(&mut self, weights: &[u32]) -> usize {
        let total: u32 = weights.iter().sum();
        let mut rest = self.below(total as usize) as u32;
        for (index, &weight) in weights.iter().enumerate() {
            if rest < weight {
                return index;
            }
            rest -= weight;
        }
        unreachable!("the rest is below the sum of the weights")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_matches_the_published_one() {
        let mut random = Random::new(1234567);
        let first: Vec<u64> = (0..3).map(|_| random.next_bits()).collect();
        assert_eq!(
            first,
            [
                6457827717110365317,
                3203168211198807973,
                9817491932198370423
            ]
        );
    }

    #[test]
    fn between_samples_the_whole_closed_range() {
        let mut random = Random::new(1);
        let mut seen: Vec<i64> = (0..1000).map(|_| random.between(-2, 3)).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, [-2, -1, 0, 1, 2, 3]);
    }

    #[test]
    fn a_weight_of_zero_is_never_chosen() {
        let mut random = Random::new(2);
        assert!((0..1000).all(|_| random.weighted(&[3, 0, 1]) != 1));
    }
}
