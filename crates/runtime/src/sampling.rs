//! Chooses the next token from logits.

use std::{cmp::Ordering, collections::BTreeMap};

use powerinfer_artifact::random::Random;
use powerinfer_model::{Files, GenerationConfig, ModelError, greedy_token};

use crate::RuntimeError;

/// How a token is chosen; the default is greedy.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingSettings {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Keep the k largest; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set whose probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens whose probability is at least this share of the largest; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of recent tokens; 1 has no effect.
    pub repeat_penalty: f32,
    /// Recent tokens that are penalised.
    pub repeat_window: usize,
    /// Is subtracted from the logits of generated tokens; 0 has no effect.
    pub presence_penalty: f32,
    /// Is subtracted from the logit of a generated token as often as it was generated; 0 has no effect.
    pub frequency_penalty: f32,
    /// Is added to the logits of these tokens.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Seed of every choice.
    pub seed: u64,
}

impl SamplingSettings {
    /// The settings of a model's `generation_config.json` if it says to sample; else greedy.
    ///
    /// # Errors
    ///
    /// The file cannot be read or parsed, or a setting in it is out of range.
    pub fn of_model(files: &Files) -> Result<Self, ModelError> {
        let config = GenerationConfig::read(files)?;
        let none = Self::default();
        let mut settings = Self {
            repeat_penalty: config.repetition_penalty.unwrap_or(none.repeat_penalty),
            ..none
        };
        if config.samples.unwrap_or(false) {
            settings.temperature = config.temperature.unwrap_or(1.0);
            settings.top_k = config.top_k.unwrap_or(settings.top_k);
            settings.top_p = config.top_p.unwrap_or(settings.top_p);
            settings.min_p = config.min_p.unwrap_or(settings.min_p);
        }
        match Sampler::new(settings.clone()) {
            Ok(_) => Ok(settings),
            Err(error) => Err(ModelError::BadConfig {
                path: files.path(GenerationConfig::FILE),
                reason: error.to_string(),
            }),
        }
    }

    /// Whether the logits are changed before a token is chosen.
    fn changes_logits(&self) -> bool {
        self.repeat_penalty != 1.0 || self.penalises_generated() || !self.logit_bias.is_empty()
    }

    fn penalises_generated(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

impl Default for SamplingSettings {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            repeat_window: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            seed: 0,
        }
    }
}

/// Recent tokens that memory is reserved for.
const MAX_RESERVED: usize = 4096;

/// Chooses tokens; the same seed and logits give the same tokens.
#[derive(Debug)]
pub struct Sampler {
    settings: SamplingSettings,
    random: Random,
    recent: Vec<u32>,
    /// How often each token was generated, if that is penalised.
    generated: BTreeMap<u32, u32>,
    buffers: Buffers,
}

/// Memory of [`Sampler::sample`], reused from token to token.
#[derive(Debug, Default)]
struct Buffers {
    logits: Vec<f32>,
    seen: Vec<u32>,
    candidates: Vec<(u32, f32)>,
}

impl Sampler {
    /// A sampler at the start of its random stream.
    ///
    /// # Errors
    ///
    /// Fails if a setting is out of range.
    pub fn new(settings: SamplingSettings) -> Result<Self, RuntimeError> {
        let check = |setting, value: f32, good: bool, expected| {
            if good {
                Ok(())
            } else {
                Err(RuntimeError::Sampling {
                    setting,
                    value,
                    expected,
                })
            }
        };
        let SamplingSettings {
            temperature,
            top_p,
            min_p,
            repeat_penalty,
            presence_penalty,
            frequency_penalty,
            ..
        } = settings;
        check(
            "temperature",
            temperature,
            temperature.is_finite() && temperature >= 0.0,
            "it must be 0 or more",
        )?;
        check(
            "top_p",
            top_p,
            top_p > 0.0 && top_p <= 1.0,
            "it must be above 0 and at most 1",
        )?;
        check(
            "min_p",
            min_p,
            (0.0..=1.0).contains(&min_p),
            "it must lie between 0 and 1",
        )?;
        let penalty = repeat_penalty.is_finite() && repeat_penalty > 0.0;
        check(
            "repetition_penalty",
            repeat_penalty,
            penalty,
            "it must be above 0; 1 switches it off",
        )?;
        for (setting, value) in [
            ("presence_penalty", presence_penalty),
            ("frequency_penalty", frequency_penalty),
        ] {
            check(setting, value, value.is_finite(), "it must be a number")?;
        }
        for bias in settings.logit_bias.values() {
            check("logit_bias", *bias, !bias.is_nan(), "it must be a number")?;
        }
        Ok(Self {
            random: Random::new(settings.seed),
            // One more than the window, for the token that is added before the oldest is removed.
            recent: Vec::with_capacity(settings.repeat_window.min(MAX_RESERVED) + 1),
            generated: BTreeMap::new(),
            settings,
            buffers: Buffers::default(),
        })
    }

