//! [`Device`]: memory, launches, graphs and copies, as a CUDA device or an emulator provides them.
#![expect(unsafe_code, reason = "launches kernels")]

use std::{fmt, time::Duration};

/// Properties of a device that launches depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name for messages.
    pub name: String,
    /// Number of streaming multiprocessors.
    pub multiprocessors: usize,
    /// Largest shared memory of a thread block, in bytes.
    pub shared_bytes: usize,
    /// How long a kernel waits for the host before it gives up.
    pub patience: Duration,
}

impl DeviceInfo {
    /// [`patience`](Self::patience) of a device whose kernels may run for any time.
    pub const PATIENCE: Duration = Duration::from_secs(20);
    /// [`patience`](Self::patience) if the driver kills kernels that run for seconds, as it does if a display is
    /// attached.
    pub const WATCHDOG_PATIENCE: Duration = Duration::from_secs(1);
}

/// One kernel launch.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// Name of the kernel.
    pub kernel: &'a str,
    /// Grid dimensions in thread blocks.
    pub grid: [u32; 3],
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub shared_bytes: usize,
    /// Bytes of the kernel's only argument, a structure.
    pub arguments: &'a [u8],
}

/// A GPU: memory, and one stream of kernels, copies and events in issue order.
///
/// Operations are asynchronous, so a failure may be reported by a later call; only [`Device::read`], the `synchronise`
/// methods and freeing memory wait.
///
/// # Errors
///
/// Every method that returns a [`DeviceError`] does so if the device or its driver fails, or has failed before.
#[expect(
    clippy::missing_errors_doc,
    reason = "the trait states the errors of all methods"
)]
///
/// # Safety
///
/// Memory that is allocated is valid for its size until it is freed, aligned to 16 bytes, and overlaps no other. Operations of other
/// threads are not part of a [capture](super::CaptureLock).
pub unsafe trait Device: fmt::Debug + Send + Sync {
    /// Properties of the device.
    fn info(&self) -> &DeviceInfo;

    /// Allocates device memory, aligned to at least 16 bytes; returns its address.
    fn allocate(&self, bytes: usize) -> Result<u64, DeviceError>;

    /// Frees device memory, after the operations before.
    ///
    /// # Safety
    /// `address` was allocated with this many bytes and is not used again.
    unsafe fn free(&self, address: u64, bytes: usize);

    /// Allocates pinned host memory that is mapped into the device; returns its host and device addresses.
    fn allocate_host(&self, bytes: usize) -> Result<(*mut u8, u64), DeviceError>;

    /// Frees pinned host memory.
    ///
    /// # Safety
    /// `host` was allocated with this many bytes and is not used again.
    unsafe fn free_host(&self, host: *mut u8, bytes: usize);

    /// Copies from the host to the device; `bytes`, which are not pinned memory, may be reused on return.
    ///
    /// # Safety
    /// The range at `address` is allocated.
    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies from the device to the host, and waits until that is done.
    ///
    /// # Safety
    /// The range at `address` is allocated.
    unsafe fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Copies within the device.
    ///
    /// # Safety
    /// Both ranges are allocated and do not overlap.
    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), DeviceError>;

    /// Sets device memory to zero.
    ///
    /// # Safety
    /// The range at `address` is allocated.
    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<(), DeviceError>;

    /// Launches a kernel.
    ///
    /// # Safety
    /// The arguments are the kernel's; the addresses in them are valid for its accesses until it has finished.
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError>;

    /// Begins the capture of a graph: until [`Device::end_capture`], launches, copies within the device and clears are
    /// recorded instead of executed, and no other operation is allowed. Returns whether the device supports capture.
    fn begin_capture(&self) -> Result<bool, DeviceError>;

    /// Ends the capture and instantiates the graph.
    fn end_capture(&self) -> Result<Box<dyn Graph>, DeviceError>;

    /// Records event number `index` after the operations before; not during a capture.
    fn record_event(&self, index: usize) -> Result<(), DeviceError>;

    /// Seconds between two recorded events that have completed.
    fn elapsed_seconds(&self, earlier: usize, later: usize) -> Result<f64, DeviceError>;

    /// Starts a copy from pinned host memory to the device that overlaps with kernels; copies run in issue order.
    /// `staging` is the number of the staging stream whose copies are waited for together.
    ///
    /// # Safety
    /// The range at `address` is allocated. `bytes` are memory of [`Device::allocate_host`] and do not change until
    /// [`Device::synchronise_copies`] has returned.
    unsafe fn copy_async(
        &self,
        staging: usize,
        address: u64,
        bytes: &[u8],
    ) -> Result<(), DeviceError>;

    /// Makes later copies of staging stream `staging` wait for all kernels that were launched before.
    fn make_copies_wait(&self, staging: usize) -> Result<(), DeviceError>;

    /// Makes later kernels wait for the copies of staging stream `staging`.
    fn make_kernels_wait(&self, staging: usize) -> Result<(), DeviceError>;

    /// Waits on the host for the copies of staging stream `staging`.
    fn synchronise_copies(&self, staging: usize) -> Result<(), DeviceError>;

    /// Reports a failure of an earlier operation, without waiting.
    fn check(&self) -> Result<(), DeviceError>;

    /// Waits until all operations have finished.
    fn synchronise(&self) -> Result<(), DeviceError>;
}

/// A captured graph, instantiated for launches.
pub trait Graph: fmt::Debug + Send + Sync {
    /// Launches the graph after the operations before.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Safety
    /// All memory that the graph accesses is still allocated and not changed concurrently, the device exists, and no other thread
    /// launches the graph at this time.
    unsafe fn launch(&self) -> Result<(), DeviceError>;

    /// The captured operations in order, each with all its values, to be compared with those of another capture; none if the
    /// device does not keep them.
    fn operations(&self) -> Vec<String> {
        Vec::new()
    }
}

/// Failure of a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The device is out of memory.
    #[error("out of memory on {device}: {bytes} bytes cannot be allocated")]
    OutOfMemory {
        /// The device.
        device: String,
        /// Size of the allocation.
        bytes: usize,
    },
    /// A kernel could not be launched, or failed.
    #[error("kernel `{kernel}` failed on {device}: {reason}")]
    Kernel {
        /// The device.
        device: String,
        /// The kernel.
        kernel: String,
        /// Cause reported by the driver.
        reason: String,
    },
    /// The host has computed its part of a layer too late for a kernel that waited for it.
    #[error("the host's part of a layer did not reach {device} within {patience:?}")]
    HostLate {
        /// The device.
        device: String,
        /// How long kernels wait.
        patience: Duration,
    },
    /// The device or its driver failed.
    #[error("{device} failed while {doing}: {reason}")]
    Failed {
        /// The device.
        device: String,
        /// The operation that failed.
        doing: &'static str,
        /// Cause reported by the driver.
        reason: String,
    },
    /// An operand exceeds the shared memory of a thread block.
    #[error(
        "{what} needs {needed} bytes of shared memory, {device} has {available}; keep that layer on the CPU"
    )]
    SharedMemory {
        /// The operand.
        what: &'static str,
        /// The device.
        device: String,
        /// Bytes that the operand needs.
        needed: usize,
        /// Bytes that the device has.
        available: usize,
    },
}
