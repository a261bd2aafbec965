//! Imports the predictors of the original PowerInfer.
//!
//! Their input is the hidden state x before the FFN's norm. If that norm is RMS with weight w, its
//! output is `n = w ⊙ x / rms(x)`, and at threshold 0 the matrix `fc1 · diag(1/w)` would decide
//! the same from n, because neither relu nor the sign depends on the positive factor `rms(x)`. There is
//! no such matrix for another threshold, for a w with zeros, or for a layer norm, whose output has
//! lost the mean of x. So the matrices are kept, and the file records their input.

use powerinfer_artifact::predictor_file::{BIAS, PredictorInput};
use powerinfer_import::{OriginalPredictor, OriginalPredictors};
use powerinfer_kernels::Isa;
use powerinfer_profile::Profile;
use powerinfer_tensor::{Format, OwnedMatrix, pack};

use crate::{
    PredictorError, Targets,
    calibrate::{Quality, calibrate, judge},
    network::Network,
    verdict::{FEWEST_SAMPLES, check_finite},
};

/// Predictors of the original PowerInfer, and the settings of the import.
#[derive(Debug)]
pub struct Import {
    /// The predictors.
    pub predictors: OriginalPredictors,
    /// Required recall on held-out tokens, for which thresholds are recalibrated; `None` keeps the original threshold.
    pub targets: Option<Targets>,
    /// Format of the weights.
    pub weights: Format,
    /// Seed recorded in the header.
    pub seed: u64,
}

/// The predictor of `layer`, with its quality on the held-out samples of `profile`.
pub(crate) fn imported_network(
    layer: usize,
    profile: &Profile,
    import: &Import,
    isa: Isa,
) -> Result<(Network, Quality), PredictorError> {
    let traces = profile.traces(layer)?;
    let samples = &traces.held_out;
    if samples.tokens() < FEWEST_SAMPLES {
        return Err(PredictorError::TooFewSamples {
            layer,
            training: traces.training.tokens(),
            held_out: samples.tokens(),
            needed: FEWEST_SAMPLES,
        });
    }
    check_finite(layer, &traces)?;
    if samples.residual(samples.tokens() - 1).is_none() {
        return Err(PredictorError::NoResiduals {
            path: profile.folder().to_owned(),
        });
    }
    let network = network(&import.predictors.read(layer)?, import.weights).ok_or_else(|| {
        PredictorError::OutOfRange {
            path: import.predictors.path().to_owned(),
            layer,
            weights: import.weights,
        }
    })?;
    let quality = match import.targets {
        None => judge(&network, samples, import.predictors.threshold(), isa),
        Some(targets) => calibrate(&network, samples, targets, isa),
    };
    Ok((network, quality))
}

/// Converts `original` to the format `weights`; `None` if a weight exceeds its range.
fn network(original: &OriginalPredictor, weights: Format) -> Option<Network> {
    let rank = original.rank;
    let (hidden, neurons) = (original.fc1.len() / rank, original.fc2.len() / rank);
    let network = Network {
        rank,
        is_linear: false,
        steps: 0,
        input: PredictorInput::Residual,
        a: pack(weights, rank, hidden, &original.fc1),
        b: pack(weights, neurons, rank, &original.fc2),
        bias: pack(BIAS, neurons, 1, &vec![0.0; neurons]),
    };
    (is_finite(&network.a) && is_finite(&network.b)).then_some(network)
}

/// Whether all weights are finite.
fn is_finite(matrix: &OwnedMatrix) -> bool {
    let view = matrix.as_view();
    let mut row = vec![0.0; view.columns()];
    (0..view.rows()).all(|index| {
        view.dequantise_row(index, &mut row);
        row.iter().all(|value| value.is_finite())
    })
}

#[cfg(test)]
mod tests {
    use crate::calibrate::Predicts;
    use powerinfer_artifact::random::Random;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn decisions_in_f32_equal_those_of_the_original(
            rank in 1usize..40, hidden in 1usize..70, neurons in 1usize..50,
            threshold in -2.0f64..2.0, seed in 0u64..1000,
        ) {
            let mut random = Random::new(seed);
            let mut normal = |count: usize| -> Vec<f32> {
                (0..count).map(|_| random.normal() as f32).collect()
            };
            let (fc1, fc2, x) = (normal(rank * hidden), normal(neurons * rank), normal(hidden));
            let product = |matrix: &[f32], x: &[f64]| -> Vec<f64> {
                let rows = matrix.chunks_exact(x.len());
                rows.map(|row| row.iter().zip(x).map(|(m, x)| f64::from(*m) * x).sum()).collect()
            };
            let hidden_units = product(&fc1, &x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
            let hidden_units: Vec<f64> = hidden_units.into_iter().map(|value| value.max(0.0)).collect();
            let want = product(&fc2, &hidden_units);

            let original = OriginalPredictor { rank, fc1, fc2 };
            let network = network(&original, Format::F32).unwrap();
            let mut got = vec![0.0; neurons];
            network.logits(Isa::SCALAR, &x, &mut got);
            for (got, want) in got.iter().zip(&want) {
                prop_assert!((f64::from(*got) - want).abs() < 1e-3, "{} {}", got, want);
                if (want - threshold).abs() > 1e-3 {
                    prop_assert_eq!(f64::from(*got) >= threshold, *want >= threshold);
                }
            }
        }
    }

    #[test]
    fn weights_beyond_the_range_of_a_format_are_detected() {
        let original = OriginalPredictor {
            rank: 1,
            fc1: vec![1e9, 1.0],
            fc2: vec![1.0; 3],
        };
        for (weights, holds) in [
            (Format::F32, true),
            (Format::Bf16, true),
            (Format::Q8_0, false),
            (Format::Q4_0, false),
        ] {
            assert_eq!(network(&original, weights).is_some(), holds, "{weights}");
        }
    }
}
