//! How fast a level runs here.

use std::{hint::black_box, time::Instant};

use anyhow::Result;
use powerinfer_artifact::Progress;
use powerinfer_kernels::Isa;
use powerinfer_model::LanguageModel;
use powerinfer_runtime::{ReadProbe, Runtime, Sampler, SamplingSettings, Stage, Statistics};

use super::{
    placing::Extent,
    rows::{Latency, Measured, Spread},
};
use crate::{
    contention::{Contention, CpuTimes},
    progress::Bar,
};

/// How to measure.
pub(crate) struct Clock<'a> {
    pub(crate) isa: Isa,
    pub(crate) threads: usize,
    pub(crate) repeats: usize,
    pub(crate) probe: &'a ReadProbe,
    /// Text to read; at least a token.
    pub(crate) ids: &'a [u32],
    pub(crate) bar: &'a Bar,
}

/// What a step of decoding spends on prediction neurons.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prediction {
    pub(crate) bytes_per_token: f64,
    pub(crate) bytes_share: f64,
    pub(crate) time_share: f64,
}

impl Clock<'_> {
    /// Steps of progress that measuring takes.
    pub(crate) fn steps(&self, extent: Extent) -> u64 {
        (self.repeats * extent.batch * extent.context()) as u64
    }

    /// Times `model` reading prompts and decoding after them.
    pub(crate) fn measure(
        &self,
        model: &mut Runtime,
        extent: Extent,
    ) -> Result<(Measured, Prediction)> {
        let Extent {
            batch,
            prompt_tokens,
            decode_tokens,
        } = extent;
        // Each sequence begins elsewhere in the text, and the text begins anew where it ends.
        let begin = |sequence: usize| sequence * self.ids.len() / batch;
        let ids: Vec<Vec<u32>> = (0..batch)
            .map(|sequence| {
                let text = self.ids.iter().cycle().skip(begin(sequence));
                text.copied().take(extent.context()).collect()
            })
            .collect();
        let mut sampler = Sampler::new(SamplingSettings::default())?;
        let mut sequences = match batch {
            1 => Vec::new(),
            _ => model.new_sequences(batch)?,
        };
        let (mut first, mut steps, mut speeds) = (Vec::new(), Vec::new(), Vec::new());
        let (mut shares, mut bandwidths) = (Vec::new(), vec![self.read()]);
        let mut spans = Vec::new();
        let mut done = Statistics::default();
        let (mut predictor_bytes, mut predictor_seconds, mut seconds_of_all) = (0u64, 0.0, 0.0);
        for _ in 0..self.repeats {
            let before = CpuTimes::now();
            for (index, ids) in ids.iter().enumerate() {
                let other = (batch > 1).then(|| {
                    let mut own = std::mem::take(&mut sequences[index]);
                    own.truncate(0);
                    model.replace_sequence(own)
                });
                if batch == 1 {
                    model.reset();
                }
                let started = Instant::now();
                model.append(&ids[..prompt_tokens], &sampler)?;
                black_box(model.sample(&mut sampler, usize::MAX)?);
                first.push(1e3 * started.elapsed().as_secs_f64());
                if let Some(other) = other {
                    sequences[index] = model.replace_sequence(other);
                }
                self.bar.advance(prompt_tokens as u64)?;
            }
            model.take_statistics();
            let mut seconds = 0.0;
            for place in prompt_tokens..extent.context() {
                let next: Vec<u32> = ids.iter().map(|ids| ids[place]).collect();
                let started = Instant::now();
                model.start_clock();
                if batch == 1 {
                    model.append(&next, &sampler)?;
                    black_box(model.sample(&mut sampler, usize::MAX)?);
                } else {
                    black_box(model.decode_batch(&mut sequences, &next)?);
                }
                model.mark(Stage::Sampling);
                let step = started.elapsed().as_secs_f64();
                steps.push(1e6 * step);
                seconds += step;
                self.bar.advance(batch as u64)?;
            }
            let taken = model.take_statistics();
            let lap = taken.stages.map(|stages| stages.lap(Stage::Prediction));
            let lap = lap.unwrap_or_default();
            predictor_bytes += lap.bytes;
            predictor_seconds += lap.time.as_secs_f64();
            seconds_of_all += seconds;
            speeds.push((batch * decode_tokens) as f64 / seconds);
            bandwidths.push(self.read());
            let beside =
                (bandwidths[bandwidths.len() - 2] + bandwidths[bandwidths.len() - 1]) / 2.0;
            shares.push(taken.bytes_read as f64 / seconds / beside);
            done += taken;
            spans.push(before.since(self.threads));
        }
        let bytes_of_all = done.bytes_read as f64;
        let prediction = Prediction {
            bytes_per_token: predictor_bytes as f64 / done.tokens.max(1) as f64,
            bytes_share: predictor_bytes as f64 / bytes_of_all.max(1.0),
            time_share: predictor_seconds / seconds_of_all,
        };
        let measured = Measured {
            device: "cpu".to_owned(),
            placement_ran: false,
            emulated: false,
            threads: self.threads,
            repeats: self.repeats,
            prompt_tokens,
            first_token_milliseconds: Spread::of(first),
            decode_microseconds: Latency::of(steps),
            tokens_per_second: Spread::of(speeds),
            bytes_per_token: done.bytes_per_token(),
            read_bandwidth_bytes_per_second: Spread::of(bandwidths).median,
            bandwidth_share: Spread::of(shares).median,
            predicted_microseconds: None,
            measured_over_predicted: None,
            disturbed: Contention::mean(&spans).is_disturbed(),
        };
        model.reset();
        Ok((measured, prediction))
    }

    fn read(&self) -> f64 {
        self.probe.pass(self.isa, self.threads)
    }
}
