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
    pub(crate) precision: f64,
    pub(crate) predicted_density: f64,
    pub(crate) density: f64,
    pub(crate) tokens: usize,
}

/// Calibrates for `target` recall on even tokens of `held_out`, counts on odd ones.
pub(crate) fn calibrate(network: &Network, held_out: &TracePart, target: f64, isa: Isa) -> Quality {
    let tokens = held_out.tokens();
    let mut of_active = Vec::new();
    for_tokens(
        network,
        held_out,
        (0..tokens).step_by(2),
        isa,
        |token, logits| {
            let active = |neuron: &usize| held_out.active.is_active(token, *neuron);
            let neurons = (0..logits.len()).filter(active);
            of_active.extend(neurons.map(|neuron| logits[neuron]));
        },
    );
    let threshold = threshold(&mut of_active, 1.0 - (1.0 - target) * (1.0 - MARGIN));
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
    for_tokens(network, samples, counted, isa, |token, logits| {
        tokens += 1;
        for (neuron, logit) in logits.iter().enumerate() {
            let (fires, foreseen) = (samples.active.is_active(token, neuron), *logit >= threshold);
            active += usize::from(fires);
            predicted += usize::from(foreseen);
            both += usize::from(fires && foreseen);
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

/// The largest threshold that at least `share` of `logits` reach; the largest number there is
/// where there are no logits, so that nothing is predicted.
fn threshold(logits: &mut [f32], share: f64) -> f32 {
    if logits.is_empty() {
        return f32::MAX;
    }
    let below = ((logits.len() as f64 * (1.0 - share)).floor() as usize).min(logits.len() - 1);
    *logits.select_nth_unstable_by(below, f32::total_cmp).1
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
            let chosen = threshold(&mut logits.clone(), share);
            let reach = |limit: f32| logits.iter().filter(|logit| **logit >= limit).count() as f64;
            prop_assert!(reach(chosen) >= share * logits.len() as f64 - 1e-9);
            let next = logits.iter().copied().filter(|logit| *logit > chosen).fold(f32::INFINITY, f32::min);
            prop_assert!(reach(next) < share * logits.len() as f64 + 1.0);
        }
    }

    #[test]
    fn a_layer_that_never_fires_predicts_nothing() {
        assert_eq!(threshold(&mut [], 0.95), f32::MAX);
    }
}
