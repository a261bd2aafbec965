//! Cold neurons of a prompt, copied to the device: if many tokens share the copy, it costs less than computing the neurons
//! on the host. Pieces of them alternate on two staging streams: one is copied while another is multiplied.

use std::{ops::Range, sync::Arc};

use powerinfer_kernels::cuda::{
    Buffer, Device, DeviceError, DownAddends, Ffn, GpuLinear, GpuMatrix, StagingStream, TokenMasks,
};
use powerinfer_tensor::Matrix;

use crate::{DeviceModel, experts::ExpertProducts, launches::activate_batch};

/// Neurons that are copied, and then multiplied, at a time.
pub const COPIED_NEURONS: usize = 512;

/// A matrix in host memory, and its bias.
pub type HostLinear<'a> = (Matrix<'a>, Option<&'a [f32]>);

/// Neurons of a layer in host memory, all of them by rows.
#[derive(Clone, Copy)]
pub struct ColdNeurons<'a> {
    /// Gate, `[neurons, hidden]`.
    pub gate: HostLinear<'a>,
    /// Up, in gated FFNs.
    pub up: Option<HostLinear<'a>>,
    /// Down, `[neurons, hidden]`.
    pub down: Matrix<'a>,
    /// Scale and centre per neuron of a threshold, if it has them.
    pub score: [Option<&'a [f32]>; 2],
    /// Copies bytes to pinned memory, with several threads.
    pub copy: &'a dyn Fn(&mut [u8], &[u8]),
}

/// Some cold neurons on their way to the device, or there.
#[derive(Debug)]
pub(crate) struct Piece {
    // Dropped before the buffers that it copies to.
    staging: StagingStream,
    ffn: Ffn,
    /// Scale and centre per neuron of a threshold.
    scale: Buffer<f32>,
    centre: Buffer<f32>,
    /// Number of neurons.
    count: usize,
}

impl Piece {
    /// Room for neurons in the formats of `ffn`, of which no layer has more than `most` cold ones, on staging stream `number`.
    pub(crate) fn new(
        device: &Arc<dyn Device>,
        number: usize,
        ffn: &Ffn,
        most: usize,
    ) -> Result<Self, DeviceError> {
        let rows = most.min(COPIED_NEURONS);
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
        // At most three matrices of three planes, two biases, scale and centre.
        let staging = StagingStream::new(device, number, 13, bytes)?;
        Ok(Self {
            staging,
            ffn,
            scale,
            centre,
            count: 0,
        })
    }

    /// Size in bytes on the device.
    pub(crate) fn bytes(&self) -> usize {
        weight_bytes(&self.ffn) + self.scale.bytes() + self.centre.bytes()
    }

    /// Starts the copies of the neurons from `first` on, as many as fit; the staging stream has begun.
    fn fill(&mut self, first: usize, neurons: &ColdNeurons<'_>) -> Result<(), DeviceError> {
        let Self {
            staging,
            ffn,
            scale,
            centre,
            count,
        } = self;
        let rows = first..neurons.down.rows().min(first + ffn.down.capacity());
        *count = rows.len();
        let copy = neurons.copy;
        let mut linear = |(matrix, bias): HostLinear<'_>, to: &mut GpuLinear| {
            let bias = bias.map(|bias| &bias[rows.clone()]);
            to.write_async((matrix.rows_range(rows.clone()), bias), staging, copy)
        };
        linear(neurons.gate, &mut ffn.gate)?;
        if let (Some(from), Some(to)) = (neurons.up, &mut ffn.up) {
            linear(from, to)?;
        }
        let down = neurons.down.rows_range(rows.clone());
        ffn.down.write_async(&down, staging, copy)?;
        for (from, to) in neurons.score.into_iter().zip([scale, centre]) {
            if let Some(numbers) = from {
                to.set_len(rows.len());
                to.write_async(0, &numbers[rows.clone()], staging, copy)?;
            }
        }
        Ok(())
    }
}

/// Size in bytes of gate, up and down.
fn weight_bytes(ffn: &Ffn) -> usize {
    let up = ffn.up.as_ref().map_or(0, GpuLinear::bytes);
    ffn.gate.bytes() + up + ffn.down.bytes()
}

