//! Whether sharing pays at the moment: what it has saved lately less what it has cost.
//!
//! Where other processes want the processors, a thread may be set aside for milliseconds with a part
//! in its hands. Sharing may cost what it has saved before; when it has cost more, jobs are done by
//! their callers alone until a small share of their time has paid for it. So a pool is hardly ever
//! slower than one thread, and where its threads run undisturbed it is not held back.

use std::{
    sync::atomic::{AtomicI64, Ordering::Relaxed},
    time::Duration,
};

/// Most savings that are remembered, so that it does not take long to see that times have changed.
const MOST: Duration = Duration::from_millis(10);
/// Most debts, so that one long interruption is not paid for all day.
const LEAST: Duration = Duration::from_millis(40);
/// Share of the time alone that pays debts off, and so about what trying to share may cost: 1 in so
/// many.
const INSTALMENT: u32 = 32;

/// Nanoseconds saved by sharing. Only the caller that has the pool touches it.
pub(crate) struct Credit(AtomicI64);

impl Credit {
    /// Enough for some bad luck at first.
    pub(crate) fn new() -> Self {
        Self(AtomicI64::new(nanoseconds(MOST / 4)))
    }

    /// Whether jobs are to be shared.
    pub(crate) fn allows_sharing(&self) -> bool {
        self.0.load(Relaxed) >= 0
    }

    /// A job was shared: other threads did what would have taken the caller `saved`, and the caller
    /// spent `lost` on handing over and waiting.
    pub(crate) fn shared(&self, saved: Duration, lost: Duration) {
        self.add(nanoseconds(saved) - nanoseconds(lost));
    }

    /// A job was done alone in `elapsed`.
    pub(crate) fn alone(&self, elapsed: Duration) {
        self.add(nanoseconds(elapsed / INSTALMENT));
    }

    fn add(&self, gain: i64) {
        let credit = self.0.load(Relaxed).saturating_add(gain);
        let credit = credit.clamp(-nanoseconds(LEAST), nanoseconds(MOST));
        self.0.store(credit, Relaxed);
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
                credit.shared(saved, lost);
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
        for lost in [1, 100, 3_000, 30_000].map(Duration::from_micros) {
            assert!(loss(Duration::ZERO, lost) < 0.032, "{lost:?}");
        }
    }

    #[test]
    fn sharing_that_pays_goes_on() {
        let (saved, lost) = (JOB / 2, JOB / 10);
        assert!(loss(saved, lost) < -0.6);
    }
}
