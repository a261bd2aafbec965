//! Bytes that the device reads for a token, and its read bandwidth.

use std::sync::Arc;

use powerinfer_kernels::cuda::{Buffer, Device, DeviceError, Ffn, GpuLinear, NeuronCounts};
use powerinfer_tensor::BLOCK;

use super::{DeviceAttention, DeviceChoice, DeviceFfn, DeviceLayer, Hybrid};

/// Bytes of a copy that exceeds every cache.
const PROBE: usize = 256 << 20;

/// Copies to time.
const PASSES: usize = 5;

impl Hybrid {
    /// Bytes of weights, predictors, keys and values that the kernels of all layers have read for the last pass,
    /// whose first token is at position `first`; `counts` are its neurons.
    ///
    /// Several tokens read each matrix once, copied cold neurons included; predictors count as a whole.
    pub(super) fn bytes_read(&self, first: usize, counts: NeuronCounts) -> u64 {
        let layers = self.layers.iter().enumerate();
        let fixed = layers.map(|(index, layer)| {
            let attention = layer.attention.as_ref();
            let matrices = attention.map_or(0, projection_bytes);
            let is_asked = layer.has_neurons() || self.streams(index);
            let ffn = layer.ffn.as_ref().filter(|_| is_asked);
            let choice = ffn.map_or(0, |ffn| ffn.choice.read_bytes());
            (matrices + choice) as u64 + self.cache_bytes_read(layer, first)
        });
        let mut ffns = self.layers.iter().filter_map(|layer| layer.ffn.as_ref());
        let neurons: u64 = match self.tokens {
            // All layers have the same shape, and counts are summed over layers.
            1 => ffns.next().map_or(0, |ffn| {
                let [gate, up, down] = row_bytes(&ffn.ffn);
                let evaluated = u64::from(counts.gate_rows);
                let computed = u64::from(counts.down_rows);
                let multiplied = match ffn.reads_every_up() {
                    true => evaluated,
                    false => computed,
                };
                evaluated * gate + multiplied * up + computed * down
            }),
            _ => self
                .layers
                .iter()
                .enumerate()
                .map(|(index, layer)| self.neurons_read_at_once(index, layer))
                .sum(),
        };
        fixed.sum::<u64>() + neurons
    }

    /// Bytes of a layer's neurons that a pass of several tokens reads.
    fn neurons_read_at_once(&self, index: usize, layer: &DeviceLayer) -> u64 {
        let Some(found) = &layer.ffn else { return 0 };
        let neurons = match self.streams(index) {
            true => layer.neurons,
            false => found.ffn.down.rows(),
        };
        neurons as u64 * row_bytes(&found.ffn).iter().sum::<u64>()
    }

    /// Bytes of keys and values that a layer's attention reads, for each token.
    fn cache_bytes_read(&self, layer: &DeviceLayer, first: usize) -> u64 {
        let Some(attention) = layer.attention.as_ref().filter(|_| layer.has_cache) else {
            return 0;
        };
        let seen = |position: usize| {
            let all = position + 1;
            attention.window.map_or(all, |window| all.min(window))
        };
        let positions: usize = (first..first + self.tokens).map(seen).sum();
        let numbers = 2 * positions * self.kv_heads * self.head_size;
        (numbers * self.cache_format.block_bytes() / BLOCK) as u64
    }
}

fn projection_bytes(attention: &DeviceAttention) -> usize {
    let DeviceAttention {
        query,
        key,
        value,
        output,
        ..
    } = attention;
    [query, key, value, output]
        .into_iter()
        .map(GpuLinear::bytes)
        .sum()
}

/// Bytes of a neuron's rows of gate, up and down.
fn row_bytes(ffn: &Ffn) -> [u64; 3] {
    let row = |linear: &GpuLinear| {
        let matrix = &linear.matrix;
        matrix.format().row_bytes(matrix.columns()) as u64
    };
    let down = ffn.down.format().row_bytes(ffn.down.columns()) as u64;
    [row(&ffn.gate), ffn.up.as_ref().map_or(0, row), down]
}

impl DeviceFfn {
    /// Whether no neuron is skipped by its gate alone.
    fn reads_every_up(&self) -> bool {
        matches!(
            self.choice,
            DeviceChoice::Every | DeviceChoice::ByContribution { .. }
        )
    }
}

impl DeviceChoice {
    /// Bytes of the predictor or the signs.
    pub(super) fn read_bytes(&self) -> usize {
        match self {
            Self::Predicted { predictor, .. } => {
                let scales = predictor.b_scales.as_ref().map_or(0, Buffer::bytes);
                predictor.a.bytes()
                    + predictor.b_transposed.bytes()
                    + scales
                    + predictor.bias.bytes()
            }
            Self::BySigns(signs) => signs.signs.bytes(),
            _ => 0,
        }
    }
}

/// Read bandwidth of `device` in bytes per second: the median of a few copies within it, which read as fast as they
/// write. None where two buffers of 1 MiB cannot be allocated.
pub(super) fn read_bandwidth(device: &Arc<dyn Device>) -> Result<Option<f64>, DeviceError> {
    let mut bytes = PROBE;
    let (from, mut to) = loop {
        let buffer = || Buffer::<u32>::new(device, bytes / size_of::<u32>());
        match buffer().and_then(|from| Ok((from, buffer()?))) {
            Ok(both) => break both,
            Err(DeviceError::OutOfMemory { .. }) if bytes > 1 << 20 => bytes /= 2,
            Err(DeviceError::OutOfMemory { .. }) => return Ok(None),
            Err(other) => return Err(other),
        }
    };
    let mut seconds = Vec::new();
    for _ in 0..PASSES {
        device.record_event(0)?;
        to.copy_from(&from)?;
        device.record_event(1)?;
        device.synchronise()?;
        seconds.push(device.elapsed_seconds(0, 1)?.max(1e-9));
    }
    seconds.sort_unstable_by(f64::total_cmp);
    Ok(Some(2.0 * bytes as f64 / seconds[PASSES / 2]))
}
