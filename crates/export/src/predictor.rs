//! Predictors of a bundle in the form of the original PowerInfer.
//!
//! It computes a neuron if `fc2 · relu(fc1 · r)` is at least a threshold that all layers share; r is the hidden state
//! *before* the FFN's norm, and there is no bias. Ours may read the normed x, and have biases and a threshold per layer:
//!
//! * With an RMS norm, `x = w ⊙ r / ρ` where ρ = rms(r) > 0. As `relu(z / ρ) = relu(z) / ρ`, the logit times ρ is
//!   `B · relu(A·diag(w) · r) + ρ·b`, of the same sign. Without a bias, and with threshold 0, this is exact.
//! * Otherwise `ρ·(b − t)` is added by further hidden units: for random directions g, the mean of `|g·r|` is `√(2/π)·‖r‖`,
//!   and `|g·r| = relu(g·r) + relu(−g·r)`. This is an approximation.
//! * A linear predictor is exported with pairs of hidden units: `A · x = relu(A · x) − relu(−A · x)`. This is exact.
//! * A layer that computes all neurons has a predictor of zeros: every logit is 0, which is not below the threshold.

use std::f32::consts::FRAC_2_PI;

use powerinfer_artifact::{
    Hint, Progress,
    plan::Policy,
    predictor_file::{PredictorFile, PredictorInput, PredictorSummary},
    random::Random,
};
use powerinfer_bundle::Bundle;
use powerinfer_model::{LayerWeight, Weight};
use powerinfer_tensor::{BLOCK, Format, NormKind};

use crate::ExportError;

/// Random directions whose products estimate the norm of r: to within about 9%.
const DIRECTIONS: usize = 64;

/// Predictors of all layers, before they are converted.
pub(crate) struct Predictors<'a> {
    bundle: &'a Bundle,
    /// Neurons per layer in the file: the bundle's, then those of padding.
    neurons: usize,
    /// Threshold of all layers.
    pub(crate) threshold: f32,
    forms: Vec<Form>,
}

/// How a layer is represented.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    /// Every neuron is predicted.
    All,
    /// The same matrices, B multiplied by a positive factor.
    Residual { factor: f32 },
    /// The norm's weights are multiplied into A.
    Folded,
    /// As `Folded`, with hidden units for bias and threshold.
    Estimated,
}

/// A layer's predictor as the original stores it.
pub(crate) struct Converted {
    /// `[rank, hidden]`.
    pub(crate) fc1: Vec<f32>,
    /// `[neurons, rank]`, neurons in the checkpoint's order.
    pub(crate) fc2: Vec<f32>,
}

/// A layer's predictor as the bundle has it: `B · relu(A · x) + b >= threshold`.
struct Own {
    rank: usize,
    a: Vec<f32>,
    /// `[neurons, rank]`, neurons in the checkpoint's order, as is the bias.
    b: Vec<f32>,
    bias: Vec<f32>,
    threshold: f32,
}

impl<'a> Predictors<'a> {
    /// Decides how each layer is represented.
    pub(crate) fn new(bundle: &'a Bundle, neurons: usize) -> Result<Self, ExportError> {
        let config = bundle.config();
        let mut forms = vec![Form::All; config.layer_count];
        let mut thresholds = Vec::new();
        for (layer, plan) in bundle.plan().layers.iter().enumerate() {
            let Some((file, own)) =
                used(bundle, layer)?.filter(|_| plan.policy == Policy::Predicted)
            else {
                continue;
            };
            let refuse = |reason: &str| ExportError::Predictor {
                layer,
                reason: reason.to_owned(),
                hint: Some(Hint::PlaceWithoutPredictors),
            };
            let (bias, threshold) = own;
            forms[layer] = match file.input() {
                PredictorInput::Residual if bias.iter().any(|bias| *bias != 0.0) => {
                    return Err(refuse(
                        "it reads the residual and has a bias, which the original's predictors do not",
                    ));
                }
                PredictorInput::Residual => {
                    thresholds.push((layer, threshold));
                    Form::Residual { factor: 1.0 }
                }
                PredictorInput::Normed if config.norm != NormKind::RootMeanSquare => {
                    return Err(refuse(
                        "it reads the hidden state after a layer norm, the original's before it, and the norm's bias cannot be folded into it",
                    ));
                }
                PredictorInput::Normed if bias.iter().all(|bias| *bias == threshold) => {
                    Form::Folded
                }
                PredictorInput::Normed => Form::Estimated,
            };
        }
        // One threshold for all: a positive factor on B moves a layer's own.
        let threshold = thresholds.first().map_or(0.0, |(_, threshold)| *threshold);
        for (layer, own) in thresholds {
            let factor = if own == threshold {
                1.0
            } else {
                threshold / own
            };
            if !(factor > 0.0 && factor.is_finite()) {
                return Err(ExportError::Predictor {
                    layer,
                    reason: format!(
                        "its threshold is {own} and that of another layer {threshold}, the original has one for all; train or import the predictors with thresholds of one sign"
                    ),
                    hint: None,
                });
            }
            forms[layer] = Form::Residual { factor };
        }
        if threshold > 0.0
            && let Some(layer) = forms.iter().position(|form| *form == Form::All)
        {
            return Err(ExportError::Predictor {
                layer,
                reason: format!(
                    "the layer computes all neurons, which the common threshold {threshold} > 0 does not allow"
                ),
                hint: Some(Hint::PlaceWithPredictors),
            });
        }
        Ok(Self {
            bundle,
            neurons,
            threshold,
            forms,
        })
    }

