//! Many tokens at once, as a prompt has them: they are halved once, and multiplied on tensor cores.
//!
//! F16Buffer have eleven bits, and a token's are divided by a power of two of its own before, so that nothing
//! overflows. Where products are to be those of `f32`, what halving leaves is halved too, of weights and of tokens, and three
//! products are added up.

use bytemuck::Zeroable;

use super::{
    Buffer, DeviceError, DownScratch, Ffn, Gpu, GpuLinear, GpuMatrix, GpuNorm, HostBuffer,
    HostMirror, NeuronFilter, arguments,
    operations::{THREADS, WARP, WORD, input_bytes, kernel, neurons},
};
use crate::Arithmetic;
use powerinfer_tensor::Format;

/// Rows, tokens and columns of a tile, and halves from one row of it to the next.
const TILE_ROWS: usize = 32;
const TILE_TOKENS: usize = 64;
const TILE_COLUMNS: usize = 64;
const PITCH: usize = TILE_COLUMNS + 8;
/// Threads of a block that multiplies.
const GEMM_THREADS: usize = 128;

/// Numbers of some tokens as halves.
#[derive(Debug)]
pub struct F16Buffer {
    /// `[parts, tokens, padded]`.
    numbers: Buffer<u16>,
    /// One a token.
    scales: Buffer<f32>,
    tokens: usize,
    columns: usize,
    parts: usize,
}

impl F16Buffer {
    /// How many tokens they are of.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Bytes that are taken.
    pub fn bytes(&self) -> usize {
        self.numbers.bytes() + self.scales.bytes()
    }

    /// Makes them those of so many tokens without a number.
    pub fn clear(&mut self, tokens: usize) -> Result<(), DeviceError> {
        self.set_shape(tokens, 0, 1);
        self.scales.clear()
    }

    /// Makes them those of so many tokens, which are still to be written.
    fn set_shape(&mut self, tokens: usize, columns: usize, parts: usize) {
        (self.tokens, self.columns, self.parts) = (tokens, columns, parts);
        self.numbers
            .set_len(parts * tokens * columns.next_multiple_of(TILE_COLUMNS));
        self.scales.set_len(tokens);
    }

    fn argument(&self) -> arguments::F16Buffer {
        arguments::F16Buffer {
            numbers: self.numbers.address(),
            scales: self.scales.address(),
            tokens: self.tokens as i32,
            padded: self.columns.next_multiple_of(TILE_COLUMNS) as i32,
            parts: self.parts as i32,
            padding: 0,
        }
    }
}

/// Who is predicted of some tokens.
#[derive(Debug, Clone, Copy)]
pub struct TokenMasks<'a> {
    /// `[tokens, ⌈neurons / 32⌉]`.
    pub mask: &'a Buffer<u32>,
    /// Neurons of the layer.
    pub neurons: usize,
    /// The first of those that are computed.
    pub first: usize,
}

/// What is added to the products of down.
#[derive(Debug, Clone, Copy, Default)]
pub struct DownAddends<'a> {
    /// To every token.
    pub offset: Option<&'a Buffer<f32>>,
    /// `[tokens, hidden]`: what the host's neurons add.
    pub cold: Option<&'a HostBuffer>,
}

impl Gpu {
    /// Room for halves of up to `tokens` tokens of `columns` numbers.
    pub fn new_f16_buffer(&self, tokens: usize, columns: usize) -> Result<F16Buffer, DeviceError> {
        let padded = columns.next_multiple_of(TILE_COLUMNS);
        Ok(F16Buffer {
            numbers: Buffer::new(self.device(), 2 * tokens * padded)?,
            scales: Buffer::new(self.device(), tokens)?,
            tokens,
            columns,
            parts: 1,
        })
    }

    /// F16Buffer of `norm(x)`, `[tokens, columns]`, to be multiplied with matrices of `format`; the host gets what
    /// is halved where it asks for it.
    ///
    /// Panics where shapes do not fit.
    pub fn to_f16(
        &self,
        x: &Buffer<f32>,
        tokens: usize,
        norm: Option<&GpuNorm>,
        format: Format,
        to: &mut F16Buffer,
        host: Option<HostMirror<'_>>,
    ) -> Result<(), DeviceError> {
        let columns = x.len() / tokens;
        assert!(x.len() == tokens * columns && norm.is_none_or(|norm| norm.size() == columns));
        assert!(host.is_none_or(|host| host.input.len() >= x.len()));
        to.set_shape(tokens, columns, self.parts(format));
        let arguments = arguments::ToF16 {
            x: x.address(),
            columns: columns as i32,
            padding: 0,
            norm: GpuNorm::argument(norm),
            to: to.argument(),
            for_host: host.map_or(0, |host| host.input.address(0)),
        };
        let shared = input_bytes(columns, false) + WARP * 4;
        let grid = [tokens as u32, 1, 1];
        self.launch("to_f16", grid, THREADS, shared, "a token", &arguments)
    }

    /// Says to the host that what kernels have written for it can be read.
    pub fn signal_host(&self, host: HostMirror<'_>) -> Result<(), DeviceError> {
        let arguments = arguments::SignalHost {
            flag: host.flags.address(host.flag),
            step: host.step.address(),
        };
        self.launch("signal_host", [1, 1, 1], WARP, 0, "a word", &arguments)
    }

