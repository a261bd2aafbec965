//! A card, through its driver.
//!
//! The driver's library is opened when a card is asked for, so that neither building nor starting needs one;
//! every function that is called was looked for before, since the bindings panic where one is missing.

use std::{
    collections::HashMap,
    ffi::{CStr, CString, c_void},
    fs,
    sync::{Arc, Mutex},
};

use cudarc::driver::{
    CudaContext, CudaStream, DriverError, result,
    sys::{
        self, CUdevice_attribute, CUfunction, CUfunction_attribute_enum, CUjit_option, CUmodule,
    },
};

use super::{Device, DeviceError, DeviceInfo, Graph, Launch};
use crate::environment;

/// The PTX of every file of kernels.
const MODULES: [(&str, &str); 5] = [
    ("attention", include_str!("../../ptx/attention.ptx")),
    ("feed_forward", include_str!("../../ptx/feed_forward.ptx")),
    ("observe", include_str!("../../ptx/observe.ptx")),
    ("projection", include_str!("../../ptx/projection.ptx")),
    ("prompt", include_str!("../../ptx/prompt.ptx")),
];

/// The first driver that compiles this PTX (ISA 8.4): CUDA 12.4, version 550.
const LEAST_DRIVER: i32 = 12_040;
/// The first compute capability it is for.
const LEAST_CAPABILITY: (i32, i32) = (8, 0);

/// Functions of the driver that are called here.
const FUNCTIONS: [&str; 47] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorString",
    "cuGetErrorName",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemFreeHost",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncLoad",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
];

/// Why there is no card to use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaUnavailable {
    /// No library of the driver.
    #[error("no NVIDIA driver is installed on this machine")]
    NoDriver,
    /// A library that is none of a whole driver.
    #[error("the NVIDIA driver lacks `{function}`; install version 550 or newer")]
    Incomplete {
        /// The first function that is missing.
        function: &'static str,
    },
    /// The driver does not start.
    #[error("the NVIDIA driver does not start: {reason}")]
    Broken {
        /// What it says.
        reason: String,
    },
    /// The driver cannot compile the kernels.
    #[error(
        "the NVIDIA driver knows CUDA {found}, the kernels need {needed}; install version 550 or newer"
    )]
    TooOld {
        /// What it knows.
        found: String,
        /// What is needed.
        needed: String,
    },
    /// No card, or none of that number.
    #[error("the NVIDIA driver sees {count} cards, number {index} was asked for")]
    NoDevice {
        /// How many it sees.
        count: usize,
        /// Which was asked for, from 0 on.
        index: usize,
    },
    /// A card that kernels are not made for.
    #[error("{name} has compute capability {found}, the kernels need {needed}")]
    Incapable {
        /// The card.
        name: String,
        /// What it has.
        found: String,
        /// What is needed.
        needed: String,
    },
    /// The kernels do not load.
    #[error("{name} does not take the kernels of `{module}`: {reason}")]
    Kernels {
        /// The card.
        name: String,
        /// Which of them.
        module: String,
        /// What its driver says.
        reason: String,
    },
}

/// A card with the kernels loaded.
pub struct CudaDevice {
    info: DeviceInfo,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// In which copies run beside.
    copies: Arc<CudaStream>,
    /// The last copy of each lane, and before them the last kernel that copies wait for.
    arrivals: Mutex<Vec<sys::CUevent>>,
    modules: Vec<CUmodule>,
    functions: Mutex<HashMap<String, CUfunction>>,
    /// Moments that were marked, by their numbers.
    moments: Mutex<Vec<sys::CUevent>>,
}

// SAFETY: modules, functions and events are handles of the driver, which any thread may use once the context is
// made current there, as every call here does.
#[allow(unsafe_code)]
unsafe impl Send for CudaDevice {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for CudaDevice {}

impl std::fmt::Debug for CudaDevice {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "CudaDevice({})", self.info.name)
    }
}

