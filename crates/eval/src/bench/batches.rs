//! Time of decoding several sequences together, under a policy and under `dense` in turn.

use powerinfer_artifact::Progress;
use powerinfer_runtime::{Engine, Session, Wanted, memory::kv_bytes};
use serde::Serialize;

use super::measure::{Bench, Measured, Work, summary};
use crate::{EvalError, timing::Timed};

/// Time of decoding a number of sequences together.
#[derive(Debug, Serialize)]
pub struct BatchMeasured {
    /// Sequences that get a token in each pass.
    pub sequences: usize,
    /// Throughput of each sequence.
    pub sequence_tokens_per_second: f64,
    /// Share of FFN neurons computed for at least one token of a pass.
    pub union_share: f64,
    /// Decoding under the policy.
    pub policy: Measured,
    /// Decoding under `dense`; none if that is the policy.
    pub dense: Option<Measured>,
    /// Throughput relative to dense's.
    pub times_dense: Option<f64>,
    /// Throughput of all sequences that the plan predicts at full context.
    pub planned_tokens_per_second: Option<f64>,
}

/// Sequences to decode together, with their token ids.
pub struct BatchBench<'a> {
    /// Batch sizes, ascending.
    sizes: Vec<usize>,
    /// Tokens decoded of each sequence.
    tokens: usize,
    /// Tokens in each context before them.
    depth: usize,
    ids: &'a [u32],
    sessions: Vec<Session>,
}

impl<'a> BatchBench<'a> {
    /// Sequences for batches of `sizes`, of `tokens` tokens after `depth` others, which are spans of `ids`.
    ///
    /// # Errors
    ///
    /// Fails if the model does.
    pub fn new(
        model: &mut Engine,
        mut sizes: Vec<usize>,
        (tokens, depth): (usize, usize),
        ids: &'a [u32],
    ) -> Result<Self, EvalError> {
        sizes.sort_unstable();
        sizes.dedup();
        let most = sizes.last().copied().unwrap_or(0);
        let mut bench = Self {
            sessions: (0..most)
                .map(|_| model.new_session(depth + tokens))
                .collect::<Result<_, _>>()?,
            sizes,
            tokens,
            depth,
            ids,
        };
        if depth > 0 {
            for index in 0..most {
                let beginning: Vec<u32> = (0..depth).map(|place| bench.id(index, place)).collect();
                model.prefill(&mut bench.sessions[index], &beginning, Wanted::None)?;
            }
        }
        Ok(bench)
    }

    /// Steps of progress of [`Self::measure`] with `models` models.
    pub fn steps(&self, repeats: usize, models: usize) -> u64 {
        let sequences: usize = self.sizes.iter().sum();
        (sequences * self.tokens * repeats * models) as u64
    }

    /// Token `place` of sequence `sequence`: each begins at another place of the ids.
    fn id(&self, sequence: usize, place: usize) -> u32 {
        let start = sequence * self.ids.len() / self.sessions.len();
        self.ids[(start + place) % self.ids.len()]
    }

    /// Tokens at `place` of the first `count` sequences.
    fn ids_at(&self, count: usize, place: usize) -> Vec<u32> {
        (0..count).map(|index| self.id(index, place)).collect()
    }

    /// Compares logits of every batch's first tokens with those of its sequences alone; returns the number compared.
    ///
    /// # Errors
    ///
    /// Fails with [`EvalError::BatchDiffers`] if a bit differs, and if the model fails.
    pub fn check(
        &mut self,
        model: &mut Engine,
        progress: &dyn Progress,
    ) -> Result<usize, EvalError> {
        let most = self.sessions.len();
        let mut alone = Vec::new();
        for (index, id) in self.ids_at(most, self.depth).into_iter().enumerate() {
            progress.advance(0)?;
            let logits = model.prefill(&mut self.sessions[index], &[id], Wanted::Last)?;
            alone.extend_from_slice(logits);
            self.sessions[index].truncate(self.depth);
        }
        let vocabulary = model.bundle().config().vocabulary_size;
        for size in self.sizes.clone() {
            let ids = self.ids_at(size, self.depth);
            let mut batch: Vec<_> = self.sessions.iter_mut().zip(ids).collect();
            let together = model.decode(&mut batch)?;
            let pairs = together
                .chunks_exact(vocabulary)
                .zip(alone.chunks_exact(vocabulary));
            for (index, (together, alone)) in pairs.enumerate() {
                let differ = |(one, other): (&f32, &f32)| one.to_bits() != other.to_bits();
                if together.iter().zip(alone).any(differ) {
                    return Err(EvalError::BatchDiffers {
                        sequence: index,
                        batch: size,
                    });
                }
            }
            self.truncate();
        }
        Ok(self.sizes.iter().sum())
    }

    fn truncate(&mut self) {
        let depth = self.depth;
        self.sessions
            .iter_mut()
            .for_each(|session| session.truncate(depth));
    }

    /// Times batches of all sizes with `model`, in turn with `dense`.
    ///
    /// # Errors
    ///
    /// Fails if a model does, or if the user asks to stop.
    pub fn measure(
        &mut self,
        bench: &Bench<'_>,
        model: &mut Engine,
        mut dense: Option<&mut Engine>,
    ) -> Result<Vec<BatchMeasured>, EvalError> {
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
                union_share: own[0].statistics.union_share(),
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

    fn decode(
        &mut self,
        bench: &Bench<'_>,
        model: &mut Engine,
        count: usize,
    ) -> Result<Timed, EvalError> {
        self.truncate();
        let places = self.depth..self.depth + self.tokens;
        let ids = |index| places.clone().map(|place| self.id(index, place)).collect();
        let ids: Vec<Vec<u32>> = (0..count).map(ids).collect();
        bench
            .timer()
            .decode(model, &mut self.sessions[..count], &ids)
    }
}

/// Bytes of the KV caches of `sequences` sequences of `tokens` tokens each.
pub fn kv_cache_bytes(model: &Engine, sequences: usize, tokens: usize) -> u64 {
    let config = model.bundle().config();
    let format = model.bundle().plan().budget.kv_cache;
    let each = kv_bytes(config, tokens as u64, format).saturating_mul(config.layer_count as u64);
    each.saturating_mul(sequences as u64)
}
