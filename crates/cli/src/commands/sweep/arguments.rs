//! Arguments of `powerinfer sweep`: the grid and its measures.

use std::path::PathBuf;

use powerinfer_artifact::ByteSize;
use powerinfer_eval::sweep::{PolicySetting, parse_share};

use crate::{
    engine::{ActivationArgument, DeviceArgument},
    thread_argument::ThreadArgument,
};

/// Axes of the grid.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Grid")]
pub(super) struct GridArguments {
    /// GPU memory budgets, each placed as well as possible [default: none, and room for a quarter, half, three quarters
    /// and all of the layers]
    #[arg(long, value_name = "SIZE", value_delimiter = ',')]
    pub(super) vram: Vec<ByteSize>,
    /// Instead of budgets: activation frequencies; neurons that are active on at least this share of tokens are on the
    /// GPU with attention and the head, whatever memory that takes
    #[arg(long, value_name = "SHARE", value_delimiter = ',', conflicts_with = "vram", value_parser = share)]
    pub(super) hot_threshold: Vec<f64>,
    /// Policies with their parameter: `dense`, `exact`, `sign-bit`, `predicted`, `predicted:+2` (predictors'
    /// thresholds raised by that logit), `error:10%` (threshold policy with that relative FFN error), `gate:50%`
    /// (threshold policy that skips that share of the smallest gate activations) [default: dense, exact and three
    /// of predicted, or dense and four errors]
    #[arg(
        long,
        value_name = "SETTING",
        value_delimiter = ',',
        allow_hyphen_values = true
    )]
    pub(super) policy: Vec<PolicySetting>,
    /// Sequences that decode together
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) batch: Vec<u32>,
    /// Tokens of each sequence, decoded ones included [default: the bundle's context, at most 256]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub(super) context: Vec<usize>,
    /// Machine to place for: a name or a file, as for `place --hardware` [default: the
    /// bundle's]
    #[arg(long, value_name = "NAME|FILE")]
    pub(super) hardware: Option<String>,
}

/// Measures and their data.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Measures")]
pub(super) struct MeasureArguments {
    /// Text that the profile has not seen, in any format that `profile --data` reads [default: for `demo` tasks it was not
    /// trained on, else the text of the bundle's certificate]
    #[arg(long, value_name = "FILE|DIR|-")]
    pub(super) data: Vec<PathBuf>,
    /// Tokens to score, at most
    #[arg(long, value_name = "N", default_value_t = 8192)]
    pub(super) tokens: usize,
    /// Tokens of the neuron audit, for which every neuron is also computed and counted, at most
    #[arg(long, value_name = "N", default_value_t = 2048)]
    pub(super) audit_tokens: usize,
    /// Tokens on which one layer at a time follows the policy, at most; 0 for none
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(super) layer_tokens: usize,
    /// Held-out function tasks of the demo to solve, too [default: 100 for `demo`, else 0]
    #[arg(long, value_name = "N")]
    pub(super) tasks: Option<usize>,
    /// HumanEval, or a file of the same format, to solve, too
    #[arg(long, value_name = "FILE")]
    pub(super) humaneval: Option<PathBuf>,
    /// Take only the first N of its problems
    #[arg(long, value_name = "N", requires = "humaneval")]
    pub(super) problems: Option<usize>,
    /// Tokens to decode at each point
    #[arg(short = 'n', long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) decode_tokens: u32,
    /// Repeats of each time measurement
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) repeats: u32,
    /// Memory to read for the read bandwidth; several times the processor's caches
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub(super) probe: ByteSize,
    #[command(flatten)]
    pub(super) threads: ThreadArgument,
    /// Device of the parts that placements put on a GPU; without one, placements are estimated
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(super) device: DeviceArgument,
    /// Without a GPU, run every placement on the CPU: it computes both parts and sums them in the same order as with a
    /// GPU
    #[arg(long)]
    pub(super) run_placements: bool,
    /// Format of the activations that quantised weights are multiplied with on the CPU; GPUs use float32
    #[arg(long, value_name = "FORMAT", default_value = "int8")]
    pub(super) activations: ActivationArgument,
    /// Seed of every random choice
    #[arg(short, long, default_value_t = 1)]
    pub(super) seed: u64,
}

fn share(text: &str) -> Result<f64, String> {
    let share = parse_share(text);
    share.ok_or_else(|| "give a share from 0 to 1, such as 0.1 or 10%".to_owned())
}
