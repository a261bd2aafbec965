//! Prefill: GEMM over many tokens on the tensor cores, the kernels of `prompt.cu`.
//!
//! Inputs are converted to f16 once, each token divided by its power of two, so that nothing overflows. If
//! f32 precision is asked for, weights and inputs are split into an f16 and the f16 of its residual, and three
//! products are added.

use std::ops::Range;

use bytemuck::Zeroable;

use super::{
    Buffer, DeviceError, DownScratch, Ffn, Gpu, GpuLinear, GpuMatrix, GpuNorm, HostBuffer,
    HostMirror, NeuronFilter, Routing, arguments,
    feed_forward::bias_stride,
    ffn::neurons,
    gpu::{MAX_MULTIPROCESSORS, THREADS, WARP, WORD, input_bytes, kernel},
};
use crate::Arithmetic;
use powerinfer_tensor::Format;

/// Columns of a tile, and padding after each of its rows, in f16.
const TILE_COLUMNS: usize = 64;
const PADDING: usize = 8;
/// Rows of a tile, which are as many as its tokens. Narrow tiles are for few tokens or inputs with residuals, wide ones for many tokens.
const NARROW: usize = 64;
const WIDE: usize = 128;
/// Threads per block of the GEMM.
const GEMM_THREADS: usize = 256;
/// Stages of columns whose tokens have shared memory.
const STAGES: usize = 3;
/// Thread blocks per multiprocessor up to which tiles are split along the columns, in two waves; stages of a split, at least.
const SPLIT_BLOCKS: usize = 4;
const SPLIT_STAGES: usize = 4;

/// Vectors of several tokens in f16, the input of [`Gpu::gemm`].
#[derive(Debug)]
pub struct F16Buffer {
    /// `[terms, tokens, columns padded to whole tiles]`.
    values: Buffer<u16>,
    /// `[tokens]`.
    scales: Buffer<f32>,
    tokens: usize,
    columns: usize,
    /// 1, or 2 with residuals.
    terms: usize,
}

/// Partial sums of GEMMs that are split along the columns. GEMMs that run one after another share this memory.
#[derive(Debug)]
pub struct SplitSums {
    /// Partial sums of each thread block.
    partial: Buffer<f32>,
    /// A counter per tile, all 0 between launches.
    counters: Buffer<u32>,
}

impl SplitSums {
    /// Upper bound of the bytes that [`Gpu::new_split_sums`] allocates for the same arguments on any GPU.
    pub fn max_bytes(products: &[[usize; 2]], tokens: usize) -> usize {
        let block = NARROW * NARROW * size_of::<f32>() + size_of::<u32>();
        split_blocks(products, tokens, MAX_MULTIPROCESSORS) * block
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        self.partial.bytes() + self.counters.bytes()
    }

    /// Clears state that a failed launch may have left behind.
    ///
    /// # Errors
    ///
    /// The device fails.
    pub fn reset(&mut self) -> Result<(), DeviceError> {
        self.counters.clear()
    }
}

impl F16Buffer {
    /// Bytes for up to `tokens` vectors of `columns` elements, the inputs of matrices of `format`; those of quantised matrices are in
    /// 8 bits in decoding.
    pub fn max_bytes(tokens: usize, columns: usize, format: Format) -> usize {
        let padded = columns.next_multiple_of(TILE_COLUMNS);
        let number = terms(Arithmetic::Integer, format) * size_of::<u16>();
        tokens * (number * padded + size_of::<f32>())
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        self.values.bytes() + self.scales.bytes()
    }

    /// Sets the shape to `[tokens, 0]`: vectors without elements.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// The buffer was allocated for fewer tokens.
    pub fn clear(&mut self, tokens: usize) -> Result<(), DeviceError> {
        self.set_shape(tokens, 0, 1);
        self.scales.clear()
    }

