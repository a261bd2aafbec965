//! Estimates the cost of each stage of a preparation: time, memory, disk and traffic.
//!
//! Time is work divided by rate. The work follows from the model's shape. The rates are those of prompt GEMMs, which `doctor`
//! measures: `profile` and training multiply floats, and bundles are quantised. The efficiency of training is fitted to runs of
//! `llama-1b` with 3 layers, and of `llama-7b` and `llama-13b` with one, on two cores of an AMD EPYC (Zen 5) and of an Intel Xeon;
//! see the guide. The efficiency of calculating predictors and of the other stages is fitted to one layer of `llama-7b`, `llama3-8b` and
//! `qwen3-30b-a3b`, to `llama-1b`, and to `demo`, on two cores of an AMD EPYC with AVX2.

use powerinfer_artifact::{hardware::Hardware, threshold_curve::ERRORS};
use powerinfer_model::{ModelConfig, Weight};
use powerinfer_tensor::Format;

use crate::StageKind;

/// Memory of the program itself, with its libraries and buffers.
const PROGRAM: u64 = 256 << 20;
/// Seconds that `profile` takes to count one neuron's activation for one token. One thread counts.
const COUNT: f64 = 9e-9;
/// Seconds per token and layer that `profile` takes to start and join threads.
const START: f64 = 45e-6;
/// Seconds on one core that attention in `profile` takes per head, token and token of the sequence, in addition to its GEMMs.
const ATTEND: f64 = 10e-9;
/// Share of the rate that the GEMMs of experts reach in `profile`. They are small.
const EXPERT_GEMMS: f64 = 0.33;
/// Tokens of a full sequence in a profile.
const SEQUENCE: f64 = 512.0;
/// Parameters that `profile` and the calibration of thresholds read and convert to f32, per second and core.
const LOAD: f64 = 130e6;
/// Operations per neuron and token in training for labels, losses and their gradients.
const LOSS: f64 = 2400.0;
/// Seconds per training step in addition to its operations.
const STEP: f64 = 1e-3;
/// Tokens of a training batch.
const BATCH: f64 = 256.0;
/// Total steps of the search for a layer's rank, counted as steps at the first rank. Early stopping ends each training.
const SEARCH_STEPS: f64 = 900.0;
/// Optimiser steps if training starts from a calculated predictor.
const FURTHER_STEPS: f64 = 240.0;
/// Largest number of tokens from which a predictor is calculated.
const CALCULATED_TOKENS: f64 = 4096.0;
/// Share of the sampled tokens from which predictors are made; the others evaluate them.
const TRAINING: f64 = 0.8;
/// Operations to calculate the directions of all ranks that the search tries, per unit of a trained predictor's rank, per hidden
/// element, and per neuron or token.
const DIRECTION: f64 = 53.0;
/// Operations to fit and evaluate a calculated predictor, per neuron and token: in total, and in addition per unit of its rank.
const FIT: f64 = 2800.0;
const FIT_UNIT: f64 = 9.4;
/// Number of ranks that the search tries. The calculated ones have, on average, as many units as a trained predictor.
const RANKS: f64 = 3.5;
/// Tokens on which thresholds are calibrated.
const THRESHOLD_TOKENS: u64 = 2048;
/// Cost of calibrating thresholds, per neuron and token: seconds on one core, and operations per hidden element.
const THRESHOLD: f64 = 300e-9;
const THRESHOLD_OPERATIONS: f64 = 9.0;
/// Share of the rate reached by passes that compute the logits of all tokens.
const SCORING: f64 = 0.75;
/// Seconds that such a pass takes per token and layer, in addition to its operations.
const SCORE: f64 = 20e-6;
/// Cost of certifying, in `dense` passes over the certificate's text: one pass of `dense`, and one of the plan with its
/// verification, which computes less.
const CERTIFY: f64 = 1.6;
/// Cost of the search for policies within the perplexity budget, in `dense` passes over the certificate's text: one pass of `dense`,
/// and one with predictors, which computes less. A search with thresholds takes about seven passes.
const DECIDE: f64 = 1.8;
const DECIDE_THRESHOLDS: f64 = 7.5;
/// Weights per second and core that `place` quantises and writes.
const PACK: f64 = 30e6;
/// Read bandwidth of the shared storage, in bytes per second.
const READ: f64 = 1e9;

/// Rates of prompt GEMMs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Number of cores on which the rates were measured.
    pub cores: usize,
    /// Operations per second of these cores together, with quantised weights.
    pub operations_per_second: f64,
    /// Operations per second of these cores together, with float weights, as in `profile` and training.
    pub float_operations_per_second: f64,
}

