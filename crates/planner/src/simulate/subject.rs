//! Placement of a model without weights: the problem that `place` solves, with published values instead of a profile and
//! predictors.

use std::time::Duration;

use powerinfer_artifact::{
    hardware::Hardware,
    plan::{Budget, Device, Objective, Policy, Score},
};
use powerinfer_bundle::weight_bytes;
use powerinfer_model::{Experts, ModelConfig};
use powerinfer_runtime::memory::{PREFILL_BATCH, scratch_bytes};
use powerinfer_solver::{Candidate, CopiedBytes, Decision, LayerMode, Options, Problem, decide};
use powerinfer_tensor::Format;

use super::{
    engine::LLAMA_CPP_BATCH,
    step::{Placed, PlacedLayer},
};
use crate::{
    PlannerError,
    candidates::{HiddenUnits, ModeBuilder, Quality, predictor_work},
    problem::{PredictorSizes, problem},
};

/// Default format of this engine's predictors.
const PREDICTORS: Format = Format::Q4_0;

/// A model, a machine and a budget.
pub(crate) struct Subject<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) quant: Format,
    /// Activation frequencies per layer, hottest first.
    pub(crate) frequencies: &'a [Vec<f64>],
    /// In a mixture of experts, the selection frequency of each neuron's expert in a layer, in the same order.
    pub(crate) selected: Option<&'a [f64]>,
    /// Hidden units of each layer's predictor; 0 for none.
    pub(crate) rank: usize,
    pub(crate) budget: &'a Budget,
    pub(crate) hardware: &'a Hardware,
}

/// A solved placement.
pub(crate) struct Solved {
    pub(crate) problem: Problem,
    pub(crate) candidates: Vec<Vec<Candidate>>,
    pub(crate) decision: Decision,
}

/// Bytes of a model's weights in the format `quant`.
pub(crate) fn model_bytes(config: &ModelConfig, quant: Format) -> u64 {
    let weights = config.weights().into_iter();
    weights
        .map(|weight| weight_bytes(config, weight, quant))
        .sum()
}

/// Rank at which all predictors together have `share` of the model's parameters.
pub(crate) fn rank(config: &ModelConfig, share: f64) -> usize {
    let per_unit = config.layer_count * (config.hidden_size + config.ffn_size);
    (share * config.parameters() as f64 / per_unit as f64).round() as usize
}