    /// Number of hidden units of a layer, in whole blocks as the original's kernels need.
    pub(crate) fn rank(&self, layer: usize) -> usize {
        let own = || {
            let summary = self.bundle.predictors().map(|file| &file.layers()[layer]);
            summary.map_or(0, |summary| match summary.is_linear {
                true => 2 * summary.rank,
                false => summary.rank,
            })
        };
        let units = match self.forms[layer] {
            Form::All => 1,
            Form::Residual { .. } | Form::Folded => own(),
            Form::Estimated => own() + 2 * DIRECTIONS,
        };
        units.next_multiple_of(BLOCK)
    }

    /// Format of a layer's matrices in a file whose other matrices are in `quant`.
    pub(crate) fn format(&self, layer: usize, quant: Format) -> Format {
        let stored = self.bundle.predictors().map(PredictorFile::weights);
        let same = self.forms[layer] == Form::Residual { factor: 1.0 };
        // Nothing is rounded a second time.
        if same && quant == Format::Q4_0 && stored == Some(Format::Q4_0) {
            Format::Q4_0
        } else {
            Format::F16
        }
    }

    /// Converts the predictor of a layer.
    pub(crate) fn convert(&self, layer: usize) -> Result<Converted, ExportError> {
        let config = self.bundle.config();
        let (hidden, rank) = (config.hidden_size, self.rank(layer));
        let mut converted = Converted {
            fc1: vec![0.0; rank * hidden],
            fc2: vec![0.0; self.neurons * rank],
        };
        let form = self.forms[layer];
        if form == Form::All {
            return Ok(converted);
        }
        let own = self.own(layer)?;
        converted.fc1[..own.a.len()].copy_from_slice(&own.a);
        let factor = match form {
            Form::Residual { factor } => factor,
            _ => 1.0,
        };
        for (row, own) in converted
            .fc2
            .chunks_exact_mut(rank)
            .zip(own.b.chunks_exact(own.rank))
        {
            for (value, own) in row.iter_mut().zip(own) {
                *value = own * factor;
            }
        }
        if form == Form::Folded || form == Form::Estimated {
            let norm = self.norm_weights(layer)?;
            for row in converted.fc1[..own.a.len()].chunks_exact_mut(hidden) {
                for (value, weight) in row.iter_mut().zip(&norm) {
                    *value *= weight;
                }
            }
        }
        if form == Form::Estimated {
            let mut random = Random::new(layer as u64);
            let scale = 1.0 / (FRAC_2_PI.sqrt() * (hidden as f32).sqrt());
            let directions = own.rank * hidden..(own.rank + 2 * DIRECTIONS) * hidden;
            for pair in converted.fc1[directions].chunks_exact_mut(2 * hidden) {
                let (positive, negative) = pair.split_at_mut(hidden);
                for (positive, negative) in positive.iter_mut().zip(negative) {
                    *positive = random.normal() as f32 * scale;
                    *negative = -*positive;
                }
            }
            for (row, bias) in converted.fc2.chunks_exact_mut(rank).zip(&own.bias) {
                let each = (bias - own.threshold) / DIRECTIONS as f32;
                row[own.rank..own.rank + 2 * DIRECTIONS].fill(each);
            }
        }
        Ok(converted)
    }

    /// Weights of the norm before the FFN.
    fn norm_weights(&self, layer: usize) -> Result<Vec<f32>, ExportError> {
        let norm = Weight::Layer(layer, LayerWeight::FfnNorm);
        Ok(self.bundle.read(norm)?)
    }

    /// Reads a layer's predictor.
    fn own(&self, layer: usize) -> Result<Own, ExportError> {
        let config = self.bundle.config();
        let (hidden, neurons) = (config.hidden_size, config.ffn_size);
        let file = self.bundle.predictors().expect("the layer has a predictor");
        let stored = file.find_units(layer, hidden, neurons)?;
        let stored = stored.expect("the layer has a predictor");
        let order = self.bundle.neuron_order(layer)?;
        let (a_view, units) = (
            stored.a.view(file.tensors()),
            stored.units.view(file.tensors()),
        );
        let rank = a_view.rows();
        let mut a = vec![0.0; rank * hidden];
        let mut b = vec![0.0; neurons * rank];
        let mut of_unit = vec![0.0; neurons];
        for unit in 0..rank {
            a_view.dequantise_row(unit, &mut a[unit * hidden..][..hidden]);
            units.dequantise_row(unit, &mut of_unit);
            for (place, value) in of_unit.iter().enumerate() {
                let scale = stored.scales.get(unit / BLOCK * neurons + place);
                b[order[place] as usize * rank + unit] = value * scale.unwrap_or(&1.0);
            }
        }
        let mut bias = vec![0.0; neurons];
        for (place, value) in stored.bias.iter().enumerate() {
            bias[order[place] as usize] = *value;
        }
        let PredictorSummary {
            threshold,
            is_linear,
            ..
        } = file.layers()[layer];
        let (rank, a, b) = match is_linear {
            true => (2 * rank, with_negatives(&a, hidden), with_negatives(&b, 1)),
            false => (rank, a, b),
        };
        Ok(Own {
            rank,
            a,
            b,
            bias,
            threshold,
        })
    }

