//! Weights, norms and a KV cache on a device.

use std::sync::Arc;

use super::{Buffer, Device, DeviceError, StagingStream, arguments};
use powerinfer_tensor::{CacheFormat, Format, Matrix, MatrixData, pack};

/// A matrix on a device, in the planes of [`Matrix`].
#[derive(Debug)]
pub struct GpuMatrix {
    format: Format,
    rows: usize,
    /// Rows that there is room for.
    capacity: usize,
    columns: usize,
    quants: Buffer<u8>,
    scales: Option<Buffer<u8>>,
    factors: Option<Buffer<u8>>,
}

impl GpuMatrix {
    /// A copy of `matrix`, plane by plane.
    pub fn upload(device: &Arc<dyn Device>, matrix: &Matrix<'_>) -> Result<Self, DeviceError> {
        let plane = |bytes: &[u8]| Buffer::from_slice(device, bytes);
        let [quants, scales, factors] = planes(matrix);
        Ok(Self {
            format: matrix.format(),
            rows: matrix.rows(),
            capacity: matrix.rows(),
            columns: matrix.columns(),
            quants: plane(quants.unwrap_or_default())?,
            scales: scales.map(plane).transpose()?,
            factors: factors.map(plane).transpose()?,
        })
    }

    /// Room for `rows` rows, which are still to be written.
    pub fn with_capacity(
        device: &Arc<dyn Device>,
        format: Format,
        rows: usize,
        columns: usize,
    ) -> Result<Self, DeviceError> {
        let empty = pack(format, rows, columns, &vec![0.0; rows * columns]);
        Self::upload(device, &empty.as_view())
    }

    /// Takes over the rows of `matrix`, of the same format and columns, by way of `lane`, whose memory `copy` fills.
    ///
    /// Panics where it is another shape, or there is no room.
    pub fn write_async(
        &mut self,
        matrix: &Matrix<'_>,
        lane: &mut StagingStream,
        copy: &dyn Fn(&mut [u8], &[u8]),
    ) -> Result<(), DeviceError> {
        assert_eq!(
            (self.format, self.columns),
            (matrix.format(), matrix.columns()),
            "rows of one shape"
        );
        let own = [
            Some(&mut self.quants),
            self.scales.as_mut(),
            self.factors.as_mut(),
        ];
        for (own, bytes) in own.into_iter().zip(planes(matrix)) {
            if let (Some(own), Some(bytes)) = (own, bytes) {
                own.write_async(bytes, lane, copy)?;
            }
        }
        self.rows = matrix.rows();
        Ok(())
    }

    /// Rows that there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// How weights are stored.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Bytes that are taken.
    pub fn bytes(&self) -> usize {
        let more = [&self.scales, &self.factors].into_iter().flatten();
        self.quants.bytes() + more.map(Buffer::bytes).sum::<usize>()
    }

    pub(super) fn argument(&self) -> arguments::Matrix {
        let address = |plane: &Option<Buffer<u8>>| plane.as_ref().map_or(0, Buffer::address);
        arguments::Matrix {
            quants: self.quants.address(),
            scales: address(&self.scales),
            factors: address(&self.factors),
            rows: self.rows as i32,
            columns: self.columns as i32,
        }
    }
}

/// The planes of a matrix: numbers, scales, factors.
fn planes<'a>(matrix: &Matrix<'a>) -> [Option<&'a [u8]>; 3] {
    match matrix.data() {
        MatrixData::F32(values) => [Some(bytemuck::cast_slice(values)), None, None],
        MatrixData::F16(values) => [Some(bytemuck::cast_slice(values)), None, None],
        MatrixData::Bf16(values) => [Some(bytemuck::cast_slice(values)), None, None],
        MatrixData::Q8_0 { quants, scales } => [
            Some(bytemuck::cast_slice(quants)),
            Some(bytemuck::cast_slice(scales)),
            None,
        ],
        MatrixData::Q4K {
            quants,
            scales,
            factors,
        } => [
            Some(quants),
            Some(bytemuck::cast_slice(scales.as_flattened())),
            Some(factors.as_flattened()),
        ],
        MatrixData::Q4_0 { quants, scales } => {
            [Some(quants), Some(bytemuck::cast_slice(scales)), None]
        }
    }
}

/// A matrix by rows and what is added to its products.
#[derive(Debug)]
pub struct GpuLinear {
    /// A row an output.
    pub matrix: GpuMatrix,
    /// One number a row.
    pub bias: Option<Buffer<f32>>,
}

