//! Times given tokens: the measuring core of benchmarks and sweeps.

use std::{hint::black_box, time::Instant};

use powerinfer_artifact::Progress;
use powerinfer_runtime::{
    Engine, Generation, Sampler, Session, Statistics, StopConditions, Text, Wanted,
};

use crate::{Contention, CpuTimes, EvalError};

/// Time and statistics of running a prompt, or of decoding tokens.
pub(crate) struct Timed {
    pub(crate) seconds: f64,
    /// Seconds of each decoding pass.
    pub(crate) passes: Vec<f64>,
    pub(crate) statistics: Statistics,
    pub(crate) contention: Contention,
}

/// Settings of a measurement.
#[derive(Clone, Copy)]
pub(crate) struct Timer<'a> {
    /// CPU threads of the model.
    pub(crate) threads: usize,
    /// Progress, one step per token.
    pub(crate) progress: &'a dyn Progress,
}

impl Timer<'_> {
    /// Times the prompt `ids` in an empty `session`.
    pub(crate) fn prefill(
        self,
        engine: &mut Engine,
        session: &mut Session,
        ids: &[u32],
    ) -> Result<Timed, EvalError> {
        session.truncate(0);
        engine.observers_mut().take_statistics();
        let before = CpuTimes::now();
        let started = Instant::now();
        engine.observers_mut().start_clock();
        black_box(engine.prefill(session, ids, Wanted::Last)?);
        let seconds = started.elapsed().as_secs_f64();
        let contention = before.since(self.threads);
        self.progress.advance(ids.len() as u64)?;
        Ok(Timed {
            seconds,
            passes: Vec::new(),
            statistics: engine.observers_mut().take_statistics(),
            contention,
        })
    }

    /// Times the decoding of `ids`, the same number for each of `sessions`, in passes of one token of each. Tokens are
    /// sampled as in generation, but the given ids replace them, so that every policy decodes the same text.
    pub(crate) fn decode(
        self,
        engine: &mut Engine,
        sessions: &mut [Session],
        ids: &[Vec<u32>],
    ) -> Result<Timed, EvalError> {
        let mut texts: Vec<Text> = ids.iter().map(|ids| given(ids)).collect();
        let (count, passes) = (texts.len(), ids.first().map_or(0, Vec::len));
        let running = sessions.iter_mut().zip(&mut texts).collect();
        engine.observers_mut().take_statistics();
        let mut generation = Generation::resume(engine, running, || false);
        let before = CpuTimes::now();
        let mut times = Vec::with_capacity(passes);
        for _ in 0..passes {
            self.progress.advance(0)?;
            let started = Instant::now();
            generation.passes().observers_mut().start_clock();
            for _ in 0..count {
                black_box(generation.next().transpose()?);
            }
            times.push(started.elapsed().as_secs_f64());
            self.progress.advance(count as u64)?;
        }
        Ok(Timed {
            seconds: times.iter().sum(),
            passes: times,
            contention: before.since(self.threads),
            statistics: engine.observers_mut().take_statistics(),
        })
    }
}

/// A text that decodes `ids`.
fn given(ids: &[u32]) -> Text {
    let stop = StopConditions {
        max_tokens: ids.len(),
        stop_tokens: [].into(),
        vocabulary: usize::MAX,
    };
    let text = Text::new(Sampler::greedy(), stop);
    match ids {
        [] => text,
        [first, rest @ ..] => text.with_pending(*first).with_given(rest.to_vec()),
    }
}
