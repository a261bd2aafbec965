//! A GPU for tests on machines that have none: the kernels of `kernels/cuda`, compiled as C++ with one
//! fiber per thread, behind the same [`Device`] as a card.
//!
//! It finds what is wrong with a kernel rather than how fast it is: memory that was never taken, barriers
//! that not everyone reaches, lanes that do not come, and, since the [order](Order) of threads and blocks is
//! a parameter, results that depend on it. What blocks that run at the same time see of each other, and
//! arithmetic that a card does in its own way, only a card can show.

use std::{
    collections::VecDeque,
    io::Write,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::Instant,
};

use powerinfer_kernels::{
    cuda::{CudaDevice, Device, DeviceError, DeviceInfo, Graph, Launch},
    environment,
};

/// In which order threads and blocks get their turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// The first one first.
    Forward,
    /// The last one first.
    Reverse,
    /// As a number says.
    Shuffled(u16),
}

impl Order {
    /// Three of them, as different as can be.
    pub const SAMPLES: [Order; 3] = [Order::Forward, Order::Reverse, Order::Shuffled(1)];
}

/// How far a device can record launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GraphCapture {
    /// As it should.
    Works,
    /// Not at all.
    Unsupported,
    /// It begins, and fails in the end.
    Fails,
}

/// The device of a test: the emulator, or with `POWERINFER_TEST_DEVICE=gpu` a GPU. As [`test_emulator`], none
/// where the test is to be skipped.
///
/// # Panics
///
/// If the device does not exist and the test is not to be skipped.
pub fn test_device(order: Order) -> Option<Arc<dyn Device>> {
    static CARD: OnceLock<Arc<CudaDevice>> = OnceLock::new();
    if environment::tests_on_gpu() {
        let open = || Arc::new(CudaDevice::open(0).expect("a card to test"));
        return Some(Arc::clone(CARD.get_or_init(open)) as _);
    }
    test_emulator(2, order).map(|emulator| Arc::new(emulator) as _)
}

/// The emulator with so many multiprocessors for a test; none where it was not built and
/// `POWERINFER_SKIP_EMULATOR` is set, which is printed even if the test's output is captured.
///
/// # Panics
///
/// If the emulator was not built and the variable is not set.
pub fn test_emulator(multiprocessors: usize, order: Order) -> Option<Emulator> {
    let emulator = Emulator::new(multiprocessors, order);
    if emulator.is_none() {
        assert!(
            environment::skips_emulator(),
            "the CUDA emulator was not built; install a C++ compiler, or set POWERINFER_SKIP_EMULATOR=1"
        );
        let test = std::thread::current();
        let name = test.name().unwrap_or("a test");
        // Tests capture what is printed by macros only.
        let _ = writeln!(std::io::stderr(), "skipped: {name}: no CUDA emulator");
    }
    emulator
}

/// The emulated device.
#[derive(Debug)]
pub struct Emulator {
    info: DeviceInfo,
    order: Order,
    records: GraphCapture,
    /// What was asked for since recording began.
    recorded: Mutex<Option<Vec<Step>>>,
    /// Moments that were marked: what is asked for is done at once.
    #[cfg_attr(not(emulated), allow(dead_code, reason = "nothing is run"))]
    moments: Mutex<Vec<Instant>>,
    /// Bytes of memory that nobody has taken.
    #[cfg_attr(not(emulated), allow(dead_code, reason = "nothing is taken"))]
    left: AtomicUsize,
    /// In which launch from now on it is lost; 0 where it is.
    life: Arc<AtomicUsize>,
    running: Running,
    /// Copies beside that were asked for and not done: each is done as late as it may be.
    #[cfg_attr(not(emulated), allow(dead_code, reason = "nothing is copied"))]
    copies: Mutex<Copies>,
}

/// Copies that run beside kernels, and what would be a race with them on a card.
#[derive(Debug, Default)]
struct Copies {
    waiting: VecDeque<CopyBeside>,
    /// The host's memory that may still be read, with its lane: nobody has waited for it.
    on_their_way: Vec<(usize, Range<u64>)>,
    /// Lanes whose memory on the device kernels may use, for they were told to wait for its copies.
    in_use: Vec<usize>,
}

