//! What a forward pass read and computed.

use std::ops::AddAssign;

use crate::{Stage, StageTimes};

/// Counted over some tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Tokens that went through.
    pub tokens: u64,
    /// FFN neurons computed, all layers.
    pub neurons_computed: u64,
    /// The same, those that several tokens of a pass have counted once: whose rows of down are read.
    pub neurons_in_union: u64,
    /// FFN neurons there are, all layers, each token.
    pub neurons: u64,
    /// FFN neurons there are, all layers, each pass.
    pub neurons_passed: u64,
    /// Bytes of weights and of the KV cache read.
    pub bytes_read: u64,
    /// What every stage took, where a clock runs.
    pub stages: Option<StageTimes>,
}

impl Statistics {
    /// From now on time counts to stages; what lies before counts to none.
    pub(crate) fn start_clock(&mut self) {
        let read = self.bytes_read;
        self.stages
            .get_or_insert_with(|| StageTimes::start(read))
            .skip(read);
    }

    /// What was done since the last mark was `stage`, where a clock runs.
    pub(crate) fn mark(&mut self, stage: Stage) {
        if let Some(stages) = &mut self.stages {
            stages.mark(stage, self.bytes_read);
        }
    }

    /// Share of neurons that were computed.
    pub fn computed_share(&self) -> f64 {
        if self.neurons == 0 {
            0.0
        } else {
            self.neurons_computed as f64 / self.neurons as f64
        }
    }

    /// Share of neurons that any token of a pass had computed.
    pub fn union_share(&self) -> f64 {
        match self.neurons_passed {
            0 => 0.0,
            passed => self.neurons_in_union as f64 / passed as f64,
        }
    }

    /// Mean bytes read for a token.
    pub fn bytes_per_token(&self) -> f64 {
        if self.tokens == 0 {
            0.0
        } else {
            self.bytes_read as f64 / self.tokens as f64
        }
    }
}

/// Counts add up; stages are those of the left side.
impl AddAssign for Statistics {
    fn add_assign(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.neurons_computed += other.neurons_computed;
        self.neurons_in_union += other.neurons_in_union;
        self.neurons += other.neurons;
        self.neurons_passed += other.neurons_passed;
        self.bytes_read += other.bytes_read;
    }
}
