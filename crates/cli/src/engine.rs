//! From a bundle on disk to a model ready to run.

use std::sync::Arc;

use anyhow::Result;
use clap::ValueEnum;
use powerinfer_artifact::{mapped_file::Residence, plan::Policy};
use powerinfer_kernels::cuda::{CudaUnavailable, Device};
use powerinfer_planner::for_this_machine;
use powerinfer_pool::environment;
use powerinfer_runtime::{ActivationFormat, DeviceChoice, Engine, Execution, Verification};

pub(crate) mod evaluated;

use crate::{
    model_argument::open_bundle, output::Output, progress::Bar, thread_argument::ThreadArgument,
};

/// Which neurons to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PolicyArgument {
    /// All neurons
    Dense,
    /// Gate of all neurons, then up and down of those with a non-zero gate activation; the same result as dense for
    /// ReLU
    Exact,
    /// Only the neurons that the predictor predicts; approximate
    Predicted,
    /// Only the neurons with enough sign agreements between gate row and input; approximate
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
    #[command(flatten)]
    pub(crate) threads: ThreadArgument,
    /// Policy of all layers [default: the plan's, layer by layer]
    #[arg(long, value_name = "POLICY")]
    pub(crate) policy: Option<PolicyArgument>,
    /// Format of the activations that quantised weights are multiplied with
    #[arg(long, value_name = "FORMAT", default_value = "int8")]
    pub(crate) activations: ActivationArgument,
    /// Lock the weights in memory
    #[arg(long)]
    pub(crate) mlock: bool,
    /// Read the weights into memory instead of mapping their file: slower to start, faster on sparse rows if the
    /// system has no huge pages for files
    #[arg(long, conflicts_with = "mlock")]
    pub(crate) no_mmap: bool,
    /// Device of the parts that the plan puts on a GPU
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: DeviceArgument,
}

/// Device of the parts that a plan puts on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceArgument {
    /// The GPU, or the CPU if there is none
    Auto,
    /// The CPU
    Cpu,
    /// The GPU; an error if there is none
    #[value(alias = "cuda")]
    Gpu,
    /// The GPU's kernels on the processor, thousands of times slower
    #[cfg(feature = "emulator")]
    Emulated,
}

/// How the numbers are stored that weights are multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ActivationArgument {
    /// One scale per 32 values, for quantised weights
    Int8,
    /// No rounding; slower with quantised weights
    F32,
}

impl From<ActivationArgument> for ActivationFormat {
    fn from(argument: ActivationArgument) -> Self {
        match argument {
            ActivationArgument::Int8 => Self::Int8,
            ActivationArgument::F32 => Self::F32,
        }
    }
}

impl DeviceArgument {
    /// The device that is meant.
    ///
    /// Fails if it is an emulator that this program was built without.
    pub(crate) fn choice(self) -> Result<DeviceChoice> {
        Ok(match self {
            Self::Cpu => DeviceChoice::Cpu,
            Self::Gpu => DeviceChoice::Gpu,
            Self::Auto if environment::requires_gpu() => DeviceChoice::Gpu,
            Self::Auto => DeviceChoice::Auto,
            #[cfg(feature = "emulator")]
            Self::Emulated => DeviceChoice::Given(emulator()?),
        })
    }

    /// Opens the device, if there is one; the reason why there is none is shown only by `--verbose`.
    pub(crate) fn open(self, without: &str, output: Output) -> Result<Option<Arc<dyn Device>>> {
        let detail = |reason: &CudaUnavailable| output.detail(format!("{without} ({reason})"));
        Ok(self.choice()?.open(detail)?)
    }

    /// Execution on `threads` threads of the CPU, with what a plan puts on a GPU on this device.
    pub(crate) fn execution(self, threads: usize) -> Result<Execution> {
        Ok(Execution {
            device: self.choice()?,
            ..Execution::on_cpu(threads)
        })
    }
}

/// The emulated GPU.
#[cfg(feature = "emulator")]
fn emulator() -> Result<Arc<dyn Device>> {
    use powerinfer_emulator::{Emulator, Order};
    match Emulator::new(2, Order::Forward) {
        Some(emulator) => Ok(Arc::new(emulator)),
        None => anyhow::bail!(crate::hint::Advised::new(
            "there was no C++ compiler when this program was built, so it has no emulator",
            "leave `--device emulated` out"
        )),
    }
}

impl EngineArguments {
    /// Device, threads and memory of a run.
    pub(crate) fn execution(&self) -> Result<Execution> {
        Ok(Execution {
            device: self.device.choice()?,
            ..self.execution_on_cpu()
        })
    }

    /// The same on the CPU alone.
    pub(crate) fn execution_on_cpu(&self) -> Execution {
        Execution {
            activations: self.activations.into(),
            residence: match (self.no_mmap, self.mlock) {
                (true, _) => Residence::Loaded,
                (false, true) => Residence::Locked,
                (false, false) => Residence::Mapped,
            },
            ..Execution::on_cpu(self.threads.count())
        }
    }

    /// Verification of one of `every` decoded tokens; without error bounds if a policy is forced, as it is not certified.
    pub(crate) fn verification(&self, every: u32, engine: &Engine) -> Verification {
        let bundle = engine.bundle();
        match self.policy {
            None => Verification::certified(every as usize, bundle),
            Some(_) => Verification::of_decoded(every as usize, bundle.config().layer_count),
        }
    }

    fn policy(&self) -> Option<Policy> {
        self.policy.map(Policy::from)
    }
}

/// Opens the bundle meant by `argument` and makes it ready.
pub(crate) fn open_engine(
    argument: &str,
    engine: &EngineArguments,
    output: Output,
) -> Result<Engine> {
    let mut bundle = open_bundle(argument)?;
    let (policy, execution) = (engine.policy(), engine.execution()?);
    let bar = Bar::new(output);
    if matches!(execution.device, DeviceChoice::Auto) {
        bundle = for_this_machine(bundle, &bar)?;
    }
    Ok(Engine::open(bundle, policy, &execution, &bar)?)
}
