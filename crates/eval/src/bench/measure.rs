//! Time of prompts and of decoding, repeat by repeat, with the read bandwidth probed between repeats.

use std::slice::from_mut;

use powerinfer_artifact::Progress;
use powerinfer_kernels::Isa;
use powerinfer_runtime::{ReadProbe, Reads, SingleSession, Stage, StageTimes, Wanted};
use serde::Serialize;

use super::ceiling::{ListedRows, mixed};
use crate::{
    Contention, EvalError,
    timing::{Timed, Timer},
};

/// Work that is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Work {
    /// Prefill of a prompt.
    Prompt {
        /// Tokens of the prompt.
        tokens: usize,
    },
    /// Decoding of one sequence.
    Decode {
        /// Tokens decoded.
        tokens: usize,
        /// Tokens in the context before them.
        depth: usize,
    },
    /// Decoding of several sequences together, a token of each per pass.
    Batch {
        /// Number of sequences.
        #[serde(skip)] // a field of `Measured`
        sequences: usize,
        /// Tokens decoded of each.
        tokens: usize,
        /// Tokens in each context before them.
        depth: usize,
    },
}

impl Work {
    /// Tokens of context that it takes.
    pub fn context(self) -> usize {
        match self {
            Self::Prompt { tokens } => tokens,
            Self::Decode { tokens, depth } | Self::Batch { tokens, depth, .. } => tokens + depth,
        }
    }

    /// Tokens timed, of all sequences.
    fn tokens(self) -> usize {
        match self {
            Self::Prompt { tokens } | Self::Decode { tokens, .. } => tokens,
            Self::Batch {
                sequences, tokens, ..
            } => sequences * tokens,
        }
    }

    fn sequences(self) -> usize {
        match self {
            Self::Prompt { .. } | Self::Decode { .. } => 1,
            Self::Batch { sequences, .. } => sequences,
        }
    }
}

/// A figure over the repeats.
#[derive(Debug, Clone, Serialize)]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// Smallest figure.
    pub least: f64,
    /// Largest figure.
    pub most: f64,
    /// One figure per repeat, in order.
    pub repeats: Vec<f64>,
}

impl Spread {
    /// Spread of one figure per repeat.
    ///
    /// # Panics
    ///
    /// Panics if `repeats` is empty.
    pub fn from_repeats(repeats: Vec<f64>) -> Self {
        let mut sorted = repeats.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        Self {
            median: (low + high) / 2.0,
            least: sorted[0],
            most: sorted[sorted.len() - 1],
            repeats,
        }
    }
}

/// Time and bytes of one stage of the forward pass, per token.
#[derive(Debug, Serialize)]
pub struct StageCost {
    /// Name of the stage.
    pub stage: String,
    /// Microseconds per token.
    pub microseconds: Spread,
    /// Bytes read per token.
    pub bytes: f64,
    /// Bytes that the CPU read over time.
    pub bytes_per_second: f64,
    /// Limit set by memory: the read bandwidth of a stream, of listed rows, or of the stage's mix of both.
    pub ceiling_bytes_per_second: f64,
}

/// Bytes read per token.
#[derive(Debug, Serialize)]
pub struct BytesRead {
    /// Bytes of weights.
    pub weights: f64,
    /// Bytes of predictors.
    pub predictors: f64,
    /// Bytes of the KV cache.
    pub kv_cache: f64,
    /// Bytes of all kinds, read by a GPU from its memory; the CPU reads those above.
    pub gpu: f64,
    /// All bytes.
    pub total: f64,
}

/// Time, bytes and bandwidth of one kind of work.
#[derive(Debug, Serialize)]
pub struct Measured {
    /// The work.
    #[serde(flatten)]
    pub work: Work,
    /// Sequences that run together.
    pub sequences: usize,
    /// Throughput of all sequences.
    pub tokens_per_second: Spread,
    /// Time per token.
    pub microseconds_per_token: Spread,
    /// Time per token of each stage.
    pub stages: Vec<StageCost>,
    /// Time per token outside all stages.
    pub unaccounted_microseconds: Spread,
    /// Index of the median repeat, whose stages add up to its time.
    pub middle_repeat: usize,
    /// Time per token for reading the clock between stages.
    pub clock_microseconds: f64,
    /// Bytes read per token.
    pub bytes_per_token: BytesRead,
    /// Bytes that the CPU read over time.
    pub bytes_per_second: Spread,
    /// Read bandwidth of a stream of vector loads, measured before and after each repeat, in bytes per second.
    pub read_bandwidth: Spread,
    /// Read bandwidth of the rows that neurons select, of their length and at their distances, measured likewise; none
    /// if no rows are selected.
    pub row_bandwidth: Option<Spread>,
    /// Fraction of the read bandwidth that the CPU achieved.
    pub bandwidth_share: Spread,
    /// Share of FFN neurons computed.
    pub ffn_neurons_computed: f64,
    /// Contention for the processor during the repeats.
    pub contention: Contention,
}

