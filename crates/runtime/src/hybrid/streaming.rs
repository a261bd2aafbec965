//! Cold neurons of a prompt on the device: where many tokens share the way, copying their weights there costs less than
//! computing them here. Pieces of them alternate on two staging streams, so that one is copied while another is multiplied.
//!
//! ```text
//! copy     cold · bytes of a neuron / PCIe
//! compute  tokens · the lesser of what the plan predicts for one
//!                            and  2 · cold · weights of a neuron / operations per second
//! ```

use std::sync::Arc;

use powerinfer_artifact::plan::{LayerPlan, Plan};
use powerinfer_bundle::memory::PREFILL_BATCH;
use powerinfer_kernels::cuda::{
    Buffer, Device, DeviceError, DownAddends, Ffn, GpuLinear, GpuMatrix, NeuronFilter,
    StagingStream, TokenMasks,
};

use powerinfer_model::ModelConfig;

use super::{DeviceChoice, Hybrid, launches::products_of_many};
use crate::{Threads, linear::Linear, selector::Selector};

/// Neurons that are copied, and then multiplied, at a time.
pub(super) const PIECE: usize = 512;

/// From how many tokens on the cold neurons of a layer are copied, by the speeds that `plan` was made with; none where
/// that never pays.
pub(super) fn least_tokens(
    plan: &Plan,
    of_plan: &LayerPlan,
    config: &ModelConfig,
) -> Option<usize> {
    let gpu = plan.hardware.gpu.as_ref()?;
    let cold = of_plan.neuron_count.checked_sub(of_plan.hot_count)?;
    if cold == 0 {
        return None;
    }
    let bytes = cold as f64 * of_plan.neuron_bytes as f64;
    let copy = gpu.pcie_latency_seconds + bytes / gpu.pcie_bandwidth_bytes_per_second;
    let weights = config.matrices_per_neuron() * config.hidden_size;
    let products = 2.0 * (cold * weights) as f64;
    let operations = plan.hardware.cpu.operations_per_second;
    let at_once = operations.map_or(f64::INFINITY, |speed| products / speed);
    let computing = at_once.min(of_plan.cpu_microseconds * 1e-6);
    // Of no number of tokens where computing takes no time.
    let least = (copy / computing).ceil();
    (least <= PREFILL_BATCH as f64).then_some((least as usize).max(2))
}

/// Some neurons on their way to the device, or there.
#[derive(Debug)]
pub(super) struct Piece {
    /// Given back before what it copies to.
    staging: StagingStream,
    ffn: Ffn,
    /// What a rule multiplies each neuron by, and takes off of it.
    scale: Buffer<f32>,
    centre: Buffer<f32>,
    /// How many neurons there are.
    count: usize,
}

impl Piece {
    /// Room for neurons like those of `ffn`, of which a layer has `most` that are cold, on staging stream `number`.
    pub(super) fn new(
        device: &Arc<dyn Device>,
        number: usize,
        ffn: &Ffn,
        most: usize,
    ) -> Result<Self, DeviceError> {
        let rows = most.min(PIECE);
        let matrix = |like: &GpuMatrix| {
            GpuMatrix::with_capacity(device, like.format(), rows, like.columns())
        };
        let linear = |like: &GpuLinear| -> Result<GpuLinear, DeviceError> {
            let bias = like.bias.as_ref().map(|_| Buffer::new(device, rows));
            Ok(GpuLinear {
                matrix: matrix(&like.matrix)?,
                bias: bias.transpose()?,
            })
        };
        let ffn = Ffn {
            gate: linear(&ffn.gate)?,
            up: ffn.up.as_ref().map(linear).transpose()?,
            down: matrix(&ffn.down)?,
            bias: None,
            kind: ffn.kind,
            activation: ffn.activation,
        };
        let (scale, centre) = (Buffer::new(device, rows)?, Buffer::new(device, rows)?);
        let bytes = weight_bytes(&ffn) + scale.bytes() + centre.bytes();
        // Three matrices of three planes at most, two biases, two vectors.
        let staging = StagingStream::new(device, number, 13, bytes)?;
        Ok(Self {
            staging,
            ffn,
            scale,
            centre,
            count: 0,
        })
    }

    /// Bytes on the device.
    pub(super) fn bytes(&self) -> usize {
        weight_bytes(&self.ffn) + self.scale.bytes() + self.centre.bytes()
    }

    /// The rule of the layer, with numbers of these neurons.
    fn rule<'a>(&'a self, choice: &DeviceChoice) -> NeuronFilter<'a> {
        match choice {
            DeviceChoice::Every => NeuronFilter::All,
            DeviceChoice::ByGate(threshold, None) => NeuronFilter::GateThreshold(*threshold),
            DeviceChoice::ByGate(threshold, Some(_)) => {
                NeuronFilter::ScaledGateThreshold(*threshold, &self.scale)
            }
            DeviceChoice::ByContribution {
                threshold, centre, ..
            } => NeuronFilter::ContributionThreshold {
                threshold: *threshold,
                scale: &self.scale,
                centre: centre.as_ref().map(|_| &self.centre),
            },
            _ => NeuronFilter::NonZeroGate,
        }
    }
}

