//! `powerinfer prepare`: all stages in order, each skipped when it is done.

use std::path::PathBuf;

use anyhow::Result;
use powerinfer_artifact::predictor_file::PredictorFile;
use powerinfer_kernels::Isa;
use powerinfer_planner::{Request, Scratch, certify_bundle, plan};
use powerinfer_predictor::{is_current, make};
use powerinfer_profile::{Profile, Shard};

use crate::{
    budget_arguments::BudgetArguments,
    calibration_text::{CalibrationArguments, calibration, check_paths},
    certificate_table::say_certificate,
    model_argument,
    output::Output,
    plan_table::say_result,
    profile_stage::{self, TraceArguments},
    progress::Bar,
    training_stage::{self, TrainingArguments},
};

/// The flags of all stages.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  powerinfer prepare demo --vram 24G && powerinfer run demo")]
pub(crate) struct PrepareArguments {
    /// Model: a folder, a GGUF file, `org/name` on the hub, or `demo`
    #[arg(default_value = model_argument::DEMO)]
    model: String,
    /// Folder for profile, predictors and bundle [default: ./<model>.powerinfer]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Seed of every random choice
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    calibration: CalibrationArguments,
    #[command(flatten)]
    tracing: TraceArguments,
    #[command(flatten)]
    training: TrainingArguments,
    #[command(flatten)]
    budget: BudgetArguments,
}

pub(crate) fn run(arguments: &PrepareArguments, output: Output) -> Result<()> {
    check_paths(&arguments.calibration.data)?;
    let checkpoint = model_argument::open_checkpoint(&arguments.model, output)?;
    let name = checkpoint.identity().name.clone();
    let folder = arguments
        .out
        .clone()
        .unwrap_or_else(|| model_argument::work_folder(&name));
    let tokenizer = model_argument::tokenizer(checkpoint.files())?;
    let seed = arguments.seed;
    let calibration = calibration(
        &arguments.calibration,
        checkpoint.files(),
        checkpoint.config(),
        &tokenizer,
        seed,
    )?;
    let bar = Bar::new(output);
    // What is wrong with predictors to be imported is said before hours of profiling.
    let quant = arguments.budget.quant();
    let recipe = arguments.training.recipe(&checkpoint, quant, seed)?;

    let amount = arguments.calibration.amount();
    let settings = arguments.tracing.settings(amount, Shard::WHOLE, seed);
    let out = folder.join("profile");
    let profile = if Profile::is_current(&out, &checkpoint, &calibration, settings) {
        output.say(format!("profile: `{}` is up to date", out.display()));
        Profile::open(&out)?
    } else {
        profile_stage::refuse_other_model(&out, &checkpoint)?;
        if out.exists() {
            output.say(format!(
                "profile: `{}` is of other text or other settings; it is made again",
                out.display()
            ));
        }
        let tracing = &arguments.tracing;
        let profile = tracing.measure(&checkpoint, &calibration, settings, &out, output)?;
        profile_stage::say_result(&profile, output);
        profile
    };

    let out = folder.join("predictors");
    let predictors = if is_current(&out, &profile, &recipe)? {
        output.say(format!("predictors: `{}` is up to date", out.display()));
        Some(PredictorFile::open(&out)?)
    } else {
        let predictors = make(&checkpoint, &profile, &recipe, Isa::detect()?, &out, &bar)?;
        training_stage::say_result(&predictors, &recipe, output);
        Some(predictors)
    };

    let out = folder.join("bundle");
    let options = arguments.budget.options()?;
    let request = Request::of(&checkpoint, &profile, predictors.as_ref(), &options)?;
    match request.packed(&checkpoint, quant, &out) {
        Some(bundle) => {
            output.say(format!("bundle: `{}` is up to date", out.display()));
            // A run may have been stopped between packing and certifying.
            if bundle.certificate().is_none() {
                let bundle =
                    certify_bundle(bundle, &checkpoint, &profile, &request, &options, &bar)?;
                say_certificate(&bundle, output);
            }
        }
        None => {
            let scratch = Scratch::NextTo(&out);
            let placement = plan(&checkpoint, &profile, predictors, &options, scratch, &bar)?;
            say_result(placement.plan(), placement.report(), output);
            let bundle = placement.pack(&checkpoint, &out, &bar)?;
            output.say(format!("bundle written to `{}`", bundle.folder().display()));
            let bundle = placement.certify(bundle, &bar)?;
            say_certificate(&bundle, output);
        }
    }
    output.say(format!("ready: `powerinfer run {}`", folder.display()));
    Ok(())
}
