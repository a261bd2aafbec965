//! [`Device`] on the CPU: every operation is executed at once, but for captured graphs and asynchronous copies.
#![expect(unsafe_code, reason = "runs kernels compiled as C++")]

use std::{
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use powerinfer_kernels::cuda::{CaptureLock, Device, DeviceError, DeviceInfo, Graph, Launch};

use crate::{
    Checks, Emulator, GraphCapture, Order,
    events::Events,
    graph::{EmulatedGraph, Node, RunningGraph},
    lock,
    staging::AsyncCopy,
};

mod native {
    use std::ffi::{c_char, c_uint, c_void};

    unsafe extern "C" {
        pub(crate) fn emulator_allocate(bytes: usize, is_host: bool) -> *mut c_void;
        pub(crate) fn emulator_free(memory: *mut c_void, bytes: usize);
        pub(crate) fn emulator_holds(address: usize, bytes: usize) -> bool;
        pub(crate) fn emulator_find(name: *const c_char, has_checks: bool) -> *const c_void;
        pub(crate) fn emulator_launch(
            kernel: *const c_void,
            grid: *const c_uint,
            threads: c_uint,
            shared_bytes: usize,
            order: c_uint,
            has_checks: bool,
            arguments: *const c_void,
            argument_bytes: usize,
        ) -> *const c_char;
    }
}

// SAFETY: every allocation has pages of its own; captures have a `CaptureLock`.
unsafe impl Device for Emulator {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn allocate(&self, bytes: usize) -> Result<u64, DeviceError> {
        let _operation = self.capture_lock.operation();
        self.check_lost("allocating memory")?;
        let take = |left: usize| left.checked_sub(bytes);
        let taken = self
            .free_bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        let no_memory = |_| DeviceError::OutOfMemory {
            device: self.info.name.clone(),
            bytes,
        };
        taken.map_err(no_memory)?;
        self.map_memory(bytes, false).map(|memory| memory as u64)
    }

    unsafe fn free(&self, address: u64, bytes: usize) {
        let _operation = self.capture_lock.operation();
        drop(self.running.wait());
        self.run_copies(|_| true);
        self.free_bytes.fetch_add(bytes, Ordering::Relaxed);
        // SAFETY: as the caller guarantees.
        unsafe { native::emulator_free(address as *mut _, bytes) }
    }

    fn allocate_host(&self, bytes: usize) -> Result<(*mut u8, u64), DeviceError> {
        let _operation = self.capture_lock.operation();
        let memory = self.map_memory(bytes, true)?;
        Ok((memory, memory as u64))
    }

    unsafe fn free_host(&self, host: *mut u8, bytes: usize) {
        let _operation = self.capture_lock.operation();
        // SAFETY: as the caller guarantees.
        unsafe { native::emulator_free(host.cast(), bytes) }
    }

    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let _operation = self.capture_lock.operation();
        self.check_not_capturing("copying to it")?;
        self.check_range("copying to it", address, bytes.len())?;
        // SAFETY: as the caller guarantees.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        Ok(())
    }

    unsafe fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let _operation = self.capture_lock.operation();
        self.check_not_capturing("copying from it")?;
        self.check_range("copying from it", address, bytes.len())?;
        // SAFETY: as the caller guarantees.
        unsafe {
            std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), bytes.len())
        };
        Ok(())
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), DeviceError> {
        let _operation = self.capture_lock.operation();
        if let Some(nodes) = &mut *self.captured() {
            nodes.push(Node::Copy { to, from, bytes });
            return Ok(());
        }
        self.running.wait()?;
        self.check_lost("copying within it")?;
        self.check_range("copying within it", to, bytes)?;
        self.check_range("copying within it", from, bytes)?;
        // SAFETY: as the caller guarantees.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<(), DeviceError> {
        let _operation = self.capture_lock.operation();
        if let Some(nodes) = &mut *self.captured() {
            nodes.push(Node::Clear { address, bytes });
            return Ok(());
        }
        self.running.wait()?;
        self.check_lost("clearing memory")?;
        self.check_range("clearing memory", address, bytes)?;
        // SAFETY: as the caller guarantees.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) };
        Ok(())
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let _operation = self.capture_lock.operation();
        if let Some(nodes) = &mut *self.captured() {
            nodes.push(Node::Launch {
                kernel: launch.kernel.to_owned(),
                grid: launch.grid,
                threads: launch.threads,
                shared_bytes: launch.shared_bytes,
                arguments: launch.arguments.to_vec(),
            });
            return Ok(());
        }
        self.running.wait()?;
        let one_less = |left: usize| match left {
            usize::MAX => Some(left),
            left => Some(left.saturating_sub(1)),
        };
        let _ = self
            .launches_left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
        self.check_lost("launching a kernel")?;
        if self.failing_launch.fetch_sub(1, Ordering::Relaxed) == 0 {
            return Err(DeviceError::Kernel {
                device: self.info.name.clone(),
                kernel: launch.kernel.to_owned(),
                reason: "it was made to fail".to_owned(),
            });
        }
        let failed = |reason: String| DeviceError::Kernel {
            device: self.info.name.clone(),
            kernel: launch.kernel.to_owned(),
            reason,
        };
        let name = std::ffi::CString::new(launch.kernel).map_err(|why| failed(why.to_string()))?;
        let has_checks = self.checks == Checks::On;
        // SAFETY: a C string.
        let kernel = unsafe { native::emulator_find(name.as_ptr(), has_checks) };
        if kernel.is_null() {
            return Err(failed("there is no such kernel".to_owned()));
        }
        let order = match self.order {
            Order::Forward => 0,
            Order::Reverse => 1,
            Order::Shuffled(seed) => 2 + u32::from(seed),
        };
        // Aligned for any field of the structure.
        let mut arguments = vec![0u64; launch.arguments.len().div_ceil(8)];
        // SAFETY: the kernel exists and checks the size of its arguments; the rest as the caller guarantees.
        let why = unsafe {
            std::ptr::copy_nonoverlapping(
                launch.arguments.as_ptr(),
                arguments.as_mut_ptr().cast::<u8>(),
                launch.arguments.len(),
            );
            native::emulator_launch(
                kernel,
                launch.grid.as_ptr(),
                launch.threads,
                launch.shared_bytes,
                order,
                has_checks,
                arguments.as_ptr().cast(),
                launch.arguments.len(),
            )
        };
        if why.is_null() {
            return Ok(());
        }
        // SAFETY: a C string that is valid until the next launch on this thread.
        let why = unsafe { std::ffi::CStr::from_ptr(why) };
        Err(failed(why.to_string_lossy().into_owned()))
    }

    fn begin_capture(&self) -> Result<bool, DeviceError> {
        self.check_not_capturing("capturing a graph")?;
        if self.capture == GraphCapture::Unsupported {
            return Ok(false);
        }
        self.capture_lock.begin();
        *self.captured() = Some(Vec::new());
        Ok(true)
    }

    fn end_capture(&self) -> Result<Box<dyn Graph>, DeviceError> {
        let nodes = self.captured().take();
        self.capture_lock.end();
        let nodes =
            nodes.ok_or_else(|| self.failed("capturing a graph", "no capture has begun"))?;
        if self.capture == GraphCapture::Fails {
            return Err(self.failed("capturing a graph", "capture was made to fail"));
        }
        let device = Emulator {
            info: self.info.clone(),
            order: self.order,
            checks: self.checks,
            capture: GraphCapture::Unsupported,
            capture_lock: CaptureLock::default(),
            captured: Mutex::default(),
            events: Events::default(),
            free_bytes: AtomicUsize::new(usize::MAX),
            launches_left: Arc::clone(&self.launches_left),
            failing_launch: Arc::clone(&self.failing_launch),
            running: RunningGraph::default(),
            copies: Mutex::default(),
        };
        self.running.count_capture();
        Ok(Box::new(EmulatedGraph {
            shared: Arc::new((device, nodes)),
            running: self.running.clone(),
        }))
    }

    fn record_event(&self, index: usize) -> Result<(), DeviceError> {
        let _operation = self.capture_lock.operation();
        self.check_not_capturing("recording an event")?;
        self.events.record(index);
        Ok(())
    }

    fn elapsed_seconds(&self, earlier: usize, later: usize) -> Result<f64, DeviceError> {
        let _operation = self.capture_lock.operation();
        let seconds = self.events.seconds_between(earlier, later);
        seconds.ok_or_else(|| self.failed("timing events", "the event was not recorded"))
    }

    unsafe fn copy_async(
        &self,
        staging: usize,
        address: u64,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        let _operation = self.capture_lock.operation();
        const DOING: &str = "copying to it asynchronously";
        self.check_not_capturing(DOING)?;
        self.check_range(DOING, address, bytes.len())?;
        let mut copies = lock(&self.copies);
        if copies.in_use.contains(&staging) {
            return Err(self.failed(DOING, "running kernels may still read the destination"));
        }
        let start = bytes.as_ptr() as u64;
        let host = start..start + bytes.len() as u64;
        let overlaps = |range: &Range<u64>| range.start < host.end && host.start < range.end;
        if copies
            .unsynchronised
            .iter()
            .any(|(_, range)| overlaps(range))
        {
            return Err(self.failed(
                DOING,
                "staging memory is overwritten before its copy has finished",
            ));
        }
        copies.unsynchronised.push((staging, host));
        copies.pending.push_back(AsyncCopy {
            staging,
            address,
            host: bytes.as_ptr() as u64,
            bytes: bytes.len(),
        });
        Ok(())
    }

    fn make_copies_wait(&self, staging: usize) -> Result<(), DeviceError> {
        let _operation = self.capture_lock.operation();
        self.check_not_capturing("copying to it asynchronously")?;
        lock(&self.copies).in_use.retain(|other| *other != staging);
        Ok(())
    }

    fn make_kernels_wait(&self, staging: usize) -> Result<(), DeviceError> {
        let _operation = self.capture_lock.operation();
        self.check_not_capturing("copying to it asynchronously")?;
        self.run_copies(|copy| copy.staging == staging);
        lock(&self.copies).in_use.push(staging);
        Ok(())
    }

    fn synchronise_copies(&self, staging: usize) -> Result<(), DeviceError> {
        let _operation = self.capture_lock.operation();
        // On a lost device too, as the staging memory may be freed now.
        self.run_copies(|copy| copy.staging == staging);
        lock(&self.copies)
            .unsynchronised
            .retain(|(of, _)| *of != staging);
        self.check_not_capturing("copying to it asynchronously")
    }

    fn check(&self) -> Result<(), DeviceError> {
        let _operation = self.capture_lock.operation();
        if self.running.is_finished() {
            self.running.wait()
        } else {
            self.check_lost("running kernels")
        }
    }

    fn synchronise(&self) -> Result<(), DeviceError> {
        let _operation = self.capture_lock.operation();
        self.check_not_capturing("synchronising") // launches are synchronous
    }
}

impl Emulator {
    /// Fails unless the range lies within one allocation.
    fn check_range(
        &self,
        doing: &'static str,
        address: u64,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        // SAFETY: nothing is accessed.
        match unsafe { native::emulator_holds(address as usize, bytes) } {
            true => Ok(()),
            false => Err(self.failed(doing, "the range is not within an allocation")),
        }
    }

    /// Allocates memory, of the device or of the host.
    fn map_memory(&self, bytes: usize, is_host: bool) -> Result<*mut u8, DeviceError> {
        // SAFETY: any size is valid.
        let memory = unsafe { native::emulator_allocate(bytes, is_host) };
        if memory.is_null() {
            Err(DeviceError::OutOfMemory {
                device: self.info.name.clone(),
                bytes,
            })
        } else {
            Ok(memory.cast())
        }
    }
}