/// Operations per second of one core if the rates were not measured.
const USUAL_OPERATIONS: f64 = 40e9;

impl Rates {
    /// Rates of `hardware`, or typical rates if its file has none.
    pub fn new(hardware: &Hardware) -> Self {
        let cores = hardware.cpu.threads;
        let rate = |format| {
            let measured = hardware.cpu.gemm_operations_per_second(format);
            measured.unwrap_or(USUAL_OPERATIONS * cores as f64)
        };
        Self {
            cores,
            operations_per_second: rate(Format::Q4_0),
            float_operations_per_second: rate(Format::F32),
        }
    }
}

/// Work of a preparation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    layers: u64,
    hidden: u64,
    neurons: u64,
    parameters: u64,
    /// Parameters by which a token is multiplied: in the layers, and in total.
    computed_in_layers: u64,
    computed: u64,
    /// Parameters of the largest layer.
    layer_parameters: u64,
    heads: u64,
    has_experts: bool,
    /// Whether thresholds are calibrated, because no activation is exactly zero.
    has_thresholds: bool,
    /// Bytes of the checkpoint.
    checkpoint_bytes: u64,
    /// Tokens to profile.
    pub tokens: u64,
    /// Mean number of tokens per sequence.
    pub sequence_tokens: f64,
    /// Tokens per layer of which samples are kept.
    pub trace_tokens: u64,
    /// Whether predictors are calculated before any training.
    pub calculates: bool,
    /// Optimiser steps per network; 0 if none is trained.
    pub steps: u64,
    /// Share of active neurons, which sets the ranks of predictors.
    pub density: f64,
    /// Tokens of the certificate.
    pub certify_tokens: u64,
    /// Whether `place` measures the perplexity of policies.
    pub searches: bool,
    /// Format of the bundle's weights.
    pub quant: Format,
    /// Cores per task.
    pub cores: usize,
    /// Rates of the machine.
    pub rates: Rates,
}

/// Cost of one task of a stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Needs {
    /// Cores.
    pub cores: usize,
    /// Wall-clock time in seconds.
    pub seconds: f64,
    /// Memory.
    pub memory_bytes: u64,
    /// Bytes that the task writes to the shared storage.
    pub written_bytes: u64,
    /// Bytes that the task reads from the shared storage.
    pub read_bytes: u64,
}

impl Needs {
    /// Memory to request, in bytes: 1.5 times the estimate, rounded up to whole GiB.
    pub fn memory_limit(&self) -> u64 {
        (self.memory_bytes + self.memory_bytes / 2).next_multiple_of(1 << 30)
    }

    /// Time to request, in minutes: three times the estimate plus ten minutes. A task that exceeds its limit is stopped and has to
    /// be submitted again.
    pub fn minutes_limit(&self) -> u64 {
        10 + (3.0 * self.seconds / 60.0).ceil() as u64
    }
}

impl Workload {
    /// Work for a model with `config` and a 16-bit checkpoint, with the defaults of all stages.
    pub fn new(config: &ModelConfig, quant: Format, cores: usize, rates: Rates) -> Self {
        let size = |weight: &Weight| config.shape(*weight).iter().product::<usize>() as u64;
        let parameters = config.parameters();
        let of_layer = |layer: usize| {
            let weights = config.weights().into_iter();
            weights
                .filter(|weight| matches!(weight, Weight::Layer(index, _) if *index == layer))
                .map(|weight| size(&weight))
                .sum::<u64>()
        };
        Self {
            layers: config.layer_count as u64,
            hidden: config.hidden_size as u64,
            neurons: config.ffn_size as u64,
            parameters,
            computed_in_layers: config.parameters_per_token() - size(&Weight::Head),
            computed: config.parameters_per_token(),
            layer_parameters: of_layer(0),
            heads: config.head_count as u64,
            has_experts: config.experts.is_some(),
            has_thresholds: !config.activation.has_exact_zeros(),
            checkpoint_bytes: 2 * parameters,
            tokens: 131_072,
            sequence_tokens: SEQUENCE,
            trace_tokens: 16_384,
            calculates: true,
            steps: 2_000,
            density: 0.1,
            certify_tokens: 8_192,
            searches: true,
            quant,
            cores,
            rates,
        }
    }

    /// Bytes of a layer's samples.
    fn sample_bytes(&self) -> u64 {
        self.trace_tokens.min(self.tokens) * (2 * self.hidden + self.neurons / 8 + self.neurons / 4)
    }

