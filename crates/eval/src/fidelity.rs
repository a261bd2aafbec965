//! Fidelity of a sparse model to the dense one of the same weights: perplexity, KL divergence, top-1 agreement.

use powerinfer_artifact::certificate::Estimate;
use powerinfer_model::{LanguageModel, greedy_token};
use serde::{Deserialize, Serialize};

use crate::{
    EvalError, Likelihood,
    likelihood::negative_log_probability,
    statistics::{Interval, bootstrap_rise},
};

/// Largest block of the bootstrap, in consecutive tokens of a text.
const BLOCK: usize = 64;
/// Fewest blocks of the bootstrap, if there are as many tokens.
const BLOCKS: usize = 32;
/// Seed of the bootstrap: the same losses give the same interval everywhere.
const BOOTSTRAP_SEED: u64 = 1;

/// Fewest tokens whose perplexity has a meaningful interval.
pub const MIN_INTERVAL_TOKENS: u64 = 32;

/// Sliding windows that a text is scored in.
///
/// Windows begin `stride` tokens apart. Each scores the tokens that no earlier window scored, given those before them in
/// the window. A text's first token is not scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// Tokens of a window.
    pub length: usize,
    /// Tokens between the beginnings of two windows, at most `length`.
    pub stride: usize,
}

impl Windows {
    /// Default windows of a model with room for `context_tokens`: 512 tokens at most, overlapping by half.
    pub fn for_context(context_tokens: usize) -> Self {
        let length = context_tokens.min(512);
        Self {
            length,
            stride: (length / 2).max(1),
        }
    }

    /// Begin, end and number of scored tokens of every window over a text of `tokens` tokens.
    pub fn over(self, tokens: usize) -> Vec<(usize, usize, usize)> {
        let mut windows = Vec::new();
        let mut scored = 1; // the first token has nothing before it
        let mut begin = 0;
        while scored < tokens {
            let end = tokens.min(begin + self.length);
            if end > scored {
                windows.push((begin, end, end - scored));
                scored = end;
            }
            begin += self.stride.max(1);
        }
        windows
    }
}

/// Losses of the scored tokens of some texts: −ln p of each, in nats.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenLosses {
    losses: Vec<f64>,
    /// Per text, index of its first loss.
    text_starts: Vec<usize>,
}

impl TokenLosses {
    fn begin_text(&mut self) {
        self.text_starts.push(self.losses.len());
    }

    /// Sum of the losses with their number.
    pub fn likelihood(&self) -> Likelihood {
        Likelihood {
            negative_log: self.losses.iter().sum(),
            tokens: self.losses.len() as u64,
        }
    }
}

/// Relative rise of perplexity from `dense` to `other`, losses of the same tokens, with its 95% interval.
///
/// The interval is that of the paired block bootstrap over the tokens' differences. Blocks are spans of at most 64 tokens
/// of one text, shorter if there would be fewer than 32 blocks.
///
/// # Panics
///
/// Panics if the two have other numbers of tokens or texts.
pub fn perplexity_rise(dense: &TokenLosses, other: &TokenLosses) -> Interval {
    assert_eq!(dense.losses.len(), other.losses.len(), "the same tokens");
    assert_eq!(dense.text_starts, other.text_starts, "the same texts");
    let block = (dense.losses.len() / BLOCKS).clamp(1, BLOCK);
    let ends = dense.text_starts.iter().skip(1).copied();
    let ends = ends.chain([dense.losses.len()]);
    let mut blocks = Vec::new();
    for (begin, end) in dense.text_starts.iter().copied().zip(ends) {
        let (dense, other) = (&dense.losses[begin..end], &other.losses[begin..end]);
        for (dense, other) in dense.chunks(block).zip(other.chunks(block)) {
            let difference = other.iter().zip(dense).map(|(other, dense)| other - dense);
            blocks.push((difference.sum(), dense.len()));
        }
    }
    bootstrap_rise(&blocks, BOOTSTRAP_SEED)
}

