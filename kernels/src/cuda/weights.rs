//! Weight matrices, norms and KV caches in device memory.

use std::sync::Arc;

use super::{Buffer, Device, DeviceError, StagingStream, arguments};
use powerinfer_tensor::{CacheFormat, Format, Matrix, MatrixData, NormKind, f16, pack};

/// A weight matrix on a device, in the planes of [`Matrix`].
#[derive(Debug)]
pub struct GpuMatrix {
    format: Format,
    rows: usize,
    /// Allocated rows.
    capacity: usize,
    columns: usize,
    quants: Buffer<u8>,
    scales: Option<Buffer<u8>>,
    factors: Option<Buffer<u8>>,
}

impl GpuMatrix {
    /// Copies `matrix` to the device, plane by plane.
    ///
    /// # Errors
    ///
    /// The device is out of memory or fails.
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

    /// Allocates a matrix for up to `rows` rows, which [`GpuMatrix::write_async`] fills.
    ///
    /// # Errors
    ///
    /// The device is out of memory or fails.
    pub fn with_capacity(
        device: &Arc<dyn Device>,
        format: Format,
        rows: usize,
        columns: usize,
    ) -> Result<Self, DeviceError> {
        let empty = pack(format, rows, columns, &vec![0.0; rows * columns]);
        Self::upload(device, &empty.as_view())
    }

    /// Replaces the rows by those of `matrix` asynchronously, through the pinned memory of `staging`, which `copy` fills.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// The format or the columns differ, or the rows exceed the capacity or the free staging memory.
    pub fn write_async(
        &mut self,
        matrix: &Matrix<'_>,
        staging: &mut StagingStream,
        copy: &dyn Fn(&mut [u8], &[u8]),
    ) -> Result<(), DeviceError> {
        assert_eq!(
            (self.format, self.columns),
            (matrix.format(), matrix.columns()),
            "rows of the same format and columns"
        );
        let plane = [
            Some(&mut self.quants),
            self.scales.as_mut(),
            self.factors.as_mut(),
        ];
        for (plane, bytes) in plane.into_iter().zip(planes(matrix)) {
            if let (Some(plane), Some(bytes)) = (plane, bytes) {
                plane.write_async(bytes, staging, copy)?;
            }
        }
        self.rows = matrix.rows();
        Ok(())
    }

    /// Number of allocated rows.
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

    /// Weight format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        let planes = [&self.scales, &self.factors].into_iter().flatten();
        self.quants.bytes() + planes.map(Buffer::bytes).sum::<usize>()
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

/// The planes of a matrix as bytes: quants or values, scales, 6-bit factors.
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

/// A linear layer on a device: `matrix · x + bias`.
#[derive(Debug)]
pub struct GpuLinear {
    /// `[outputs, inputs]`.
    pub matrix: GpuMatrix,
    /// `[outputs]`.
    pub bias: Option<Buffer<f32>>,
}

impl GpuLinear {
    /// Copies a matrix and its bias to the device.
    ///
    /// # Errors
    ///
    /// The device is out of memory or fails.
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

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        self.matrix.bytes() + self.bias.as_ref().map_or(0, Buffer::bytes)
    }
}

/// Weight and bias of a norm on a device.
#[derive(Debug)]
pub struct GpuNorm {
    kind: NormKind,
    epsilon: f32,
    weight: Buffer<f32>,
    bias: Option<Buffer<f32>>,
}

