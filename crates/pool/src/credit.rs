//! Whether sharing pays at the moment: what it has saved lately less what it has cost.
//!
//! Where other processes want the processors, a thread may be set aside for milliseconds with a part
//! in its hands. Sharing may cost what it has saved before; when it has cost more, jobs are done by
//! their callers alone until a small share of their time has paid for it. So a pool is hardly ever
//! slower than one thread, and where its threads run undisturbed it is not held back.

use std::{
    sync::atomic::{AtomicI64, AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

/// Most savings that are remembered, so that it does not take long to see that times have changed.
const MOST: Duration = Duration::from_millis(10);
/// Most debts, so that one long interruption is not paid for all day.
const LEAST: Duration = Duration::from_millis(20);
/// Share of the time alone that pays debts off, and so about what trying to share may cost: 1 in so
/// many. Twice as many whenever debts are made again before much has been saved.
const INSTALMENTS: [u32; 4] = [16, 32, 64, 128];
/// Time in parts that is remembered, to see how much longer they take for being interrupted.
const REMEMBERED: Duration = Duration::from_millis(200);
/// More than so many times longer they take for other reasons than that others want the processor.
const MOST_STRETCH: f64 = 2.0;

/// Nanoseconds saved by sharing. Only the caller that has the pool touches it.
pub(crate) struct Credit {
    saved: AtomicI64,
    /// How many times debts were made since savings were last at their most, as far as that counts.
    doubt: AtomicUsize,
    /// What the caller's parts took lately.
    taken: AtomicI64,
    /// What they would have taken had each been as fast as the fastest of its job.
    least: AtomicI64,
}

/// What a caller did of a job that was shared.
#[derive(Default)]
pub(crate) struct Own {
    /// Parts that it did.
    pub(crate) parts: usize,
    /// What these took.
    pub(crate) time: Duration,
    /// What the fastest part took.
    pub(crate) least: Duration,
}

impl Credit {
    /// As much as can be, for nothing speaks against sharing yet.
    pub(crate) fn new() -> Self {
        Self {
            saved: AtomicI64::new(nanoseconds(MOST)),
            doubt: AtomicUsize::new(0),
            taken: AtomicI64::new(0),
            least: AtomicI64::new(0),
        }
    }

    /// Whether jobs are to be shared.
    pub(crate) fn allows_sharing(&self) -> bool {
        self.saved.load(Relaxed) >= 0
    }

    /// A job was shared, which took `elapsed`: the caller did `own`, and `others` parts were done by
    /// other threads.
    pub(crate) fn shared(&self, own: &Own, others: usize, elapsed: Duration) {
        let least = nanoseconds(own.least);
        let mut taken = self.taken.load(Relaxed) + nanoseconds(own.time);
        let mut all_least = self.least.load(Relaxed) + least * own.parts as i64;
        if taken > nanoseconds(REMEMBERED) {
            (taken, all_least) = (taken / 2, all_least / 2);
        }
        self.taken.store(taken, Relaxed);
        self.least.store(all_least, Relaxed);
        // Alone the caller would have been interrupted in the others' parts as in its own.
        let stretch = (taken as f64 / all_least.max(1) as f64).min(MOST_STRETCH);
        let saved = least as f64 * others as f64 * stretch;
        let lost = nanoseconds(elapsed.saturating_sub(own.time));
        let doubt = match self.add(saved as i64 - lost) {
            credit if credit >= nanoseconds(MOST) => 0,
            0.. => return,
            _ => (self.doubt.load(Relaxed) + 1).min(INSTALMENTS.len()),
        };
        self.doubt.store(doubt, Relaxed);
    }

    /// A job was done alone in `elapsed`.
    pub(crate) fn alone(&self, elapsed: Duration) {
        let doubt = self.doubt.load(Relaxed).max(1) - 1;
        self.add(nanoseconds(elapsed / INSTALMENTS[doubt]));
    }

    /// Adds to what was saved; returns what that comes to.
    fn add(&self, gain: i64) -> i64 {
        let credit = self.saved.load(Relaxed).saturating_add(gain);
        let credit = credit.clamp(-nanoseconds(LEAST), nanoseconds(MOST));
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

    /// Share of the time lost when every shared job loses `lost` of it after saving `saved`.
    fn loss(saved: Duration, lost: Duration) -> f64 {
        let credit = Credit::new();
        let (mut time, mut lost_time) = (0.0, 0.0);
        for _ in 0..1_000_000 {
            if credit.allows_sharing() {
                let own = Own {
                    parts: 1,
                    time: JOB - saved,
                    least: JOB - saved,
                };
                let others = saved.as_secs_f64() / own.least.as_secs_f64();
                credit.shared(&own, others.round() as usize, JOB - saved + lost);
                time += (JOB + lost).saturating_sub(saved).as_secs_f64();
                lost_time += lost.as_secs_f64() - saved.as_secs_f64();
            } else {
                credit.alone(JOB);
                time += JOB.as_secs_f64();
            }
        }
        lost_time / time
    }

    #[test]
    fn sharing_that_never_pays_costs_little() {
        for lost in [1, 100, 3_000, 20_000].map(Duration::from_micros) {
            assert!(loss(Duration::ZERO, lost) < 0.011, "{lost:?}");
        }
    }

    #[test]
    fn one_interruption_is_soon_forgotten() {
        let credit = Credit::new();
        let own = Own {
            parts: 1,
            time: JOB / 2,
            least: JOB / 2,
        };
        credit.shared(&own, 1, Duration::from_secs(1));
        let mut alone = Duration::ZERO;
        while !credit.allows_sharing() {
            credit.alone(JOB);
            alone += JOB;
        }
        assert!(alone < Duration::from_millis(400), "{alone:?}");
    }

    #[test]
    fn sharing_that_pays_goes_on() {
        let (saved, lost) = (JOB / 2, JOB / 10);
        assert!(loss(saved, lost) < -0.6);
    }
}
