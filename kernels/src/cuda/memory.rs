//! [`Buffer`]: typed device memory. [`HostBuffer`]: pinned host memory mapped into a device.
#![expect(unsafe_code, reason = "device and pinned memory are raw addresses")]

use std::{
    fmt,
    marker::PhantomData,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use bytemuck::Pod;

use super::{Device, DeviceError, StagingStream};

/// An array of `T` in device memory, freed on drop. It may be shorter than its allocation.
pub struct Buffer<T> {
    device: Arc<dyn Device>,
    address: u64,
    /// Allocated elements.
    capacity: usize,
    /// Elements in use, from the first.
    length: usize,
    values: PhantomData<T>,
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Buffer({} elements)", self.length)
    }
}

impl<T: Pod> Buffer<T> {
    /// Allocates `length` elements, all 0.
    ///
    /// # Errors
    ///
    /// The device is out of memory or fails.
    ///
    /// # Panics
    ///
    /// The size in bytes overflows.
    pub fn new(device: &Arc<dyn Device>, length: usize) -> Result<Self, DeviceError> {
        let bytes = length.checked_mul(size_of::<T>());
        let bytes = bytes.expect("a size in memory");
        let buffer = Self {
            address: device.allocate(bytes)?,
            device: Arc::clone(device),
            capacity: length,
            length,
            values: PhantomData,
        };
        // SAFETY: allocated with this size.
        unsafe {
            device.clear(buffer.address, bytes)?;
        }
        Ok(buffer)
    }

    /// Allocates a copy of `values`.
    ///
    /// # Errors
    ///
    /// The device is out of memory or fails.
    pub fn from_slice(device: &Arc<dyn Device>, values: &[T]) -> Result<Self, DeviceError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let buffer = Self {
            address: device.allocate(bytes.len())?,
            device: Arc::clone(device),
            capacity: values.len(),
            length: values.len(),
            values: PhantomData,
        };
        // SAFETY: allocated with this size.
        unsafe {
            device.write(buffer.address, bytes)?;
        }
        Ok(buffer)
    }

    /// Overwrites the first elements.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// `values` is longer than the buffer.
    pub fn write(&mut self, values: &[T]) -> Result<(), DeviceError> {
        self.write_at(0, values)
    }

    /// Overwrites the elements from index `from`.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// The range exceeds the buffer.
    pub fn write_at(&mut self, from: usize, values: &[T]) -> Result<(), DeviceError> {
        let end = from.checked_add(values.len());
        assert!(
            end.is_some_and(|end| end <= self.length),
            "values fit into the buffer"
        );
        let address = self.address + (from * size_of::<T>()) as u64;
        // SAFETY: the range lies within the allocation.
        unsafe { self.device.write(address, bytemuck::cast_slice(values)) }
    }

    /// Overwrites the elements from index `from` on asynchronously, through the pinned memory of `staging`, which `copy` fills.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// The range exceeds the buffer, or `values` the free staging memory.
    pub fn write_async(
        &mut self,
        from: usize,
        values: &[T],
        staging: &mut StagingStream,
        copy: &dyn Fn(&mut [u8], &[u8]),
    ) -> Result<(), DeviceError> {
        let end = from.checked_add(values.len());
        assert!(
            end.is_some_and(|end| end <= self.length),
            "values fit into the buffer"
        );
        let address = self.address + (from * size_of::<T>()) as u64;
        // SAFETY: the range lies within the allocation, which is freed only after the operations before.
        unsafe { staging.write(address, bytemuck::cast_slice(values), copy) }
    }

    /// Copies the elements `from` of `other` to those from index `to` on.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// A range exceeds its buffer, or the buffers are on different devices.
    pub fn copy_range(
        &mut self,
        to: usize,
        other: &Self,
        from: Range<usize>,
    ) -> Result<(), DeviceError> {
        assert!(Arc::ptr_eq(&self.device, &other.device), "one device");
        assert!(
            (to.checked_add(from.len())).is_some_and(|end| end <= self.length)
                && from.end <= other.length,
            "ranges of the buffers"
        );
        let [to, source] = [(self.address, to), (other.address, from.start)]
            .map(|(address, index)| address + (index * size_of::<T>()) as u64);
        // SAFETY: the ranges lie within both allocations, which do not overlap.
        unsafe { self.device.copy(to, source, from.len() * size_of::<T>()) }
    }

    /// Copies all elements of `other`.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// `other` is longer than this buffer.
    pub fn copy_from(&mut self, other: &Self) -> Result<(), DeviceError> {
        self.copy_range(0, other, 0..other.length)
    }

    /// Copies the first elements to the host. Waits for the device.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// `values` is longer than the buffer.
    pub fn read(&self, values: &mut [T]) -> Result<(), DeviceError> {
        self.read_at(0, values)
    }

    /// Copies the elements from index `from` to the host. Waits for the device.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// The range exceeds the buffer.
    pub fn read_at(&self, from: usize, values: &mut [T]) -> Result<(), DeviceError> {
        let end = from.checked_add(values.len());
        assert!(
            end.is_some_and(|end| end <= self.length),
            "a range of the buffer"
        );
        let address = self.address + (from * size_of::<T>()) as u64;
        // SAFETY: the range lies within the allocation.
        unsafe {
            let bytes = bytemuck::cast_slice_mut(values);
            self.device.read(address, bytes)
        }
    }

    /// Sets all elements to 0.
    ///
    /// # Errors
    ///
    /// The device fails.
    pub fn clear(&mut self) -> Result<(), DeviceError> {
        let bytes = self.length * size_of::<T>();
        // SAFETY: the range lies within the allocation.
        unsafe { self.device.clear(self.address, bytes) }
    }

    /// Copies all elements to the host. Waits for the device.
    ///
    /// # Errors
    ///
    /// The device fails.
    pub fn to_vec(&self) -> Result<Vec<T>, DeviceError> {
        let mut values = vec![T::zeroed(); self.length];
        self.read(&mut values)?;
        Ok(values)
    }
}