    /// Sets the shape; the values are written by a kernel.
    fn set_shape(&mut self, tokens: usize, columns: usize, terms: usize) {
        (self.tokens, self.columns, self.terms) = (tokens, columns, terms);
        self.values
            .set_len(terms * tokens * columns.next_multiple_of(TILE_COLUMNS));
        self.scales.set_len(tokens);
    }

    fn argument(&self) -> arguments::F16Buffer {
        arguments::F16Buffer {
            values: self.values.address(),
            scales: self.scales.address(),
            tokens: self.tokens as i32,
            stride: self.columns.next_multiple_of(TILE_COLUMNS) as i32,
            terms: self.terms as i32,
            padding: 0,
        }
    }
}

/// Bit masks of the predicted neurons of several tokens.
#[derive(Debug, Clone, Copy)]
pub struct TokenMasks<'a> {
    /// `[tokens, ⌈neurons / 32⌉]` words.
    pub mask: &'a Buffer<u32>,
    /// Number of neurons of the layer.
    pub neurons: usize,
    /// First neuron of the matrices that the mask is applied to.
    pub first: usize,
    /// Tokens that are multiplied; `None` for all.
    pub tokens: Option<TokenList<'a>>,
}

/// List of some of a prompt's tokens, each at most once.
#[derive(Debug, Clone, Copy)]
pub struct TokenList<'a> {
    /// Buffer with one or more lists of tokens.
    pub lists: &'a Buffer<u32>,
    /// Position of this list in `lists`.
    pub start: usize,
    /// Number of tokens in this list.
    pub count: usize,
}

impl TokenList<'_> {
    fn address(self) -> u64 {
        assert!(self.start + self.count <= self.lists.len(), "a list");
        self.lists.address() + (self.start * size_of::<u32>()) as u64
    }
}

/// Terms added to the output of [`Gpu::gemm_down`].
#[derive(Debug, Clone, Copy, Default)]
pub struct DownAddends<'a> {
    /// Bias of down: `[hidden]`, added to every token, or `[tokens, hidden]`.
    pub bias: Option<&'a Buffer<f32>>,
    /// `[hidden]`, added to every token.
    pub offset: Option<&'a Buffer<f32>>,
    /// `[tokens, hidden]`: the sums of the host's cold neurons.
    pub cold: Option<&'a HostBuffer>,
}

impl Gpu {
    /// Allocates an [`F16Buffer`] for up to `tokens` vectors of `columns` elements, the inputs of matrices of `format`.
    ///
    /// # Errors
    ///
    /// The device is out of memory.
    pub fn new_f16_buffer(
        &self,
        tokens: usize,
        columns: usize,
        format: Format,
    ) -> Result<F16Buffer, DeviceError> {
        let padded = columns.next_multiple_of(TILE_COLUMNS);
        let numbers = self.terms(format) * tokens * padded;
        Ok(F16Buffer {
            values: Buffer::new(self.device(), numbers)?,
            scales: Buffer::new(self.device(), tokens)?,
            tokens,
            columns,
            terms: 1,
        })
    }

    /// Allocates partial sums for GEMMs of up to `tokens` tokens. `products` lists the numbers of inputs and outputs of each GEMM.
    ///
    /// # Errors
    ///
    /// The device is out of memory.
    pub fn new_split_sums(
        &self,
        products: &[[usize; 2]],
        tokens: usize,
    ) -> Result<SplitSums, DeviceError> {
        let multiprocessors = self.multiprocessors();
        let blocks = split_blocks(products, tokens, multiprocessors);
        Ok(SplitSums {
            partial: Buffer::new(self.device(), blocks * NARROW * NARROW)?,
            counters: Buffer::new(self.device(), blocks)?,
        })
    }

