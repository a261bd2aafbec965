//! A layer's parts on a device, and how its neurons are selected there.

use std::sync::Arc;

use powerinfer_kernels::cuda::{
    Buffer, Ffn, GpuLinear, GpuNorm, HeadNorms, NeuronFilter, Predictor, Router, Routes, Routing,
    SignBits,
};

use crate::ExpertRows;

/// Parts of a layer that are on a device.
#[derive(Debug)]
pub struct DeviceLayer {
    /// Attention; `None` if it is computed on the host.
    pub attention: Option<DeviceAttention>,
    /// Whether the KV cache is on the device too.
    pub has_cache: bool,
    /// Neurons of the layer, on either side.
    pub neurons: usize,
    /// Prompt length in tokens from which copying the cold neurons to the device pays; `None` if it never does.
    pub streams_from: Option<usize>,
    /// Hot neurons. Without rows if cold neurons are copied and none stays; `None` if there are neither.
    pub ffn: Option<DeviceFfn>,
    /// Norms after attention and after the FFN, in post-norm blocks.
    pub norms_after: Option<[GpuNorm; 2]>,
}

/// Attention of a layer.
#[derive(Debug)]
pub struct DeviceAttention {
    /// Norm before attention; `None` in post-norm blocks.
    pub norm: Option<GpuNorm>,
    /// Query projection.
    pub query: GpuLinear,
    /// Key projection.
    pub key: GpuLinear,
    /// Value projection.
    pub value: GpuLinear,
    /// Norms of the heads of queries and keys.
    pub head_norms: Option<HeadNorms>,
    /// ALiBi slopes, one per head.
    pub slopes: Option<Arc<Buffer<f32>>>,
    /// Attention sinks, one per head.
    pub sinks: Option<Buffer<f32>>,
    /// Positions that a sliding window covers.
    pub window: Option<usize>,
    /// Output projection.
    pub output: GpuLinear,
}

/// Hot neurons of a layer.
#[derive(Debug)]
pub struct DeviceFfn {
    /// Norm before the FFN; `None` in post-norm blocks.
    pub norm: Option<GpuNorm>,
    /// Gate, up and down.
    pub ffn: Ffn,
    /// Which of the neurons are computed.
    pub selector: DeviceSelector,
    /// In a mixture of experts, selects the experts whose neurons are computed.
    pub router: Option<Router>,
    /// Runs of consecutive neurons of one expert; empty if they are too short or there are no experts.
    pub experts: Vec<ExpertRows>,
    /// Vector added for the neurons that are not computed, `[hidden]`.
    pub offset: Option<Buffer<f32>>,
}

/// Which of the hot neurons are computed.
#[derive(Debug)]
pub enum DeviceSelector {
    /// All neurons.
    Dense,
    /// Neurons whose `act(gate·x)` is not exactly zero.
    Exact,
    /// Neurons with non-zero `act(gate·x)` among those predicted by a network.
    Predicted {
        /// The network.
        predictor: Box<Predictor>,
        /// Whether its input is the hidden state before the norm.
        reads_residual: bool,
    },
    /// Neurons with non-zero `act(gate·x)` among those predicted by signs.
    SignBit(SignBits),
    /// Neurons with non-zero `act(gate·x)` among those predicted on the host.
    Host,
    /// Neurons whose `act(gate·x)`, times a scale per neuron if there is one, has at least a magnitude.
    Gate {
        /// Smallest magnitude that is computed.
        threshold: f32,
        /// Scale per neuron.
        scale: Option<Buffer<f32>>,
    },
    /// Neurons whose product, less a centre if there is one, times a scale has at least a magnitude.
    Contribution {
        /// Smallest magnitude that is computed.
        threshold: f32,
        /// Scale per neuron.
        scale: Buffer<f32>,
        /// Subtracted from the product of each neuron.
        centre: Option<Buffer<f32>>,
    },
}

impl DeviceLayer {
    /// Whether any neurons stay on the device.
    pub fn has_neurons(&self) -> bool {
        self.hot_count() > 0
    }

    /// Number of neurons that stay on the device.
    pub(crate) fn hot_count(&self) -> usize {
        self.ffn.as_ref().map_or(0, |ffn| ffn.ffn.down.rows())
    }

    /// Whether neurons are predicted on the host, which needs the hidden state for it.
    pub fn is_predicted_on_host(&self) -> bool {
        let selector = self.ffn.as_ref().map(|ffn| &ffn.selector);
        matches!(selector, Some(DeviceSelector::Host))
    }

    /// Whether a router or a predictor limits the computed neurons before any of their weights are read.
    pub fn is_masked(&self) -> bool {
        let ffn = self.ffn.as_ref();
        ffn.is_some_and(|ffn| ffn.router.is_some() || ffn.selector.predicts())
    }

    /// Sizes in bytes on the device, without the KV cache: attention and all norms, predictor, neurons.
    pub(crate) fn bytes(&self) -> [usize; 3] {
        let attention = self.attention.as_ref().map_or(0, DeviceAttention::bytes);
        let [ffn_norm, predictor, neurons] = self.ffn.as_ref().map_or([0; 3], DeviceFfn::bytes);
        let norms = self.norms_after.iter().flatten().map(GpuNorm::bytes);
        let norms = ffn_norm + norms.sum::<usize>();
        [attention + norms, predictor, neurons]
    }
}

