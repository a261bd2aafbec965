//! How close a sparse model stays to the dense one of the same weights, on text that neither has
//! been fitted to.

use powerinfer_artifact::certificate::Estimate;
use powerinfer_model::{LanguageModel, greedy_token};

use crate::{
    EvalError, Likelihood,
    likelihood::negative_log_probability,
    statistics::{Interval, bootstrap_rise},
};

/// Tokens of a text that follow each other and are drawn together, at most.
const BLOCK: usize = 64;
/// As many blocks there are at least, where there are as many tokens: fewer tell little of how they vary.
const BLOCKS: usize = 32;

/// Token windows that a text is scored in.
///
/// Windows begin `stride` tokens apart; of each, those tokens are scored that no earlier window
/// scored, given everything before them in the window. A text's first token is given, not scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// Tokens that a model sees at once.
    pub length: usize,
    /// Tokens from one window's beginning to the next one's, at most `length`.
    pub stride: usize,
}

impl Windows {
    /// The windows over a text of `tokens` tokens: where each begins and ends, and how many of its
    /// last tokens it scores.
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

/// What a comparison found, token by token.
#[derive(Debug, Clone, Default)]
pub struct Fidelity {
    /// Per token, −ln p of the text under the dense model.
    dense: Vec<f64>,
    /// The same under the other one.
    other: Vec<f64>,
    /// Per token, KL(dense ‖ other) in nats.
    divergence: Vec<f64>,
    /// Tokens for which both hold the same one for the likeliest.
    agreed: u64,
    /// The largest difference of two logits of the same token.
    largest_difference: f32,
    /// Per text, how many tokens were scored before it.
    begins: Vec<usize>,
    /// Per text, how many tokens they agreed on before they first did not, and whether they did not.
    agreements: Vec<(u64, bool)>,
}

/// By how much of itself perplexity rises from the −ln p of some tokens to others of the same tokens.
pub fn rise(from: &[f64], to: &[f64]) -> Estimate {
    let log = mean(to.iter().zip(from).map(|(to, from)| to - from));
    let ratio = log.value.exp();
    Estimate {
        value: ratio - 1.0,
        margin: ratio * log.margin,
    }
}

/// −ln p of every token of `texts` that [`Windows`] score, under `model`; `between` as in
/// [`fidelity`].
pub fn likelihoods<Model, Failure>(
    model: &mut Model,
    texts: &[Vec<u32>],
    windows: Windows,
    mut between: impl FnMut(u64) -> Result<(), Failure>,
) -> Result<Vec<f64>, Failure>
where
    Model: LanguageModel + ?Sized,
    Failure: From<EvalError>,
{
    let vocabulary = model.config().vocabulary_size;
    let mut found = Vec::new();
    for text in texts {
        for (begin, end, scored) in windows.over(text.len()) {
            let given = &text[begin..end - 1];
            model.reset();
            let logits = model.forward(given).map_err(EvalError::from)?;
            let pairs = logits.chunks_exact(vocabulary).zip(&text[begin + 1..end]);
            let scored_pairs = pairs.skip(given.len() - scored);
            found.extend(scored_pairs.map(|(row, target)| negative_log_probability(row, *target)));
            between(scored as u64)?;
        }
    }
    Ok(found)
}

/// Mean of `values` and 1.96 standard errors of it.
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
    /// Takes in the logits of both models at one token, and the token that follows.
    fn observe(&mut self, dense: &[f32], other: &[f32], target: u32) {
        let found = [dense, other].map(Softmax::of);
        self.dense.push(found[0].negative_log(dense, target));
        self.other.push(found[1].negative_log(other, target));
        self.divergence.push(divergence(dense, other, &found));
        let differences = dense.iter().zip(other).map(|(a, b)| (a - b).abs());
        self.largest_difference = differences.fold(self.largest_difference, f32::max);
        let agree = greedy_token(dense) == greedy_token(other);
        self.agreed += u64::from(agree);
        match self.agreements.last_mut() {
            Some((tokens, false)) if agree => *tokens += 1,
            Some((_, diverged)) => *diverged |= !agree,
            None => {}
        }
    }

    /// What follows is of another text.
    fn begin_text(&mut self) {
        self.begins.push(self.dense.len());
        self.agreements.push((0, false));
    }

    /// Share of texts for which both hold the same token for the likeliest all along.
    pub fn undiverged(&self) -> f64 {
        let undiverged = self.agreements.iter().filter(|(_, diverged)| !diverged);
        undiverged.count() as f64 / self.agreements.len().max(1) as f64
    }

    /// Tokens until they first do not, the median of the other texts.
    pub fn first_divergence(&self) -> Option<u64> {
        let diverged = self.agreements.iter().filter(|(_, diverged)| *diverged);
        let mut tokens: Vec<u64> = diverged.map(|(tokens, _)| *tokens).collect();
        tokens.sort_unstable();
        tokens.get(tokens.len() / 2).copied()
    }