/// Settings of a benchmark.
pub struct Bench<'a> {
    /// Instruction set of the read probe.
    pub isa: Isa,
    /// CPU threads.
    pub threads: usize,
    /// How often each work is timed.
    pub repeats: usize,
    /// Memory to read for the read bandwidth.
    pub probe: &'a ReadProbe,
    /// Token ids to run, at least as many as the longest work takes.
    pub ids: &'a [u32],
    /// Progress, one step per token.
    pub progress: &'a dyn Progress,
}

impl Bench<'_> {
    /// Steps of progress of [`Self::measure`].
    pub fn steps(&self, work: Work) -> u64 {
        (self.repeats * work.tokens()) as u64
    }

    /// Times `work`, which is a prompt or decoding, as often as set.
    ///
    /// # Errors
    ///
    /// Fails if the model does, or if the user asks to stop.
    ///
    /// # Panics
    ///
    /// Panics for [`Work::Batch`], which [`BatchBench`](super::BatchBench) times, and if there are too few ids.
    pub fn measure(&self, model: &mut SingleSession, work: Work) -> Result<Measured, EvalError> {
        let listed = match work {
            Work::Decode { .. } => {
                model.session.truncate(0);
                ListedRows::of_tokens(model, self.ids, self)?
            }
            _ => None,
        };
        let mut repeats = Vec::new();
        let mut bandwidths = vec![self.read()];
        let mut of_rows = Vec::new();
        for _ in 0..self.repeats {
            repeats.push(match work {
                Work::Prompt { tokens } => {
                    let SingleSession { engine, session } = &mut *model;
                    self.timer().prefill(engine, session, &self.ids[..tokens])?
                }
                Work::Decode { tokens, depth } => self.decode(model, tokens, depth)?,
                Work::Batch { .. } => unreachable!("batches have sequences of their own"),
            });
            bandwidths.push(self.read());
            of_rows.extend(listed.as_ref().map(|listed| self.read_rows(listed)));
        }
        let mut found = summary(work, &repeats, &bandwidths);
        if let Some(listed) = &listed {
            let (stream, rows) = (found.read_bandwidth.median, Spread::from_repeats(of_rows));
            for (cost, stage) in found.stages.iter_mut().zip(Stage::ALL) {
                let limit = listed.limit(stage, cost.bytes, stream, rows.median);
                cost.ceiling_bytes_per_second = limit;
            }
            found.row_bandwidth = Some(rows);
        }
        let costs = found.stages.iter_mut().zip(Stage::ALL);
        for (cost, _) in costs.filter(|(_, stage)| *stage == Stage::Prediction) {
            let units = ListedRows::of_hidden_units(model, cost.bytes, self.probe);
            let Some((units, shared)) = units.filter(|_| listed.is_some()) else {
                continue;
            };
            let passes = (0..3).map(|_| self.read_rows(&units));
            let (stream, rows) = (
                found.read_bandwidth.median,
                Spread::from_repeats(passes.collect()),
            );
            cost.ceiling_bytes_per_second = mixed(cost.bytes, shared, stream, rows.median);
        }
        Ok(found)
    }

    /// Read bandwidth of a stream in bytes per second: the median of three passes.
    pub fn read(&self) -> f64 {
        let passes = (0..3).map(|_| self.probe.stream(self.isa, self.threads));
        Spread::from_repeats(passes.collect()).median
    }

    /// Read bandwidth of `listed` rows in bytes per second.
    pub(super) fn read_rows(&self, listed: &ListedRows) -> f64 {
        let ListedRows {
            row_bytes, rows, ..
        } = listed;
        self.probe.rows(self.isa, self.threads, *row_bytes, rows)
    }

    pub(super) fn timer(&self) -> Timer<'_> {
        Timer {
            threads: self.threads,
            progress: self.progress,
        }
    }

    fn decode(
        &self,
        model: &mut SingleSession,
        tokens: usize,
        depth: usize,
    ) -> Result<Timed, EvalError> {
        let SingleSession { engine, session } = model;
        session.truncate(0);
        if depth > 0 {
            engine.prefill(session, &self.ids[..depth], Wanted::None)?;
        }
        let ids = self.ids[depth..depth + tokens].to_vec();
        self.timer().decode(engine, from_mut(session), &[ids])
    }
}

