//! Calibrates the threshold of a predictor on one half of the held-out tokens and evaluates it on the other half; or evaluates
//! a given threshold on all of them.

use powerinfer_artifact::predictor_file::PredictorInput;
use powerinfer_kernels::Isa;
use powerinfer_profile::TracePart;
use rayon::prelude::*;

/// A predictor that scores every neuron: the larger, the more likely it is active.
pub(crate) trait Predicts: Sync {
    /// Its input.
    fn input(&self) -> PredictorInput;

    /// Score of every neuron for the input `x`.
    fn logits(&self, isa: Isa, x: &[f32], logits: &mut [f32]);
}

/// Safety margins of the calibration: shares of the distance from a target to 1, tried until the target holds on the other
/// half.
const MARGINS: [f64; 3] = [0.2, 0.5, 0.8];
/// Largest number of tokens for calibration, and for evaluation.
const MOST_TOKENS: usize = 8192;
/// Largest number of active neurons over all tokens of a calibration, which are all in memory.
const MOST_ACTIVE: usize = 1 << 24;
/// Tokens per task.
const PIECE: usize = 64;

/// Quality of a predictor with its threshold on unseen tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Quality {
    pub(crate) threshold: f32,
    pub(crate) recall: f64,
    /// Half width of the 95% confidence interval of the recall.
    pub(crate) recall_error: f64,
    /// `None` if contributions were not sampled.
    pub(crate) contribution_recall: Option<f64>,
    pub(crate) precision: f64,
    pub(crate) predicted_density: f64,
    pub(crate) density: f64,
    pub(crate) tokens: usize,
}

impl Quality {
    /// Whether the recall is below `targets`.
    pub(crate) fn falls_short(&self, targets: Targets) -> bool {
        let contribution = self.contribution_recall.unwrap_or(1.0);
        self.recall < targets.recall || contribution < targets.contribution_recall
    }
}

/// Required recall of a predictor on unseen tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Targets {
    /// Share of the active neurons that are predicted.
    pub recall: f64,
    /// Share of the active neurons' contributions `|h_i|·‖down_i‖` that is predicted.
    pub contribution_recall: f64,
}

/// Chooses the largest threshold that meets both targets, with a margin, on even tokens of `held_out`, and evaluates it on odd
/// ones. If a target is missed there, the margin is increased.
pub(crate) fn calibrate(
    network: &impl Predicts,
    held_out: &TracePart,
    targets: Targets,
    isa: Isa,
) -> Quality {
    let (even, odd) = halves(held_out);
    let mut active = active_logits(network, held_out, &even, isa);
    active.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let threshold = |margin: f64| {
        let with_margin = |target: f64| 1.0 - (1.0 - target) * (1.0 - margin);
        let of_count = threshold(&active, with_margin(targets.recall), |_| 1.0);
        let share = with_margin(targets.contribution_recall);
        of_count.min(threshold(&active, share, f64::from))
    };
    let [first, more @ ..] = MARGINS;
    let mut quality = count(network, held_out, &odd, threshold(first), isa);
    for margin in more {
        if quality.falls_short(targets) {
            quality = count(network, held_out, &odd, threshold(margin), isa);
        }
    }
    quality
}

/// Evaluates a given `threshold` on all tokens of `held_out`.
pub(crate) fn judge(
    network: &impl Predicts,
    held_out: &TracePart,
    threshold: f32,
    isa: Isa,
) -> Quality {
    let all: Vec<usize> = (0..held_out.tokens()).collect();
    count(network, held_out, &all, threshold, isa)
}

/// Recall on even tokens of `held_out` at logit 0, even odds.
pub(crate) fn recall_at_even_odds(network: &impl Predicts, held_out: &TracePart, isa: Isa) -> f64 {
    count(network, held_out, &halves(held_out).0, 0.0, isa).recall
}

/// Even and odd tokens, at most [`MOST_TOKENS`] each, evenly spread.
fn halves(held_out: &TracePart) -> (Vec<usize>, Vec<usize>) {
    let pairs = held_out.tokens() / 2;
    let used = pairs.min(MOST_TOKENS);
    let pair = |place: usize| place * pairs / used;
    (0..used)
        .map(|place| (2 * pair(place), 2 * pair(place) + 1))
        .unzip()
}