/// A copy from the host's memory that runs beside kernels.
#[derive(Debug)]
struct CopyBeside {
    lane: usize,
    address: u64,
    host: u64,
    bytes: usize,
}

/// What runs, and how it ends.
type Thread = JoinHandle<Result<(), DeviceError>>;

/// A recording that runs beside whoever asked for it, as on a card.
#[derive(Debug, Clone, Default)]
struct Running {
    thread: Arc<Mutex<Option<Thread>>>,
    /// How many there have been.
    count: Arc<AtomicUsize>,
}

impl Running {
    /// Whether nothing runs any more.
    #[cfg_attr(not(emulated), allow(dead_code, reason = "nothing is run"))]
    fn has_ended(&self) -> bool {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until it is done; says what went wrong.
    fn settle(&self) -> Result<(), DeviceError> {
        let running = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match running.map(JoinHandle::join) {
            Some(Ok(outcome)) => outcome,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(()),
        }
    }
}

/// Something that is asked of a device, to be done later.
#[derive(Debug)]
enum Step {
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

/// Steps, and a device of their own to do them on: memory is that of the process.
#[derive(Debug)]
struct Steps {
    shared: Arc<(Emulator, Vec<Step>)>,
    running: Running,
}

#[allow(unsafe_code)]
impl Graph for Steps {
    unsafe fn launch(&self) -> Result<(), DeviceError> {
        self.running.settle()?;
        let shared = Arc::clone(&self.shared);
        let run = move || {
            let (device, steps) = &*shared;
            // SAFETY: the caller says so; memory is given back only after what runs is done.
            steps
                .iter()
                .try_for_each(|step| unsafe { device.act(step) })
        };
        let running = std::thread::spawn(run);
        self.running.count.fetch_add(1, Ordering::Relaxed);
        let mut thread = self
            .running
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *thread = Some(running);
        Ok(())
    }
}

impl Emulator {
    /// Does a step.
    ///
    /// # Safety
    /// All memory that it reads and writes is still taken.
    #[allow(unsafe_code)]
    unsafe fn act(&self, step: &Step) -> Result<(), DeviceError> {
        // SAFETY: the caller says so.
        unsafe {
            match step {
                Step::Launch {
                    kernel,
                    grid,
                    threads,
                    shared_bytes,
                    arguments,
                } => self.launch(&Launch {
                    kernel,
                    grid: *grid,
                    threads: *threads,
                    shared_bytes: *shared_bytes,
                    arguments,
                }),
                Step::Copy { to, from, bytes } => self.copy(*to, *from, *bytes),
                Step::Clear { address, bytes } => self.clear(*address, *bytes),
            }
        }
    }

    /// A device of so many multiprocessors; none where the kernels were not compiled, for want of a
    /// compiler or of a system that is known.
    pub fn new(multiprocessors: usize, order: Order) -> Option<Self> {
        cfg!(emulated).then(|| Self {
            info: DeviceInfo {
                name: "emulator".to_owned(),
                multiprocessors,
                has_watchdog: false,
                shared_bytes: 99 << 10, // of the least that kernels are made for, compute capability 8.6
            },
            order,
            records: GraphCapture::Works,
            recorded: Mutex::default(),
            moments: Mutex::default(),
            left: AtomicUsize::new(usize::MAX),
            life: Arc::new(AtomicUsize::new(usize::MAX)),
            running: Running::default(),
            copies: Mutex::default(),
        })
    }

    /// The same device, which records so far.
    pub fn with_capture(self, records: GraphCapture) -> Self {
        Self { records, ..self }
    }

    /// The same device with so many bytes of memory.
    pub fn with_memory(self, bytes: usize) -> Self {
        Self {
            left: AtomicUsize::new(bytes),
            ..self
        }
    }

    /// The same device, which is lost in the launch after so many, as a card is that falls off the bus: whatever is
    /// asked of it from then on fails.
    pub fn lost_after(self, launches: usize) -> Self {
        self.life.store(launches + 1, Ordering::Relaxed);
        self
    }

