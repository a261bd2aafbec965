//! `powerinfer profile`: which neurons are active.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::ArgMatches;
use powerinfer_artifact::Shard;
use powerinfer_model::Checkpoint;
use powerinfer_pipeline::check_paths;
use powerinfer_profile::Amount;
use powerinfer_text::Tokenizer;
use serde_json::json;

use crate::{
    calibration_arguments::CalibrationArguments,
    earlier_settings::{ResetArgument, with_earlier},
    hint::Advised,
    model_argument,
    output::{Output, print, print_json},
    profile_stage::{TraceArguments, report},
    progress::Bar,
};

/// Model, text and target of a profile.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  powerinfer profile ./my-model --data articles/ --tokens 100000"
)]
pub(crate) struct ProfileArguments {
    /// Model: a folder, a GGUF file, `org/name` on the hub, or `demo`
    #[arg(default_value = model_argument::DEMO)]
    model: String,
    #[command(flatten)]
    calibration: CalibrationArguments,
    #[command(flatten)]
    tracing: TraceArguments,
    /// Profile one of n parts of the text, as `3/16`; `powerinfer merge` puts them together
    #[arg(long, value_name = "I/N", default_value_t = Shard::WHOLE, hide_default_value = true)]
    shard: Shard,
    /// Folder to write the profile to, created if missing [default: ./<model>.powerinfer/profile]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Seed of every random choice
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    reset: ResetArgument,
    /// Profile again what is up to date
    #[arg(long)]
    force: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(
    arguments: &ProfileArguments,
    matches: &ArgMatches,
    output: Output,
) -> Result<()> {
    check_paths(&arguments.calibration.data)?;
    let shard = arguments.shard;
    if shard != Shard::WHOLE && arguments.calibration.text().amount() != Amount::Everything {
        bail!(Advised::new(
            "shards need a number of tokens, because none of them knows how much the others have read",
            "give `--tokens N`"
        ));
    }
    let (checkpoint, tokenizer) = model_argument::open_model(&arguments.model, output)?;
    let folder = model_argument::work_folder(&checkpoint.identity().name);
    let is_whole = arguments.out.is_none() && shard == Shard::WHOLE;
    let run =
        |arguments: &ProfileArguments| measure(arguments, &checkpoint, &tokenizer, &folder, output);
    let (folder, model) = (is_whole.then_some(&folder), checkpoint.identity());
    with_earlier(arguments, matches, folder, model, output, |_| Ok(()), run)
}

/// Profiles `checkpoint`, whose artifacts are in the work `folder`.
fn measure(
    arguments: &ProfileArguments,
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
    folder: &Path,
    output: Output,
) -> Result<()> {
    let shard = arguments.shard;
    let (text, bar) = (arguments.calibration.text(), Bar::new(output));
    let out = arguments
        .out
        .clone()
        .unwrap_or_else(|| folder.join(shard.file_name("profile")));
    let (files, config) = (checkpoint.files(), checkpoint.config());
    let calibration = text.read(files, config, tokenizer, arguments.seed, &bar)?;
    let settings = arguments
        .tracing
        .settings(text.amount(), shard, arguments.seed);
    let force = arguments.force;
    let tracing = &arguments.tracing;
    let profile = tracing.up_to_date(checkpoint, &calibration, settings, &out, force, output)?;
    if arguments.json {
        return print_json(&json!({ "header": profile.header(), "profile": profile.document() }));
    }
    print(report(profile.document()))
}
