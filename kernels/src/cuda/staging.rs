//! Staging streams: pinned memory through which weights are copied to a device while kernels run. Two streams, each with
//! its own destination on the device, hide the copies behind the kernels:
//!
//! ```text
//! stream 0   fill ▸ copy ········ kernels ·· fill ▸ copy
//! stream 1          fill ▸ copy ········ kernels ··
//! ```

use std::sync::Arc;

use super::{Device, DeviceError, HostBuffer};

/// Alignment of each plane in the staging memory, in bytes.
const ALIGNMENT: usize = 16;

/// Pinned memory whose contents are copied to a device asynchronously, in rounds from [`begin`](Self::begin) to
/// [`end`](Self::end).
#[derive(Debug)]
pub struct StagingStream {
    device: Arc<dyn Device>,
    number: usize,
    memory: HostBuffer,
    /// Bytes written in this round.
    used: usize,
}

impl StagingStream {
    /// Allocates staging stream `number` for rounds of up to `planes` planes with `bytes` bytes in all.
    ///
    /// # Errors
    ///
    /// The host is out of pinned memory, or the device fails.
    pub fn new(
        device: &Arc<dyn Device>,
        number: usize,
        planes: usize,
        bytes: usize,
    ) -> Result<Self, DeviceError> {
        let bytes = bytes + planes * ALIGNMENT;
        Ok(Self {
            device: Arc::clone(device),
            number,
            memory: HostBuffer::new(device, bytes.div_ceil(size_of::<u32>()))?,
            used: 0,
        })
    }

    /// Begins a round: waits for the copies of the previous one, and makes the copies of this one wait for the kernels
    /// launched so far, which may still read their destination.
    ///
    /// # Errors
    ///
    /// The device fails.
    pub fn begin(&mut self) -> Result<(), DeviceError> {
        self.device.synchronise_copies(self.number)?;
        self.device.make_copies_wait(self.number)?;
        self.used = 0;
        Ok(())
    }

    /// Ends a round: kernels launched from here on wait for its copies.
    ///
    /// # Errors
    ///
    /// The device fails.
    pub fn end(&self) -> Result<(), DeviceError> {
        self.device.make_kernels_wait(self.number)
    }

    /// Copies `bytes` into the staging memory with `copy`, and from there to `address` on the device.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// The round exceeds the staging memory.
    ///
    /// # Safety
    /// The range at `address` is allocated, and stays so until kernels after [`StagingStream::end`] have finished.
    #[expect(unsafe_code, reason = "copies from pinned memory")]
    pub(super) unsafe fn write(
        &mut self,
        address: u64,
        bytes: &[u8],
        copy: &dyn Fn(&mut [u8], &[u8]),
    ) -> Result<(), DeviceError> {
        let (first, end) = (self.used, self.used + bytes.len());
        // SAFETY: the copies of the previous round have finished in `begin`, and those of this round read memory before
        // `first` only.
        let memory = unsafe { self.memory.bytes_mut() };
        assert!(
            end <= memory.len(),
            "{end} bytes fit into the staging memory"
        );
        copy(&mut memory[first..end], bytes);
        self.used = end.next_multiple_of(ALIGNMENT).min(memory.len());
        // SAFETY: the bytes lie in pinned memory, which is not written or freed before the copy has finished; the caller
        // vouches for the address.
        unsafe {
            let staged = &memory[first..end];
            self.device.copy_async(self.number, address, staged)
        }
    }
}

impl Drop for StagingStream {
    fn drop(&mut self) {
        // The memory is freed after its copies; a device that has failed reads nothing.
        drop(self.device.synchronise_copies(self.number));
    }
}
