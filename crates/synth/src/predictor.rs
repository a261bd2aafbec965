//! Low-rank gates, and the predictors that follow from them by construction.
//!
//! If `gate = U·V` except for channel 0, `relu(V·x) − relu(−V·x) = V·x` gives a predictor of the form
//! `B·relu(A·x)` with `A = [V; −V; e_0]` and `B = [U, −U, offsets]`, which predicts the active neurons exactly
//! up to rounding.

use std::path::Path;

use powerinfer_artifact::{
    Header, ModelIdentity, Progress,
    matrix_planes::{append_rows, declare_matrix},
    predictor_file::{self, FILE, FORMAT, LAYERS_SETTING, PredictorSummary, VERSION, tensor_name},
    random::Random,
    tensor_writer::{TensorShapes, fill_tensors},
};
use powerinfer_model::FfnKind;
use powerinfer_tensor::{BLOCK, Format, OwnedMatrix, pack};
use rayon::prelude::*;

use crate::{SynthError, plan::Plan};

/// Target recall of the predictors.
const RECALL: f64 = 0.99;
/// Number of inputs to set the threshold on, and of others to measure the predictor on.
const SAMPLES: usize = 24;
/// Format of the predictors' weights.
const WEIGHTS: Format = predictor_file::DEFAULT_WEIGHTS;

/// Factors of one layer's gate, without channel 0.
pub(crate) struct LowRank<'a> {
    plan: &'a Plan<'a>,
    rank: usize,
    /// `[rank, hidden]`, column 0 zero.
    v: Vec<f32>,
    /// `v` transposed, `[hidden, rank]`.
    v_columns: OwnedMatrix,
    /// `[neurons, rank]`, rows of unit length.
    u: Vec<f32>,
}

impl<'a> LowRank<'a> {
    /// Checks that the requested predictors can be built.
    pub(crate) fn check(plan: &Plan<'_>) -> Result<(), SynthError> {
        let Some(rank) = plan.settings.predictor_rank else {
            return Ok(());
        };
        let unsupported = |reason: String| Err(SynthError::Unsupported { reason });
        if plan.config.experts.is_some() {
            return unsupported(
                "predictors for a mixture of experts are not supported; leave out `--predictor-rank`"
                    .to_owned(),
            );
        }
        if plan.config.ffn == FfnKind::DoublyGated {
            return Err(SynthError::LowRankGate);
        }
        if rank < 2 * BLOCK
            || !rank.is_multiple_of(BLOCK)
            || gate_rank(rank) > plan.config.hidden_size
        {
            return unsupported(format!(
                "a predictor of rank {rank} cannot be built; take a multiple of {BLOCK} from {} to {}",
                2 * BLOCK,
                2 * plan.config.hidden_size + BLOCK
            ));
        }
        Ok(())
    }

    /// Computes the factors of the gate of `layer`; `None` if no predictors are requested.
    pub(crate) fn new(plan: &'a Plan<'a>, layer: usize) -> Option<Self> {
        let rank = gate_rank(plan.settings.predictor_rank?);
        let (hidden, neurons) = (plan.config.hidden_size, plan.config.ffn_size);
        let (v_noise, u_noise) = (
            plan.noise(&format!("layers.{layer}.v")),
            plan.noise(&format!("layers.{layer}.u")),
        );
        // V·x has unit variance if the other channels of x have; so has U·(V·x).
        let deviation = (2.0 / hidden as f64).sqrt() as f32;
        let mut v = vec![0.0; rank * hidden];
        v.par_chunks_mut(hidden).enumerate().for_each(|(row, out)| {
            v_noise.fill(row, deviation, out);
            out[0] = 0.0;
        });
        let mut u = vec![0.0; neurons * rank];
        u.par_chunks_mut(rank).enumerate().for_each(|(row, out)| {
            u_noise.fill(row, 1.0, out);
            let length = out.iter().map(|value| value * value).sum::<f32>().sqrt();
            out.iter_mut().for_each(|value| *value /= length);
        });
        let mut v_columns = vec![0.0; rank * hidden];
        v_columns
            .par_chunks_mut(rank)
            .enumerate()
            .for_each(|(column, out)| {
                for (row, out) in out.iter_mut().enumerate() {
                    *out = v[row * hidden + column];
                }
            });
        Some(Self {
            plan,
            rank,
            v,
            v_columns: pack(Format::F32, hidden, rank, &v_columns),
            u,
        })
    }

