//! Options of a plan: budgets, objective, solver and pinned parts.

use anyhow::Result;
use clap::builder::{PossibleValuesParser, StringValueParser, TypedValueParser as _};
use powerinfer_artifact::{
    ByteSize, hardware,
    plan::{Objective, Policy},
};
use powerinfer_planner::{Pin, PlanOptions, Vram, read_hardware};
use powerinfer_solver::Backend;
use powerinfer_tensor::{CacheFormat, Format};

use crate::{
    engine::PolicyArgument,
    output::parse_percent,
    values::{FORMATS, Offered},
};

/// Budgets and formats.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Budget")]
pub(crate) struct BudgetArguments {
    /// GPU memory to use: `24G` and `24GiB` are 24·2³⁰ bytes, `24GB` is 24·10⁹; `auto` is free VRAM minus 256 MiB,
    /// or 0 without a GPU; `24G,12G` plans for two GPUs, which `run` does not support yet [default: auto]
    #[arg(long, value_name = "SIZE[,SIZE…]|auto")]
    vram: Option<Vram>,
    /// Main memory to use [default: all of the machine's]
    #[arg(long, value_name = "SIZE")]
    ram: Option<ByteSize>,
    /// Tokens that the KV cache has room for [default: the model's context, at most 4096]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Format of the KV cache: f16, q8_0 at about half the memory, or f32 [default: f16]
    #[arg(long, value_name = "FORMAT")]
    kv_cache: Option<CacheFormat>,
    /// Prompt tokens per pass on the GPU: 64, 128, 256 or 512 [default: the largest that needs at most 10% of
    /// the VRAM for weights]
    #[arg(
        long,
        value_name = "N",
        value_parser = PossibleValuesParser::new(["64", "128", "256", "512"]).try_map(|text| text.parse::<usize>()),
        hide_possible_values = true
    )]
    prompt_batch: Option<usize>,
    /// Machine to plan for: a name (pc-high, pc-low, rtx4090, rtx5090, rtx4060-8g, rtx3060-12g, h200-16c,
    /// laptop, cpu-only) or a TOML or JSON file, as `doctor --write` makes them [default: this machine, measured
    /// once; rtx4090 if `--vram` asks for a GPU and there is none]
    #[arg(
        long,
        value_name = "NAME|FILE",
        value_parser = Offered(StringValueParser::new(), &hardware::NAMES),
        hide_possible_values = true
    )]
    hardware: Option<String>,
    /// Policy of all layers [default: the fastest within `--max-ppl-increase`, layer by layer]
    #[arg(long, value_name = "POLICY")]
    policy: Option<PolicyArgument>,
    /// By how much skipping neurons may raise perplexity on held-out text [default: 1%]
    #[arg(long, value_name = "SHARE%")]
    max_ppl_increase: Option<Rise>,
    /// Skip this share of the inputs, the smallest, of attention's projections, and of gate and up in `dense`
    /// layers [default: none]
    #[arg(long, value_name = "SHARE%")]
    input_sparsity: Option<InputSparsity>,
    /// Tokens of held-out text to certify the bundle on, and as many to choose policies on: `full` is 8192, fewer for
    /// models beyond a billion parameters, and at most as many as are profiled; `quick` is 1024, `none` certifies
    /// nothing
    #[arg(long, value_name = "full|quick|none|N", default_value = "full")]
    certify: Certify,
    /// Format of the weights: f32, f16, bf16, q8_0, q4_k or q4_0 [default: q8_0]
    #[arg(
        long,
        value_name = "FORMAT",
        value_parser = Offered(str::parse::<Format>, FORMATS),
        hide_possible_values = true
    )]
    quant: Option<Format>,
    #[command(flatten)]
    placement: PlacementArguments,
}

/// Tokens to certify on; `None` is the planner's default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Certify(Option<usize>);

impl std::str::FromStr for Certify {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("full", _) => Ok(Self(None)),
            ("quick", _) => Ok(Self(Some(1024))),
            ("none", _) => Ok(Self(Some(0))),
            (_, Ok(tokens)) => Ok(Self(Some(tokens))),
            _ => Err("give `full`, `quick`, `none`, or a number of tokens".to_owned()),
        }
    }
}

/// A rise as a share, given in percent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rise(f64);

