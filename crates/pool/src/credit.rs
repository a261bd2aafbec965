//! Decision whether to share jobs: recent time saved by sharing, minus its cost.
//!
//! Under contention a thread may be preempted for milliseconds within a part. Sharing may cost as much as it
//! has saved; beyond that, jobs run on their callers alone until a small share of their time has repaid the
//! cost. So a pool is hardly ever slower than one thread, and is not limited if its threads run
//! undisturbed.

use std::{
    sync::atomic::{AtomicI64, AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

/// Maximum credit, so that a change is noticed soon.
const MAX_CREDIT: Duration = Duration::from_millis(10);
/// Maximum debt, so that one long interruption is soon repaid.
const MAX_DEBT: Duration = Duration::from_millis(20);
/// Divisor of the time spent alone that repays debt, which bounds the overhead of trying to share; it doubles
/// whenever sharing fails again before the credit was full.
const REPAYMENT_DIVISORS: [u32; 4] = [16, 32, 64, 128];
/// Time in parts that is averaged to estimate the slowdown by preemption.
const AVERAGED_TIME: Duration = Duration::from_millis(200);
/// Maximum slowdown attributed to preemption; a larger one has other causes.
const MAX_SLOWDOWN: f64 = 2.0;

/// Balance of sharing in nanoseconds. Modified only by the caller that uses the pool.
pub(crate) struct Credit {
    saved: AtomicI64,
    /// Number of consecutive failures of sharing, an index into [`REPAYMENT_DIVISORS`] plus one.
    failures: AtomicUsize,
    /// Recent time of the caller's parts.
    part_time: AtomicI64,
    /// The same if each part had taken as long as the fastest of its job.
    min_part_time: AtomicI64,
}

/// Work that a thread did in one stage of a shared job. The parts of a stage are alike.
#[derive(Default)]
pub(crate) struct ThreadWork {
    /// Number of parts.
    pub(crate) parts: usize,
    /// Their total time, excluding waits for other stages.
    pub(crate) time: Duration,
    /// Time of the fastest part.
    pub(crate) min_time: Duration,
}

impl Credit {
    /// Creates a full credit.
    pub(crate) fn new() -> Self {
        Self {
            saved: AtomicI64::new(nanoseconds(MAX_CREDIT)),
            failures: AtomicUsize::new(0),
            part_time: AtomicI64::new(0),
            min_part_time: AtomicI64::new(0),
        }
    }

    /// Returns whether jobs are to be shared.
    pub(crate) fn allows_sharing(&self) -> bool {
        self.saved.load(Relaxed) >= 0
    }

    /// Records a shared job that took `elapsed`: per stage, the caller's work and the number of parts that other threads did.
    pub(crate) fn record_shared(&self, stages: &[(ThreadWork, usize)], elapsed: Duration) {
        let own_time: Duration = stages.iter().map(|(own, _)| own.time).sum();
        let mut part_time = self.part_time.load(Relaxed) + nanoseconds(own_time);
        let mut all_least = self.min_part_time.load(Relaxed);
        let mut saved = 0.0;
        for (own, others) in stages {
            let least = nanoseconds(own.min_time);
            all_least += least * own.parts as i64;
            saved += least as f64 * *others as f64;
        }
        if part_time > nanoseconds(AVERAGED_TIME) {
            (part_time, all_least) = (part_time / 2, all_least / 2);
        }
        self.part_time.store(part_time, Relaxed);
        self.min_part_time.store(all_least, Relaxed);
        // Alone, the caller would have been preempted in the other parts as often as in its own.
        let slowdown = (part_time as f64 / all_least.max(1) as f64).min(MAX_SLOWDOWN);
        let lost = nanoseconds(elapsed.saturating_sub(own_time));
        let failures = match self.add((saved * slowdown) as i64 - lost) {
            credit if credit >= nanoseconds(MAX_CREDIT) => 0,
            0.. => return,
            _ => (self.failures.load(Relaxed) + 1).min(REPAYMENT_DIVISORS.len()),
        };
        self.failures.store(failures, Relaxed);
    }

    /// Records a job that its caller did alone in `elapsed`.
    pub(crate) fn record_alone(&self, elapsed: Duration) {
        let failures = self.failures.load(Relaxed).max(1) - 1;
        self.add(nanoseconds(elapsed / REPAYMENT_DIVISORS[failures]));
    }

    /// Adds to the credit and returns it.
    fn add(&self, gain: i64) -> i64 {
        let credit = self.saved.load(Relaxed).saturating_add(gain);
        let credit = credit.clamp(-nanoseconds(MAX_DEBT), nanoseconds(MAX_CREDIT));
        self.saved.store(credit, Relaxed);
        credit
    }
}

fn nanoseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: Duration = Duration::from_micros(100);

    /// Share of the time lost if every shared job loses `lost` after saving `saved`.
    fn loss(saved: Duration, lost: Duration) -> f64 {
        let credit = Credit::new();
        let (mut time, mut lost_time) = (0.0, 0.0);
        for _ in 0..1_000_000 {
            if credit.allows_sharing() {
                let own = ThreadWork {
                    parts: 1,
                    time: JOB - saved,
                    min_time: JOB - saved,
                };
                let others = saved.as_secs_f64() / own.min_time.as_secs_f64();
                let stages = [(own, others.round() as usize)];
                credit.record_shared(&stages, JOB - saved + lost);
                time += (JOB + lost).saturating_sub(saved).as_secs_f64();
                lost_time += lost.as_secs_f64() - saved.as_secs_f64();
            } else {
                credit.record_alone(JOB);
                time += JOB.as_secs_f64();
            }
        }
        lost_time / time
    }

    #[test]
    fn unprofitable_sharing_costs_little() {
        for lost in [1, 100, 3_000, 20_000].map(Duration::from_micros) {
            assert!(loss(Duration::ZERO, lost) < 0.011, "{lost:?}");
        }
    }

    #[test]
    fn one_interruption_is_repaid_soon() {
        let credit = Credit::new();
        let own = ThreadWork {
            parts: 1,
            time: JOB / 2,
            min_time: JOB / 2,
        };
        credit.record_shared(&[(own, 1)], Duration::from_secs(1));
        let mut alone = Duration::ZERO;
        while !credit.allows_sharing() {
            credit.record_alone(JOB);
            alone += JOB;
        }
        assert!(alone < Duration::from_millis(400), "{alone:?}");
    }

    #[test]
    fn profitable_sharing_continues() {
        let (saved, lost) = (JOB / 2, JOB / 10);
        assert!(loss(saved, lost) < -0.6);
    }
}
