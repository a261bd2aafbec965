//! GPU benchmark: the bandwidth that each kernel achieves relative to device-to-device copies, launch overhead, graphs and
//! synchronisation.
//!
//! `cargo bench -p powerinfer-kernels --bench gpu` needs a GPU; `-- --emulate` runs small shapes on the emulator, without
//! meaningful values; `-- launches attention` runs these sections only, after the copies. Shapes are those of a layer of a
//! 70B model: hidden size 8192, 28672 neurons, 64 heads, 8 KV heads. Results are checked against the scalar code. Caches are
//! flushed between repeats; values are medians.
#![expect(unsafe_code, reason = "launches kernels and calls the CUDA driver")]
#![expect(clippy::print_stdout, reason = "a benchmark reports on stdout")]

mod driver_syncs;
mod operations;
mod sync;
mod tiled;

#[path = "../../tests/support/noise.rs"]
mod noise;

use std::{sync::Arc, time::Instant};

use powerinfer_emulator::{Emulator, Order};
use powerinfer_kernels::{
    Arithmetic,
    cuda::{Buffer, CudaDevice, Device, Gpu},
};
use powerinfer_pool::environment;

/// The device, the shapes, and the state of the benchmark.
struct Bench {
    device: Arc<dyn Device>,
    gpu: Gpu,
    is_gpu: bool,
    hidden: usize,
    neurons: usize,
    heads: usize,
    context: usize,
    /// Copied to flush the caches.
    sweep: [Buffer<u8>; 2],
    repeats: usize,
    /// Bandwidth of device-to-device copies, reads and writes, in bytes per second.
    ceiling: f64,
    /// Results that differ from those of the scalar code.
    faults: Vec<String>,
}

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let is_emulated = std::env::args().any(|argument| argument == "--emulate");
    let device: Arc<dyn Device> = if is_emulated {
        match Emulator::new(2, Order::Forward) {
            Some(emulator) => Arc::new(emulator),
            None => {
                println!("skipped: the emulator was not built");
                return Ok(());
            }
        }
    } else {
        match CudaDevice::open(0) {
            Ok(gpu) => Arc::new(gpu),
            Err(reason) if environment::requires_gpu() => {
                return Err(reason.into());
            }
            Err(reason) => {
                println!("skipped: {reason}");
                return Ok(());
            }
        }
    };
    let mut bench = Bench::new(device, !is_emulated)?;
    println!(
        "\n{}, {} multiprocessors.\n",
        bench.device.info().name,
        bench.device.info().multiprocessors
    );
    let named: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with("--"))
        .collect();
    // First: it measures the bandwidth that the sections compare with.
    bench.copies()?;
    for (name, section) in SECTIONS {
        if named.is_empty() || named.iter().any(|given| given == name) {
            section(&mut bench)?;
        }
    }
    if bench.faults.is_empty() {
        Ok(())
    } else {
        Err(bench.faults.join("; ").into())
    }
}

/// A section of the report.
type Section = fn(&mut Bench) -> Outcome<()>;

/// The sections after the copies, by name.
const SECTIONS: [(&str, Section); 6] = [
    ("launches", Bench::launches),
    ("syncs", Bench::syncs),
    ("sparse", Bench::sparse),
    ("dense", Bench::dense),
    ("prompts", Bench::prompts),
    ("attention", Bench::attention),
];

/// Median.
fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_unstable_by(f64::total_cmp);
    figures[figures.len() / 2]
}

