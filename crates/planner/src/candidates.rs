//! Candidates: the execution modes that a layer may have, with the work of each. They are built from a profile, a
//! simulation, an audit, or the placement inputs of a bundle.

use powerinfer_artifact::{
    placement_inputs::{LayerCosts, LayerInputs},
    plan::{Policy, Score, Threshold},
    predictor_file::PredictorSummary,
    threshold_curve::{ThresholdCurve, lerp, neighbours},
};
use powerinfer_bundle::{Bundle, neuron_bytes};
use powerinfer_model::ModelConfig;
use powerinfer_profile::{ExpertActivity, LayerActivity};
use powerinfer_runtime::LayerAudit;
use powerinfer_runtime::memory::predictor_bytes;
use powerinfer_solver::{Candidate, LayerMode, NeuronShape, Prediction, ReadCost};
use powerinfer_tensor::{BLOCK, Format};

/// Quality of a prediction of active neurons.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quality {
    /// Predicted neurons per active neuron.
    pub(crate) predicted_per_active: f64,
    /// Share of active neurons that are predicted.
    pub(crate) recall: f64,
}

impl Quality {
    /// Exactly the active neurons are predicted.
    pub(crate) const PERFECT: Self = Self {
        predicted_per_active: 1.0,
        recall: 1.0,
    };

    fn with(self, work: ReadCost) -> Prediction {
        Prediction {
            work,
            predicted_per_active: self.predicted_per_active,
            recall: self.recall,
        }
    }
}

/// Builds execution modes for the layers of a model in one format.
#[derive(Clone, Copy)]
pub(crate) struct ModeBuilder<'a> {
    config: &'a ModelConfig,
    shape: NeuronShape,
}

impl<'a> ModeBuilder<'a> {
    /// Builder for a model whose weights are in format `quant`.
    pub(crate) fn new(config: &'a ModelConfig, quant: Format) -> Self {
        Self {
            config,
            shape: NeuronShape {
                bytes: neuron_bytes(config, quant),
                matrices: config.matrices_per_neuron(),
            },
        }
    }

    /// Policy `dense`; gate and up skip the share `input_sparsity` of their inputs.
    pub(crate) fn dense(self, input_sparsity: Option<f64>) -> LayerMode {
        self.of_experts(match input_sparsity {
            None => LayerMode::dense(self.shape),
            Some(share) => LayerMode::dense_of_inputs(self.shape, 1.0 - share),
        })
    }

    /// Limits the reads of `mode` to the neurons of a token's experts, in a mixture of experts.
    fn of_experts(self, mode: LayerMode) -> LayerMode {
        match &self.config.experts {
            None => mode,
            Some(experts) => mode.of_experts(experts.selected_share()),
        }
    }

    /// Policy `dense` in a mixture of experts whose activation is never zero: active neurons are exactly those of selected experts.
    pub(crate) fn dense_experts(self) -> LayerMode {
        let dense = LayerMode::dense(self.shape);
        LayerMode {
            per_neuron: dense.per_active_neuron,
            per_active_neuron: dense.per_neuron,
            ..dense
        }
    }

    /// Policy `exact`.
    pub(crate) fn exact(self) -> LayerMode {
        self.of_experts(LayerMode::exact(self.shape))
    }

    /// Policy `predicted`, with a predictor of `units` in format `format`.
    pub(crate) fn predicted(
        self,
        format: Format,
        units: HiddenUnits,
        quality: Quality,
    ) -> LayerMode {
        let work = predictor_work(self.config, format, units);
        LayerMode::predicted(Policy::Predicted, self.shape, quality.with(work))
    }

    /// Policy `sign-bit`, or `predicted` of another engine, whose prediction reads `bytes`.
    pub(crate) fn reading(self, policy: Policy, bytes: u64, quality: Quality) -> LayerMode {
        let work = ReadCost {
            bytes: bytes as f64,
            ..ReadCost::default()
        };
        LayerMode::predicted(policy, self.shape, quality.with(work))
    }

    /// Policy `threshold`, by `score`.
    pub(crate) fn threshold(self, score: Score) -> LayerMode {
        self.of_experts(LayerMode::threshold(self.shape, score))
    }

    /// Threshold at error level `level`, with the score that reads the fewest bytes; `None` without curves. A level is an
    /// index into [`ERRORS`](powerinfer_artifact::threshold_curve::ERRORS), possibly fractional.
    pub(crate) fn cheapest_threshold(
        self,
        curves: &[ThresholdCurve],
        level: f64,
    ) -> Option<Threshold> {
        let (below, above, part) = neighbours(level);
        let neurons = self.config.ffn_size as f64;
        let read = |curve: &ThresholdCurve| {
            let [below, above] = [below, above].map(|level| curve.levels[level].density);
            let density = lerp(below, above, part);
            let mode = self.threshold(curve.score);
            mode.work(neurons, neurons * density).bytes
        };
        let mut best: Option<&ThresholdCurve> = None;
        for curve in curves {
            if best.is_none_or(|best| read(curve) < read(best)) {
                best = Some(curve);
            }
        }
        best.map(|curve| curve.at_level(level))
    }
}