impl DeviceAttention {
    /// Size in bytes of the four projections.
    pub(crate) fn projection_bytes(&self) -> usize {
        [&self.query, &self.key, &self.value, &self.output]
            .map(GpuLinear::bytes)
            .iter()
            .sum()
    }

    pub(crate) fn bytes(&self) -> usize {
        let head_norms = self.head_norms.as_ref();
        self.projection_bytes()
            + head_norms.map_or(0, |norms| norms.query.bytes() + norms.key.bytes())
            + buffer_bytes(&self.sinks)
            + norm_bytes(&self.norm)
    }
}

impl DeviceFfn {
    /// Routing weights in `routes` of the neurons from `first` on, in a mixture of experts.
    pub(crate) fn routing<'a>(&'a self, routes: &'a Routes, first: usize) -> Option<Routing<'a>> {
        self.router.as_ref().map(|router| Routing {
            weights: &routes.weights,
            blocks: &router.blocks,
            block_count: router.block_count,
            first,
        })
    }

    /// Bias of down for the current tokens; in a mixture of experts with biases, the weighted sums that the router wrote to `routes`.
    pub(crate) fn bias<'a>(&'a self, routes: &'a Routes) -> Option<&'a Buffer<f32>> {
        let has_biases = |router: &Router| router.biases.is_some();
        match self.router.as_ref().is_some_and(has_biases) {
            true => Some(&routes.bias_sums),
            false => self.ffn.bias.as_ref(),
        }
    }

    /// Sizes in bytes of norm, output bias and router, of predictor, and of neurons.
    fn bytes(&self) -> [usize; 3] {
        let Ffn {
            gate,
            up,
            down,
            bias,
            ..
        } = &self.ffn;
        let neurons = gate.bytes() + up.as_ref().map_or(0, GpuLinear::bytes) + down.bytes();
        let router = self.router.as_ref().map_or(0, Router::bytes);
        let around = buffer_bytes(bias) + norm_bytes(&self.norm) + buffer_bytes(&self.offset);
        let around = around + router;
        [around, self.selector.bytes(), neurons]
    }
}

impl DeviceSelector {
    /// Whether neurons are predicted before any weight of a neuron is read.
    pub(crate) fn predicts(&self) -> bool {
        match self {
            Self::Host | Self::Predicted { .. } | Self::SignBit(_) => true,
            Self::Dense | Self::Exact | Self::Gate { .. } | Self::Contribution { .. } => false,
        }
    }

    /// Condition on a neuron's `act(gate·x)` or product under which it is computed; `vectors` are scales and centres of
    /// other neurons than the hot ones.
    pub(crate) fn filter<'a>(&'a self, vectors: Option<[&'a Buffer<f32>; 2]>) -> NeuronFilter<'a> {
        match self {
            Self::Dense => NeuronFilter::All,
            Self::Gate { threshold, scale } => match scale {
                None => NeuronFilter::GateThreshold(*threshold),
                Some(hot) => NeuronFilter::ScaledGateThreshold(
                    *threshold,
                    vectors.map_or(hot, |[scale, _]| scale),
                ),
            },
            Self::Contribution {
                threshold,
                scale,
                centre,
            } => NeuronFilter::ContributionThreshold {
                threshold: *threshold,
                scale: vectors.map_or(scale, |[scale, _]| scale),
                centre: centre
                    .as_ref()
                    .map(|hot| vectors.map_or(hot, |[_, centre]| centre)),
            },
            Self::Exact | Self::Predicted { .. } | Self::SignBit(_) | Self::Host => {
                NeuronFilter::NonZeroGate
            }
        }
    }

    /// Bytes that a prediction reads.
    pub(crate) fn read_bytes(&self) -> usize {
        match self {
            Self::Predicted { predictor, .. } => {
                let scales = buffer_bytes(&predictor.b_scales);
                predictor.a.bytes()
                    + predictor.b_transposed.bytes()
                    + scales
                    + predictor.bias.bytes()
            }
            Self::SignBit(signs) => signs.signs.bytes(),
            _ => 0,
        }
    }

    fn bytes(&self) -> usize {
        let buffers = match self {
            Self::Gate { scale, .. } => buffer_bytes(scale),
            Self::Contribution { scale, centre, .. } => scale.bytes() + buffer_bytes(centre),
            _ => 0,
        };
        self.read_bytes() + buffers
    }

    /// Hidden units of the predictor, 0 without one.
    pub(crate) fn rank(&self) -> usize {
        match self {
            Self::Predicted { predictor, .. } => predictor.b_transposed.rows(),
            _ => 0,
        }
    }
}

/// Size in bytes of a norm.
pub(crate) fn norm_bytes(norm: &Option<GpuNorm>) -> usize {
    norm.as_ref().map_or(0, GpuNorm::bytes)
}

/// Size in bytes of a vector.
fn buffer_bytes(buffer: &Option<Buffer<f32>>) -> usize {
    buffer.as_ref().map_or(0, Buffer::bytes)
}
