//! Events of a device that executes every operation at once.

use std::{sync::Mutex, time::Instant};

use crate::lock;

/// Times of the recorded events, by index.
#[derive(Debug, Default)]
pub(crate) struct Events(Mutex<Vec<Option<Instant>>>);

impl Events {
    /// Records event `index`.
    pub(crate) fn record(&self, index: usize) {
        let mut events = lock(&self.0);
        if events.len() <= index {
            events.resize(index + 1, None);
        }
        events[index] = Some(Instant::now());
    }

    /// Seconds between two events; `None` if one was not recorded.
    pub(crate) fn seconds_between(&self, earlier: usize, later: usize) -> Option<f64> {
        let events = lock(&self.0);
        let time = |index: usize| events.get(index).copied().flatten();
        let passed = time(later)?.saturating_duration_since(time(earlier)?);
        Some(passed.as_secs_f64())
    }
}