    /// Computes rows of `U·V` from row `start`.
    pub(crate) fn fill(&self, start: usize, columns: usize, out: &mut [f32]) {
        const ROWS: usize = 48;
        out.par_chunks_mut(ROWS * columns)
            .enumerate()
            .for_each(|(index, out)| {
                let rows = out.len() / columns;
                let first = start + index * ROWS;
                let u = &self.u[first * self.rank..(first + rows) * self.rank];
                let isa = self.plan.isa;
                isa.gemm(&self.v_columns.as_view(), u, rows, out);
            });
    }

    /// Computes the predictor's A and B.
    fn network(&self, offsets: &[f32]) -> (OwnedMatrix, OwnedMatrix) {
        let hidden = self.plan.config.hidden_size;
        let neurons = self.plan.config.ffn_size;
        let width = 2 * self.rank + BLOCK;
        let mut a = vec![0.0; width * hidden];
        for (index, value) in self.v.iter().enumerate() {
            a[index] = *value;
            a[self.v.len() + index] = -value;
        }
        a[2 * self.rank * hidden] = 1.0;
        let mut b = vec![0.0; neurons * width];
        for (neuron, row) in b.chunks_exact_mut(width).enumerate() {
            for (index, value) in self.u[neuron * self.rank..][..self.rank].iter().enumerate() {
                row[index] = *value;
                row[self.rank + index] = -value;
            }
            row[2 * self.rank] = offsets[neuron];
        }
        (
            pack(WEIGHTS, width, hidden, &a),
            pack(WEIGHTS, neurons, width, &b),
        )
    }

    /// Computes the gate's values for the input `x`.
    fn gate(&self, offsets: &[f32], x: &[f32]) -> Vec<f32> {
        let isa = self.plan.isa;
        let hidden = self.plan.config.hidden_size;
        let projected: Vec<f32> = self
            .v
            .chunks_exact(hidden)
            .map(|row| isa.dot(row, x))
            .collect();
        self.u
            .chunks_exact(self.rank)
            .zip(offsets)
            .map(|(row, offset)| isa.dot(row, &projected) + offset * x[0])
            .collect()
    }
}

/// Rank of the gate for a predictor of this rank.
fn gate_rank(predictor_rank: usize) -> usize {
    (predictor_rank - BLOCK) / 2
}

/// Writes the predictors of all layers, with their quality on random inputs.
pub(crate) fn write_predictors(
    plan: &Plan<'_>,
    model: ModelIdentity,
    folder: &Path,
    progress: &dyn Progress,
) -> Result<(), SynthError> {
    let config = plan.config;
    let layers = config.layer_count;
    progress.begin("writing predictors", 2 * layers as u64, "layers");
    // The header comes first and states their quality, so predictors are computed twice: that is fast compared
    // with the weights, and needs the memory of one layer only.
    let mut summaries = Vec::new();
    for layer in 0..layers {
        summaries.push(measure(plan, layer));
        progress.advance(1)?;
    }
    let rank = summaries.first().map_or(0, |summary| summary.rank);
    let mut shapes = TensorShapes::new();
    for layer in 0..layers {
        let mut declare = |tensor, format, rows, columns| {
            declare_matrix(
                &mut shapes,
                &tensor_name(layer, tensor),
                format,
                rows,
                columns,
            );
        };
        declare("a", WEIGHTS, rank, config.hidden_size);
        declare("b", WEIGHTS, config.ffn_size, rank);
        declare("bias", Format::F32, config.ffn_size, 1);
    }
    let summaries = serde_json::to_value(summaries).expect("summaries are plain JSON");
    let header = Header::new(FORMAT, VERSION, model, plan.settings.seed)
        .with_setting("by_construction", true)
        .with_setting(LAYERS_SETTING, summaries);
    fill_tensors(&folder.join(FILE), Some(&header), &shapes, |writer| {
        for layer in 0..layers {
            let offsets = plan.gate_offsets(layer);
            let low_rank = LowRank::new(plan, layer).expect("predictors are requested");
            let (a, b) = low_rank.network(&offsets);
            let zeros = vec![0.0; config.ffn_size];
            let bias = pack(Format::F32, config.ffn_size, 1, &zeros);
            append_rows(writer, &tensor_name(layer, "a"), &a)?;
            append_rows(writer, &tensor_name(layer, "b"), &b)?;
            append_rows(writer, &tensor_name(layer, "bias"), &bias)?;
            progress.advance(1)?;
        }
        Ok::<_, SynthError>(())
    })?;
    progress.end();
    Ok(())
}

