//! Measures this machine: memory bandwidth, kernels, the rest of a decode step, the GPU and its link. The measurements are kept in the
//! user's cache folder. They are valid as long as the machine, and the part of it that this process may use, stay the same.

use std::{collections::BTreeMap, fs, io::Write, path::PathBuf, thread};

use powerinfer_artifact::{
    Hint, Progress, counted,
    hardware::{Cpu, Hardware, ReadSpeed},
    write::write_file,
};
use powerinfer_eval::{Contention, CpuTimes, format::percent};
use powerinfer_gpu::{MeasuredGpu, gpu_instances, installed_gpus};
use powerinfer_kernels::Isa;
use powerinfer_pool::{environment, memory_nodes, system, usable_cores};
use powerinfer_runtime::{SpeedTest, Threads, WEIGHT_BYTE};
use powerinfer_tensor::Format;
use serde::{Deserialize, Serialize};

use crate::PlannerError;

/// Identifies a machine for cached measurements.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Fingerprint {
    version: String,
    processor: String,
    threads: usize,
    ram_bytes: u64,
    instruction_set: String,
    /// Processors and memory nodes that this process may use.
    allowed: Vec<String>,
    gpus: Vec<String>,
    /// Instances into which GPUs are divided.
    gpu_instances: Vec<String>,
    /// Values of the environment variables in [`GPU_VARIABLES`], by name.
    visible_gpus: BTreeMap<String, String>,
}

/// Version of the measurements. Raise it if a figure is measured differently, so that older figures in the cache folder are not used.
const FIGURES: u32 = 3;

/// Environment variables that choose the GPU or the order in which GPUs are numbered.
const GPU_VARIABLES: [&str; 3] = [
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
];

/// Content of the file in the cache folder.
#[derive(Debug, Serialize, Deserialize)]
struct CachedHardware {
    fingerprint: Fingerprint,
    hardware: Hardware,
}

impl Fingerprint {
    fn of_this_machine() -> Result<Self, PlannerError> {
        Ok(Self {
            version: format!("{}, figures {FIGURES}", env!("CARGO_PKG_VERSION")),
            processor: system::processor(),
            threads: usable_cores(),
            ram_bytes: system::memory().map_or(0, |(total, _)| total),
            instruction_set: Isa::detect()?.name().to_owned(),
            allowed: system::allowed_resources(),
            gpus: installed_gpus(),
            gpu_instances: gpu_instances(),
            visible_gpus: GPU_VARIABLES
                .into_iter()
                .filter_map(|name| {
                    Some((
                        name.to_owned(),
                        environment::value(name)?.into_string().ok()?,
                    ))
                })
                .collect(),
        })
    }

    /// Whether `hardware` lacks a GPU that this process should see, because its measurement failed, perhaps temporarily.
    fn misses_gpu(&self, hardware: &Hardware) -> bool {
        hardware.gpu.is_none() && !self.gpus.is_empty() && self.visible_gpus.is_empty()
    }
}

fn kept_file() -> Option<PathBuf> {
    Some(environment::cache_folder()?.join("hardware.json"))
}

/// This machine's hardware from an earlier measurement; `None` if it was never measured or has changed since.
pub(crate) fn kept() -> Result<Option<Hardware>, PlannerError> {
    let fingerprint = Fingerprint::of_this_machine()?;
    let kept = kept_file().and_then(|file| fs::read(file).ok());
    let kept = kept.and_then(|bytes| serde_json::from_slice::<CachedHardware>(&bytes).ok());
    let kept = kept.filter(|kept| kept.fingerprint == fingerprint);
    let hardware = kept.map(|kept| kept.hardware);
    Ok(hardware.filter(|hardware| hardware.validate().is_ok()))
}

/// Default number of threads: the number that decoded fastest when this machine was measured, or one per core if it was not
/// measured.
pub fn usual_threads() -> usize {
    let hardware = kept().ok().flatten();
    hardware.map_or_else(usable_cores, |hardware| hardware.cpu.threads)
}

