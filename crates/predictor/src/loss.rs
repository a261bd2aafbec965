//! Weighted binary cross-entropy on logits z: `w·(−y·log σ(z) − (1−y)·log(1−σ(z)))`, value and gradient, as means over neurons
//! and tokens.

use powerinfer_profile::TracePart;

/// Share of a false negative's weight that does not depend on the neuron's contribution.
const EVEN: f32 = 0.3;
/// Cap of a neuron's relative contribution.
const MOST_ADDED: f32 = 5.0;

/// Weight of false negatives; false positives have weight 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum MissCost {
    /// By the neuron's contribution to the hidden state, with this mean.
    ByContribution(f32),
    /// The same for every neuron.
    Even(f32),
}

impl MissCost {
    /// Weight of a neuron with this relative contribution.
    fn of(self, added: f32) -> f32 {
        match self {
            Self::ByContribution(mean) => mean * (EVEN + (1.0 - EVEN) * added.min(MOST_ADDED)),
            Self::Even(cost) => cost,
        }
    }
}

/// Active neurons of some tokens, with their weights.
#[derive(Debug, Default)]
pub(crate) struct Labels {
    active: Vec<(u32, f32)>,
    /// End of each token's neurons.
    ends: Vec<usize>,
}

impl Labels {
    /// Appends the active neurons of a token of `samples`.
    pub(crate) fn add(&mut self, samples: &TracePart, token: usize, cost: MissCost) {
        let neurons = samples.active(token);
        let active = neurons.map(|(neuron, added)| (neuron as u32, cost.of(added)));
        self.active.extend(active);
        self.ends.push(self.active.len());
    }

    /// Active neurons of token `place` within `first..first + count`, relative to `first`.
    pub(crate) fn within(
        &self,
        place: usize,
        first: usize,
        count: usize,
    ) -> impl Iterator<Item = (usize, f32)> + '_ {
        let start = place.checked_sub(1).map_or(0, |before| self.ends[before]);
        let active = &self.active[start..self.ends[place]];
        let begin = active.partition_point(|(neuron, _)| (*neuron as usize) < first);
        let active = active[begin..].iter();
        active
            .map(move |(neuron, cost)| (*neuron as usize - first, *cost))
            .take_while(move |(neuron, _)| *neuron < count)
    }
}

/// Replaces `logits` of all tokens of `labels` and neurons `first..first + count` by the gradient, times `scale`.
pub(crate) fn gradient(
    labels: &Labels,
    first: usize,
    count: usize,
    scale: f32,
    logits: &mut [f32],
) {
    for (place, logits) in logits.chunks_exact_mut(count).enumerate() {
        for logit in logits.iter_mut() {
            *logit = scale * sigmoid(*logit);
        }
        for (neuron, cost) in labels.within(place, first, count) {
            logits[neuron] = cost * (logits[neuron] - scale);
        }
    }
}

/// Sum of the loss over `logits` of all tokens of `labels` and neurons `first..first + count`.
pub(crate) fn sum(labels: &Labels, first: usize, count: usize, logits: &[f32]) -> f64 {
    let mut total = 0.0;
    for (place, logits) in logits.chunks_exact(count).enumerate() {
        // −log(1−σ(z)) = log(1+eᶻ); for active neurons log(1+e⁻ᶻ) = log(1+eᶻ) − z.
        for logit in logits {
            total += f64::from(softplus(*logit));
        }
        for (neuron, cost) in labels.within(place, first, count) {
            let silent = f64::from(softplus(logits[neuron]));
            total += f64::from(cost) * (silent - f64::from(logits[neuron])) - silent;
        }
    }
    total
}

/// `log(1+eᶻ)`.
fn softplus(z: f32) -> f32 {
    z.max(0.0) + (-z.abs()).exp().ln_1p()
}

