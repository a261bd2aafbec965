//! Options that say where things may go and what is best.

use std::str::FromStr;

use anyhow::{Result, bail};
use powerinfer_artifact::{
    ByteSize,
    hardware::Hardware,
    plan::{Budget, Device, Objective},
};
use powerinfer_solver::{Backend, Options, Problem};

use crate::machine;

/// What is best, and what has to be where.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Placement")]
pub(crate) struct PlacementArguments {
    /// What the plan makes as good as it can be
    #[arg(long, value_enum, default_value_t = ObjectiveArgument::Latency)]
    objective: ObjectiveArgument,
    /// What solves it
    #[arg(long, value_enum, default_value_t = SolverArgument::Auto)]
    solver: SolverArgument,
    /// Keep a part on one side: `layers`, `attention` or `head`, of some layers only as in
    /// `layers:0-9=gpu`; may be given several times
    #[arg(long = "pin", value_name = "PART=gpu|cpu")]
    pins: Vec<Pin>,
}

/// What a plan makes as good as it can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ObjectiveArgument {
    /// The least time for a token
    Latency,
    /// The paper's: the most activations on the GPU, attention and the rest there first
    Impact,
}

/// What solves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum SolverArgument {
    /// Whatever proves its answer first
    Auto,
    /// A price on memory, exact choices per layer and an exact search for the rest
    Decomposition,
    /// A mixed integer program, by microlp
    Microlp,
    /// The same by HiGHS, in builds with the feature `highs`
    Highs,
}

/// A part that has to be somewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Pin {
    part: Part,
    /// The layers it speaks of, first and last; all where there are none.
    layers: Option<(usize, usize)>,
    device: Device,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Layers,
    Attention,
    Head,
}

impl FromStr for Pin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            "write what is pinned and where, such as `attention=gpu`, `layers:0-9=cpu` or `head=gpu`"
                .to_owned()
        };
        let (what, device) = text.split_once('=').ok_or_else(wrong)?;
        let device = match device.trim() {
            "gpu" => Device::Gpu,
            "cpu" => Device::Cpu,
            _ => return Err(wrong()),
        };
        let (part, layers) = match what.split_once(':') {
            Some((part, layers)) => (part, Some(layers)),
            None => (what, None),
        };
        let part = match part.trim() {
            "layers" => Part::Layers,
            "attention" => Part::Attention,
            "head" if layers.is_none() => Part::Head,
            _ => return Err(wrong()),
        };
        let number = |text: &str| text.trim().parse::<usize>().map_err(|_| wrong());
        let layers = layers
            .map(|layers| match layers.split_once('-') {
                Some((first, last)) => Ok((number(first)?, number(last)?)),
                None => number(layers).map(|layer| (layer, layer)),
            })
            .transpose()?;
        match layers {
            Some((first, last)) if first > last => Err(wrong()),
            _ => Ok(Self {
                part,
                layers,
                device,
            }),
        }
    }
}

impl PlacementArguments {
    /// As the solver takes them.
    pub(super) fn options(&self) -> Options {
        Options {
            objective: match self.objective {
                ObjectiveArgument::Latency => Objective::Latency,
                ObjectiveArgument::Impact => Objective::Impact,
            },
            backend: match self.solver {
                SolverArgument::Auto => Backend::Auto,
                SolverArgument::Decomposition => Backend::Decomposition,
                SolverArgument::Microlp => Backend::Microlp,
                SolverArgument::Highs => Backend::Highs,
            },
            ..Options::default()
        }
    }

    /// Pins parts of `problem`.
    pub(super) fn pin(&self, problem: &mut Problem) -> Result<()> {
        let count = problem.layers.len();
        for pin in &self.pins {
            let (first, last) = pin.layers.unwrap_or((0, count.saturating_sub(1)));
            if last >= count {
                bail!(
                    "`--pin` speaks of layer {last}; the model has layers 0 to {}",
                    count - 1
                );
            }
            let mut slots: Vec<&mut Option<Device>> = Vec::new();
            match pin.part {
                Part::Head => slots.push(&mut problem.head_pin),
                Part::Attention => {
                    let layers = problem.layers[first..=last].iter_mut();
                    slots.extend(layers.map(|layer| &mut layer.pins.attention));
                }
                Part::Layers => {
                    for layer in &mut problem.layers[first..=last] {
                        slots.push(&mut layer.pins.attention);
                        slots.push(&mut layer.pins.neurons);
                    }
                }
            }
            for slot in slots {
                if slot.is_some_and(|device| device != pin.device) {
                    bail!("`--pin` wants the same part on both sides; leave out one of them");
                }
                *slot = Some(pin.device);
            }
        }
        Ok(())
    }

