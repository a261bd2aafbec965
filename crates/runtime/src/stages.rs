//! Where the time of a forward pass goes, stage by stage.
//!
//! The clock counts laps: at the end of a stage, the time and the bytes since the last mark are that
//! stage's. So nothing between the first mark and the last is left out, and a mark is one reading of
//! the system's clock.

use std::{
    fmt,
    time::{Duration, Instant},
};

/// A part of a decode step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Rows of the embedding.
    Embedding,
    /// Norms, and the copies and sums around attention and FFN.
    Norms,
    /// Projections to query, key and value.
    QueryKeyValue,
    /// Rotation, the KV cache, and attention over it.
    Attention,
    /// The projection of what attention mixed.
    AttentionOutput,
    /// Whatever predicts which neurons fire.
    Prediction,
    /// Gate and up of the neurons computed, and their activations.
    GateUp,
    /// What the neurons add to the hidden state.
    Down,
    /// Logits.
    Head,
    /// Choosing a token.
    Sampling,
    /// Asking a device for what it is to do, and handing it what it needs.
    Launching,
    /// Waiting for a device.
    Waiting,
}

impl Stage {
    /// Every stage, in the order of a token.
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

    /// What the stage reads, mostly.
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

/// A kind of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reads {
    /// Of the model.
    Weights,
    /// Of what predicts.
    Predictors,
    /// Of keys and values.
    KvCache,
}

/// What one stage took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Lap {
    /// Time.
    pub time: Duration,
    /// Bytes read.
    pub bytes: u64,
}

/// What every stage took, and the clock that goes on counting it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageTimes {
    laps: [Lap; Stage::ALL.len()],
    marks: u64,
    last: Instant,
    last_bytes: u64,
}

/// Nothing counted yet, and the clock starts.
impl Default for StageTimes {
    fn default() -> Self {
        Self::start(0)
    }
}

impl StageTimes {
    /// Nothing counted yet; the first lap begins now, when `bytes` have been read.
    pub(crate) fn start(bytes: u64) -> Self {
        Self {
            laps: Default::default(),
            marks: 0,
            last: Instant::now(),
            last_bytes: bytes,
        }
    }

    /// The next lap begins now; what lies before it counts to no stage.
    pub(crate) fn skip(&mut self, bytes: u64) {
        self.last = Instant::now();
        self.last_bytes = bytes;
    }

    /// Ends a lap of `stage`.
    pub(crate) fn mark(&mut self, stage: Stage, bytes: u64) {
        let now = Instant::now();
        let lap = &mut self.laps[stage as usize];
        lap.time += now - self.last;
        lap.bytes += bytes - self.last_bytes;
        self.marks += 1;
        (self.last, self.last_bytes) = (now, bytes);
    }

    /// What `stage` took.
    pub fn lap(&self, stage: Stage) -> Lap {
        self.laps[stage as usize]
    }

    /// The time of all stages.
    pub fn total(&self) -> Duration {
        self.laps.iter().map(|lap| lap.time).sum()
    }

    /// How often the clock was read.
    pub fn marks(&self) -> u64 {
        self.marks
    }

    /// What one mark takes on this machine.
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
        let started = Instant::now();
        let mut clock = StageTimes::start(10);
        std::thread::sleep(Duration::from_millis(2));
        clock.mark(Stage::Head, 30);
        clock.mark(Stage::Down, 35);
        std::thread::sleep(Duration::from_millis(2));
        clock.skip(40);
        clock.mark(Stage::Head, 41);
        let elapsed = started.elapsed();
        let head = clock.lap(Stage::Head);
        assert!(head.time >= Duration::from_millis(2));
        assert_eq!((head.bytes, clock.lap(Stage::Down).bytes), (21, 5));
        assert!(clock.total() <= elapsed - Duration::from_millis(2));
        assert_eq!(clock.marks(), 3);
        assert_eq!(clock.lap(Stage::Norms), Lap::default());
    }

    #[test]
    fn stages_are_numbered_in_their_order() {
        for (index, stage) in Stage::ALL.into_iter().enumerate() {
            assert_eq!(stage as usize, index);
        }
        assert!(StageTimes::mark_cost() < Duration::from_micros(50));
    }
}
