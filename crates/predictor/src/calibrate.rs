//! Sets a predictor's threshold on one half of the held-out tokens and counts on the other half
//! how well it does; or counts on all of them, where the threshold is given.

use powerinfer_artifact::predictor_file::PredictorInput;
use powerinfer_kernels::Isa;
use powerinfer_profile::TracePart;

use crate::network::Network;

/// The threshold is set for slightly more than the target, so that it holds on other tokens too.
const MARGIN: f64 = 0.2;

/// What a predictor with its threshold does on tokens that neither has seen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Quality {
    pub(crate) threshold: f32,
    pub(crate) recall: f64,
    /// None where contributions were not sampled.
    pub(crate) contribution_recall: Option<f64>,
    pub(crate) precision: f64,
    pub(crate) predicted_density: f64,
    pub(crate) density: f64,
    pub(crate) tokens: usize,
}

/// What a predictor must foresee on tokens it has not seen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Targets {
    /// Share of the neurons that fire.
    pub recall: f64,
    /// Share of what they add to the hidden state, `|h_i|·‖down_i‖`.
    pub contribution_recall: f64,
}

/// Sets the threshold so that both targets are met on even tokens of `held_out`, at the least
/// predicted density, and counts on odd ones.
pub(crate) fn calibrate(
    network: &Network,
    held_out: &TracePart,
    targets: Targets,
    isa: Isa,
) -> Quality {
    let tokens = held_out.tokens();
    let mut fired = Vec::new();
    for_tokens(
        network,
        held_out,
        (0..tokens).step_by(2),
        isa,
        |token, logits| {
            let neurons = held_out.fired(token);
            fired.extend(neurons.map(|(neuron, added)| (logits[neuron], added)));
        },
    );
    fired.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let with_margin = |target: f64| 1.0 - (1.0 - target) * (1.0 - MARGIN);
    let of_count = threshold(&fired, with_margin(targets.recall), |_| 1.0);
    let of_contribution = threshold(&fired, with_margin(targets.contribution_recall), f64::from);
    let threshold = of_count.min(of_contribution);
    count(network, held_out, (1..tokens).step_by(2), threshold, isa)
}

/// Counts what a given `threshold` does on all tokens of `held_out`.
pub(crate) fn judge(network: &Network, held_out: &TracePart, threshold: f32, isa: Isa) -> Quality {
    count(network, held_out, 0..held_out.tokens(), threshold, isa)
}

/// Counts what `threshold` does on some tokens of `samples`.
fn count(
    network: &Network,
    samples: &TracePart,
    counted: impl Iterator<Item = usize>,
    threshold: f32,
    isa: Isa,
) -> Quality {
    let neurons = samples.active.neurons();
    let (mut active, mut predicted, mut both, mut tokens) = (0usize, 0usize, 0usize, 0usize);
    let (mut added, mut foreseen) = (0f64, 0f64);
    for_tokens(network, samples, counted, isa, |token, logits| {
        tokens += 1;
        predicted += logits.iter().filter(|logit| **logit >= threshold).count();
        for (neuron, contribution) in samples.fired(token) {
            let is_predicted = logits[neuron] >= threshold;
            active += 1;
            both += usize::from(is_predicted);
            added += f64::from(contribution);
            foreseen += f64::from(contribution) * f64::from(u8::from(is_predicted));
        }
    });
    let share = |part: usize, whole: usize| {
        if whole == 0 {
            1.0
        } else {
            part as f64 / whole as f64
        }
    };
    Quality {
        threshold,
        recall: share(both, active),
        contribution_recall: match samples.contributions.is_empty() || added == 0.0 {
            true => None,
            false => Some(foreseen / added),
        },
        precision: share(both, predicted),
        predicted_density: predicted as f64 / (tokens * neurons).max(1) as f64,
        density: active as f64 / (tokens * neurons).max(1) as f64,
        tokens,
    }
}

/// Shows `visit` the logits of some tokens of `samples`.
fn for_tokens(
    network: &Network,
    samples: &TracePart,
    tokens: impl Iterator<Item = usize>,
    isa: Isa,
    mut visit: impl FnMut(usize, &[f32]),
) {
    let neurons = samples.active.neurons();
    let (mut middle, mut logits) = (vec![0.0; network.rank], vec![0.0; neurons]);
    for token in tokens {
        let x: Vec<f32> = match network.input {
            PredictorInput::Normed => samples.input(token).collect(),
            PredictorInput::Residual => samples
                .residual(token)
                .expect("residuals are there where a predictor sees them")
                .collect(),
        };
        network.logits(isa, &x, &mut middle, &mut logits);
        visit(token, &logits);
    }
}

/// The largest threshold that logits of at least `share` of the weight reach, of logits sorted
/// upwards with what each weighs; the largest number there is where there are none, so that nothing
/// is predicted.
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
    fn a_layer_that_never_fires_predicts_nothing() {
        assert_eq!(threshold(&[], 0.95, f64::from), f32::MAX);
    }
}