    /// Fails once the device is lost.
    #[cfg_attr(not(emulated), allow(dead_code, reason = "nothing is run"))]
    fn check_alive(&self, doing: &'static str) -> Result<(), DeviceError> {
        match self.life.load(Ordering::Relaxed) {
            0 => Err(self.failed(doing, "it is lost")),
            _ => Ok(()),
        }
    }

    /// How often recordings were replayed.
    pub fn graph_launches(&self) -> usize {
        self.running.count.load(Ordering::Relaxed)
    }

    /// Where steps go while they are recorded.
    #[cfg_attr(not(emulated), allow(dead_code, reason = "nothing is recorded"))]
    fn recording(&self) -> MutexGuard<'_, Option<Vec<Step>>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails while launches are recorded, which a copy to or from the host would not be.
    #[cfg_attr(not(emulated), allow(dead_code, reason = "nothing is recorded"))]
    fn check_not_recording(&self, doing: &'static str) -> Result<(), DeviceError> {
        self.running.settle()?;
        self.check_alive(doing)?;
        match *self.recording() {
            None => Ok(()),
            Some(_) => Err(self.failed(doing, "launches are being recorded")),
        }
    }

    #[cfg_attr(not(emulated), allow(dead_code, reason = "nothing is copied"))]
    fn copies(&self) -> MutexGuard<'_, Copies> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does the copies beside that were asked for, up to the last one that is `meant`.
    #[cfg_attr(not(emulated), allow(dead_code, reason = "nothing is copied"))]
    #[allow(unsafe_code)]
    fn copy_up_to(&self, meant: impl Fn(&CopyBeside) -> bool) {
        let waiting = &mut self.copies().waiting;
        let last = waiting.iter().rposition(meant);
        for copy in waiting.drain(..last.map_or(0, |last| last + 1)) {
            // SAFETY: who asked for it has said so, and waits before the memory is changed or given back.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    copy.host as *const u8,
                    copy.address as *mut u8,
                    copy.bytes,
                );
            }
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

#[cfg(emulated)]
#[allow(unsafe_code)]
mod native {
    use std::ffi::{c_char, c_uint, c_void};

    unsafe extern "C" {
        pub(crate) fn emulator_allocate(bytes: usize) -> *mut c_void;
        pub(crate) fn emulator_free(memory: *mut c_void, bytes: usize);
        pub(crate) fn emulator_find(name: *const c_char) -> *const c_void;
        pub(crate) fn emulator_launch(
            kernel: *const c_void,
            grid: *const c_uint,
            threads: c_uint,
            shared_bytes: usize,
            order: c_uint,
            arguments: *const c_void,
            argument_bytes: usize,
        ) -> *const c_char;
    }
}

#[cfg(emulated)]
#[allow(unsafe_code)]
impl Device for Emulator {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn allocate(&self, bytes: usize) -> Result<u64, DeviceError> {
        self.check_alive("taking memory")?;
        let take = |left: usize| left.checked_sub(bytes);
        let taken = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        let no_memory = |_| DeviceError::OutOfMemory {
            device: self.info.name.clone(),
            bytes,
        };
        taken.map_err(no_memory)?;
        self.allocate_host(bytes).map(|(_, address)| address)
    }

    unsafe fn free(&self, address: u64, bytes: usize) {
        drop(self.running.settle());
        self.copy_up_to(|_| true);
        self.left.fetch_add(bytes, Ordering::Relaxed);
        // SAFETY: the caller says so.
        unsafe { native::emulator_free(address as *mut _, bytes) }
    }

    fn allocate_host(&self, bytes: usize) -> Result<(*mut u8, u64), DeviceError> {
        // SAFETY: it takes any number.
        let memory = unsafe { native::emulator_allocate(bytes) };
        match memory.is_null() {
            true => Err(DeviceError::OutOfMemory {
                device: self.info.name.clone(),
                bytes,
            }),
            false => Ok((memory.cast(), memory as u64)),
        }
    }

    unsafe fn free_host(&self, host: *mut u8, bytes: usize) {
        // SAFETY: the caller says so.
        unsafe { native::emulator_free(host.cast(), bytes) }
    }

    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.check_not_recording("copying to it")?;
        // SAFETY: the caller says so.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        Ok(())
    }

