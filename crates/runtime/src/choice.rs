//! Which neurons of a layer are computed: what each policy needs, and how it decides.

use std::path::Path;

use powerinfer_artifact::{
    plan::{LayerPlan, Policy, Score, Threshold},
    predictor_file::{PredictorFile, PredictorInput, ScoreVectors, StoredSigns, StoredUnits},
};
use powerinfer_kernels::{BLOCK, Matrix, SignMatrix, pack_signs};
use powerinfer_model::ModelConfig;

use crate::{RuntimeError, Statistics, Threads, input::Input};

/// How a layer's neurons are chosen, borrowed for a forward pass.
#[derive(Clone, Copy)]
pub(crate) enum Choice<'a> {
    /// All.
    Dense,
    /// Those whose gate is not exactly zero.
    Exact,
    /// Of those that a predictor foresees, the same.
    Predicted(Predictor<'a>),
    /// Of those that their signs speak for, the same.
    SignBit(SignBits<'a>),
    /// Those whose score reaches a threshold.
    Threshold(Scoring<'a>),
    /// These, in ascending order, whatever their gates say.
    Listed(&'a [u32]),
}

/// A layer's predictor.
#[derive(Clone, Copy)]
pub(crate) struct Predictor<'a> {
    a: Matrix<'a>,
    /// Row j is what unit j of the hidden layer says of every neuron.
    units: Matrix<'a>,
    /// Per block of units, what that is to be multiplied by for each neuron; empty for by nothing.
    scales: &'a [f32],
    bias: &'a [f32],
    threshold: f32,
}

/// Signs of a layer's gate.
#[derive(Clone, Copy)]
pub(crate) struct SignBits<'a> {
    signs: SignMatrix<'a>,
    agreements: u32,
}

/// A layer's scores and threshold.
#[derive(Clone, Copy)]
pub(crate) struct Scoring<'a> {
    threshold: Threshold,
    vectors: &'a ScoreVectors,
}

/// Memory of foreseeing that is used again from layer to layer.
#[derive(Debug, Default)]
pub(crate) struct Foreseen {
    middle: Vec<f32>,
    /// Units of the hidden layer that relu leaves alive, and their values.
    units: Vec<u32>,
    values: Vec<f32>,
    sums: Vec<f32>,
    logits: Vec<f32>,
    agreements: Vec<u32>,
    /// Who is foreseen.
    pub(crate) mask: Mask,
}

/// A bit per neuron, lowest first: whether it is to be computed.
#[derive(Debug, Default, Clone)]
pub(crate) struct Mask(Vec<u64>);

impl Mask {
    /// Packs decisions.
    fn set<T: Copy>(&mut self, from: &[T], is_computed: impl Fn(T) -> bool) {
        self.0.clear();
        self.0.extend(from.chunks(64).map(|group| {
            let bits = group.iter().enumerate();
            bits.fold(0u64, |word, (bit, value)| {
                word | u64::from(is_computed(*value)) << bit
            })
        }));
    }

    /// Packs the decision for `neurons`, in ascending order.
    fn set_listed(&mut self, neurons: &[u32]) {
        let words = neurons.last().map_or(0, |last| *last as usize / 64 + 1);
        self.0.clear();
        self.0.resize(words, 0);
        for neuron in neurons {
            self.0[*neuron as usize / 64] |= 1 << (neuron % 64);
        }
    }

    /// How many neurons of `side` are to be computed.
    pub(crate) fn count(&self, side: std::ops::Range<usize>) -> usize {
        let words = side.start / 64..side.end.div_ceil(64);
        let mask = self.0.iter().take(words.end).skip(words.start);
        let own = mask.zip(words).map(|(word, index)| {
            let first = index * 64;
            let from = u64::MAX << side.start.saturating_sub(first);
            let until = match side.end - first {
                end @ 0..64 => (1 << end) - 1,
                _ => u64::MAX,
            };
            (word & from & until).count_ones() as usize
        });
        own.sum()
    }

    /// Lists the neurons of `side` that are to be computed.
    pub(crate) fn list(&self, side: std::ops::Range<usize>, rows: &mut Vec<u32>) {
        let words = side.start / 64..side.end.div_ceil(64);
        let mask = self.0.iter().take(words.end).skip(words.start);
        for (index, word) in mask.enumerate() {
            let first = (words.start + index) * 64;
            let mut left = *word;
            while left != 0 {
                let neuron = first + left.trailing_zeros() as usize;
                left &= left - 1;
                if side.contains(&neuron) {
                    rows.push(neuron as u32);
                }
            }
        }
    }
}

