//! Several sequences decoded together: under the policy and with every neuron, side by side.

use std::{hint::black_box, time::Instant};

use anyhow::{Result, bail};
use powerinfer_artifact::{ByteSize, progress::Interrupted};
use powerinfer_bundle::memory::kv_bytes;
use powerinfer_model::LanguageModel;
use powerinfer_pool::system;
use powerinfer_runtime::{Runtime, Sampler, SamplingSettings, Sequence, Stage};
use serde::Serialize;

use super::measure::{Bench, Measured, Repeat, Work, summary};
use crate::{
    contention::CpuTimes,
    output::{Table, percent},
    progress::interrupted,
};

/// What decoding so many sequences at once took.
#[derive(Debug, Serialize)]
pub(super) struct BatchMeasured {
    /// Sequences that get a token in each pass.
    pub(super) sequences: usize,
    /// Of each sequence.
    pub(super) sequence_tokens_per_second: f64,
    /// Share of FFN neurons that any token of a pass had computed.
    pub(super) union_share: f64,
    /// Under the policy.
    pub(super) policy: Measured,
    /// With every neuron; none where the policy is that.
    pub(super) dense: Option<Measured>,
    /// What dense takes of the time, as a multiple.
    pub(super) times_dense: Option<f64>,
    /// All sequences together, as the plan predicted it at full context.
    pub(super) planned_tokens_per_second: Option<f64>,
}

/// The sequences, and what each of them is given.
pub(super) struct Batches<'a> {
    /// From the smallest to the largest.
    sizes: Vec<usize>,
    /// Tokens decoded of each, and tokens before them.
    tokens: usize,
    depth: usize,
    ids: &'a [u32],
    sequences: Vec<Sequence>,
}

impl<'a> Batches<'a> {
    /// Sequences for batches of `sizes`, whose tokens are pieces of `ids`. Fails where their KV caches
    /// do not fit the free memory.
    pub(super) fn new(
        model: &mut Runtime,
        mut sizes: Vec<usize>,
        (tokens, depth): (usize, usize),
        ids: &'a [u32],
    ) -> Result<Self> {
        sizes.sort_unstable();
        sizes.dedup();
        let most = sizes.last().copied().unwrap_or(0);
        check_room(model, most, tokens + depth)?;
        let mut batches = Self {
            sequences: model.new_sequences(most)?,
            sizes,
            tokens,
            depth,
            ids,
        };
        if depth > 0 {
            for index in 0..most {
                let beginning: Vec<u32> =
                    (0..depth).map(|place| batches.id(index, place)).collect();
                let own = std::mem::take(&mut batches.sequences[index]);
                let other = model.replace_sequence(own);
                let done = model.forward_last(&beginning);
                batches.sequences[index] = model.replace_sequence(other);
                done?;
            }
        }
        Ok(batches)
    }

    /// Steps of progress that [`Self::measure`] makes, of `models` models.
    pub(super) fn steps(&self, repeats: usize, models: usize) -> u64 {
        let sequences: usize = self.sizes.iter().sum();
        (sequences * self.tokens * repeats * models) as u64
    }

    /// Token `place` of sequence `sequence`: each begins elsewhere in the ids.
    fn id(&self, sequence: usize, place: usize) -> u32 {
        let start = sequence * self.ids.len() / self.sequences.len();
        self.ids[(start + place) % self.ids.len()]
    }

    /// The tokens at `place` of the first `count` sequences.
    fn ids_at(&self, count: usize, place: usize) -> Vec<u32> {
        (0..count).map(|index| self.id(index, place)).collect()
    }

    /// Compares the first tokens of every batch with those of its sequences decoded alone; returns how
    /// many were. Fails where they differ in a bit.
    pub(super) fn check(&mut self, model: &mut Runtime) -> Result<usize> {
        let most = self.sequences.len();
        let mut alone = Vec::new();
        for (index, id) in self.ids_at(most, self.depth).into_iter().enumerate() {
            if interrupted() {
                return Err(Interrupted.into());
            }
            let own = std::mem::take(&mut self.sequences[index]);
            let other = model.replace_sequence(own);
            let logits = model.forward_last(&[id]);
            self.sequences[index] = model.replace_sequence(other);
            self.sequences[index].truncate(self.depth);
            alone.extend(logits?);
        }
        let vocabulary = model.config().vocabulary_size;
        for size in self.sizes.clone() {
            let ids = self.ids_at(size, self.depth);
            let together = model.decode_batch(&mut self.sequences[..size], &ids)?;
            self.truncate();
            let pairs = together
                .chunks_exact(vocabulary)
                .zip(alone.chunks_exact(vocabulary));
            for (index, (together, alone)) in pairs.enumerate() {
                let differ = |(one, other): (&f32, &f32)| one.to_bits() != other.to_bits();
                if together.iter().zip(alone).any(differ) {
                    bail!(
                        "sequence {index} of a batch of {size} has other results than alone, so no speed is told"
                    );
                }
            }
        }
        Ok(self.sizes.iter().sum())
    }

    fn truncate(&mut self) {
        let depth = self.depth;
        self.sequences
            .iter_mut()
            .for_each(|sequence| sequence.truncate(depth));
    }