impl GpuNorm {
    /// Copies a norm's weight and bias to the device.
    ///
    /// # Errors
    ///
    /// The device is out of memory or fails.
    pub fn upload(
        device: &Arc<dyn Device>,
        kind: NormKind,
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

    /// Number of elements that are normalised together.
    pub fn size(&self) -> usize {
        self.weight.len()
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        self.weight.bytes() + self.bias.as_ref().map_or(0, Buffer::bytes)
    }

    /// Kernel argument; `None` is the identity.
    pub(super) fn argument(norm: Option<&Self>) -> arguments::Norm {
        let Some(norm) = norm else {
            return bytemuck::Zeroable::zeroed();
        };
        arguments::Norm {
            weight: norm.weight.address(),
            bias: norm.bias.as_ref().map_or(0, Buffer::address),
            epsilon: norm.epsilon,
            kind: match norm.kind {
                NormKind::RootMeanSquare => 1,
                NormKind::Layer => 2,
            },
        }
    }
}

/// KV cache of one layer: keys and values, `[kv_heads, context, head_size]` each.
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
    /// Allocates a cache of `context` positions.
    ///
    /// # Errors
    ///
    /// The device is out of memory or fails.
    ///
    /// # Panics
    ///
    /// The format is neither `f32` nor `f16`.
    pub fn new(
        device: &Arc<dyn Device>,
        format: CacheFormat,
        kv_heads: usize,
        context: usize,
        head_size: usize,
    ) -> Result<Self, DeviceError> {
        let bytes = kv_heads * context * head_size * element_bytes(format);
        Ok(Self {
            keys: Buffer::new(device, bytes)?,
            values: Buffer::new(device, bytes)?,
            format,
            kv_heads,
            context,
            head_size,
        })
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes()
    }

    /// Device addresses of keys and values.
    pub fn addresses(&self) -> [u64; 2] {
        [self.keys.address(), self.values.address()]
    }

    /// Reads the first `positions` positions of keys and of values, `[kv_heads, positions, head_size]` each.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// The cache has fewer positions.
    pub fn read(&self, positions: usize) -> Result<[Vec<f32>; 2], DeviceError> {
        assert!(positions <= self.context, "positions of the cache");
        let bytes = self.head_size * element_bytes(self.format);
        let read = |plane: &Buffer<u8>| {
            let mut floats = Vec::new();
            let mut head = vec![0; positions * bytes];
            for index in 0..self.kv_heads {
                plane.read_at(index * self.context * bytes, &mut head)?;
                match self.format {
                    CacheFormat::F32 => floats
                        .extend(head.chunks_exact(4).map(|bytes| {
                            f32::from_le_bytes(bytes.try_into().expect("four bytes"))
                        })),
                    _ => floats.extend(head.chunks_exact(2).map(|bytes| {
                        f16::from_le_bytes(bytes.try_into().expect("two bytes")).to_f32()
                    })),
                }
            }
            Ok(floats)
        };
        Ok([read(&self.keys)?, read(&self.values)?])
    }

    /// Overwrites the first positions with keys and values as of [`read`](Self::read).
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// The shape differs, or the cache has fewer positions.
    pub fn write(&mut self, positions: usize, planes: [&[f32]; 2]) -> Result<(), DeviceError> {
        assert!(positions <= self.context, "positions of the cache");
        let bytes = self.head_size * element_bytes(self.format);
        for (plane, floats) in [&mut self.keys, &mut self.values].into_iter().zip(planes) {
            assert_eq!(floats.len(), self.kv_heads * positions * self.head_size);
            let heads = floats.chunks_exact((positions * self.head_size).max(1));
            for (index, head) in heads.enumerate() {
                let stored: Vec<u8> = match self.format {
                    CacheFormat::F32 => head.iter().flat_map(|x| x.to_le_bytes()).collect(),
                    _ => head
                        .iter()
                        .flat_map(|x| f16::from_f32(*x).to_le_bytes())
                        .collect(),
                };
                plane.write_at(index * self.context * bytes, &stored)?;
            }
        }
        Ok(())
    }

    /// Copies the first `positions` positions of `other`.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// The shapes differ.
    pub fn copy_from(&mut self, other: &Self, positions: usize) -> Result<(), DeviceError> {
        assert_eq!(self.keys.len(), other.keys.len(), "caches of one shape");
        let position_bytes = self.head_size * element_bytes(self.format);
        for head in 0..self.kv_heads {
            let start = head * self.context * position_bytes;
            let count = positions.min(self.context) * position_bytes;
            self.keys.copy_range(&other.keys, start, count)?;
            self.values.copy_range(&other.values, start, count)?;
        }
        Ok(())
    }
}

/// Bytes per element of the cache.
pub(super) fn element_bytes(format: CacheFormat) -> usize {
    match format {
        CacheFormat::F32 => 4,
        CacheFormat::F16 => 2,
        CacheFormat::Q8_0 => unreachable!("the kernels support caches of f32 and f16"),
    }
}