    unsafe fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.check_not_recording("copying from it")?;
        // SAFETY: the caller says so.
        unsafe {
            std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), bytes.len())
        };
        Ok(())
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), DeviceError> {
        if let Some(steps) = &mut *self.recording() {
            steps.push(Step::Copy { to, from, bytes });
            return Ok(());
        }
        self.running.settle()?;
        self.check_alive("copying within it")?;
        // SAFETY: the caller says so.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<(), DeviceError> {
        if let Some(steps) = &mut *self.recording() {
            steps.push(Step::Clear { address, bytes });
            return Ok(());
        }
        self.running.settle()?;
        self.check_alive("clearing memory")?;
        // SAFETY: the caller says so.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) };
        Ok(())
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        if let Some(steps) = &mut *self.recording() {
            steps.push(Step::Launch {
                kernel: launch.kernel.to_owned(),
                grid: launch.grid,
                threads: launch.threads,
                shared_bytes: launch.shared_bytes,
                arguments: launch.arguments.to_vec(),
            });
            return Ok(());
        }
        self.running.settle()?;
        let one_less = |left: usize| match left {
            usize::MAX => Some(left),
            left => Some(left.saturating_sub(1)),
        };
        let _ = self
            .life
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
        self.check_alive("launching a kernel")?;
        let failed = |reason: String| DeviceError::Kernel {
            device: self.info.name.clone(),
            kernel: launch.kernel.to_owned(),
            reason,
        };
        let name = std::ffi::CString::new(launch.kernel).map_err(|why| failed(why.to_string()))?;
        // SAFETY: a string that ends with 0.
        let kernel = unsafe { native::emulator_find(name.as_ptr()) };
        if kernel.is_null() {
            return Err(failed("there is no such kernel".to_owned()));
        }
        let order = match self.order {
            Order::Forward => 0,
            Order::Reverse => 1,
            Order::Shuffled(seed) => 2 + u32::from(seed),
        };
        // Fields of the structure may want to lie at multiples of 8.
        let mut arguments = vec![0u64; launch.arguments.len().div_ceil(8)];
        // SAFETY: the kernel was found, and refuses arguments of another size; the rest the caller says.
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
                arguments.as_ptr().cast(),
                launch.arguments.len(),
            )
        };
        if why.is_null() {
            return Ok(());
        }
        // SAFETY: what a launch answers ends with 0, and stays until the next one on this thread.
        let why = unsafe { std::ffi::CStr::from_ptr(why) };
        Err(failed(why.to_string_lossy().into_owned()))
    }

    fn begin_capture(&self) -> Result<bool, DeviceError> {
        self.check_not_recording("recording")?;
        if self.records == GraphCapture::Unsupported {
            return Ok(false);
        }
        *self.recording() = Some(Vec::new());
        Ok(true)
    }

    fn end_capture(&self) -> Result<Box<dyn Graph>, DeviceError> {
        let steps = self.recording().take();
        let steps = steps.ok_or_else(|| self.failed("recording", "it never began"))?;
        if self.records == GraphCapture::Fails {
            return Err(self.failed("recording", "it records badly"));
        }
        let device = Emulator {
            info: self.info.clone(),
            order: self.order,
            records: GraphCapture::Unsupported,
            recorded: Mutex::default(),
            moments: Mutex::default(),
            left: AtomicUsize::new(usize::MAX),
            life: Arc::clone(&self.life),
            running: Running::default(),
            copies: Mutex::default(),
        };
        Ok(Box::new(Steps {
            shared: Arc::new((device, steps)),
            running: self.running.clone(),
        }))
    }

    fn record_event(&self, index: usize) -> Result<(), DeviceError> {
        self.check_not_recording("marking a moment")?;
        let mut moments = self.moments.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if moments.len() <= index {
            moments.resize(index + 1, now);
        }
        moments[index] = now;
        Ok(())
    }

    fn elapsed_seconds(&self, earlier: usize, later: usize) -> Result<f64, DeviceError> {
        let moments = self.moments.lock().unwrap_or_else(PoisonError::into_inner);
        match (moments.get(earlier), moments.get(later)) {
            (Some(earlier), Some(later)) => {
                Ok(later.saturating_duration_since(*earlier).as_secs_f64())
            }
            _ => Err(self.failed("asking for the time", "nobody marked that moment")),
        }
    }

    unsafe fn copy_async(
        &self,
        lane: usize,
        address: u64,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        const DOING: &str = "copying beside kernels";
        self.check_not_recording(DOING)?;
        let mut copies = self.copies();
        if copies.in_use.contains(&lane) {
            return Err(self.failed(DOING, "kernels that run may use the memory"));
        }
        let start = bytes.as_ptr() as u64;
        let host = start..start + bytes.len() as u64;
        let overlaps = |range: &Range<u64>| range.start < host.end && host.start < range.end;
        if copies.on_their_way.iter().any(|(_, range)| overlaps(range)) {
            return Err(self.failed(DOING, "memory is filled again that is on its way"));
        }
        copies.on_their_way.push((lane, host));
        copies.waiting.push_back(CopyBeside {
            lane,
            address,
            host: bytes.as_ptr() as u64,
            bytes: bytes.len(),
        });
        Ok(())
    }

    fn make_copies_wait(&self, lane: usize) -> Result<(), DeviceError> {
        self.check_not_recording("copying beside kernels")?;
        self.copies().in_use.retain(|other| *other != lane);
        Ok(())
    }

    fn make_kernels_wait(&self, lane: usize) -> Result<(), DeviceError> {
        self.check_not_recording("copying beside kernels")?;
        self.copy_up_to(|copy| copy.lane == lane);
        self.copies().in_use.push(lane);
        Ok(())
    }

    fn synchronise_copies(&self, lane: usize) -> Result<(), DeviceError> {
        self.check_not_recording("copying beside kernels")?;
        self.copy_up_to(|copy| copy.lane == lane);
        self.copies().on_their_way.retain(|(of, _)| *of != lane);
        Ok(())
    }

    fn check(&self) -> Result<(), DeviceError> {
        match self.running.has_ended() {
            true => self.running.settle(),
            false => self.check_alive("running kernels"),
        }
    }

    fn synchronise(&self) -> Result<(), DeviceError> {
        self.check_not_recording("waiting for it") // a launch returns when its kernel has ended
    }
}