    /// What decides a plan beside the budget, for a request to be recognised by.
    pub(super) fn settings(&self) -> String {
        format!("{:?} {:?} {:?}", self.objective, self.solver, self.pins)
    }
}

/// Memory to use on the GPU, or on each of several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum VramArgument {
    /// What is free now, less a reserve.
    Auto,
    /// So much on each.
    Sizes(Vec<ByteSize>),
}

/// What `auto` leaves to others on a card: a desktop that draws another window.
const LEFT_FREE: u64 = 256 << 20;
/// `auto` rounds down to multiples of this, so that little comings and goings give the same plan.
const ROUNDED_TO: u64 = 64 << 20;

impl FromStr for VramArgument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim() == "auto" {
            return Ok(Self::Auto);
        }
        let sizes = text
            .split(',')
            .map(|size| size.parse::<ByteSize>().map_err(|error| error.to_string()))
            .collect::<Result<Vec<_>, _>>()?;
        match sizes.len() > 1 && sizes.contains(&ByteSize(0)) {
            true => Err("leave out GPUs that may not be used".to_owned()),
            false => Ok(Self::Sizes(sizes)),
        }
    }
}

impl VramArgument {
    /// Sets the VRAM of `budget` for `hardware`, which is this machine unless a person named one.
    pub(super) fn set(
        &self,
        budget: &mut Budget,
        hardware: &Hardware,
        is_this_machine: bool,
    ) -> Result<()> {
        let sizes: Vec<u64> = match self {
            Self::Sizes(sizes) => sizes.iter().map(|size| size.0).collect(),
            Self::Auto => {
                let free = match (is_this_machine, &hardware.gpu) {
                    (true, _) => machine::gpu::vram_free().or_else(|reason| {
                        bail!("`--vram auto` asks the graphics card of this machine: {reason}; give a size, or name a machine by `--hardware`")
                    })?,
                    (false, Some(gpu)) => gpu.free_bytes.unwrap_or(gpu.vram_bytes),
                    (false, None) => 0,
                };
                vec![free.saturating_sub(LEFT_FREE) / ROUNDED_TO * ROUNDED_TO]
            }
        };
        let sum = sizes
            .iter()
            .try_fold(0, |sum: u64, size| sum.checked_add(*size));
        let Some(sum) = sum else {
            bail!("`--vram` adds up to more than this program can count");
        };
        budget.vram_bytes = sum;
        budget.vram_split = if sizes.len() > 1 { sizes } else { Vec::new() };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_are_understood_or_refused() {
        let pin = |text: &str| text.parse::<Pin>();
        assert_eq!(
            pin("layers:3-7=gpu"),
            Ok(Pin {
                part: Part::Layers,
                layers: Some((3, 7)),
                device: Device::Gpu
            })
        );
        assert_eq!(
            pin("attention:2=cpu").map(|pin| pin.layers),
            Ok(Some((2, 2)))
        );
        assert_eq!(pin("head=cpu").map(|pin| pin.part), Ok(Part::Head));
        for bad in [
            "",
            "head",
            "head:1=gpu",
            "layers=tpu",
            "layers:7-3=gpu",
            "ffn=gpu",
            "layers:x=gpu",
        ] {
            let told = pin(bad).unwrap_err();
            assert!(told.contains("such as `attention=gpu`"), "{bad}: {told}");
        }
    }

    #[test]
    fn sizes_are_of_one_gpu_or_of_each() {
        let vram = |text: &str| text.parse::<VramArgument>();
        assert_eq!(vram("auto"), Ok(VramArgument::Auto));
        assert_eq!(vram("0G"), Ok(VramArgument::Sizes(vec![ByteSize(0)])));
        assert_eq!(
            vram("24G,12G"),
            Ok(VramArgument::Sizes(vec![
                ByteSize::gib(24),
                ByteSize::gib(12)
            ]))
        );
        for bad in ["", "-1G", "24G,", "24G,0G", "much"] {
            assert!(vram(bad).is_err(), "{bad}");
        }
    }
}
