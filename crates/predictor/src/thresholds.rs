//! Thresholds for layers without exact zeros: the error of skipping the neurons with the lowest scores, measured on samples of
//! the layer's inputs.
//!
//! With D the skipped neurons of a token, the relative error of the FFN output is `‖Σ_D h_i·down_i‖ / ‖y‖`, the cumulative
//! error of tail truncation (CETT, arXiv 2402.03804). A threshold on a score skips different neurons on every token; its error
//! is the mean over tokens. Errors are measured along a curve of thresholds, which is inverted at the error levels that all
//! layers share.

use candle_core::{Device, Tensor};
use powerinfer_artifact::{
    plan::Score,
    predictor_file::ScoreVectors,
    threshold_curve::{ERRORS, ThresholdCurve, ThresholdLevel},
};
use powerinfer_model::{Checkpoint, Experts};
use powerinfer_profile::{Profile, TracePart};
use powerinfer_reference::FeedForward;

use crate::{PredictorError, verdict::check_samples};

/// Tokens for measuring errors, and for evaluating them.
const ERROR_TOKENS: usize = 192;
/// Tokens for the statistics of the neurons.
const USUAL_TOKENS: usize = 2048;
/// Points of the error curve, at equal steps of the share of skipped neurons.
const POINTS: usize = 24;

/// Calibrated thresholds of a layer.
#[derive(Debug)]
pub(crate) struct Thresholds {
    pub(crate) vectors: ScoreVectors,
    pub(crate) curves: Vec<ThresholdCurve>,
    /// Per curve, `[levels, neurons]`: share of tokens on which each neuron is computed.
    pub(crate) kept: Vec<Vec<f32>>,
}

/// Neuron values of some tokens, `[tokens, neurons]` each.
struct Sample {
    tokens: usize,
    activation: Vec<f32>,
    up: Option<Vec<f32>>,
    product: Vec<f32>,
}

impl Sample {
    /// Values of at most `wanted` tokens of `part`, evenly spread.
    fn new(part: &TracePart, wanted: usize, ffn: &FeedForward) -> Result<Self, PredictorError> {
        let tokens = part.tokens().min(wanted);
        let inputs = (0..tokens).map(|place| place * part.tokens() / tokens);
        let inputs: Vec<f32> = inputs.flat_map(|token| part.input(token)).collect();
        let x = Tensor::from_vec(inputs, (tokens, part.hidden_size), &Device::Cpu)?;
        let neurons = ffn.neurons(&x, &x)?;
        let values = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
        Ok(Self {
            tokens,
            activation: values(&neurons.activation)?,
            up: neurons.up.as_ref().map(values).transpose()?,
            product: values(&neurons.product)?,
        })
    }

    fn neurons(&self) -> usize {
        self.product.len() / self.tokens
    }
}

/// A score and its parameters.
struct Scoring<'a> {
    score: Score,
    centred: bool,
    vectors: &'a ScoreVectors,
}

impl Scoring<'_> {
    /// Coefficient of each neuron's column of down, and its score.
    fn of(&self, sample: &Sample) -> (Vec<f32>, Vec<f32>) {
        let neurons = sample.neurons();
        let ScoreVectors {
            gate_scale,
            contribution_scale,
            centre,
            ..
        } = self.vectors;
        let coefficient = |index: usize| {
            if self.centred {
                sample.product[index] - centre[index % neurons]
            } else {
                sample.product[index]
            }
        };
        let score = |index: usize| match self.score {
            Score::Gate => sample.activation[index].abs(),
            Score::WeightedGate => sample.activation[index].abs() * gate_scale[index % neurons],
            Score::Contribution => coefficient(index).abs() * contribution_scale[index % neurons],
        };
        let all = 0..sample.product.len();
        (
            all.clone().map(coefficient).collect(),
            all.map(score).collect(),
        )
    }
}

/// Calibrates thresholds for `layer` on the training samples of `profile`, and evaluates them on the held-out samples.
pub(crate) fn thresholds(
    layer: usize,
    profile: &Profile,
    checkpoint: &Checkpoint,
) -> Result<Thresholds, PredictorError> {
    let traces = profile.traces(layer)?;
    check_samples(layer, &traces)?;
    let ffn = FeedForward::load(checkpoint, layer)?;
    let usual = Sample::new(&traces.training, USUAL_TOKENS, &ffn)?;
    let experts = checkpoint.config().experts.as_ref();
    let vectors = vectors(&usual, &ffn, experts)?;
    let search = Errors::new(Sample::new(&traces.training, ERROR_TOKENS, &ffn)?, &ffn)?;
    let judge = Errors::new(Sample::new(&traces.held_out, ERROR_TOKENS, &ffn)?, &ffn)?;

    let mut made = Thresholds {
        vectors,
        curves: Vec::new(),
        kept: Vec::new(),
    };
    let vectors = &made.vectors;
    // Without up, the weighted gate equals the contribution.
    let before_up = match usual.up {
        Some(_) => vec![Score::Gate, Score::WeightedGate],
        None => vec![Score::Gate],
    };
    let uncentred = |score| Scoring {
        score,
        centred: false,
        vectors,
    };
    for score in before_up {
        let scoring = uncentred(score);
        let (curve, kept) = calibrated(&scoring, &search, &judge, &usual)?;
        made.curves.push(curve);
        made.kept.push(kept);
    }
    // Centred if that needs fewer neurons for the same error.
    let plain = calibrated(&uncentred(Score::Contribution), &search, &judge, &usual)?;
    let scoring = Scoring {
        centred: true,
        ..uncentred(Score::Contribution)
    };
    let centred = calibrated(&scoring, &search, &judge, &usual)?;
    let neurons =
        |curve: &ThresholdCurve| curve.levels.iter().map(|level| level.density).sum::<f64>();
    let (curve, kept) = if neurons(&centred.0) < 0.98 * neurons(&plain.0) {
        centred
    } else {
        plain
    };
    made.curves.push(curve);
    made.kept.push(kept);
    Ok(made)
}

