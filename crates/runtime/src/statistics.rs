//! Counts of a forward pass.

use std::ops::AddAssign;

use crate::{Stage, StageTimes};

/// Neurons, bytes and time of some tokens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Tokens.
    pub tokens: u64,
    /// FFN neurons computed, summed over layers and tokens.
    pub neurons_computed: u64,
    /// FFN neurons computed for at least one token of a pass, summed over layers and passes: rows of down that are
    /// read.
    pub neurons_in_union: u64,
    /// FFN neurons of all layers, for each token.
    pub neurons: u64,
    /// FFN neurons of all layers, for each pass.
    pub neurons_per_pass: u64,
    /// Bytes of weights and of the KV cache that the host read.
    pub bytes_read: u64,
    /// Bytes of the same kind that a device read from its memory.
    pub device_bytes_read: u64,
    /// Experts selected in layers with a cache of experts, summed over layers and tokens.
    pub experts_selected: u64,
    /// Selected experts, of those in [`experts_selected`](Self::experts_selected), that a device held.
    pub experts_on_device: u64,
    /// Time and bytes of every stage, if the clock runs.
    pub stages: Option<StageTimes>,
}

impl Statistics {
    /// Starts the clock; time before this call belongs to no stage.
    pub(crate) fn start_clock(&mut self) {
        let read = self.bytes_read;
        self.stages
            .get_or_insert_with(|| StageTimes::start(read))
            .skip(read);
    }

    /// Attributes the time since the last mark to `stage`, if the clock runs.
    pub(crate) fn mark(&mut self, stage: Stage) {
        if let Some(stages) = &mut self.stages {
            stages.mark(stage, self.bytes_read);
        }
    }

    /// Share of the neurons that were computed.
    pub fn computed_share(&self) -> f64 {
        if self.neurons == 0 {
            0.0
        } else {
            self.neurons_computed as f64 / self.neurons as f64
        }
    }

    /// Share of the neurons that were computed for at least one token of a pass.
    pub fn union_share(&self) -> f64 {
        match self.neurons_per_pass {
            0 => 0.0,
            passed => self.neurons_in_union as f64 / passed as f64,
        }
    }

    /// Share of the selected experts that a device held, in layers with a cache of experts; `None` if there were none.
    pub fn experts_on_device_share(&self) -> Option<f64> {
        let selected = self.experts_selected;
        (selected > 0).then(|| self.experts_on_device as f64 / selected as f64)
    }

    /// Bytes that host and device read.
    pub fn all_bytes_read(&self) -> u64 {
        self.bytes_read + self.device_bytes_read
    }

    /// Mean bytes per token that host and device read.
    pub fn bytes_per_token(&self) -> f64 {
        self.all_bytes_read() as f64 / self.tokens.max(1) as f64
    }
}

/// Adds the counts; the stages of the left side are kept.
impl AddAssign for Statistics {
    fn add_assign(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.neurons_computed += other.neurons_computed;
        self.neurons_in_union += other.neurons_in_union;
        self.neurons += other.neurons;
        self.neurons_per_pass += other.neurons_per_pass;
        self.bytes_read += other.bytes_read;
        self.device_bytes_read += other.device_bytes_read;
        self.experts_selected += other.experts_selected;
        self.experts_on_device += other.experts_on_device;
    }
}