    /// Bytes of the bundle.
    fn bundle_bytes(&self) -> u64 {
        self.quant.row_bytes(1 << 10) as u64 * (self.parameters >> 10)
    }

    /// Rank of a predictor.
    fn rank(&self) -> f64 {
        (self.density * self.hidden as f64).max(16.0)
    }

    /// Cost of each task if the stage is divided into `tasks` tasks.
    pub fn needs(&self, kind: StageKind, tasks: usize) -> Needs {
        let tasks = tasks.max(1) as u64;
        let cores = self.cores as f64;
        let of_cores = |rate: f64| rate * cores / self.rates.cores.max(1) as f64;
        let rate = of_cores(self.rates.operations_per_second);
        let float_rate = of_cores(self.rates.float_operations_per_second);
        let read = |bytes: u64| bytes as f64 / READ;
        // Seconds of a `dense` pass over the certificate's text.
        let operations = 2.0 * self.computed as f64 / SCORING;
        let scored = (operations / rate + SCORE * self.layers as f64) * self.certify_tokens as f64;
        let loading = |layers: f64| layers * self.layer_parameters as f64 / (LOAD * cores);
        let samples = self.layers * self.sample_bytes();
        let (seconds, memory, written_bytes, read_bytes) = match kind {
            StageKind::Profile => {
                let tokens = self.tokens.div_ceil(tasks);
                // On average, a token attends to half of its sequence: scores, and sums of values.
                let attention = 2.0 * self.sequence_tokens * (self.layers * self.hidden) as f64;
                let efficiency = if self.has_experts { EXPERT_GEMMS } else { 1.0 };
                let computed = 2.0 * self.computed_in_layers as f64 / efficiency;
                let scores = (self.layers * self.heads) as f64 * self.sequence_tokens;
                let per_token = (computed + attention) / float_rate
                    + ATTEND * scores / cores
                    + (COUNT * self.neurons as f64 + START) * self.layers as f64;
                let time = per_token * tokens as f64 + loading(self.layers as f64);
                // A layer in f32, and the hidden states of all tokens before and after it.
                let memory = 4 * self.layer_parameters + 2 * 4 * tokens * self.hidden;
                let bytes = 2 * self.layers * self.layer_parameters;
                (time + read(bytes), memory, samples / tasks, bytes)
            }
            StageKind::Merge => (
                2.0 * read(samples),
                2 * self.sample_bytes(),
                samples,
                samples,
            ),
            StageKind::Train if self.has_thresholds => {
                let layers = self.layers.div_ceil(tasks) as f64;
                let used = self.trace_tokens.min(self.tokens).min(THRESHOLD_TOKENS);
                let each =
                    THRESHOLD / cores + THRESHOLD_OPERATIONS * self.hidden as f64 / float_rate;
                let of_layer = each * (self.neurons * used) as f64;
                let memory = 4 * self.layer_parameters + 9 * 4 * self.neurons * used;
                // Per neuron: three scores, each with a share of tokens per error level, and three vectors.
                let written = (layers as u64) * self.neurons * 4 * (3 * ERRORS.len() as u64 + 3);
                let bytes = (samples + 2 * self.layers * self.layer_parameters) / tasks;
                let time = layers * of_layer + loading(layers) + read(bytes);
                (time, memory, written, bytes)
            }
            StageKind::Train => {
                let layers = self.layers.div_ceil(tasks) as f64;
                let (hidden, neurons) = (self.hidden as f64, self.neurons as f64);
                let sampled = TRAINING * self.trace_tokens.min(self.tokens) as f64;
                let used = sampled.min(CALCULATED_TOKENS);
                let directions = DIRECTION * self.rank() * hidden * (neurons + used);
                let fit = (FIT + FIT_UNIT * self.rank()) * used * neurons;
                let calculated = directions + RANKS * fit;
                let (calculated, rank, steps) = match self.calculates {
                    // One linear unit replaces two ReLU units. Upper limit: all layers are trained further.
                    true => {
                        let steps = FURTHER_STEPS.min(self.steps as f64 / 2.0);
                        (calculated, self.rank() / 2.0, steps)
                    }
                    // The first training, then a larger and a smaller rank with half the steps each.
                    false => {
                        let steps = SEARCH_STEPS.min(2.0 * self.steps as f64);
                        (0.0, self.rank(), steps)
                    }
                };
                let network = rank * (hidden + neurons);
                let operations = BATCH * (6.0 * network + LOSS * neurons);
                let training = steps * (operations / float_rate + STEP);
                let time = layers * (calculated / float_rate + training);
                let bytes = samples / tasks;
                let memory = self.sample_bytes() + (5.0 * 4.0 * network) as u64;
                (time + read(bytes), memory, (layers * network) as u64, bytes)
            }
            StageKind::Place => {
                let searching = match (self.searches, self.has_thresholds) {
                    (false, _) => 0.0,
                    (true, false) => DECIDE * scored,
                    (true, true) => DECIDE_THRESHOLDS * scored,
                };
                let time = self.parameters as f64 / (PACK * cores) + searching;
                let memory = 2 * 4 * self.layer_parameters;
                (time, memory, self.bundle_bytes(), self.checkpoint_bytes)
            }
            StageKind::Certify => {
                let time = CERTIFY * scored / tasks as f64;
                let bytes = self.bundle_bytes();
                (time + read(bytes), bytes, 1 << 20, bytes)
            }
            StageKind::Finish => (5.0, self.sample_bytes(), 1 << 20, 1 << 20),
        };
        Needs {
            cores: self.cores,
            seconds,
            memory_bytes: PROGRAM + memory,
            written_bytes,
            read_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_synth::Shape;

    use super::*;

    /// Work for the shape called `name` on a core of 100 billion operations per second.
    fn workload(name: &str, change: fn(&mut ModelConfig)) -> Workload {
        let mut config = Shape::find(name).unwrap().describe().unwrap();
        change(&mut config);
        let rates = Rates {
            cores: 1,
            operations_per_second: 2e11,
            float_operations_per_second: 1e11,
        };
        Workload::new(&config, Format::Q4_0, 1, rates)
    }

    fn seconds(workload: &Workload, kind: StageKind) -> f64 {
        workload.needs(kind, 1).seconds
    }

    /// Seconds per token of a profile, without loading.
    fn per_token(mut workload: Workload) -> f64 {
        let times = [4096, 8192].map(|tokens| {
            workload.tokens = tokens;
            seconds(&workload, StageKind::Profile)
        });
        (times[1] - times[0]) / 4096.0
    }

    #[test]
    fn a_token_computes_only_the_experts_that_it_selects() {
        let half = workload("qwen3-30b-a3b", |config| {
            config.ffn_size /= 2;
            config.experts.as_mut().unwrap().count /= 2;
        });
        let all = workload("qwen3-30b-a3b", |_| ());
        assert!(all.layer_parameters as f64 > 1.9 * half.layer_parameters as f64);
        let counting = COUNT * (all.neurons - half.neurons) as f64 * all.layers as f64;
        let difference = per_token(all) - per_token(half);
        // Besides neurons, the additional experts add rows to the router.
        assert!(
            (counting..1.1 * counting).contains(&difference),
            "{difference} {counting}"
        );

        let selected = workload("qwen3-30b-a3b", |config| {
            config.experts.as_mut().unwrap().per_token *= 2;
        });
        assert!(per_token(selected) > 1.3 * per_token(all));
    }

    #[test]
    fn profiles_of_long_sequences_take_longer() {
        let mut workload = workload("llama-7b", |_| ());
        let times = [64.0, 512.0, 4096.0].map(|tokens| {
            workload.sequence_tokens = tokens;
            per_token(workload)
        });
        assert!(times.is_sorted(), "{times:?}");
        let dense = 2.0 * workload.computed_in_layers as f64 / 1e11;
        assert!(
            (1.0..1.1).contains(&(times[0] / dense)),
            "{times:?} {dense}"
        );
    }

    #[test]
    fn thresholds_need_no_training() {
        for (name, trains) in [("llama-7b", true), ("mixtral-8x7b", false)] {
            let mut workload = workload(name, |_| ());
            let times = [100, 2_000].map(|steps| {
                workload.steps = steps;
                seconds(&workload, StageKind::Train)
            });
            assert!(times[0] > 1.0, "{name} {times:?}");
            assert_eq!(times[0] < times[1], trains, "{name} {times:?}");
            let place = [false, true].map(|searches| {
                workload.searches = searches;
                seconds(&workload, StageKind::Place)
            });
            let passes = (place[1] - place[0]) / seconds(&workload, StageKind::Certify) * CERTIFY;
            let expected = if trains { DECIDE } else { DECIDE_THRESHOLDS };
            assert!(
                (0.8 * expected..expected * 1.01).contains(&passes),
                "{name} {passes}"
            );
        }
    }
}