/// `1/(1+e⁻ᶻ)` with a relative error of 10⁻⁶, without calls or branches so that it is vectorised. NaN stays NaN.
pub(crate) fn sigmoid(z: f32) -> f32 {
    // e⁻ᶻ = 2ⁿ·2ᶠ with n = round(−z·log₂e): adding 1.5·2²³ rounds and leaves n in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let exponent = (-z * std::f32::consts::LOG2_E).clamp(-120.0, 120.0);
    let rounded = exponent + ROUND;
    let f = (exponent - (rounded - ROUND)) * std::f32::consts::LN_2;
    // Taylor series of eᶠ, |f| ≤ ½·log 2.
    let power = 1.0
        + f * (1.0
            + f * (0.5 + f * (1.0 / 6.0 + f * (1.0 / 24.0 + f * (1.0 / 120.0 + f / 720.0)))));
    let power = f32::from_bits(power.to_bits().wrapping_add(rounded.to_bits() << 23));
    1.0 / (1.0 + power)
}

#[cfg(test)]
mod tests {
    use powerinfer_profile::TracePart;

    use super::*;

    #[test]
    fn the_sigmoid_equals_its_formula() {
        for step in -3000..3000 {
            let z = step as f32 * 0.01;
            let expected = 1.0 / (1.0 + (-f64::from(z)).exp());
            let error = (f64::from(sigmoid(z)) - expected).abs();
            assert!(error < 2e-6 * expected, "{z}: {error}");
        }
        assert!(sigmoid(f32::NAN).is_nan());
        assert_eq!(sigmoid(f32::INFINITY), 1.0);
        assert!(sigmoid(f32::NEG_INFINITY) < 1e-30);
    }

    #[test]
    fn loss_and_gradient_match_the_definition() {
        let mut samples = TracePart::new(1, 3);
        samples.active.push(&[0.0, 1.0, 0.0]);
        samples.active.push(&[1.0, 1.0, 0.0]);
        samples.contributions.push([2.0]);
        samples.contributions.push([1.0, 3.0]);
        let cost = MissCost::ByContribution(2.0);
        // 2·(0.3 + 0.7·added) with added 1; ½ and 1½.
        let weights = [0.0, 2.0, 0.0, 1.3, 2.7, 0.0];
        let logits = [-3.0f32, -0.5, 0.0, 0.7, 4.0, 30.0];
        let mut labels = Labels::default();
        labels.add(&samples, 0, cost);
        labels.add(&samples, 1, cost);
        let expected: f64 = logits
            .iter()
            .zip(weights)
            .map(|(z, w)| {
                let p = 1.0 / (1.0 + (-f64::from(*z)).exp());
                if w > 0.0 {
                    -p.ln() * w
                } else {
                    -(1.0 - p).ln()
                }
            })
            .sum();
        assert!((sum(&labels, 0, 3, &logits) - expected).abs() < 1e-4 * expected);
        // The gradient in two blocks of neurons.
        for block in [0..2, 2..3] {
            let columns = |row: &[f32]| row[block.clone()].to_vec();
            let mut part: Vec<f32> = logits.chunks(3).flat_map(columns).collect();
            gradient(&labels, block.start, block.len(), 0.5, &mut part);
            let rows = part.chunks(block.len()).enumerate();
            for (token, neuron, got) in rows.flat_map(|(token, row)| {
                let row = row.iter().enumerate();
                row.map(move |(neuron, got)| (token, neuron, *got))
            }) {
                let index = 3 * token + block.start + neuron;
                let (y, w) = match weights[index] {
                    0.0 => (0.0, 1.0),
                    weight => (1.0, weight),
                };
                let z = f64::from(logits[index]);
                let want = (1.0 / (1.0 + (-z).exp()) - y) * w * 0.5;
                assert!((f64::from(got) - want).abs() < 1e-5, "{got} {want}");
            }
        }
    }

    #[test]
    fn missing_costs_the_same_where_contributions_are_not_used() {
        let mut samples = TracePart::new(1, 2);
        samples.active.push(&[1.0, 1.0]);
        samples.contributions.push([1.0, 9.0]);
        let mut labels = Labels::default();
        labels.add(&samples, 0, MissCost::Even(7.0));
        assert_eq!(labels.active, [(0, 7.0), (1, 7.0)]);
    }
}