/// Returns this machine's hardware, with its fastest number of threads, from the cache folder. If the file is missing or the
/// machine has changed, measures the machine, which takes seconds, and keeps the result there.
///
/// # Errors
///
/// Fails like [`measure`].
pub fn this_machine(progress: &dyn Progress) -> Result<Hardware, PlannerError> {
    if let Some(hardware) = kept()? {
        return Ok(hardware);
    }
    progress.note("measuring this machine, once …");
    // Kept even if the machine was busy: new measurements would change the plan's inputs, so bundles would be packed again.
    let measured = measure(None, Thoroughness::Quick, progress)?;
    let kept = keep(&measured)?;
    let hardware = measured.hardware;
    match kept {
        None => progress.note("the measurements cannot be kept, so the next plan measures again"),
        Some(file) => progress.detail(&format!("kept in `{}`", file.display())),
    }
    // Returns the hardware as the next plan will read it: numbers in text may differ in the last bit.
    let text = serde_json::to_string(&hardware);
    Ok(text
        .and_then(|text| serde_json::from_str(&text))
        .unwrap_or(hardware))
}

/// This machine's `hardware` with the speed of GEMMs measured again, because the machine's load may have changed since the earlier
/// measurement. If the speed cannot be measured, returns `hardware` unchanged.
pub fn with_current_speed(mut hardware: Hardware) -> Hardware {
    const WINDOW: usize = 16 << 20;
    let speeds = || {
        let pool = Threads::new(Isa::detect()?, hardware.cpu.threads)?;
        let test = speed_test(WINDOW, 2 * WINDOW as u64)?;
        Ok::<_, PlannerError>(gemm_speeds(&test, &pool))
    };
    if let Ok([operations, float_operations]) = speeds() {
        hardware.cpu.operations_per_second = Some(operations);
        hardware.cpu.float_operations_per_second = Some(float_operations);
    }
    hardware
}

/// Operations per second of GEMMs with quantised weights and with float weights.
fn gemm_speeds(test: &SpeedTest, pool: &Threads) -> [f64; 2] {
    const ROUNDS: usize = 5;
    [Format::Q8_0, Format::F16].map(|format| {
        let mut speeds = [0.0; ROUNDS].map(|_| test.operations(pool, format));
        speeds.sort_unstable_by(f64::total_cmp);
        speeds[ROUNDS / 2]
    })
}

/// Keeps the hardware of `measured` in the cache folder as this machine's hardware, and returns the file. Returns `None` if there is
/// no cache folder, the file cannot be written, the number of threads was prescribed, or an installed GPU could not be measured.
///
/// # Errors
///
/// The CPU is not supported.
pub fn keep(measured: &MeasuredMachine) -> Result<Option<PathBuf>, PlannerError> {
    let (hardware, fingerprint) = (&measured.hardware, Fingerprint::of_this_machine()?);
    if measured.has_prescribed_threads || fingerprint.misses_gpu(hardware) {
        return Ok(None);
    }
    let kept = CachedHardware {
        fingerprint,
        hardware: hardware.clone(),
    };
    let Some((file, bytes)) = kept_file().zip(serde_json::to_vec_pretty(&kept).ok()) else {
        return Ok(None);
    };
    Ok(write_file(&file, &bytes).is_ok().then_some(file))
}

/// Extent of the measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thoroughness {
    /// All sizes.
    Full,
    /// Fewer sizes and bytes, which takes a few seconds.
    Quick,
}

impl Thoroughness {
    /// Bytes of weights that a measurement reads at a time.
    fn window_bytes(self) -> usize {
        match self {
            Self::Full => 64 << 20,
            Self::Quick => 32 << 20,
        }
    }

    /// Maximum size of the file to read from, in bytes. With [`Self::Quick`], the caches of a server's processor may hold all of it.
    fn most_bytes(self) -> u64 {
        match self {
            Self::Full => 1 << 30,
            Self::Quick => 160 << 20,
        }
    }

    /// Row lengths in weights: common hidden sizes.
    fn columns(self) -> &'static [usize] {
        match self {
            Self::Full => &[512, 1024, 2048, 4096, 8192, 14336],
            Self::Quick => &[1024, 4096],
        }
    }

    /// Row sizes of plain reads, in bytes; the last one is a stream.
    fn row_bytes(self) -> &'static [usize] {
        match self {
            Self::Full => &[256, 1024, 4096, 16 << 10, 64 << 10, 4 << 20],
            Self::Quick => &[4096, 4 << 20],
        }
    }
}

/// How often each kernel is measured if the results agree.
const PASSES: usize = 2;

/// A measured machine.
#[derive(Debug)]
pub struct MeasuredMachine {
    /// The machine.
    pub hardware: Hardware,
    /// The GPU's driver, or the reason why no GPU was measured.
    pub gpu_status: String,
    /// Whether the number of threads was prescribed instead of measured.
    pub has_prescribed_threads: bool,
    /// Whether other programs were using so much of the CPU that the values may be too low.
    pub is_disturbed: bool,
}

