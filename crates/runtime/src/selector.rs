//! Which neurons of a layer a policy computes.

use std::path::Path;

use powerinfer_artifact::{
    Hint,
    plan::{LayerPlan, Policy, Score, Threshold},
    predictor_file::{PredictorFile, PredictorInput, ScoreVectors, StoredSigns, StoredUnits},
};
use powerinfer_model::ModelConfig;
use serde_json::{Value, json};

use crate::{
    RuntimeError, Statistics, Threads,
    input::Input,
    predictor::{PredictionBuffers, Predictor},
    sign_bits::SignBits,
};

/// The policy of a layer with the data it needs, borrowed for a forward pass.
#[derive(Clone, Copy)]
pub(crate) enum Selector<'a> {
    /// All neurons.
    Dense,
    /// Neurons whose `act(gate·x)` is not exactly zero.
    Exact,
    /// Predicted neurons whose `act(gate·x)` is not exactly zero.
    Predicted(Predictor<'a>),
    /// As `Predicted`, from the signs of gate and input.
    SignBit(SignBits<'a>),
    /// Neurons whose score reaches a threshold.
    Threshold(Scoring<'a>),
    /// The listed neurons, in ascending order, whatever their activations.
    Listed(&'a [u32]),
}

/// A layer's scores and threshold.
#[derive(Clone, Copy)]
pub(crate) struct Scoring<'a> {
    pub(crate) threshold: Threshold,
    pub(crate) vectors: &'a ScoreVectors,
}

impl<'a> Scoring<'a> {
    /// The scale of each neuron's score, and the centre that is subtracted from its product.
    pub(crate) fn of_neurons(&self) -> [Option<&'a [f32]>; 2] {
        let Self { threshold, vectors } = *self;
        match threshold.score {
            Score::Gate => [None, None],
            Score::WeightedGate => [Some(&vectors.gate_scale), None],
            Score::Contribution => {
                let centre = threshold.centred.then_some(&vectors.centre[..]);
                [Some(&vectors.contribution_scale), centre]
            }
        }
    }
}

impl<'a> Selector<'a> {
    /// Whether a mask of neurons is known before any weight is read.
    pub(crate) fn predicts(&self) -> bool {
        match self {
            Self::Predicted(_) | Self::SignBit(_) | Self::Listed(_) => true,
            Self::Dense | Self::Exact | Self::Threshold(_) => false,
        }
    }

    /// Median contributions of all neurons, `[hidden]`, added for every token.
    pub(crate) fn offset(&self) -> Option<&'a [f32]> {
        match self {
            Self::Threshold(scoring) if scoring.threshold.centred => Some(&scoring.vectors.offset),
            _ => None,
        }
    }

    /// Sets the masks in `buffers` for the inputs `x`.
    pub(crate) fn predict(
        &self,
        threads: &Threads,
        x: &Input<'_>,
        buffers: &mut PredictionBuffers,
        statistics: &mut Statistics,
    ) {
        match self {
            Self::Predicted(predictor) => predictor.predict(threads, x, buffers, statistics),
            Self::SignBit(signs) => signs.predict(threads, x.exact(), buffers, statistics),
            Self::Listed(neurons) => buffers.masks.set_listed(neurons, x.tokens()),
            Self::Dense | Self::Exact | Self::Threshold(_) => {}
        }
    }

    /// Whether `up` and `down` of `neuron` are computed, given its `act(gate·x)`.
    pub(crate) fn passes_gate(&self, neuron: usize, activation: f32) -> bool {
        match self {
            Self::Dense | Self::Listed(_) => true,
            Self::Threshold(Scoring { threshold, vectors }) => {
                let scale = match threshold.score {
                    Score::Gate => 1.0,
                    Score::WeightedGate => vectors.gate_scale[neuron],
                    Score::Contribution => return true,
                };
                activation.abs() * scale >= threshold.value
            }
            Self::Exact | Self::Predicted(_) | Self::SignBit(_) => activation != 0.0,
        }
    }

    /// Coefficient of `neuron`'s row of down, given its product `h_i`; none if it is skipped.
    pub(crate) fn coefficient(&self, neuron: usize, product: f32) -> Option<f32> {
        match self {
            Self::Dense | Self::Listed(_) => Some(product),
            Self::Threshold(Scoring { threshold, vectors }) => {
                if threshold.score.precedes_up() {
                    return Some(product);
                }
                let coefficient = if threshold.centred {
                    product - vectors.centre[neuron]
                } else {
                    product
                };
                let score = coefficient.abs() * vectors.contribution_scale[neuron];
                (score >= threshold.value).then_some(coefficient)
            }
            Self::Exact | Self::Predicted(_) | Self::SignBit(_) => {
                (product != 0.0).then_some(product)
            }
        }
    }
}

/// Data of the bundle for the policies of a layer.
#[derive(Debug)]
pub(crate) struct LayerSelectors {
    predictor: Option<StoredLayerPredictor>,
    sign_bit: Option<(StoredSigns, u32)>,
    threshold: Option<Threshold>,
    scores: Option<ScoreVectors>,
    input: PredictorInput,
    /// The only neurons that are computed, whatever the policy; none for no restriction.
    kept: Option<Vec<u32>>,
}

/// A predictor's matrices in the file, and its small vectors.
#[derive(Debug)]
struct StoredLayerPredictor {
    stored: StoredUnits,
    rank: usize,
    threshold: f32,
    is_linear: bool,
}

impl LayerSelectors {
    /// Finds what `file` has for `layer`; the threshold is that of `plan`.
    pub(crate) fn find(
        file: Option<&PredictorFile>,
        layer: usize,
        plan: &LayerPlan,
        config: &ModelConfig,
    ) -> Result<Self, RuntimeError> {
        let Some(file) = file else {
            return Ok(Self {
                predictor: None,
                sign_bit: None,
                threshold: None,
                scores: None,
                input: PredictorInput::default(),
                kept: None,
            });
        };
        let (hidden, neurons) = (config.hidden_size, config.ffn_size);
        let predictor = file.find_units(layer, hidden, neurons)?;
        let predictor = predictor.map(|stored| StoredLayerPredictor {
            stored,
            rank: file.layers()[layer].rank,
            threshold: file.layers()[layer].threshold,
            is_linear: file.layers()[layer].is_linear,
        });
        let summary = file.layers().get(layer);
        let sign_bit = summary.and_then(|summary| summary.sign_bit.as_ref());
        Ok(Self {
            predictor,
            sign_bit: file
                .signs(layer, hidden, neurons)?
                .zip(sign_bit.map(|summary| summary.agreements)),
            threshold: plan.threshold,
            scores: file.scores(layer, hidden, neurons)?,
            input: file.input(),
            kept: None,
        })
    }

    /// Settings under `policy` that the predictor file does not state: thresholds that may have been replaced, and the set of
    /// kept neurons.
    pub(crate) fn settings(&self, policy: Policy) -> Value {
        let Self {
            predictor,
            sign_bit: _,
            threshold,
            scores: _,
            input: _,
            kept,
        } = self;
        let predictor = predictor.as_ref().map(|predictor| predictor.threshold);
        json!({
            "policy": policy,
            "predictor": predictor.filter(|_| policy == Policy::Predicted),
            "threshold": threshold.filter(|_| policy == Policy::Threshold),
            "kept": kept,
        })
    }

    /// Restricts computation to these neurons, in ascending order; `None` lifts the restriction.
    pub(crate) fn keep_only(&mut self, kept: Option<Vec<u32>>) {
        self.kept = kept;
    }

    /// Raises the logit from which a neuron is predicted active.
    pub(crate) fn raise_predictor(&mut self, by: f32) {
        if let Some(predictor) = &mut self.predictor {
            predictor.threshold += by;
        }
    }

    /// Replaces the threshold, if one is given.
    pub(crate) fn set_threshold(&mut self, threshold: Option<Threshold>) {
        self.threshold = threshold.or(self.threshold);
    }

    /// Checks that layer `layer` of the bundle in `folder` has what `policy` needs.
    pub(crate) fn check(
        &self,
        policy: Policy,
        folder: &Path,
        layer: usize,
    ) -> Result<(), RuntimeError> {
        let or = |hint| match self.scores {
            Some(_) => Hint::ThresholdPolicy,
            None => hint,
        };
        let (is_there, what, hint) = match policy {
            Policy::Dense | Policy::Exact => return Ok(()),
            Policy::Predicted => (
                self.predictor.is_some(),
                "predictor",
                or(Hint::LosslessPolicyOrTrain),
            ),
            Policy::SignBit => (
                self.sign_bit.is_some(),
                "signs of its gate",
                or(Hint::LosslessPolicyOrSigns),
            ),
            Policy::Threshold => (
                self.threshold.is_some() && self.scores.is_some(),
                "threshold",
                match self.scores {
                    Some(_) => Hint::DensePolicyOrTrain,
                    None => Hint::ZerosPolicy,
                },
            ),
        };
        if is_there {
            Ok(())
        } else {
            Err(RuntimeError::PolicyMissing {
                folder: folder.to_owned(),
                layer,
                policy,
                what,
                hint,
            })
        }
    }

    /// Bytes of predictor, signs and scores.
    pub(crate) fn bytes(&self) -> usize {
        let floats = |values: &[f32]| size_of_val(values);
        let predictor = self.predictor.as_ref().map_or(0, |found| {
            let StoredUnits {
                a,
                units,
                scales,
                bias,
            } = &found.stored;
            a.bytes() + units.bytes() + floats(scales) + floats(bias)
        });
        let signs = self.sign_bit.as_ref().map_or(0, |(signs, _)| signs.bytes());
        let scores = self.scores.as_ref().map_or(0, |scores| {
            let ScoreVectors {
                gate_scale,
                contribution_scale,
                centre,
                offset,
            } = scores;
            let all = [gate_scale, contribution_scale, centre, offset];
            all.into_iter().map(|values| floats(values)).sum()
        });
        predictor + signs + scores
    }

    /// Hidden units of the predictor; 0 without one.
    pub(crate) fn rank(&self) -> usize {
        self.predictor.as_ref().map_or(0, |found| found.rank)
    }

    /// Whether the predictor's input is the hidden state before the norm.
    pub(crate) fn reads_residual(&self, policy: Policy) -> bool {
        policy == Policy::Predicted && self.input == PredictorInput::Residual
    }

    /// The selector of `policy`; dense if the bundle lacks what it needs.
    pub(crate) fn selector<'a>(
        &'a self,
        policy: Policy,
        file: Option<&'a PredictorFile>,
    ) -> Selector<'a> {
        if let Some(kept) = &self.kept {
            return Selector::Listed(kept);
        }
        let tensors = file.map(PredictorFile::tensors);
        let selector = match policy {
            Policy::Dense => None,
            Policy::Exact => Some(Selector::Exact),
            Policy::Predicted => tensors
                .zip(self.predictor.as_ref())
                .map(|(tensors, found)| {
                    Selector::Predicted(Predictor {
                        a: found.stored.a.view(tensors),
                        units: found.stored.units.view(tensors),
                        scales: &found.stored.scales,
                        bias: &found.stored.bias,
                        threshold: found.threshold,
                        is_linear: found.is_linear,
                    })
                }),
            Policy::SignBit => tensors.zip(self.sign_bit.as_ref()).map(|(tensors, found)| {
                let (signs, agreements) = found;
                Selector::SignBit(SignBits {
                    signs: signs.view(tensors),
                    agreements: *agreements,
                })
            }),
            Policy::Threshold => self
                .threshold
                .zip(self.scores.as_ref())
                .map(|(threshold, vectors)| Selector::Threshold(Scoring { threshold, vectors })),
        };
        selector.unwrap_or(Selector::Dense)
    }
}
