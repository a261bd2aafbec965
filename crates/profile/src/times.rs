//! Time spent on a layer, by activity.

use std::time::{Duration, Instant};

/// Time spent on a layer.
#[derive(Debug, Default)]
pub(crate) struct Times {
    loading: Duration,
    forward: Duration,
    moving: Duration,
}

impl Times {
    fn add<Output>(sum: &mut Duration, work: impl FnOnce() -> Output) -> Output {
        let started = Instant::now();
        let output = work();
        *sum += started.elapsed();
        output
    }

    /// Time of reading weights.
    pub(crate) fn loading<Output>(&mut self, work: impl FnOnce() -> Output) -> Output {
        Self::add(&mut self.loading, work)
    }

    /// Time of the forward pass, including the observation.
    pub(crate) fn forward<Output>(&mut self, work: impl FnOnce() -> Output) -> Output {
        Self::add(&mut self.forward, work)
    }

    /// Time of reading and writing hidden states.
    pub(crate) fn moving<Output>(&mut self, work: impl FnOnce() -> Output) -> Output {
        Self::add(&mut self.moving, work)
    }

    /// Describes the times of a layer; `observing` is part of the forward time.
    pub(crate) fn describe(&self, layer: usize, tokens: usize, observing: Duration) -> String {
        let all = self.loading + self.forward + self.moving;
        let unobserved = (all - observing).as_secs_f64().max(1e-9);
        format!(
            "layer {layer}: {:.0} tokens/s; weights {:.2} s, forward {:.2} s, hidden states {:.2} s, observation {:.2} s ({:.1}% overhead)",
            tokens as f64 / all.as_secs_f64().max(1e-9),
            self.loading.as_secs_f64(),
            (self.forward - observing).as_secs_f64(),
            self.moving.as_secs_f64(),
            observing.as_secs_f64(),
            100.0 * observing.as_secs_f64() / unobserved,
        )
    }
}
