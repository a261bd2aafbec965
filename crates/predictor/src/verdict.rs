//! Whether a layer gets a predictor, and notes on its quality.

use powerinfer_artifact::{ByteSize, Progress};
use powerinfer_profile::{Part, Traces};

use crate::{PredictorError, Targets, calibrate::Quality, make::FEWEST_SAMPLES};

/// A predictor whose misses exceed the allowed ones by more than this factor is refused.
const FAR: f64 = 2.0;
/// Required confidence interval of a recall, ±.
const SURE: f64 = 0.01;

/// Why a layer gets no predictor and runs `exact`, which is lossless.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub(crate) enum Refusal {
    /// No active neurons in the training or held-out samples.
    #[error("no neuron is active in its samples ({training} training, {held_out} held-out)")]
    NoActivity { training: usize, held_out: usize },
    /// Too few inactive neurons to save anything.
    #[error(
        "{:.1} % of its neurons are active on a token, so that prediction saves nothing",
        100.0 * density
    )]
    AlwaysActive { density: f64 },
    /// The smallest predictor exceeds the budget.
    #[error("a predictor of rank {rank} takes {bytes}, the budget is {budget} per layer")]
    OverBudget {
        rank: usize,
        bytes: ByteSize,
        budget: ByteSize,
    },
    /// The predictor would read more than it saves.
    #[error(
        "the best predictor within {budget}, of rank {rank}, must predict {:.1} % of the neurons for a recall of {:.1} %, which reads more than computing every gate",
        100.0 * predicted, 100.0 * recall
    )]
    DoesNotPay {
        rank: usize,
        budget: ByteSize,
        predicted: f64,
        recall: f64,
    },
    /// The recall is far below the targets.
    #[error(
        "the best predictor within {budget}, of rank {rank}, reaches {} on held-out tokens, far below the target of {}",
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

/// Refuses samples that are too few, or not finite.
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
    check_finite(layer, traces)
}

/// Refuses samples with NaN or infinite values.
pub(crate) fn check_finite(layer: usize, traces: &Traces) -> Result<(), PredictorError> {
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

/// Describes recall and contribution recall.
fn shares(recall: f64, contribution: Option<f64>) -> String {
    let neurons = format!("a recall of {:.1} %", 100.0 * recall);
    contribution.map_or(neurons.clone(), |contribution| {
        format!(
            "{neurons} and a contribution recall of {:.1} %",
            100.0 * contribution
        )
    })
}

/// Whether the recall is so far below the targets that the layer is better off without the predictor.
pub(crate) fn is_far_short(quality: &Quality, targets: Targets) -> bool {
    let far =
        |reached: f64, target: f64| 1.0 - reached > FAR * (1.0 - target) + quality.recall_error;
    far(quality.recall, targets.recall)
        || quality
            .contribution_recall
            .is_some_and(|reached| far(reached, targets.contribution_recall))
}

/// Notes if there are too few tokens to know the quality of the predictor of `layer`.
pub(crate) fn note_unsure(layer: usize, quality: &Quality, progress: &dyn Progress) {
    if quality.recall_error <= SURE {
        return;
    }
    // The error decreases with the square root of the tokens; half of them set the threshold.
    let more = (quality.recall_error / SURE).powi(2);
    progress.note(&format!(
        "layer {layer}: with {} held-out tokens its recall is {:.1} % ± {:.1} % (95 % confidence); ± 1 % needs about {:.0} held-out tokens, so profile about {more:.0} times as many",
        quality.tokens,
        100.0 * quality.recall,
        100.0 * quality.recall_error,
        2.0 * more * quality.tokens as f64,
        more = more.ceil(),
    ));
}