/// Measures this machine with one thread and with `threads` threads. If `threads` is `None`, uses the number that decodes fastest.
///
/// # Errors
///
/// The CPU is not supported, the temporary file cannot be written, a value is invalid, or `progress` interrupts.
#[expect(clippy::missing_panics_doc, reason = "at least one size is measured")]
pub fn measure(
    threads: Option<usize>,
    thoroughness: Thoroughness,
    progress: &dyn Progress,
) -> Result<MeasuredMachine, PlannerError> {
    let isa = Isa::detect()?;
    let test = speed_test(thoroughness.window_bytes(), thoroughness.most_bytes())?;
    let has_prescribed_threads = threads.is_some();
    let threads = match threads {
        Some(threads) => threads,
        None => fastest_count(&test, isa)?,
    };
    // Plans use the speed of all threads, and their speedup over one thread.
    let mut counts = vec![1, threads];
    counts.dedup();
    let (sizes, lengths) = (thoroughness.row_bytes(), thoroughness.columns());
    let figures = counts.len() * (sizes.len() + lengths.len() * Format::ALL.len()) + 2;
    progress.begin("measuring", figures as u64, "figures");
    let before = CpuTimes::now();
    let (mut reads, mut kernels) = (Vec::new(), Vec::new());
    for count in &counts {
        for row_bytes in sizes {
            reads.push(ReadSpeed {
                threads: *count,
                row_bytes: *row_bytes as u64,
                bytes_per_second: test.read(isa, *count, *row_bytes, PASSES),
            });
            progress.advance(1)?;
        }
    }
    for format in Format::ALL {
        for count in &counts {
            let pool = Threads::new(isa, *count)?;
            let starting = test.kernel_seconds(&pool)?;
            for columns in lengths {
                kernels.push(test.kernels(&pool, format, *columns, PASSES, starting));
                progress.advance(1)?;
            }
        }
    }
    let pool = Threads::new(isa, threads)?;
    let other = test.decode_overheads(&pool)?;
    let [operations, float_operations] = gemm_speeds(&test, &pool);
    let disturbance = disturbance(before.since(threads));
    progress.advance(1)?;
    let gpu = MeasuredGpu::measure();
    progress.advance(1)?;
    progress.end();
    if let Some(line) = &disturbance {
        progress.advise(line, Hint::MeasureWhenIdle);
    }
    let stream = reads
        .last()
        .expect("at least one size is measured")
        .bytes_per_second;
    let mut hardware = Hardware {
        name: "this machine".to_owned(),
        description: format!("{}, {}", system::processor(), counted(threads, "thread")),
        cpu: Cpu {
            threads,
            read_bandwidth_bytes_per_second: stream,
            ram_bytes: system::memory().map_or(0, |(total, _)| total),
            row_seconds: 0.0,
            sum_row_seconds: 0.0,
            kernel_seconds: other.kernel_seconds,
            hidden_seconds: other.hidden_seconds,
            neuron_seconds: other.neuron_seconds,
            vocabulary_seconds: other.vocabulary_seconds,
            layer_seconds: 0.0,
            token_seconds: 0.0,
            operations_per_second: Some(operations),
            float_operations_per_second: Some(float_operations),
            reads,
            kernels,
        },
        gpu: None,
        sources: BTreeMap::new(),
    };
    // Figures without a format are those of q8_0, the most common format.
    let typical = Format::Q8_0.row_bytes(4096) as f64;
    let rates = hardware.cpu.rates(Format::Q8_0, threads, typical);
    hardware.cpu.row_seconds = rates.row_seconds;
    hardware.cpu.sum_row_seconds = rates.sum_row_seconds;
    let mut source =
        |figure: &str, text: &str| hardware.sources.insert(figure.to_owned(), text.to_owned());
    let measured = "measured by `powerinfer doctor`";
    let of_threads = if has_prescribed_threads {
        "prescribed".to_owned()
    } else {
        format!("{measured}: decodes fastest")
    };
    source("cpu.threads", &of_threads);
    source("cpu.ram_bytes", "reported by the system");
    source(
        "cpu.read_bandwidth_bytes_per_second",
        &format!("{measured}: a stream, vector loads"),
    );
    source(
        "cpu.reads",
        &format!(
            "{measured}: a random tenth of the rows, vector loads with lines in flight across rows; and a stream"
        ),
    );
    source(
        "cpu.kernels",
        &format!("{measured}: the kernels of decoding, instruction set {isa}"),
    );
    for figure in ["row_seconds", "sum_row_seconds"] {
        source(
            &format!("cpu.{figure}"),
            &format!("from `cpu.kernels`: rows of {typical} bytes in q8_0"),
        );
    }
    for figure in [
        "kernel_seconds",
        "hidden_seconds",
        "neuron_seconds",
        "vocabulary_seconds",
        "operations_per_second",
        "float_operations_per_second",
    ] {
        source(&format!("cpu.{figure}"), measured);
    }
    let gpu_status = match gpu {
        Err(reason) => reason,
        Ok(MeasuredGpu {
            gpu,
            driver,
            sources,
        }) => {
            for (figure, text) in sources {
                source(figure, &text);
            }
            hardware.gpu = Some(gpu);
            format!("NVIDIA driver {driver}")
        }
    };
    hardware.validate()?;
    Ok(MeasuredMachine {
        hardware,
        gpu_status,
        has_prescribed_threads,
        is_disturbed: disturbance.is_some(),
    })
}