    /// `out = f16(norm(x))`, the input of a GEMM with matrices of `format`; `x` is `[tokens, columns]`.
    ///
    /// With `host`, the normalised input is also written to host memory; see [`Gpu::signal_host`].
    ///
    /// # Errors
    ///
    /// The launch fails, or a token exceeds the shared memory of a thread block.
    ///
    /// # Panics
    ///
    /// A shape does not match.
    pub fn to_f16(
        &self,
        x: &Buffer<f32>,
        tokens: usize,
        norm: Option<&GpuNorm>,
        format: Format,
        out: &mut F16Buffer,
        host: Option<HostMirror<'_>>,
    ) -> Result<(), DeviceError> {
        let columns = x.len() / tokens;
        assert_eq!(x.len(), tokens * columns, "whole vectors");
        assert!(host.is_none_or(|host| host.input.len() >= x.len()));
        out.set_shape(tokens, columns, self.terms(format));
        let arguments = arguments::ToF16 {
            x: x.address(),
            columns: columns as i32,
            padding: 0,
            norm: GpuNorm::argument(norm, columns),
            out: out.argument(),
            host_input: host.map_or(0, |host| host.input.address(0)),
        };
        let shared = input_bytes(columns, false, 1) + WARP * 4;
        let grid = [tokens as u32, 1, 1];
        self.launch("to_f16", grid, THREADS, shared, "a token", &arguments)
    }

    /// Sets the layer's flag to the step number: the host may read what the kernels before have written for it.
    ///
    /// # Errors
    ///
    /// The launch fails.
    pub fn signal_host(&self, host: HostMirror<'_>) -> Result<(), DeviceError> {
        let arguments = arguments::SignalHost {
            flag: host.flags.address(host.flag),
            step: host.step.address(),
        };
        self.launch("signal_host", [1, 1, 1], WARP, 0, "a word", &arguments)
    }

    /// `out = x · matrixᵀ + bias`, or `out += …` if `accumulate`; `out` is `[tokens, rows]`.
    ///
    /// # Errors
    ///
    /// The launch fails.
    ///
    /// # Panics
    ///
    /// A shape does not match.
    pub fn gemm(
        &self,
        x: &F16Buffer,
        linear: &GpuLinear,
        sums: &SplitSums,
        out: &mut Buffer<f32>,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        self.gemm_rows(x, linear, &(0..linear.matrix.rows()), sums, out, accumulate)
    }

    /// Like [`gemm`](Self::gemm), but with only the given rows of the matrix and of its bias.
    ///
    /// # Errors
    ///
    /// The launch fails.
    ///
    /// # Panics
    ///
    /// A shape does not match.
    pub fn gemm_rows(
        &self,
        x: &F16Buffer,
        linear: &GpuLinear,
        rows: &Range<usize>,
        sums: &SplitSums,
        out: &mut Buffer<f32>,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        let matrix = &linear.matrix;
        assert_eq!(matrix.columns(), x.columns, "one column per input");
        assert_eq!(out.len(), x.tokens * rows.len(), "one output per row");
        let bias = match linear.bias_address() {
            0 => 0,
            bias => bias + (rows.start * size_of::<f32>()) as u64,
        };
        let arguments = arguments::Gemm {
            bias,
            out: out.address(),
            accumulate: accumulate.into(),
            ..operands(matrix, rows, x, sums)
        };
        self.launch_gemm("gemm", matrix, rows.len(), x, sums, &arguments)
    }

