//! [`Device`] that interprets PTX. Every operation is executed at once.
#![expect(unsafe_code, reason = "allocates memory and launches kernels")]

use std::{
    alloc::{self, Layout},
    collections::{BTreeMap, HashMap},
    ops::Range,
    sync::{Arc, LazyLock, Mutex},
};

use powerinfer_kernels::cuda::{Device, DeviceError, DeviceInfo, Graph, Launch, ptx_modules};

use super::{
    PtxError, decode::decode, instruction::Kernel, memory::Memory, parse::Module, run::run_grid,
};
use crate::{events::Events, lock};

/// Alignment of allocations, as that of the emulator.
const ALIGNMENT: usize = 16;

/// Kernels by name; those that could not be decoded fail when they are launched.
type Kernels = HashMap<String, Result<Kernel, PtxError>>;

/// A device that interprets PTX: the kernels that ship, or those of a test.
///
/// Graphs are not captured. Threads run in ascending order, and blocks one after the other.
#[derive(Debug)]
pub struct PtxDevice {
    info: DeviceInfo,
    kernels: Arc<Kernels>,
    /// Size of every allocation, by address.
    allocations: Mutex<BTreeMap<u64, usize>>,
    events: Events,
}

impl PtxDevice {
    /// A device with the kernels that ship, and this many multiprocessors.
    ///
    /// # Panics
    ///
    /// The text of a shipped module cannot be split into kernels.
    pub fn new(multiprocessors: usize) -> Self {
        // Decoded once per process.
        static SHIPPED: LazyLock<Arc<Kernels>> = LazyLock::new(|| {
            let kernels = ptx_modules().flat_map(|(name, ptx)| {
                let decoded = decode_module(&format!("{name}.ptx"), &ptx);
                decoded.expect("well-formed PTX of NVRTC")
            });
            Arc::new(kernels.collect())
        });
        Self::with_kernels(multiprocessors, Arc::clone(&SHIPPED))
    }

    /// A device with the kernels of one module, `ptx`; `file` is its name in errors.
    ///
    /// # Errors
    ///
    /// A statement is not known.
    pub fn with_module(multiprocessors: usize, file: &str, ptx: &str) -> Result<Self, PtxError> {
        let kernels = decode_module(file, ptx)?;
        if let Some(error) = kernels.values().find_map(|kernel| kernel.as_ref().err()) {
            return Err(error.clone());
        }
        Ok(Self::with_kernels(multiprocessors, Arc::new(kernels)))
    }

    fn with_kernels(multiprocessors: usize, kernels: Arc<Kernels>) -> Self {
        Self {
            info: DeviceInfo {
                name: "PTX interpreter".to_owned(),
                multiprocessors,
                patience: DeviceInfo::PATIENCE,
                shared_bytes: 99 << 10, // as the emulator
            },
            kernels,
            allocations: Mutex::default(),
            events: Events::default(),
        }
    }

    fn allocate_bytes(&self, bytes: usize) -> Result<*mut u8, DeviceError> {
        let out_of_memory = || DeviceError::OutOfMemory {
            device: self.info.name.clone(),
            bytes,
        };
        let layout = layout(bytes).ok_or_else(out_of_memory)?;
        // SAFETY: the size is not 0.
        let memory = unsafe { alloc::alloc(layout) };
        if memory.is_null() {
            return Err(out_of_memory());
        }
        // SAFETY: just allocated. NaN, so that reads of uninitialised memory show.
        unsafe { memory.write_bytes(0xff, layout.size()) };
        lock(&self.allocations).insert(memory as u64, bytes);
        Ok(memory)
    }

    /// # Safety
    /// As [`Device::free`].
    unsafe fn free_bytes(&self, memory: *mut u8, bytes: usize) {
        lock(&self.allocations).remove(&(memory as u64));
        let layout = layout(bytes).expect("the size of an allocation");
        // SAFETY: allocated with this layout.
        unsafe { alloc::dealloc(memory, layout) };
    }

