//! Weight matrices, norms and KV caches in device memory.

use std::{ops::Range, sync::Arc};

use bytemuck::{Pod, Zeroable};

use super::{Buffer, Device, DeviceError, HostBuffer, StagingStream, arguments};
use powerinfer_tensor::{BLOCK, CacheFormat, Format, Matrix, MatrixData, NormKind, f16, pack};

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
        assert!(matrix.rows() <= self.capacity, "rows of the matrix");
        self.rows = matrix.rows();
        self.write_rows_async(0, matrix, staging, copy)
    }

    /// Overwrites the rows from `first` on by those of `matrix` asynchronously, through the pinned memory of `staging`, which `copy`
    /// fills.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// The format or the columns differ, this matrix has fewer rows, or those of `matrix` exceed the free staging memory.
    pub fn write_rows_async(
        &mut self,
        first: usize,
        matrix: &Matrix<'_>,
        staging: &mut StagingStream,
        copy: &dyn Fn(&mut [u8], &[u8]),
    ) -> Result<(), DeviceError> {
        assert_eq!(
            (self.format, self.columns),
            (matrix.format(), matrix.columns()),
            "rows of the same format and columns"
        );
        assert!(first + matrix.rows() <= self.rows, "rows of the matrix");
        let capacity = self.capacity;
        let plane = [
            Some(&mut self.quants),
            self.scales.as_mut(),
            self.factors.as_mut(),
        ];
        for (plane, bytes) in plane.into_iter().zip(planes(matrix)) {
            if let (Some(plane), Some(bytes)) = (plane, bytes) {
                let row = plane.capacity() / capacity.max(1);
                plane.write_async(first * row, bytes, staging, copy)?;
            }
        }
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
        self.rows_argument(&(0..self.rows))
    }

    /// Kernel argument for the given rows.
    ///
    /// # Panics
    ///
    /// The matrix has fewer rows.
    pub(super) fn rows_argument(&self, rows: &Range<usize>) -> arguments::Matrix {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows");
        let address = |plane: &Buffer<u8>| {
            let row = plane.capacity() / self.capacity.max(1);
            plane.address() + (rows.start * row) as u64
        };
        arguments::Matrix {
            quants: address(&self.quants),
            scales: self.scales.as_ref().map_or(0, address),
            factors: self.factors.as_ref().map_or(0, address),
            rows: rows.len() as i32,
            columns: self.columns as i32,
        }
    }
}

/// A copy of a weight matrix in pinned host memory, in the planes of [`Matrix`]. Kernels read its rows one at a time.
#[derive(Debug)]
pub struct HostMatrix {
    format: Format,
    rows: usize,
    columns: usize,
    planes: [Option<HostBuffer>; 3],
}

impl HostMatrix {
    /// Copies `matrix` to pinned memory.
    ///
    /// # Errors
    ///
    /// The host is out of pinned memory, or the device fails.
    pub fn new(device: &Arc<dyn Device>, matrix: &Matrix<'_>) -> Result<Self, DeviceError> {
        let [quants, scales, factors] = planes(matrix);
        let plane = |bytes: Option<&[u8]>| {
            bytes
                .map(|bytes| HostBuffer::from_bytes(device, bytes))
                .transpose()
        };
        Ok(Self {
            format: matrix.format(),
            rows: matrix.rows(),
            columns: matrix.columns(),
            planes: [plane(quants)?, plane(scales)?, plane(factors)?],
        })
    }

