//! Time and bytes of a forward pass by stage.
//!
//! The end of a stage is a mark: the time and the bytes since the last mark are that stage's. So nothing between two
//! marks is missed, and a mark costs one reading of the clock.

use std::{
    fmt,
    time::{Duration, Instant},
};

/// A part of a token's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Rows of the token embedding.
    Embedding,
    /// Norms, copies, and residual additions.
    Norms,
    /// Query, key and value projections.
    QueryKeyValue,
    /// Rotary embedding, KV cache and attention.
    Attention,
    /// The output projection of attention.
    AttentionOutput,
    /// Prediction of active neurons.
    Prediction,
    /// Gate and up of the computed neurons, and their activations.
    GateUp,
    /// Down.
    Down,
    /// Logits.
    Head,
    /// Sampling.
    Sampling,
    /// Launches on a device, and copies to it.
    Launching,
    /// Waiting for a device.
    Waiting,
}

impl Stage {
    /// All stages, in the order of a token.
    pub const ALL: [Self; 12] = [
        Self::Embedding,
        Self::Norms,
        Self::QueryKeyValue,
        Self::Attention,
        Self::AttentionOutput,
        Self::Prediction,
        Self::GateUp,
        Self::Down,
        Self::Head,
        Self::Sampling,
        Self::Launching,
        Self::Waiting,
    ];

    /// Kind of data that the stage mostly reads.
    pub fn reads(self) -> Reads {
        match self {
            Self::Attention => Reads::KvCache,
            Self::Prediction => Reads::Predictors,
            _ => Reads::Weights,
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Embedding => "embedding",
            Self::Norms => "norms",
            Self::QueryKeyValue => "query-key-value",
            Self::Attention => "attention",
            Self::AttentionOutput => "attention-output",
            Self::Prediction => "prediction",
            Self::GateUp => "gate-up",
            Self::Down => "down",
            Self::Head => "head",
            Self::Sampling => "sampling",
            Self::Launching => "launching",
            Self::Waiting => "waiting",
        })
    }
}

/// A kind of memory that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reads {
    /// Weights of the model.
    Weights,
    /// Predictors.
    Predictors,
    /// Keys and values.
    KvCache,
}

/// Time and bytes of one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageTotal {
    /// Time.
    pub time: Duration,
    /// Bytes read.
    pub bytes: u64,
}

/// The end of a part of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageMark {
    /// The stage.
    pub stage: Stage,
    /// When it ended.
    pub ended: Instant,
    /// Bytes read since the previous mark.
    pub bytes: u64,
}

/// Time and bytes of every stage, and the running clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageTimes {
    totals: [StageTotal; Stage::ALL.len()],
    count: u64,
    last: Instant,
    last_bytes: u64,
    /// All marks, if they are kept.
    kept: Option<Vec<StageMark>>,
}

/// Starts the clock.
impl Default for StageTimes {
    fn default() -> Self {
        Self::start(0)
    }
}

impl StageTimes {
    /// Starts the clock when `bytes` have been read.
    pub(crate) fn start(bytes: u64) -> Self {
        Self {
            totals: Default::default(),
            count: 0,
            last: Instant::now(),
            last_bytes: bytes,
            kept: None,
        }
    }

    /// Restarts the clock; the time since the last mark belongs to no stage.
    pub(crate) fn skip(&mut self, bytes: u64) {
        self.last = Instant::now();
        self.last_bytes = bytes;
    }

    /// Ends a part of `stage` when `bytes` have been read.
    pub(crate) fn mark(&mut self, stage: Stage, bytes: u64) {
        self.mark_at(Instant::now(), stage, bytes);
    }

    fn mark_at(&mut self, now: Instant, stage: Stage, bytes: u64) {
        let lap = &mut self.totals[stage as usize];
        let read = bytes - self.last_bytes;
        lap.time += now - self.last;
        lap.bytes += read;
        self.count += 1;
        if let Some(kept) = &mut self.kept {
            kept.push(StageMark {
                stage,
                ended: now,
                bytes: read,
            });
        }
        (self.last, self.last_bytes) = (now, bytes);
    }

    /// Time and bytes of `stage`.
    pub fn lap(&self, stage: Stage) -> StageTotal {
        self.totals[stage as usize]
    }

    /// Time of all stages.
    pub fn total(&self) -> Duration {
        self.totals.iter().map(|lap| lap.time).sum()
    }

    /// Readings of the clock.
    pub fn marks(&self) -> u64 {
        self.count
    }

    /// Keeps all marks from now on.
    pub(crate) fn keep_marks(&mut self) {
        self.kept = Some(Vec::new());
    }

    /// Takes the marks since the last call; empty unless they are [kept](Self::keep_marks).
    pub(crate) fn take_marks(&mut self) -> Vec<StageMark> {
        self.kept.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Time of one mark on this machine.
    pub fn mark_cost() -> Duration {
        const MARKS: u32 = 20_000;
        let mut clock = Self::start(0);
        let started = Instant::now();
        for mark in 0..MARKS {
            clock.mark(Stage::ALL[mark as usize % Stage::ALL.len()], 0);
        }
        std::hint::black_box(&clock);
        started.elapsed() / MARKS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn laps_add_up_to_what_lies_between_the_marks() {
        let mut clock = StageTimes::start(10);
        let after = |clock: &StageTimes, seconds| clock.last + Duration::from_secs(seconds);
        clock.mark_at(after(&clock, 2), Stage::Head, 30);
        clock.mark_at(after(&clock, 3), Stage::Down, 35);
        // The time up to here belongs to no stage.
        clock.skip(40);
        clock.mark_at(after(&clock, 4), Stage::Head, 41);
        let lap = |seconds, bytes| StageTotal {
            time: Duration::from_secs(seconds),
            bytes,
        };
        assert_eq!(clock.lap(Stage::Head), lap(6, 21));
        assert_eq!(clock.lap(Stage::Down), lap(3, 5));
        assert_eq!(clock.total(), Duration::from_secs(9));
        assert_eq!(clock.marks(), 3);
        assert_eq!(clock.lap(Stage::Norms), StageTotal::default());
    }

    #[test]
    fn stages_are_numbered_in_their_order() {
        for (index, stage) in Stage::ALL.into_iter().enumerate() {
            assert_eq!(stage as usize, index);
        }
        assert!(StageTimes::mark_cost() < Duration::from_micros(50));
    }
}
