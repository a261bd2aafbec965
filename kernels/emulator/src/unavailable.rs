//! [`Device`] where the kernels were not compiled: an [`Emulator`] cannot be made, so that no method is reached.

use powerinfer_kernels::cuda::{Device, DeviceError, DeviceInfo, Graph, Launch};

use crate::Emulator;

#[expect(unsafe_code, reason = "implements the unsafe methods of a device")]
// SAFETY: it allocates nothing, and it captures nothing.
unsafe impl Device for Emulator {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn allocate(&self, _: usize) -> Result<u64, DeviceError> {
        unreachable!("the emulator was not built")
    }
    unsafe fn free(&self, _: u64, _: usize) {}
    fn allocate_host(&self, _: usize) -> Result<(*mut u8, u64), DeviceError> {
        unreachable!("the emulator was not built")
    }
    unsafe fn free_host(&self, _: *mut u8, _: usize) {}
    unsafe fn write(&self, _: u64, _: &[u8]) -> Result<(), DeviceError> {
        unreachable!("the emulator was not built")
    }
    unsafe fn read(&self, _: u64, _: &mut [u8]) -> Result<(), DeviceError> {
        unreachable!("the emulator was not built")
    }
    unsafe fn copy(&self, _: u64, _: u64, _: usize) -> Result<(), DeviceError> {
        unreachable!("the emulator was not built")
    }
    unsafe fn clear(&self, _: u64, _: usize) -> Result<(), DeviceError> {
        unreachable!("the emulator was not built")
    }
    unsafe fn launch(&self, _: &Launch<'_>) -> Result<(), DeviceError> {
        unreachable!("the emulator was not built")
    }
    fn begin_capture(&self) -> Result<bool, DeviceError> {
        Ok(false)
    }
    fn end_capture(&self) -> Result<Box<dyn Graph>, DeviceError> {
        Err(self.failed("capturing a graph", "the emulator was not built"))
    }
    fn record_event(&self, _: usize) -> Result<(), DeviceError> {
        Err(self.failed("recording an event", "the emulator was not built"))
    }
    fn elapsed_seconds(&self, _: usize, _: usize) -> Result<f64, DeviceError> {
        Err(self.failed("timing events", "the emulator was not built"))
    }
    unsafe fn copy_async(&self, _: usize, _: u64, _: &[u8]) -> Result<(), DeviceError> {
        unreachable!("the emulator was not built")
    }
    fn make_copies_wait(&self, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }
    fn make_kernels_wait(&self, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }
    fn synchronise_copies(&self, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }
    fn check(&self) -> Result<(), DeviceError> {
        Ok(())
    }
    fn synchronise(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}
