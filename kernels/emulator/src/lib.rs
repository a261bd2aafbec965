//! A GPU emulator for tests: the kernels of `kernels/cuda`, compiled as C++ with one fiber per thread, behind the same
//! [`Device`] trait as a CUDA device.
//!
//! It finds errors rather than measures speed: out-of-bounds accesses, uninitialised reads, divergent barriers, wrong warp
//! masks, and reads of asynchronous copies that were not waited for. The [order](Order) of threads and blocks is a parameter,
//! so that races change results; with [checks](Checks), races are reported even where they do not. Tensor cores truncate
//! as real ones do. Loads that return old values, and the accuracy of `exp2`, `erf` and `tanh`, need a GPU.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

#[cfg(emulated)]
mod device;
mod events;
mod graph;
mod staging;
#[cfg(not(emulated))]
mod unavailable;

use std::{
    cell::OnceCell,
    io::Write,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicI64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use powerinfer_kernels::cuda::{CaptureLock, CudaDevice, Device, DeviceError, DeviceInfo};
use powerinfer_pool::environment;

use self::{
    events::Events,
    graph::{Node, RunningGraph},
    staging::AsyncCopies,
};

/// Order in which threads and blocks run. Blocks run one after the other in the first two; in a shuffled order three are
/// resident, and take turns at barriers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Ascending.
    Forward,
    /// Descending.
    Reverse,
    /// A permutation, and turns of resident blocks, with this seed.
    Shuffled(u16),
}

impl Order {
    /// Three very different orders.
    pub const SAMPLES: [Order; 3] = [Order::Forward, Order::Reverse, Order::Shuffled(1)];
}

/// Whether every access of a kernel to shared and global memory is checked for races, which makes it several times slower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checks {
    /// Accesses that nothing orders fail the launch.
    On,
    /// Accesses are not observed.
    Off,
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

/// The device of a test: a new emulator, or, if `POWERINFER_TEST_DEVICE` is `gpu`, a GPU with a stream for each thread.
/// `None` as for [`test_emulator`].
///
/// # Panics
///
/// The device does not exist and the test is not to be skipped.
pub fn test_device(order: Order) -> Option<Arc<dyn Device>> {
    // Its own stream for each thread: a test would otherwise capture the launches of another one.
    thread_local! {
        static GPU: OnceCell<Arc<CudaDevice>> = const { OnceCell::new() };
    }
    if environment::tests_on_gpu() {
        let open = || Arc::new(CudaDevice::open(0).expect("a GPU to test"));
        return Some(GPU.with(|gpu| Arc::clone(gpu.get_or_init(open))) as _);
    }
    test_emulator(2, order).map(|emulator| Arc::new(emulator) as _)
}

/// The emulator of a test, with this many multiprocessors. `None` if it was not built and `POWERINFER_SKIP_EMULATOR` is
/// set, which is printed even if the output of the test is captured.
///
/// # Panics
///
/// The emulator was not built and the variable is not set.
pub fn test_emulator(multiprocessors: usize, order: Order) -> Option<Emulator> {
    let emulator = Emulator::new(multiprocessors, order);
    if emulator.is_none() {
        assert!(
            environment::skips_emulator(),
            "the CUDA emulator was not built; install a C++ compiler, or set POWERINFER_SKIP_EMULATOR=1"
        );
        let test = std::thread::current();
        let name = test.name().unwrap_or("a test");
        // Tests capture the output of macros only.
        let _ = writeln!(std::io::stderr(), "skipped: {name}: no CUDA emulator");
    }
    emulator
}

/// The emulated device.
#[derive(Debug)]
#[cfg_attr(
    not(emulated),
    expect(dead_code, reason = "without the kernels there is no emulator")
)]
pub struct Emulator {
    info: DeviceInfo,
    order: Order,
    checks: Checks,
    capture: GraphCapture,
    /// Keeps other threads out of a capture.
    capture_lock: CaptureLock,
    /// Nodes of the graph that is being captured.
    captured: Mutex<Option<Vec<Node>>>,
    events: Events,
    /// Bytes of free memory.
    free_bytes: AtomicUsize,
    /// Launches until the device is lost, plus one; 0 once it is.
    launches_left: Arc<AtomicUsize>,
    /// Launches before the one that fails; negative after it.
    failing_launch: Arc<AtomicI64>,
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
                patience: DeviceInfo::PATIENCE,
                shared_bytes: 99 << 10, // as compute capability 8.6, the smallest of those supported
            },
            order,
            checks: Checks::Off,
            capture: GraphCapture::Works,
            capture_lock: CaptureLock::default(),
            captured: Mutex::default(),
            events: Events::default(),
            free_bytes: AtomicUsize::new(usize::MAX),
            launches_left: Arc::new(AtomicUsize::new(usize::MAX)),
            failing_launch: Arc::new(AtomicI64::new(i64::MAX)),
            running: RunningGraph::default(),
            copies: Mutex::default(),
        })
    }

    /// Sets whether accesses are checked.
    pub fn with_checks(self, checks: Checks) -> Self {
        Self { checks, ..self }
    }

    /// Sets the behaviour of graph capture.
    pub fn with_capture(self, capture: GraphCapture) -> Self {
        Self { capture, ..self }
    }

    /// Sets how long kernels wait for the host.
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.info.patience = patience;
        self
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

    /// Makes the launch after `launches` launches fail, and no other.
    pub fn failing_after(self, launches: usize) -> Self {
        self.failing_launch
            .store(launches as i64, Ordering::Relaxed);
        self
    }

    /// Number of captured graphs.
    pub fn graph_captures(&self) -> usize {
        self.running.captures()
    }

    /// Number of graph launches.
    pub fn graph_launches(&self) -> usize {
        self.running.launches()
    }
}

#[cfg_attr(
    not(emulated),
    expect(dead_code, reason = "without the kernels there is no emulator")
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
