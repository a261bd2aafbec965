//! Times prompts and decoding, repeat by repeat, with the memory probed beside each.

use std::{hint::black_box, time::Instant};

use anyhow::Result;
use powerinfer_artifact::{Progress, progress::Interrupted};
use powerinfer_kernels::Isa;
use powerinfer_model::LanguageModel;
use powerinfer_runtime::{
    ReadProbe, Reads, Runtime, Sampler, SamplingSettings, Stage, StageTimes, Statistics,
};
use serde::Serialize;

use crate::{
    contention::{Contention, CpuTimes},
    progress::interrupted,
};

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub(super) enum Work {
    /// Reading so many tokens at once.
    Prompt { tokens: usize },
    /// Token by token, so many, after `depth` others.
    Decode { tokens: usize, depth: usize },
    /// The same of several sequences together, a token of each in a pass.
    Batch {
        #[serde(skip)] // told beside
        sequences: usize,
        tokens: usize,
        depth: usize,
    },
}

impl Work {
    /// Tokens that the context has to hold.
    pub(super) fn context(self) -> usize {
        match self {
            Self::Prompt { tokens } => tokens,
            Self::Decode { tokens, depth } | Self::Batch { tokens, depth, .. } => tokens + depth,
        }
    }

    /// Tokens that are timed, of all sequences.
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

/// A figure of every repeat.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) least: f64,
    pub(super) most: f64,
    /// In the order of the repeats.
    pub(super) repeats: Vec<f64>,
}

impl Spread {
    /// Of at least one figure.
    pub(super) fn of(repeats: Vec<f64>) -> Self {
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

/// What one stage took, a token.
#[derive(Debug, Serialize)]
pub(super) struct StageCost {
    pub(super) stage: String,
    pub(super) microseconds: Spread,
    pub(super) bytes: f64,
    pub(super) bytes_per_second: f64,
}

/// Bytes read for a token.
#[derive(Debug, Serialize)]
pub(super) struct BytesRead {
    pub(super) weights: f64,
    pub(super) predictors: f64,
    pub(super) kv_cache: f64,
    pub(super) total: f64,
}

/// What one kind of work took.
#[derive(Debug, Serialize)]
pub(super) struct Measured {
    #[serde(flatten)]
    pub(super) work: Work,
    /// Sequences at once.
    pub(super) sequences: usize,
    pub(super) tokens_per_second: Spread,
    pub(super) microseconds_per_token: Spread,
    pub(super) stages: Vec<StageCost>,
    /// What is no stage's.
    pub(super) unaccounted_microseconds: Spread,
    /// The repeat in the middle, whose stages add up to its time.
    pub(super) middle_repeat: usize,
    /// What reading the clock for the stages takes, a token.
    pub(super) clock_microseconds: f64,
    pub(super) bytes_per_token: BytesRead,
    pub(super) bytes_per_second: Spread,
    /// Plain reading, just before and after each repeat.
    pub(super) read_bandwidth: Spread,
    pub(super) bandwidth_share: Spread,
    pub(super) ffn_neurons_computed: f64,
    pub(super) contention: Contention,
}

/// A repeat: its seconds, and what was done in them.
pub(super) struct Repeat {
    pub(super) seconds: f64,
    pub(super) done: Statistics,
    pub(super) contention: Contention,
}

/// How to measure.
pub(super) struct Bench<'a> {
    pub(super) isa: Isa,
    pub(super) threads: usize,
    pub(super) repeats: usize,
    pub(super) probe: &'a ReadProbe,
    /// What goes through the model, as many as the longest work takes.
    pub(super) ids: &'a [u32],
    pub(super) progress: &'a dyn Progress,
}

impl Bench<'_> {
    /// Steps of progress that [`Self::measure`] makes.
    pub(super) fn steps(&self, work: Work) -> u64 {
        (self.repeats * work.tokens()) as u64
    }

    /// Repeats `work` and sums up.
    pub(super) fn measure(&self, model: &mut Runtime, work: Work) -> Result<Measured> {
        let mut repeats = Vec::new();
        let mut bandwidths = vec![self.read()];
        for _ in 0..self.repeats {
            repeats.push(match work {
                Work::Prompt { tokens } => self.prompt(model, tokens)?,
                Work::Decode { tokens, depth } => self.decode(model, tokens, depth)?,
                Work::Batch { .. } => unreachable!("batches have sequences of their own"),
            });
            bandwidths.push(self.read());
        }
        Ok(summary(work, &repeats, &bandwidths))
    }

    /// The usual of a few passes, for one alone may be held up.
    pub(super) fn read(&self) -> f64 {
        Spread::of(
            (0..3)
                .map(|_| self.probe.pass(self.isa, self.threads))
                .collect(),
        )
        .median
    }

