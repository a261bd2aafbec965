//! What kernels run on, and what can go wrong with it.
#![expect(unsafe_code, reason = "launches kernels")]

use std::fmt;

/// A device, as far as launches depend on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name, for people.
    pub name: String,
    /// Processors that run blocks of threads.
    pub multiprocessors: usize,
    /// Bytes of memory that a block's threads may share.
    pub shared_bytes: usize,
    /// Whether the driver stops kernels that run for seconds, as it does where a screen is attached.
    pub has_watchdog: bool,
}

/// A kernel and how it is to run.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// Its name in the sources.
    pub kernel: &'a str,
    /// Blocks in three directions.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes that a block's threads share.
    pub shared_bytes: usize,
    /// Its only argument, a structure, as it lies in memory.
    pub arguments: &'a [u8],
}

/// Memory and kernels. What is asked for happens in order; only reading and [`Device::synchronise`] wait.
pub trait Device: fmt::Debug + Send + Sync {
    /// What it is.
    fn info(&self) -> &DeviceInfo;

    /// Takes memory, aligned to 16 bytes at least; returns its address.
    fn allocate(&self, bytes: usize) -> Result<u64, DeviceError>;

    /// Gives memory back.
    ///
    /// # Safety
    /// It was taken with so many bytes, and nobody uses it any more.
    unsafe fn free(&self, address: u64, bytes: usize);

    /// Takes memory of the host that the device sees too; returns where each side sees it.
    fn allocate_host(&self, bytes: usize) -> Result<(*mut u8, u64), DeviceError>;

    /// Gives such memory back.
    ///
    /// # Safety
    /// It was taken with so many bytes, and nobody uses it any more.
    unsafe fn free_host(&self, host: *mut u8, bytes: usize);

    /// Copies to the device.
    ///
    /// # Safety
    /// So many bytes from `address` on were taken.
    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies from the device, once all before is done.
    ///
    /// # Safety
    /// So many bytes from `address` on were taken.
    unsafe fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Copies within the device.
    ///
    /// # Safety
    /// So many bytes from both addresses on were taken, and they have none in common.
    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), DeviceError>;

    /// Sets bytes to 0.
    ///
    /// # Safety
    /// So many bytes from `address` on were taken.
    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<(), DeviceError>;

    /// Runs a kernel after all before.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and their addresses those of enough memory, which stays
    /// until the kernel has ended.
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError>;

    /// From here on, and until [`Device::recorded`], launches, copies within the device and clearing are
    /// recorded instead of done; nothing else may be asked for meanwhile. Returns whether that can be had.
    fn begin_capture(&self) -> Result<bool, DeviceError>;

    /// Ends recording; returns what was recorded.
    fn end_capture(&self) -> Result<Box<dyn Graph>, DeviceError>;

    /// Marks the moment after all that was asked for before, as number `index`; not while launches are recorded.
    fn record_event(&self, index: usize) -> Result<(), DeviceError>;

    /// Seconds from one marked moment to a later one, both of which have come.
    fn elapsed_seconds(&self, earlier: usize, later: usize) -> Result<f64, DeviceError>;

    /// Copies from page-locked memory of the host to the device, beside kernels that run there and after all such copies
    /// before; as one of lane `lane`.
    ///
    /// # Safety
    /// So many bytes from `address` on were taken. Those of the host are memory of [`Device::allocate_host`], and nobody
    /// changes them before [`Device::synchronise_copies`] has returned.
    unsafe fn copy_async(&self, lane: usize, address: u64, bytes: &[u8])
    -> Result<(), DeviceError>;

    /// Copies beside that are asked for from here on, those of lane `lane` among them, wait for all that was launched before.
    fn make_copies_wait(&self, lane: usize) -> Result<(), DeviceError>;

    /// What is launched from here on waits for the copies of lane `lane`.
    fn make_kernels_wait(&self, lane: usize) -> Result<(), DeviceError>;

    /// Waits for the copies of lane `lane`.
    fn synchronise_copies(&self, lane: usize) -> Result<(), DeviceError>;

    /// Fails where something that was asked for has failed by now; waits for nothing.
    fn check(&self) -> Result<(), DeviceError>;

    /// Waits for everything.
    fn synchronise(&self) -> Result<(), DeviceError>;
}

/// What was asked of a device while it recorded.
pub trait Graph: fmt::Debug + Send + Sync {
    /// Does it, after all that was asked for before.
    ///
    /// # Safety
    /// All memory that it reads and writes is still taken, and nobody else changes it meanwhile.
    unsafe fn launch(&self) -> Result<(), DeviceError>;
}

/// Why a device did not do what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Memory ran out.
    #[error("{device} has no {bytes} bytes left")]
    OutOfMemory {
        /// The device.
        device: String,
        /// What was asked for.
        bytes: usize,
    },
    /// A kernel cannot be launched, or failed while it ran.
    #[error("kernel `{kernel}` failed on {device}: {reason}")]
    Kernel {
        /// The device.
        device: String,
        /// The kernel.
        kernel: String,
        /// Why.
        reason: String,
    },
    /// The device or its driver failed.
    #[error("{device} failed while {doing}: {reason}")]
    Failed {
        /// The device.
        device: String,
        /// What it was doing.
        doing: &'static str,
        /// Why.
        reason: String,
    },
    /// A shape that kernels have no room for.
    #[error(
        "{what} needs {needed} bytes of shared memory, {device} has {available}; keep that layer on the CPU"
    )]
    TooLarge {
        /// What does not fit.
        what: &'static str,
        /// The device.
        device: String,
        /// Bytes it needs.
        needed: usize,
        /// Bytes there are.
        available: usize,
    },
}
