//! The graphics card: whether there is one, what is free of it, and how fast it and its link are. On a
//! machine without one, a reason in a line; nothing here needs CUDA to build or to start.
#![expect(unsafe_code, reason = "asks the CUDA driver through its C functions")]

use std::{
    fs,
    panic::{self, AssertUnwindSafe},
    sync::Arc,
    time::Instant,
};

use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DriverError, PinnedHostSlice, sys::CUdevice_attribute,
};
use powerinfer_artifact::hardware::Gpu;

/// Bytes of a copy that is as good as a stream.
const LARGE: usize = 256 << 20;
/// Bytes of a copy that is all latency: a few hidden states.
const SMALL: usize = 16 << 10;
/// What nobody can use beside what others hold: fragmentation, and what modules take once loaded.
const RESERVE_BYTES: u64 = 512 << 20;
/// Share of the nominal operations that matrix products sustain.
const SUSTAINED_OPERATIONS: f64 = 0.5;

/// A card as it was measured, and where each figure comes from.
pub(crate) struct MeasuredGpu {
    pub(crate) gpu: Gpu,
    pub(crate) sources: Vec<(&'static str, String)>,
}

/// The version of the driver, or why there is none.
pub(crate) fn driver() -> Result<String, String> {
    let version = fs::read_to_string("/proc/driver/nvidia/version")
        .map_err(|_| "no NVIDIA driver is loaded on this machine".to_owned())?;
    let number = version
        .split_whitespace()
        .find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
    Ok(number.unwrap_or("of unknown version").to_owned())
}

/// Bytes of the first card that nobody uses, once a context is there; or why that cannot be told.
pub(crate) fn vram_free() -> Result<u64, String> {
    with_card(|card| Ok(card.mem_get_info()?.0 as u64))
}

/// Measures the first card; or tells why there is none to measure.
pub(crate) fn measure() -> Result<MeasuredGpu, String> {
    with_card(measure_card)
}

/// Lets `act` have the first card. Whatever goes wrong on the way, a panic of the library that opens
/// the driver among it, becomes a reason in a line.
fn with_card<T>(
    act: impl FnOnce(&Arc<CudaContext>) -> Result<T, DriverError>,
) -> Result<T, String> {
    let version = driver()?;
    // SAFETY: this opens the driver's library, whose initialisers run, as in any program that uses
    // CUDA; a driver is loaded, so it is the driver's own.
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
        Ok(Ok(None)) => Err(format!("NVIDIA driver {version} sees no card")),
        // The code alone: naming it takes another call into the library that just failed.
        Ok(Err(DriverError(code))) => Err(format!("NVIDIA driver {version} fails: {code:?}")),
        Err(_) => Err(format!(
            "NVIDIA driver {version} lacks functions that are needed; update it"
        )),
    }
}

