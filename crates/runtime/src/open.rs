//! Opens a bundle to run it: memory, threads and GPU.

use std::{sync::Arc, thread};

use powerinfer_artifact::{
    ByteSize, Hint, Progress, counted,
    mapped_file::Residence,
    plan::{Device, Plan, Policy, RESERVE},
};
use powerinfer_bundle::Bundle;
use powerinfer_kernels::{
    Isa,
    cuda::{CudaDevice, CudaUnavailable, Device as Gpu},
};
use powerinfer_pool::{memory_nodes, system};

use crate::{ActivationFormat, Engine, Options, RuntimeError, Threads};

/// Device of the parts that a plan puts on a GPU.
#[derive(Clone)]
pub enum DeviceChoice {
    /// The CPU.
    Cpu,
    /// The GPU, or the CPU without one.
    Auto,
    /// The GPU; an error without one.
    Gpu,
    /// A given device, such as an emulator.
    Given(Arc<dyn Gpu>),
}

/// How to execute a bundle.
#[derive(Clone)]
pub struct Execution {
    /// Threads of the CPU.
    pub threads: usize,
    /// Format of the vectors that quantised weights are multiplied with.
    pub activations: ActivationFormat,
    /// How the weights reside in memory.
    pub residence: Residence,
    /// Device of the parts that the plan puts on a GPU.
    pub device: DeviceChoice,
}

impl Execution {
    /// On `threads` threads of the CPU, without a GPU.
    pub fn on_cpu(threads: usize) -> Self {
        Self {
            threads,
            activations: ActivationFormat::default(),
            residence: Residence::default(),
            device: DeviceChoice::Cpu,
        }
    }
}

/// An open device.
enum Opened {
    Cuda(Arc<CudaDevice>),
    Given(Arc<dyn Gpu>),
}

impl DeviceChoice {
    /// Opens the GPU; none for the CPU, and for `Auto` without a GPU; then `missing` is called with the reason.
    ///
    /// # Errors
    ///
    /// Fails for `Gpu` without a GPU.
    pub fn open(
        &self,
        missing: impl FnOnce(&CudaUnavailable),
    ) -> Result<Option<Arc<dyn Gpu>>, RuntimeError> {
        Ok(self.opened(missing)?.map(|opened| match opened {
            Opened::Cuda(card) => card as Arc<dyn Gpu>,
            Opened::Given(device) => device,
        }))
    }

    fn opened(
        &self,
        missing: impl FnOnce(&CudaUnavailable),
    ) -> Result<Option<Opened>, RuntimeError> {
        match self {
            Self::Cpu => return Ok(None),
            Self::Given(device) => return Ok(Some(Opened::Given(Arc::clone(device)))),
            Self::Auto | Self::Gpu => {}
        }
        match CudaDevice::open(0) {
            Ok(card) => Ok(Some(Opened::Cuda(Arc::new(card)))),
            Err(reason) if matches!(self, Self::Gpu) => Err(RuntimeError::NoGpu(reason)),
            Err(reason) => {
                missing(&reason);
                Ok(None)
            }
        }
    }
}

impl Engine {
    /// Opens `bundle` to run it with `policy` in all layers, or with the policies of its plan: reads it ahead if it fits into memory, starts the threads, and copies what the
    /// plan puts on a GPU to it.
    ///
    /// # Errors
    ///
    /// As [`Engine::new`] and [`Engine::with_device`]; a GPU is requested and missing or unused by
    /// the plan, the plan is for several, or more of its memory is in use than the plan's budget.
    pub fn open(
        mut bundle: Bundle,
        policy: Option<Policy>,
        execution: &Execution,
        progress: &dyn Progress,
    ) -> Result<Self, RuntimeError> {
        let gpus = bundle.plan().budget.vram_split.len();
        if gpus > 1 && !matches!(execution.device, DeviceChoice::Cpu) {
            return Err(RuntimeError::SeveralGpus { gpus });
        }
        let fits = fits_memory(&bundle, progress);
        if fits && execution.residence != Residence::Loaded {
            bundle.read_ahead(progress)?;
        }
        bundle.set_residence(execution.residence)?;
        let threads = execution.threads;
        warn_about_threads(threads, progress);
        let isa = Isa::detect()?;
        progress.detail(&format!("kernels: {}, threads: {threads}", isa.name()));
        let options = Options {
            threads: Threads::new(isa, threads)?.with_activations(execution.activations),
            policy,
        };
        match device(bundle.plan(), &execution.device, progress)? {
            Some(Opened::Cuda(card)) => run_on(card, bundle, options, progress),
            Some(Opened::Given(device)) => {
                let engine = Self::with_device(bundle, options, device)?;
                detail_memory(&engine, None, progress);
                Ok(engine)
            }
            None => Self::new(bundle, options),
        }
    }
}

