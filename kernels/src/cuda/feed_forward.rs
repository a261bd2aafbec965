//! The FFN of a token, or of a batch, over the hot neurons: the kernels `gate_up` and `down` of `feed_forward.cu`.

use bytemuck::Zeroable;
use powerinfer_tensor::{FfnKind, Format};

use super::{
    Buffer, DeviceError, Ffn, Gpu, GpuMatrix, GpuNorm, HostBuffer, KeptInput, NeuronFilter,
    Routing, arguments,
    ffn::neurons,
    gpu::{
        GEMV_THREADS, MAX_MULTIPROCESSORS, THREADS, WARP, WORD, input_bytes, kernel, mask_bytes,
        width,
    },
};
use crate::Arithmetic;

/// Threads per row of the kernel `down`, rows that a block reads in parallel, and rows that it lists at a time.
const ROW_THREADS: usize = 16;
const ROW_GROUPS: usize = THREADS / ROW_THREADS;
const LIST_CAPACITY: usize = 2 * THREADS;

/// Mapped host memory from which the host reads the input of a layer's FFN.
#[derive(Debug, Clone, Copy)]
pub struct HostMirror<'a> {
    /// `[tokens, hidden]`: the normalised input.
    pub input: &'a HostBuffer,
    /// One word per layer: the last step whose input and mask the host can read.
    pub flags: &'a HostBuffer,
    /// Index of the layer's word.
    pub flag: usize,
    /// `[1]`: number of the current step.
    pub step: &'a Buffer<u32>,
}

/// The sum that the host's cold neurons contribute.
#[derive(Debug, Clone, Copy)]
pub struct ColdSum<'a> {
    /// `[tokens, hidden]`: the sum, in mapped host memory.
    pub sum: &'a HostBuffer,
    /// Words with the last step whose sum is complete, and the layer's index; `None` if it is complete already.
    pub flag: Option<(&'a HostBuffer, usize)>,
    /// `[1]`: number of the current step.
    pub step: &'a Buffer<u32>,
    /// `[1]`: set to the step number when a block waited for the sum longer than the timeout.
    pub timed_out: &'a HostBuffer,
    /// Longest wait of a block, in nanoseconds.
    pub timeout_nanoseconds: u64,
}

/// Scratch memory and neuron counters of [`Gpu::down`], reused from call to call.
#[derive(Debug)]
pub struct DownScratch {
    partial: Buffer<f32>,
    /// One per tile of columns, all 0 between launches.
    counters: Buffer<u32>,
    /// Rows of down, rows of gate, and neurons of any token.
    counted: Buffer<u32>,
}

/// Running counts of the FFN rows that were read, modulo 2³².
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NeuronCounts {
    /// Rows of down: neurons with `h != 0`.
    pub down_rows: u32,
    /// Rows of gate, in decoding alone.
    pub gate_rows: u32,
    /// Neurons with `h != 0` for any token of a batch, in decoding alone.
    pub union_rows: u32,
}

impl NeuronCounts {
    /// Increments since the `earlier` counts.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            down_rows: self.down_rows.wrapping_sub(earlier.down_rows),
            gate_rows: self.gate_rows.wrapping_sub(earlier.gate_rows),
            union_rows: self.union_rows.wrapping_sub(earlier.union_rows),
        }
    }
}

impl DownScratch {
    /// Counts since the scratch was allocated. Waits for the device.
    ///
    /// # Errors
    ///
    /// The device fails.
    pub fn counts(&self) -> Result<NeuronCounts, DeviceError> {
        let counted = self.counted.to_vec()?;
        Ok(NeuronCounts {
            down_rows: counted[0],
            gate_rows: counted[1],
            union_rows: counted[2],
        })
    }

    /// Clears state that a failed launch may have left behind.
    ///
    /// # Errors
    ///
    /// The device fails.
    pub fn reset(&mut self) -> Result<(), DeviceError> {
        self.counters.clear()
    }

    /// Device address of the counter of rows of down.
    pub(super) fn down_rows_address(&self) -> u64 {
        self.counted.address()
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        self.partial.bytes() + self.counters.bytes() + self.counted.bytes()
    }
}

/// Number of elements between the biases of consecutive tokens: 0 for a shared bias `[columns]`, `columns` for `[tokens, columns]`.
///
/// # Panics
///
/// The bias has another shape.
pub(super) fn bias_stride(bias: Option<&Buffer<f32>>, tokens: usize, columns: usize) -> i32 {
    match bias.map_or(columns, Buffer::len) {
        shared if shared == columns => 0,
        of_tokens => {
            assert_eq!(of_tokens, tokens * columns, "a bias per token");
            columns as i32
        }
    }
}

