//! Measures the GPU and its link for placement. On a machine without one the result is a reason in one line;
//! nothing here needs CUDA to build or to start.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::{
    fs,
    panic::{self, AssertUnwindSafe},
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DriverError, PinnedHostSlice, sys::CUdevice_attribute,
};
use powerinfer_artifact::{ByteSize, hardware::Gpu};
use powerinfer_kernels::{
    Arithmetic,
    cuda::{CudaDevice, Gpu as Kernels},
};

/// Bytes of a copy that is bound by bandwidth.
const LARGE: usize = 256 << 20;
/// Bytes of a copy that is bound by latency: a few hidden states.
const SMALL: usize = 16 << 10;
/// Memory that the driver takes during a run in addition to the kernels: captured graphs, partly used pages.
const DRIVER_BYTES: u64 = 32 << 20;
/// Memory of the kernels if they could not be loaded.
const KERNEL_BYTES: u64 = 32 << 20;
/// Share of the nominal operations that matrix products sustain.
const SUSTAINED_OPERATIONS: f64 = 0.5;

/// A measured GPU.
#[derive(Debug)]
pub struct MeasuredGpu {
    /// Its values.
    pub gpu: Gpu,
    /// Version of the NVIDIA driver.
    pub driver: String,
    /// Origin of each value, by its key in the hardware file.
    pub sources: Vec<(&'static str, String)>,
}

impl MeasuredGpu {
    /// Measures the first GPU: copies within the device and over PCIe, latencies, launches.
    ///
    /// # Errors
    ///
    /// Returns the reason in one line if there is no GPU, or its driver fails.
    pub fn measure() -> Result<Self, String> {
        let driver = driver_version()?;
        with_first_gpu(|context| measure(context, driver))
    }
}

/// Version of the NVIDIA driver, or the reason in one line if none is loaded.
fn driver_version() -> Result<String, String> {
    let version = fs::read_to_string("/proc/driver/nvidia/version")
        .map_err(|_| "no NVIDIA driver is loaded on this machine".to_owned())?;
    let number = version
        .split_whitespace()
        .find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
    Ok(number.unwrap_or("of unknown version").to_owned())
}

/// Names of the installed GPUs, each with the version of the driver, as the driver's files list them. Opens no device.
pub fn installed_gpus() -> Vec<String> {
    let Ok(driver) = driver_version() else {
        return Vec::new();
    };
    let folders = fs::read_dir("/proc/driver/nvidia/gpus");
    let folders = folders.into_iter().flatten().flatten();
    let mut names: Vec<String> = folders
        .filter_map(|folder| fs::read_to_string(folder.path().join("information")).ok())
        .filter_map(|text| Some(format!("{}, driver {driver}", text.lines().next()?.trim())))
        .collect();
    names.sort();
    names
}

/// Names of the instances that the installed GPUs are divided into (MIG), as the driver's files list them; empty if there are
/// none.
pub fn gpu_instances() -> Vec<String> {
    let folders = |path: &Path| {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect::<Vec<PathBuf>>()
    };
    let gpus = folders(Path::new("/proc/driver/nvidia/capabilities"));
    let instances = gpus.iter().flat_map(|gpu| folders(&gpu.join("mig")));
    let compute = instances.flat_map(|instance| [folders(&instance), vec![instance]].concat());
    let mut names: Vec<String> = compute.map(|path| path.display().to_string()).collect();
    names.sort();
    names
}

/// Free bytes of the first GPU's memory, after the creation of a context.
///
/// # Errors
///
/// Returns the reason in one line if there is no GPU, or its driver fails.
pub fn vram_free() -> Result<u64, String> {
    with_first_gpu(|context| Ok(context.mem_get_info()?.0 as u64))
}

/// Calls `act` with the first GPU. Every failure, including a panic of the bindings for a missing function,
/// becomes a reason in one line.
fn with_first_gpu<T>(
    act: impl FnOnce(&Arc<CudaContext>) -> Result<T, DriverError>,
) -> Result<T, String> {
    let version = driver_version()?;
    // SAFETY: this opens the driver's library and runs its initialisers, as in any program that uses CUDA.
    let is_present = unsafe { cudarc::driver::sys::is_culib_present() };
    if !is_present {
        return Err(format!(
            "NVIDIA driver {version} is loaded, but its library libcuda is not found"
        ));
    }
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let outcome = panic::catch_unwind(AssertUnwindSafe(|| {
        let count = CudaContext::device_count()?;
        match count {
            0 => Ok(None),
            _ => act(&CudaContext::new(0)?).map(Some),
        }
    }));
    panic::set_hook(hook);
    match outcome {
        Ok(Ok(Some(found))) => Ok(found),
        Ok(Ok(None)) => Err(format!("NVIDIA driver {version} finds no GPU")),
        // The code alone: naming it takes another call into the library that just failed.
        Ok(Err(DriverError(code))) => Err(format!("NVIDIA driver {version} fails: {code:?}")),
        Err(_) => Err(format!(
            "NVIDIA driver {version} lacks functions that are needed; update it"
        )),
    }
}

fn measure(context: &Arc<CudaContext>, driver: String) -> Result<MeasuredGpu, DriverError> {
    let (free, total) = context.mem_get_info()?;
    let stream = context.new_stream()?;
    // Two buffers take at most half of what is free.
    let large = LARGE.min(free / 4).max(SMALL);
    let mut link = Link {
        one: stream.alloc_zeros(large)?,
        other: stream.alloc_zeros(large)?,
        host: pinned(context, large)?,
        small: stream.alloc_zeros(SMALL)?,
        small_host: pinned(context, SMALL)?,
        stream,
    };
    // The first calls load modules.
    link.sync()?;
    let copy = link.median(|link| link.stream.memcpy_dtod(&link.one, &mut link.other))?;
    let down = link.median(|link| link.stream.memcpy_htod(&link.host, &mut link.one))?;
    let up = link.median(|link| link.stream.memcpy_dtoh(&link.one, &mut link.host))?;
    let latency = link.median(|link| link.stream.memcpy_htod(&link.small_host, &mut link.small))?;
    let (kernel_bytes, sync) = with_kernels().unzip();
    let (sync, sync_source) = match sync.flatten() {
        Some(seconds) => (
            seconds,
            "flags in mapped memory that a kernel and the host wait for, with the kernels",
        ),
        None => (
            link.median(Link::sync)?,
            "a copy of 16 KiB to the host and one back, each synchronised, as no kernels run here",
        ),
    };
    let launch = link.median(Link::many_launches)? / LAUNCHES as f64;
    let bytes = large as f64;
    let operations = nominal_operations(context)?;
    let measured = "measured by `powerinfer doctor`";
    let mut sources = vec![
        (
            "gpu.read_bandwidth_bytes_per_second",
            format!(
                "{measured}: twice the speed of copies within the device, which read and write; an estimate"
            ),
        ),
        ("gpu.vram_bytes", "reported by the driver".to_owned()),
        (
            "gpu.free_bytes",
            "reported by the driver, with a context of this program".to_owned(),
        ),
        (
            "gpu.pcie_bandwidth_bytes_per_second",
            format!(
                "{measured}: the slower of {:.1} GB/s to the device and {:.1} GB/s back, pinned memory",
                bytes / down / 1e9,
                bytes / up / 1e9
            ),
        ),
        (
            "gpu.pcie_latency_seconds",
            format!("{measured}: a copy of {SMALL} bytes to the device, synchronised"),
        ),
        ("gpu.sync_seconds", format!("{measured}: {sync_source}")),
        (
            "gpu.kernel_launch_seconds",
            format!("{measured}: one of many small memsets in a row"),
        ),
        (
            "gpu.context_bytes",
            format!(
                "{}, and {} assumed for graphs and partly used pages; the CUDA context is not part of the free memory",
                match kernel_bytes {
                    Some(_) => format!("{measured}: memory of the loaded kernels"),
                    None => "assumed: memory of the kernels".to_owned(),
                },
                ByteSize(DRIVER_BYTES)
            ),
        ),
    ];
    if operations.is_some() {
        sources.push((
            "gpu.operations_per_second",
            "multiprocessors × clock × multiply-adds a cycle × 2, as the driver reports them; 50% of it sustained, assumed"
                .to_owned(),
        ));
    }
    Ok(MeasuredGpu {
        driver,
        gpu: Gpu {
            name: context.name()?,
            read_bandwidth_bytes_per_second: (2.0 * bytes / copy).round(),
            vram_bytes: total as u64,
            free_bytes: Some(free.min(total) as u64),
            pcie_bandwidth_bytes_per_second: (bytes / down.max(up)).round(),
            pcie_latency_seconds: latency,
            sync_seconds: sync,
            kernel_launch_seconds: launch,
            context_bytes: kernel_bytes.unwrap_or(KERNEL_BYTES) + DRIVER_BYTES,
            operations_per_second: operations
                .map(|nominal| (nominal * SUSTAINED_OPERATIONS).round()),
        },
        sources,
    })
}

/// Bytes of the loaded kernels, and seconds of a synchronisation as in decoding; `None` if the GPU cannot run the kernels.
fn with_kernels() -> Option<(u64, Option<f64>)> {
    let device = CudaDevice::open(0).ok()?;
    let bytes = device.kernel_bytes() as u64;
    let gpu = Kernels::new(Arc::new(device), Arithmetic::Integer);
    let seconds = gpu.sync_seconds(SYNC_PASSES).ok();
    let median = seconds.and_then(|seconds| seconds.get(seconds.len() / 2).copied());
    Some((bytes, median))
}

/// Graphs of synchronisations that are timed.
const SYNC_PASSES: usize = 10;

/// Launches timed together.
const LAUNCHES: usize = 500;

/// Buffers on device and host, and the stream that copies between them.
struct Link {
    stream: Arc<CudaStream>,
    one: CudaSlice<u8>,
    other: CudaSlice<u8>,
    host: PinnedHostSlice<u8>,
    small: CudaSlice<u8>,
    small_host: PinnedHostSlice<u8>,
}

impl Link {
    /// Median time of `act` until it has finished.
    fn median(
        &mut self,
        act: impl Fn(&mut Self) -> Result<(), DriverError>,
    ) -> Result<f64, DriverError> {
        const PASSES: usize = 21;
        let mut times = Vec::new();
        for _ in 0..PASSES {
            self.stream.synchronize()?;
            let started = Instant::now();
            act(self)?;
            self.stream.synchronize()?;
            times.push(started.elapsed().as_secs_f64());
        }
        times.sort_unstable_by(f64::total_cmp);
        Ok(times[PASSES / 2].max(1e-9))
    }