fn weight_bytes(ffn: &Ffn) -> usize {
    let up = ffn.up.as_ref().map_or(0, GpuLinear::bytes);
    ffn.gate.bytes() + up + ffn.down.bytes()
}

/// Where the cold neurons of a layer lie here, and who copies them.
#[derive(Clone, Copy)]
pub(crate) struct ColdWeights<'a> {
    pub(crate) gate: Linear<'a>,
    pub(crate) up: Option<Linear<'a>>,
    pub(crate) down: Linear<'a>,
    /// How the layer's neurons are chosen.
    pub(crate) selector: Selector<'a>,
    pub(crate) threads: &'a Threads,
}

impl ColdWeights<'_> {
    /// Sends the neurons from `first` on to `piece`, as many as it takes; its staging stream has begun.
    fn send(&self, first: usize, piece: &mut Piece) -> Result<(), DeviceError> {
        let Piece {
            staging,
            ffn,
            scale,
            centre,
            count,
        } = piece;
        let neurons = self.down.matrix.rows();
        let rows = first..neurons.min(first + ffn.down.capacity());
        *count = rows.len();
        let copy = |to: &mut [u8], from: &[u8]| self.threads.copy(to, from);
        let mut linear = |from: &Linear<'_>, to: &mut GpuLinear| -> Result<(), DeviceError> {
            let matrix = from.matrix.rows_range(rows.clone());
            to.matrix.write_async(&matrix, staging, &copy)?;
            match (&mut to.bias, from.bias) {
                (Some(to), Some(from)) => to.write_async(&from[rows.clone()], staging, &copy),
                _ => Ok(()),
            }
        };
        linear(&self.gate, &mut ffn.gate)?;
        if let (Some(from), Some(to)) = (&self.up, &mut ffn.up) {
            linear(from, to)?;
        }
        let down = self.down.matrix.rows_range(rows.clone());
        ffn.down.write_async(&down, staging, &copy)?;
        if let Selector::Threshold(scoring) = &self.selector {
            for (from, to) in scoring.of_neurons().into_iter().zip([scale, centre]) {
                if let Some(numbers) = from {
                    to.set_len(rows.len());
                    to.write_async(&numbers[rows.clone()], staging, &copy)?;
                }
            }
        }
        Ok(())
    }
}

impl Hybrid {
    /// Whether the cold neurons of layer `index` are copied to the device for the tokens that run.
    pub(super) fn streams(&self, index: usize) -> bool {
        let many = self.state.many.as_ref();
        let least = self.layers[index].streams_from;
        many.is_some_and(|many| many.pieces.is_some())
            && least.is_some_and(|least| self.tokens >= least)
    }

    /// From here on cold neurons can set out, whatever is launched meanwhile.
    pub(super) fn open_stream(&mut self) -> Result<(), DeviceError> {
        let many = self.state.many.as_mut().expect("several tokens");
        let [first, _] = many.pieces.as_mut().expect("room for cold neurons");
        first.staging.begin()
    }

    /// The first cold neurons of layer `index` set out.
    pub(super) fn begin_stream(
        &mut self,
        index: usize,
        weights: &ColdWeights<'_>,
    ) -> Result<(), DeviceError> {
        let layer = &self.layers[index];
        let hot = layer.ffn.as_ref().map_or(0, |ffn| ffn.ffn.down.rows());
        let many = self.state.many.as_mut().expect("several tokens");
        let [first, _] = many.pieces.as_mut().expect("room for cold neurons");
        weights.send(hot, first)
    }

    /// Adds what the cold neurons of layer `index` contribute, piece by piece, of which the first is on its way; the
    /// input of its FFN is there as halves.
    pub(super) fn stream(
        &mut self,
        index: usize,
        weights: &ColdWeights<'_>,
    ) -> Result<(), DeviceError> {
        let layer = &self.layers[index];
        let found = layer.ffn.as_ref().expect("neurons are here");
        let is_masked = layer.predicts();
        let state = &mut self.state;
        let many = state.many.as_mut().expect("several tokens");
        let [piece, next] = many.pieces.as_mut().expect("room for cold neurons");
        let (mut piece, mut next) = (piece, next);
        let mut first = found.ffn.down.rows();
        while first < layer.neurons {
            let behind = first + piece.count;
            if behind < layer.neurons {
                next.staging.begin()?;
                weights.send(behind, next)?;
            }
            piece.staging.end()?;
            let chosen = is_masked.then_some(TokenMasks {
                mask: &state.mask,
                neurons: layer.neurons,
                first,
            });
            let products = (&mut state.products, &mut many.up, &mut many.products);
            products_of_many(
                &self.gpu,
                &piece.ffn,
                piece.rule(&found.choice),
                chosen,
                &many.halves,
                products,
                &mut state.down,
            )?;
            let hidden = &mut state.hidden;
            self.gpu
                .gemm_down(&many.products, &piece.ffn, DownAddends::default(), hidden)?;
            first = behind;
            std::mem::swap(&mut piece, &mut next);
        }
        Ok(())
    }
}
