//! A GPU emulator for tests: the kernels of `kernels/cuda`, compiled as C++ with one fiber per thread, behind the same
//! [`Device`] trait as a CUDA device.
//!
//! It finds errors rather than measures speed: out-of-bounds accesses, uninitialised reads, divergent barriers, wrong warp
//! masks, and, since the [order](Order) of threads and blocks is a parameter, races. Memory visibility between concurrent
//! blocks and the arithmetic of real hardware need a GPU.

#[cfg(emulated)]
mod device;
mod graph;
mod staging;
#[cfg(not(emulated))]
mod unavailable;

use std::{
    env,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use powerinfer_kernels::cuda::{CudaDevice, Device, DeviceError, DeviceInfo};

use self::{
    graph::{Node, RunningGraph},
    staging::AsyncCopies,
};

/// Order in which threads and blocks run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Ascending.
    Forward,
    /// Descending.
    Reverse,
    /// A permutation with this seed.
    Shuffled(u16),
}

impl Order {
    /// Three very different orders.
    pub const SAMPLES: [Order; 3] = [Order::Forward, Order::Reverse, Order::Shuffled(1)];
}

/// Behaviour of graph capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GraphCapture {
    /// Captures succeed.
    Works,
    /// `begin_capture` returns `false`.
    Unsupported,
    /// `begin_capture` succeeds, `end_capture` fails.
    Fails,
}

/// Set to `gpu` to run tests on a GPU instead of the emulator.
const DEVICE_VARIABLE: &str = "POWERINFER_TEST_DEVICE";

/// The device for tests: the emulator, or a GPU if `POWERINFER_TEST_DEVICE` is `gpu`. `None` if the emulator was not
/// built.
///
/// # Panics
///
/// A GPU is asked for and cannot be opened.
pub fn test_device(order: Order) -> Option<Arc<dyn Device>> {
    static GPU: OnceLock<Arc<CudaDevice>> = OnceLock::new();
    if env::var_os(DEVICE_VARIABLE).is_some_and(|device| device == "gpu") {
        let open = || Arc::new(CudaDevice::open(0).expect("a GPU to test"));
        return Some(Arc::clone(GPU.get_or_init(open)) as _);
    }
    let emulator = Emulator::new(2, order);
    if emulator.is_none() {
        #[allow(clippy::print_stdout)]
        {
            println!("skipped: the emulator was not built");
        }
    }
    emulator.map(|emulator| Arc::new(emulator) as _)
}

/// The emulated device.
#[derive(Debug)]
#[cfg_attr(
    not(emulated),
    allow(dead_code, reason = "without the kernels there is no emulator")
)]
pub struct Emulator {
    info: DeviceInfo,
    order: Order,
    capture: GraphCapture,
    /// Nodes of the graph that is being captured.
    captured: Mutex<Option<Vec<Node>>>,
    /// Times of the events, by index.
    events: Mutex<Vec<Instant>>,
    /// Bytes of free memory.
    free_bytes: AtomicUsize,
    /// Launches until the device is lost, plus one; 0 once it is.
    launches_left: Arc<AtomicUsize>,
    running: RunningGraph,
    copies: Mutex<AsyncCopies>,
}

impl Emulator {
    /// An emulated device with this many multiprocessors. `None` if the kernels were not compiled, because there was no
    /// C++ compiler or the system is not supported.
    pub fn new(multiprocessors: usize, order: Order) -> Option<Self> {
        cfg!(emulated).then(|| Self {
            info: DeviceInfo {
                name: "emulator".to_owned(),
                multiprocessors,
                has_watchdog: false,
                shared_bytes: 99 << 10, // as compute capability 8.6, the smallest of those supported
            },
            order,
            capture: GraphCapture::Works,
            captured: Mutex::default(),
            events: Mutex::default(),
            free_bytes: AtomicUsize::new(usize::MAX),
            launches_left: Arc::new(AtomicUsize::new(usize::MAX)),
            running: RunningGraph::default(),
            copies: Mutex::default(),
        })
    }

    /// Sets the behaviour of graph capture.
    pub fn with_capture(self, capture: GraphCapture) -> Self {
        Self { capture, ..self }
    }

    /// Limits device memory to `bytes`.
    pub fn with_memory(self, bytes: usize) -> Self {
        Self {
            free_bytes: AtomicUsize::new(bytes),
            ..self
        }
    }

    /// Makes the device fail in the launch after `launches` launches, and in every operation from then on, as a GPU that
    /// falls off the bus.
    pub fn lost_after(self, launches: usize) -> Self {
        self.launches_left.store(launches + 1, Ordering::Relaxed);
        self
    }

    /// Number of graph launches.
    pub fn graph_launches(&self) -> usize {
        self.running.launches()
    }
}

#[cfg_attr(
    not(emulated),
    allow(dead_code, reason = "without the kernels there is no emulator")
)]
impl Emulator {
    /// Fails once the device is lost.
    fn check_lost(&self, doing: &'static str) -> Result<(), DeviceError> {
        match self.launches_left.load(Ordering::Relaxed) {
            0 => Err(self.failed(doing, "it is lost")),
            _ => Ok(()),
        }
    }

    /// The nodes captured so far; `None` outside of a capture.
    fn captured(&self) -> MutexGuard<'_, Option<Vec<Node>>> {
        lock(&self.captured)
    }

    /// Waits for a running graph; fails during a capture, as operations do that a graph cannot contain.
    fn check_not_capturing(&self, doing: &'static str) -> Result<(), DeviceError> {
        self.running.wait()?;
        self.check_lost(doing)?;
        match *self.captured() {
            None => Ok(()),
            Some(_) => Err(self.failed(doing, "a graph is being captured")),
        }
    }

    fn failed(&self, doing: &'static str, reason: &str) -> DeviceError {
        DeviceError::Failed {
            device: self.info.name.clone(),
            doing,
            reason: reason.to_owned(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