    /// The synchronisation of a layer: its input to the host, the cold sum back.
    fn sync(&mut self) -> Result<(), DriverError> {
        self.stream.memcpy_dtoh(&self.small, &mut self.small_host)?;
        self.stream.synchronize()?;
        self.stream.memcpy_htod(&self.small_host, &mut self.small)?;
        self.stream.synchronize()
    }

    fn many_launches(&mut self) -> Result<(), DriverError> {
        (0..LAUNCHES).try_for_each(|_| self.stream.memset_zeros(&mut self.small))
    }
}

/// Pinned memory of zeros.
fn pinned(context: &Arc<CudaContext>, bytes: usize) -> Result<PinnedHostSlice<u8>, DriverError> {
    // SAFETY: the memory is filled before it is read. Without flags it is cached, so that the host reads it at
    // full speed.
    let mut memory = unsafe { context.alloc_pinned_with_flags::<u8>(bytes, 0) }?;
    memory.as_mut_slice()?.fill(0);
    Ok(memory)
}

/// Operations per second of dense f16 GEMM with f32 accumulation; `None` for an unknown compute capability.
fn nominal_operations(context: &Arc<CudaContext>) -> Result<Option<f64>, DriverError> {
    // Multiply-adds of a multiprocessor per cycle.
    let per_cycle = match context.compute_capability()? {
        (7, 5) | (8, 6 | 9) | (12, _) => 256.0,
        (7, 0) => 512.0,
        (8, 0) => 1024.0,
        (9, 0) => 2048.0,
        _ => return Ok(None),
    };
    use CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_CLOCK_RATE, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    };
    let multiprocessors = context.attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let kilohertz = context.attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?;
    let nominal = f64::from(multiprocessors) * f64::from(kilohertz) * 1e3 * per_cycle * 2.0;
    Ok((nominal >= 1.0).then_some(nominal))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_gpu_the_reason_is_one_line() {
        match MeasuredGpu::measure() {
            Ok(found) => {
                assert!(found.gpu.vram_bytes > 0 && !found.sources.is_empty());
                assert!(vram_free().unwrap() <= found.gpu.vram_bytes);
            }
            Err(reason) => {
                assert!(!reason.is_empty() && !reason.contains('\n'), "{reason}");
                assert_eq!(vram_free().unwrap_err(), reason);
            }
        }
    }
}