    /// Notes on what differs from the bundle: layers that compute all neurons, and the share of predictions that estimated
    /// ones have in common with it.
    pub(crate) fn notes(&self, progress: &dyn Progress) -> Result<Vec<String>, ExportError> {
        let mut notes = Vec::new();
        let count = |form: Form| self.forms.iter().filter(|found| **found == form).count();
        let (all, estimated) = (count(Form::All), count(Form::Estimated));
        if all > 0 {
            notes.push(format!(
                "{all} of {} layers predict every neuron: their policy in the bundle needs no predictor, or a threshold that the original does not know",
                self.forms.len()
            ));
        }
        if estimated > 0 {
            progress.begin("comparing predictors", estimated as u64, "layers");
            let mut shares = Vec::new();
            for layer in 0..self.forms.len() {
                if self.forms[layer] == Form::Estimated {
                    shares.push(self.agreement(layer)?);
                    progress.advance(1)?;
                }
            }
            progress.end();
            let least = shares.iter().copied().fold(1.0, f64::min);
            let mean = shares.iter().sum::<f64>() / shares.len() as f64;
            notes.push(format!(
                "the predictors of {estimated} layers have biases or thresholds, which the original does not support: {} hidden units estimate them; on {TOKENS} embeddings {:.2}% of the predictions are the same, {:.2}% in the worst layer",
                2 * DIRECTIONS,
                100.0 * mean,
                100.0 * least
            ));
        }
        Ok(notes)
    }

    /// Share of the neurons for which both forms predict the same, with embeddings as hidden states.
    fn agreement(&self, layer: usize) -> Result<f64, ExportError> {
        let config = self.bundle.config();
        let (hidden, rank) = (config.hidden_size, self.rank(layer));
        let (own, converted) = (self.own(layer)?, self.convert(layer)?);
        let norm = self.norm_weights(layer)?;
        let step = (config.vocabulary_size / TOKENS).max(1);
        let (mut same, mut total) = (0, 0);
        for token in (0..config.vocabulary_size).step_by(step).take(TOKENS) {
            let state = self.bundle.read_rows(Weight::Embedding, token..token + 1)?;
            let square: f32 = state.iter().map(|value| value * value).sum();
            let rms = (square / hidden as f32).sqrt();
            if rms == 0.0 {
                continue; // an embedding that is not used
            }
            let state: Vec<f32> = state.iter().map(|value| value / rms).collect();
            let normed: Vec<f32> = state.iter().zip(&norm).map(|(x, w)| x * w).collect();
            let ours = logits(&own.a, &own.b, own.rank, &normed);
            let theirs = logits(&converted.fc1, &converted.fc2, rank, &state);
            for ((ours, bias), theirs) in ours.iter().zip(&own.bias).zip(&theirs) {
                let (ours, theirs) = (ours + bias >= own.threshold, *theirs >= self.threshold);
                same += usize::from(ours == theirs);
            }
            total += config.ffn_size;
        }
        Ok(same as f64 / total.max(1) as f64)
    }
}

/// Embeddings that predictions are compared on.
const TOKENS: usize = 16;

/// The bias and the threshold of the predictor of `layer`, and the file that has it; `None` if there is none.
#[expect(clippy::type_complexity, reason = "the parts of a predictor")]
fn used(
    bundle: &Bundle,
    layer: usize,
) -> Result<Option<(&PredictorFile, (Vec<f32>, f32))>, ExportError> {
    let Some(file) = bundle.predictors() else {
        return Ok(None);
    };
    let config = bundle.config();
    let stored = file.find_units(layer, config.hidden_size, config.ffn_size)?;
    Ok(stored.map(|stored| (file, (stored.bias, file.layers()[layer].threshold))))
}

/// Every `width` values, then their negatives: the units `A · x` of a linear predictor are `relu(A · x) − relu(−A · x)`.
fn with_negatives(values: &[f32], width: usize) -> Vec<f32> {
    let pairs = values.chunks_exact(width).map(|values| {
        let negatives = values.iter().map(|value| -value);
        values.iter().copied().chain(negatives)
    });
    pairs.flatten().collect()
}

/// `second · relu(first · x)`.
fn logits(first: &[f32], second: &[f32], rank: usize, x: &[f32]) -> Vec<f32> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let units = first.chunks_exact(x.len()).map(|row| dot(row, x).max(0.0));
    let units: Vec<f32> = units.collect();
    second
        .chunks_exact(rank)
        .map(|row| dot(row, &units))
        .collect()
}
