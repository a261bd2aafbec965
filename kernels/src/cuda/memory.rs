//! Memory of a device, and memory of the host that a device sees too.
#![expect(unsafe_code, reason = "device and pinned memory are raw addresses")]

use std::{
    fmt,
    marker::PhantomData,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use bytemuck::Pod;

use super::{Device, DeviceError, StagingStream};

/// Some numbers on a device.
pub struct Buffer<T> {
    device: Arc<dyn Device>,
    address: u64,
    /// Numbers that were taken.
    capacity: usize,
    /// Of these, the first ones that are in use.
    length: usize,
    numbers: PhantomData<T>,
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Buffer({} numbers)", self.length)
    }
}

impl<T: Pod> Buffer<T> {
    /// `length` numbers, all 0.
    pub fn new(device: &Arc<dyn Device>, length: usize) -> Result<Self, DeviceError> {
        let bytes = length * size_of::<T>();
        let buffer = Self {
            address: device.allocate(bytes)?,
            device: Arc::clone(device),
            capacity: length,
            length,
            numbers: PhantomData,
        };
        // SAFETY: just as many bytes were taken.
        unsafe {
            device.clear(buffer.address, bytes)?;
        }
        Ok(buffer)
    }

    /// A copy of `numbers`.
    pub fn from_slice(device: &Arc<dyn Device>, numbers: &[T]) -> Result<Self, DeviceError> {
        let bytes: &[u8] = bytemuck::cast_slice(numbers);
        let buffer = Self {
            address: device.allocate(bytes.len())?,
            device: Arc::clone(device),
            capacity: numbers.len(),
            length: numbers.len(),
            numbers: PhantomData,
        };
        // SAFETY: just as many bytes were taken.
        unsafe {
            device.write(buffer.address, bytes)?;
        }
        Ok(buffer)
    }

    /// Replaces the first numbers.
    ///
    /// Panics where there are fewer.
    pub fn write(&mut self, numbers: &[T]) -> Result<(), DeviceError> {
        assert!(numbers.len() <= self.length, "numbers that fit");
        // SAFETY: the bytes lie within what was taken.
        unsafe {
            self.device
                .write(self.address, bytemuck::cast_slice(numbers))
        }
    }

    /// Replaces the first numbers, by way of `lane`, whose memory `copy` fills.
    ///
    /// Panics where there are fewer, or where the lane has no room for them.
    pub fn write_async(
        &mut self,
        numbers: &[T],
        lane: &mut StagingStream,
        copy: &dyn Fn(&mut [u8], &[u8]),
    ) -> Result<(), DeviceError> {
        assert!(numbers.len() <= self.length, "numbers that fit");
        // SAFETY: the bytes lie within what was taken; memory is given back only after what was asked for before is
        // done.
        unsafe { lane.write(self.address, bytemuck::cast_slice(numbers), copy) }
    }

    /// Takes over `count` numbers of `other` from number `from` on, to the same places.
    ///
    /// Panics where one of them has fewer.
    pub fn copy_range(
        &mut self,
        other: &Self,
        from: usize,
        count: usize,
    ) -> Result<(), DeviceError> {
        assert!(
            from + count <= self.length.min(other.length),
            "numbers that are there"
        );
        let (skipped, bytes) = ((from * size_of::<T>()) as u64, count * size_of::<T>());
        // SAFETY: the bytes lie within what was taken, and two buffers share none.
        unsafe {
            self.device
                .copy(self.address + skipped, other.address + skipped, bytes)
        }
    }

    /// Takes over all numbers of `other`, of which there are as many.
    pub fn copy_from(&mut self, other: &Self) -> Result<(), DeviceError> {
        self.copy_range(other, 0, other.length)
    }

    /// Reads the first numbers, once all that was launched before is done.
    ///
    /// Panics where there are fewer.
    pub fn read(&self, numbers: &mut [T]) -> Result<(), DeviceError> {
        self.read_at(0, numbers)
    }