    fn prompt(&self, model: &mut Runtime, tokens: usize) -> Result<Repeat> {
        model.reset();
        model.take_statistics();
        let before = CpuTimes::now();
        let started = Instant::now();
        model.start_clock();
        black_box(model.forward_last(&self.ids[..tokens])?);
        let seconds = started.elapsed().as_secs_f64();
        let contention = before.since(self.threads);
        self.progress.advance(tokens as u64)?;
        Ok(Repeat {
            seconds,
            done: model.take_statistics(),
            contention,
        })
    }

    fn decode(&self, model: &mut Runtime, tokens: usize, depth: usize) -> Result<Repeat> {
        model.reset();
        if depth > 0 {
            model.forward_last(&self.ids[..depth])?;
        }
        let mut sampler = Sampler::new(SamplingSettings::default())?;
        model.take_statistics();
        let before = CpuTimes::now();
        let mut seconds = 0.0;
        for id in &self.ids[depth..depth + tokens] {
            if interrupted() {
                return Err(Interrupted.into());
            }
            let started = Instant::now();
            model.start_clock();
            model.append(&[*id], &sampler)?;
            // Chosen as in generation; what goes on is the text given, the same for every policy.
            black_box(model.sample(&mut sampler, usize::MAX)?);
            model.mark(Stage::Sampling);
            seconds += started.elapsed().as_secs_f64();
            self.progress.advance(1)?;
        }
        Ok(Repeat {
            seconds,
            contention: before.since(self.threads),
            done: model.take_statistics(),
        })
    }
}

/// Sums up repeats of `work`; memory was probed before and after each.
pub(super) fn summary(work: Work, repeats: &[Repeat], bandwidths: &[f64]) -> Measured {
    let tokens = work.tokens() as f64;
    let of_all = |figure: &dyn Fn(usize, &Repeat) -> f64| {
        let repeats = repeats.iter().enumerate();
        Spread::of(
            repeats
                .map(|(index, repeat)| figure(index, repeat))
                .collect(),
        )
    };
    let lap = |repeat: &Repeat, stage| {
        let stages: Option<&StageTimes> = repeat.done.stages.as_ref();
        stages.map(|stages| stages.lap(stage)).unwrap_or_default()
    };
    let total = of_all(&|_, repeat| repeat.seconds / tokens * 1e6);
    let stages: Vec<StageCost> = Stage::ALL
        .into_iter()
        .map(|stage| {
            let microseconds =
                of_all(&|_, repeat| lap(repeat, stage).time.as_secs_f64() / tokens * 1e6);
            let bytes = of_all(&|_, repeat| lap(repeat, stage).bytes as f64 / tokens).median;
            StageCost {
                stage: stage.to_string(),
                bytes_per_second: bytes / (microseconds.median / 1e6).max(1e-12),
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
    let unaccounted = of_all(&|_, repeat| {
        let stages = repeat
            .done
            .stages
            .map_or(0.0, |stages| stages.total().as_secs_f64());
        (repeat.seconds - stages) / tokens * 1e6
    });
    let marks = repeats[0].done.stages.map_or(0, |stages| stages.marks());
    let beside = |index: usize| (bandwidths[index] + bandwidths[index + 1]) / 2.0;
    let speed = |repeat: &Repeat| repeat.done.bytes_read as f64 / repeat.seconds;
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
            total: bytes(None),
        },
        bytes_per_second: of_all(&|_, repeat| speed(repeat)),
        read_bandwidth: Spread::of(bandwidths.to_vec()),
        bandwidth_share: of_all(&|index, repeat| speed(repeat) / beside(index)),
        ffn_neurons_computed: repeats[0].done.computed_share(),
        contention: Contention::mean(&contention),
        microseconds_per_token: total,
        stages,
    }
}

/// The index of the figure in the middle, or of the one above it.
fn middle(figures: &[f64]) -> usize {
    let mut order: Vec<usize> = (0..figures.len()).collect();
    order.sort_by(|one, other| figures[*one].total_cmp(&figures[*other]));
    order[figures.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_the_middle_and_the_ends() {
        let odd = Spread::of(vec![3.0, 1.0, 2.0]);
        assert_eq!((odd.least, odd.median, odd.most), (1.0, 2.0, 3.0));
        assert_eq!(odd.repeats, [3.0, 1.0, 2.0]);
        assert_eq!(Spread::of(vec![4.0, 1.0]).median, 2.5);
        assert_eq!(Spread::of(vec![4.0]).median, 4.0);
        assert_eq!(middle(&[3.0, 1.0, 2.0]), 2);
        assert_eq!(middle(&[3.0, 1.0]), 0);
    }
}