/// Comparison of two models at the scored tokens of a window.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowComparison {
    /// Losses under the dense model.
    dense: Vec<f64>,
    /// Losses under the other one.
    other: Vec<f64>,
    /// KL(dense ‖ other) in nats.
    divergence: Vec<f64>,
    /// Whether both have the same arg max.
    agrees: Vec<bool>,
    /// Largest absolute difference of two logits.
    largest_difference: f32,
}

impl WindowComparison {
    /// Compares `other` with `dense` in the window `(begin, end, scored)` of `text`, see [`Windows::over`].
    ///
    /// # Errors
    ///
    /// Fails if a model does.
    pub fn measure<Dense, Other>(
        dense: &mut Dense,
        other: &mut Other,
        text: &[u32],
        (begin, end, scored): (usize, usize, usize),
    ) -> Result<Self, EvalError>
    where
        Dense: LanguageModel + ?Sized,
        Other: LanguageModel + ?Sized,
    {
        let vocabulary = dense.config().vocabulary_size;
        // The last token of a window is only ever a target.
        let given = &text[begin..end - 1];
        dense.reset();
        other.reset();
        let of_dense = dense.forward(given)?;
        let of_other = other.forward(given)?;
        let pairs = of_dense
            .chunks_exact(vocabulary)
            .zip(of_other.chunks_exact(vocabulary))
            .zip(&text[begin + 1..end]);
        let mut found = Self::default();
        for ((dense, other), target) in pairs.skip(given.len() - scored) {
            found.observe(dense, other, *target);
        }
        Ok(found)
    }

    /// Adds the logits of both models at one token; `target` is the token that follows.
    fn observe(&mut self, dense: &[f32], other: &[f32], target: u32) {
        let found = [dense, other].map(Softmax::new);
        self.dense.push(found[0].negative_log(dense, target));
        self.other.push(found[1].negative_log(other, target));
        self.divergence.push(divergence(dense, other, &found));
        let differences = dense.iter().zip(other).map(|(a, b)| (a - b).abs());
        self.largest_difference = differences.fold(self.largest_difference, f32::max);
        self.agrees.push(greedy_token(dense) == greedy_token(other));
    }
}

/// Comparison of two models, token by token.
#[derive(Debug, Clone, Default)]
pub struct Fidelity {
    /// Losses under the dense model.
    dense: TokenLosses,
    /// Losses under the other one.
    other: TokenLosses,
    /// Per token, KL(dense ‖ other) in nats.
    divergence: Vec<f64>,
    /// Per token, whether both have the same arg max.
    agrees: Vec<bool>,
    /// Largest absolute difference of two logits.
    largest_difference: f32,
}

/// Losses of `texts`, token ids each, under `model`; `between` as in [`fidelity`].
///
/// # Errors
///
/// Fails if the model does, or `between`.
pub fn token_losses<Model, Failure>(
    model: &mut Model,
    texts: &[Vec<u32>],
    windows: Windows,
    mut between: impl FnMut(u64) -> Result<(), Failure>,
) -> Result<TokenLosses, Failure>
where
    Model: LanguageModel + ?Sized,
    Failure: From<EvalError>,
{
    let vocabulary = model.config().vocabulary_size;
    let mut found = TokenLosses::default();
    for text in texts {
        found.begin_text();
        for (begin, end, scored) in windows.over(text.len()) {
            let given = &text[begin..end - 1];
            model.reset();
            let logits = model.forward(given).map_err(EvalError::from)?;
            let pairs = logits.chunks_exact(vocabulary).zip(&text[begin + 1..end]);
            let scored_pairs = pairs.skip(given.len() - scored);
            let losses = scored_pairs.map(|(row, target)| negative_log_probability(row, *target));
            found.losses.extend(losses);
            between(scored as u64)?;
        }
    }
    Ok(found)
}

/// Mean of `values` with 1.96 standard errors.
fn mean(values: impl ExactSizeIterator<Item = f64> + Clone) -> Estimate {
    let count = values.len().max(1) as f64;
    let mean = values.clone().sum::<f64>() / count;
    let square: f64 = values.map(|value| (value - mean) * (value - mean)).sum();
    Estimate {
        value: mean,
        margin: 1.96 * (square / (count - 1.0).max(1.0) / count).sqrt(),
    }
}

