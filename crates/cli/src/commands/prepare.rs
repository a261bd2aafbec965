//! `powerinfer prepare`: all stages in order, each skipped when it is done.

use std::path::{Path, PathBuf};

use anyhow::Result;
use powerinfer_artifact::{Shard, shell_quoted};
use powerinfer_model::Checkpoint;
use powerinfer_planner::{Request, Scratch, certify_bundle, check_reserved, plan};
use powerinfer_predictor::FEWEST_SAMPLES;
use powerinfer_profile::Profile;
use powerinfer_text::Tokenizer;
use serde_json::json;

use crate::{
    budget_arguments::BudgetArguments,
    calibration_text::{CalibrationArguments, calibration, check_paths},
    certificate_table::say_certificate,
    model_argument::{self, DEMO},
    output::{Output, print_json},
    plan_table::{say_cost_of_skipping, say_result},
    profile_stage::TraceArguments,
    progress::Bar,
    training_stage::{self, TrainingArguments},
};

/// The flags of all stages.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  powerinfer prepare demo && powerinfer run demo")]
pub(crate) struct PrepareArguments {
    /// Model: a folder, a GGUF file, `org/name` on the hub, or `demo`
    #[arg(default_value = model_argument::DEMO)]
    model: String,
    /// Folder for profile, predictors and bundle, created if missing [default: ./<model>.powerinfer]
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
    /// Print one JSON document when done
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &PrepareArguments, output: Output) -> Result<()> {
    check_paths(&arguments.calibration.data)?;
    let (checkpoint, tokenizer) = model_argument::open_model(&arguments.model, output)?;
    let name = checkpoint.identity().name.clone();
    let folder = arguments
        .out
        .clone()
        .unwrap_or_else(|| model_argument::work_folder(&name));
    let bar = Bar::new(output);
    let seed = arguments.seed;
    // Errors that need no profile come before hours of profiling.
    let quant = arguments.budget.quant();
    let training = &arguments.training;
    let recipe = training.recipe(&arguments.model, &checkpoint, quant, seed, output)?;
    let options = arguments.budget.options()?;
    options.check(checkpoint.config())?;

    let profile = arguments.profile(
        &checkpoint,
        &tokenizer,
        &folder.join("profile"),
        options.certifies(),
        output,
    )?;
    let out = folder.join("predictors");
    let predictors = training_stage::up_to_date(
        &checkpoint,
        &profile,
        &recipe,
        Shard::WHOLE,
        &out,
        false,
        output,
    )?;
    let predictors = Some(predictors);

    let out = folder.join("bundle");
    let request = Request::of(&checkpoint, &profile, predictors.as_ref(), &options, &bar)?;
    let bundle = match request.packed(&checkpoint, quant, &out) {
        Some(bundle) => {
            output.say(format!("bundle: `{}` is up to date", out.display()));
            // A run may have been stopped between packing and certifying.
            match bundle.certificate().is_none() && options.certifies() {
                true => certify_bundle(bundle, &checkpoint, &profile, &request, &options, &bar)?,
                false => bundle,
            }
        }
        None => {
            let scratch = Scratch::NextTo(&out);
            let placement = plan(
                &checkpoint,
                &profile,
                predictors,
                request,
                &options,
                scratch,
                &bar,
            )?;
            say_result(placement.plan(), placement.report(), output);
            say_cost_of_skipping(placement.plan(), checkpoint.config(), output);
            let bundle = placement.pack(&checkpoint, &out, &bar)?;
            output.say(format!("bundle written to `{}`", bundle.folder().display()));
            match options.certifies() {
                true => placement.certify(bundle, &bar)?,
                false => bundle,
            }
        }
    };
    say_certificate(&bundle, output);
    output.say(format!(
        "ready: `powerinfer run {}`",
        shell_quoted(&folder.to_string_lossy())
    ));
    if arguments.json {
        print_json(&json!({
            "bundle": bundle.folder(),
            "text": profile.document().sources,
            "plan": bundle.plan(),
            "certificate": bundle.certificate(),
        }))?;
    }
    Ok(())
}

impl PrepareArguments {
    /// The profile in `out`: up to date with the text given, or as it is if none is given.
    fn profile(
        &self,
        checkpoint: &Checkpoint,
        tokenizer: &Tokenizer,
        out: &Path,
        certifies: bool,
        output: Output,
    ) -> Result<Profile> {
        let files = checkpoint.files();
        if self.calibration.data.is_empty() && files.name() != DEMO {
            let kept = Profile::open(out);
            if let Ok(profile) = kept
                && profile.check_model(checkpoint.identity()).is_ok()
            {
                output.say(format!(
                    "profile: `{}` is used; `--data` profiles other text",
                    out.display()
                ));
                return Ok(profile);
            }
        }
        let arguments = &self.calibration;
        let config = checkpoint.config();
        let calibration = calibration(arguments, files, config, tokenizer, self.seed, output)?;
        // Reports too little text before hours of profiling.
        calibration.check_parts(FEWEST_SAMPLES)?;
        if certifies {
            check_reserved(calibration.reserved(), &Bar::new(output));
        }
        let settings = (self.tracing).settings(arguments.amount(), Shard::WHOLE, self.seed);
        (self.tracing).up_to_date(checkpoint, &calibration, settings, out, false, output)
    }
}
