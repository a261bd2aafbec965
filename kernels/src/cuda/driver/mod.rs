//! [`CudaDevice`]: an NVIDIA GPU through the CUDA driver API.
//!
//! The driver library is opened at run time, so that neither building nor starting needs it. Every function is looked
//! up before the first call, since the bindings panic if one is missing.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

mod arena;
mod graph;
mod loader;
mod operations;
mod unavailable;

pub use unavailable::CudaUnavailable;

use std::{
    collections::HashMap,
    ffi::CString,
    sync::{Arc, Mutex},
};

use cudarc::driver::{
    CudaContext, CudaStream, DriverError, result,
    sys::{self, CUdevice_attribute, CUfunction, CUfunction_attribute_enum, CUmodule},
};

use self::{arena::Arena, loader::find_functions};
use super::{
    CaptureLock, Device, DeviceError, DeviceInfo, Operation,
    ptx::{entries, ptx_modules},
};

/// Oldest driver that compiles PTX ISA 8.4: CUDA 12.4, version 550.
const MIN_DRIVER: i32 = 12_040;
/// Compute capability that the PTX targets.
const MIN_CAPABILITY: (i32, i32) = (8, 0);

/// The operation of asynchronous copies, in errors.
const COPYING: &str = "copying to it asynchronously";

/// A CUDA device with the kernels loaded.
///
/// Kernels run on one stream in issue order, asynchronous copies on a second one; events order the two.
pub struct CudaDevice {
    info: DeviceInfo,
    /// Device memory; `None` if the driver cannot map pages, and allocates one by one.
    arena: Option<Mutex<Arena>>,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    capture: Arc<CaptureLock>,
    /// Stream of the asynchronous copies.
    copy_stream: Arc<CudaStream>,
    /// Event 0: the last kernel that copies wait for; event `i + 1`: the last copy of staging stream `i`.
    copy_events: Mutex<Vec<sys::CUevent>>,
    modules: Vec<CUmodule>,
    functions: HashMap<String, CUfunction>,
    /// Device memory that the loaded kernels take.
    kernel_bytes: usize,
    /// Timing events, by index.
    events: Mutex<Vec<sys::CUevent>>,
}

// SAFETY: modules, functions and events are driver handles, which any thread may use with the context current, as every call here
// makes it. `capture` keeps other threads out of a capture.
unsafe impl Send for CudaDevice {}
// SAFETY: as above.
unsafe impl Sync for CudaDevice {}

impl std::fmt::Debug for CudaDevice {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "CudaDevice({})", self.info.name)
    }
}