impl Fidelity {
    /// Begins another text.
    pub fn begin_text(&mut self) {
        self.dense.begin_text();
        self.other.begin_text();
    }

    /// Adds the next window of the text.
    pub fn push(&mut self, window: &WindowComparison) {
        self.dense.losses.extend_from_slice(&window.dense);
        self.other.losses.extend_from_slice(&window.other);
        self.divergence.extend_from_slice(&window.divergence);
        self.agrees.extend_from_slice(&window.agrees);
        self.largest_difference = self.largest_difference.max(window.largest_difference);
    }

    /// Per text, tokens before the first other arg max; none if there is no other.
    fn first_divergences(&self) -> impl Iterator<Item = Option<usize>> {
        let starts = &self.dense.text_starts;
        let ends = starts.iter().skip(1).copied().chain([self.agrees.len()]);
        let texts = starts.iter().zip(ends);
        texts.map(|(start, end)| {
            let agrees = &self.agrees[*start..end];
            agrees.iter().position(|agrees| !agrees)
        })
    }

    /// Share of texts with the same arg max at every token.
    pub fn texts_without_divergence(&self) -> f64 {
        let undiverged = self.first_divergences().filter(Option::is_none);
        undiverged.count() as f64 / self.dense.text_starts.len().max(1) as f64
    }

    /// Tokens before the first other arg max, median of the texts that have one.
    pub fn tokens_to_first_divergence(&self) -> Option<u64> {
        let mut tokens: Vec<usize> = self.first_divergences().flatten().collect();
        tokens.sort_unstable();
        tokens.get(tokens.len() / 2).map(|tokens| *tokens as u64)
    }

    /// Scored tokens.
    pub fn tokens(&self) -> u64 {
        self.dense.losses.len() as u64
    }

    /// Likelihood under the dense model.
    pub fn dense(&self) -> Likelihood {
        self.dense.likelihood()
    }

    /// Likelihood under the other model.
    pub fn other(&self) -> Likelihood {
        self.other.likelihood()
    }

    /// Relative rise of perplexity with its 95% interval, by [`perplexity_rise`].
    pub fn perplexity_rise(&self) -> Interval {
        perplexity_rise(&self.dense, &self.other)
    }

    /// Mean of KL(dense ‖ other) over tokens, in nats.
    pub fn mean_divergence(&self) -> Estimate {
        mean(self.divergence.iter().copied())
    }

    /// 99th percentile of KL(dense ‖ other) over tokens, in nats.
    pub fn divergence_p99(&self) -> f64 {
        let mut sorted = self.divergence.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let rank = (sorted.len() as f64 * 0.99).ceil() as usize;
        sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
    }

    /// Largest absolute difference of two logits.
    pub fn largest_difference(&self) -> f32 {
        self.largest_difference
    }

    /// Share of tokens whose arg max is the same.
    pub fn top1_agreement(&self) -> f64 {
        let agreed = self.agrees.iter().filter(|agrees| **agrees).count();
        agreed as f64 / self.tokens().max(1) as f64
    }
}

/// Softmax of logits, in float64.
struct Softmax {
    /// `exp(logit − largest)`.
    powers: Vec<f64>,
    /// Their sum.
    sum: f64,
    /// `ln Σ exp(logit)`.
    log_sum: f64,
}

impl Softmax {
    fn new(logits: &[f32]) -> Self {
        let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let shifted = logits.iter().map(|logit| f64::from(*logit) - largest);
        let powers: Vec<f64> = shifted.map(f64::exp).collect();
        let sum: f64 = powers.iter().sum();
        Self {
            powers,
            sum,
            log_sum: largest + sum.ln(),
        }
    }

    /// −ln p of `target`.
    fn negative_log(&self, logits: &[f32], target: u32) -> f64 {
        self.log_sum - f64::from(logits[target as usize])
    }
}

