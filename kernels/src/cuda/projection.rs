//! GEMV with a fused norm, norms in place, arg max and embedding: the kernels of `projection.cu`.

use std::sync::Arc;

use bytemuck::Zeroable;

use super::{
    Buffer, Device, DeviceError, Gpu, GpuLinear, GpuMatrix, GpuNorm, HostBuffer, HostMatrix,
    arguments,
    gpu::{GEMV_THREADS, THREADS, input_bytes, int8_bytes, kernel},
};
use crate::Arithmetic;

/// The input of a projection, normed and rounded to 8 bits, for a kernel that reads the same.
#[derive(Debug)]
pub struct KeptInput {
    memory: Buffer<[u32; 4]>,
    columns: usize,
    tokens: usize,
}

impl KeptInput {
    /// Memory for inputs of up to `tokens` tokens of up to `columns`.
    ///
    /// # Errors
    ///
    /// The device is out of memory.
    pub fn new(
        device: &Arc<dyn Device>,
        columns: usize,
        tokens: usize,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            memory: Buffer::new(device, Self::max_bytes(columns, tokens) / 16)?,
            columns: 0,
            tokens: 0,
        })
    }

    /// Bytes for the inputs of up to `tokens` tokens with up to `columns` elements each.
    pub fn max_bytes(columns: usize, tokens: usize) -> usize {
        (tokens * int8_bytes(columns)).next_multiple_of(16)
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    fn keep(&mut self, columns: usize, tokens: usize) {
        assert!(tokens * int8_bytes(columns) <= self.memory.bytes());
        (self.columns, self.tokens) = (columns, tokens);
    }

    /// Whether it was kept for `tokens` tokens of `columns`.
    pub(super) fn is_for(&self, columns: usize, tokens: usize) -> bool {
        (self.columns, self.tokens) == (columns, tokens)
    }

    pub(super) fn address(&self) -> u64 {
        self.memory.address()
    }
}

