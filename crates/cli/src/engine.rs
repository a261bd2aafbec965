//! From a bundle on disk to a model ready to run.

use anyhow::Result;
use clap::ValueEnum;
use powerinfer_artifact::plan::Policy;
use powerinfer_bundle::{Bundle, Verification};
use powerinfer_kernels::Isa;
use powerinfer_runtime::{Options, PolicyChoice, Runtime, Threads};

use crate::{
    machine::cores::{usable_cores, warn_of_too_many},
    model_argument::bundle_folder,
    output::Output,
};

/// Which neurons to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PolicyArgument {
    /// All neurons
    Dense,
    /// Every gate, then only the neurons it leaves alive; the same result as dense for ReLU
    Exact,
    /// Only the neurons that the predictor foresees; approximate
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
}

impl EngineArguments {
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
    let policy = engine.policy.map_or(PolicyChoice::Planned, |policy| {
        PolicyChoice::Forced(policy.into())
    });
    runtime(bundle, policy, engine.thread_count(), output)
}

/// Makes an open bundle ready.
pub(crate) fn runtime(
    bundle: Bundle,
    policy: PolicyChoice,
    threads: usize,
    output: Output,
) -> Result<Runtime> {
    let plan = bundle.plan();
    let gpus = plan.budget.vram_split.len();
    if gpus > 1 {
        output.say(format!(
            "the plan is for {gpus} GPUs, which nothing runs on yet: it tells what they would bring"
        ));
    }
    let hot = plan.totals.hot_count;
    if hot > 0 {
        output.say(format!(
            "no GPU is used: the {hot} hot neurons are computed on the CPU like the others ({})",
            crate::machine::gpu_status()
        ));
    }
    warn_of_too_many(threads, output);
    let isa = Isa::detect()?;
    output.detail(format!("kernels: {}, threads: {threads}", isa.name()));
    Ok(Runtime::new(
        bundle,
        Options {
            threads: Threads::new(isa, threads)?,
            policy,
        },
    )?)
}