/// Logits and contributions of the active neurons of `tokens`.
fn active_logits(
    network: &impl Predicts,
    samples: &TracePart,
    tokens: &[usize],
    isa: Isa,
) -> Vec<(f32, f32)> {
    let active: usize = tokens
        .iter()
        .map(|token| samples.active.count(*token))
        .sum();
    let stride = active.div_ceil(MOST_ACTIVE).max(1);
    let tokens: Vec<usize> = tokens.iter().copied().step_by(stride).collect();
    let pieces = in_parallel(
        network,
        samples,
        &tokens,
        isa,
        |all: &mut Vec<(f32, f32)>, token, logits| {
            let neurons = samples.active(token);
            all.extend(neurons.map(|(neuron, added)| (logits[neuron], added)));
        },
    );
    pieces.concat()
}

/// A ratio of sums over tokens, with its confidence interval.
#[derive(Debug, Clone, Copy, Default)]
struct Share {
    tokens: usize,
    part: f64,
    whole: f64,
    /// Sums over tokens of part², part·whole and whole².
    products: [f64; 3],
}

impl Share {
    /// Part and whole of one token.
    fn new(part: f64, whole: f64) -> Self {
        Self {
            tokens: 1,
            part,
            whole,
            products: [part * part, part * whole, whole * whole],
        }
    }

    fn add(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.part += other.part;
        self.whole += other.whole;
        for (sum, product) in self.products.iter_mut().zip(other.products) {
            *sum += product;
        }
    }

    /// The ratio; 1 if the whole is 0.
    fn value(&self) -> f64 {
        if self.whole == 0.0 {
            1.0
        } else {
            self.part / self.whole
        }
    }

    /// Half width of the 95% confidence interval of a ratio estimator over tokens, since the neurons of a token are
    /// correlated. One fictitious half-missed token keeps a few tokens without a miss from appearing certain.
    fn error(&self) -> f64 {
        if self.whole == 0.0 {
            return 1.0;
        }
        let share = self.value();
        let [parts, mixed, wholes] = self.products;
        let squares = parts - 2.0 * share * mixed + share * share * wholes;
        let imagined = 0.5 * self.whole / self.tokens as f64;
        (1.96 * (squares.max(0.0) + imagined * imagined).sqrt() / self.whole).min(1.0)
    }
}

/// Counts over tokens.
#[derive(Debug, Default)]
struct Counted {
    predicted: usize,
    recalled: Share,
    contribution: Share,
}

/// Evaluates `threshold` on `tokens` of `samples`.
fn count(
    network: &impl Predicts,
    samples: &TracePart,
    tokens: &[usize],
    threshold: f32,
    isa: Isa,
) -> Quality {
    let pieces = in_parallel(
        network,
        samples,
        tokens,
        isa,
        |counted: &mut Counted, token, logits| {
            counted.predicted += logits.iter().filter(|logit| **logit >= threshold).count();
            let (mut both, mut active, mut recalled, mut added) = (0usize, 0usize, 0f64, 0f64);
            for (neuron, contribution) in samples.active(token) {
                let is_predicted = logits[neuron] >= threshold;
                active += 1;
                both += usize::from(is_predicted);
                added += f64::from(contribution);
                recalled += f64::from(contribution) * f64::from(u8::from(is_predicted));
            }
            counted.recalled.add(Share::new(both as f64, active as f64));
            counted.contribution.add(Share::new(recalled, added));
        },
    );
    let mut all = Counted::default();
    for piece in pieces {
        all.predicted += piece.predicted;
        all.recalled.add(piece.recalled);
        all.contribution.add(piece.contribution);
    }
    let all_neurons = (tokens.len() * samples.active.neurons()).max(1) as f64;
    Quality {
        threshold,
        recall: all.recalled.value(),
        recall_error: all.recalled.error(),
        contribution_recall: if samples.contributions.is_empty() || all.contribution.whole == 0.0 {
            None
        } else {
            Some(all.contribution.value())
        },
        precision: Share::new(all.recalled.part, all.predicted as f64).value(),
        predicted_density: all.predicted as f64 / all_neurons,
        density: all.recalled.whole / all_neurons,
        tokens: tokens.len(),
    }
}