    /// `h = act(gate) * up` of the neurons `rows`, times the weight of the neuron's expert in `routing`. Writes `h` in place of `gate`
    /// and as f16 to `out`; it is 0 for neurons outside `masks` and for those that `filter` skips.
    ///
    /// `gate` and `up` are `[tokens, rows]`: the products with the input.
    ///
    /// # Errors
    ///
    /// The launch fails.
    ///
    /// # Panics
    ///
    /// A shape does not match.
    #[expect(
        clippy::too_many_arguments,
        reason = "the operands of one fused kernel"
    )]
    pub fn activate_gate_up(
        &self,
        ffn: &Ffn,
        rows: &Range<usize>,
        filter: NeuronFilter<'_>,
        routing: Option<Routing<'_>>,
        gate: &mut Buffer<f32>,
        up: Option<&Buffer<f32>>,
        masks: Option<TokenMasks<'_>>,
        out: &mut F16Buffer,
        scratch: &mut DownScratch,
    ) -> Result<(), DeviceError> {
        let count = rows.len();
        let tokens = gate.len() / count.max(1);
        assert_eq!(gate.len(), tokens * count, "one value per neuron");
        assert!(up.is_none_or(|up| up.len() == gate.len()) && up.is_some() == ffn.up.is_some());
        let words = |masks: TokenMasks<'_>| masks.neurons.div_ceil(WORD);
        let listed = masks.and_then(|masks| masks.tokens);
        assert!(listed.is_none_or(|listed| listed.count == tokens));
        assert!(masks.is_none_or(|masks| {
            let rows_of_masks = masks.mask.len() / words(masks);
            masks.first + rows.end <= masks.neurons && (rows_of_masks == tokens || listed.is_some())
        }));
        out.set_shape(tokens, count, self.terms(ffn.down.format()));
        let arguments = arguments::ActivateGateUp {
            ffn: neurons(ffn, rows, filter, routing, tokens),
            gate: gate.address(),
            up: up.map_or(0, Buffer::address),
            tokens: listed.map_or(0, TokenList::address),
            mask: masks.map_or(0, |masks| masks.mask.address()),
            mask_words: masks.map_or(0, words) as i32,
            first_neuron: masks.map_or(0, |masks| masks.first + rows.start) as i32,
            padding: 0,
            count: count as i32,
            out: out.argument(),
            down_rows: scratch.down_rows_address(),
        };
        let grid = [tokens as u32, 1, 1];
        self.launch(
            "activate_gate_up",
            grid,
            THREADS,
            WARP * 4,
            "a token",
            &arguments,
        )
    }

    /// Copies the tokens in `list` from `x` to `out`, in the order of the list.
    ///
    /// # Errors
    ///
    /// The launch fails.
    ///
    /// # Panics
    ///
    /// `out` was allocated for fewer tokens or shorter vectors.
    pub fn gather_tokens(
        &self,
        x: &F16Buffer,
        list: TokenList<'_>,
        out: &mut F16Buffer,
    ) -> Result<(), DeviceError> {
        assert!(list.count <= x.tokens, "each token at most once");
        out.set_shape(list.count, x.columns, x.terms);
        let arguments = arguments::GatherTokens {
            x: x.argument(),
            tokens: list.address(),
            out: out.argument(),
        };
        let grid = [list.count as u32, 1, 1];
        self.launch("gather_tokens", grid, THREADS, 0, "a token", &arguments)
    }

    /// Adds row i of `x`, `[count, columns]`, to the row of token i of `list` in `out`, `[tokens, columns]`.
    ///
    /// # Errors
    ///
    /// The launch fails.
    ///
    /// # Panics
    ///
    /// `x` does not have one row per token of the list.
    pub fn scatter_tokens(
        &self,
        x: &Buffer<f32>,
        list: TokenList<'_>,
        out: &mut Buffer<f32>,
    ) -> Result<(), DeviceError> {
        let columns = x.len() / list.count.max(1);
        assert!(x.len() == list.count * columns && out.len() >= x.len());
        let arguments = arguments::ScatterTokens {
            x: x.address(),
            tokens: list.address(),
            columns: columns as i32,
            padding: 0,
            out: out.address(),
        };
        let grid = [list.count as u32, 1, 1];
        self.launch("scatter_tokens", grid, THREADS, 0, "a token", &arguments)
    }

    /// `hidden += x · down + addends` of the neurons `rows`; `x` is `[tokens, rows]`, `hidden` `[tokens, hidden]`.
    ///
    /// # Errors
    ///
    /// The launch fails.
    ///
    /// # Panics
    ///
    /// A shape does not match.
    pub fn gemm_down(
        &self,
        x: &F16Buffer,
        matrix: &GpuMatrix,
        rows: &Range<usize>,
        sums: &SplitSums,
        addends: DownAddends<'_>,
        hidden: &mut Buffer<f32>,
    ) -> Result<(), DeviceError> {
        let size = matrix.columns();
        assert_eq!(rows.len(), x.columns, "one row per neuron");
        assert_eq!(hidden.len(), x.tokens * size, "one output per column");
        assert!(addends.offset.is_none_or(|vector| vector.len() == size));
        assert!(addends.cold.is_none_or(|cold| cold.len() >= hidden.len()));
        let arguments = arguments::Gemm {
            bias: addends.bias.map_or(0, Buffer::address),
            offset: addends.offset.map_or(0, Buffer::address),
            cold: addends.cold.map_or(0, |cold| cold.address(0)),
            out: hidden.address(),
            accumulate: 1,
            bias_stride: bias_stride(addends.bias, x.tokens, size),
            ..operands(matrix, rows, x, sums)
        };
        self.launch_gemm("gemm_down", matrix, size, x, sums, &arguments)
    }

    fn launch_gemm(
        &self,
        name: &str,
        matrix: &GpuMatrix,
        outputs: usize,
        x: &F16Buffer,
        sums: &SplitSums,
        arguments: &arguments::Gemm,
    ) -> Result<(), DeviceError> {
        if outputs == 0 || x.tokens == 0 {
            return Ok(());
        }
        // Vectors without elements have one term in every format.
        let is_wide = x.tokens > NARROW && x.terms == 1 && matrix.format() != Format::F32;
        let (size, name) = if is_wide {
            (WIDE, format!("{name}_wide"))
        } else {
            (NARROW, name.to_owned())
        };
        let tiles = [outputs.div_ceil(size), x.tokens.div_ceil(size)];
        // The sums are sized for narrow tiles; wide ones therefore get fewer blocks.
        let blocks = sums.counters.len() * NARROW * NARROW / (size * size);
        let splits = (blocks / (tiles[0] * tiles[1])).clamp(1, most_splits(x.columns));
        let grid = [tiles[0] as u32, tiles[1] as u32, splits as u32];
        // Two buffers of weights and `STAGES` buffers of tokens.
        let tile = size * (TILE_COLUMNS + PADDING);
        let shared = x.terms * (2 + STAGES) * tile * size_of::<u16>() + 16;
        let name = kernel(&name, matrix.format());
        let what = "a tile of the GEMM";
        self.launch(&name, grid, GEMM_THREADS, shared, what, arguments)
    }

    fn terms(&self, format: Format) -> usize {
        terms(self.arithmetic, format)
    }
}

