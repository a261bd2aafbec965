//! Whether a layer gets a predictor, and notes on its quality.

use std::mem::discriminant;

use powerinfer_artifact::{ByteSize, Progress, numbered};
use powerinfer_profile::{Part, Traces};

use crate::{PredictorError, Targets, calibrate::Quality};

/// Smallest number of training samples, and of held-out samples.
pub const FEWEST_SAMPLES: usize = 16;
/// A predictor whose misses exceed the allowed ones by more than this factor is refused.
const MAX_EXCESS_MISSES: f64 = 2.0;
/// Required confidence interval of a recall, ±.
const REQUIRED_RECALL_INTERVAL: f64 = 0.01;

/// Why a layer gets no predictor.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub(crate) enum Refusal {
    /// No active neurons in the training or held-out samples.
    #[error("no neuron is active in its samples ({training} training, {held_out} held-out)")]
    NoActivity { training: usize, held_out: usize },
    /// Too few inactive neurons to save anything.
    #[error(
        "{:.1}% of its neurons are active on a token, so that prediction saves nothing",
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
        "the best predictor within {budget}, of rank {rank}, must predict {:.1}% of the neurons for a recall of {:.1}%, which reads more than computing every gate",
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
    let neurons = format!("a recall of {:.1}%", 100.0 * recall);
    contribution.map_or(neurons.clone(), |contribution| {
        format!(
            "{neurons} and a contribution recall of {:.1}%",
            100.0 * contribution
        )
    })
}

/// Whether the recall is so far below the targets that the layer is better off without the predictor.
pub(crate) fn is_far_short(quality: &Quality, targets: Targets) -> bool {
    let far = |reached: f64, target: f64| {
        1.0 - reached > MAX_EXCESS_MISSES * (1.0 - target) + quality.recall_error
    };
    far(quality.recall, targets.recall)
        || quality
            .contribution_recall
            .is_some_and(|reached| far(reached, targets.contribution_recall))
}

/// Notes on the layers once all are done: a line for those that are alike.
#[derive(Default)]
pub(crate) struct Remarks {
    refused: Vec<(usize, Refusal)>,
    /// Layers with too few tokens to know the quality of their predictors.
    unsure: Vec<(usize, Quality)>,
}

impl Remarks {
    /// Remembers that `layer` gets no predictor.
    pub(crate) fn refuse(&mut self, layer: usize, refusal: Refusal) {
        self.refused.push((layer, refusal));
    }

    /// Remembers the quality of the predictor of `layer` if it is not sure.
    pub(crate) fn check(&mut self, layer: usize, quality: &Quality) {
        if quality.recall_error > REQUIRED_RECALL_INTERVAL {
            self.unsure.push((layer, *quality));
        }
    }

    /// Notes what was remembered.
    pub(crate) fn note(&self, progress: &dyn Progress) {
        let mut rest = self.refused.clone();
        while let Some((first, refusal)) = rest.first().copied() {
            let is_alike = |other: &Refusal| discriminant(other) == discriminant(&refusal);
            let (alike, others): (Vec<_>, Vec<_>) =
                rest.into_iter().partition(|(_, other)| is_alike(other));
            let alike: Vec<usize> = alike.into_iter().map(|(layer, _)| layer).collect();
            let layers = numbered("layer", &alike);
            progress.note(&match alike.len() {
                1 => format!("{layers} gets no predictor: {refusal}"),
                _ => format!("{layers} get no predictor; layer {first}: {refusal}"),
            });
            rest = others;
        }
        let worst = self.unsure.iter().map(|(_, quality)| quality);
        let Some(worst) = worst.max_by(|a, b| a.recall_error.total_cmp(&b.recall_error)) else {
            return;
        };
        let layers: Vec<usize> = self.unsure.iter().map(|(layer, _)| *layer).collect();
        // The error is inversely proportional to the square root of the number of tokens.
        let more = (worst.recall_error / REQUIRED_RECALL_INTERVAL).powi(2);
        progress.note(&format!(
            "{}: with {} held-out tokens the recall is known to ± {:.1}% (95% confidence); ± 1% needs about {:.0}, so profile about {more:.0} times as many tokens",
            numbered("layer", &layers),
            worst.tokens,
            100.0 * worst.recall_error,
            more * worst.tokens as f64,
            more = more.ceil(),
        ));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use powerinfer_artifact::progress::Interrupted;

    use super::*;

    /// Records the notes.
    #[derive(Default)]
    struct Notes(Mutex<Vec<String>>);

    impl Progress for Notes {
        fn begin(&self, _title: &str, _total: u64, _unit: &'static str) {}
        fn advance(&self, _count: u64) -> Result<(), Interrupted> {
            Ok(())
        }
        fn note(&self, line: &str) {
            self.0.lock().unwrap().push(line.to_owned());
        }
        fn end(&self) {}
    }

    #[test]
    fn layers_that_are_alike_share_a_note() {
        let mut remarks = Remarks::default();
        for layer in [0, 1, 2, 4] {
            remarks.refuse(layer, Refusal::AlwaysActive { density: 0.9 });
        }
        remarks.refuse(
            3,
            Refusal::NoActivity {
                training: 20,
                held_out: 20,
            },
        );
        let quality = |recall_error| Quality {
            threshold: 0.0,
            recall: 0.9,
            recall_error,
            contribution_recall: None,
            precision: 0.1,
            predicted_density: 0.3,
            density: 0.1,
            tokens: 40,
        };
        for (layer, error) in [(5, 0.005), (6, 0.02), (7, 0.03)] {
            remarks.check(layer, &quality(error));
        }
        let notes = Notes::default();
        remarks.note(&notes);
        let notes = notes.0.into_inner().unwrap();
        let starts = [
            "layers 0–2, 4 get no predictor; layer 0: 90.0% of its neurons",
            "layer 3 gets no predictor: no neuron is active",
            "layers 6–7: with 40 held-out tokens the recall is known to ± 3.0% (95% confidence); ± 1% needs about 360, so profile about 9 times as many",
        ];
        assert_eq!(notes.len(), starts.len());
        for (note, start) in notes.iter().zip(starts) {
            assert!(note.starts_with(start), "{note}");
        }
    }
}
