//! Captured graphs, which run on a thread of their own, concurrently with the host as on a GPU.
#![expect(unsafe_code, reason = "runs kernels compiled as C++")]

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread::JoinHandle,
};

use powerinfer_kernels::cuda::{Device, DeviceError, Graph, Launch};

use crate::{Emulator, lock};

/// A captured operation.
#[derive(Debug)]
#[cfg_attr(not(emulated), expect(dead_code, reason = "no graph is captured"))]
pub(crate) enum Node {
    Launch {
        kernel: String,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: usize,
        arguments: Vec<u8>,
    },
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
    Clear {
        address: u64,
        bytes: usize,
    },
}

#[cfg_attr(not(emulated), expect(dead_code, reason = "no graph is captured"))]
impl Node {
    /// Executes the operation on `device`.
    ///
    /// # Safety
    /// All memory that it accesses is still allocated.
    unsafe fn run(&self, device: &Emulator) -> Result<(), DeviceError> {
        // SAFETY: as the caller guarantees.
        unsafe {
            match self {
                Node::Launch {
                    kernel,
                    grid,
                    threads,
                    shared_bytes,
                    arguments,
                } => device.launch(&Launch {
                    kernel,
                    grid: *grid,
                    threads: *threads,
                    shared_bytes: *shared_bytes,
                    arguments,
                }),
                Node::Copy { to, from, bytes } => device.copy(*to, *from, *bytes),
                Node::Clear { address, bytes } => device.clear(*address, *bytes),
            }
        }
    }
}

/// A thread that runs a graph.
type GraphThread = JoinHandle<Result<(), DeviceError>>;

/// The graph that runs on a device, if any; shared by the device and its graphs.
#[derive(Debug, Clone, Default)]
pub(crate) struct RunningGraph {
    thread: Arc<Mutex<Option<GraphThread>>>,
    launches: Arc<AtomicUsize>,
    captures: Arc<AtomicUsize>,
}

impl RunningGraph {
    /// Number of launches so far.
    pub(crate) fn launches(&self) -> usize {
        self.launches.load(Ordering::Relaxed)
    }

    /// Number of graphs captured so far.
    pub(crate) fn captures(&self) -> usize {
        self.captures.load(Ordering::Relaxed)
    }

    /// Counts a captured graph.
    #[cfg_attr(not(emulated), expect(dead_code, reason = "no graph is captured"))]
    pub(crate) fn count_capture(&self) {
        self.captures.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether no graph runs.
    #[cfg_attr(not(emulated), expect(dead_code, reason = "no graph is launched"))]
    pub(crate) fn is_finished(&self) -> bool {
        lock(&self.thread)
            .as_ref()
            .is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the running graph and returns its result.
    pub(crate) fn wait(&self) -> Result<(), DeviceError> {
        let thread = lock(&self.thread).take();
        match thread.map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(()),
        }
    }
}

/// An instantiated graph, with a device of its own that shares the process's memory.
#[derive(Debug)]
#[cfg_attr(not(emulated), expect(dead_code, reason = "no graph is captured"))]
pub(crate) struct EmulatedGraph {
    pub(crate) shared: Arc<(Emulator, Vec<Node>)>,
    pub(crate) running: RunningGraph,
}

impl Graph for EmulatedGraph {
    unsafe fn launch(&self) -> Result<(), DeviceError> {
        self.running.wait()?;
        let shared = Arc::clone(&self.shared);
        let run = move || {
            let (device, nodes) = &*shared;
            // SAFETY: as the caller guarantees; memory is freed only after the graph has finished.
            nodes
                .iter()
                .try_for_each(|node| unsafe { node.run(device) })
        };
        self.running.launches.fetch_add(1, Ordering::Relaxed);
        *lock(&self.running.thread) = Some(std::thread::spawn(run));
        Ok(())
    }

    fn operations(&self) -> Vec<String> {
        let nodes = self.shared.1.iter();
        nodes.map(|node| format!("{node:?}")).collect()
    }
}
