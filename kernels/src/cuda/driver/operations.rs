//! [`Device`] for a CUDA device: memory, launches, captures, events and copies.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::{
    ffi::{OsString, c_void},
    sync::Arc,
};

use cudarc::driver::{CudaStream, DriverError, result, sys};

use super::{COPYING, CudaDevice, graph::CudaGraph, lock};
use powerinfer_pool::environment;

use crate::cuda::{Device, DeviceError, DeviceInfo, Graph, Launch};

const ALLOCATING: &str = "allocating memory";
const FREEING: &str = "freeing memory";
const CAPTURING: &str = "capturing a graph";
const RUNNING: &str = "running kernels";

// SAFETY: the driver allocates whole pages, of which the arena gives each range once; captures have a `CaptureLock`.
unsafe impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn allocate(&self, bytes: usize) -> Result<u64, DeviceError> {
        let _operation = self.bind(ALLOCATING)?;
        let allocated = match &self.arena {
            Some(arena) => lock(arena).allocate(bytes),
            // SAFETY: the size is not zero, which the driver refuses.
            None => unsafe { result::malloc_sync(bytes.max(1)) },
        };
        allocated.map_err(|why| match why.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => DeviceError::OutOfMemory {
                device: self.info.name.clone(),
                bytes,
            },
            _ => self.failed(ALLOCATING, why),
        })
    }

    unsafe fn free(&self, address: u64, bytes: usize) {
        let Ok(_operation) = self.bind(FREEING) else {
            return; // the device is lost, and its memory with it
        };
        // If this fails, the device is lost and nothing runs any more.
        let _ = self.synchronise();
        match &self.arena {
            Some(arena) => lock(arena).free(address, bytes),
            // SAFETY: as the caller guarantees; all operations have finished.
            None => drop(unsafe { result::free_sync(address) }),
        }
    }

    fn allocate_host(&self, bytes: usize) -> Result<(*mut u8, u64), DeviceError> {
        const DOING: &str = "allocating pinned host memory";
        let _operation = self.bind(DOING)?;
        // Not write-combined: the host reads it.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the size is not zero.
        let host =
            unsafe { result::malloc_host(bytes.max(1), flags) }.map_err(|why| match why.0 {
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => DeviceError::OutOfMemory {
                    device: "the host (pinned)".to_owned(),
                    bytes,
                },
                _ => self.failed(DOING, why),
            })?;
        let mut address = 0;
        // SAFETY: the memory was just allocated as mapped, and is freed on failure.
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
        if self.bind(FREEING).is_ok() {
            // SAFETY: as the caller guarantees.
            let _ = unsafe { result::free_host(host.cast()) };
        }
    }

    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        const DOING: &str = "copying to it";
        if bytes.is_empty() {
            return Ok(());
        }
        let _operation = self.bind(DOING)?;
        // SAFETY: as the caller guarantees; the call copies from pageable memory before it returns.
        unsafe { result::memcpy_htod_async(address, bytes, self.stream.cu_stream()) }
            .map_err(|why| self.failed(DOING, why))
    }

    unsafe fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        const DOING: &str = "copying from it";
        if bytes.is_empty() {
            return self.synchronise();
        }
        let _operation = self.bind(DOING)?;
        // SAFETY: as the caller guarantees; `bytes` stay borrowed until the copy is done.
        unsafe { result::memcpy_dtoh_async(bytes, address, self.stream.cu_stream()) }
            .map_err(|why| self.failed(DOING, why))?;
        self.synchronise()
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), DeviceError> {
        const DOING: &str = "copying within it";
        if bytes == 0 {
            return Ok(());
        }
        let _operation = self.bind(DOING)?;
        // SAFETY: as the caller guarantees.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream.cu_stream()) }
            .map_err(|why| self.failed(DOING, why))
    }

    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<(), DeviceError> {
        const DOING: &str = "clearing memory";
        if bytes == 0 {
            return Ok(());
        }
        let _operation = self.bind(DOING)?;
        // SAFETY: as the caller guarantees.
        unsafe { result::memset_d8_async(address, 0, bytes, self.stream.cu_stream()) }
            .map_err(|why| self.failed(DOING, why))
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let _operation = self.bind("launching a kernel")?;
        let function = self.function(launch.kernel)?;
        let [x, y, z] = launch.grid;
        // The driver copies the argument before the call returns.
        let mut arguments = [launch.arguments.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: as the caller guarantees.
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
        if launches_block(environment::value("CUDA_LAUNCH_BLOCKING")) {
            return Ok(false);
        }
        self.capture.begin();
        let begun = self.bind(CAPTURING).map(|_operation| {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            // SAFETY: the stream lives as long as the device.
            unsafe { result::stream::begin_capture(self.stream.cu_stream(), mode) }.is_ok()
        });
        if !matches!(begun, Ok(true)) {
            self.capture.end();
        }
        begun
    }

    fn end_capture(&self) -> Result<Box<dyn Graph>, DeviceError> {
        let operation = self.bind(CAPTURING)?;
        let failed = |why| self.failed(CAPTURING, why);
        // SAFETY: as above; the graph was just captured, and is destroyed after it is instantiated.
        unsafe {
            let ended = result::stream::end_capture(self.stream.cu_stream());
            drop(operation);
            self.capture.end();
            let graph = ended.map_err(failed)?;
            let flags = sys::CUgraphInstantiate_flags(0);
            let graph_exec = result::graph::instantiate(graph, flags).map_err(failed);
            let _ = result::graph::destroy(graph);
            Ok(Box::new(CudaGraph {
                graph: graph_exec?,
                device: self.info.name.clone(),
                context: Arc::clone(&self.context),
                stream: Arc::clone(&self.stream),
                capture: Arc::clone(&self.capture),
            }))
        }
    }

    fn record_event(&self, index: usize) -> Result<(), DeviceError> {
        const DOING: &str = "recording an event";
        let _operation = self.bind(DOING)?;
        let failed = |why| self.failed(DOING, why);
        let mut events = lock(&self.events);
        while events.len() <= index {
            let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
            events.push(result::event::create(flags).map_err(failed)?);
        }
        // SAFETY: event and stream live as long as the device.
        unsafe { result::event::record(events[index], self.stream.cu_stream()) }.map_err(failed)
    }

    fn elapsed_seconds(&self, earlier: usize, later: usize) -> Result<f64, DeviceError> {
        const DOING: &str = "timing events";
        let _operation = self.bind(DOING)?;
        let events = lock(&self.events);
        let (Some(start), Some(end)) = (events.get(earlier), events.get(later)) else {
            return Err(self.failed(DOING, DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)));
        };
        // SAFETY: both are events of this stream.
        let milliseconds = unsafe { result::event::elapsed(*start, *end) };
        let milliseconds = milliseconds.map_err(|why| self.failed(DOING, why))?;
        Ok(f64::from(milliseconds) * 1e-3)
    }

    unsafe fn copy_async(
        &self,
        staging: usize,
        address: u64,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let _operation = self.bind(COPYING)?;
        let copied = self.copy_event(staging + 1)?;
        let failed = |why| self.failed(COPYING, why);
        let stream = self.copy_stream.cu_stream();
        // SAFETY: as the caller guarantees; event and stream live as long as the device.
        unsafe {
            result::memcpy_htod_async(address, bytes, stream).map_err(failed)?;
            result::event::record(copied, stream).map_err(failed)
        }
    }

    fn make_copies_wait(&self, _: usize) -> Result<(), DeviceError> {
        let _operation = self.bind(COPYING)?;
        let launched = self.copy_event(0)?;
        let failed = |why| self.failed(COPYING, why);
        // SAFETY: as above.
        unsafe {
            result::event::record(launched, self.stream.cu_stream()).map_err(failed)?;
            wait_event(&self.copy_stream, launched).map_err(failed)
        }
    }

    fn make_kernels_wait(&self, staging: usize) -> Result<(), DeviceError> {
        let _operation = self.bind(COPYING)?;
        let copied = self.copy_event(staging + 1)?;
        // SAFETY: as above; an event that was never recorded counts as complete.
        unsafe { wait_event(&self.stream, copied) }.map_err(|why| self.failed(COPYING, why))
    }

    fn synchronise_copies(&self, staging: usize) -> Result<(), DeviceError> {
        let _operation = self.bind(COPYING)?;
        let copied = self.copy_event(staging + 1)?;
        // SAFETY: as above.
        unsafe { sys::cuEventSynchronize(copied) }
            .result()
            .map_err(|why| self.failed(COPYING, why))
    }

    fn check(&self) -> Result<(), DeviceError> {
        let _operation = self.bind(RUNNING)?;
        // SAFETY: a stream of this context.
        let state = unsafe { sys::cuStreamQuery(self.stream.cu_stream()) };
        match state {
            sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            other => Err(self.failed(RUNNING, DriverError(other))),
        }
    }

    fn synchronise(&self) -> Result<(), DeviceError> {
        let _operation = self.bind(RUNNING)?;
        [&self.stream, &self.copy_stream]
            .into_iter()
            .try_for_each(|stream| stream.synchronize())
            .map_err(|why| self.failed(RUNNING, why))
    }
}

/// Whether launches return only after the kernels have finished, by the value of `CUDA_LAUNCH_BLOCKING`. A graph whose
/// kernels wait for the host would then never let the host go on.
fn launches_block(value: Option<OsString>) -> bool {
    value.is_some_and(|value| !value.is_empty() && value != "0")
}

/// Makes later operations of `stream` wait for `event`.
///
/// # Safety
/// Stream and event are alive.
unsafe fn wait_event(stream: &CudaStream, event: sys::CUevent) -> Result<(), DriverError> {
    let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: as the caller guarantees.
    unsafe { result::stream::wait_event(stream.cu_stream(), event, flags) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocking_launches_are_recognised() {
        let blocks = |value: &str| launches_block(Some(value.into()));
        assert!(blocks("1") && !blocks("0") && !blocks("") && !launches_block(None));
    }
}
