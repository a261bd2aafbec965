//! Bytes that the device reads for a pass, and its read bandwidth.

use std::sync::Arc;

use powerinfer_kernels::cuda::{Buffer, Device, DeviceError, Ffn, GpuLinear, NeuronCounts};
use powerinfer_tensor::BLOCK;

use crate::{CopiedParts, DeviceAttention, DeviceFfn, DeviceLayer, DeviceModel, DeviceSelector};

/// Size of a copy that no cache of a GPU holds.
const PROBE_BYTES: usize = 256 << 20;

/// Size below which no copy is measured.
const LEAST_PROBE_BYTES: usize = 1 << 20;

/// Number of copies measured.
const COPIES: usize = 5;

impl DeviceModel {
    /// Bytes of weights, predictors, keys and values that the kernels of all layers have read in the last pass, whose tokens
    /// were at `positions` and which computed the neurons of `counts`. The head is not included.
    ///
    /// A prompt reads each matrix once, copied cold neurons included; a batch reads the rows that any token needs. Predictors
    /// count in full.
    pub fn bytes_read(&self, positions: &[usize], counts: NeuronCounts) -> u64 {
        let layers = self.layers.iter().enumerate();
        // Copied parts have the same size in every layer.
        let copied = self.copied_parts(self.tokens);
        let fixed = layers.map(|(index, layer)| {
            let own = layer.attention.as_ref();
            let attention = own.or_else(|| copied?.attention());
            let projections = attention.map_or(0, DeviceAttention::projection_bytes);
            let ffn = layer.ffn.as_ref().filter(|_| self.has_ffn(index));
            let predictor = ffn.map_or(0, |ffn| match &ffn.selector {
                DeviceSelector::Host => copied
                    .and_then(CopiedParts::selector)
                    .map_or(0, DeviceSelector::read_bytes),
                own => own.read_bytes(),
            });
            let cache = match attention {
                Some(attention) if self.has_cache(index) => {
                    self.cache_bytes_read(attention, positions)
                }
                _ => 0,
            };
            (projections + predictor) as u64 + cache
        });
        let mut ffns = self.layers.iter().filter_map(|layer| layer.ffn.as_ref());
        let neurons: u64 = match self.state.prompt {
            // Layers are equally wide, and counts are sums over all of them.
            None => ffns.next().map_or(0, |ffn| {
                let [gate, up, down] = row_bytes(&ffn.ffn);
                let gates = u64::from(counts.gate_rows);
                let downs = u64::from(counts.union_rows);
                let ups = if ffn.reads_every_up() { gates } else { downs };
                gates * gate + ups * up + downs * down
            }),
            Some(_) => self
                .layers
                .iter()
                .enumerate()
                .map(|(index, layer)| self.prompt_neuron_bytes(index, layer))
                .sum(),
        };
        fixed.sum::<u64>() + neurons
    }

    /// Bytes of the neurons of a layer that a prompt reads.
    fn prompt_neuron_bytes(&self, index: usize, layer: &DeviceLayer) -> u64 {
        let Some(found) = &layer.ffn else { return 0 };
        let neurons = if self.streams(index) {
            layer.neurons
        } else {
            layer.hot_count()
        };
        neurons as u64 * row_bytes(&found.ffn).iter().sum::<u64>()
    }

    /// Bytes of keys and values that attention of a layer reads for all tokens.
    fn cache_bytes_read(&self, attention: &DeviceAttention, positions: &[usize]) -> u64 {
        let span = |position: usize| {
            let all = position + 1;
            attention.window.map_or(all, |window| all.min(window))
        };
        let spans: usize = positions.iter().copied().map(span).sum();
        let numbers = 2 * spans * self.shape.kv_heads * self.shape.head_size;
        (numbers * self.shape.cache_format.block_bytes() / BLOCK) as u64
    }
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
    /// Whether up is read for every neuron whose gate is read.
    fn reads_every_up(&self) -> bool {
        matches!(
            self.selector,
            DeviceSelector::Dense | DeviceSelector::Contribution { .. }
        )
    }
}

/// Read bandwidth of `device` in bytes per second: twice the median rate of a few copies, which read and write alike.
/// `None` if the device has no room for two buffers of 1 MiB.
///
/// # Errors
///
/// Returns an error if the device fails, but not for lack of memory.
pub fn read_bandwidth(device: &Arc<dyn Device>) -> Result<Option<f64>, DeviceError> {
    let mut bytes = PROBE_BYTES;
    let (from, mut to) = loop {
        let buffer = || Buffer::<u32>::new(device, bytes / size_of::<u32>());
        match buffer().and_then(|from| Ok((from, buffer()?))) {
            Ok(both) => break both,
            Err(DeviceError::OutOfMemory { .. }) if bytes > LEAST_PROBE_BYTES => bytes /= 2,
            Err(DeviceError::OutOfMemory { .. }) => return Ok(None),
            Err(other) => return Err(other),
        }
    };
    let mut seconds = Vec::new();
    for _ in 0..COPIES {
        device.record_event(0)?;
        to.copy_from(&from)?;
        device.record_event(1)?;
        device.synchronise()?;
        seconds.push(device.elapsed_seconds(0, 1)?.max(1e-9));
    }
    seconds.sort_unstable_by(f64::total_cmp);
    Ok(Some(2.0 * bytes as f64 / seconds[COPIES / 2]))
}