impl CudaDevice {
    /// Opens card number `index` and loads the kernels.
    #[allow(unsafe_code)]
    pub fn open(index: usize) -> Result<Self, CudaUnavailable> {
        find_functions()?;
        let broken = |DriverError(code): DriverError| CudaUnavailable::Broken {
            reason: format!("{code:?}"),
        };
        result::init().map_err(broken)?;
        let mut version = 0;
        // SAFETY: it writes one number.
        unsafe { sys::cuDriverGetVersion(&mut version) }
            .result()
            .map_err(broken)?;
        if version < LEAST_DRIVER {
            let cuda = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
            return Err(CudaUnavailable::TooOld {
                found: cuda(version),
                needed: cuda(LEAST_DRIVER),
            });
        }
        let count = usize::try_from(CudaContext::device_count().map_err(broken)?).unwrap_or(0);
        if index >= count {
            return Err(CudaUnavailable::NoDevice { count, index });
        }
        let context = CudaContext::new(index).map_err(broken)?;
        // SAFETY: all work goes to one stream, whose order is what keeps it right.
        unsafe { context.disable_event_tracking() };
        let name = context.name().map_err(broken)?;
        let capability = context.compute_capability().map_err(broken)?;
        if capability < LEAST_CAPABILITY {
            let text = |(major, minor): (i32, i32)| format!("{major}.{minor}");
            return Err(CudaUnavailable::Incapable {
                name,
                found: text(capability),
                needed: text(LEAST_CAPABILITY),
            });
        }
        use CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT as STOPS_KERNELS,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
        };
        let attribute = |which| {
            let value = context.attribute(which).map_err(broken)?;
            Ok(usize::try_from(value).unwrap_or(0))
        };
        let info = DeviceInfo {
            multiprocessors: attribute(MULTIPROCESSORS)?.max(1),
            shared_bytes: attribute(SHARED)?,
            has_watchdog: attribute(STOPS_KERNELS)? != 0,
            name,
        };
        let stream = context.new_stream().map_err(broken)?;
        let copies = context.new_stream().map_err(broken)?;
        let mut card = Self {
            info,
            context,
            stream,
            copies,
            arrivals: Mutex::default(),
            modules: Vec::new(),
            functions: Mutex::default(),
            moments: Mutex::default(),
        };
        for (name, ptx) in MODULES {
            let module = card.load(name, ptx)?;
            card.modules.push(module);
            // All of them now: a kernel that is loaded when it is first launched takes memory that is not there any more, and
            // cannot be while launches are recorded.
            for kernel in entries(ptx) {
                card.function(kernel)
                    .map_err(|why| CudaUnavailable::Kernels {
                        name: card.info.name.clone(),
                        module: name.to_owned(),
                        reason: why.to_string(),
                    })?;
            }
        }
        Ok(card)
    }

    /// Bytes of the card's memory that nobody uses, and all.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        self.context
            .mem_get_info()
            .map_err(|why| self.failed("asking for its memory", why))
    }

    /// Loads a module, or what lies in the folder of experiments under its name.
    #[allow(unsafe_code)]
    fn load(&self, name: &str, ptx: &str) -> Result<CUmodule, CudaUnavailable> {
        let refused = |reason: String| CudaUnavailable::Kernels {
            name: self.info.name.clone(),
            module: name.to_owned(),
            reason,
        };
        let mut image = ptx.as_bytes().to_vec();
        if let Some(folder) = environment::ptx_folder() {
            let files = ["cubin", "ptx"].map(|kind| folder.join(format!("{name}.{kind}")));
            if let Some(file) = files.iter().find(|file| file.exists()) {
                image =
                    fs::read(file).map_err(|why| refused(format!("{}: {why}", file.display())))?;
            }
        }
        image.push(0); // PTX ends where a string does
        let mut log = vec![0u8; 8 << 10];
        let mut options = [
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        // The size is passed in the place of a pointer.
        let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
        let mut module = std::ptr::null_mut();
        // SAFETY: the image ends with 0, and the log is as long as is said.
        let loaded = unsafe {
            sys::cuModuleLoadDataEx(
                &mut module,
                image.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        loaded.result().map_err(|DriverError(code)| {
            let said = CStr::from_bytes_until_nul(&log).unwrap_or_default();
            refused(format!("{code:?} {}", said.to_string_lossy().trim()))
        })?;
        Ok(module)
    }

    /// A kernel by its name, with all the shared memory it may ask for.
    #[allow(unsafe_code)]
    fn function(&self, name: &str) -> Result<CUfunction, DeviceError> {
        let mut functions = lock(&self.functions);
        if let Some(function) = functions.get(name) {
            return Ok(*function);
        }
        let missing = |reason: String| DeviceError::Kernel {
            device: self.info.name.clone(),
            kernel: name.to_owned(),
            reason,
        };
        let text = CString::new(name).map_err(|why| missing(why.to_string()))?;
        // SAFETY: the modules are loaded, and stay until the card is closed.
        let found = self
            .modules
            .iter()
            .find_map(|module| unsafe { result::module::get_function(*module, text.clone()) }.ok());
        let function = found.ok_or_else(|| missing("there is no such kernel".to_owned()))?;
        // SAFETY: the function was just found.
        unsafe { sys::cuFuncLoad(function) }
            .result()
            .map_err(|DriverError(code)| missing(format!("{code:?}")))?;
        // SAFETY: as above.
        unsafe {
            result::function::set_function_attribute(
                function,
                CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                self.info.shared_bytes as i32,
            )
        }
        .map_err(|DriverError(code)| missing(format!("{code:?}")))?;
        functions.insert(name.to_owned(), function);
        Ok(function)
    }

    /// Event number `index` of those that copies and kernels wait for each other by.
    fn arrival(&self, index: usize) -> Result<sys::CUevent, DeviceError> {
        self.bind(COPYING_BESIDE)?;
        let mut arrivals = lock(&self.arrivals);
        while arrivals.len() <= index {
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
            let event = result::event::create(flags);
            arrivals.push(event.map_err(|why| self.failed(COPYING_BESIDE, why))?);
        }
        Ok(arrivals[index])
    }

    fn failed(&self, doing: &'static str, DriverError(code): DriverError) -> DeviceError {
        DeviceError::Failed {
            device: self.info.name.clone(),
            doing,
            reason: format!("{code:?}"),
        }
    }

    /// Makes the context the calling thread's.
    fn bind(&self, doing: &'static str) -> Result<(), DeviceError> {
        self.context
            .bind_to_thread()
            .map_err(|why| self.failed(doing, why))
    }
}

/// Looks for the driver and all functions that are called.
#[allow(unsafe_code)]
fn find_functions() -> Result<(), CudaUnavailable> {
    // SAFETY: this opens the driver's library, whose initialisers run, as in any program that uses CUDA.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaUnavailable::NoDriver);
    }
    // SAFETY: the library is there; functions are looked up, not called.
    let library = unsafe { sys::culib() };
    for function in FUNCTIONS {
        // SAFETY: what is found is not called.
        let found = unsafe { library.get::<*const c_void>(function.as_bytes()) };
        if found.is_err() {
            return Err(CudaUnavailable::Incomplete { function });
        }
    }
    Ok(())
}

const COPYING_BESIDE: &str = "copying beside kernels";

#[allow(unsafe_code)]
impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn allocate(&self, bytes: usize) -> Result<u64, DeviceError> {
        self.bind("taking memory")?;
        // SAFETY: memory of no bytes is none that the driver gives.
        unsafe { result::malloc_sync(bytes.max(1)) }.map_err(|why| match why.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => DeviceError::OutOfMemory {
                device: self.info.name.clone(),
                bytes,
            },
            _ => self.failed("taking memory", why),
        })
    }

    unsafe fn free(&self, address: u64, _: usize) {
        if self.bind("giving memory back").is_ok() {
            // SAFETY: the caller says so; the driver waits for kernels that run. A device that is lost has
            // lost its memory too.
            let _ = unsafe { result::free_sync(address) };
        }
    }

    fn allocate_host(&self, bytes: usize) -> Result<(*mut u8, u64), DeviceError> {
        const DOING: &str = "taking memory of the host";
        self.bind(DOING)?;
        // Cached as any other, for the host reads it.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: as above.
        let host =
            unsafe { result::malloc_host(bytes.max(1), flags) }.map_err(|why| match why.0 {
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => DeviceError::OutOfMemory {
                    device: format!("page-locked memory beside {}", self.info.name),
                    bytes,
                },
                _ => self.failed(DOING, why),
            })?;
        let mut address = 0;
        // SAFETY: the memory was just taken to be seen by the device, and is given back where it is not.
        unsafe {
            let seen = sys::cuMemHostGetDevicePointer_v2(&mut address, host, 0).result();
            seen.map_err(|why| {
                let _ = result::free_host(host);
                self.failed(DOING, why)
            })?;
        }
        Ok((host.cast(), address))
    }

    unsafe fn free_host(&self, host: *mut u8, _: usize) {
        if self.bind("giving memory back").is_ok() {
            // SAFETY: the caller says so.
            let _ = unsafe { result::free_host(host.cast()) };
        }
    }

    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        const DOING: &str = "copying to it";
        if bytes.is_empty() {
            return Ok(());
        }
        self.bind(DOING)?;
        // SAFETY: the caller says so; bytes of ordinary memory are taken over before the call returns.
        unsafe { result::memcpy_htod_async(address, bytes, self.stream.cu_stream()) }
            .map_err(|why| self.failed(DOING, why))
    }

    unsafe fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        const DOING: &str = "copying from it";
        if bytes.is_empty() {
            return self.synchronise();
        }
        self.bind(DOING)?;
        // SAFETY: the caller says so, and nobody looks at the bytes before the copy is done.
        unsafe { result::memcpy_dtoh_async(bytes, address, self.stream.cu_stream()) }
            .map_err(|why| self.failed(DOING, why))?;
        self.synchronise()
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), DeviceError> {
        const DOING: &str = "copying within it";
        if bytes == 0 {
            return Ok(());
        }
        self.bind(DOING)?;
        // SAFETY: the caller says so.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream.cu_stream()) }
            .map_err(|why| self.failed(DOING, why))
    }

    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<(), DeviceError> {
        const DOING: &str = "clearing memory";
        if bytes == 0 {
            return Ok(());
        }
        self.bind(DOING)?;
        // SAFETY: the caller says so.
        unsafe { result::memset_d8_async(address, 0, bytes, self.stream.cu_stream()) }
            .map_err(|why| self.failed(DOING, why))
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.bind("launching a kernel")?;
        let function = self.function(launch.kernel)?;
        let [x, y, z] = launch.grid;
        // The driver copies as many bytes as the kernel takes before the call returns.
        let mut arguments = [launch.arguments.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: the caller says so.
        unsafe {
            result::launch_kernel(
                function,
                (x, y, z),
                (launch.threads, 1, 1),
                launch.shared_bytes as u32,
                self.stream.cu_stream(),
                &mut arguments,
            )
        }
        .map_err(|DriverError(code)| DeviceError::Kernel {
            device: self.info.name.clone(),
            kernel: launch.kernel.to_owned(),
            reason: format!("{code:?}"),
        })
    }

    fn begin_capture(&self) -> Result<bool, DeviceError> {
        self.bind("recording")?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is there as long as the card is.
        let begun = unsafe { result::stream::begin_capture(self.stream.cu_stream(), mode) };
        Ok(begun.is_ok())
    }

    fn end_capture(&self) -> Result<Box<dyn Graph>, DeviceError> {
        const DOING: &str = "recording";
        self.bind(DOING)?;
        let failed = |why| self.failed(DOING, why);
        // SAFETY: as above; the graph is what was just recorded, and is given back once the other is made of it.
        unsafe {
            let graph = result::stream::end_capture(self.stream.cu_stream()).map_err(failed)?;
            let flags = sys::CUgraphInstantiate_flags(0);
            let graph_exec = result::graph::instantiate(graph, flags).map_err(failed);
            let _ = result::graph::destroy(graph);
            Ok(Box::new(CudaGraph {
                graph: graph_exec?,
                device: self.info.name.clone(),
                context: Arc::clone(&self.context),
                stream: Arc::clone(&self.stream),
            }))
        }
    }

    fn record_event(&self, index: usize) -> Result<(), DeviceError> {
        const DOING: &str = "marking a moment";
        self.bind(DOING)?;
        let failed = |why| self.failed(DOING, why);
        let mut moments = lock(&self.moments);
        while moments.len() <= index {
            let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
            moments.push(result::event::create(flags).map_err(failed)?);
        }
        // SAFETY: the event and the stream are there as long as the card is.
        unsafe { result::event::record(moments[index], self.stream.cu_stream()) }.map_err(failed)
    }

    fn elapsed_seconds(&self, earlier: usize, later: usize) -> Result<f64, DeviceError> {
        const DOING: &str = "asking for the time";
        self.bind(DOING)?;
        let moments = lock(&self.moments);
        let (Some(start), Some(end)) = (moments.get(earlier), moments.get(later)) else {
            return Err(self.failed(DOING, DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)));
        };
        // SAFETY: both are events of this stream.
        let milliseconds = unsafe { result::event::elapsed(*start, *end) };
        let milliseconds = milliseconds.map_err(|why| self.failed(DOING, why))?;
        Ok(f64::from(milliseconds) * 1e-3)
    }

    unsafe fn copy_async(
        &self,
        lane: usize,
        address: u64,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let arrival = self.arrival(lane + 1)?;
        let failed = |why| self.failed(COPYING_BESIDE, why);
        let stream = self.copies.cu_stream();
        // SAFETY: the caller says so; event and stream are there as long as the card is.
        unsafe {
            result::memcpy_htod_async(address, bytes, stream).map_err(failed)?;
            result::event::record(arrival, stream).map_err(failed)
        }
    }

    fn make_copies_wait(&self, _: usize) -> Result<(), DeviceError> {
        let launched = self.arrival(0)?;
        let failed = |why| self.failed(COPYING_BESIDE, why);
        // SAFETY: as above.
        unsafe {
            result::event::record(launched, self.stream.cu_stream()).map_err(failed)?;
            wait_event(&self.copies, launched).map_err(failed)
        }
    }

    fn make_kernels_wait(&self, lane: usize) -> Result<(), DeviceError> {
        let arrival = self.arrival(lane + 1)?;
        // SAFETY: as above; an event that nothing was recorded in is over.
        unsafe { wait_event(&self.stream, arrival) }.map_err(|why| self.failed(COPYING_BESIDE, why))
    }

    fn synchronise_copies(&self, lane: usize) -> Result<(), DeviceError> {
        let arrival = self.arrival(lane + 1)?;
        // SAFETY: as above.
        unsafe { sys::cuEventSynchronize(arrival) }
            .result()
            .map_err(|why| self.failed(COPYING_BESIDE, why))
    }

    fn check(&self) -> Result<(), DeviceError> {
        const DOING: &str = "running kernels";
        self.bind(DOING)?;
        // SAFETY: a stream of this context.
        let state = unsafe { sys::cuStreamQuery(self.stream.cu_stream()) };
        match state {
            sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            other => Err(self.failed(DOING, DriverError(other))),
        }
    }

    fn synchronise(&self) -> Result<(), DeviceError> {
        [&self.stream, &self.copies]
            .into_iter()
            .try_for_each(|stream| stream.synchronize())
            .map_err(|why| self.failed("running kernels", why))
    }
}