impl std::str::FromStr for Rise {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match parse_percent(text) {
            Some(share) if (0.0..=10.0).contains(&share) => Ok(Self(share)),
            _ => Err("give a share in percent, such as `1%` or `0.5%`".to_owned()),
        }
    }
}

/// A share of inputs to leave out, given in percent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct InputSparsity(f64);

impl std::str::FromStr for InputSparsity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match parse_percent(text) {
            Some(share) if share > 0.0 && share < 1.0 => Ok(Self(share)),
            _ => Err(
                "give a share above 0% and below 100%, such as `25%`; without the option all inputs are read"
                    .to_owned(),
            ),
        }
    }
}

impl BudgetArguments {
    /// Format of the weights.
    pub(crate) fn quant(&self) -> Format {
        self.quant.unwrap_or(Format::Q8_0)
    }

    /// The first option given that decides what a bundle computes.
    pub(crate) fn deciding_option(&self) -> Option<&'static str> {
        let given = [
            ("--policy", self.policy.is_some()),
            ("--max-ppl-increase", self.max_ppl_increase.is_some()),
            ("--input-sparsity", self.input_sparsity.is_some()),
            ("--certify", self.certify.0.is_some()),
            ("--quant", self.quant.is_some()),
        ];
        let mut given = given.into_iter().filter(|(_, is_given)| *is_given);
        given.next().map(|(option, _)| option)
    }

    /// The pins in the planner's form.
    pub(crate) fn options(&self) -> Result<PlanOptions> {
        let PlacementArguments {
            objective,
            solver,
            pins,
        } = &self.placement;
        Ok(PlanOptions {
            vram: self.vram.clone(),
            ram_bytes: self.ram.map(|ram| ram.0),
            context: self.context,
            kv_cache: self.kv_cache,
            prompt_batch: self.prompt_batch,
            hardware: self.hardware.as_deref().map(read_hardware).transpose()?,
            policy: self.policy.map(Policy::from),
            max_perplexity_increase: self.max_ppl_increase.map(|Rise(share)| share),
            input_sparsity: self.input_sparsity.map(|InputSparsity(share)| share),
            certify_tokens: self.certify.0,
            quant: self.quant,
            objective: match objective {
                ObjectiveArgument::Latency => Objective::Latency,
                ObjectiveArgument::Impact => Objective::Impact,
            },
            backend: match solver {
                SolverArgument::Auto => Backend::Auto,
                SolverArgument::Decomposition => Backend::Decomposition,
                SolverArgument::Microlp => Backend::Microlp,
                SolverArgument::Highs => Backend::Highs,
            },
            pins: pins.clone(),
        })
    }
}

/// Objective, solver and pinned parts.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Placement")]
struct PlacementArguments {
    /// Objective of the integer program
    #[arg(long, value_enum, default_value_t = ObjectiveArgument::Latency)]
    objective: ObjectiveArgument,
    /// Solver of the integer program
    #[arg(long, value_enum, default_value_t = SolverArgument::Auto)]
    solver: SolverArgument,
    /// Keep a part on one device: `head=cpu`, `attention=gpu`, `layers:0-9=gpu`; may be given several times
    #[arg(long = "pin", value_name = "PART=gpu|cpu")]
    pins: Vec<Pin>,
}

/// Objective of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ObjectiveArgument {
    /// Least predicted time per token
    Latency,
    /// The paper's: most activations on the GPU, after attention and the other parts
    Impact,
}

/// Solver of the integer program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum SolverArgument {
    /// Decomposition; a mixed integer program if it leaves a gap
    Auto,
    /// Lagrangian relaxation of memory, exact per layer; a dynamic program closes the gap
    Decomposition,
    /// A mixed integer program, by microlp
    Microlp,
    /// The same by HiGHS, in builds with the feature `highs`
    Highs,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_share_is_taken() {
        assert_eq!("25%".parse(), Ok(InputSparsity(0.25)));
        assert_eq!("0.5 %".parse(), Ok(InputSparsity(0.005)));
        for bad in ["0%", "100%", "-1%", "NaN%", "25", "x", ""] {
            let message = bad.parse::<InputSparsity>().unwrap_err();
            assert!(message.contains("such as `25%`"), "{message}");
        }
    }
}
