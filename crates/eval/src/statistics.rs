//! Intervals, paired tests and minimum detectable effects of samples.

pub use powerinfer_artifact::certificate::Interval;
use powerinfer_artifact::random::Random;

/// 97.5% quantile of the standard normal distribution.
const Z: f64 = 1.959_963_984_540_054;

/// Significance level of all tests.
pub const SIGNIFICANCE: f64 = 0.05;

/// Share `passed / all` with Wilson's 95% interval (Wilson 1927, JASA 22).
pub fn share(passed: u64, all: u64) -> Interval {
    let (count, share) = (all.max(1) as f64, passed as f64 / all.max(1) as f64);
    let square = Z * Z;
    let middle = (share + square / (2.0 * count)) / (1.0 + square / count);
    let spread = share * (1.0 - share) / count + square / (4.0 * count * count);
    let margin = Z * spread.sqrt() / (1.0 + square / count);
    Interval {
        value: share,
        low: (middle - margin).clamp(0.0, share),
        high: (middle + margin).clamp(share, 1.0),
    }
}

/// Outcomes of two methods on the same items, compared by McNemar's exact test: the items that only one of them gets
/// right follow a binomial distribution.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Paired {
    /// Items that only the first gets right.
    pub first_only: u64,
    /// Items that only the second gets right.
    pub second_only: u64,
    /// Number of items.
    pub items: u64,
}

impl Paired {
    /// Counts the outcomes of `first` and `second`, item by item.
    ///
    /// # Panics
    ///
    /// Panics if the two differ in length.
    pub fn from_outcomes(first: &[bool], second: &[bool]) -> Self {
        assert_eq!(first.len(), second.len(), "an outcome of each per item");
        let count = |of: [bool; 2]| {
            let pairs = first.iter().zip(second);
            pairs.filter(|(a, b)| [**a, **b] == of).count() as u64
        };
        Self {
            first_only: count([true, false]),
            second_only: count([false, true]),
            items: first.len() as u64,
        }
    }

    /// Share of the second minus share of the first.
    pub fn difference(self) -> f64 {
        (self.second_only as f64 - self.first_only as f64) / self.items.max(1) as f64
    }

    /// Two-sided p-value.
    pub fn p_value(self) -> f64 {
        let discordant = self.first_only + self.second_only;
        let fewer = self.first_only.min(self.second_only);
        let tail: f64 = (0..=fewer)
            .map(|successes| half_binomial(discordant, successes))
            .sum();
        (2.0 * tail).min(1.0)
    }

    /// Minimum detectable effect: the smallest difference of shares with a p-value below [`SIGNIFICANCE`], given the
    /// number of discordant items found, or the fewest that can be significant. Above 1 if no difference can be.
    pub fn minimum_detectable_effect(self) -> f64 {
        let shows = |discordant: u64, fewer: u64| {
            let test = Self {
                first_only: fewer,
                second_only: discordant - fewer,
                items: self.items,
            };
            test.p_value() < SIGNIFICANCE
        };
        let mut discordant = self.first_only + self.second_only;
        while !shows(discordant, 0) {
            discordant += 1;
        }
        let most = (0..=discordant / 2)
            .rev()
            .find(|fewer| shows(discordant, *fewer));
        let fewer = most.unwrap_or(0);
        (discordant - 2 * fewer) as f64 / self.items.max(1) as f64
    }
}

/// Binomial probability of `successes` in `trials` at p = ½.
fn half_binomial(trials: u64, successes: u64) -> f64 {
    let logs: f64 = (0..successes)
        .map(|i| ((trials - i) as f64).ln() - ((i + 1) as f64).ln())
        .sum();
    (logs - trials as f64 * std::f64::consts::LN_2).exp()
}

/// Mean of `values` with the 95% interval of the percentile bootstrap (Efron 1979), resampled with `seed`.
pub fn bootstrap_mean(values: &[f64], seed: u64) -> Interval {
    let count = values.len().max(1);
    let mean = values.iter().sum::<f64>() / count as f64;
    if values.len() < 2 {
        return Interval {
            value: mean,
            low: mean,
            high: mean,
        };
    }
    let mut random = Random::new(seed);
    let means = (0..DRAWS)
        .map(|_| {
            let sum: f64 = (0..count).map(|_| values[random.below(count)]).sum();
            sum / count as f64
        })
        .collect();
    percentiles(mean, means)
}

/// Relative rise of perplexity with the 95% interval of the paired block bootstrap (Künsch 1989), resampled with `seed`.
///
/// Losses of consecutive tokens are correlated, so whole blocks are resampled. A block is the sum of its differences of
/// −ln p, and its number of tokens.
pub(crate) fn bootstrap_rise(blocks: &[(f64, usize)], seed: u64) -> Interval {
    let rise = |sum: f64, tokens: usize| (sum / tokens.max(1) as f64).exp() - 1.0;
    let all = |blocks: &[(f64, usize)]| {
        let sums = blocks.iter().map(|block| block.0).sum();
        rise(sums, blocks.iter().map(|block| block.1).sum())
    };
    let value = all(blocks);
    if blocks.len() < 2 {
        return Interval {
            value,
            low: value,
            high: value,
        };
    }
    let mut random = Random::new(seed);
    let rises: Vec<f64> = (0..DRAWS)
        .map(|_| {
            let (mut sum, mut tokens) = (0.0, 0);
            for _ in 0..blocks.len() {
                let block = blocks[random.below(blocks.len())];
                sum += block.0;
                tokens += block.1;
            }
            rise(sum, tokens)
        })
        .collect();
    percentiles(value, rises)
}

/// Resamples of a bootstrap.
const DRAWS: usize = 2000;