/// Hidden units of a predictor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HiddenUnits {
    pub(crate) rank: usize,
    /// Whether the predictor is linear, without ReLU.
    pub(crate) is_linear: bool,
}

impl From<&PredictorSummary> for HiddenUnits {
    fn from(summary: &PredictorSummary) -> Self {
        Self {
            rank: summary.rank,
            is_linear: summary.is_linear,
        }
    }
}

/// ReadCost of a predictor of `units` for a token: all of A, the rows of B of the active units (about half of them after
/// ReLU), and the `f32` values per neuron.
pub(crate) fn predictor_work(config: &ModelConfig, format: Format, units: HiddenUnits) -> ReadCost {
    let HiddenUnits { rank, is_linear } = units;
    let neurons = config.ffn_size;
    let blocks = match format {
        Format::F32 | Format::F16 | Format::Bf16 => 0,
        Format::Q8_0 | Format::Q4K | Format::Q4_0 => rank.div_ceil(BLOCK),
    };
    // In B, half of the active rows follow an inactive one, unless all are active.
    let (active_units, scattered_rows) = match is_linear {
        true => (rank as f64, 0.0),
        false => (rank as f64 / 2.0, rank as f64 / 4.0),
    };
    ReadCost {
        bytes: (rank * format.row_bytes(config.hidden_size)) as f64
            + active_units * format.row_bytes(neurons) as f64
            + ((blocks + 1) * neurons * size_of::<f32>()) as f64,
        scattered_rows,
        axpy_rows: active_units,
    }
}

/// Candidate of each layer of `bundle` under `policy`, with the activation frequencies of `inputs` and the quality
/// measured by `audit`.
///
/// # Panics
///
/// If `audit` or `thresholds` has fewer elements than `inputs`.
pub(crate) fn audited(
    bundle: &Bundle,
    inputs: &[LayerInputs],
    policy: Policy,
    thresholds: Option<&[Threshold]>,
    audit: &[LayerAudit],
) -> Vec<Candidate> {
    let config = bundle.config();
    let modes = ModeBuilder::new(config, bundle.quant());
    let candidate = |(index, inputs): (usize, &LayerInputs)| {
        let audit = &audit[index];
        let quality = Quality {
            predicted_per_active: audit.predicted.unwrap_or(0) as f64 / audit.active.max(1) as f64,
            recall: audit.recall(),
        };
        let file = bundle.predictors();
        let predictor = file.and_then(|file| Some((file.layers().get(index)?, file.weights())));
        let mut frequencies = stored_frequencies(inputs);
        let mode = match policy {
            Policy::Dense => modes.dense(None),
            Policy::Exact => modes.exact(),
            Policy::Predicted => match predictor {
                Some((summary, format)) => modes.predicted(format, summary.into(), quality),
                None => modes.reading(policy, 0, quality),
            },
            Policy::SignBit => {
                let signs = predictor.and_then(|(summary, _)| summary.sign_bit.as_ref());
                modes.reading(policy, signs.map_or(0, |signs| signs.bytes), quality)
            }
            Policy::Threshold => {
                // Order of the neurons in a bundle made with these thresholds.
                let tokens = audit.tokens.max(1) as f64;
                let computed = audit.computed.iter();
                frequencies = computed.map(|count| f64::from(*count) / tokens).collect();
                frequencies.sort_by(|a, b| b.total_cmp(a));
                modes.threshold(thresholds.map_or(Score::Gate, |all| all[index].score))
            }
        };
        let held = predictor.map(|(summary, format)| {
            predictor_bytes(config, summary, format, policy == Policy::SignBit)
        });
        Candidate {
            mode,
            frequencies,
            predictor_bytes: held.unwrap_or(0),
            allowed: true,
        }
    };
    inputs.iter().enumerate().map(candidate).collect()
}

/// Placement inputs that a bundle stores for a layer, from its chosen candidate.
pub(crate) fn stored(
    candidate: &Candidate,
    attention_read_bytes: u64,
    expert_hits: Vec<f32>,
) -> LayerInputs {
    LayerInputs {
        costs: LayerCosts {
            mode: candidate.mode,
            predictor_bytes: candidate.predictor_bytes,
            attention_read_bytes,
        },
        frequencies: candidate
            .frequencies
            .iter()
            .map(|one| *one as f32)
            .collect(),
        expert_hits,
    }
}

/// Expert selections by reuse distance: entry `n` is the share with a distance below `n` (`[experts + 1]`); empty in a dense model.
pub(crate) fn expert_hits(activity: &LayerActivity) -> Vec<f32> {
    let held = activity.experts.iter().flat_map(ExpertActivity::held);
    held.map(|held| held.cached as f32).collect()
}

/// Candidate from placement inputs: the inverse of [`stored`].
pub(crate) fn restored(layer: &LayerInputs) -> Candidate {
    Candidate {
        mode: layer.costs.mode,
        frequencies: stored_frequencies(layer),
        predictor_bytes: layer.costs.predictor_bytes,
        allowed: true,
    }
}

fn stored_frequencies(layer: &LayerInputs) -> Vec<f64> {
    layer.frequencies.iter().copied().map(f64::from).collect()
}