    /// A sampler of the token with the largest logit.
    #[expect(clippy::missing_panics_doc, reason = "the defaults are in range")]
    pub fn greedy() -> Self {
        Self::new(SamplingSettings::default()).expect("the defaults are in range")
    }

    /// Whether the token with the largest logit is always chosen.
    pub fn is_greedy(&self) -> bool {
        self.settings.temperature == 0.0 && !self.settings.changes_logits()
    }

    /// Remembers `token` for the repeat penalty.
    pub fn remember(&mut self, token: u32) {
        self.recent.push(token);
        let surplus = self
            .recent
            .len()
            .saturating_sub(self.settings.repeat_window);
        self.recent.drain(..surplus);
    }

    /// Chooses the next token and remembers it.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        let token = self.choose(logits);
        self.remember(token);
        if self.settings.penalises_generated() {
            *self.generated.entry(token).or_default() += 1;
        }
        token
    }

    fn choose(&mut self, logits: &[f32]) -> u32 {
        let settings = &self.settings;
        let Buffers {
            logits: penalised,
            seen,
            candidates,
        } = &mut self.buffers;
        let mut logits = logits;
        if settings.changes_logits() {
            penalised.clear();
            penalised.extend_from_slice(logits);
            seen.clear();
            if settings.repeat_penalty != 1.0 {
                seen.reserve(self.recent.capacity());
                seen.extend_from_slice(&self.recent);
                seen.sort_unstable();
                seen.dedup();
            }
            for token in seen {
                if let Some(logit) = penalised.get_mut(*token as usize) {
                    *logit = if *logit > 0.0 {
                        *logit / settings.repeat_penalty
                    } else {
                        *logit * settings.repeat_penalty
                    };
                }
            }
            for (token, count) in &self.generated {
                if let Some(logit) = penalised.get_mut(*token as usize) {
                    *logit -=
                        settings.presence_penalty + settings.frequency_penalty * *count as f32;
                }
            }
            for (token, bias) in &settings.logit_bias {
                if let Some(logit) = penalised.get_mut(*token as usize) {
                    *logit += bias;
                }
            }
            logits = penalised;
        }
        if settings.temperature == 0.0 {
            return greedy_token(logits);
        }
        let greedy = greedy_token(logits);
        let largest = logits[greedy as usize];
        candidates.clear();
        candidates.extend((0..).zip(logits.iter().copied()));
        if (1..candidates.len()).contains(&settings.top_k) {
            candidates.select_nth_unstable_by(settings.top_k - 1, by_falling_value);
            candidates.truncate(settings.top_k);
            candidates.sort_unstable_by(by_falling_value);
        }
        for (_, value) in candidates.iter_mut() {
            *value = ((*value - largest) / settings.temperature).exp();
        }
        candidates.retain(|(_, weight)| *weight > 0.0 && *weight >= settings.min_p);
        if settings.top_p < 1.0 {
            keep_nucleus(candidates, settings.top_p);
        }
        let mut left = self.random.unit() * total(candidates);
        for (token, weight) in candidates.iter() {
            left -= f64::from(*weight);
            if left < 0.0 {
                return *token;
            }
        }
        candidates.last().map_or(greedy, |(token, _)| *token)
    }
}

