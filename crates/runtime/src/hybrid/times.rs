//! Times of a token on the device and on the host, by layer.

use std::time::{Duration, Instant};

/// Times of one layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LayerTimes {
    /// Kernels of the device. If there is no synchronisation between layers, their kernels count for the last layer.
    pub device: Duration,
    /// The host's part: cold neurons, and whatever else is placed there.
    pub host: Duration,
    /// Time that the host waited for the device.
    pub waiting: Duration,
}

/// Times, neurons and bytes of both sides for some tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PassTimes {
    /// Tokens measured.
    pub tokens: u64,
    /// Times of each layer.
    pub layers: Vec<LayerTimes>,
    /// Neurons that the device computed.
    pub neurons_on_device: u64,
    /// Neurons computed on either side.
    pub neurons: u64,
    /// Bytes of weights, predictors, keys and values that the device has read, without the head.
    pub device_bytes: u64,
    /// Bytes that the host has read for its parts of layers.
    pub host_bytes: u64,
}

impl PassTimes {
    /// Zero for `layers` layers.
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

    /// Share of the computed neurons that the device computed.
    pub fn device_share(&self) -> f64 {
        match self.neurons {
            0 => 0.0,
            neurons => self.neurons_on_device as f64 / neurons as f64,
        }
    }
}

/// A stopwatch of the host, which runs if times are measured, and the bytes read at its start.
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

    /// Time since the start.
    pub(super) fn elapsed(self) -> Duration {
        let started = self.started;
        started.map_or(Duration::ZERO, |started| started.elapsed())
    }

    /// Bytes read since the start, `bytes` in all.
    pub(super) fn bytes_since(self, bytes: u64) -> u64 {
        bytes - self.bytes
    }
}