/// Number of threads that decodes fastest. One per core if other programs are busy, because they make fewer threads look faster.
fn fastest_count(test: &SpeedTest, isa: Isa) -> Result<usize, PlannerError> {
    let (cores, before) = (usable_cores(), CpuTimes::now());
    let fastest = test.fastest(isa, &thread_counts())?;
    if before.since(cores).is_disturbed() {
        Ok(cores)
    } else {
        Ok(fastest)
    }
}

/// Numbers of threads to try, ascending: half, three quarters and all of the cores, and all processors if there is only
/// one memory node. Several processors may share a core.
fn thread_counts() -> Vec<usize> {
    let cores = usable_cores();
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let mut counts = vec![cores.div_ceil(2), (3 * cores).div_ceil(4), cores];
    if memory_nodes() == 1 {
        counts.push(processors);
    }
    counts.dedup();
    counts
}

/// Warning for measurements under `contention`; `None` if contention was low.
fn disturbance(contention: Contention) -> Option<String> {
    let shares = [contention.waited, contention.stolen];
    let largest = shares.into_iter().flatten().fold(0.0, f64::max);
    contention.is_disturbed().then(|| {
        format!(
            "the machine was busy, other programs took {} of the processor: the figures may be low",
            percent(largest)
        )
    })
}

/// Opens a speed test that reads `window_bytes` bytes of weights at a time from a mapped temporary file. The file is larger than
/// twice the processor's cache, unless that exceeds `most_bytes` bytes or a quarter of the free memory.
///
/// # Errors
///
/// The file cannot be written or mapped.
pub fn speed_test(window_bytes: usize, most_bytes: u64) -> Result<SpeedTest, PlannerError> {
    let memory = system::memory().map_or(most_bytes, |(_, free)| free / 4);
    let window = window_bytes as u64;
    let bytes = 2 * system::cache_bytes() + 2 * window;
    let bytes = bytes.min(memory).min(most_bytes).max(window) as usize;
    let mut file = tempfile::NamedTempFile::new().map_err(PlannerError::Temporary)?;
    let piece = vec![WEIGHT_BYTE; 1 << 20];
    for _ in 0..bytes / piece.len() {
        file.write_all(&piece).map_err(PlannerError::Temporary)?;
    }
    file.flush().map_err(PlannerError::Temporary)?;
    Ok(SpeedTest::open(file.path(), window_bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_could_not_be_measured_is_not_kept_as_missing() {
        let hardware = |name| powerinfer_artifact::hardware::named(name).unwrap();
        let mut fingerprint = Fingerprint::of_this_machine().unwrap();
        fingerprint.gpus = vec!["GPU, driver 1".to_owned()];
        fingerprint.visible_gpus.clear();
        assert!(fingerprint.misses_gpu(&hardware("cpu-only")));
        assert!(!fingerprint.misses_gpu(&hardware("rtx4090")));
        let mut hidden = fingerprint.clone();
        let variable = ("CUDA_VISIBLE_DEVICES".to_owned(), String::new());
        hidden.visible_gpus.extend([variable]);
        assert!(!hidden.misses_gpu(&hardware("cpu-only")));
        assert_ne!(hidden, fingerprint);
    }

    #[test]
    fn figures_of_a_busy_machine_are_marked() {
        let waited = |share| Contention {
            waited: Some(share),
            ..Contention::default()
        };
        assert_eq!(disturbance(waited(0.01)), None);
        let line = disturbance(waited(0.25)).unwrap();
        assert!(
            line.contains("25.0%") && line.contains("may be low"),
            "{line}"
        );
    }
}
