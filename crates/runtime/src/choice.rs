//! Which neurons of a layer are computed: what each policy needs, and how it decides.

use std::path::Path;

use powerinfer_artifact::{
    Hint,
    plan::{LayerPlan, Policy, Score, Threshold},
    predictor_file::{PredictorFile, PredictorInput, ScoreVectors, StoredSigns, StoredUnits},
};
use powerinfer_model::ModelConfig;

use crate::{
    RuntimeError, Statistics, Threads,
    prediction::{Prediction, Predictor, SignBits},
};

/// How a layer's neurons are chosen, borrowed for a forward pass.
#[derive(Clone, Copy)]
pub(crate) enum Choice<'a> {
    /// All.
    Dense,
    /// Those whose gate is not exactly zero.
    Exact,
    /// Of those that a predictor predicts, the same.
    Predicted(Predictor<'a>),
    /// Of those that their signs speak for, the same.
    SignBit(SignBits<'a>),
    /// Those whose score reaches a threshold.
    Threshold(Scoring<'a>),
    /// These, in ascending order, whatever their gates say.
    Listed(&'a [u32]),
}

/// A layer's scores and threshold.
#[derive(Clone, Copy)]
pub(crate) struct Scoring<'a> {
    pub(crate) threshold: Threshold,
    pub(crate) vectors: &'a ScoreVectors,
}

impl<'a> Scoring<'a> {
    /// What the rule multiplies each neuron by, and what it takes off of it, where it does.
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

impl<'a> Choice<'a> {
    /// Whether something is asked which neurons to look at, before any is read.
    pub(crate) fn predicts(&self) -> bool {
        matches!(
            self,
            Self::Predicted(_) | Self::SignBit(_) | Self::Listed(_)
        )
    }

    /// What is added for the neurons that are not computed: `[hidden]`.
    pub(crate) fn offset(&self) -> Option<&'a [f32]> {
        match self {
            Self::Threshold(scoring) if scoring.threshold.centred => Some(&scoring.vectors.offset),
            _ => None,
        }
    }

    /// Asks which neurons to look at for each of the inputs `x [tokens, hidden]`.
    pub(crate) fn predict(
        &self,
        threads: &Threads,
        tokens: usize,
        x: &[f32],
        predicted: &mut Prediction,
        statistics: &mut Statistics,
    ) {
        match self {
            Self::Predicted(predictor) => predictor.predict(threads, x, predicted, statistics),
            Self::SignBit(signs) => signs.predict(threads, x, predicted, statistics),
            Self::Listed(neurons) => predicted.masks.set_listed(neurons, tokens),
            _ => {}
        }
    }

    /// Whether `neuron` is computed further, once `act(gate·x)` is known.
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
            _ => activation != 0.0,
        }
    }

    /// What `neuron`'s row of down is multiplied by, once its product is known; none where it is
    /// left out.
    pub(crate) fn coefficient(&self, neuron: usize, product: f32) -> Option<f32> {
        match self {
            Self::Dense | Self::Listed(_) => Some(product),
            Self::Threshold(Scoring { threshold, vectors }) => {
                if threshold.score.precedes_up() {
                    return Some(product);
                }
                let coefficient = match threshold.centred {
                    true => product - vectors.centre[neuron],
                    false => product,
                };
                let score = coefficient.abs() * vectors.contribution_scale[neuron];
                (score >= threshold.value).then_some(coefficient)
            }
            _ => (product != 0.0).then_some(product),
        }
    }
}

/// What a layer's policies need, as far as the bundle has it.
#[derive(Debug)]
pub(crate) struct LayerChoices {
    predictor: Option<StoredLayerPredictor>,
    sign_bit: Option<(StoredSigns, u32)>,
    threshold: Option<Threshold>,
    scores: Option<ScoreVectors>,
    input: PredictorInput,
    /// The only neurons that are computed, whatever the policy, where there are such.
    kept: Option<Vec<u32>>,
}

/// Where a predictor's matrices lie, and its small parts.
#[derive(Debug)]
struct StoredLayerPredictor {
    stored: StoredUnits,
    rank: usize,
    threshold: f32,
}

impl LayerChoices {
    /// What `file` has for `layer`, and the threshold that `plan` says.
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

    /// From now on only these neurons are computed, in ascending order; none ends that.
    pub(crate) fn keep_only(&mut self, kept: Option<Vec<u32>>) {
        self.kept = kept;
    }

    /// Raises the logit from which the predictor predicts a neuron.
    pub(crate) fn raise_predictor(&mut self, by: f32) {
        if let Some(predictor) = &mut self.predictor {
            predictor.threshold += by;
        }
    }

    /// Replaces the threshold, where one is given.
    pub(crate) fn set_threshold(&mut self, threshold: Option<Threshold>) {
        self.threshold = threshold.or(self.threshold);
    }

    /// What `policy` needs of layer `layer` of the bundle in `folder`; fails where it is not there.
    pub(crate) fn check(
        &self,
        policy: Policy,
        folder: &Path,
        layer: usize,
    ) -> Result<(), RuntimeError> {
        let (is_there, what, hint) = match policy {
            Policy::Dense | Policy::Exact => return Ok(()),
            Policy::Predicted => (
                self.predictor.is_some(),
                "predictor",
                Hint::LosslessPolicyOrTrain,
            ),
            Policy::SignBit => (
                self.sign_bit.is_some(),
                "signs of its gate",
                Hint::LosslessPolicyOrTrain,
            ),
            Policy::Threshold => (
                self.threshold.is_some() && self.scores.is_some(),
                "threshold",
                Hint::DensePolicyOrTrain,
            ),
        };
        match is_there {
            true => Ok(()),
            false => Err(RuntimeError::PolicyMissing {
                folder: folder.to_owned(),
                layer,
                policy,
                what,
                hint,
            }),
        }
    }

    /// Bytes of what is here.
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

    /// Units of the predictor; 0 where there is none.
    pub(crate) fn rank(&self) -> usize {
        self.predictor.as_ref().map_or(0, |found| found.rank)
    }

    /// What predicts sees: whether the hidden state before the norm.
    pub(crate) fn sees_residual(&self, policy: Policy) -> bool {
        policy == Policy::Predicted && self.input == PredictorInput::Residual
    }

    /// How `policy` chooses; dense where what it needs is not there.
    pub(crate) fn choice<'a>(
        &'a self,
        policy: Policy,
        file: Option<&'a PredictorFile>,
    ) -> Choice<'a> {
        if let Some(kept) = &self.kept {
            return Choice::Listed(kept);
        }
        let tensors = file.map(PredictorFile::tensors);
        match (policy, tensors) {
            (Policy::Exact, _) => Choice::Exact,
            (Policy::Predicted, Some(tensors)) => match &self.predictor {
                Some(found) => Choice::Predicted(Predictor {
                    a: found.stored.a.view(tensors),
                    units: found.stored.units.view(tensors),
                    scales: &found.stored.scales,
                    bias: &found.stored.bias,
                    threshold: found.threshold,
                }),
                None => Choice::Dense,
            },
            (Policy::SignBit, Some(tensors)) => match &self.sign_bit {
                Some((signs, agreements)) => Choice::SignBit(SignBits {
                    signs: signs.view(tensors),
                    agreements: *agreements,
                }),
                None => Choice::Dense,
            },
            (Policy::Threshold, Some(_)) => match (self.threshold, &self.scores) {
                (Some(threshold), Some(vectors)) => {
                    Choice::Threshold(Scoring { threshold, vectors })
                }
                _ => Choice::Dense,
            },
            _ => Choice::Dense,
        }
    }
}
