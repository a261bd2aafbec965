//! Latency and throughput of a policy setting on this machine.

use std::slice::from_mut;

use powerinfer_artifact::Progress;
use powerinfer_kernels::Isa;
use powerinfer_runtime::{ReadProbe, SingleSession, Stage, Statistics};

use super::{Latency, MeasuredSpeed, Range};
use crate::{Contention, CpuTimes, EvalError, timing::Timer};

/// Sequences that run together, and their tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShape {
    /// Number of sequences.
    pub batch: usize,
    /// Tokens of each prompt.
    pub prompt_tokens: usize,
    /// Tokens decoded of each sequence.
    pub decode_tokens: usize,
}

impl BatchShape {
    /// Tokens of a sequence, prompt and decoded ones.
    pub fn context(self) -> usize {
        self.prompt_tokens + self.decode_tokens
    }
}

/// Settings of time measurements.
pub(super) struct SpeedMeter<'a> {
    pub(super) isa: Isa,
    pub(super) threads: usize,
    pub(super) repeats: usize,
    pub(super) probe: &'a ReadProbe,
    /// Token ids of prompts, at least one.
    pub(super) ids: &'a [u32],
    pub(super) progress: &'a dyn Progress,
}

/// Cost of prediction in a decode step.
#[derive(Debug, Clone, Copy)]
pub(super) struct PredictionCost {
    pub(super) bytes_per_token: f64,
    pub(super) bytes_share: f64,
    pub(super) time_share: f64,
}

impl SpeedMeter<'_> {
    /// Steps of progress of [`Self::measure`].
    pub(super) fn steps(&self, shape: BatchShape) -> u64 {
        (self.repeats * shape.batch * shape.context()) as u64
    }

    /// Times prefill and decoding of `model`.
    pub(super) fn measure(
        &self,
        model: &mut SingleSession,
        shape: BatchShape,
    ) -> Result<(MeasuredSpeed, PredictionCost), EvalError> {
        let BatchShape {
            batch,
            prompt_tokens,
            decode_tokens,
        } = shape;
        // Each sequence begins at another place of the text, which wraps around.
        let begin = |sequence: usize| sequence * self.ids.len() / batch;
        let ids: Vec<Vec<u32>> = (0..batch)
            .map(|sequence| {
                let text = self.ids.iter().cycle().skip(begin(sequence));
                text.copied().take(shape.context()).collect()
            })
            .collect();
        let SingleSession { engine, session } = model;
        let mut several = Vec::new();
        if batch > 1 {
            let new = |_| engine.new_session(shape.context());
            several = (0..batch).map(new).collect::<Result<_, _>>()?;
        }
        let sessions = if batch > 1 {
            &mut several[..]
        } else {
            from_mut(session)
        };
        let decoded: Vec<Vec<u32>> = ids
            .iter()
            .map(|ids| ids[prompt_tokens..].to_vec())
            .collect();
        let timer = Timer {
            threads: self.threads,
            progress: self.progress,
        };
        let (mut first, mut steps, mut speeds) = (Vec::new(), Vec::new(), Vec::new());
        let (mut shares, mut bandwidths) = (Vec::new(), vec![self.read()]);
        let mut spans = Vec::new();
        let mut statistics = Statistics::default();
        let (mut predictor_bytes, mut predictor_seconds, mut seconds_of_all) = (0u64, 0.0, 0.0);
        for _ in 0..self.repeats {
            let before = CpuTimes::now();
            for (session, ids) in sessions.iter_mut().zip(&ids) {
                let prompt = timer.prefill(engine, session, &ids[..prompt_tokens])?;
                first.push(1e3 * prompt.seconds);
            }
            let timed = timer.decode(engine, sessions, &decoded)?;
            steps.extend(timed.passes.iter().map(|seconds| 1e6 * seconds));
            let (taken, seconds) = (timed.statistics, timed.seconds);
            let lap = taken
                .stages
                .as_ref()
                .map(|stages| stages.lap(Stage::Prediction));
            let lap = lap.unwrap_or_default();
            predictor_bytes += lap.bytes;
            predictor_seconds += lap.time.as_secs_f64();
            seconds_of_all += seconds;
            speeds.push((batch * decode_tokens) as f64 / seconds);
            bandwidths.push(self.read());
            let around =
                (bandwidths[bandwidths.len() - 2] + bandwidths[bandwidths.len() - 1]) / 2.0;
            shares.push(taken.bytes_read as f64 / seconds / around);
            statistics += taken;
            spans.push(before.since(self.threads));
        }
        let bytes_of_all = statistics.all_bytes_read() as f64;
        let prediction = PredictionCost {
            bytes_per_token: predictor_bytes as f64 / statistics.tokens.max(1) as f64,
            bytes_share: predictor_bytes as f64 / bytes_of_all.max(1.0),
            time_share: predictor_seconds / seconds_of_all,
        };
        let measured = MeasuredSpeed {
            device: "cpu".to_owned(),
            placement_ran: false,
            emulated: false,
            threads: self.threads,
            repeats: self.repeats,
            prompt_tokens,
            first_token_milliseconds: Range::from_values(first),
            decode_microseconds: Latency::from_steps(steps),
            tokens_per_second: Range::from_values(speeds),
            bytes_per_token: statistics.bytes_per_token(),
            read_bandwidth_bytes_per_second: Range::from_values(bandwidths).median,
            bandwidth_share: Range::from_values(shares).median,
            predicted_microseconds: None,
            measured_over_predicted: None,
            disturbed: Contention::mean(&spans).is_disturbed(),
        };
        Ok((measured, prediction))
    }

    fn read(&self) -> f64 {
        self.probe.stream(self.isa, self.threads)
    }
}
