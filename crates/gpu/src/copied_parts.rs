//! Parts of layers on the host, other than neurons, that a long prompt copies to the device: attention, its KV cache, and the
//! predictor. One layer at a time uses them.

use std::sync::Arc;

use powerinfer_kernels::cuda::{Device, DeviceError, GpuCache, StagingStream};
use powerinfer_tensor::Matrix;

use crate::{DeviceAttention, DeviceLayer, DeviceModel, DeviceSelector, HostLinear};

/// Number of the staging stream, after those of cold neurons.
const STAGING: usize = 2;

/// Maximum number of planes that are copied for a layer.
const PLANES: usize = 32;

/// Parts of a layer in host memory, those that the device lacks.
pub struct HostParts<'a> {
    /// Attention.
    pub attention: Option<HostAttention<'a>>,
    /// How neurons are predicted.
    pub prediction: Option<HostPrediction<'a>>,
    /// Copies bytes to pinned memory, with several threads.
    pub copy: &'a dyn Fn(&mut [u8], &[u8]),
}

/// Weight and bias of a norm in host memory.
pub type HostNorm<'a> = (&'a [f32], Option<&'a [f32]>);

/// Attention of a layer in host memory.
pub struct HostAttention<'a> {
    /// Projections of queries, keys, values and of the output.
    pub projections: [HostLinear<'a>; 4],
    /// Norm before attention; `None` in post-norm blocks.
    pub norm: Option<HostNorm<'a>>,
    /// Norms of the heads of queries and of keys.
    pub head_norms: Option<[HostNorm<'a>; 2]>,
    /// Positions that a sliding window covers.
    pub window: Option<usize>,
}

/// A layer's predictor in host memory.
pub enum HostPrediction<'a> {
    /// A network.
    Network {
        /// `[rank, hidden]`.
        a: Matrix<'a>,
        /// `[rank, neurons]`.
        b_transposed: Matrix<'a>,
        /// `[blocks of hidden units, neurons]`; empty without scales.
        b_scales: &'a [f32],
        /// `[neurons]`.
        bias: &'a [f32],
        /// Smallest logit of a predicted neuron.
        threshold: f32,
        /// Whether the network has no ReLU.
        is_linear: bool,
    },
    /// Signs of the gate.
    Signs {
        /// `[neurons, ⌈hidden / 64⌉]`.
        words: Vec<u64>,
        /// Columns in which gate and input must agree in sign.
        min_agreements: u32,
    },
}

/// Device memory for the parts of one layer.
#[derive(Debug)]
pub struct CopiedParts {
    // Dropped before the buffers that it copies to.
    staging: StagingStream,
    attention: Option<DeviceAttention>,
    /// A network.
    network: Option<DeviceSelector>,
    /// Signs of the gate.
    signs: Option<DeviceSelector>,
    /// Which of the two the layer has whose parts are here.
    predicts: Option<Prediction>,
    cache: Option<GpuCache>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Prediction {
    Network,
    Signs,
}

impl CopiedParts {
    /// Device memory for parts like the given ones, which must be the largest of all layers.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no pinned memory, or the device fails.
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

    /// Largest number of hidden units of a network.
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
                    to.write_async(b_scales, staging, copy)?;
                }
                to.bias.write_async(bias, staging, copy)?;
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
                to.signs.write_async(words, staging, copy)?;
                to.min_agreements = *min_agreements;
                self.predicts = Some(Prediction::Signs);
            }
        }
        staging.end()
    }
}

/// Size in bytes of attention and of predictors.
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

/// Copying of whatever a layer has on the host.
///
/// # Errors
///
/// All methods return an error if the device fails.
///
/// # Panics
///
/// All but [`copies_parts`](Self::copies_parts) panic if nothing is copied for the tokens that run.
#[expect(
    clippy::missing_errors_doc,
    clippy::missing_panics_doc,
    reason = "stated once for all methods"
)]
impl DeviceModel {
    /// Whether the device computes all layers for the tokens that run: what it lacks is copied.
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

    /// Writes the keys and values of the first `positions` positions of the layer's sequence, which the host has, in the form of
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
