//! Estimated time of a decoded token on more threads than the machine has: all parts of its jobs are run and timed one after the
//! other, then assigned to threads in order.

use std::{collections::VecDeque, time::Duration};

use powerinfer_runtime::{RecordedToken, SingleSession, Stage, Wanted};
use serde::Serialize;

use super::Bench;
use crate::EvalError;

/// Times of the stages of a decoded token whose work threads share.
#[derive(Debug, Serialize)]
pub struct PartTimes {
    /// Number of threads that share the token's work.
    pub threads: usize,
    /// The stages that take time.
    pub stages: Vec<StageParts>,
}

/// Times per token of one stage.
#[derive(Debug, Clone, Serialize)]
pub struct StageParts {
    /// Name of the stage.
    pub stage: String,
    /// Number of jobs.
    pub jobs: usize,
    /// Microseconds between jobs, when a single thread works.
    pub serial_microseconds: f64,
    /// Microseconds of all parts, on one thread.
    pub part_microseconds: f64,
    /// Microseconds until the last part ends, if threads take parts in order; excludes starting the job and waiting for it.
    pub makespan_microseconds: f64,
    /// Bytes read.
    pub bytes: f64,
}

impl StageParts {
    /// Time of the slowest of `threads` threads divided by the mean; 1 if there are no parts.
    pub fn imbalance(&self, threads: usize) -> f64 {
        if self.part_microseconds == 0.0 {
            1.0
        } else {
            self.makespan_microseconds * threads as f64 / self.part_microseconds
        }
    }

    /// Microseconds of the stage, if starting threads for a job and waiting for them takes `start` microseconds.
    pub fn microseconds(&self, start: f64) -> f64 {
        self.serial_microseconds + self.makespan_microseconds + self.jobs as f64 * start
    }
}

/// Measures, on one thread, the parts that decoding would have on `threads` threads. Returns medians over `tokens`
/// tokens after a context of `depth` tokens. From then on, `model` computes on one thread.
///
/// # Errors
///
/// Fails if the model does, or if the user asks to stop.
///
/// # Panics
///
/// Panics if a part of the model is on a device, or `bench` has fewer than `depth + tokens` ids.
pub fn time_parts(
    bench: &Bench<'_>,
    model: &mut SingleSession,
    (tokens, depth): (usize, usize),
    threads: usize,
) -> Result<PartTimes, EvalError> {
    let SingleSession { engine, session } = model;
    session.truncate(0);
    engine.experiments().record_parts(threads);
    if depth > 0 {
        engine.prefill(session, &bench.ids[..depth], Wanted::None)?;
    }
    let mut found = vec![Vec::new(); Stage::ALL.len()];
    for token in &bench.ids[depth..depth + tokens] {
        bench.progress.advance(1)?;
        let recorded = engine.experiments().decode_parts(session, *token)?;
        for (found, token) in found.iter_mut().zip(by_stage(recorded, threads)) {
            found.push(token);
        }
    }
    let stages = Stage::ALL.into_iter().zip(found);
    let stages = stages.map(|(stage, tokens)| median(stage, &tokens));
    let takes_time = |stage: &StageParts| stage.microseconds(0.0) > 0.0;
    Ok(PartTimes {
        threads,
        stages: stages.filter(takes_time).collect(),
    })
}

/// Sums over the jobs of one stage in a token.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Sums {
    jobs: usize,
    serial: Duration,
    parts: Duration,
    makespan: Duration,
    bytes: u64,
}

/// The sums of each stage of `token`, indexed by stage.
fn by_stage(token: RecordedToken, threads: usize) -> [Sums; Stage::ALL.len()] {
    let mut sums = [Sums::default(); Stage::ALL.len()];
    let mut jobs = VecDeque::from(token.jobs);
    let mut before = token.started;
    for mark in token.marks {
        let sum = &mut sums[mark.stage as usize];
        let mut in_jobs = Duration::ZERO;
        while let Some(job) = jobs.pop_front_if(|job| job.started < mark.ended) {
            sum.jobs += 1;
            in_jobs += job.total();
            sum.makespan += job.makespan(threads);
        }
        sum.parts += in_jobs;
        sum.serial += mark.ended.duration_since(before).saturating_sub(in_jobs);
        sum.bytes += mark.bytes;
        before = mark.ended;
    }
    sums
}

/// The medians of a stage over `tokens`.
fn median(stage: Stage, tokens: &[Sums]) -> StageParts {
    let of = |figure: &dyn Fn(&Sums) -> f64| {
        let mut figures: Vec<f64> = tokens.iter().map(figure).collect();
        figures.sort_unstable_by(f64::total_cmp);
        figures.get(figures.len() / 2).copied().unwrap_or_default()
    };
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    StageParts {
        stage: stage.to_string(),
        jobs: of(&|sums| sums.jobs as f64) as usize,
        serial_microseconds: of(&|sums| micros(sums.serial)),
        part_microseconds: of(&|sums| micros(sums.parts)),
        makespan_microseconds: of(&|sums| micros(sums.makespan)),
        bytes: of(&|sums| sums.bytes as f64),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use powerinfer_runtime::{RecordedJob, StageMark};

    use super::*;

    #[test]
    fn jobs_and_the_time_between_them_belong_to_the_stage_that_ends_next() {
        let started = Instant::now();
        let at = |micros| started + Duration::from_micros(micros);
        let job = |start, parts: &[u64]| RecordedJob {
            started: at(start),
            stages: vec![
                parts
                    .iter()
                    .map(|part| Duration::from_micros(*part))
                    .collect(),
            ],
        };
        let mark = |end, stage| StageMark {
            stage,
            ended: at(end),
            bytes: 7,
        };
        let token = RecordedToken {
            started,
            marks: vec![
                mark(10, Stage::Norms),
                mark(100, Stage::Down),
                mark(130, Stage::Norms),
            ],
            jobs: vec![job(20, &[30, 20]), job(80, &[10, 5])],
        };
        let sums = by_stage(token, 2);
        let micros = Duration::from_micros;
        let down = Sums {
            jobs: 2,
            serial: micros(25),
            parts: micros(65),
            makespan: micros(40),
            bytes: 7,
        };
        assert_eq!(sums[Stage::Down as usize], down);
        assert_eq!(sums[Stage::Norms as usize].serial, micros(40));
        assert_eq!(sums[Stage::Norms as usize].bytes, 14);
        let found = median(Stage::Down, &[down]);
        assert!((found.imbalance(2) - 80.0 / 65.0).abs() < 1e-9);
        assert!((found.microseconds(5.0) - 75.0).abs() < 1e-9);
    }
}
