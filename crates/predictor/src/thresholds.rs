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
use rayon::prelude::*;

use crate::{PredictorError, verdict::check_samples};

/// Tokens for measuring errors, and for evaluating them.
const ERROR_TOKENS: usize = 192;
/// Tokens for the statistics of the neurons.
const USUAL_TOKENS: usize = 2048;
/// Points of the error curve, at equal steps of the share of skipped neurons.
const POINTS: usize = 24;
/// Length of the random projection on which errors are measured if the FFN's output is longer. A token's error is accurate to 3–4%,
/// and the mean over tokens is more accurate. Held-out tokens use a different projection.
const PROJECTED: usize = 512;

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
    /// Coefficients of the neurons' columns of down, `[tokens, neurons]`.
    fn coefficients(&self, sample: &Sample) -> Vec<f32> {
        let mut coefficients = sample.product.clone();
        if self.centred {
            in_rows(&mut coefficients, &self.vectors.centre, |value, centre| {
                value - centre
            });
        }
        coefficients
    }

    /// Scores, `[tokens, neurons]`.
    fn scores(&self, sample: &Sample) -> Vec<f32> {
        let (mut scores, factors) = match self.score {
            Score::Gate => {
                let scores = sample.activation.par_iter().map(|value| value.abs());
                return scores.collect();
            }
            Score::WeightedGate => (sample.activation.clone(), &self.vectors.gate_scale),
            Score::Contribution => (self.coefficients(sample), &self.vectors.contribution_scale),
        };
        in_rows(&mut scores, factors, |value, factor| value.abs() * factor);
        scores
    }
}

/// Replaces each of `values [tokens, neurons]` with `function` of it and of the neuron's value in `of_neurons`.
fn in_rows(values: &mut [f32], of_neurons: &[f32], function: impl Fn(f32, f32) -> f32 + Sync) {
    let rows = values.par_chunks_exact_mut(of_neurons.len());
    rows.for_each(|row| {
        let each = row.iter_mut().zip(of_neurons);
        each.for_each(|(value, own)| *value = function(*value, *own));
    });
}

/// Result of `function` for each neuron, called with the neuron and its values for all tokens; `values` are `[tokens, neurons]`.
fn of_columns(
    values: &[f32],
    neurons: usize,
    function: impl Fn(usize, &mut [f32]) -> f32 + Sync,
) -> Vec<f32> {
    /// Neurons whose columns are gathered at once, because gathering one column touches a cache line per value.
    const TOGETHER: usize = 64;
    let tokens = values.len() / neurons;
    let blocks = (0..neurons.div_ceil(TOGETHER)).into_par_iter();
    let found = blocks.map(|block| {
        let block = block * TOGETHER..((block + 1) * TOGETHER).min(neurons);
        let mut columns = vec![0.0; block.len() * tokens];
        for (token, row) in values.chunks_exact(neurons).enumerate() {
            for (column, value) in row[block.clone()].iter().enumerate() {
                columns[column * tokens + token] = *value;
            }
        }
        let columns = columns.chunks_exact_mut(tokens);
        let found = block
            .zip(columns)
            .map(|(neuron, column)| function(neuron, column));
        found.collect::<Vec<f32>>()
    });
    found.collect::<Vec<_>>().concat()
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
    let errors = |part, seed| {
        let down = ffn.projected_down(PROJECTED, seed)?;
        Errors::new(Sample::new(part, ERROR_TOKENS, &ffn)?, down)
    };
    let (search, judge) = (errors(&traces.training, 0)?, errors(&traces.held_out, 1)?);

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
    let norms = ffn.contribution_norms()?;
    let gate_scale = match &usual.up {
        None => norms.clone(),
        Some(up) => of_columns(up, neurons, |neuron, up| {
            let square = up.iter().map(|up| up * up).sum::<f32>();
            let tokens = if is_routed(neuron) {
                up.iter().filter(|up| **up != 0.0).count().max(1)
            } else {
                usual.tokens
            };
            norms[neuron] * (square / tokens as f32).sqrt()
        }),
    };
    // The median: the typical value of an activation that is slightly negative on most tokens and large on few.
    // For neurons of such experts, the centre is 0: any other value would also be added for tokens that do not select the expert.
    let centre = of_columns(&usual.product, neurons, |neuron, values| {
        if is_routed(neuron) {
            return 0.0;
        }
        let middle = values.len() / 2;
        *values.select_nth_unstable_by(middle, f32::total_cmp).1
    });
    let centres = Tensor::from_slice(&centre, (1, neurons), &Device::Cpu)?;
    Ok(ScoreVectors {
        gate_scale,
        contribution_scale: norms,
        centre,
        offset: ffn.down_unbiased(&centres)?.flatten_all()?.to_vec1()?,
    })
}

/// Measures the relative error of the FFN output when neurons are skipped.
struct Errors {
    sample: Sample,
    /// Down projection, with outputs projected to at most [`PROJECTED`] values.
    down: FeedForward,
    /// `‖y‖` per token.
    sizes: Vec<f32>,
}