/// `value` with the middle 95% of `drawn`.
fn percentiles(value: f64, mut drawn: Vec<f64>) -> Interval {
    drawn.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| drawn[((drawn.len() - 1) as f64 * share).round() as usize];
    Interval {
        value,
        low: at(0.025).min(value),
        high: at(0.975).max(value),
    }
}

/// Unbiased estimate of pass@k: 1 − C(n−c, k) / C(n, k), where c of n samples passed (Chen et al. 2021, §2.1).
///
/// None if there are fewer than `k` samples.
pub fn pass_at(k: u64, passed: u64, samples: u64) -> Option<f64> {
    if k == 0 || k > samples || passed > samples {
        return None;
    }
    if samples - passed < k {
        return Some(1.0);
    }
    let none: f64 = (samples - passed + 1..=samples)
        .map(|i| 1.0 - k as f64 / i as f64)
        .product();
    Some(1.0 - none)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn choose(n: u64, k: u64) -> f64 {
        (0..k).map(|i| (n - i) as f64 / (i + 1) as f64).product()
    }

    proptest! {
        #[test]
        fn pass_at_k_follows_its_definition(samples in 1u64..60, share in 0.0f64..=1.0, k in 1u64..60) {
            let passed = (share * samples as f64) as u64;
            match pass_at(k, passed, samples) {
                None => prop_assert!(k > samples),
                Some(found) => {
                    let want = if samples - passed < k { 1.0 } else { 1.0 - choose(samples - passed, k) / choose(samples, k) };
                    prop_assert!((found - want).abs() < 1e-9, "{found} {want}");
                }
            }
        }

        #[test]
        fn mcnemars_p_value_equals_enumeration(a in 0u64..12, b in 0u64..12) {
            let found = Paired { first_only: a, second_only: b, items: 40 }.p_value();
            // Every outcome at least as far from the middle.
            let trials = a + b;
            let far = a.abs_diff(b);
            let outcomes = 1u64 << trials;
            let extreme = (0..outcomes)
                .filter(|bits| {
                    let heads = u64::from(bits.count_ones());
                    heads.abs_diff(trials - heads) >= far
                })
                .count();
            let want = extreme as f64 / outcomes as f64;
            prop_assert!((found - want).abs() < 1e-9, "{found} {want}");
        }

        #[test]
        fn differences_from_the_minimum_detectable_effect_on_are_significant(a in 0u64..30, b in 0u64..30) {
            let paired = Paired { first_only: a, second_only: b, items: 100 };
            let seen = paired.p_value() < SIGNIFICANCE;
            let smallest = paired.minimum_detectable_effect();
            prop_assert_eq!(seen, paired.difference().abs() >= smallest - 1e-12);
            prop_assert!(smallest > 0.0);
        }

        #[test]
        fn intervals_contain_their_value(passed in 0u64..200, more in 0u64..200, seed in 0u64..9) {
            let found = share(passed, passed + more);
            prop_assert!(0.0 <= found.low && found.low <= found.value && found.value <= found.high && found.high <= 1.0);
            let values: Vec<f64> = (0..passed + 1).map(|i| (i % 5) as f64).collect();
            let mean = bootstrap_mean(&values, seed);
            prop_assert!(mean.low <= mean.value && mean.value <= mean.high);
            prop_assert_eq!(mean, bootstrap_mean(&values, seed));
            let blocks: Vec<(f64, usize)> = values.iter().map(|value| (value - 1.5, 1 + passed as usize % 7)).collect();
            let rise = bootstrap_rise(&blocks, seed);
            prop_assert!(rise.low <= rise.value && rise.value <= rise.high);
            prop_assert_eq!(rise, bootstrap_rise(&blocks, seed));
        }

        #[test]
        fn blocks_of_one_token_give_the_interval_of_independent_tokens(seed in 0u64..50) {
            let mut random = Random::new(seed);
            let losses: Vec<f64> = (0..400).map(|_| 0.05 + 0.3 * random.normal()).collect();
            let found = bootstrap_rise(&losses.iter().map(|loss| (*loss, 1)).collect::<Vec<_>>(), seed);
            let mean = losses.iter().sum::<f64>() / 400.0;
            let deviation = (losses.iter().map(|loss| (loss - mean).powi(2)).sum::<f64>() / 399.0).sqrt();
            let margin = Z * deviation / 20.0;
            prop_assert!((found.value - (mean.exp() - 1.0)).abs() < 1e-12);
            let width = found.high - found.low;
            prop_assert!((width / (2.0 * margin * mean.exp()) - 1.0).abs() < 0.15, "{} {}", width, margin);
        }
    }

    #[test]
    fn known_figures() {
        // Wilson's interval of 15 of 50, from published tables.
        let found = share(15, 50);
        assert!(
            (found.low - 0.191).abs() < 1e-3 && (found.high - 0.438).abs() < 1e-3,
            "{found:?}"
        );
        // 1 of 12 discordant: p = 2 · 13 / 4096.
        let p = Paired {
            first_only: 1,
            second_only: 11,
            items: 100,
        }
        .p_value();
        assert!((p - 2.0 * 13.0 / 4096.0).abs() < 1e-12);
        let none = Paired {
            first_only: 0,
            second_only: 0,
            items: 164,
        };
        assert_eq!(none.p_value(), 1.0);
        // Six discordant items are the fewest that can be significant.
        assert!((none.minimum_detectable_effect() - 6.0 / 164.0).abs() < 1e-12);
        assert!((pass_at(1, 3, 10).unwrap() - 0.3).abs() < 1e-12);
        assert_eq!(pass_at(11, 3, 10), None);
        assert_eq!(pass_at(8, 3, 10), Some(1.0));
    }
}