/// Summary of repeats of `work`; `bandwidths` were measured before the first and after each.
pub(super) fn summary(work: Work, repeats: &[Timed], bandwidths: &[f64]) -> Measured {
    let tokens = work.tokens() as f64;
    let of_all = |figure: &dyn Fn(usize, &Timed) -> f64| {
        let repeats = repeats.iter().enumerate();
        Spread::from_repeats(
            repeats
                .map(|(index, repeat)| figure(index, repeat))
                .collect(),
        )
    };
    let lap = |repeat: &Timed, stage| {
        let stages: Option<&StageTimes> = repeat.statistics.stages.as_ref();
        stages.map(|stages| stages.lap(stage)).unwrap_or_default()
    };
    let total = of_all(&|_, repeat| repeat.seconds / tokens * 1e6);
    let read_bandwidth = Spread::from_repeats(bandwidths.to_vec());
    let stages: Vec<StageCost> = Stage::ALL
        .into_iter()
        .map(|stage| {
            let microseconds =
                of_all(&|_, repeat| lap(repeat, stage).time.as_secs_f64() / tokens * 1e6);
            let bytes = of_all(&|_, repeat| lap(repeat, stage).bytes as f64 / tokens).median;
            StageCost {
                stage: stage.to_string(),
                bytes_per_second: bytes / (microseconds.median / 1e6).max(1e-12),
                ceiling_bytes_per_second: read_bandwidth.median,
                microseconds,
                bytes,
            }
        })
        .collect();
    let bytes = |kind: Option<Reads>| {
        let stages = stages.iter().zip(Stage::ALL);
        let of_kind = stages.filter(|(_, stage)| kind.is_none_or(|kind| stage.reads() == kind));
        of_kind.map(|(cost, _)| cost.bytes).sum::<f64>()
    };
    let gpu_bytes = of_all(&|_, repeat| repeat.statistics.device_bytes_read as f64 / tokens).median;
    let unaccounted = of_all(&|_, repeat| {
        let stages = repeat.statistics.stages.as_ref();
        let stages = stages.map_or(0.0, |stages| stages.total().as_secs_f64());
        (repeat.seconds - stages) / tokens * 1e6
    });
    let stages_of_first = repeats[0].statistics.stages.as_ref();
    let marks = stages_of_first.map_or(0, StageTimes::marks);
    let around = |index: usize| (bandwidths[index] + bandwidths[index + 1]) / 2.0;
    let speed = |repeat: &Timed| repeat.statistics.bytes_read as f64 / repeat.seconds;
    let contention: Vec<Contention> = repeats.iter().map(|repeat| repeat.contention).collect();
    Measured {
        work,
        sequences: work.sequences(),
        tokens_per_second: of_all(&|_, repeat| tokens / repeat.seconds),
        unaccounted_microseconds: unaccounted,
        middle_repeat: middle(&total.repeats),
        clock_microseconds: marks as f64 * StageTimes::mark_cost().as_secs_f64() * 1e6 / tokens,
        bytes_per_token: BytesRead {
            weights: bytes(Some(Reads::Weights)),
            predictors: bytes(Some(Reads::Predictors)),
            kv_cache: bytes(Some(Reads::KvCache)),
            gpu: gpu_bytes,
            total: bytes(None) + gpu_bytes,
        },
        bytes_per_second: of_all(&|_, repeat| speed(repeat)),
        read_bandwidth,
        row_bandwidth: None,
        bandwidth_share: of_all(&|index, repeat| speed(repeat) / around(index)),
        ffn_neurons_computed: repeats[0].statistics.computed_share(),
        contention: Contention::mean(&contention),
        microseconds_per_token: total,
        stages,
    }
}

/// Index of the (upper) median.
fn middle(figures: &[f64]) -> usize {
    let mut order: Vec<usize> = (0..figures.len()).collect();
    order.sort_by(|one, other| figures[*one].total_cmp(&figures[*other]));
    order[figures.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_median_and_extremes() {
        let odd = Spread::from_repeats(vec![3.0, 1.0, 2.0]);
        assert_eq!((odd.least, odd.median, odd.most), (1.0, 2.0, 3.0));
        assert_eq!(odd.repeats, [3.0, 1.0, 2.0]);
        assert_eq!(Spread::from_repeats(vec![4.0, 1.0]).median, 2.5);
        assert_eq!(Spread::from_repeats(vec![4.0]).median, 4.0);
        assert_eq!(middle(&[3.0, 1.0, 2.0]), 2);
        assert_eq!(middle(&[3.0, 1.0]), 0);
    }
}