    /// Tokens that were scored.
    pub fn tokens(&self) -> u64 {
        self.dense.len() as u64
    }

    fn likelihood(values: &[f64]) -> Likelihood {
        Likelihood {
            negative_log: values.iter().sum(),
            tokens: values.len() as u64,
        }
    }

    /// The text under the dense model.
    pub fn dense(&self) -> Likelihood {
        Self::likelihood(&self.dense)
    }

    /// The text under the other model.
    pub fn other(&self) -> Likelihood {
        Self::likelihood(&self.other)
    }

    /// By how much of itself perplexity rises, from the paired differences of the tokens.
    pub fn rise(&self) -> Estimate {
        rise(&self.dense, &self.other)
    }

    /// The same with the interval of the paired bootstrap, of blocks of 64 tokens at most, and
    /// fewer where there were less than 32 blocks; drawn with `seed`.
    pub fn rise_interval(&self, seed: u64) -> Interval {
        let block = (self.dense.len() / BLOCKS).clamp(1, BLOCK);
        let ends = self.begins.iter().skip(1).copied();
        let ends = ends.chain([self.dense.len()]);
        let mut blocks = Vec::new();
        for (begin, end) in self.begins.iter().copied().zip(ends) {
            let (dense, other) = (&self.dense[begin..end], &self.other[begin..end]);
            for (dense, other) in dense.chunks(block).zip(other.chunks(block)) {
                let difference = other.iter().zip(dense).map(|(other, dense)| other - dense);
                blocks.push((difference.sum(), dense.len()));
            }
        }
        bootstrap_rise(&blocks, seed)
    }

    /// Mean of KL(dense ‖ other), in nats.
    pub fn mean_divergence(&self) -> Estimate {
        mean(self.divergence.iter().copied())
    }

    /// The divergence that 99 % of the tokens stay below, in nats.
    pub fn divergence_p99(&self) -> f64 {
        let mut sorted = self.divergence.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let rank = (sorted.len() as f64 * 0.99).ceil() as usize;
        sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
    }

    /// The largest difference of any two logits.
    pub fn largest_difference(&self) -> f32 {
        self.largest_difference
    }

    /// Share of tokens for which both hold the same token for the likeliest.
    pub fn agreement(&self) -> f64 {
        self.agreed as f64 / self.tokens().max(1) as f64
    }
}

/// The softmax of some logits, in float64.
struct Softmax {
    /// `exp(logit − largest)`.
    powers: Vec<f64>,
    /// Their sum.
    sum: f64,
    /// `ln Σ exp(logit)`.
    log_sum: f64,
}

impl Softmax {
    fn of(logits: &[f32]) -> Self {
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
    (terms.sum::<f64>() / p.sum).max(0.0) // what is negative is rounding
}

/// Compares `other` with `dense` on `texts`, token ids each, in `windows`; `between` runs after
/// every window with the tokens it scored, and may stop the work.
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
    let vocabulary = dense.config().vocabulary_size;
    for text in texts {
        fidelity.begin_text();
        for (begin, end, scored) in windows.over(text.len()) {
            // The last token of a window is only ever a target.
            let given = &text[begin..end - 1];
            dense.reset();
            other.reset();
            let of_dense = dense.forward(given).map_err(EvalError::from)?;
            let of_other = other.forward(given).map_err(EvalError::from)?;
            let pairs = of_dense
                .chunks_exact(vocabulary)
                .zip(of_other.chunks_exact(vocabulary))
                .zip(&text[begin + 1..end]);
            for ((dense, other), target) in pairs.skip(given.len() - scored) {
                fidelity.observe(dense, other, *target);
            }
            between(scored as u64)?;
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
        fn divergence_is_that_of_the_definition(
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
            let found = |p: &[f32], q: &[f32]| divergence(p, q, &[Softmax::of(p), Softmax::of(q)]);
            prop_assert!((found(&p, &q) - expected).abs() < 1e-9);
            prop_assert!(found(&p, &p) == 0.0);
            let all = Softmax::of(&q);
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
            let dense = [0.0, 1.0, (token % 7) as f32 * 0.3];
            let other = [0.1, 0.9, (token % 5) as f32 * 0.4];
            fidelity.observe(&dense, &other, token % 3);
        }
        let rise = fidelity.other().perplexity() / fidelity.dense().perplexity() - 1.0;
        assert!((fidelity.rise().value - rise).abs() < 1e-12);
        assert!(fidelity.rise().margin > 0.0);
        let interval = fidelity.rise_interval(1);
        assert!((interval.value - rise).abs() < 1e-12);
        assert!(interval.low < rise && rise < interval.high);
        assert_eq!(fidelity.tokens(), 50);
        let sorted = fidelity.divergence_p99();
        let above = fidelity.divergence.iter().filter(|d| **d > sorted).count();
        assert!(above <= 1, "{above}");
    }
}
