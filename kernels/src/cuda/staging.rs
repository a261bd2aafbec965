//! A lane: page-locked memory through which numbers go to a device beside the kernels that run there. Two lanes, each
//! with room of its own on the device, hide copying behind computing.
//!
//! ```text
//! lane 0   fill ▸ copy ········ kernels ·· fill ▸ copy
//! lane 1          fill ▸ copy ········ kernels ··
//! ```

use std::sync::Arc;

use super::{Device, DeviceError, HostBuffer};

/// Numbers of each plane begin at a multiple of so many bytes.
const ALIGNMENT: usize = 16;

/// Memory on the way to a device.
#[derive(Debug)]
pub struct StagingStream {
    device: Arc<dyn Device>,
    number: usize,
    memory: HostBuffer,
    used: usize,
}

impl StagingStream {
    /// StagingStream number `number`, with room for so many `planes` of so many bytes together.
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

    /// Empties the lane, once what went through it before has arrived. What goes through it from here on arrives after the
    /// kernels that have been launched.
    pub fn begin(&mut self) -> Result<(), DeviceError> {
        self.device.synchronise_copies(self.number)?;
        self.device.make_copies_wait(self.number)?;
        self.used = 0;
        Ok(())
    }

    /// Kernels that are launched from here on run after all that went through the lane has arrived.
    pub fn end(&self) -> Result<(), DeviceError> {
        self.device.make_kernels_wait(self.number)
    }

    /// Copies `bytes` to `address` on the device, by way of the host's memory, which `copy` fills.
    ///
    /// Panics where the lane has no room for them.
    ///
    /// # Safety
    /// So many bytes from `address` on were taken, and stay until kernels after [`StagingStream::end`] have run.
    #[expect(unsafe_code, reason = "copies from pinned memory")]
    pub(super) unsafe fn write(
        &mut self,
        address: u64,
        bytes: &[u8],
        copy: &dyn Fn(&mut [u8], &[u8]),
    ) -> Result<(), DeviceError> {
        let (first, end) = (self.used, self.used + bytes.len());
        // SAFETY: what was copied from here before has arrived when the lane was opened, and what has gone since lies
        // before.
        let room = unsafe { self.memory.bytes_mut() };
        assert!(end <= room.len(), "a lane with room for {end} bytes");
        copy(&mut room[first..end], bytes);
        self.used = end.next_multiple_of(ALIGNMENT).min(room.len());
        // SAFETY: the bytes lie in page-locked memory, which stays and is not written before they have arrived; the
        // address is the caller's.
        unsafe {
            let from = &room[first..end];
            self.device.copy_async(self.number, address, from)
        }
    }
}

impl Drop for StagingStream {
    fn drop(&mut self) {
        // The memory is given back when nothing is on its way any more; a device that is lost reads nothing.
        drop(self.device.synchronise_copies(self.number));
    }
}
