//! Captured graphs.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

use crate::cuda::{CaptureLock, DeviceError, Graph};

/// A graph captured from the stream, and instantiated.
pub(super) struct CudaGraph {
    pub(super) graph: sys::CUgraphExec,
    pub(super) device: String,
    pub(super) context: Arc<CudaContext>,
    pub(super) stream: Arc<CudaStream>,
    pub(super) capture: Arc<CaptureLock>,
}

// SAFETY: a driver handle, which any thread may use with the context current; `launch` requires that one thread at a time does.
unsafe impl Send for CudaGraph {}
// SAFETY: as above.
unsafe impl Sync for CudaGraph {}

impl std::fmt::Debug for CudaGraph {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Graph({})", self.device)
    }
}

impl Graph for CudaGraph {
    unsafe fn launch(&self) -> Result<(), DeviceError> {
        let failed = |DriverError(code): DriverError| DeviceError::Failed {
            device: self.device.clone(),
            doing: "launching a graph",
            reason: format!("{code:?}"),
        };
        let _operation = self.capture.operation();
        self.context.bind_to_thread().map_err(failed)?;
        let stream = self.stream.cu_stream();
        // SAFETY: the graph lives until it is dropped; the rest as the caller guarantees.
        unsafe { result::graph::launch(self.graph, stream) }.map_err(failed)?;
        // Windows submits work in batches: a query submits what is queued, as the host is about to wait for its flags.
        // SAFETY: a stream of this context.
        match unsafe { sys::cuStreamQuery(stream) } {
            sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            other => Err(failed(DriverError(other))),
        }
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: the last use; the driver keeps a running graph until it has finished.
            let _ = unsafe { result::graph::exec_destroy(self.graph) };
        }
    }
}