impl Gpu {
    /// `activations[i] = act(gate[i] · x) * (up[i] · x)` with `x = norm(x)`, times the weight of the neuron's expert in `routing`, for the
    /// hot neurons that `mask` selects, or for all without a mask. Tokens, at most [`batch_tokens`](Self::batch_tokens), share one pass over
    /// the rows that any of them needs.
    ///
    /// `x` is `[tokens, hidden]`, `activations` `[tokens, hot]`, the mask `[tokens, words]`. Neurons that are in no token's mask
    /// keep their activations, those that `filter` drops get 0. If the host has neurons of the layer, it receives the
    /// normalised input in `host`. If a [prediction](Self::predict) has kept the input in `kept`, it is not normed and rounded
    /// again.
    ///
    /// # Errors
    ///
    /// The launch fails, or the input exceeds the shared memory of a thread block.
    ///
    /// # Panics
    ///
    /// A shape does not match.
    #[expect(
        clippy::too_many_arguments,
        reason = "the operands of one fused kernel"
    )]
    pub fn gate_up(
        &self,
        x: &Buffer<f32>,
        norm: Option<&GpuNorm>,
        ffn: &Ffn,
        filter: NeuronFilter<'_>,
        routing: Option<Routing<'_>>,
        mask: Option<&Buffer<u32>>,
        activations: &mut Buffer<f32>,
        kept: Option<&KeptInput>,
        host: Option<HostMirror<'_>>,
        scratch: &mut DownScratch,
    ) -> Result<(), DeviceError> {
        let gate = &ffn.gate.matrix;
        let (hot, columns, format) = (gate.rows(), gate.columns(), gate.format());
        let words = hot.div_ceil(WORD);
        let tokens = x.len() / columns.max(1);
        assert!((1..=self.batch_tokens(columns, format, hot)).contains(&tokens));
        assert!(x.len() == tokens * columns && activations.len() >= tokens * hot);
        let mask_words = mask.map_or(0, |mask| mask.len() / tokens);
        assert!(mask.is_none() || mask_words >= words);
        assert_eq!(
            ffn.up.is_none(),
            ffn.kind == FfnKind::Plain,
            "up exactly if the FFN is gated"
        );
        let mut arguments = arguments::GateUp::zeroed();
        if let Some(up) = &ffn.up {
            let up_matrix = &up.matrix;
            assert!(up_matrix.format() == format && up_matrix.columns() == columns);
            assert_eq!(up_matrix.rows(), hot, "one row of up per row of gate");
            arguments.up = up_matrix.argument();
            arguments.up_bias = up.bias_address();
        }
        arguments.ffn = neurons(ffn, &(0..hot), filter, routing, tokens);
        if let Some(host) = host {
            assert!(host.input.len() >= tokens * columns && !host.step.is_empty());
            arguments.host_input = match kept {
                Some(_) => 0,
                None => host.input.address(0),
            };
            arguments.flag = host.flags.address(host.flag);
            arguments.step = host.step.address();
        }
        if let Some(kept) = kept {
            assert!(kept.is_for(columns, tokens) && self.uses_int8(format));
            arguments.rounded = kept.address();
        }
        arguments.x = x.address();
        arguments.norm = GpuNorm::argument(norm, columns);
        arguments.gate = gate.argument();
        arguments.gate_bias = ffn.gate.bias_address();
        arguments.mask = mask.map_or(0, Buffer::address);
        arguments.mask_words = mask_words as i32;
        arguments.hot_count = hot as i32;
        arguments.tokens = tokens as i32;
        arguments.activations = activations.address();
        let counter = |index: usize| scratch.counted.address() + (index * size_of::<u32>()) as u64;
        (arguments.gate_rows, arguments.union_rows) = (counter(1), counter(2));
        arguments.int8 = (self.arithmetic == Arithmetic::Integer).into();
        let mask_bytes = match mask {
            Some(_) => mask_bytes(words),
            None => 0,
        };
        let shared = input_bytes(columns, self.uses_int8(format), tokens) + mask_bytes;
        let grid = [self.row_blocks(hot.max(1)), 1, 1];
        let name = kernel(
            if tokens == 1 {
                "gate_up"
            } else {
                "gate_up_batch"
            },
            format,
        );
        let what = "gate and up";
        self.launch(&name, grid, GEMV_THREADS, shared, what, &arguments)
    }

    /// `hidden += Σ_i activations[i] * down[i] + bias + offset + cold`, over the hot neurons with a non-zero activation.
    ///
    /// `hidden` is `[tokens, hidden]`, `activations` `[tokens, hot]`, `offset` `[hidden]`, and `bias` `[hidden]` or `[tokens, hidden]`.
    ///
    /// # Errors
    ///
    /// The launch fails.
    ///
    /// # Panics
    ///
    /// A shape does not match, or `scratch` was made for a smaller matrix or fewer tokens.
    pub fn down(
        &self,
        ffn: &Ffn,
        activations: &Buffer<f32>,
        [bias, offset]: [Option<&Buffer<f32>>; 2],
        cold: Option<ColdSum<'_>>,
        scratch: &mut DownScratch,
        hidden: &mut Buffer<f32>,
    ) -> Result<(), DeviceError> {
        let DownScratch {
            partial,
            counters,
            counted,
        } = scratch;
        let matrix = &ffn.down;
        let (format, rows, columns) = (matrix.format(), matrix.rows(), matrix.columns());
        let tiles = down_tiles(format, columns);
        let multiprocessors = self.multiprocessors();
        let chunks = down_chunks(multiprocessors, format, rows, columns);
        let tokens = hidden.len() / columns.max(1);
        assert!(activations.len() >= tokens * matrix.rows() && hidden.len() == tokens * columns);
        let partial_len = down_partial_len(multiprocessors, format, rows, columns);
        assert!(partial.len() >= tokens * partial_len);
        assert!(counters.len() >= tokens * tiles);
        assert!(offset.is_none_or(|added| added.len() == columns));
        let mut arguments = arguments::Down::zeroed();
        arguments.bias_stride = bias_stride(bias, tokens, columns);
        if let Some(cold) = cold {
            assert!(cold.sum.len() >= tokens * columns && !cold.step.is_empty());
            arguments.cold = cold.sum.address(0);
            arguments.flag = cold.flag.map_or(0, |(flags, index)| flags.address(index));
            arguments.step = cold.step.address();
            arguments.timed_out = cold.timed_out.address(0);
            arguments.timeout_nanoseconds = cold.timeout_nanoseconds;
        }
        arguments.down = matrix.argument();
        arguments.activations = activations.address();
        arguments.hot_count = matrix.rows() as i32;
        arguments.partial = partial.address();
        arguments.counters = counters.address();
        arguments.bias = bias.map_or(0, Buffer::address);
        arguments.offset = offset.map_or(0, Buffer::address);
        arguments.hidden = hidden.address();
        arguments.down_rows = counted.address();
        let group_stride = width(format) * (ROW_THREADS + 1) + ROW_THREADS;
        let shared = (ROW_GROUPS * group_stride + 2 * LIST_CAPACITY + WARP) * 4;
        let grid = [tokens as u32, tiles as u32, chunks as u32];
        let name = kernel("down", format);
        self.launch(&name, grid, THREADS, shared, "rows of down", &arguments)
    }

    /// Allocates scratch for [`Gpu::down`] of up to `tokens` tokens with any of `matrices`.
    ///
    /// # Errors
    ///
    /// The device is out of memory.
    pub fn down_scratch<'a>(
        &self,
        matrices: impl Iterator<Item = &'a GpuMatrix>,
        tokens: usize,
    ) -> Result<DownScratch, DeviceError> {
        let multiprocessors = self.multiprocessors();
        let largest = |(partial, tiles): (usize, usize), matrix: &GpuMatrix| {
            let (format, columns) = (matrix.format(), matrix.columns());
            let own = down_partial_len(multiprocessors, format, matrix.rows(), columns);
            (partial.max(own), tiles.max(down_tiles(format, columns)))
        };
        let (partial, tiles) = matrices.fold((0, 0), largest);
        Ok(DownScratch {
            partial: Buffer::new(self.device(), tokens * partial)?,
            counters: Buffer::new(self.device(), tokens * tiles)?,
            counted: Buffer::new(self.device(), 3)?,
        })
    }

    /// Upper bound of the bytes of [`down_scratch`](Self::down_scratch) on any GPU, for matrices of up to `rows` rows.
    pub fn max_down_scratch_bytes(
        format: Format,
        rows: usize,
        columns: usize,
        tokens: usize,
    ) -> usize {
        let partial = down_partial_len(MAX_MULTIPROCESSORS, format, rows, columns);
        (tokens * (partial + down_tiles(format, columns)) + 3) * size_of::<u32>()
    }
}

/// Thread blocks along the columns of down.
fn down_tiles(format: Format, columns: usize) -> usize {
    columns.div_ceil(ROW_THREADS * width(format)).max(1)
}

/// Number of elements in a token's partial sums, `[chunks, hidden]`, with rows padded to a multiple of four.
fn down_partial_len(multiprocessors: usize, format: Format, rows: usize, columns: usize) -> usize {
    down_chunks(multiprocessors, format, rows, columns) * columns.next_multiple_of(4)
}

/// Thread blocks along the neurons.
fn down_chunks(multiprocessors: usize, format: Format, rows: usize, columns: usize) -> usize {
    let limit = rows.div_ceil(WORD).max(1);
    (2 * multiprocessors)
        .div_ceil(down_tiles(format, columns))
        .clamp(1, limit)
}