impl CudaDevice {
    /// Opens device number `index` and loads all kernels.
    ///
    /// # Errors
    ///
    /// There is no driver, it is too old or fails, or the device does not exist or cannot run the kernels.
    pub fn open(index: usize) -> Result<Self, CudaUnavailable> {
        find_functions()?;
        let broken = |DriverError(code): DriverError| CudaUnavailable::Initialisation {
            reason: format!("{code:?}"),
        };
        result::init().map_err(broken)?;
        let mut version = 0;
        // SAFETY: the call writes one integer.
        unsafe { sys::cuDriverGetVersion(&mut version) }
            .result()
            .map_err(broken)?;
        if version < MIN_DRIVER {
            let cuda = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
            return Err(CudaUnavailable::DriverTooOld {
                found: cuda(version),
                needed: cuda(MIN_DRIVER),
            });
        }
        let count = usize::try_from(CudaContext::device_count().map_err(broken)?).unwrap_or(0);
        if index >= count {
            return Err(CudaUnavailable::NoDevice { count, index });
        }
        let context = CudaContext::new(index).map_err(broken)?;
        // SAFETY: the streams are ordered by events of this module.
        unsafe { context.disable_event_tracking() };
        let name = context.name().map_err(broken)?;
        let capability = context.compute_capability().map_err(broken)?;
        if capability < MIN_CAPABILITY {
            let text = |(major, minor): (i32, i32)| format!("{major}.{minor}");
            return Err(CudaUnavailable::ComputeCapability {
                name,
                found: text(capability),
                needed: text(MIN_CAPABILITY),
            });
        }
        use CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT as WATCHDOG,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
            CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED as MAPPING,
        };
        let attribute = |which| {
            let value = context.attribute(which).map_err(broken)?;
            Ok(usize::try_from(value).unwrap_or(0))
        };
        let info = DeviceInfo {
            multiprocessors: attribute(MULTIPROCESSORS)?.max(1),
            shared_bytes: attribute(SHARED)?,
            patience: match attribute(WATCHDOG)? {
                0 => DeviceInfo::PATIENCE,
                _ => DeviceInfo::WATCHDOG_PATIENCE,
            },
            name,
        };
        let arena = match attribute(MAPPING)? {
            0 => None,
            _ => {
                let (_, total) = context.mem_get_info().map_err(broken)?;
                Some(Mutex::new(Arena::new(index, total).map_err(broken)?))
            }
        };
        let stream = context.new_stream().map_err(broken)?;
        let copy_stream = context.new_stream().map_err(broken)?;
        let mut device = Self {
            info,
            arena,
            context,
            stream,
            capture: Arc::default(),
            copy_stream,
            copy_events: Mutex::default(),
            modules: Vec::new(),
            functions: HashMap::new(),
            kernel_bytes: 0,
            events: Mutex::default(),
        };
        let free = |device: &Self| Ok(device.context.mem_get_info().map_err(broken)?.0);
        let before = free(&device)?;
        for (name, ptx) in ptx_modules() {
            let module = device.load(name, &ptx)?;
            device.modules.push(module);
            // Eagerly: lazy loading would allocate memory at the first launch, and is not allowed during a graph capture.
            for kernel in entries(&ptx) {
                let function = device.load_function(module, kernel).map_err(|why| {
                    CudaUnavailable::ModuleLoad {
                        name: device.info.name.clone(),
                        module: name.to_owned(),
                        reason: why.to_string(),
                    }
                })?;
                device.functions.insert(kernel.to_owned(), function);
            }
        }
        device.kernel_bytes = before.saturating_sub(free(&device)?);
        Ok(device)
    }

    /// Device memory in bytes that the loaded kernels take, by the driver's count of free memory.
    pub fn kernel_bytes(&self) -> usize {
        self.kernel_bytes
    }

    /// Free and total device memory in bytes.
    ///
    /// # Errors
    ///
    /// The driver fails.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        self.context
            .mem_get_info()
            .map_err(|why| self.failed("querying its memory", why))
    }

    /// Loads the kernel `name` of `module`, with the largest dynamic shared memory allowed.
    fn load_function(&self, module: CUmodule, name: &str) -> Result<CUfunction, DeviceError> {
        let failed = |reason: String| self.kernel_failed(name, reason);
        let text = CString::new(name).map_err(|why| failed(why.to_string()))?;
        // SAFETY: the modules stay loaded until the device is dropped.
        unsafe {
            let function = result::module::get_function(module, text)
                .map_err(|DriverError(code)| failed(format!("{code:?}")))?;
            sys::cuFuncLoad(function)
                .result()
                .and_then(|()| {
                    result::function::set_function_attribute(
                        function,
                        CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                        self.info.shared_bytes as i32,
                    )
                })
                .map_err(|DriverError(code)| failed(format!("{code:?}")))?;
            Ok(function)
        }
    }

    /// The kernel `name`.
    fn function(&self, name: &str) -> Result<CUfunction, DeviceError> {
        let function = self.functions.get(name).copied();
        function.ok_or_else(|| self.kernel_failed(name, "there is no such kernel".to_owned()))
    }

    fn kernel_failed(&self, name: &str, reason: String) -> DeviceError {
        DeviceError::Kernel {
            device: self.info.name.clone(),
            kernel: name.to_owned(),
            reason,
        }
    }

    /// Event `index` of `copy_events`, created on first use.
    fn copy_event(&self, index: usize) -> Result<sys::CUevent, DeviceError> {
        let _operation = self.bind(COPYING)?;
        let mut events = lock(&self.copy_events);
        while events.len() <= index {
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
            let event = result::event::create(flags);
            events.push(event.map_err(|why| self.failed(COPYING, why))?);
        }
        Ok(events[index])
    }

    fn failed(&self, doing: &'static str, DriverError(code): DriverError) -> DeviceError {
        DeviceError::Failed {
            device: self.info.name.clone(),
            doing,
            reason: format!("{code:?}"),
        }
    }

    /// Begins an operation, after the captures of other threads, with the context current on the calling thread.
    fn bind(&self, doing: &'static str) -> Result<Operation<'_>, DeviceError> {
        let operation = self.capture.operation();
        let bound = self.context.bind_to_thread();
        bound.map_err(|why| self.failed(doing, why))?;
        Ok(operation)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|broken| broken.into_inner())
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        if let Ok(_operation) = self.bind("closing") {
            let _ = self.synchronise();
            let events = [&self.events, &self.copy_events];
            for event in events
                .into_iter()
                .flat_map(|events| std::mem::take(&mut *lock(events)))
            {
                // SAFETY: created here, and not used again.
                let _ = unsafe { result::event::destroy(event) };
            }
            for module in &self.modules {
                // SAFETY: loaded here; its kernels have finished.
                let _ = unsafe { result::module::unload(*module) };
            }
        }
    }
}
