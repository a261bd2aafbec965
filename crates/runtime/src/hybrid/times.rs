//! What a token takes on both sides of a hybrid, layer by layer.

use std::time::{Duration, Instant};

/// What both sides did for a layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LayerTimes {
    /// The device's kernels. Those of layers that follow each other without a synchronisation count to the last of them.
    pub device: Duration,
    /// The host's part: cold neurons, or whatever else lives there.
    pub host: Duration,
    /// What the host waited for the device.
    pub waiting: Duration,
}

/// What both sides did for some tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SideTimes {
    /// Tokens that were timed.
    pub tokens: u64,
    /// Of each layer.
    pub layers: Vec<LayerTimes>,
    /// Neurons that the device computed.
    pub neurons_on_device: u64,
    /// Neurons that were computed in all.
    pub neurons: u64,
    /// Bytes of weights, predictors, keys and values that the device's kernels read, the head's left out.
    pub device_bytes: u64,
    /// The same that the host read for its parts of layers.
    pub host_bytes: u64,
}

impl SideTimes {
    /// Of so many layers, nothing yet.
    pub(super) fn new(layers: usize) -> Self {
        Self {
            layers: vec![LayerTimes::default(); layers],
            ..Self::default()
        }
    }

    /// The sum of all layers.
    pub fn total(&self) -> LayerTimes {
        let add = |sum: LayerTimes, layer: &LayerTimes| LayerTimes {
            device: sum.device + layer.device,
            host: sum.host + layer.host,
            waiting: sum.waiting + layer.waiting,
        };
        self.layers.iter().fold(LayerTimes::default(), add)
    }

    /// Share of the neurons that were computed on the device.
    pub fn device_share(&self) -> f64 {
        match self.neurons {
            0 => 0.0,
            neurons => self.neurons_on_device as f64 / neurons as f64,
        }
    }
}

/// A stopwatch of the host's, which runs where somebody wants to know, and what the host had read when it started.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stopwatch {
    started: Option<Instant>,
    bytes: u64,
}

impl Stopwatch {
    /// Starts it.
    pub(super) fn start(is_wanted: bool, bytes: u64) -> Self {
        Self {
            started: is_wanted.then(Instant::now),
            bytes,
        }
    }

    /// What has gone by.
    pub(super) fn elapsed(self) -> Duration {
        let started = self.started;
        started.map_or(Duration::ZERO, |started| started.elapsed())
    }

    /// Bytes that the host has read since, now that it has read `bytes` in all.
    pub(super) fn bytes_since(self, bytes: u64) -> u64 {
        bytes - self.bytes
    }
}