    fn failed(&self, doing: &'static str, reason: &str) -> DeviceError {
        DeviceError::Failed {
            device: self.info.name.clone(),
            doing,
            reason: reason.to_owned(),
        }
    }
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.max(1), ALIGNMENT).ok()
}

fn decode_module(file: &str, ptx: &str) -> Result<Kernels, PtxError> {
    let module = Module::parse(file, ptx)?;
    let kernels = module.functions.iter().filter(|found| found.is_kernel);
    Ok(kernels
        .map(|kernel| (kernel.name.to_owned(), decode(&module, kernel)))
        .collect())
}

// SAFETY: its memory is allocated by Rust, and it captures nothing.
unsafe impl Device for PtxDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn allocate(&self, bytes: usize) -> Result<u64, DeviceError> {
        self.allocate_bytes(bytes).map(|memory| memory as u64)
    }

    unsafe fn free(&self, address: u64, bytes: usize) {
        // SAFETY: as the caller guarantees.
        unsafe { self.free_bytes(address as *mut u8, bytes) }
    }

    fn allocate_host(&self, bytes: usize) -> Result<(*mut u8, u64), DeviceError> {
        let memory = self.allocate_bytes(bytes)?;
        Ok((memory, memory as u64))
    }

    unsafe fn free_host(&self, host: *mut u8, bytes: usize) {
        // SAFETY: as the caller guarantees.
        unsafe { self.free_bytes(host, bytes) }
    }

    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        // SAFETY: as the caller guarantees.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        Ok(())
    }

    unsafe fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let from = address as *const u8;
        // SAFETY: as the caller guarantees.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: as the caller guarantees.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: as the caller guarantees.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) };
        Ok(())
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let failed = |reason: String| DeviceError::Kernel {
            device: self.info.name.clone(),
            kernel: launch.kernel.to_owned(),
            reason,
        };
        let kernel = match self.kernels.get(launch.kernel) {
            Some(Ok(kernel)) => kernel,
            Some(Err(error)) => return Err(failed(error.to_string())),
            None => return Err(failed("there is no such kernel".to_owned())),
        };
        let (threads, bytes) = (launch.threads, launch.arguments.len());
        if threads == 0 || threads > kernel.max_threads {
            let largest = kernel.max_threads;
            return Err(failed(format!(
                "it has up to {largest} threads, not {threads}"
            )));
        }
        if bytes != kernel.argument_bytes {
            let expected = kernel.argument_bytes;
            return Err(failed(format!(
                "its arguments have {expected} bytes, not {bytes}"
            )));
        }
        if launch.shared_bytes > self.info.shared_bytes {
            let needed = launch.shared_bytes;
            return Err(failed(format!("it needs {needed} bytes of shared memory")));
        }
        let ranges: Vec<Range<u64>> = lock(&self.allocations)
            .iter()
            .map(|(start, bytes)| *start..*start + *bytes as u64)
            .collect();
        // SAFETY: the caller guarantees that what the kernel accesses stays allocated, and nothing else changes it.
        let memory = unsafe { Memory::new(&ranges, launch.shared_bytes, launch.arguments) };
        run_grid(kernel, launch.grid, threads, memory).map_err(failed)
    }

    fn begin_capture(&self) -> Result<bool, DeviceError> {
        Ok(false)
    }

    fn end_capture(&self) -> Result<Box<dyn Graph>, DeviceError> {
        Err(self.failed("capturing a graph", "no capture has begun"))
    }

    fn record_event(&self, index: usize) -> Result<(), DeviceError> {
        self.events.record(index);
        Ok(())
    }

    fn elapsed_seconds(&self, earlier: usize, later: usize) -> Result<f64, DeviceError> {
        let seconds = self.events.seconds_between(earlier, later);
        seconds.ok_or_else(|| self.failed("timing events", "the event was not recorded"))
    }

    unsafe fn copy_async(&self, _: usize, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        // SAFETY: as the caller guarantees.
        unsafe { self.write(address, bytes) }
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