/// Folds the logits of `tokens` with `visit`, in parallel over tasks of [`PIECE`] tokens. Returns the result of each task, in
/// order.
fn in_parallel<Made: Default + Send>(
    network: &impl Predicts,
    samples: &TracePart,
    tokens: &[usize],
    isa: Isa,
    visit: impl Fn(&mut Made, usize, &[f32]) + Sync,
) -> Vec<Made> {
    let pieces = tokens.par_chunks(PIECE).map(|tokens| {
        let mut made = Made::default();
        let neurons = samples.active.neurons();
        let mut logits = vec![0.0; neurons];
        for token in tokens {
            let x: Vec<f32> = match network.input() {
                PredictorInput::Normed => samples.input(*token).collect(),
                PredictorInput::Residual => samples
                    .residual(*token)
                    .expect("residuals were sampled for predictors that read them")
                    .collect(),
            };
            network.logits(isa, &x, &mut logits);
            visit(&mut made, *token, &logits);
        }
        samples.release();
        made
    });
    pieces.collect()
}

/// The largest threshold that logits with at least `share` of the total weight reach. `sorted` are ascending logits with their
/// weights; if it is empty, the largest `f32`, so that nothing is predicted.
fn threshold(sorted: &[(f32, f32)], share: f64, weight: impl Fn(f32) -> f64) -> f32 {
    let total: f64 = sorted.iter().map(|(_, added)| weight(*added)).sum();
    let mut below = 0.0;
    for (logit, added) in sorted {
        below += weight(*added);
        if below > (1.0 - share) * total {
            return *logit;
        }
    }
    sorted.first().map_or(f32::MAX, |(logit, _)| *logit)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_threshold_is_the_largest_that_meets_the_share(
            logits in prop::collection::vec(-5.0f32..5.0, 1..60), share in 0.01f64..1.0,
        ) {
            let mut sorted: Vec<(f32, f32)> = logits.iter().map(|logit| (*logit, 1.0 + logit.abs())).collect();
            sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
            for weight in [|_| 1.0, f64::from as fn(f32) -> f64] {
                let chosen = threshold(&sorted, share, weight);
                let reach = |limit: f32| -> f64 {
                    sorted.iter().filter(|(logit, _)| *logit >= limit).map(|(_, added)| weight(*added)).sum()
                };
                let total = reach(f32::MIN);
                prop_assert!(reach(chosen) >= share * total - 1e-4);
                let next = logits.iter().copied().filter(|logit| *logit > chosen).fold(f32::INFINITY, f32::min);
                prop_assert!(reach(next) < share * total + 1e-4);
            }
        }
    }

    #[test]
    fn the_confidence_interval_depends_on_the_number_of_tokens() {
        let share = |tokens: usize, each: &dyn Fn(usize) -> Share| {
            let mut all = Share::default();
            (0..tokens).for_each(|token| all.add(each(token)));
            all
        };
        // 90 of 100 tokens with ten neurons each are recalled fully, ten not at all: the interval of 100 coin tosses.
        let all_or_none = share(100, &|token| {
            Share::new(if token < 90 { 10.0 } else { 0.0 }, 10.0)
        });
        assert_eq!(all_or_none.value(), 0.9);
        let coin = 1.96 * (0.9f64 * 0.1 / 100.0).sqrt();
        assert!((all_or_none.error() - coin).abs() < 0.05 * coin);
        // Eight tokens without a miss are not certain.
        let few = share(8, &|_| Share::new(10.0, 10.0));
        assert!((few.value(), few.error() > 0.1) == (1.0, true));
        assert!(share(1000, &|_| Share::new(10.0, 10.0)).error() < 0.01);
        assert_eq!(Share::default().error(), 1.0);
    }

    #[test]
    fn a_layer_without_activity_predicts_nothing() {
        assert_eq!(threshold(&[], 0.95, f64::from), f32::MAX);
    }
}
