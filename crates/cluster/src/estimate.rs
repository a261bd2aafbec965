//! What the stages of a preparation take: time, memory, disk and traffic.
//!
//! Time is work over rate. The work of a stage follows from the model's shape; the rates are measured on a machine, and grow
//! with its cores.

use powerinfer_model::{LayerWeight, ModelConfig, Weight};
use powerinfer_tensor::Format;

use crate::StageKind;

/// Memory of the program itself, with its libraries and buffers.
const PROGRAM: u64 = 256 << 20;
/// Tokens of a batch of training.
const BATCH: f64 = 256.0;
/// Networks that a layer's search trains, as whole trainings: one, and a larger and a smaller one of half the steps.
const NETWORKS: f64 = 2.0;
/// Share of the active neurons that a network's rank is, by the search's first guess.
const RANK_SHARE: f64 = 1.0;
/// Windows of a certificate overlap by half.
const OVERLAP: f64 = 2.0;

/// Rates of a machine, on all the cores that they were measured on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Cores that the rates are of.
    pub cores: usize,
    /// Floating-point operations per second of `profile`.
    pub profile: f64,
    /// The same of training.
    pub train: f64,
    /// The same of a certificate: prompts under the runtime.
    pub certify: f64,
    /// Weights per second that are read, quantised and written by `place`.
    pub pack: f64,
    /// Bytes per second that a checkpoint is read at.
    pub read: f64,
}

impl Rates {
    /// Rates of a machine whose prompts run at `operations_per_second` on `cores` cores.
    ///
    /// The other rates are assumed shares of it: all are bound by products of matrices, but for packing and reading.
    pub fn of_machine(operations_per_second: f64, cores: usize) -> Self {
        let cores = cores.max(1);
        Self {
            cores,
            profile: 0.55 * operations_per_second,
            train: 0.30 * operations_per_second,
            certify: operations_per_second,
            pack: 45e6 * cores as f64,
            read: 1e9,
        }
    }

    /// Rate `of` these on `cores` cores.
    fn on(self, of: f64, cores: usize) -> f64 {
        of * cores as f64 / self.cores as f64
    }
}

/// The work of a preparation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    layers: u64,
    hidden: u64,
    neurons: u64,
    parameters: u64,
    /// Parameters of the largest layer.
    layer_parameters: u64,
    /// Bytes of the checkpoint.
    checkpoint_bytes: u64,
    /// Tokens to profile.
    pub tokens: u64,
    /// Tokens per layer to keep samples of.
    pub trace_tokens: u64,
    /// Optimiser steps per network.
    pub steps: u64,
    /// Share of active neurons, which sets the ranks of predictors.
    pub density: f64,
    /// Tokens of the certificate.
    pub certify_tokens: u64,
    /// Format of the bundle's weights.
    pub quant: Format,
    /// Cores of a task.
    pub cores: usize,
    /// Rates of the machine.
    pub rates: Rates,
}

/// What a task of a stage takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Needs {
    /// Cores.
    pub cores: usize,
    /// Wall-clock time.
    pub seconds: f64,
    /// Memory.
    pub memory_bytes: u64,
    /// Bytes that it writes to the shared storage.
    pub written_bytes: u64,
    /// Bytes that it reads from the shared storage.
    pub read_bytes: u64,
}

impl Needs {
    /// Memory to ask for: half as much again, in whole GiB.
    pub fn memory_limit(&self) -> u64 {
        (self.memory_bytes + self.memory_bytes / 2).next_multiple_of(1 << 30)
    }

    /// Time to ask for, in minutes: three times as much and ten minutes, since a task that is stopped for it has to be
    /// submitted again.
    pub fn minutes_limit(&self) -> u64 {
        10 + (3.0 * self.seconds / 60.0).ceil() as u64
    }
}

impl Workload {
    /// The work for a model with `config`, with the defaults of all stages, and a checkpoint in 16 bits.
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
        debug_assert!(
            config.has(LayerWeight::Down) || config.layer_count == 0,
            "every layer has an FFN"
        );
        Self {
            layers: config.layer_count as u64,
            hidden: config.hidden_size as u64,
            neurons: config.ffn_size as u64,
            parameters,
            layer_parameters: of_layer(0),
            checkpoint_bytes: 2 * parameters,
            tokens: 131_072,
            trace_tokens: 16_384,
            steps: 2_000,
            density: 0.1,
            certify_tokens: 8_192,
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
        (RANK_SHARE * self.density * self.hidden as f64).max(16.0)
    }

    /// What one of the `tasks` of a stage takes.
    pub fn needs(&self, kind: StageKind, tasks: usize) -> Needs {
        let rates = self.rates;
        let tasks = tasks.max(1) as u64;
        let rate = |of: f64| rates.on(of, self.cores);
        let read = |bytes: u64| bytes as f64 / rates.read;
        let in_layers = (self.layers * self.layer_parameters) as f64;
        let samples = self.layers * self.sample_bytes();
        let (seconds, memory, written_bytes, read_bytes) = match kind {
            StageKind::Profile => {
                let tokens = self.tokens.div_ceil(tasks);
                let time = 2.0 * in_layers * tokens as f64 / rate(rates.profile);
                // A layer in f32, and the hidden states of all tokens before and after it.
                let memory = 4 * self.layer_parameters + 2 * 4 * tokens * self.hidden;
                let bytes = self.checkpoint_bytes;
                (time + read(bytes), memory, samples / tasks, bytes)
            }
            StageKind::Merge => (
                2.0 * read(samples),
                2 * self.sample_bytes(),
                samples,
                samples,
            ),
            StageKind::Train => {
                let layers = self.layers.div_ceil(tasks) as f64;
                let network = self.rank() * (self.hidden + self.neurons) as f64;
                let steps = NETWORKS * self.steps as f64;
                let time = layers * steps * BATCH * 6.0 * network / rate(rates.train);
                let bytes = samples / tasks;
                let memory = self.sample_bytes() + (5.0 * 4.0 * network) as u64;
                (time + read(bytes), memory, (layers * network) as u64, bytes)
            }
            StageKind::Place => {
                let time = self.parameters as f64 / rate(rates.pack);
                let memory = 2 * 4 * self.layer_parameters;
                let search = self.certified(rate(rates.certify));
                (
                    time + search,
                    memory,
                    self.bundle_bytes(),
                    self.checkpoint_bytes,
                )
            }
            StageKind::Certify => {
                let time = self.certified(rate(rates.certify)) / tasks as f64;
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

    /// Time of a certificate: `dense` and the plan over all tokens, in overlapping windows.
    fn certified(&self, rate: f64) -> f64 {
        let passes = 2.0 * OVERLAP;
        passes * 2.0 * self.parameters as f64 * self.certify_tokens as f64 / rate
    }
}