/// `Σ p·ln(p/q)` with p and q the `softmax` of the logits.
fn divergence(dense: &[f32], other: &[f32], [p, q]: &[Softmax; 2]) -> f64 {
    let shift = q.log_sum - p.log_sum;
    let logits = dense.iter().zip(other).zip(&p.powers);
    let terms = logits.map(|((p, q), power)| power * (f64::from(*p) - f64::from(*q) + shift));
    (terms.sum::<f64>() / p.sum).max(0.0) // below zero by rounding alone
}

/// Compares `other` with `dense` on `texts`, token ids each, in `windows`; `between` runs after every window with the
/// number of tokens it scored.
///
/// # Errors
///
/// Fails if a model does, or `between`.
pub fn fidelity<Dense, Other, Failure>(
    dense: &mut Dense,
    other: &mut Other,
    texts: &[Vec<u32>],
    windows: Windows,
    mut between: impl FnMut(u64) -> Result<(), Failure>,
) -> Result<Fidelity, Failure>
where
    Dense: LanguageModel + ?Sized,
    Other: LanguageModel + ?Sized,
    Failure: From<EvalError>,
{
    let mut fidelity = Fidelity::default();
    for text in texts {
        fidelity.begin_text();
        for window in windows.over(text.len()) {
            fidelity.push(&WindowComparison::measure(dense, other, text, window)?);
            between(window.2 as u64)?;
        }
    }
    Ok(fidelity)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn windows_score_every_token_but_the_first_once(
            tokens in 0usize..200, length in 2usize..40, stride in 1usize..40,
        ) {
            let windows = Windows { length, stride: stride.min(length - 1) };
            let mut next = 1;
            for (begin, end, scored) in windows.over(tokens) {
                prop_assert_eq!(end - scored, next);
                prop_assert!(begin < next && end - begin <= length && end <= tokens);
                next = end;
            }
            prop_assert_eq!(next, tokens.max(1));
        }

        #[test]
        fn divergence_follows_its_definition(
            logits in prop::collection::vec((-9.0f32..9.0, -9.0f32..9.0), 2..20),
        ) {
            let (p, q): (Vec<f32>, Vec<f32>) = logits.into_iter().unzip();
            let softmax = |logits: &[f32]| -> Vec<f64> {
                let powers: Vec<f64> = logits.iter().map(|z| f64::from(*z).exp()).collect();
                let sum: f64 = powers.iter().sum();
                powers.iter().map(|power| power / sum).collect()
            };
            let expected: f64 = softmax(&p)
                .iter()
                .zip(softmax(&q))
                .map(|(p, q)| p * (p / q).ln())
                .sum();
            let found = |p: &[f32], q: &[f32]| divergence(p, q, &[Softmax::new(p), Softmax::new(q)]);
            prop_assert!((found(&p, &q) - expected).abs() < 1e-9);
            prop_assert!(found(&p, &p) == 0.0);
            let all = Softmax::new(&q);
            for target in 0..q.len() as u32 {
                let own = all.negative_log(&q, target);
                prop_assert!((own - negative_log_probability(&q, target)).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn the_rise_is_that_of_the_perplexities() {
        let mut fidelity = Fidelity::default();
        fidelity.begin_text();
        for token in 0..50u32 {
            if token == 30 {
                fidelity.begin_text();
            }
            let mut window = WindowComparison::default();
            let dense = [0.0, 1.0, (token % 7) as f32 * 0.3];
            let other = [0.1, 0.9, (token % 5) as f32 * 0.4];
            window.observe(&dense, &other, token % 3);
            fidelity.push(&window);
        }
        let rise = fidelity.other().perplexity() / fidelity.dense().perplexity() - 1.0;
        let interval = fidelity.perplexity_rise();
        assert!((interval.value - rise).abs() < 1e-12);
        assert!(interval.low < rise && rise < interval.high);
        assert_eq!(fidelity.tokens(), 50);
        let sorted = fidelity.divergence_p99();
        let above = fidelity.divergence.iter().filter(|d| **d > sorted).count();
        assert!(above <= 1, "{above}");
    }
}
