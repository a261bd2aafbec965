//! Contention for the processor while something is timed.

use std::{
    fs,
    time::{Duration, Instant},
};

use serde::Serialize;

/// Share of the time from which on a measurement counts as disturbed.
const DISTURBED: f64 = 0.03;

/// Processor time used up to a moment.
#[derive(Debug, Clone, Copy)]
pub struct CpuTimes {
    at: Instant,
    /// Time that all threads of this process ran, and time that they were ready but waited for a processor.
    process: Option<(Duration, Duration)>,
    /// Stolen ticks and all ticks of the machine.
    machine: Option<(u64, u64)>,
}

/// Use of the processor between two moments, in shares of the time; `None` if the system does not report it.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Contention {
    /// Length of the span in seconds.
    pub seconds: f64,
    /// Share of `seconds` × threads that this process ran.
    pub ran: Option<f64>,
    /// Share of `seconds` × threads that its threads waited for a processor.
    pub waited: Option<f64>,
    /// Share of the machine's time that its host gave to other machines (steal time).
    pub stolen: Option<f64>,
}

impl CpuTimes {
    /// Times up to now.
    pub fn now() -> Self {
        Self {
            at: Instant::now(),
            process: process_times(),
            machine: fs::read_to_string("/proc/stat")
                .ok()
                .and_then(|text| machine_ticks(&text)),
        }
    }

    /// Contention since then, for a process that computes on `threads` threads.
    pub fn since(self, threads: usize) -> Contention {
        let now = Self::now();
        let seconds = (now.at - self.at).as_secs_f64();
        let share = |before: Duration, after: Duration| {
            after.saturating_sub(before).as_secs_f64() / (seconds.max(1e-9) * threads.max(1) as f64)
        };
        let process = self.process.zip(now.process);
        Contention {
            seconds,
            ran: process.map(|(before, after)| share(before.0, after.0)),
            waited: process.map(|(before, after)| share(before.1, after.1)),
            stolen: self.machine.zip(now.machine).map(|(before, after)| {
                let ticks = after.1.saturating_sub(before.1).max(1);
                after.0.saturating_sub(before.0) as f64 / ticks as f64
            }),
        }
    }
}

impl Contention {
    /// Mean over several spans, weighted by their lengths.
    pub fn mean(spans: &[Self]) -> Self {
        let seconds: f64 = spans.iter().map(|span| span.seconds).sum();
        let mean = |share: fn(&Self) -> Option<f64>| {
            let parts = spans
                .iter()
                .map(|span| share(span).map(|share| share * span.seconds));
            let sum: Option<f64> = parts.sum();
            sum.map(|sum| sum / seconds.max(1e-9))
        };
        Self {
            seconds,
            ran: mean(|span| span.ran),
            waited: mean(|span| span.waited),
            stolen: mean(|span| span.stolen),
        }
    }

    /// Whether other processes or machines took enough processor time to distort measured times.
    pub fn is_disturbed(self) -> bool {
        [self.waited, self.stolen]
            .into_iter()
            .flatten()
            .any(|share| share > DISTURBED)
    }
}

/// Time that the threads of this process ran and waited, in nanoseconds.
fn process_times() -> Option<(Duration, Duration)> {
    let (mut ran, mut waited) = (0, 0);
    for task in fs::read_dir("/proc/self/task").ok()? {
        // A thread may end in between.
        let Ok(text) = fs::read_to_string(task.ok()?.path().join("schedstat")) else {
            continue;
        };
        let mut words = text.split_whitespace();
        ran += words.next()?.parse::<u64>().ok()?;
        waited += words.next()?.parse::<u64>().ok()?;
    }
    Some((Duration::from_nanos(ran), Duration::from_nanos(waited)))
}

/// Stolen ticks and all ticks of the `cpu` line of `/proc/stat`.
fn machine_ticks(text: &str) -> Option<(u64, u64)> {
    let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> = line
        .split_whitespace()
        .map_while(|word| word.parse().ok())
        .collect();
    // Guest time, after the eighth field, is counted in user time already.
    Some((*ticks.get(7)?, ticks[..8].iter().sum()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stolen_ticks_are_the_eighth_field() {
        let text = "cpu  10 20 30 40 50 60 70 80 90 100\ncpu0 1 2 3 4 5 6 7 8 9 10\n";
        assert_eq!(machine_ticks(text), Some((80, 360)));
        assert_eq!(machine_ticks("cpu  1 2 3\n"), None);
    }

    #[test]
    fn shares_are_averaged_by_time_and_compared_with_the_limit() {
        let span = |seconds, waited| Contention {
            seconds,
            ran: Some(1.0),
            waited: Some(waited),
            stolen: None,
        };
        let mean = Contention::mean(&[span(1.0, 0.0), span(3.0, 0.2)]);
        assert!((mean.waited.unwrap() - 0.15).abs() < 1e-12);
        assert!(mean.is_disturbed() && mean.stolen.is_none());
        assert!(!span(1.0, 0.0).is_disturbed());
        let found = CpuTimes::now().since(1);
        assert!(found.ran.is_none_or(|share| share >= 0.0));
    }
}
