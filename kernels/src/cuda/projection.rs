//! GEMV with a fused norm, norms in place, and arg max: the kernels of `projection.cu`.

use bytemuck::Zeroable;

use super::{
    Buffer, DeviceError, Gpu, GpuLinear, GpuNorm, arguments,
    gpu::{THREADS, input_bytes, kernel},
};
use crate::Arithmetic;

impl Gpu {
    /// `out = matrix · norm(x) + bias`, or `out += …` if `accumulate`, for up to three matrices that share the input,
    /// in one launch.
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
        let (first, _) = parts.first().expect("at least one matrix");
        let (format, columns) = (first.matrix.format(), first.matrix.columns());
        let tokens = x.len() / columns.max(1);
        assert!(parts.len() <= 3 && norm.is_none_or(|norm| norm.size() == columns));
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
            segment.bias = linear.bias.as_ref().map_or(0, Buffer::address);
            segment.out = out.address();
            rows += matrix.rows();
        }
        if rows == 0 || tokens == 0 {
            return Ok(());
        }
        arguments.x = x.address();
        arguments.norm = GpuNorm::argument(norm);
        arguments.segment_count = parts.len() as i32;
        arguments.int8 = (self.arithmetic == Arithmetic::Integer).into();
        arguments.accumulate = accumulate.into();
        self.launch(
            &kernel("project", format),
            [self.row_blocks(rows), tokens as u32, 1],
            THREADS,
            input_bytes(columns, self.uses_int8(format)),
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
            norm: GpuNorm::argument(Some(norm)),
        };
        let grid = [(x.len() / columns) as u32, 1, 1];
        let shared = input_bytes(columns, false);
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
        out: &mut Buffer<u32>,
        scratch: &mut Buffer<u32>,
    ) -> Result<(), DeviceError> {
        const BLOCKS: usize = 32;
        assert!(
            scratch.len() >= Self::ARG_MAX_WORDS && !out.is_empty(),
            "scratch and output are long enough"
        );
        let word = |index: usize| scratch.address() + (index * 4) as u64;
        let arguments = arguments::ArgMax {
            x: x.address(),
            count: x.len() as i32,
            padding: 0,
            counter: word(0),
            largest: word(4),
            indices: word(4 + BLOCKS),
            out: out.address(),
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

    /// Words of scratch memory of [`Gpu::arg_max`].
    pub const ARG_MAX_WORDS: usize = 4 + 2 * 32;
}