#[cfg(not(emulated))]
#[allow(unsafe_code)]
impl Device for Emulator {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn allocate(&self, _: usize) -> Result<u64, DeviceError> {
        unreachable!("there is no emulator here")
    }
    unsafe fn free(&self, _: u64, _: usize) {}
    fn allocate_host(&self, _: usize) -> Result<(*mut u8, u64), DeviceError> {
        unreachable!("there is no emulator here")
    }
    unsafe fn free_host(&self, _: *mut u8, _: usize) {}
    unsafe fn write(&self, _: u64, _: &[u8]) -> Result<(), DeviceError> {
        unreachable!("there is no emulator here")
    }
    unsafe fn read(&self, _: u64, _: &mut [u8]) -> Result<(), DeviceError> {
        unreachable!("there is no emulator here")
    }
    unsafe fn copy(&self, _: u64, _: u64, _: usize) -> Result<(), DeviceError> {
        unreachable!("there is no emulator here")
    }
    unsafe fn clear(&self, _: u64, _: usize) -> Result<(), DeviceError> {
        unreachable!("there is no emulator here")
    }
    unsafe fn launch(&self, _: &Launch<'_>) -> Result<(), DeviceError> {
        unreachable!("there is no emulator here")
    }
    fn begin_capture(&self) -> Result<bool, DeviceError> {
        Ok(false)
    }
    fn end_capture(&self) -> Result<Box<dyn Graph>, DeviceError> {
        Err(self.failed("recording", "there is no emulator here"))
    }
    fn record_event(&self, _: usize) -> Result<(), DeviceError> {
        Err(self.failed("marking a moment", "there is no emulator here"))
    }
    fn elapsed_seconds(&self, _: usize, _: usize) -> Result<f64, DeviceError> {
        Err(self.failed("asking for the time", "there is no emulator here"))
    }
    unsafe fn copy_async(&self, _: usize, _: u64, _: &[u8]) -> Result<(), DeviceError> {
        unreachable!("there is no emulator here")
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