impl Errors {
    fn new(sample: Sample, down: FeedForward) -> Result<Self, PredictorError> {
        let sizes = lengths(&down, sample.product.clone(), sample.tokens)?;
        Ok(Self {
            sample,
            down,
            sizes,
        })
    }

    /// Mean relative error for each of `thresholds` if neurons with scores below it are skipped.
    fn at(
        &self,
        coefficients: &[f32],
        scores: &[f32],
        thresholds: &[f32],
    ) -> Result<Vec<f64>, PredictorError> {
        /// Number of coefficients in one product, because products with more rows are faster.
        const TOGETHER: usize = 1 << 24;
        let each = (TOGETHER / coefficients.len().max(1)).max(1);
        let mut errors = Vec::new();
        for thresholds in thresholds.chunks(each) {
            let mut dropped = vec![0.0; thresholds.len() * coefficients.len()];
            let parts = dropped.par_chunks_exact_mut(coefficients.len());
            parts.zip(thresholds).for_each(|(dropped, threshold)| {
                let values = coefficients.iter().zip(scores);
                for (dropped, (value, score)) in dropped.iter_mut().zip(values) {
                    *dropped = if score < threshold { *value } else { 0.0 };
                }
            });
            let tokens = thresholds.len() * self.sample.tokens;
            let missing = lengths(&self.down, dropped, tokens)?;
            errors.extend(missing.chunks_exact(self.sample.tokens).map(|missing| {
                let relative = missing.iter().zip(&self.sizes).map(|(missing, size)| {
                    if *missing == 0.0 {
                        0.0
                    } else {
                        f64::from(missing / size.max(f32::MIN_POSITIVE))
                    }
                });
                relative.sum::<f64>() / self.sample.tokens as f64
            }));
        }
        Ok(errors)
    }
}

/// `‖down · h‖` for each token's `h`.
fn lengths(down: &FeedForward, h: Vec<f32>, tokens: usize) -> Result<Vec<f32>, PredictorError> {
    let neurons = h.len() / tokens;
    let h = Tensor::from_vec(h, (tokens, neurons), &Device::Cpu)?;
    Ok(down.down_unbiased(&h)?.sqr()?.sum(1)?.sqrt()?.to_vec1()?)
}

/// Threshold curve of `scoring`, and the share of `usual` tokens on which each neuron is computed.
fn calibrated(
    scoring: &Scoring<'_>,
    search: &Errors,
    judge: &Errors,
    usual: &Sample,
) -> Result<(ThresholdCurve, Vec<f32>), PredictorError> {
    let values = invert(scoring, search)?;
    let (coefficients, scores) = (
        scoring.coefficients(&judge.sample),
        scoring.scores(&judge.sample),
    );
    let errors = judge.at(&coefficients, &scores, &values)?;
    let levels = values.into_iter().zip(errors).map(|(value, error)| {
        let kept = scores.iter().filter(|score| **score >= value).count();
        ThresholdLevel {
            value,
            error,
            density: kept as f64 / scores.len() as f64,
        }
    });
    let levels: Vec<_> = levels.collect();
    let kept = shares(&scoring.scores(usual), &levels, usual.neurons());
    let curve = ThresholdCurve {
        score: scoring.score,
        centred: scoring.centred,
        levels,
    };
    Ok((curve, kept))
}

/// Thresholds at the error levels [`ERRORS`].
fn invert(scoring: &Scoring<'_>, errors: &Errors) -> Result<Vec<f32>, PredictorError> {
    let sample = &errors.sample;
    let (coefficients, scores) = (scoring.coefficients(sample), scoring.scores(sample));
    let mut sorted = scores.clone();
    sorted.par_sort_unstable_by(f32::total_cmp);
    // Thresholds at quantiles of the scores, and their errors, which increase.
    let values = (1..=POINTS).map(|point| {
        let index = (point * sorted.len() / POINTS).min(sorted.len() - 1);
        sorted[index]
    });
    let values: Vec<f32> = values.collect();
    let mut curve = vec![(0f64, 0f64)];
    let reached = errors.at(&coefficients, &scores, &values)?;
    for (value, error) in values.into_iter().zip(reached) {
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
    let values: Vec<f32> = levels.iter().map(|level| level.value).collect();
    // Levels ascend: count each score only at the last level that it reaches.
    let count = |mut counts: Vec<u32>, scores: &[f32]| {
        for (counts, score) in counts.chunks_exact_mut(values.len() + 1).zip(scores) {
            counts[values.iter().filter(|value| score >= value).count()] += 1;
        }
        counts
    };
    let none = || vec![0u32; (values.len() + 1) * neurons];
    let counted = scores.par_chunks_exact(neurons).fold(none, count);
    let counts = counted.reduce(none, |mut sum, counts| {
        sum.iter_mut()
            .zip(counts)
            .for_each(|(sum, count)| *sum += count);
        sum
    });
    let mut shares = vec![0.0; values.len() * neurons];
    for (neuron, counts) in counts.chunks_exact(values.len() + 1).enumerate() {
        let mut reached = 0;
        for (level, count) in counts[1..].iter().enumerate().rev() {
            reached += count;
            shares[level * neurons + neuron] = reached as f32 / tokens as f32;
        }
    }
    shares
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
