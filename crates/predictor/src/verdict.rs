//! Whether a layer is better off with a predictor, and what a person should know of the one it gets.

use powerinfer_artifact::{ByteSize, Progress};
use powerinfer_profile::{Part, Traces};

use crate::{PredictorError, Targets, calibrate::Quality, make::FEWEST_SAMPLES};

/// A predictor that misses more than so many times what it may is worse than none.
const FAR: f64 = 2.0;
/// How near a recall should be known.
const SURE: f64 = 0.01;

/// Why a layer gets no predictor and so runs `exact`, which misses nothing.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub(crate) enum Refusal {
    /// Nothing to learn from, or to judge on.
    #[error("no neuron fires in its samples ({training} to learn from, {held_out} to judge on)")]
    NeverFires { training: usize, held_out: usize },
    /// Nothing to save.
    #[error(
        "{:.1} % of its neurons fire on a token, so predicting which ones saves nothing",
        100.0 * density
    )]
    AlwaysFires { density: f64 },
    /// No room.
    #[error("even of rank {rank} one takes {bytes}, and the budget leaves {budget} for a layer")]
    OverBudget {
        rank: usize,
        bytes: ByteSize,
        budget: ByteSize,
    },
    /// It would read more than it saves.
    #[error(
        "within {budget} the best, of rank {rank}, must predict {:.1} % of the neurons to predict {:.1} % of those that fire, which reads more than computing every gate",
        100.0 * predicted, 100.0 * recall
    )]
    DoesNotPay {
        rank: usize,
        budget: ByteSize,
        predicted: f64,
        recall: f64,
    },
    /// It would change what the model says.
    #[error(
        "within {budget} the best, of rank {rank}, predicts {} on held-out tokens, far from the {} asked for",
        shares(*recall, *contribution), shares(targets.recall, Some(targets.contribution_recall))
    )]
    FarShort {
        rank: usize,
        budget: ByteSize,
        recall: f64,
        contribution: Option<f64>,
        targets: Targets,
    },
}

/// Refuses samples that are too few to learn from and to judge on, or have numbers that are none.
pub(crate) fn check_samples(layer: usize, traces: &Traces) -> Result<(), PredictorError> {
    let (training, held_out) = (traces.training.tokens(), traces.held_out.tokens());
    if training < FEWEST_SAMPLES || held_out < FEWEST_SAMPLES {
        return Err(PredictorError::TooFewSamples {
            layer,
            training,
            held_out,
            needed: FEWEST_SAMPLES,
        });
    }
    check_numbers(layer, traces)
}

/// Refuses samples with numbers that are none.
pub(crate) fn check_numbers(layer: usize, traces: &Traces) -> Result<(), PredictorError> {
    for part in Part::ALL {
        if let Some(token) = traces.part(part).first_not_finite() {
            return Err(PredictorError::NotFinite {
                layer,
                part: part.name(),
                token,
            });
        }
    }
    Ok(())
}

/// In words.
fn shares(recall: f64, contribution: Option<f64>) -> String {
    let neurons = format!("{:.1} % of the neurons that fire", 100.0 * recall);
    contribution.map_or(neurons.clone(), |contribution| {
        format!(
            "{neurons} and {:.1} % of what they add",
            100.0 * contribution
        )
    })
}

/// Whether so much less is predicted than asked for that the layer is better off without.
pub(crate) fn is_far_short(quality: &Quality, targets: Targets) -> bool {
    let far =
        |reached: f64, target: f64| 1.0 - reached > FAR * (1.0 - target) + quality.recall_error;
    far(quality.recall, targets.recall)
        || quality
            .contribution_recall
            .is_some_and(|reached| far(reached, targets.contribution_recall))
}

/// Says so where there are too few tokens to know how good the predictor of `layer` is.
pub(crate) fn note_unsure(layer: usize, quality: &Quality, progress: &dyn Progress) {
    if quality.recall_error <= SURE {
        return;
    }
    // The error falls with the root of the tokens; as many set the threshold as count.
    let more = (quality.recall_error / SURE).powi(2);
    progress.note(&format!(
        "layer {layer}: {} held-out tokens tell its recall of {:.1} % to ± {:.1} % (with 95 % confidence); for ± 1 % about {:.0} must be held out, so profile about {more:.0} times as many",
        quality.tokens,
        100.0 * quality.recall,
        100.0 * quality.recall_error,
        2.0 * more * quality.tokens as f64,
        more = more.ceil(),
    ));
}