    /// Reads the numbers from number `from` on, once all that was launched before is done.
    ///
    /// Panics where there are fewer.
    pub fn read_at(&self, from: usize, numbers: &mut [T]) -> Result<(), DeviceError> {
        assert!(
            from + numbers.len() <= self.length,
            "numbers that are there"
        );
        let address = self.address + (from * size_of::<T>()) as u64;
        // SAFETY: the bytes lie within what was taken.
        unsafe {
            let bytes = bytemuck::cast_slice_mut(numbers);
            self.device.read(address, bytes)
        }
    }

    /// Makes all numbers 0.
    pub fn clear(&mut self) -> Result<(), DeviceError> {
        let bytes = self.length * size_of::<T>();
        // SAFETY: the bytes lie within what was taken.
        unsafe { self.device.clear(self.address, bytes) }
    }

    /// All numbers, once all that was launched before is done.
    pub fn to_vec(&self) -> Result<Vec<T>, DeviceError> {
        let mut numbers = vec![T::zeroed(); self.length];
        self.read(&mut numbers)?;
        Ok(numbers)
    }
}

impl<T> Buffer<T> {
    /// How many numbers there are.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// From now on uses the first `length` of the numbers that were taken.
    ///
    /// Panics where there are fewer.
    pub fn set_len(&mut self, length: usize) {
        assert!(length <= self.capacity, "{length} of {}", self.capacity);
        self.length = length;
    }

    /// How many numbers were taken.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes that are taken.
    pub fn bytes(&self) -> usize {
        self.capacity * size_of::<T>()
    }

    /// Where the device sees them.
    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: it was taken with so many bytes; kernels that use it run before this is done.
        unsafe {
            self.device
                .free(self.address, self.capacity * size_of::<T>());
        }
    }
}

/// Words in memory of the host that the device reads and writes while the host does: every access is
/// one of a word, so that neither side sees half of one.
pub struct HostBuffer {
    device: Arc<dyn Device>,
    host: *mut u8,
    address: u64,
    length: usize,
}

// SAFETY: the memory belongs to this buffer, and whoever shares it goes through atomic words.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "HostBuffer({} words)", self.length)
    }
}

impl HostBuffer {
    /// `length` words, all 0.
    pub fn new(device: &Arc<dyn Device>, length: usize) -> Result<Self, DeviceError> {
        let (host, address) = device.allocate_host(length * size_of::<u32>())?;
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

    /// The words. What one side wrote before it released a word can be read by the other after it
    /// acquired that.
    pub fn words(&self) -> &[AtomicU32] {
        // SAFETY: so many words were taken, aligned to 16 bytes, and nobody reads them but as atomic ones.
        unsafe { std::slice::from_raw_parts(self.host.cast::<AtomicU32>(), self.length) }
    }

    /// The memory, as bytes.
    ///
    /// # Safety
    /// No kernel and no copy uses it meanwhile.
    pub(super) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.length * size_of::<u32>();
        // SAFETY: so many bytes were taken, and whoever holds this is alone.
        unsafe { std::slice::from_raw_parts_mut(self.host, bytes) }
    }

    /// Copies words, which hold floats, to `out`.
    pub fn read_f32(&self, out: &mut [f32]) {
        for (out, word) in out.iter_mut().zip(self.words()) {
            *out = f32::from_bits(word.load(Ordering::Relaxed));
        }
    }

    /// Puts floats into the first words.
    pub fn write_f32(&self, numbers: &[f32]) {
        for (number, word) in numbers.iter().zip(self.words()) {
            word.store(number.to_bits(), Ordering::Relaxed);
        }
    }

    /// Where the device sees word `index`.
    pub(super) fn address(&self, index: usize) -> u64 {
        assert!(index < self.length, "word {index} of {}", self.length);
        self.address + (index * size_of::<u32>()) as u64
    }

    /// How many words there are.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // SAFETY: it was taken with so many bytes; kernels that use it are done before this.
        unsafe {
            drop(self.device.synchronise());
            self.device
                .free_host(self.host, self.length * size_of::<u32>());
        }
    }
}
