//! Loading the driver library and the compiled kernels.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::{
    ffi::{CStr, c_void},
    fs,
};

use cudarc::driver::{
    DriverError,
    sys::{self, CUjit_option, CUmodule},
};
use powerinfer_pool::environment;

use super::{CudaDevice, CudaUnavailable};

/// Driver functions that are called, by this module and by cudarc.
const FUNCTIONS: [&str; 55] = [
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
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
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

/// Looks up the driver library and all its functions.
pub(super) fn find_functions() -> Result<(), CudaUnavailable> {
    // SAFETY: opens the driver library, which runs its initialisers, as in any CUDA program.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaUnavailable::NoDriver);
    }
    // SAFETY: the library is present; functions are looked up, not called.
    let library = unsafe { sys::culib() };
    for function in FUNCTIONS {
        // SAFETY: the symbol is not called.
        let found = unsafe { library.get::<*const c_void>(function.as_bytes()) };
        if found.is_err() {
            return Err(CudaUnavailable::MissingFunction { function });
        }
    }
    Ok(())
}

impl CudaDevice {
    /// Loads a module: the embedded PTX, or the file that replaces it.
    pub(super) fn load(&self, name: &str, ptx: &str) -> Result<CUmodule, CudaUnavailable> {
        let refused = |reason: String| CudaUnavailable::ModuleLoad {
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
        image.push(0); // PTX is a C string
        let mut log = vec![0u8; 8 << 10];
        let mut options = [
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        // The size is passed as the value of a pointer.
        let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is zero-terminated, and the log has the given size.
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
            let log = CStr::from_bytes_until_nul(&log).unwrap_or_default();
            refused(format!("{code:?} {}", log.to_string_lossy().trim()))
        })?;
        Ok(module)
    }
}