/// Parameters of the scores, from the statistics of the neurons.
fn vectors(
    usual: &Sample,
    ffn: &FeedForward,
    experts: Option<&Experts>,
) -> Result<ScoreVectors, PredictorError> {
    let neurons = usual.neurons();
    // A neuron of an expert that the router can select is computed only for the tokens that select the expert.
    let is_routed =
        |neuron: usize| experts.is_some_and(|experts| experts.block_of(neuron) < experts.count);
    let column = |values: &[f32], neuron: usize| -> Vec<f32> {
        values
            .iter()
            .skip(neuron)
            .step_by(neurons)
            .copied()
            .collect()
    };
    let norms = ffn.contribution_norms()?;
    let gate_scale = match &usual.up {
        None => norms.clone(),
        Some(up) => (0..neurons)
            .map(|neuron| {
                let up = column(up, neuron);
                let square = up.iter().map(|up| up * up).sum::<f32>();
                let tokens = if is_routed(neuron) {
                    up.iter().filter(|up| **up != 0.0).count().max(1)
                } else {
                    usual.tokens
                };
                norms[neuron] * (square / tokens as f32).sqrt()
            })
            .collect(),
    };
    // The median: the typical value of an activation that is slightly negative on most tokens and large on few.
    // For neurons of such experts, the centre is 0: any other value would also be added for tokens that do not select the expert.
    let centre: Vec<f32> = (0..neurons)
        .map(|neuron| {
            if is_routed(neuron) {
                return 0.0;
            }
            let mut values = column(&usual.product, neuron);
            let middle = values.len() / 2;
            *values.select_nth_unstable_by(middle, f32::total_cmp).1
        })
        .collect();
    let centres = Tensor::from_slice(&centre, (1, neurons), &Device::Cpu)?;
    Ok(ScoreVectors {
        gate_scale,
        contribution_scale: norms,
        centre,
        offset: ffn.down_unbiased(&centres)?.flatten_all()?.to_vec1()?,
    })
}

/// Measures the relative error of the FFN output when neurons are skipped.
struct Errors<'a> {
    sample: Sample,
    ffn: &'a FeedForward,
    /// `‖y‖` per token.
    sizes: Vec<f32>,
}

impl<'a> Errors<'a> {
    fn new(sample: Sample, ffn: &'a FeedForward) -> Result<Self, PredictorError> {
        let sizes = lengths(ffn, sample.product.clone(), sample.tokens)?;
        Ok(Self { sample, ffn, sizes })
    }

    /// Mean relative error when neurons with scores below `threshold` are skipped.
    fn at(
        &self,
        coefficients: &[f32],
        scores: &[f32],
        threshold: f32,
    ) -> Result<f64, PredictorError> {
        let dropped = coefficients.iter().zip(scores);
        let dropped = dropped.map(|(value, score)| if *score < threshold { *value } else { 0.0 });
        let missing = lengths(self.ffn, dropped.collect(), self.sample.tokens)?;
        let relative = missing.iter().zip(&self.sizes).map(|(missing, size)| {
            if *missing == 0.0 {
                0.0
            } else {
                f64::from(missing / size.max(f32::MIN_POSITIVE))
            }
        });
        Ok(relative.sum::<f64>() / self.sample.tokens as f64)
    }
}

/// `‖down · h‖` for each token's `h`.
fn lengths(ffn: &FeedForward, h: Vec<f32>, tokens: usize) -> Result<Vec<f32>, PredictorError> {
    let neurons = h.len() / tokens;
    let h = Tensor::from_vec(h, (tokens, neurons), &Device::Cpu)?;
    Ok(ffn.down_unbiased(&h)?.sqr()?.sum(1)?.sqrt()?.to_vec1()?)
}