/// Orders candidates by falling value, equal ones by their ids.
fn by_falling_value(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

fn total(candidates: &[(u32, f32)]) -> f64 {
    candidates
        .iter()
        .map(|(_, weight)| f64::from(*weight))
        .sum()
}

/// Keeps the smallest set of candidates whose weights reach the share `top_p` of all.
fn keep_nucleus(candidates: &mut Vec<(u32, f32)>, top_p: f32) {
    let target = f64::from(top_p) * total(candidates);
    let (mut sum, mut sorted) = (0.0, 0);
    // Most nuclei are a small part of the vocabulary, so it is sorted no further than needed.
    while sorted < candidates.len() {
        let end = candidates.len().min((4 * sorted).max(64));
        let rest = &mut candidates[sorted..];
        if end - sorted < rest.len() {
            rest.select_nth_unstable_by(end - sorted, by_falling_value);
        }
        rest[..end - sorted].sort_unstable_by(by_falling_value);
        for index in sorted..end {
            sum += f64::from(candidates[index].1);
            if sum >= target {
                return candidates.truncate(index + 1);
            }
        }
        sorted = end;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sampler(change: impl FnOnce(&mut SamplingSettings)) -> Sampler {
        let mut settings = SamplingSettings {
            temperature: 1.0,
            ..SamplingSettings::default()
        };
        change(&mut settings);
        Sampler::new(settings).unwrap()
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let logits = [0.0f32, 2f32.ln(), 4f32.ln(), f32::NEG_INFINITY];
        let mut sampler = sampler(|_| ());
        let mut counts = [0i32; 4];
        for _ in 0..7000 {
            counts[sampler.sample(&logits) as usize] += 1;
        }
        for (count, expected) in counts.iter().zip([1000, 2000, 4000, 0]) {
            assert!((count - expected).abs() < 200, "{counts:?}");
        }
    }

    #[test]
    fn filters_keep_the_tokens_they_are_defined_to_keep() {
        let logits = [0.0f32, 2f32.ln(), 4f32.ln(), 3f32.ln()];
        let kept = |change: fn(&mut SamplingSettings)| {
            let mut sampler = sampler(change);
            let mut kept: Vec<u32> = (0..500).map(|_| sampler.sample(&logits)).collect();
            kept.sort_unstable();
            kept.dedup();
            kept
        };
        assert_eq!(kept(|settings| settings.top_k = 2), [2, 3]);
        assert_eq!(kept(|settings| settings.top_p = 0.3), [2]);
        assert_eq!(kept(|settings| settings.top_p = 0.5), [2, 3]);
        assert_eq!(kept(|settings| settings.min_p = 0.4), [1, 2, 3]);
        assert_eq!(kept(|settings| settings.temperature = 1e-6), [2]);
    }

    #[test]
    fn the_repeat_penalty_lets_other_tokens_win() {
        let mut sampler = Sampler::new(SamplingSettings {
            repeat_penalty: 3.0,
            ..Default::default()
        })
        .unwrap();
        let tokens: Vec<u32> = (0..3).map(|_| sampler.sample(&[2.0, 1.5, 1.0])).collect();
        assert_eq!(tokens, [0, 1, 2]);
    }

    #[test]
    fn penalties_and_biases_are_those_of_the_openai_reference() {
        let tokens = |change: fn(&mut SamplingSettings)| {
            let mut settings = SamplingSettings::default();
            change(&mut settings);
            let mut sampler = Sampler::new(settings).unwrap();
            sampler.remember(0); // a token of the prompt is not penalised
            (0..5)
                .map(|_| sampler.sample(&[2.0, 1.5, 0.85]))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            tokens(|settings| settings.presence_penalty = 0.8),
            [0, 1, 0, 0, 0]
        );
        assert_eq!(
            tokens(|settings| settings.frequency_penalty = 0.6),
            [0, 1, 0, 1, 2]
        );
        let banned = |settings: &mut SamplingSettings| {
            settings.logit_bias = BTreeMap::from([(0, -100.0), (7, 100.0)]);
        };
        assert_eq!(
            tokens(banned),
            [1; 5],
            "tokens outside the vocabulary have no effect"
        );
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        for (settings, name) in [
            (
                SamplingSettings {
                    temperature: -1.0,
                    ..Default::default()
                },
                "temperature",
            ),
            (
                SamplingSettings {
                    temperature: f32::NAN,
                    ..Default::default()
                },
                "temperature",
            ),
            (
                SamplingSettings {
                    top_p: 0.0,
                    ..Default::default()
                },
                "top_p",
            ),
            (
                SamplingSettings {
                    min_p: 1.5,
                    ..Default::default()
                },
                "min_p",
            ),
            (
                SamplingSettings {
                    repeat_penalty: 0.0,
                    ..Default::default()
                },
                "repetition_penalty",
            ),
        ] {
            let message = Sampler::new(settings).unwrap_err().to_string();
            assert!(message.contains(name), "{message}");
        }
    }

    proptest! {
        #[test]
        fn a_nucleus_is_that_of_a_full_sort(
            weights in prop::collection::vec(0u8..40, 1..2000), top_p in 0.01f32..1.0,
        ) {
            let mut nucleus: Vec<_> = (0..).zip(weights.iter().map(|weight| 1.0 + f32::from(*weight))).collect();
            let mut expected = nucleus.clone();
            expected.sort_by(by_falling_value);
            let target = f64::from(top_p) * total(&expected);
            let mut sum = 0.0;
            expected.retain(|(_, weight)| {
                let is_short = sum < target;
                sum += f64::from(*weight);
                is_short
            });
            keep_nucleus(&mut nucleus, top_p);
            prop_assert_eq!(nucleus, expected);
        }

        #[test]
        fn tokens_without_probability_are_never_chosen(
            permitted in prop::collection::btree_set(0usize..300, 1..5), seed in 0u64..100, k in 0usize..400, top_p in 0.1f32..=1.0,
        ) {
            let mut logits = [f32::NEG_INFINITY; 300];
            permitted.iter().for_each(|token| logits[*token] = 1.0);
            let mut sampler = sampler(|settings| { settings.seed = seed; settings.top_k = k; settings.top_p = top_p; });
            for _ in 0..20 {
                prop_assert!(permitted.contains(&(sampler.sample(&logits) as usize)));
            }
        }

        #[test]
        fn the_same_seed_gives_the_same_tokens(
            logits in prop::collection::vec(-9.0f32..9.0, 1..30), seed in 0u64..100, k in 0usize..40,
        ) {
            let run = || {
                let mut sampler = sampler(|settings| { settings.seed = seed; settings.top_k = k; settings.top_p = 0.9; });
                (0..10).map(|_| sampler.sample(&logits)).collect::<Vec<_>>()
            };
            prop_assert_eq!(run(), run());
            prop_assert!(run().iter().all(|token| (*token as usize) < logits.len()));
        }
    }
}