/// What is asked of `stream` from here on waits for `event`.
///
/// # Safety
/// Both are there.
#[allow(unsafe_code)]
unsafe fn wait_event(stream: &CudaStream, event: sys::CUevent) -> Result<(), DriverError> {
    let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: the caller says so.
    unsafe { result::stream::wait_event(stream.cu_stream(), event, flags) }
}

/// Names of the kernels of a file of PTX.
fn entries(ptx: &str) -> impl Iterator<Item = &str> {
    ptx.lines()
        .filter_map(|line| line.strip_prefix(".visible .entry "))
        .map(|rest| rest.trim_end_matches('(').trim())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|broken| broken.into_inner())
}

/// A graph of launches, made from a stream that recorded them.
struct CudaGraph {
    graph: sys::CUgraphExec,
    device: String,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
}

// SAFETY: a handle of the driver, which any thread may use once the context is current there; it runs in one
// stream, whose owner launches it from one thread at a time.
#[allow(unsafe_code)]
unsafe impl Send for CudaGraph {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for CudaGraph {}

impl std::fmt::Debug for CudaGraph {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Graph({})", self.device)
    }
}

#[allow(unsafe_code)]
impl Graph for CudaGraph {
    unsafe fn launch(&self) -> Result<(), DeviceError> {
        let failed = |DriverError(code): DriverError| DeviceError::Failed {
            device: self.device.clone(),
            doing: "running a graph",
            reason: format!("{code:?}"),
        };
        self.context.bind_to_thread().map_err(failed)?;
        // SAFETY: the graph is there until it is dropped; the rest the caller says.
        unsafe { result::graph::launch(self.graph, self.stream.cu_stream()) }.map_err(failed)
    }
}

impl Drop for CudaGraph {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: nobody has it any more; the driver keeps what still runs until it has run.
            let _ = unsafe { result::graph::exec_destroy(self.graph) };
        }
    }
}

impl Drop for CudaDevice {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if self.bind("closing").is_ok() {
            let events = [&self.moments, &self.arrivals];
            for moment in events
                .into_iter()
                .flat_map(|events| std::mem::take(&mut *lock(events)))
            {
                // SAFETY: it was created, and nobody has it any more.
                let _ = unsafe { result::event::destroy(moment) };
            }
            for module in &self.modules {
                // SAFETY: it was loaded, and nothing of it runs once the stream is done.
                let _ = unsafe { result::module::unload(*module) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_of_the_ptx_is_found_by_its_name() {
        for (name, ptx) in MODULES {
            let found: Vec<&str> = entries(ptx).collect();
            assert_eq!(found.len(), ptx.matches(".entry").count(), "{name}");
            assert!(
                found.iter().all(|kernel| kernel
                    .chars()
                    .all(|letter| letter.is_alphanumeric() || letter == '_')),
                "{name}: {found:?}"
            );
        }
    }
}
