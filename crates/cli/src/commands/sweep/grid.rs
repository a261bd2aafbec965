//! The grid: its axes, as they are given and as they are where nobody says, and its points.

use std::path::PathBuf;

use anyhow::{Result, bail};
use powerinfer_artifact::{
    ByteSize, hardware::Hardware, placement_inputs::LayerInputs, plan::Policy,
};
use powerinfer_bundle::Bundle;
use powerinfer_planner::candidates::audited;
use powerinfer_runtime::LayerAudit;

use super::{
    levels::Level,
    placing::{Extent, Hot, whole},
    rows::Axes,
};
use crate::{
    engine::{ActivationArgument, DeviceArgument},
    output::parse_percent,
};

/// The axes of the grid.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Grid")]
pub(super) struct GridArguments {
    /// Budgets on the GPU, each of which is placed as well as it can be [default: none, and room for a quarter,
    /// half, three quarters and all of the layers]
    #[arg(long, value_name = "SIZE", value_delimiter = ',')]
    pub(super) vram: Vec<ByteSize>,
    /// Instead of budgets: shares of tokens; neurons that fire on as many are hot and on the GPU, whatever
    /// memory that takes, with attention and the head
    #[arg(long, value_name = "SHARE", value_delimiter = ',', conflicts_with = "vram", value_parser = parse_share)]
    pub(super) hot_threshold: Vec<f64>,
    /// Policies and how far they go: `dense`, `exact`, `sign-bit`, `predicted`, `predicted:+2` (predictors'
    /// thresholds raised by that logit), `error:10%` (the relative error of FFN outputs that thresholds allow),
    /// `gate:50%` (the share of the smallest gates that is dropped) [default: dense, exact and three of
    /// predicted, or dense and four errors]
    #[arg(
        long,
        value_name = "LEVEL",
        value_delimiter = ',',
        allow_hyphen_values = true
    )]
    pub(super) level: Vec<Level>,
    /// Sequences that decode together
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) batch: Vec<u32>,
    /// Tokens of each sequence, the decoded ones among them [default: the bundle's context, at most 256]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub(super) context: Vec<usize>,
    /// Machine that placements are for: a name or a file, as `place --hardware` takes them [default: the
    /// bundle's]
    #[arg(long, value_name = "NAME|FILE")]
    pub(super) hardware: Option<String>,
}

/// What is measured, on what.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Measures")]
pub(super) struct MeasureArguments {
    /// Text file, or folder of text files, that the profile has not seen [default: for `demo` tasks it was not
    /// trained on, else the text of the bundle's certificate]
    #[arg(long, value_name = "FILE|DIR")]
    pub(super) data: Vec<PathBuf>,
    /// Most tokens to score
    #[arg(long, value_name = "N", default_value_t = 8192)]
    pub(super) tokens: usize,
    /// Most tokens of them on which every neuron is looked at, beside what is predicted
    #[arg(long, value_name = "N", default_value_t = 2048)]
    pub(super) audit_tokens: usize,
    /// Most tokens of them on which each layer follows a level alone; 0 leaves that out
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(super) layer_tokens: usize,
    /// Held-out function tasks of the demo to write too [default: 100 for `demo`, else 0]
    #[arg(long, value_name = "N")]
    pub(super) tasks: Option<usize>,
    /// HumanEval, or the like, to write too
    #[arg(long, value_name = "FILE")]
    pub(super) humaneval: Option<PathBuf>,
    /// Take the first N of its problems alone
    #[arg(long, value_name = "N", requires = "humaneval")]
    pub(super) problems: Option<usize>,
    /// Tokens to decode at each point, one by one
    #[arg(short = 'n', long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) decode_tokens: u32,
    /// How often to time each
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) repeats: u32,
    /// Memory to read for the read bandwidth; several times the processor's caches
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub(super) probe: ByteSize,
    /// Threads to compute with [default: one per physical core]
    #[arg(short, long, value_name = "N")]
    pub(super) threads: Option<usize>,
    /// What runs the parts that placements put on a GPU; without one, placements are predicted
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(super) device: DeviceArgument,
    /// Run every placement where there is no GPU too: the CPU computes it in its two halves, and sums them as
    /// they would be
    #[arg(long)]
    pub(super) run_placements: bool,
    /// Format of what quantised weights are multiplied with on the CPU; GPUs multiply with float32
    #[arg(long, value_name = "FORMAT", default_value = "int8")]
    pub(super) activations: ActivationArgument,
    /// Seed of the tasks and of every draw
    #[arg(short, long, default_value_t = 1)]
    pub(super) seed: u64,
}

