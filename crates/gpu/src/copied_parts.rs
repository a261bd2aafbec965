//! Copies for long prompts: parts of layers on the host, other than neurons, that are copied to the device. They are attention, its
//! KV cache, and the predictor. The device holds the copies of one layer at a time.

use std::sync::Arc;

use powerinfer_kernels::cuda::{Device, DeviceError, GpuCache, StagingStream};
use powerinfer_tensor::Matrix;

use crate::{DeviceAttention, DeviceLayer, DeviceModel, DeviceSelector, HostLinear};

/// Number of the staging stream, after those of cold neurons.
const STAGING: usize = 2;

/// Maximum number of planes that are copied for a layer.
const PLANES: usize = 32;

/// Parts of a layer that are in host memory and that the device lacks.
pub struct HostParts<'a> {
    /// Attention.
    pub attention: Option<HostAttention<'a>>,
    /// Predictor of the neurons.
    pub prediction: Option<HostPrediction<'a>>,
    /// Copies bytes to pinned memory, with several threads.
    pub copy: &'a dyn Fn(&mut [u8], &[u8]),
}

/// Weight and bias of a norm in host memory.
pub type HostNorm<'a> = (&'a [f32], Option<&'a [f32]>);

/// Attention of a layer in host memory.
pub struct HostAttention<'a> {
    /// Projections of queries, keys, values and the output.
    pub projections: [HostLinear<'a>; 4],
    /// Norm before attention; `None` in post-norm blocks.
    pub norm: Option<HostNorm<'a>>,
    /// Norms of the query heads and of the key heads.
    pub head_norms: Option<[HostNorm<'a>; 2]>,
    /// Attention sinks, one per head.
    pub sinks: Option<&'a [f32]>,
    /// Number of positions in the sliding window; `None` without a window.
    pub window: Option<usize>,
}

/// A layer's predictor in host memory.
pub enum HostPrediction<'a> {
    /// A network.
    Network {
        /// First matrix, `[rank, hidden]`.
        a: Matrix<'a>,
        /// Second matrix, transposed: `[rank, neurons]`.
        b_transposed: Matrix<'a>,
        /// Block scales of the second matrix, `[blocks of hidden units, neurons]`; empty if its format has none.
        b_scales: &'a [f32],
        /// Bias of the logits, `[neurons]`.
        bias: &'a [f32],
        /// Smallest logit of a predicted neuron.
        threshold: f32,
        /// Whether the network has no ReLU.
        is_linear: bool,
    },
    /// Signs of the gate.
    Signs {
        /// Sign bits, `[neurons, ⌈hidden / 64⌉]`.
        words: Vec<u64>,
        /// Minimum number of columns in which gate and input agree in sign.
        min_agreements: u32,
    },
}

/// Device memory for the copied parts of one layer.
#[derive(Debug)]
pub struct CopiedParts {
    // Declared first, so that it is dropped before the buffers that it copies to.
    staging: StagingStream,
    attention: Option<DeviceAttention>,
    /// A network.
    network: Option<DeviceSelector>,
    /// Signs of the gate.
    signs: Option<DeviceSelector>,
    /// Kind of predictor of the layer whose parts are here.
    predicts: Option<Prediction>,
    cache: Option<GpuCache>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Prediction {
    Network,
    Signs,
}

impl CopiedParts {
    /// Device memory for copied parts. The given buffers must be large enough for every layer.
    ///
    /// # Errors
    ///
    /// Returns an error if pinned memory runs out or the device fails.
    pub fn new(
        device: &Arc<dyn Device>,
        attention: Option<DeviceAttention>,
        network: Option<DeviceSelector>,
        signs: Option<DeviceSelector>,
        cache: Option<GpuCache>,
    ) -> Result<Self, DeviceError> {
        let bytes = weight_bytes(attention.as_ref(), [&network, &signs]);
        Ok(Self {
            staging: StagingStream::new(device, STAGING, PLANES, bytes)?,
            attention,
            network,
            signs,
            predicts: None,
            cache,
        })
    }

    /// Size in bytes on the device.
    pub(crate) fn bytes(&self) -> usize {
        let cache = self.cache.as_ref().map_or(0, GpuCache::bytes);
        weight_bytes(self.attention.as_ref(), [&self.network, &self.signs]) + cache
    }

    /// Largest number of hidden units of a copied network.
    pub(crate) fn rank(&self) -> usize {
        self.network.as_ref().map_or(0, DeviceSelector::rank)
    }

    /// Attention of the layer whose parts are here.
    pub(crate) fn attention(&self) -> Option<&DeviceAttention> {
        self.attention.as_ref()
    }

    /// The predictor of the layer whose parts are here.
    pub(crate) fn selector(&self) -> Option<&DeviceSelector> {
        match self.predicts? {
            Prediction::Network => self.network.as_ref(),
            Prediction::Signs => self.signs.as_ref(),
        }
    }