impl GpuLinear {
    /// Copies of both.
    pub fn upload(
        device: &Arc<dyn Device>,
        matrix: &Matrix<'_>,
        bias: Option<&[f32]>,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            matrix: GpuMatrix::upload(device, matrix)?,
            bias: bias
                .map(|bias| Buffer::from_slice(device, bias))
                .transpose()?,
        })
    }

    /// Bytes that are taken.
    pub fn bytes(&self) -> usize {
        self.matrix.bytes() + self.bias.as_ref().map_or(0, Buffer::bytes)
    }
}

/// What a norm divides by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuNormKind {
    /// The root of the mean square.
    RootMeanSquare,
    /// The standard deviation, of what the mean is taken from.
    Layer,
}

/// A norm on a device.
#[derive(Debug)]
pub struct GpuNorm {
    kind: GpuNormKind,
    epsilon: f32,
    weight: Buffer<f32>,
    bias: Option<Buffer<f32>>,
}

impl GpuNorm {
    /// Copies of a norm's weight and bias.
    pub fn upload(
        device: &Arc<dyn Device>,
        kind: GpuNormKind,
        epsilon: f32,
        weight: &[f32],
        bias: Option<&[f32]>,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            kind,
            epsilon,
            weight: Buffer::from_slice(device, weight)?,
            bias: bias
                .map(|bias| Buffer::from_slice(device, bias))
                .transpose()?,
        })
    }

    /// Numbers that it norms together.
    pub fn size(&self) -> usize {
        self.weight.len()
    }

    /// Bytes that are taken.
    pub fn bytes(&self) -> usize {
        self.weight.bytes() + self.bias.as_ref().map_or(0, Buffer::bytes)
    }

    /// `norm` as kernels take it; none leaves numbers as they are.
    pub(super) fn argument(norm: Option<&Self>) -> arguments::Norm {
        let Some(norm) = norm else {
            return bytemuck::Zeroable::zeroed();
        };
        arguments::Norm {
            weight: norm.weight.address(),
            bias: norm.bias.as_ref().map_or(0, Buffer::address),
            epsilon: norm.epsilon,
            kind: match norm.kind {
                GpuNormKind::RootMeanSquare => 1,
                GpuNormKind::Layer => 2,
            },
        }
    }
}

/// Keys and values of one layer, `[kv_heads, context, head_size]` each.
#[derive(Debug)]
pub struct GpuCache {
    pub(super) keys: Buffer<u8>,
    pub(super) values: Buffer<u8>,
    pub(super) format: CacheFormat,
    pub(super) kv_heads: usize,
    pub(super) context: usize,
    pub(super) head_size: usize,
}

impl GpuCache {
    /// Room for `context` positions.
    ///
    /// Panics for a format other than `f32` and `f16`.
    pub fn new(
        device: &Arc<dyn Device>,
        format: CacheFormat,
        kv_heads: usize,
        context: usize,
        head_size: usize,
    ) -> Result<Self, DeviceError> {
        let bytes = kv_heads * context * head_size * number_bytes(format);
        Ok(Self {
            keys: Buffer::new(device, bytes)?,
            values: Buffer::new(device, bytes)?,
            format,
            kv_heads,
            context,
            head_size,
        })
    }

    /// Bytes that are taken.
    pub fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes()
    }

    /// Where keys and values lie: what was recorded with them can be run again with a cache at the same places.
    pub fn addresses(&self) -> [u64; 2] {
        [self.keys.address(), self.values.address()]
    }

    /// Takes over the first `positions` positions of `other`, a cache of the same layer.
    ///
    /// Panics where shapes differ.
    pub fn copy_from(&mut self, other: &Self, positions: usize) -> Result<(), DeviceError> {
        assert_eq!(self.keys.len(), other.keys.len(), "caches of one shape");
        let position_bytes = self.head_size * number_bytes(self.format);
        for head in 0..self.kv_heads {
            let start = head * self.context * position_bytes;
            let count = positions.min(self.context) * position_bytes;
            self.keys.copy_range(&other.keys, start, count)?;
            self.values.copy_range(&other.values, start, count)?;
        }
        Ok(())
    }
}

/// Bytes of a number of the cache.
fn number_bytes(format: CacheFormat) -> usize {
    match format {
        CacheFormat::F32 => 4,
        CacheFormat::F16 => 2,
        CacheFormat::Q8_0 => unreachable!("kernels read caches of f32 and f16"),
    }
}