/// Threshold curve of `scoring`, and the share of `usual` tokens on which each neuron is computed.
fn calibrated(
    scoring: &Scoring<'_>,
    search: &Errors<'_>,
    judge: &Errors<'_>,
    usual: &Sample,
) -> Result<(ThresholdCurve, Vec<f32>), PredictorError> {
    let values = invert(scoring, search)?;
    let (coefficients, scores) = scoring.of(&judge.sample);
    let mut levels = Vec::new();
    for value in values {
        let kept = scores.iter().filter(|score| **score >= value).count();
        levels.push(ThresholdLevel {
            value,
            error: judge.at(&coefficients, &scores, value)?,
            density: kept as f64 / scores.len() as f64,
        });
    }
    let kept = shares(&scoring.of(usual).1, &levels, usual.neurons());
    let curve = ThresholdCurve {
        score: scoring.score,
        centred: scoring.centred,
        levels,
    };
    Ok((curve, kept))
}

/// Thresholds at the error levels [`ERRORS`].
fn invert(scoring: &Scoring<'_>, errors: &Errors<'_>) -> Result<Vec<f32>, PredictorError> {
    let (coefficients, scores) = scoring.of(&errors.sample);
    let mut sorted = scores.clone();
    sorted.sort_unstable_by(f32::total_cmp);
    // Thresholds at quantiles of the scores, and their errors, which increase.
    let mut curve = vec![(0f64, 0f64)];
    for point in 1..=POINTS {
        let index = (point * sorted.len() / POINTS).min(sorted.len() - 1);
        let value = sorted[index];
        let error = errors.at(&coefficients, &scores, value)?;
        let (before, least) = *curve.last().expect("the curve starts with a point");
        if f64::from(value) > before {
            curve.push((f64::from(value), error.max(least)));
        }
        if error > ERRORS[ERRORS.len() - 1] {
            break;
        }
    }
    Ok(ERRORS
        .iter()
        .map(|error| value_at(&curve, *error))
        .collect())
}

/// Threshold at which an increasing curve from `(0, 0)` reaches `error`, by linear interpolation; its end if it does not.
fn value_at(curve: &[(f64, f64)], error: f64) -> f32 {
    let after = curve.partition_point(|(_, reached)| *reached <= error);
    let (value, reached) = curve[after - 1];
    let Some((next, more)) = curve.get(after) else {
        return value as f32;
    };
    (value + (next - value) * (error - reached) / (more - reached)) as f32
}

/// `[levels, neurons]`: share of tokens on which a neuron's score reaches the threshold of the level.
fn shares(scores: &[f32], levels: &[ThresholdLevel], neurons: usize) -> Vec<f32> {
    let tokens = scores.len() / neurons;
    let mut reached = vec![0u32; levels.len() * neurons];
    for scores in scores.chunks_exact(neurons) {
        for (neuron, score) in scores.iter().enumerate() {
            // Levels ascend: count the last one that the score reaches.
            let count = levels.partition_point(|level| *score >= level.value);
            if let Some(last) = count.checked_sub(1) {
                reached[last * neurons + neuron] += 1;
            }
        }
    }
    for level in (0..levels.len() - 1).rev() {
        for neuron in 0..neurons {
            reached[level * neurons + neuron] += reached[(level + 1) * neurons + neuron];
        }
    }
    reached
        .iter()
        .map(|count| *count as f32 / tokens as f32)
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn inverting_a_curve_interpolates_linearly(steps in prop::collection::vec((0.01f64..1.0, 0.001f64..0.2), 1..20), error in 0.0f64..1.0) {
            let mut curve = vec![(0.0, 0.0)];
            for (value, more) in steps {
                let (before, reached) = curve[curve.len() - 1];
                curve.push((before + value, reached + more));
            }
            let value = f64::from(value_at(&curve, error));
            let end = curve[curve.len() - 1];
            if error >= end.1 {
                prop_assert!((value - end.0).abs() < 1e-5);
            } else {
                let after = curve.partition_point(|(at, _)| *at < value - 1e-6).max(1);
                let ((a, low), (b, high)) = (curve[after - 1], curve[after]);
                let there = low + (high - low) * (value - a) / (b - a);
                prop_assert!((there - error).abs() < 1e-3, "{there} {error}");
            }
        }

        #[test]
        fn shares_equal_a_straightforward_count(
            scores in prop::collection::vec(0.0f32..1.0, 12), mut values in prop::collection::vec(0.0f32..1.0, 4),
        ) {
            values.sort_by(f32::total_cmp);
            let level = |value: &f32| ThresholdLevel { value: *value, error: 0.0, density: 0.0 };
            let levels: Vec<ThresholdLevel> = values.iter().map(level).collect();
            let found = shares(&scores, &levels, 3);
            for (level, value) in values.iter().enumerate() {
                for neuron in 0..3 {
                    let count = scores.iter().skip(neuron).step_by(3).filter(|score| *score >= value).count();
                    prop_assert!((found[level * 3 + neuron] - count as f32 / 4.0).abs() < 1e-6);
                }
            }
        }
    }
}
