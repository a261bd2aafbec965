//! A GPU for tests on machines that have none: the kernels of `kernels/cuda`, compiled as C++ with one
//! fiber per thread, behind the same [`Device`] as a card.
//!
//! It finds what is wrong with a kernel rather than how fast it is: memory that was never taken, barriers
//! that not everyone reaches, lanes that do not come, and, since the [order](Order) of threads and blocks is
//! a parameter, results that depend on it. What blocks that run at the same time see of each other, and
//! arithmetic that a card does in its own way, only a card can show.

use std::{
    env,
    sync::{Arc, OnceLock},
};

use powerinfer_kernels::cuda::{Card, Device, DeviceError, DeviceInfo, Launch};

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
    pub const SOME: [Order; 3] = [Order::Forward, Order::Reverse, Order::Shuffled(1)];
}

/// `gpu` has tests run on a card instead of the emulator.
const DEVICE_VARIABLE: &str = "POWERINFER_TEST_DEVICE";

/// What tests run on: the emulator, or the card where `POWERINFER_TEST_DEVICE` says `gpu`. None where there
/// is no emulator.
///
/// Panics where a card is asked for and there is none.
pub fn test_device(order: Order) -> Option<Arc<dyn Device>> {
    static CARD: OnceLock<Arc<Card>> = OnceLock::new();
    if env::var_os(DEVICE_VARIABLE).is_some_and(|device| device == "gpu") {
        let open = || Arc::new(Card::open(0).expect("a card to test"));
        return Some(Arc::clone(CARD.get_or_init(open)) as _);
    }
    let emulator = Emulator::new(2, order);
    if emulator.is_none() {
        #[allow(clippy::print_stdout)]
        {
            println!("skipped: there is no emulator here");
        }
    }
    emulator.map(|emulator| Arc::new(emulator) as _)
}

/// The emulated device.
#[derive(Debug)]
pub struct Emulator {
    info: DeviceInfo,
    order: Order,
}

impl Emulator {
    /// A device of so many multiprocessors; none where the kernels were not compiled, for want of a
    /// compiler or of a system that is known.
    pub fn new(multiprocessors: usize, order: Order) -> Option<Self> {
        cfg!(emulated).then(|| Self {
            info: DeviceInfo {
                name: "emulator".to_owned(),
                multiprocessors,
                shared_bytes: 99 << 10, // of the least that kernels are made for, compute capability 8.6
            },
            order,
        })
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
        self.allocate_host(bytes).map(|(_, address)| address)
    }

    unsafe fn free(&self, address: u64, bytes: usize) {
        // SAFETY: the caller says so.
        unsafe { native::emulator_free(address as *mut _, bytes) }
    }

    fn allocate_host(&self, bytes: usize) -> Result<(*mut u8, u64), DeviceError> {
        // SAFETY: it takes any number.
        let memory = unsafe { native::emulator_allocate(bytes) };
        match memory.is_null() {
            true => Err(DeviceError::NoMemory {
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
        // SAFETY: the caller says so.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        Ok(())
    }

    unsafe fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        // SAFETY: the caller says so.
        unsafe {
            std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), bytes.len())
        };
        Ok(())
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: the caller says so.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: the caller says so.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) };
        Ok(())
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
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

    fn synchronise(&self) -> Result<(), DeviceError> {
        Ok(()) // a launch returns when its kernel has ended
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
    fn synchronise(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}