/// Number of f16 terms per value: one if int8 precision suffices, two for f32 precision.
fn terms(arithmetic: Arithmetic, format: Format) -> usize {
    if arithmetic == Arithmetic::Integer && format != Format::F32 {
        1
    } else {
        2
    }
}

/// Maximum number of splits of a product with this number of columns.
fn most_splits(columns: usize) -> usize {
    (columns.div_ceil(TILE_COLUMNS) / SPLIT_STAGES).max(1)
}

/// Number of narrow-tile thread blocks with memory for their sums: as many as the largest product can use, but at most two waves.
fn split_blocks(products: &[[usize; 2]], tokens: usize, multiprocessors: usize) -> usize {
    let size = if tokens > NARROW { WIDE } else { NARROW };
    let blocks = |&[inputs, outputs]: &[usize; 2]| match most_splits(inputs) {
        1 => 0,
        splits => outputs.div_ceil(size) * tokens.div_ceil(size) * splits * (size / NARROW).pow(2),
    };
    let most = products.iter().map(blocks).max().unwrap_or(0);
    most.min(SPLIT_BLOCKS * multiprocessors)
}

fn operands(
    matrix: &GpuMatrix,
    rows: &Range<usize>,
    x: &F16Buffer,
    sums: &SplitSums,
) -> arguments::Gemm {
    arguments::Gemm {
        matrix: matrix.rows_argument(rows),
        x: x.argument(),
        partial: sums.partial.address(),
        counters: sums.counters.address(),
        ..arguments::Gemm::zeroed()
    }
}
