//! What a sample can tell: intervals, paired tests, and the smallest effect that would have shown.

use powerinfer_artifact::random::Random;

/// The normal distribution's 97.5 % point.
const Z: f64 = 1.959_963_984_540_054;

/// The level that tests are held against.
pub const LEVEL: f64 = 0.05;

/// A figure with its interval of 95 %.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// The figure.
    pub value: f64,
    /// Where the interval begins.
    pub low: f64,
    /// Where it ends.
    pub high: f64,
}

impl Interval {
    /// The longer way from the figure to an end: the smallest effect that would have shown.
    pub fn half_width(self) -> f64 {
        (self.high - self.value).max(self.value - self.low)
    }
}

/// The share of `passed` among `all`, with Wilson's interval (Wilson 1927, JASA 22).
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

/// Two ways to do the same items, told apart by the items that only one of them gets right: McNemar's test with the
/// exact binomial distribution.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Paired {
    /// Items that the first alone gets right.
    pub first_only: u64,
    /// Items that the second alone does.
    pub second_only: u64,
    /// All items.
    pub items: u64,
}

impl Paired {
    /// Compares outcomes item by item.
    ///
    /// Panics where there are not as many.
    pub fn of(first: &[bool], second: &[bool]) -> Self {
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

    /// By how much the second's share is larger.
    pub fn difference(self) -> f64 {
        (self.second_only as f64 - self.first_only as f64) / self.items.max(1) as f64
    }

    /// How likely a difference as large as this one would be if there were none, two-sided.
    pub fn p_value(self) -> f64 {
        let discordant = self.first_only + self.second_only;
        let fewer = self.first_only.min(self.second_only);
        let tail: f64 = (0..=fewer)
            .map(|successes| half_binomial(discordant, successes))
            .sum();
        (2.0 * tail).min(1.0)
    }

    /// The smallest difference of shares that this test would have told from none at [`LEVEL`], with as many items
    /// that only one gets right as there were, or with no more than it takes where those are too few.
    pub fn smallest_visible(self) -> f64 {
        let shows = |discordant: u64, fewer: u64| {
            let test = Self {
                first_only: fewer,
                second_only: discordant - fewer,
                items: self.items,
            };
            test.p_value() < LEVEL
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

/// The probability of `successes` in `trials` of a fair coin.
fn half_binomial(trials: u64, successes: u64) -> f64 {
    let logs: f64 = (0..successes)
        .map(|i| ((trials - i) as f64).ln() - ((i + 1) as f64).ln())
        .sum();
    (logs - trials as f64 * std::f64::consts::LN_2).exp()
}

/// The mean of `values`, with the interval of the percentile bootstrap (Efron 1979): means of `values` drawn again and
/// again, with a stream of its own from `seed`.
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

/// By how much of itself perplexity rises, with the interval of the paired bootstrap by blocks (Künsch 1989): what
/// tokens that follow each other lose is alike, so blocks of them are drawn again and again, whole, with a stream from
/// `seed`. A block is its sum of differences of −ln p, and its tokens.
pub fn bootstrap_rise(blocks: &[(f64, usize)], seed: u64) -> Interval {
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

/// How often the bootstrap draws.
const DRAWS: usize = 2000;

/// The middle 95 % of `drawn`, around `value`.
fn percentiles(value: f64, mut drawn: Vec<f64>) -> Interval {
    drawn.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| drawn[((drawn.len() - 1) as f64 * share).round() as usize];
    Interval {
        value,
        low: at(0.025).min(value),
        high: at(0.975).max(value),
    }
}

/// The probability that at least one of `k` samples passes, where `passed` of `samples` did, without bias: 1 − C(n−c, k) /
/// C(n, k) (Chen et al. 2021, §2.1).
///
/// None where there are fewer than `k` samples.
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
        fn pass_at_is_that_of_the_definition(samples in 1u64..60, share in 0.0f64..=1.0, k in 1u64..60) {
            let passed = (share * samples as f64) as u64;
            match pass_at(k, passed, samples) {
                None => prop_assert!(k > samples),
                Some(found) => {
                    let want = match samples - passed < k {
                        true => 1.0,
                        false => 1.0 - choose(samples - passed, k) / choose(samples, k),
                    };
                    prop_assert!((found - want).abs() < 1e-9, "{found} {want}");
                }
            }
        }

        #[test]
        fn mcnemars_test_is_that_of_all_outcomes_of_so_many_coins(a in 0u64..12, b in 0u64..12) {
            let found = Paired { first_only: a, second_only: b, items: 40 }.p_value();
            // Every outcome that is as far from the middle or further.
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
        fn what_is_visible_shows_and_less_does_not(a in 0u64..30, b in 0u64..30) {
            let paired = Paired { first_only: a, second_only: b, items: 100 };
            let seen = paired.p_value() < LEVEL;
            let smallest = paired.smallest_visible();
            prop_assert_eq!(seen, paired.difference().abs() >= smallest - 1e-12);
            prop_assert!(smallest > 0.0);
        }

        #[test]
        fn intervals_hold_their_figure(passed in 0u64..200, more in 0u64..200, seed in 0u64..9) {
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
        fn blocks_of_one_token_give_what_independent_tokens_do(seed in 0u64..50) {
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
        // Wilson's interval of 15 of 50, as tables have it.
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
        // Six that only one gets right are the fewest that tell.
        assert!((none.smallest_visible() - 6.0 / 164.0).abs() < 1e-12);
        assert!((pass_at(1, 3, 10).unwrap() - 0.3).abs() < 1e-12);
        assert_eq!(pass_at(11, 3, 10), None);
        assert_eq!(pass_at(8, 3, 10), Some(1.0));
    }
}