/// Notes if there are more `threads` than processors, or if this process may use several memory nodes.
pub fn warn_about_threads(threads: usize, progress: &dyn Progress) {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    if threads > processors {
        progress.note(&format!(
            "{threads} threads for {} will be slower than one thread for each core",
            counted(processors, "processor")
        ));
    }
    let nodes = memory_nodes();
    if nodes > 1 {
        progress.note(&format!(
            "this machine has {nodes} memory nodes: by default, at most one thread per core of one node is started; \
             run with `numactl --cpunodebind 0 --membind 0` to keep threads and weights on one node"
        ));
    }
}

/// Whether a bundle fits into memory; notes if it does not.
fn fits_memory(bundle: &Bundle, progress: &dyn Progress) -> bool {
    let bytes = bundle.bytes();
    let Some((_, free)) = system::memory() else {
        return true;
    };
    if bytes > free {
        let line = format!(
            "the bundle's {} do not fit the {} of memory that are free: what does not is read from disk for every token",
            ByteSize(bytes),
            ByteSize(free)
        );
        progress.advise(&line, Hint::SmallerFormat);
    }
    bytes <= free
}

/// The device of the parts that `plan` puts on a GPU; none without such parts, or if they run on the CPU.
fn device(
    plan: &Plan,
    choice: &DeviceChoice,
    progress: &dyn Progress,
) -> Result<Option<Opened>, RuntimeError> {
    match (choice, plan.uses_gpu()) {
        // A missing GPU is reported first: without one, another plan would not help.
        (DeviceChoice::Gpu, false) => choice.opened(|_| {}).and(Err(RuntimeError::NothingOnGpu)),
        (_, false) => Ok(None),
        (_, true) => choice.opened(|reason| {
            progress.note(&format!(
                "no GPU is used, so {} run on the CPU too ({reason})",
                describe(plan)
            ));
        }),
    }
}

/// Loads `bundle` for `card` and the CPU, and notes what is where.
///
/// # Errors
///
/// More of the card's memory is in use than the plan's budget.
fn run_on(
    card: Arc<CudaDevice>,
    bundle: Bundle,
    options: Options,
    progress: &dyn Progress,
) -> Result<Engine, RuntimeError> {
    let budget = bundle.plan().budget.vram_bytes;
    let (what, planned) = (describe(bundle.plan()), bundle.plan().totals.gpu_bytes);
    let (free, _) = card.memory()?;
    let runtime = Engine::with_device(bundle, options, Arc::clone(&card) as _)?;
    card.synchronise()?;
    // The driver's own count, whatever was computed before.
    let (left, _) = card.memory()?;
    let taken = (free.saturating_sub(left) + card.kernel_bytes()) as u64;
    if budget > 0 && taken > budget {
        return Err(RuntimeError::TakesMore { taken, budget });
    }
    progress.note(&format!(
        "{}: {what}; {} taken, {} planned, of a budget of {}; prompts run {} tokens at a time",
        card.info().name,
        ByteSize(taken),
        ByteSize(planned),
        ByteSize(budget),
        runtime.prompt_batch()
    ));
    detail_memory(&runtime, Some(taken), progress);
    Ok(runtime)
}

/// Prints the planned and actual bytes of each line of the plan's device memory. The actual reserve is `taken`, if known, minus the
/// other lines.
fn detail_memory(engine: &Engine, taken: Option<u64>, progress: &dyn Progress) {
    let held = engine.memory();
    let held: Vec<_> = held
        .iter()
        .filter(|held| held.device == Device::Gpu)
        .collect();
    let all: u64 = held.iter().map(|held| held.bytes).sum();
    let lines = engine.bundle().plan().lines.iter();
    for line in lines.filter(|line| line.device == Device::Gpu) {
        let bytes = if line.name == RESERVE {
            taken.map(|taken| taken.saturating_sub(all))
        } else {
            let own = held.iter().find(|held| held.line == line.name);
            Some(own.map_or(0, |held| held.bytes))
        };
        if let Some(bytes) = bytes {
            let (planned, bytes) = (ByteSize(line.bytes), ByteSize(bytes));
            progress.detail(&format!(
                "{:<12} {planned} planned, {bytes} taken",
                line.name
            ));
        }
    }
}

/// Names the parts that `plan` puts on a GPU.
fn describe(plan: &Plan) -> String {
    let layers = plan.layers.len();
    let attention = plan
        .layers
        .iter()
        .filter(|layer| layer.attention == Device::Gpu)
        .count();
    let (hot, neurons) = (plan.totals.hot_count, plan.totals.neuron_count);
    let head = match plan.head {
        Device::Gpu => " and the head",
        Device::Cpu => "",
    };
    format!("{hot} of {neurons} neurons, attention of {attention} of {layers} layers{head}")
}
