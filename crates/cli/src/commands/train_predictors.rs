//! `powerinfer train-predictors`: trains or imports the predictors of active neurons.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::ArgMatches;
use powerinfer_artifact::Shard;
use powerinfer_kernels::Isa;
use powerinfer_model::Checkpoint;
use powerinfer_pipeline::train;
use powerinfer_profile::Profile;
use powerinfer_tensor::Format;
use serde_json::json;

use crate::{
    earlier_settings::{ResetArgument, with_earlier},
    model_argument,
    output::{Output, print, print_json},
    predictor_table::tables,
    progress::Bar,
    training_stage::{TrainingArguments, say_stage},
    values::{FORMATS, Offered},
};

/// Which predictors to train, from what, and where to.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  powerinfer train-predictors demo --recall 0.98\n  powerinfer train-predictors model.powerinfer.gguf --import model.powerinfer.gguf"
)]
pub(crate) struct TrainPredictorsArguments {
    /// Model: a folder, a GGUF file, `org/name` on the hub, or `demo`
    #[arg(default_value = model_argument::DEMO)]
    model: String,
    /// Folder of the profile [default: ./<model>.powerinfer/profile]
    #[arg(long, value_name = "DIR")]
    profile: Option<PathBuf>,
    #[command(flatten)]
    training: TrainingArguments,
    /// Train one of n parts of the layers, as `3/16`; `powerinfer merge` puts them together
    #[arg(long, value_name = "I/N", default_value_t = Shard::WHOLE, hide_default_value = true)]
    shard: Shard,
    /// Folder to write the predictors to, created if missing [default: ./<model>.powerinfer/predictors]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Format that the weights will have, which sets the cost of a neuron
    #[arg(
        long,
        value_name = "FORMAT",
        default_value_t = Format::Q8_0,
        value_parser = Offered(str::parse::<Format>, FORMATS),
        hide_possible_values = true
    )]
    quant: Format,
    /// Seed of every random choice
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    reset: ResetArgument,
    /// Train again what is up to date
    #[arg(long)]
    force: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(
    arguments: &TrainPredictorsArguments,
    matches: &ArgMatches,
    output: Output,
) -> Result<()> {
    let (checkpoint, _) = model_argument::open_model(&arguments.model, output)?;
    let folder = model_argument::work_folder(&checkpoint.identity().name);
    let is_whole = arguments.out.is_none() && arguments.shard == Shard::WHOLE;
    let run = |arguments: &TrainPredictorsArguments| make(arguments, &checkpoint, &folder, output);
    let check = |arguments: &TrainPredictorsArguments| arguments.training.method().map(drop);
    let (folder, model) = (is_whole.then_some(&folder), checkpoint.identity());
    with_earlier(arguments, matches, folder, model, output, check, run)
}

/// Makes the predictors of `checkpoint`, whose artifacts are in the work `folder`.
fn make(
    arguments: &TrainPredictorsArguments,
    checkpoint: &Checkpoint,
    folder: &Path,
    output: Output,
) -> Result<()> {
    let profile = Profile::open(
        &arguments
            .profile
            .clone()
            .unwrap_or_else(|| folder.join("profile")),
    )?;
    profile.check_model(checkpoint.identity())?;
    let shard = arguments.shard;
    let out = arguments
        .out
        .clone()
        .unwrap_or_else(|| folder.join(shard.file_name("predictors")));
    let recipe = arguments.training.recipe(
        &arguments.model,
        checkpoint,
        arguments.quant,
        arguments.seed,
        output,
    )?;
    let force = arguments.force;
    let bar = Bar::new(output);
    let made = train(checkpoint, &profile, &recipe, shard, &out, force, &bar)?;
    say_stage(&made, &recipe, output);
    let predictors = made.artifact;
    if arguments.json {
        return print_json(
            &json!({ "header": predictors.header(), "layers": predictors.layers() }),
        );
    }
    print(tables(&predictors, Isa::detect()?))
}