impl Subject<'_> {
    /// Mode of policy `dense`.
    fn dense(&self) -> LayerMode {
        let builder = ModeBuilder::new(self.config, self.quant);
        match self.selected {
            Some(_) => builder.dense_experts(),
            None => builder.dense(None),
        }
    }

    fn problem(&self) -> Problem {
        problem(
            self.config,
            self.budget.clone(),
            self.hardware.clone(),
            self.quant,
            None,
            PredictorSizes {
                rank: self.rank,
                bytes: self.predictor_bytes(PREDICTORS),
            },
            None,
        )
    }

    /// The problem of other engines, which keep no copies of cold neurons on the GPU.
    fn problem_of_others(&self) -> Problem {
        let context = self.budget.context_tokens;
        Problem {
            gpu_scratch_bytes: scratch_bytes(self.config, context, self.rank),
            copied_bytes: CopiedBytes::default(),
            prompt_batch: PREFILL_BATCH,
            gpu_prompt_bytes: Vec::new(),
            ..self.problem()
        }
    }

    /// Solves the placement for this engine, with the policy `forced`, or else the fastest mode of each layer.
    pub(crate) fn solve(&self, forced: Option<Policy>) -> Result<Solved, PlannerError> {
        let builder = ModeBuilder::new(self.config, self.quant);
        let mut modes = vec![(self.dense(), 0)];
        if self.config.activation.has_exact_zeros() {
            modes.push((builder.exact(), 0));
            if self.rank > 0 {
                let mode = builder.predicted(PREDICTORS, self.units(), Quality::PERFECT);
                modes.push((mode, self.predictor_bytes(PREDICTORS)));
            }
        } else {
            modes.push((builder.threshold(Score::WeightedGate), 0));
        }
        if let Some(policy) = forced
            && modes.iter().all(|(mode, _)| mode.policy != policy)
        {
            let possible = modes.iter().map(|(mode, _)| mode.policy).collect();
            return Err(PlannerError::PolicyOfShape { policy, possible });
        }
        self.decide(
            self.problem(),
            &modes,
            |policy| forced.is_none_or(|forced| forced == policy),
            &options(),
        )
    }

    /// Solves the placement of PowerInfer's paper: policy `predicted` in every layer, predictors in the format of the
    /// weights, the KV cache on the CPU, and the objective `impact`.
    pub(crate) fn solve_as_published(&self) -> Result<Solved, PlannerError> {
        // "The predictor will be quantized at the same time" (Tiiny-AI/PowerInfer, issue 120).
        let bytes = self.rank as u64
            * (self.quant.row_bytes(self.config.hidden_size)
                + self.quant.row_bytes(self.config.ffn_size)) as u64;
        let builder = ModeBuilder::new(self.config, self.quant);
        let mode = builder.reading(Policy::Predicted, bytes, Quality::PERFECT);
        let mut problem = self.problem_of_others();
        for layer in &mut problem.layers {
            layer.kv_bytes = 0;
        }
        let papers = Options {
            objective: Objective::Impact,
            ..options()
        };
        self.decide(problem, &[(mode, bytes)], |_| true, &papers)
    }

    fn decide(
        &self,
        problem: Problem,
        modes: &[(LayerMode, u64)],
        allows: impl Fn(Policy) -> bool,
        options: &Options,
    ) -> Result<Solved, PlannerError> {
        let candidates: Vec<Vec<Candidate>> = self
            .frequencies
            .iter()
            .map(|frequencies| {
                let candidate = |(mode, predictor_bytes): &(LayerMode, u64)| Candidate {
                    mode: *mode,
                    frequencies: match self.selected {
                        // A token computes all neurons of its experts.
                        Some(selected) if mode.policy == Policy::Dense => selected.to_vec(),
                        _ => frequencies.clone(),
                    },
                    predictor_bytes: *predictor_bytes,
                    allowed: allows(mode.policy),
                };
                modes.iter().map(candidate).collect()
            })
            .collect();
        let decision = decide(&problem, &candidates, options)?;
        Ok(Solved {
            problem,
            candidates,
            decision,
        })
    }

    /// Hidden units of a layer's predictor, with ReLU as in published predictors.
    fn units(&self) -> HiddenUnits {
        HiddenUnits {
            rank: self.rank,
            is_linear: false,
        }
    }

    /// Bytes of a layer's predictor: both matrices, and the values per neuron.
    fn predictor_bytes(&self, format: Format) -> u64 {
        let read = predictor_work(self.config, format, self.units()).bytes;
        // A token does not read half of B.
        let unread = (self.rank - self.rank / 2) * format.row_bytes(self.config.ffn_size);
        read as u64 + unread as u64
    }

    /// Places layers with policy `dense` as llama.cpp does: as many of the last layers as fit on the GPU with their KV cache, then the
    /// head. In a mixture of experts, the layers are first placed without their experts; then the experts of the last layers are added.
    /// Also returns the number of layers that are entirely on the GPU.
    pub(crate) fn by_layers<'b>(
        &self,
        kv_number_bytes: u64,
        all_active: &'b [f64],
    ) -> (Placed<'b>, usize) {
        let problem = self.problem_of_others();
        let numbers = 2 * self.config.kv_head_count * self.config.head_size;
        let kv_bytes = self.budget.context_tokens * numbers as u64 * kv_number_bytes;
        let neurons = self.config.ffn_size;
        // Number of neurons of a layer that are placed together with its attention.
        let first = problem.shared_neurons.unwrap_or(neurons);
        // Attention scores before and after softmax, and a matrix dequantised to 16 bits.
        let scores = self.config.head_count as u64 * self.budget.context_tokens * 4;
        let widened = if self.quant.is_quantised() {
            let largest = self.config.experts.as_ref();
            let rows = largest.map_or(neurons, |experts| experts.size.max(experts.shared_size));
            (self.config.hidden_size * rows * 2) as u64
        } else {
            0
        };
        let reserve = 2 * LLAMA_CPP_BATCH * scores
            + widened
            + problem.gpu_scratch_bytes
            + problem
                .hardware
                .gpu
                .as_ref()
                .map_or(0, |gpu| gpu.context_bytes);
        let mut left = match &self.hardware.gpu {
            Some(_) => self.budget.vram_bytes.saturating_sub(reserve),
            None => 0,
        };
        let mut take = |bytes: u64| {
            let rest = left.checked_sub(bytes);
            left = rest.unwrap_or(left);
            rest.is_some()
        };
        let mut places = vec![(Device::Cpu, 0); problem.layers.len()];
        for (place, layer) in places.iter_mut().zip(&problem.layers).rev() {
            let bytes = layer.attention_bytes + first as u64 * layer.neuron_bytes + kv_bytes;
            if !take(bytes) {
                break;
            }
            *place = (Device::Gpu, first);
        }
        let is_all = places[0].0 == Device::Gpu && take(problem.head_bytes);
        for ((device, hot), layer) in places.iter_mut().zip(&problem.layers).rev() {
            let more = (neurons - first) as u64 * layer.neuron_bytes;
            if *device == Device::Cpu || !take(more) {
                break;
            }
            *hot = neurons;
        }
        let mode = self.dense();
        let experts = self.config.experts.as_ref();
        let layers = problem
            .layers
            .iter()
            .zip(&places)
            .map(|(layer, &(device, hot_count))| PlacedLayer {
                mode,
                frequencies: all_active,
                hot_count,
                selected: experts.map_or(1.0, Experts::selected_share),
                expert_neurons: experts.map_or(neurons, |experts| experts.size) as f64,
                neuron_bytes: layer.neuron_bytes,
                attention: device,
                attention_bytes: layer.attention_bytes,
                prediction: device,
                kv: device,
                kv_numbers: numbers,
                kv_bytes: (numbers as u64 * kv_number_bytes) as f64,
            });
        let placed = Placed {
            layers: layers.collect(),
            head: if is_all { Device::Gpu } else { Device::Cpu },
            head_bytes: problem.head_bytes,
            quant: self.quant,
            hidden_size: self.config.hidden_size,
            matrices: self.config.matrices_per_neuron(),
        };
        let whole = |place: &&(Device, usize)| **place == (Device::Gpu, neurons);
        let count = places.iter().filter(whole).count();
        (placed, count)
    }

    /// Bytes of the weights of `placed` on the CPU.
    pub(crate) fn cpu_bytes(&self, placed: &Placed<'_>) -> u64 {
        let problem = self.problem();
        let layers = placed.layers.iter().map(|layer| {
            let cold = (layer.frequencies.len() - layer.hot_count) as u64 * layer.neuron_bytes;
            match layer.attention {
                Device::Gpu => cold,
                Device::Cpu => cold + layer.attention_bytes,
            }
        });
        let head = match placed.head {
            Device::Cpu if !problem.tied_head => problem.head_bytes,
            _ => 0,
        };
        layers.sum::<u64>() + problem.embedding_bytes + head
    }

    /// The model as placed by `solved`.
    pub(crate) fn placed<'b>(&self, solved: &'b Solved) -> Placed<'b> {
        let Solved {
            problem,
            candidates,
            decision,
        } = solved;
        let chosen = candidates.iter().zip(&decision.chosen);
        let chosen: Vec<&Candidate> = chosen.map(|(modes, chosen)| &modes[*chosen]).collect();
        Placed::new(&decision.plan, problem, self.config, self.quant, &chosen)
    }
}

/// Options of the solver.
fn options() -> Options {
    Options {
        time_limit: Duration::from_secs(60),
        ..Options::default()
    }
}