fn measure_card(card: &Arc<CudaContext>) -> Result<MeasuredGpu, DriverError> {
    let (free, total) = card.mem_get_info()?;
    let stream = card.new_stream()?;
    // Half of what is free at most, for there are two buffers.
    let large = LARGE.min(free / 4).max(SMALL);
    let mut link = Link {
        one: stream.alloc_zeros(large)?,
        other: stream.alloc_zeros(large)?,
        host: pinned(card, large)?,
        small: stream.alloc_zeros(SMALL)?,
        small_host: pinned(card, SMALL)?,
        stream,
    };
    // The first of each call loads what it needs.
    link.sync()?;
    let copy = link.median(|link| link.stream.memcpy_dtod(&link.one, &mut link.other))?;
    let down = link.median(|link| link.stream.memcpy_htod(&link.host, &mut link.one))?;
    let up = link.median(|link| link.stream.memcpy_dtoh(&link.one, &mut link.host))?;
    let latency = link.median(|link| link.stream.memcpy_htod(&link.small_host, &mut link.small))?;
    let sync = link.median(Link::sync)?;
    let launch = link.median(Link::many_launches)? / LAUNCHES as f64;
    let bytes = large as f64;
    let operations = nominal_operations(card)?;
    let measured = "measured by `powerinfer doctor`";
    let mut sources = vec![
        (
            "gpu.read_bandwidth_bytes_per_second",
            format!(
                "{measured}: twice the speed of copies within the card, each of which reads and writes; an estimate"
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
                "{measured}: the slower of {:.1} GB/s to the card and {:.1} GB/s back, page-locked memory",
                bytes / down / 1e9,
                bytes / up / 1e9
            ),
        ),
        (
            "gpu.pcie_latency_seconds",
            format!("{measured}: a copy of {SMALL} bytes to the card, and waiting for it"),
        ),
        (
            "gpu.sync_seconds",
            format!("{measured}: {SMALL} bytes from the card, waiting, as much back, waiting"),
        ),
        (
            "gpu.kernel_launch_seconds",
            format!("{measured}: one of many small kernels in a row that set memory"),
        ),
        (
            "gpu.context_bytes",
            "assumed: modules once loaded, and a reserve; the context itself is not in what is free"
                .to_owned(),
        ),
    ];
    if operations.is_some() {
        sources.push((
            "gpu.operations_per_second",
            "multiprocessors × clock × multiply-adds a cycle × 2, as the driver reports them; 50 % of it sustained, assumed"
                .to_owned(),
        ));
    }
    Ok(MeasuredGpu {
        gpu: Gpu {
            name: card.name()?,
            read_bandwidth_bytes_per_second: (2.0 * bytes / copy).round(),
            vram_bytes: total as u64,
            free_bytes: Some(free.min(total) as u64),
            pcie_bandwidth_bytes_per_second: (bytes / down.max(up)).round(),
            pcie_latency_seconds: latency,
            sync_seconds: sync,
            kernel_launch_seconds: launch,
            context_bytes: RESERVE_BYTES,
            operations_per_second: operations
                .map(|nominal| (nominal * SUSTAINED_OPERATIONS).round()),
        },
        sources,
    })
}

/// Launches that are timed together.
const LAUNCHES: usize = 500;

/// Buffers on both sides, and the stream that copies between them.
struct Link {
    stream: Arc<CudaStream>,
    one: CudaSlice<u8>,
    other: CudaSlice<u8>,
    host: PinnedHostSlice<u8>,
    small: CudaSlice<u8>,
    small_host: PinnedHostSlice<u8>,
}

impl Link {
    /// The median time of `act` with waiting for its end.
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

    /// What a layer's synchronisation does: input from the card, its share back.
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

/// Page-locked memory, set to zeros.
fn pinned(card: &Arc<CudaContext>, bytes: usize) -> Result<PinnedHostSlice<u8>, DriverError> {
    // SAFETY: the memory is not initialised; it is filled before anybody reads it. Without flags it is
    // cached like any other, so that what the card wrote there is read back at full speed.
    let mut memory = unsafe { card.alloc_pinned_with_flags::<u8>(bytes, 0) }?;
    memory.as_mut_slice()?.fill(0);
    Ok(memory)
}

/// Operations per second of dense 16-bit products with 32-bit sums; `None` for cards not known here.
fn nominal_operations(card: &Arc<CudaContext>) -> Result<Option<f64>, DriverError> {
    // Multiply-adds of a multiprocessor in a cycle.
    let per_cycle = match card.compute_capability()? {
        (7, 5) | (8, 6 | 9) | (12, _) => 256.0,
        (7, 0) => 512.0,
        (8, 0) => 1024.0,
        (9, 0) => 2048.0,
        _ => return Ok(None),
    };
    use CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_CLOCK_RATE, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    };
    let multiprocessors = card.attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let kilohertz = card.attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?;
    let nominal = f64::from(multiprocessors) * f64::from(kilohertz) * 1e3 * per_cycle * 2.0;
    Ok((nominal >= 1.0).then_some(nominal))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_card_there_is_a_reason_in_a_line() {
        match measure() {
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