impl Bench {
    fn new(device: Arc<dyn Device>, is_gpu: bool) -> Outcome<Self> {
        let mut bytes = if is_gpu { 256 << 20 } else { 1 << 20 };
        let sweep = loop {
            let buffer = || Buffer::new(&device, bytes);
            match buffer().and_then(|one| Ok([one, buffer()?])) {
                Ok(both) => break both,
                Err(_) if bytes > 32 << 20 => bytes /= 2,
                Err(error) => return Err(error.into()),
            }
        };
        let [hidden, neurons, heads, context] = if is_gpu {
            [8192, 28672, 64, 4096]
        } else {
            [256, 320, 8, 64]
        };
        Ok(Self {
            gpu: Gpu::new(Arc::clone(&device), Arithmetic::Integer),
            device,
            is_gpu,
            hidden,
            neurons,
            heads,
            context,
            sweep,
            repeats: if is_gpu { 15 } else { 1 },
            ceiling: 0.0,
            faults: Vec::new(),
        })
    }

    /// Whether a result equals that of the scalar code. A wrong one is recorded as a fault, and its row is left out.
    fn is_right(&mut self, what: &str, found: &[f32], want: impl Fn(usize) -> f32) -> bool {
        let largest = (0..found.len()).fold(1e-6f32, |most, index| most.max(want(index).abs()));
        let is_near = |index: usize| (found[index] - want(index)).abs() <= 2e-2 * largest;
        let fault = (0..found.len()).find(|index| !is_near(*index));
        if let Some(index) = fault {
            let (found, want) = (found[index], want(index));
            let fault = format!("{what}: element {index} is {found}, not {want}");
            self.faults.push(fault);
        }
        fault.is_none()
    }

    /// Median device time of the operations of `act` in seconds, with flushed caches.
    fn seconds(&mut self, mut act: impl FnMut(&Gpu) -> Outcome<()>) -> Outcome<f64> {
        let mut all = Vec::new();
        for repeat in 0..=self.repeats {
            let [from, to] = &mut self.sweep;
            to.copy_from(from)?;
            self.device.record_event(0)?;
            act(&self.gpu)?;
            self.device.record_event(1)?;
            self.device.synchronise()?;
            // The first run is a warm-up.
            if repeat > 0 {
                all.push(self.device.elapsed_seconds(0, 1)?.max(1e-9));
            }
        }
        Ok(median(all))
    }

    fn copies(&mut self) -> Outcome<()> {
        let bytes = self.sweep[0].len();
        let mut all = Vec::new();
        for _ in 0..2 * self.repeats + 1 {
            let [from, to] = &mut self.sweep;
            self.device.record_event(0)?;
            to.copy_from(from)?;
            self.device.record_event(1)?;
            self.device.synchronise()?;
            all.push(self.device.elapsed_seconds(0, 1)?.max(1e-9));
        }
        self.ceiling = 2.0 * bytes as f64 / median(all);
        println!(
            "Copies within the device read and write {:.0} GB/s together, {} MiB at a time: the ceiling below.\n",
            self.ceiling / 1e9,
            bytes >> 20
        );
        println!("| bytes from pinned memory | GB/s | µs |\n| --: | --: | --: |");
        for bytes in [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20] {
            if bytes > self.sweep[0].len() {
                break;
            }
            let (host, _) = self.device.allocate_host(bytes)?;
            let mut all = Vec::new();
            for _ in 0..2 * self.repeats + 1 {
                let to = self.device.allocate(bytes)?;
                // SAFETY: both sides were just allocated with this size, and are freed after the copy.
                unsafe {
                    host.write_bytes(1, bytes);
                    let from = std::slice::from_raw_parts(host, bytes);
                    let started = Instant::now();
                    self.device.make_copies_wait(0)?;
                    self.device.copy_async(0, to, from)?;
                    self.device.synchronise_copies(0)?;
                    all.push(started.elapsed().as_secs_f64());
                    self.device.free(to, bytes);
                }
            }
            // SAFETY: the copies have finished.
            unsafe {
                self.device.free_host(host, bytes);
            }
            let seconds = median(all);
            println!(
                "| {bytes} | {:.1} | {:.1} |",
                bytes as f64 / seconds / 1e9,
                seconds * 1e6
            );
        }
        println!();
        Ok(())
    }
}