impl<T> Buffer<T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Sets the number of elements, within the allocation.
    ///
    /// # Panics
    ///
    /// `length` exceeds the capacity.
    pub fn set_len(&mut self, length: usize) {
        assert!(length <= self.capacity, "{length} of {}", self.capacity);
        self.length = length;
    }

    /// Number of allocated elements.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        self.capacity * size_of::<T>()
    }

    /// The device that has the memory.
    pub(super) fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Device address of the first element.
    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: allocated with this size; the device frees it after the operations before.
        unsafe {
            self.device
                .free(self.address, self.capacity * size_of::<T>());
        }
    }
}

/// An array of words in pinned host memory, mapped into the device; both sides access it concurrently, word by word.
pub struct HostBuffer {
    device: Arc<dyn Device>,
    host: *mut u8,
    address: u64,
    length: usize,
}

// SAFETY: the memory belongs to this buffer and is accessed as atomic words.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "HostBuffer({} words)", self.length)
    }
}

impl HostBuffer {
    /// Allocates `length` words, all 0.
    ///
    /// # Errors
    ///
    /// The host is out of pinned memory, or the device fails.
    ///
    /// # Panics
    ///
    /// The size in bytes overflows.
    pub fn new(device: &Arc<dyn Device>, length: usize) -> Result<Self, DeviceError> {
        let bytes = length.checked_mul(size_of::<u32>());
        let (host, address) = device.allocate_host(bytes.expect("a size in memory"))?;
        let buffer = Self {
            device: Arc::clone(device),
            host,
            address,
            length,
        };
        for word in buffer.words() {
            word.store(0, Ordering::Relaxed);
        }
        Ok(buffer)
    }

    /// Allocates a copy of `bytes`, padded with zeros to whole words.
    ///
    /// # Errors
    ///
    /// The host is out of pinned memory, or the device fails.
    pub fn from_bytes(device: &Arc<dyn Device>, bytes: &[u8]) -> Result<Self, DeviceError> {
        let mut buffer = Self::new(device, bytes.len().div_ceil(size_of::<u32>()))?;
        // SAFETY: no kernel knows the buffer yet.
        let all = unsafe { buffer.bytes_mut() };
        all[..bytes.len()].copy_from_slice(bytes);
        Ok(buffer)
    }

    /// The words. A release store of one side synchronises with an acquire load of the other.
    pub fn words(&self) -> &[AtomicU32] {
        // SAFETY: allocated with this length and 16-byte alignment; every access is atomic.
        unsafe { std::slice::from_raw_parts(self.host.cast::<AtomicU32>(), self.length) }
    }

    /// The memory as bytes.
    ///
    /// # Safety
    /// No kernel and no copy accesses it during the borrow.
    pub(super) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.length * size_of::<u32>();
        // SAFETY: allocated with this length; `&mut self` and the caller exclude other accesses.
        unsafe { std::slice::from_raw_parts_mut(self.host, bytes) }
    }

    /// Reads the first words as floats.
    pub fn read_f32(&self, out: &mut [f32]) {
        for (out, word) in out.iter_mut().zip(self.words()) {
            *out = f32::from_bits(word.load(Ordering::Relaxed));
        }
    }

    /// Stores floats in the first words.
    pub fn write_f32(&self, values: &[f32]) {
        for (value, word) in values.iter().zip(self.words()) {
            word.store(value.to_bits(), Ordering::Relaxed);
        }
    }

    /// Device address of word `index`.
    pub(super) fn address(&self, index: usize) -> u64 {
        assert!(index < self.length, "word {index} of {}", self.length);
        self.address + (index * size_of::<u32>()) as u64
    }

    /// Number of words.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether the buffer has no words.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this size; all kernels have finished before it is freed.
        unsafe {
            drop(self.device.synchronise());
            self.device
                .free_host(self.host, self.length * size_of::<u32>());
        }
    }
}