/// Sets a layer's threshold on random inputs with the model's distribution, and measures it on others.
fn measure(plan: &Plan<'_>, layer: usize) -> PredictorSummary {
    let config = plan.config;
    let recipe = &plan.layers[layer];
    let offsets = plan.gate_offsets(layer);
    let low_rank = LowRank::new(plan, layer).expect("predictors are requested");
    let (a, b) = low_rank.network(&offsets);
    let rank = a.as_view().rows();
    let samples: Vec<(Vec<f32>, Vec<f32>)> = (0..2 * SAMPLES)
        .into_par_iter()
        .map(|sample| {
            let mut random =
                Random::new(plan.settings.seed ^ (layer * 2 * SAMPLES + sample) as u64);
            let mut x: Vec<f32> = (0..config.hidden_size)
                .map(|_| (recipe.deviation * random.normal()) as f32)
                .collect();
            x[0] = recipe.constant as f32;
            let (mut middle, mut logits) = (vec![0.0; rank], vec![0.0; config.ffn_size]);
            plan.isa.gemv(&a.as_view(), &x, &mut middle);
            middle.iter_mut().for_each(|value| *value = value.max(0.0));
            plan.isa.gemv(&b.as_view(), &middle, &mut logits);
            (low_rank.gate(&offsets, &x), logits)
        })
        .collect();
    let is_active = |gate: f32| config.activation.apply(gate) != 0.0;
    let (calibration, held_out) = samples.split_at(SAMPLES);
    let of_active = calibration
        .iter()
        .flat_map(|(gate, logits)| gate.iter().zip(logits));
    let mut of_active: Vec<f32> = of_active
        .filter(|(gate, _)| is_active(**gate))
        .map(|(_, logit)| *logit)
        .collect();
    of_active.sort_unstable_by(f32::total_cmp);
    let below = (of_active.len() as f64 * (1.0 - RECALL) * 0.8) as usize;
    let threshold = of_active.get(below).copied().unwrap_or(f32::MAX);
    let (mut active, mut predicted, mut both) = (0usize, 0usize, 0usize);
    for (gate, logit) in held_out
        .iter()
        .flat_map(|(gate, logits)| gate.iter().zip(logits))
    {
        let (is_active, is_predicted) = (is_active(*gate), *logit >= threshold);
        active += usize::from(is_active);
        predicted += usize::from(is_predicted);
        both += usize::from(is_active && is_predicted);
    }
    let all = (SAMPLES * config.ffn_size) as f64;
    let rows = |format: Format, rows: usize, columns| rows * format.row_bytes(columns);
    let bytes = rows(WEIGHTS, rank, config.hidden_size)
        + rows(WEIGHTS, config.ffn_size, rank)
        + rows(Format::F32, config.ffn_size, 1);
    PredictorSummary {
        layer,
        rank,
        threshold,
        bytes: bytes as u64,
        recall: both as f64 / active.max(1) as f64,
        contribution_recall: None,
        precision: both as f64 / predicted.max(1) as f64,
        predicted_sparsity: 1.0 - predicted as f64 / all,
        sparsity: 1.0 - active as f64 / all,
        held_out_tokens: SAMPLES as u64,
        ..PredictorSummary::none(layer)
    }
}