    /// Weight format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.rows * self.format.row_bytes(self.columns)
    }

    pub(super) fn argument(&self) -> arguments::Matrix {
        let address =
            |plane: &Option<HostBuffer>| plane.as_ref().map_or(0, |plane| plane.address(0));
        let [quants, scales, factors] = &self.planes;
        arguments::Matrix {
            quants: address(quants),
            scales: address(scales),
            factors: address(factors),
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
    /// Address of the bias; 0 without one.
    ///
    /// # Panics
    ///
    /// The bias has fewer elements than the matrix has rows.
    pub(super) fn bias_address(&self) -> u64 {
        let bias = self.bias.as_ref();
        let rows = self.matrix.rows();
        assert!(bias.is_none_or(|bias| bias.len() >= rows), "a bias per row");
        bias.map_or(0, Buffer::address)
    }

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

    /// Replaces matrix and bias asynchronously, as [`GpuMatrix::write_async`] does.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// The format or the columns differ, only one of the two layers has a bias, or the rows exceed the capacity or the free
    /// staging memory.
    pub fn write_async(
        &mut self,
        (matrix, bias): (Matrix<'_>, Option<&[f32]>),
        staging: &mut StagingStream,
        copy: &dyn Fn(&mut [u8], &[u8]),
    ) -> Result<(), DeviceError> {
        self.matrix.write_async(&matrix, staging, copy)?;
        write_optional(&mut self.bias, 0, bias, staging, copy)
    }

    /// Overwrites the rows from `first` on, and their biases, asynchronously, as [`GpuMatrix::write_rows_async`] does.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// The format or the columns differ, only one of the two layers has a bias, or the rows exceed this layer's or the free staging
    /// memory.
    pub fn write_rows_async(
        &mut self,
        first: usize,
        (matrix, bias): (Matrix<'_>, Option<&[f32]>),
        staging: &mut StagingStream,
        copy: &dyn Fn(&mut [u8], &[u8]),
    ) -> Result<(), DeviceError> {
        self.matrix
            .write_rows_async(first, &matrix, staging, copy)?;
        write_optional(&mut self.bias, first, bias, staging, copy)
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        self.matrix.bytes() + self.bias.as_ref().map_or(0, Buffer::bytes)
    }
}

/// Overwrites the elements from `first` on of a vector that both layers have, or neither has.
fn write_optional(
    to: &mut Option<Buffer<f32>>,
    first: usize,
    from: Option<&[f32]>,
    staging: &mut StagingStream,
    copy: &dyn Fn(&mut [u8], &[u8]),
) -> Result<(), DeviceError> {
    match (to, from) {
        (Some(to), Some(from)) => to.write_async(first, from, staging, copy),
        (to, from) => {
            assert!(to.is_none() && from.is_none(), "vectors of every layer");
            Ok(())
        }
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

    /// Replaces weight and bias asynchronously, through the pinned memory of `staging`, which `copy` fills.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// Only one of the two norms has a bias, or the new norm exceeds this one's size or the free staging memory.
    pub fn write_async(
        &mut self,
        (weight, bias): (&[f32], Option<&[f32]>),
        staging: &mut StagingStream,
        copy: &dyn Fn(&mut [u8], &[u8]),
    ) -> Result<(), DeviceError> {
        self.weight.write_async(0, weight, staging, copy)?;
        write_optional(&mut self.bias, 0, bias, staging, copy)
    }

    /// Number of elements that are normalised together.
    pub fn size(&self) -> usize {
        self.weight.len()
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        self.weight.bytes() + self.bias.as_ref().map_or(0, Buffer::bytes)
    }

    /// Kernel argument for vectors of `columns`; `None` is the identity.
    ///
    /// # Panics
    ///
    /// The norm is of another size.
    pub(super) fn argument(norm: Option<&Self>, columns: usize) -> arguments::Norm {
        let Some(norm) = norm else {
            return bytemuck::Zeroable::zeroed();
        };
        let vectors = [Some(&norm.weight), norm.bias.as_ref()];
        let fits = |vector: &Buffer<f32>| vector.len() == columns;
        assert!(
            vectors.into_iter().flatten().all(fits),
            "a norm of {columns}"
        );
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

/// Location of the KV cache of a layer and a sequence, as kernels read it from device memory; zeros if the host has the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(C)]
pub struct CachePlace {
    keys: u64,
    values: u64,
    context: u32,
    padding: u32,
}

impl CachePlace {
    /// Whether kernels may write to `position`: the cache has it, or the host has the cache.
    pub fn has_room(&self, position: usize) -> bool {
        *self == Self::default() || position < self.context as usize
    }
}

/// Shape of the KV cache of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// Number format.
    pub format: CacheFormat,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Numbers of a head.
    pub head_size: usize,
    /// Positions.
    pub context: usize,
}

impl CacheShape {
    /// Format of the numbers.
    pub(super) fn number_format(&self) -> Format {
        match self.format {
            CacheFormat::F32 => Format::F32,
            CacheFormat::F16 => Format::F16,
            CacheFormat::Q8_0 => Format::Q8_0,
        }
    }

    /// Whether caches of the two shapes run in one pass: only their contexts may differ.
    fn is_like(&self, other: &Self) -> bool {
        let context = self.context;
        *self == Self { context, ..*other }
    }
}

/// KV cache of one layer: keys and values, `[kv_heads, context, head_size]` each. In `q8_0` heads are padded to whole blocks
/// of 32 numbers, and scales follow, `[kv_heads, blocks, context]`.
#[derive(Debug)]
pub struct GpuCache {
    keys: Buffer<u8>,
    values: Buffer<u8>,
    shape: CacheShape,
}

impl GpuCache {
    /// Allocates a cache.
    ///
    /// # Errors
    ///
    /// The device is out of memory or fails.
    pub fn new(device: &Arc<dyn Device>, shape: CacheShape) -> Result<Self, DeviceError> {
        let mut cache = Self {
            keys: Buffer::new(device, 0)?,
            values: Buffer::new(device, 0)?,
            shape,
        };
        let positions = shape.kv_heads * shape.context;
        let bytes = positions * (cache.head_bytes() + cache.blocks() * 2);
        cache.keys = Buffer::new(device, bytes)?;
        cache.values = Buffer::new(device, bytes)?;
        Ok(cache)
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes()
    }

    /// Location of the cache, for kernels.
    pub fn place(&self) -> CachePlace {
        CachePlace {
            keys: self.keys.address(),
            values: self.values.address(),
            context: self.shape.context as u32,
            padding: 0,
        }
    }

    /// Whether the cache is on `device` and has the given shape, with at most as many positions.
    pub fn fits(&self, device: &Arc<dyn Device>, shape: &CacheShape) -> bool {
        let is_here = Arc::ptr_eq(self.keys.device(), device);
        is_here && self.shape.is_like(shape) && self.shape.context <= shape.context
    }

    /// Blocks of a head that have a scale.
    fn blocks(&self) -> usize {
        match self.shape.format {
            CacheFormat::F32 | CacheFormat::F16 => 0,
            CacheFormat::Q8_0 => self.shape.head_size.div_ceil(BLOCK),
        }
    }

    /// Bytes of a head at one position, without scales.
    fn head_bytes(&self) -> usize {
        match self.shape.format {
            CacheFormat::F32 => 4 * self.shape.head_size,
            CacheFormat::F16 => 2 * self.shape.head_size,
            CacheFormat::Q8_0 => BLOCK * self.blocks(),
        }
    }

    /// Whether `other` is on the same device and differs at most in its context.
    pub fn is_like(&self, other: &Self) -> bool {
        Arc::ptr_eq(self.keys.device(), other.keys.device()) && self.shape.is_like(&other.shape)
    }

    /// Byte ranges of the first `positions` positions of a head: numbers, then the scales of each block.
    fn ranges(&self, head: usize, positions: usize) -> Vec<Range<usize>> {
        let context = self.shape.context;
        let numbers = head * context * self.head_bytes();
        let scales = self.shape.kv_heads * context * self.head_bytes();
        let blocks = head * self.blocks()..(head + 1) * self.blocks();
        let scales = blocks.map(|block| scales + block * context * 2);
        let scales = scales.map(|start| start..start + positions * 2);
        std::iter::once(numbers..numbers + positions * self.head_bytes())
            .chain(scales)
            .collect()
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
        assert!(positions <= self.shape.context, "positions of the cache");
        let read = |plane: &Buffer<u8>| {
            let mut floats = Vec::new();
            for head in 0..self.shape.kv_heads {
                let mut parts = Vec::new();
                for range in self.ranges(head, positions) {
                    let mut bytes = vec![0; range.len()];
                    plane.read_at(range.start, &mut bytes)?;
                    parts.push(bytes);
                }
                self.decode(&parts, positions, &mut floats);
            }
            Ok(floats)
        };
        Ok([read(&self.keys)?, read(&self.values)?])
    }

    /// Appends the numbers of a head that is stored in `parts`.
    fn decode(&self, parts: &[Vec<u8>], positions: usize, floats: &mut Vec<f32>) {
        let numbers = &parts[0];
        let half = |bytes: &[u8]| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        match self.shape.format {
            CacheFormat::F32 => floats.extend(
                (numbers.as_chunks::<4>().0.iter()).map(|bytes| f32::from_le_bytes(*bytes)),
            ),
            CacheFormat::F16 => floats.extend(numbers.chunks_exact(2).map(half)),
            CacheFormat::Q8_0 => {
                for position in 0..positions {
                    let quants = &numbers[position * self.head_bytes()..][..self.shape.head_size];
                    floats.extend(quants.iter().enumerate().map(|(index, quant)| {
                        let scale = half(&parts[1 + index / BLOCK][position * 2..]);
                        f32::from(*quant as i8) * scale
                    }));
                }
            }
        }
    }

    /// Overwrites the first `positions` positions with keys and values in the cache's format, head by head. Each head has its numbers,
    /// then the scales of each block, as [`CachePlane::copy_rows`](powerinfer_tensor::CachePlane::copy_rows) stores them.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// The lengths differ, or the cache has fewer positions.
    pub fn write(&mut self, positions: usize, both: [&[u8]; 2]) -> Result<(), DeviceError> {
        assert!(positions <= self.shape.context, "positions of the cache");
        let heads = 0..self.shape.kv_heads;
        let ranges: Vec<_> = heads
            .flat_map(|head| self.ranges(head, positions))
            .collect();
        for (plane, mut bytes) in [&mut self.keys, &mut self.values].into_iter().zip(both) {
            for range in &ranges {
                let (own, rest) = bytes.split_at(range.len());
                plane.write_at(range.start, own)?;
                bytes = rest;
            }
            assert!(bytes.is_empty(), "keys or values of {positions} positions");
        }
        Ok(())
    }

    /// Copies the first `positions` positions of `other`, whose context may differ.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// The caches are not [alike](Self::is_like), or one of them has fewer positions.
    pub fn copy_from(&mut self, other: &Self, positions: usize) -> Result<(), DeviceError> {
        assert!(self.is_like(other), "caches of one device and shape");
        let least = self.shape.context.min(other.shape.context);
        assert!(positions <= least, "positions of both caches");
        for head in 0..self.shape.kv_heads {
            let places = self.ranges(head, positions).into_iter();
            for (to, from) in places.zip(other.ranges(head, positions)) {
                self.keys.copy_range(to.start, &other.keys, from.clone())?;
                self.values.copy_range(to.start, &other.values, from)?;
            }
        }
        Ok(())
    }
}