    /// `out = x · matrixᵀ + bias`, `[tokens, rows]`, or the same added to what is there.
    ///
    /// Panics where shapes do not fit.
    pub fn gemm(
        &self,
        x: &F16Buffer,
        linear: &GpuLinear,
        out: &mut Buffer<f32>,
        add: bool,
    ) -> Result<(), DeviceError> {
        let matrix = &linear.matrix;
        assert_eq!(matrix.columns(), x.columns, "a weight per number");
        assert_eq!(out.len(), x.tokens * matrix.rows(), "an output per row");
        let arguments = arguments::Gemm {
            bias: linear.bias.as_ref().map_or(0, Buffer::address),
            out: out.address(),
            add: add.into(),
            ..product(matrix, x)
        };
        self.launch_product("gemm", matrix, matrix.rows(), x, &arguments)
    }

    /// Makes of what gate gives, `[tokens, hot]`, and of what up gives, what rows of down are multiplied by,
    /// of the neurons that are `chosen` and that `rule` leaves; both in place and as halves.
    ///
    /// Panics where shapes do not fit.
    #[expect(
        clippy::too_many_arguments,
        reason = "one argument per operand of the kernel"
    )]
    pub fn activate_gate_up(
        &self,
        ffn: &Ffn,
        rule: NeuronFilter<'_>,
        gate: &mut Buffer<f32>,
        up: Option<&Buffer<f32>>,
        chosen: Option<TokenMasks<'_>>,
        to: &mut F16Buffer,
        scratch: &mut DownScratch,
    ) -> Result<(), DeviceError> {
        let hot = ffn.down.rows();
        let tokens = gate.len() / hot.max(1);
        assert_eq!(gate.len(), tokens * hot, "a product per neuron");
        assert!(up.is_none_or(|up| up.len() == gate.len()) && up.is_some() == ffn.up.is_some());
        let words = |chosen: TokenMasks<'_>| chosen.neurons.div_ceil(WORD);
        assert!(chosen.is_none_or(|chosen| {
            chosen.first + hot <= chosen.neurons && chosen.mask.len() == tokens * words(chosen)
        }));
        to.set_shape(tokens, hot, self.parts(ffn.down.format()));
        let arguments = arguments::ActivateGateUp {
            neurons: neurons(ffn, rule),
            gate: gate.address(),
            up: up.map_or(0, Buffer::address),
            mask: chosen.map_or(0, |chosen| chosen.mask.address()),
            words: chosen.map_or(0, words) as i32,
            first: chosen.map_or(0, |chosen| chosen.first) as i32,
            padding: 0,
            count: hot as i32,
            to: to.argument(),
            computed: scratch.computed_address(),
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

    /// Adds to `hidden`, `[tokens, hidden]`, rows of down times `x`, `[tokens, hot]`, and what is added
    /// beside.
    ///
    /// Panics where shapes do not fit.
    pub fn gemm_down(
        &self,
        x: &F16Buffer,
        ffn: &Ffn,
        beside: DownAddends<'_>,
        hidden: &mut Buffer<f32>,
    ) -> Result<(), DeviceError> {
        let (matrix, size) = (&ffn.down, ffn.down.columns());
        assert_eq!(matrix.rows(), x.columns, "a row per product");
        assert_eq!(hidden.len(), x.tokens * size, "a sum per column");
        let added = [ffn.bias.as_ref(), beside.offset].into_iter().flatten();
        assert!(added.into_iter().all(|added| added.len() == size));
        assert!(beside.cold.is_none_or(|cold| cold.len() >= hidden.len()));
        let arguments = arguments::Gemm {
            bias: ffn.bias.as_ref().map_or(0, Buffer::address),
            offset: beside.offset.map_or(0, Buffer::address),
            beside: beside.cold.map_or(0, |cold| cold.address(0)),
            out: hidden.address(),
            add: 1,
            ..product(matrix, x)
        };
        self.launch_product("gemm_down", matrix, size, x, &arguments)
    }

    fn launch_product(
        &self,
        name: &str,
        matrix: &GpuMatrix,
        outputs: usize,
        x: &F16Buffer,
        arguments: &arguments::Gemm,
    ) -> Result<(), DeviceError> {
        if outputs == 0 || x.tokens == 0 {
            return Ok(());
        }
        let grid = [
            outputs.div_ceil(TILE_ROWS) as u32,
            x.tokens.div_ceil(TILE_TOKENS) as u32,
            1,
        ];
        let shared = 2 * x.parts * (TILE_ROWS + TILE_TOKENS) * PITCH * size_of::<u16>();
        let name = kernel(name, matrix.format());
        let what = "a tile of a product";
        self.launch(&name, grid, GEMM_THREADS, shared, what, arguments)
    }

    /// F16Buffer that stand for a number: one where bytes would do, two where products are to be exact.
    fn parts(&self, format: Format) -> usize {
        match self.arithmetic == Arithmetic::Integer && format != Format::F32 {
            true => 1,
            false => 2,
        }
    }
}

fn product(matrix: &GpuMatrix, x: &F16Buffer) -> arguments::Gemm {
    arguments::Gemm {
        matrix: matrix.argument(),
        x: x.argument(),
        ..arguments::Gemm::zeroed()
    }
}