/// Copying of cold neurons.
///
/// # Errors
///
/// All methods return an error if the device fails.
///
/// # Panics
///
/// All but [`streams`](Self::streams) panic if no cold neurons are copied for the tokens that run.
#[expect(
    clippy::missing_errors_doc,
    clippy::missing_panics_doc,
    reason = "stated once for all methods"
)]
impl DeviceModel {
    /// Whether the cold neurons of layer `index` are copied to the device for the tokens that run.
    pub fn streams(&self, index: usize) -> bool {
        let prompt = self.state.prompt.as_ref();
        let least = self.layers[index].streams_from;
        prompt.is_some_and(|prompt| prompt.pieces.is_some())
            && least.is_some_and(|least| self.tokens >= least)
    }

    /// Opens the staging stream: copies that follow may overlap launches.
    pub fn open_stream(&mut self) -> Result<(), DeviceError> {
        let [first, _] = self.pieces();
        first.staging.begin()
    }

    /// Starts the copies of the first piece of the cold neurons of layer `index`.
    pub fn begin_stream(
        &mut self,
        index: usize,
        neurons: &ColdNeurons<'_>,
    ) -> Result<(), DeviceError> {
        let hot = self.layers[index].hot_count();
        let [first, _] = self.pieces();
        first.fill(hot, neurons)
    }

    fn pieces(&mut self) -> &mut [Piece; 2] {
        let prompt = self.state.prompt.as_mut().expect("a prompt runs");
        prompt.pieces.as_mut().expect("room for cold neurons")
    }

    /// Adds the contributions of the cold neurons of layer `index`, piece by piece; the first piece is on its way, and
    /// [`gate_up`](Self::gate_up) has left the FFN's input in 16 bits.
    pub fn stream(&mut self, index: usize, neurons: &ColdNeurons<'_>) -> Result<(), DeviceError> {
        let prompt = self.state.prompt.as_mut().expect("a prompt runs");
        let mut pieces = prompt.pieces.take().expect("room for cold neurons");
        let streamed = self.stream_pieces(index, neurons, &mut pieces);
        let prompt = self.state.prompt.as_mut().expect("a prompt runs");
        prompt.pieces = Some(pieces);
        streamed
    }

    fn stream_pieces(
        &mut self,
        index: usize,
        neurons: &ColdNeurons<'_>,
        [piece, next]: &mut [Piece; 2],
    ) -> Result<(), DeviceError> {
        let by_expert = self.multiplies_by_expert(index);
        let layer = &self.layers[index];
        let found = layer.ffn.as_ref().expect("neurons are on the device");
        let is_masked = layer.is_masked();
        let state = &mut self.state;
        let (mut piece, mut next) = (piece, next);
        let mut rows: Range<usize> = layer.hot_count()..layer.neurons;
        while !rows.is_empty() {
            let first = rows.start;
            rows.start += piece.count;
            if !rows.is_empty() {
                next.staging.begin()?;
                next.fill(rows.start, neurons)?;
            }
            piece.staging.end()?;
            let vectors = Some([&piece.scale, &piece.centre]);
            let filter = found.selector.filter(vectors);
            if by_expert {
                let part = first..first + piece.count;
                ExpertProducts::new(&self.gpu, layer, state).add(&piece.ffn, &part, filter)?;
            } else {
                let prompt = state.prompt.as_mut().expect("a prompt runs");
                let masks = is_masked.then_some(TokenMasks {
                    mask: &state.mask,
                    neurons: layer.neurons,
                    first,
                    tokens: None,
                });
                let all = 0..piece.count;
                activate_batch(
                    &self.gpu,
                    (&piece.ffn, &all),
                    (filter, found.routing(&state.routes, first)),
                    masks,
                    (&prompt.input, &prompt.sums),
                    (&mut state.products, &mut prompt.up, &mut prompt.products),
                    &mut state.down,
                )?;
                self.gpu.gemm_down(
                    &prompt.products,
                    &piece.ffn.down,
                    &all,
                    &prompt.sums,
                    DownAddends::default(),
                    &mut state.hidden,
                )?;
            }
            std::mem::swap(&mut piece, &mut next);
        }
        Ok(())
    }
}
