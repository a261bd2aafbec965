//! From a bundle on disk to a model ready to run.

use anyhow::Result;
use clap::ValueEnum;
use powerinfer_artifact::{ByteSize, mapped_file::Residence, plan::Policy};
use powerinfer_bundle::{Bundle, Verification};
use powerinfer_kernels::Isa;
use powerinfer_runtime::{ActivationFormat, Options, PolicyChoice, Runtime, Threads};

pub(crate) mod evaluated;
pub(crate) mod gpu;

use crate::{
    machine::cores::{usable_cores, warn_of_too_many},
    model_argument::bundle_folder,
    output::Output,
    progress::Bar,
};

/// Which neurons to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PolicyArgument {
    /// All neurons
    Dense,
    /// Every gate, then only the neurons it leaves alive; the same result as dense for ReLU
    Exact,
    /// Only the neurons that the predictor predicts; approximate
    Predicted,
    /// Only the neurons that the signs of their gates speak for; approximate
    SignBit,
    /// Only the neurons whose score reaches the layer's threshold; approximate
    Threshold,
}

impl From<PolicyArgument> for Policy {
    fn from(argument: PolicyArgument) -> Self {
        match argument {
            PolicyArgument::Dense => Self::Dense,
            PolicyArgument::Exact => Self::Exact,
            PolicyArgument::Predicted => Self::Predicted,
            PolicyArgument::SignBit => Self::SignBit,
            PolicyArgument::Threshold => Self::Threshold,
        }
    }
}

/// How to execute a bundle.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Execution")]
pub(crate) struct EngineArguments {
    /// Threads to compute with [default: one per physical core]
    #[arg(short, long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Which neurons to compute [default: what the plan says, layer by layer]
    #[arg(long, value_name = "POLICY")]
    pub(crate) policy: Option<PolicyArgument>,
    /// Format of what quantised weights are multiplied with
    #[arg(long, value_name = "FORMAT", default_value = "int8")]
    pub(crate) activations: ActivationArgument,
    /// Never give the weights' memory up for something else
    #[arg(long)]
    pub(crate) mlock: bool,
    /// Read the weights into memory instead of mapping their file: it starts later, and reads sparse
    /// rows faster where the system has huge pages
    #[arg(long, conflicts_with = "mlock")]
    pub(crate) no_mmap: bool,
    /// What runs the parts that the plan puts on a GPU
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: DeviceArgument,
}

/// What runs the parts that a plan puts on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceArgument {
    /// The GPU, or the CPU where there is none
    Auto,
    /// The CPU
    Cpu,
    /// The GPU; an error where there is none
    Gpu,
    /// The GPU's kernels on the processor, thousands of times slower
    #[cfg(feature = "emulator")]
    Emulated,
}

/// How the numbers are stored that weights are multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ActivationArgument {
    /// Bytes with a scale for every 32, for quantised weights
    Int8,
    /// As exact as the weights; slower with quantised ones
    F32,
}

/// What a model runs on, and how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Execution {
    threads: usize,
    activations: ActivationFormat,
    residence: Residence,
    device: DeviceArgument,
}

impl Execution {
    /// On so many threads of the CPU, with what a plan puts on a GPU on `device`.
    pub(crate) fn on(device: DeviceArgument, threads: usize) -> Self {
        Self {
            device,
            ..Self::from(threads)
        }
    }

    /// The same with what a plan puts on a GPU on `device`.
    pub(crate) fn with_device(self, device: DeviceArgument) -> Self {
        Self { device, ..self }
    }

    /// The same, with quantised weights multiplied so.
    pub(crate) fn with_activations(self, activations: ActivationArgument) -> Self {
        Self {
            activations: activations.into(),
            ..self
        }
    }
}

impl From<ActivationArgument> for ActivationFormat {
    fn from(argument: ActivationArgument) -> Self {
        match argument {
            ActivationArgument::Int8 => Self::Int8,
            ActivationArgument::F32 => Self::F32,
        }
    }
}

impl ActivationArgument {
    /// As it is given.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::F32 => "f32",
        }
    }
}

impl From<usize> for Execution {
    /// On so many threads of the CPU, and the rest as usual.
    fn from(threads: usize) -> Self {
        Self {
            threads,
            activations: ActivationFormat::default(),
            residence: Residence::default(),
            device: DeviceArgument::Cpu,
        }
    }
}

impl EngineArguments {
    /// What to run on, and how.
    pub(crate) fn execution(&self) -> Execution {
        Execution {
            threads: self.thread_count(),
            activations: self.activations.into(),
            residence: match (self.no_mmap, self.mlock) {
                (true, _) => Residence::Loaded,
                (false, true) => Residence::Locked,
                (false, false) => Residence::Mapped,
            },
            device: self.device,
        }
    }

    /// The same on the CPU alone.
    pub(crate) fn execution_on_cpu(&self) -> Execution {
        Execution {
            device: DeviceArgument::Cpu,
            ..self.execution()
        }
    }

    fn policy_choice(&self) -> PolicyChoice {
        let forced = |policy: PolicyArgument| PolicyChoice::Forced(policy.into());
        self.policy.map_or(PolicyChoice::Planned, forced)
    }

    /// Threads to use.
    pub(crate) fn thread_count(&self) -> usize {
        self.threads.unwrap_or_else(usable_cores).clamp(1, 1024)
    }
}

/// Opens the bundle meant by `argument` and makes it ready.
pub(crate) fn open_runtime(
    argument: &str,
    engine: &EngineArguments,
    output: Output,
) -> Result<Runtime> {
    let bundle = Bundle::open(&bundle_folder(argument), Verification::Quick)?;
    runtime(bundle, engine.policy_choice(), engine.execution(), output)
}

/// Makes an open bundle ready.
pub(crate) fn runtime(
    mut bundle: Bundle,
    policy: PolicyChoice,
    execution: impl Into<Execution>,
    output: Output,
) -> Result<Runtime> {
    let execution = execution.into();
    let threads = execution.threads;
    let fits = fits_memory(&bundle, output);
    if fits && execution.residence != Residence::Loaded {
        bundle.read_ahead(&Bar::new(output))?;
    }
    bundle.hold(execution.residence)?;
    let plan = bundle.plan();
    let gpus = plan.budget.vram_split.len();
    if gpus > 1 {
        output.say(format!(
            "the plan is for {gpus} GPUs, which nothing runs on yet: it tells what they would bring"
        ));
    }
    warn_of_too_many(threads, output);
    let isa = Isa::detect()?;
    output.detail(format!("kernels: {}, threads: {threads}", isa.name()));
    let options = Options {
        threads: Threads::new(isa, threads)?.with_activations(execution.activations),
        policy,
    };
    match gpu::open(bundle.plan(), execution.device, output)? {
        Some(gpu::Opened::Card(card)) => gpu::run_on(card, bundle, options, output),
        #[cfg(feature = "emulator")]
        Some(gpu::Opened::Emulator(device)) => Ok(Runtime::with_device(bundle, options, device)?),
        None => Ok(Runtime::new(bundle, options)?),
    }
}

/// Whether memory has room for all of a bundle; says so where it has not.
fn fits_memory(bundle: &Bundle, output: Output) -> bool {
    let bytes = bundle.bytes();
    let Some((_, free)) = crate::machine::memory() else {
        return true;
    };
    if bytes > free {
        output.say(format!(
            "the bundle's {} do not fit the {} of memory that are free: what does not is read from disk for every token; a smaller `--quant` at `place` would fit",
            ByteSize(bytes), ByteSize(free)
        ));
    }
    bytes <= free
}