/// Where the rows of an embedding are.
#[derive(Debug, Clone, Copy)]
pub enum EmbeddingTable<'a> {
    /// In device memory.
    Device(&'a GpuMatrix),
    /// In mapped host memory.
    Host(&'a HostMatrix),
}

impl Gpu {
    /// `out = matrix · norm(x) + bias`, or `out += …` if `accumulate`, for up to three matrices that share the input,
    /// in one launch. Up to [`BATCH`](Self::BATCH) tokens share one pass over the weights.
    ///
    /// `x` is `[tokens, columns]`, each output `[tokens, rows]`.
    ///
    /// # Errors
    ///
    /// The launch fails, or the input exceeds the shared memory of a thread block.
    ///
    /// # Panics
    ///
    /// There are no matrices or more than three, their formats or columns differ, or a shape does not match.
    pub fn project(
        &self,
        x: &Buffer<f32>,
        norm: Option<&GpuNorm>,
        parts: &mut [(&GpuLinear, &mut Buffer<f32>)],
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        self.project_keeping(x, norm, parts, accumulate, None)
    }

    /// As [`project`](Self::project); keeps the rounded input, and writes `norm(x)` to host memory.
    pub(super) fn project_keeping(
        &self,
        x: &Buffer<f32>,
        norm: Option<&GpuNorm>,
        parts: &mut [(&GpuLinear, &mut Buffer<f32>)],
        accumulate: bool,
        kept: Option<(&mut KeptInput, Option<&HostBuffer>)>,
    ) -> Result<(), DeviceError> {
        let (first, _) = parts.first().expect("at least one matrix");
        let (format, columns) = (first.matrix.format(), first.matrix.columns());
        let tokens = x.len() / columns.max(1);
        assert!(parts.len() <= 3);
        let mut arguments = arguments::Projection::zeroed();
        let mut rows = 0;
        for (segment, (linear, out)) in arguments.segments.iter_mut().zip(&mut *parts) {
            let matrix = &linear.matrix;
            assert!(
                matrix.format() == format && matrix.columns() == columns,
                "matrices of one format that share the input"
            );
            assert_eq!(out.len(), tokens * matrix.rows(), "one output per row");
            segment.matrix = matrix.argument();
            segment.bias = linear.bias_address();
            segment.out = out.address();
            rows += matrix.rows();
        }
        if rows == 0 || tokens == 0 {
            return Ok(());
        }
        if let Some((kept, host)) = kept {
            assert!(self.uses_int8(format) && host.is_none_or(|host| host.len() >= x.len()));
            kept.keep(columns, tokens);
            arguments.rounded = kept.address();
            arguments.host_input = host.map_or(0, |host| host.address(0));
        }
        arguments.x = x.address();
        arguments.norm = GpuNorm::argument(norm, columns);
        arguments.segment_count = parts.len() as i32;
        arguments.int8 = (self.arithmetic == Arithmetic::Integer).into();
        arguments.accumulate = accumulate.into();
        let at_once = tokens.min(self.batch_tokens(columns, format, 0));
        arguments.tokens = tokens as i32;
        arguments.tokens_at_once = at_once as i32;
        self.launch(
            &kernel(
                if tokens == 1 {
                    "project"
                } else {
                    "project_batch"
                },
                format,
            ),
            [self.row_blocks(rows), tokens.div_ceil(at_once) as u32, 1],
            GEMV_THREADS,
            input_bytes(columns, self.uses_int8(format), at_once),
            "the input of a projection",
            &arguments,
        )
    }

    /// `x = norm(x)` in place, for every row of `x`, `[tokens, norm.size()]`.
    ///
    /// # Errors
    ///
    /// The launch fails, or a row exceeds the shared memory of a thread block.
    pub fn norm(&self, x: &mut Buffer<f32>, norm: &GpuNorm) -> Result<(), DeviceError> {
        let columns = norm.size();
        let arguments = arguments::NormInPlace {
            x: x.address(),
            columns: columns as i32,
            padding: 0,
            norm: GpuNorm::argument(Some(norm), columns),
        };
        let grid = [(x.len() / columns) as u32, 1, 1];
        let shared = input_bytes(columns, false, 1);
        self.launch("norm_in_place", grid, THREADS, shared, "a norm", &arguments)
    }

    /// Writes the index of the largest element of `x`, the first of equal ones, to `out[0]`.
    ///
    /// `scratch` holds [`Gpu::ARG_MAX_WORDS`] words, of which the first is 0 before and after.
    ///
    /// # Errors
    ///
    /// The launch fails.
    ///
    /// # Panics
    ///
    /// `scratch` or `out` is too short.
    pub fn arg_max(
        &self,
        x: &Buffer<f32>,
        out: &HostBuffer,
        scratch: &mut Buffer<u32>,
    ) -> Result<(), DeviceError> {
        const BLOCKS: usize = 32;
        assert!(
            scratch.len() >= Self::ARG_MAX_WORDS,
            "scratch is long enough"
        );
        let word = |index: usize| scratch.address() + (index * 4) as u64;
        let arguments = arguments::ArgMax {
            x: x.address(),
            count: x.len() as i32,
            padding: 0,
            counter: word(0),
            largest: word(4),
            indices: word(4 + BLOCKS),
            out: out.address(0),
        };
        let shared = 2 * THREADS * 4 + 16;
        self.launch(
            "arg_max",
            [BLOCKS as u32, 1, 1],
            THREADS,
            shared,
            "the arg max",
            &arguments,
        )
    }

    /// `out = scale · table[token]`, where `token` is the first word of its buffer when the kernel runs.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// `out` is shorter than a row.
    pub fn embed(
        &self,
        table: EmbeddingTable<'_>,
        token: &HostBuffer,
        scale: f32,
        out: &mut Buffer<f32>,
    ) -> Result<(), DeviceError> {
        let (format, table) = match table {
            EmbeddingTable::Device(matrix) => (matrix.format(), matrix.argument()),
            EmbeddingTable::Host(matrix) => (matrix.format(), matrix.argument()),
        };
        let columns = table.columns as usize;
        assert!(columns <= out.len(), "the output has room for a row");
        let arguments = arguments::Embed {
            table,
            token: token.address(0),
            scale,
            padding: 0,
            out: out.address(),
        };
        let grid = [columns.div_ceil(THREADS) as u32, 1, 1];
        let name = kernel("embed", format);
        self.launch(&name, grid, THREADS, 0, "a row", &arguments)
    }

    /// Words of scratch memory of [`Gpu::arg_max`].
    pub const ARG_MAX_WORDS: usize = 4 + 2 * 32;
}