impl<'a> Choice<'a> {
    /// Whether something is asked which neurons to look at, before any is read.
    pub(crate) fn foresees(&self) -> bool {
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

    /// Asks which neurons to look at for the input `x`.
    pub(crate) fn foresee(
        &self,
        threads: &Threads,
        x: &[f32],
        foreseen: &mut Foreseen,
        statistics: &mut Statistics,
    ) {
        match self {
            Self::Predicted(predictor) => predictor.foresee(threads, x, foreseen, statistics),
            Self::SignBit(signs) => signs.foresee(threads, x, foreseen, statistics),
            Self::Listed(neurons) => foreseen.mask.set_listed(neurons),
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

impl Predictor<'_> {
    /// `B · relu(A · x) + b`, compared with the threshold. Of B only the columns of units are read
    /// that relu leaves alive.
    fn foresee(
        &self,
        threads: &Threads,
        x: &[f32],
        foreseen: &mut Foreseen,
        statistics: &mut Statistics,
    ) {
        foreseen.middle.resize(self.a.rows(), 0.0);
        let x = Input::new(threads, x, x.len(), &self.a);
        threads.gemv(&self.a, &x, &mut foreseen.middle);
        let mut logits = std::mem::take(&mut foreseen.logits);
        logits.clear();
        logits.extend_from_slice(self.bias);
        let mut read =
            self.a.rows() * self.a.row_bytes() + size_of_val(self.bias) + size_of_val(self.scales);
        let neurons = self.bias.len();
        let block = if self.scales.is_empty() {
            self.units.rows()
        } else {
            BLOCK
        };
        let Foreseen {
            middle,
            units,
            values,
            sums,
            ..
        } = &mut *foreseen;
        for (index, middle) in middle.chunks(block).enumerate() {
            units.clear();
            values.clear();
            for (unit, value) in (index * block..).zip(middle) {
                if *value > 0.0 {
                    units.push(unit as u32);
                    values.push(*value);
                }
            }
            read += units.len() * self.units.row_bytes();
            if self.scales.is_empty() {
                threads.axpy_rows(&self.units, units, values, &mut logits);
                continue;
            }
            sums.clear();
            sums.resize(neurons, 0.0);
            threads.axpy_rows(&self.units, units, values, sums);
            let scales = &self.scales[index * neurons..][..neurons];
            for ((logit, sum), scale) in logits.iter_mut().zip(&*sums).zip(scales) {
                *logit += sum * scale;
            }
        }
        foreseen.mask.set(&logits, |logit| logit >= self.threshold);
        foreseen.logits = logits;
        statistics.bytes_read += read as u64;
    }
}

impl SignBits<'_> {
    /// Counts, for every gate, the signs that agree with those of `x`.
    fn foresee(
        &self,
        threads: &Threads,
        x: &[f32],
        foreseen: &mut Foreseen,
        statistics: &mut Statistics,
    ) {
        let mut agreements = std::mem::take(&mut foreseen.agreements);
        agreements.resize(self.signs.rows(), 0);
        threads.agreements(&self.signs, &pack_signs(x), &mut agreements);
        foreseen
            .mask
            .set(&agreements, |count| count >= self.agreements);
        foreseen.agreements = agreements;
        statistics.bytes_read += self.signs.bytes() as u64;
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
        })
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
        let (is_there, what, instead) = match policy {
            Policy::Dense | Policy::Exact => return Ok(()),
            Policy::Predicted => (
                self.predictor.is_some(),
                "predictor",
                "use `exact` or `dense`, or train predictors and place again",
            ),
            Policy::SignBit => (
                self.sign_bit.is_some(),
                "signs of its gate",
                "use `exact` or `dense`, or run `powerinfer train-predictors` and place again",
            ),
            Policy::Threshold => (
                self.threshold.is_some() && self.scores.is_some(),
                "threshold",
                "use `dense`, or run `powerinfer train-predictors` and place again",
            ),
        };
        match is_there {
            true => Ok(()),
            false => Err(RuntimeError::PolicyMissing {
                folder: folder.to_owned(),
                layer,
                policy,
                what,
                instead,
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

    /// What foresees sees: whether the hidden state before the norm.
    pub(crate) fn sees_residual(&self, policy: Policy) -> bool {
        policy == Policy::Predicted && self.input == PredictorInput::Residual
    }

    /// How `policy` chooses; dense where what it needs is not there.
    pub(crate) fn choice<'a>(
        &'a self,
        policy: Policy,
        file: Option<&'a PredictorFile>,
    ) -> Choice<'a> {
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

#[cfg(test)]
mod tests {
    #[test]
    fn as_many_neurons_are_counted_as_are_listed() {
        let mut mask = super::Mask::default();
        mask.set_listed(&[0, 3, 63, 64, 65, 127, 130, 199]);
        for start in 0..210 {
            for end in start..210 {
                let mut listed = Vec::new();
                mask.list(start..end, &mut listed);
                assert_eq!(mask.count(start..end), listed.len(), "{start}..{end}");
            }
        }
    }

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_mask_lists_each_sides_neurons(
            decisions in prop::collection::vec(any::<bool>(), 1..300), cut in 0usize..300,
        ) {
            let cut = cut.min(decisions.len());
            let mut mask = Mask::default();
            mask.set(&decisions, |decision| decision);
            for side in [0..cut, cut..decisions.len()] {
                let mut rows = Vec::new();
                mask.list(side.clone(), &mut rows);
                let expected: Vec<u32> = side.filter(|i| decisions[*i]).map(|i| i as u32).collect();
                prop_assert_eq!(rows, expected);
            }
        }
    }
}