    /// Times batches of all sizes with `model`, and with `dense` in turn with it.
    pub(super) fn measure(
        &mut self,
        bench: &Bench<'_>,
        model: &mut Runtime,
        mut dense: Option<&mut Runtime>,
    ) -> Result<Vec<BatchMeasured>> {
        let mut all = Vec::new();
        for sequences in self.sizes.clone() {
            let (mut own, mut other) = (Vec::new(), Vec::new());
            let mut bandwidths = vec![bench.read()];
            for _ in 0..bench.repeats {
                own.push(self.decode(bench, model, sequences)?);
                if let Some(dense) = &mut dense {
                    other.push(self.decode(bench, dense, sequences)?);
                }
                bandwidths.push(bench.read());
            }
            let work = Work::Batch {
                sequences,
                tokens: self.tokens,
                depth: self.depth,
            };
            let policy = summary(work, &own, &bandwidths);
            let dense = (!other.is_empty()).then(|| summary(work, &other, &bandwidths));
            let speed = policy.tokens_per_second.median;
            let forecast = model.bundle().plan().forecast.as_ref();
            let planned = forecast.and_then(|forecast| {
                let mut speeds = forecast.decode.iter();
                speeds.find(|speed| speed.batch == sequences)
            });
            all.push(BatchMeasured {
                sequences,
                sequence_tokens_per_second: speed / sequences as f64,
                union_share: own[0].done.union_share(),
                times_dense: dense
                    .as_ref()
                    .map(|dense| speed / dense.tokens_per_second.median),
                planned_tokens_per_second: planned.map(|planned| planned.tokens_per_second),
                policy,
                dense,
            });
        }
        Ok(all)
    }

    fn decode(&mut self, bench: &Bench<'_>, model: &mut Runtime, count: usize) -> Result<Repeat> {
        self.truncate();
        let mut sampler = Sampler::new(SamplingSettings::default())?;
        let vocabulary = model.config().vocabulary_size;
        model.take_statistics();
        let before = CpuTimes::now();
        let mut seconds = 0.0;
        for place in self.depth..self.depth + self.tokens {
            if interrupted() {
                return Err(Interrupted.into());
            }
            let ids = self.ids_at(count, place);
            let started = Instant::now();
            model.start_clock();
            let logits = model.decode_batch(&mut self.sequences[..count], &ids)?;
            for logits in logits.chunks_exact(vocabulary) {
                black_box(sampler.sample(logits));
            }
            model.mark(Stage::Sampling);
            seconds += started.elapsed().as_secs_f64();
            bench.progress.advance(count as u64)?;
        }
        Ok(Repeat {
            seconds,
            contention: before.since(bench.threads),
            done: model.take_statistics(),
        })
    }
}

/// Fails where the KV caches of `sequences` sequences of `tokens` tokens do not fit what is free.
fn check_room(model: &Runtime, sequences: usize, tokens: usize) -> Result<()> {
    let config = model.config();
    let format = model.bundle().plan().budget.kv_cache;
    let each = kv_bytes(config, tokens as u64, format).saturating_mul(config.layer_count as u64);
    let needed = each.saturating_mul(sequences as u64);
    if let Some((_, free)) = system::memory().filter(|(_, free)| needed > *free) {
        bail!(
            "`--batch {sequences}` takes {} for the KV caches of {sequences} sequences of {tokens} tokens, and {} of memory are free; ask for smaller batches or fewer tokens, or place the bundle again with a smaller `--kv-cache`",
            ByteSize(needed),
            ByteSize(free)
        );
    }
    Ok(())
}

/// A line a batch.
pub(super) fn table(measured: &[BatchMeasured], figure: impl Fn(f64) -> String) -> Table {
    let mut headings = vec![
        "sequences",
        "tokens/s",
        "least–most",
        "each",
        "read a token",
        "neurons of a token",
        "of any",
        "of read bandwidth",
    ];
    let has_dense = measured.iter().any(|batch| batch.dense.is_some());
    let has_plan = measured
        .iter()
        .any(|batch| batch.planned_tokens_per_second.is_some());
    if has_dense {
        headings.extend(["dense", "least–most", "times dense"]);
    }
    if has_plan {
        headings.push("plan, full context");
    }
    let mut table = Table::new(&headings);
    for batch in measured {
        let found = &batch.policy;
        let range = |found: &Measured| {
            let speed = &found.tokens_per_second;
            format!("{}–{}", figure(speed.least), figure(speed.most))
        };
        let mut row = vec![
            batch.sequences.to_string(),
            figure(found.tokens_per_second.median),
            range(found),
            figure(batch.sequence_tokens_per_second),
            ByteSize(found.bytes_per_token.total as u64).to_string(),
            percent(found.ffn_neurons_computed),
            percent(batch.union_share),
            percent(found.bandwidth_share.median),
        ];
        if let (Some(dense), Some(times)) = (&batch.dense, batch.times_dense) {
            row.extend([
                figure(dense.tokens_per_second.median),
                range(dense),
                format!("{times:.2}"),
            ]);
        }
        if has_plan {
            let planned = batch.planned_tokens_per_second;
            row.push(planned.map_or_else(String::new, &figure));
        }
        table.row(row);
    }
    table
}