/// A share, plain or in percent.
fn parse_share(text: &str) -> Result<f64, String> {
    let share = match text.ends_with('%') {
        true => parse_percent(text),
        false => text.parse().ok(),
    };
    let share = share.filter(|share: &f64| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "give a share from 0 to 1, such as 0.1 or 10%".to_owned())
}

/// A point of the grid.
#[derive(Debug, Clone, Copy)]
pub(super) struct Point {
    pub(super) level: Level,
    pub(super) extent: Extent,
    pub(super) hot: Hot,
}

impl Point {
    pub(super) fn axes(self) -> Axes {
        let (vram_bytes, hot_threshold) = match self.hot {
            Hot::Within(bytes) => (Some(bytes), None),
            Hot::From(share) => (None, Some(share)),
        };
        Axes {
            vram_bytes,
            hot_threshold,
            level: self.level.to_string(),
            policy: self.level.policy().to_string(),
            level_of: self.level.value().map(|(of, _)| of.to_owned()),
            level_value: self.level.value().map(|(_, value)| value),
            batch: self.extent.batch,
            context_tokens: self.extent.context(),
        }
    }
}

impl GridArguments {
    /// The points, those of a level together; `runs_on_device` says whether placements run on one.
    pub(super) fn points(
        &self,
        bundle: &Bundle,
        layers: &[LayerInputs],
        hardware: &Hardware,
        decode_tokens: usize,
        runs_on_device: bool,
    ) -> Result<Vec<Point>> {
        let levels = match self.level.is_empty() {
            true => Level::usual(bundle),
            false => self.level.clone(),
        };
        let limit = bundle.plan().budget.context_tokens as usize;
        let mut contexts = self.context.clone();
        if contexts.is_empty() {
            contexts.push(limit.min(256));
        }
        for context in &contexts {
            if *context <= decode_tokens || *context > limit {
                bail!(
                    "`--context` is {context}; with {decode_tokens} tokens to decode it can be {} to the bundle's {limit}",
                    decode_tokens + 1
                );
            }
        }
        if runs_on_device && self.batch.iter().any(|batch| *batch > 1) {
            bail!("`--batch` decodes on the CPU alone; give `--device cpu` with it");
        }
        let mut extents = Vec::new();
        for batch in &self.batch {
            extents.extend(contexts.iter().map(|context| Extent {
                batch: *batch as usize,
                prompt_tokens: context - decode_tokens,
                decode_tokens,
            }));
        }
        let hots: Vec<Hot> = match (self.vram.is_empty(), self.hot_threshold.is_empty()) {
            (false, _) => self.vram.iter().map(|size| Hot::Within(size.0)).collect(),
            (true, false) => {
                let shares = self.hot_threshold.iter();
                shares.map(|share| Hot::From(*share)).collect()
            }
            (true, true) => usual_budgets(bundle, layers, hardware, extents[0])?,
        };
        let mut points: Vec<Point> = Vec::new();
        for level in levels {
            for extent in &extents {
                points.extend(hots.iter().map(|hot| Point {
                    level,
                    extent: *extent,
                    hot: *hot,
                }));
            }
        }
        for (place, point) in points.iter().enumerate() {
            let axes = point.axes();
            if points[..place].iter().any(|other| other.axes() == axes) {
                bail!(
                    "the grid has a point twice, `{}` with a batch of {} and a context of {}; leave equal figures out",
                    axes.level,
                    axes.batch,
                    axes.context_tokens
                );
            }
        }
        Ok(points)
    }
}

/// Nothing; and beside what a GPU takes before any layer, a quarter, half, three quarters and all of the layers. Nothing
/// alone where `hardware` has no GPU.
fn usual_budgets(
    bundle: &Bundle,
    layers: &[LayerInputs],
    hardware: &Hardware,
    extent: Extent,
) -> Result<Vec<Hot>> {
    const STEP: u64 = 64 << 10;
    let mut budgets = vec![Hot::Within(0)];
    if hardware.gpu.is_some() {
        let audit = vec![LayerAudit::default(); layers.len()];
        let dense = audited(bundle, layers, Policy::Dense, None, &audit);
        let (fixed, layers) = whole(bundle, &dense, hardware, extent)?;
        let quarter = |count: u64| (fixed + layers * count / 4).div_ceil(STEP) * STEP;
        let mut sizes: Vec<u64> = (1..=4).map(quarter).collect();
        sizes.dedup();
        budgets.extend(sizes.into_iter().map(Hot::Within));
    }
    Ok(budgets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_plain_or_in_percent() {
        assert_eq!(parse_share("0.25"), Ok(0.25));
        assert_eq!(parse_share("25%"), Ok(0.25));
        assert_eq!(parse_share("0"), Ok(0.0));
        for bad in ["", "-0.1", "101%", "much", "nan"] {
            assert!(parse_share(bad).is_err(), "{bad}");
        }
    }
}