    /// Memory for the KV cache of the layer whose parts are here.
    pub(crate) fn cache(&self) -> Option<&GpuCache> {
        self.cache.as_ref()
    }

    /// Copies the parts of a layer; kernels launched from here on wait for them.
    fn fill(&mut self, parts: &HostParts<'_>) -> Result<(), DeviceError> {
        let (staging, copy) = (&mut self.staging, parts.copy);
        staging.begin()?;
        if let Some(from) = &parts.attention {
            let to = self.attention.as_mut().expect("memory for attention");
            let linears = [&mut to.query, &mut to.key, &mut to.value, &mut to.output];
            for (to, from) in linears.into_iter().zip(from.projections) {
                to.write_async(from, staging, copy)?;
            }
            if let (Some(to), Some(from)) = (&mut to.norm, from.norm) {
                to.write_async(from, staging, copy)?;
            }
            if let (Some(to), Some([query, key])) = (&mut to.head_norms, from.head_norms) {
                to.query.write_async(query, staging, copy)?;
                to.key.write_async(key, staging, copy)?;
            }
            if let (Some(to), Some(from)) = (&mut to.sinks, from.sinks) {
                to.write_async(0, from, staging, copy)?;
            }
            to.window = from.window;
        }
        self.predicts = None;
        match &parts.prediction {
            None => {}
            Some(HostPrediction::Network {
                a,
                b_transposed,
                b_scales,
                bias,
                threshold,
                is_linear,
            }) => {
                let Some(DeviceSelector::Predicted { predictor: to, .. }) = &mut self.network
                else {
                    unreachable!("memory for a network");
                };
                to.a.write_async((*a, None), staging, copy)?;
                to.b_transposed.write_async(b_transposed, staging, copy)?;
                if let Some(to) = &mut to.b_scales {
                    to.set_len(b_scales.len());
                    to.write_async(0, b_scales, staging, copy)?;
                }
                to.bias.write_async(0, bias, staging, copy)?;
                (to.threshold, to.is_linear) = (*threshold, *is_linear);
                self.predicts = Some(Prediction::Network);
            }
            Some(HostPrediction::Signs {
                words,
                min_agreements,
            }) => {
                let Some(DeviceSelector::SignBit(to)) = &mut self.signs else {
                    unreachable!("memory for signs");
                };
                to.signs.write_async(0, words, staging, copy)?;
                to.min_agreements = *min_agreements;
                self.predicts = Some(Prediction::Signs);
            }
        }
        staging.end()
    }
}

/// Size in bytes of attention and predictors.
fn weight_bytes(
    attention: Option<&DeviceAttention>,
    predictors: [&Option<DeviceSelector>; 2],
) -> usize {
    let predictors = predictors.into_iter().flatten();
    let attention = attention.map_or(0, DeviceAttention::bytes);
    attention + predictors.map(DeviceSelector::read_bytes).sum::<usize>()
}

/// Attention of layer `index`: the layer's own, or the copied one.
pub(crate) fn attention_of<'a>(
    layers: &'a [DeviceLayer],
    copied: Option<&'a CopiedParts>,
    index: usize,
) -> &'a DeviceAttention {
    let own = layers[index].attention.as_ref();
    let attention = own.or_else(|| copied?.attention());
    attention.expect("attention is on the device")
}

/// Copying of the parts that a layer has on the host.
///
/// # Errors
///
/// All methods return an error if the device fails.
///
/// # Panics
///
/// All but [`copies_parts`](Self::copies_parts) panic if the current pass copies no parts.
#[expect(
    clippy::missing_errors_doc,
    clippy::missing_panics_doc,
    reason = "stated once for all methods"
)]
impl DeviceModel {
    /// Whether the device computes all layers in the current pass, with copies of the parts that it lacks.
    pub fn copies_parts(&self) -> bool {
        self.copied_parts(self.tokens).is_some()
    }

    /// The copied parts if they are used for `tokens` tokens.
    pub(crate) fn copied_parts(&self, tokens: usize) -> Option<&CopiedParts> {
        let copied = self.copied.as_ref();
        copied.filter(|_| tokens >= self.copies_from)
    }

    /// Copies the parts of a layer; kernels launched from here on wait for them.
    pub fn copy_parts(&mut self, parts: &HostParts<'_>) -> Result<(), DeviceError> {
        self.copied.as_mut().expect("memory for parts").fill(parts)
    }

    /// Writes the first `positions` keys and values of the sequence, from the host's KV cache of the layer. `both` has the layout of
    /// [`GpuCache::write`].
    pub fn write_copied_cache(
        &mut self,
        positions: usize,
        both: [&[u8]; 2],
    ) -> Result<(), DeviceError> {
        self.end_segment()?;
        let copied = self.copied.as_mut().expect("memory for parts");
        let cache = copied.cache.as_mut().expect("memory for keys and values");
        cache.write(positions, both)
    }
}
