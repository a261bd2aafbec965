//! The GPU that a bundle runs on, or why it runs on the CPU alone.

use std::{env, sync::Arc};

use anyhow::{Result, bail};
use powerinfer_artifact::{
    ByteSize,
    plan::{Device, Plan},
};
use powerinfer_bundle::Bundle;
use powerinfer_kernels::cuda::{CudaDevice, CudaUnavailable, Device as Gpu};
use powerinfer_runtime::{Options, Runtime};

use super::DeviceArgument;
use crate::output::Output;

/// Makes a missing GPU an error.
const REQUIRED_VARIABLE: &str = "POWERINFER_REQUIRE_GPU";

/// What there is to run on beside the CPU.
pub(super) enum Opened {
    /// An NVIDIA GPU.
    Cuda(CudaDevice),
    /// The emulated GPU.
    #[cfg(feature = "emulator")]
    Emulator(Arc<dyn Gpu>),
}

/// The emulated GPU.
#[cfg(feature = "emulator")]
fn emulator() -> Result<Arc<dyn Gpu>> {
    use powerinfer_emulator::{Emulator, Order};
    match Emulator::new(2, Order::Forward) {
        Some(emulator) => Ok(Arc::new(emulator)),
        None => bail!(
            "there was no C++ compiler when this program was built, so it has no emulator; leave `--device emulated` out"
        ),
    }
}

/// The card for what `plan` puts on one; none where that is nothing, or where `asked` is for the CPU.
///
/// Fails where there is no card and one is asked for.
pub(super) fn open(plan: &Plan, asked: DeviceArgument, output: Output) -> Result<Option<Opened>> {
    match (asked, plan.uses_gpu()) {
        (DeviceArgument::Cpu, _) => return Ok(None),
        (DeviceArgument::Gpu, false) => bail!(
            "the plan puts nothing on a GPU; place the bundle again with `--vram`, or leave `--device` out"
        ),
        (_, false) => return Ok(None),
        #[cfg(feature = "emulator")]
        (DeviceArgument::Emulated, true) => return Ok(Some(Opened::Emulator(emulator()?))),
        _ => {}
    }
    match CudaDevice::open(0) {
        Ok(card) => Ok(Some(Opened::Cuda(card))),
        Err(reason) if is_required(asked) => missing(&reason),
        Err(reason) => {
            output.say(format!(
                "no GPU is used, so {} run on the CPU too ({reason})",
                describe(plan)
            ));
            Ok(None)
        }
    }
}

/// What would run what a plan puts on a GPU, by name; none where that is the CPU. Opens it to see, and lets it go.
///
/// Fails where there is no card and one is asked for.
pub(crate) fn available(asked: DeviceArgument, output: Output) -> Result<Option<String>> {
    match asked {
        DeviceArgument::Cpu => return Ok(None),
        #[cfg(feature = "emulator")]
        DeviceArgument::Emulated => return Ok(Some(emulator()?.info().name.clone())),
        _ => {}
    }
    match CudaDevice::open(0) {
        Ok(card) => Ok(Some(card.info().name.clone())),
        Err(reason) if is_required(asked) => missing(&reason),
        Err(reason) => {
            output.detail(format!("placements are not run, but predicted ({reason})"));
            Ok(None)
        }
    }
}

/// The card to profile on; none where there is none, or where `asked` is for the CPU.
///
/// Fails where there is no card and one is asked for.
pub(crate) fn to_profile(asked: DeviceArgument, output: Output) -> Result<Option<Arc<dyn Gpu>>> {
    if asked == DeviceArgument::Cpu {
        return Ok(None);
    }
    #[cfg(feature = "emulator")]
    if asked == DeviceArgument::Emulated {
        return Ok(Some(emulator()?));
    }
    match CudaDevice::open(0) {
        Ok(card) => {
            let name = &card.info().name;
            output.say(format!("{name}: layers run there, one after the other"));
            Ok(Some(Arc::new(card)))
        }
        Err(reason) if is_required(asked) => missing(&reason),
        Err(reason) => {
            output.detail(format!("the CPU profiles ({reason})"));
            Ok(None)
        }
    }
}

fn is_required(asked: DeviceArgument) -> bool {
    asked == DeviceArgument::Gpu || env::var_os(REQUIRED_VARIABLE).is_some()
}

fn missing<T>(reason: &CudaUnavailable) -> Result<T> {
    bail!("no GPU can be used: {reason}; `--device cpu` runs without one")
}

/// Makes `bundle` ready on `card` and the CPU, and says what is where.
///
/// Fails where more of the card is taken than the plan has for it.
pub(super) fn run_on(
    card: CudaDevice,
    bundle: Bundle,
    options: Options,
    output: Output,
) -> Result<Runtime> {
    let budget = bundle.plan().budget.vram_bytes;
    let what = describe(bundle.plan());
    let card = Arc::new(card);
    let (free, _) = card.memory()?;
    let runtime = Runtime::with_device(bundle, options, Arc::clone(&card) as _)?;
    card.synchronise()?;
    // The driver's own count, whatever was computed before.
    let (left, _) = card.memory()?;
    let taken = free.saturating_sub(left) as u64;
    if budget > 0 && taken > budget {
        bail!(
            "{} of the GPU's memory are taken, but the plan has a budget of {}; place the bundle again with a smaller `--vram`",
            ByteSize(taken),
            ByteSize(budget)
        );
    }
    output.say(format!(
        "{}: {what}; {} taken of a budget of {}; prompts run {} tokens at a time",
        card.info().name,
        ByteSize(taken),
        ByteSize(budget),
        runtime.prompt_batch()
    ));
    Ok(runtime)
}

/// What `plan` puts on a GPU.
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
