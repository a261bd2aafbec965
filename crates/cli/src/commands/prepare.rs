//! `powerinfer prepare`: all stages in order, each skipped when it is done.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::ArgMatches;
use powerinfer_artifact::{hardware::Hardware, plan::Policy, shell_quoted};
use powerinfer_cluster::{Rates, StageKind, Workload};
use powerinfer_model::Checkpoint;
use powerinfer_pipeline::{AUTO_LIMIT, Prepare, SEQUENCE, Tokens, Work, check_paths, prepare};
use powerinfer_planner::machine::{this_machine, with_current_speed};
use powerinfer_predictor::{Method, Recipe};
use powerinfer_profile::Profile;
use powerinfer_text::Tokenizer;
use serde_json::json;

use crate::{
    budget_arguments::BudgetArguments,
    calibration_arguments::CalibrationArguments,
    certificate_table::say_certificate,
    earlier_settings::{ResetArgument, with_earlier},
    estimate::{certify_tokens, duration, training_work},
    model_argument,
    output::{Output, print_json},
    plan_table::{say_cost_of_skipping, say_warnings, summary},
    profile_stage::{self, TraceArguments},
    progress::Bar,
    training_stage::{self, TrainingArguments},
};

/// Tokens to profile and to certify on with `--quick`, for models below [`SMALL_PARAMETERS`] and for larger ones.
const QUICK_SMALL: [usize; 2] = [8192, 1024];
const QUICK_LARGE: [usize; 2] = [2048, 512];
const SMALL_PARAMETERS: u64 = 500_000_000;

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
    /// Make a first bundle in minutes: fewer tokens, calculated predictors and a short certificate, unless other options say
    /// otherwise
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    calibration: CalibrationArguments,
    #[command(flatten)]
    tracing: TraceArguments,
    #[command(flatten)]
    training: TrainingArguments,
    #[command(flatten)]
    budget: BudgetArguments,
    #[command(flatten)]
    reset: ResetArgument,
    /// Print one JSON document when done
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(
    arguments: &PrepareArguments,
    matches: &ArgMatches,
    output: Output,
) -> Result<()> {
    check_paths(&arguments.calibration.data)?;
    let (checkpoint, tokenizer) = model_argument::open_model(&arguments.model, output)?;
    let name = checkpoint.identity().name.clone();
    let folder = arguments
        .out
        .clone()
        .unwrap_or_else(|| model_argument::work_folder(&name));
    let run = |arguments: &PrepareArguments| {
        prepare_model(arguments, &checkpoint, &tokenizer, &folder, output)
    };
    let check = |arguments: &PrepareArguments| arguments.training.method().map(drop);
    let (folder, model) = (Some(&folder), checkpoint.identity());
    with_earlier(arguments, matches, folder, model, output, check, run)
}

/// Prepares `checkpoint` in the work `folder`.
fn prepare_model(
    arguments: &PrepareArguments,
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
    folder: &Path,
    output: Output,
) -> Result<()> {
    let bar = Bar::new(output);
    let seed = arguments.seed;
    let quant = arguments.budget.quant();
    let full_training = &arguments.training;
    let quick_training = arguments.quick.then(|| full_training.quick());
    let training = quick_training.as_ref().unwrap_or(full_training);
    let model = &arguments.model;
    let recipe = training.recipe_or_kept(model, checkpoint, quant, seed, folder, output)?;
    let card = arguments.tracing.card(checkpoint, output)?;
    let samples = |recipe: &Recipe| {
        let method = match recipe {
            Recipe::Train(settings) => settings.method,
            Recipe::Import(_) => Method::default(),
        };
        arguments.tracing.trace_tokens(method)
    };
    let mut how = Prepare {
        text: arguments.calibration.text(),
        trace_tokens: samples(&recipe),
        recipe,
        options: arguments.budget.options()?,
        device: card.as_ref(),
        seed,
    };
    let mut full = None;
    if arguments.quick {
        let without = full_training.recipe(model, checkpoint, quant, seed, output.silent())?;
        let quick = std::mem::replace(&mut how.recipe, without);
        how.trace_tokens = samples(&how.recipe);
        full = Some(workload(
            &how,
            checkpoint,
            AUTO_LIMIT,
            SEQUENCE as f64,
            &with_current_speed(this_machine(&bar)?),
        ));
        how.recipe = quick;
        how.trace_tokens = samples(&how.recipe);
        make_quick(&mut how, checkpoint);
    }
    let ending = if how.options.certifies() {
        ", and its certificate"
    } else {
        ""
    };
    output.say(format!(
        "preparing `{}` in `{}`: profile, predictors, plan and bundle{ending}",
        checkpoint.identity().name,
        folder.display()
    ));
    let mut is_announced = false;
    let mut report = |work: Work<'_>| match work {
        Work::Begins {
            stage,
            tokens,
            sequence_tokens,
        } => {
            if !std::mem::replace(&mut is_announced, true)
                && let Ok(machine) = this_machine(&bar).map(with_current_speed)
            {
                let workload = workload(&how, checkpoint, tokens, sequence_tokens, &machine);
                output.say(times(&how, stage, &workload));
            }
        }
        Work::ProfileKept(profile) => {
            output.say(kept(profile, &how, arguments.tracing.trace_tokens));
        }
        Work::Profile(made) => profile_stage::say_stage(made, output),
        Work::Predictors(made, recipe) => training_stage::say_stage(made, recipe, output),
        Work::NoPredictors(policy) => output.say(format!(
            "predictors: none are trained, as `--policy {policy}` uses none"
        )),
        Work::Plan(plan, solved) => {
            output.say(summary(plan, Some(solved)).trim_end());
            say_warnings(plan, solved, output);
            let certifies = how.options.certifies();
            say_cost_of_skipping(plan, checkpoint.config(), certifies, output);
        }
        Work::Bundle(bundle, is_new) => {
            let folder = bundle.folder().display();
            output.say(if is_new {
                format!("bundle written to `{folder}`")
            } else {
                format!("bundle: `{folder}` is up to date")
            });
        }
    };
    let (bundle, profile) = prepare(checkpoint, tokenizer, &how, folder, &bar, &mut report)?;
    say_certificate(&bundle, output);
    let name = match arguments.out {
        Some(_) => folder.to_string_lossy(),
        None => checkpoint.identity().name.as_str().into(),
    };
    output.say(format!("ready: `powerinfer run {}`", shell_quoted(&name)));
    if let Some(full) = full {
        let (tokens, certified) = (full.tokens, full.certify_tokens);
        let again = match arguments.calibration.data[..] {
            [] => "",
            _ => " and with the same `--data`",
        };
        output.say(format!(
            "without `--quick`{again}, `prepare` profiles up to {tokens} tokens, trains predictors further if that saves bytes, and certifies on {certified} tokens; this takes at most about {}",
            duration(seconds(&how, 1, &full).iter().map(|(_, seconds)| seconds).sum())
        ));
    }
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

/// Applies the token counts of `--quick`, except those that other options set.
fn make_quick(how: &mut Prepare<'_>, checkpoint: &Checkpoint) {
    let [tokens, certified] = match checkpoint.config().parameters() {
        ..SMALL_PARAMETERS => QUICK_SMALL,
        _ => QUICK_LARGE,
    };
    if how.text.tokens == Tokens::Auto {
        how.text.tokens = Tokens::Count(tokens);
    }
    how.options.certify_tokens = how.options.certify_tokens.or(Some(certified));
}

/// Says that `profile` is used without new text, and which options it does not follow.
fn kept(profile: &Profile, how: &Prepare<'_>, trace_tokens: Option<usize>) -> String {
    let (header, tokens) = (profile.header(), profile.document().tokens);
    let has_settled = header.settings.contains_key("until_overlap");
    let ignored = [
        (
            "--tokens",
            matches!(how.text.tokens, Tokens::Count(count) if has_settled || tokens > count as u64),
        ),
        (
            "--trace-tokens",
            trace_tokens
                .is_some_and(|count| header.settings.get("trace_tokens") != Some(&count.into())),
        ),
        ("--seed", header.seed != how.seed),
    ];
    let ignored = ignored.into_iter().filter(|(_, differs)| *differs);
    let ignored: Vec<String> = ignored.map(|(option, _)| format!("`{option}`")).collect();
    let folder = profile.folder().display();
    if ignored.is_empty() {
        format!("profile: `{folder}` is used; `--data` profiles other text")
    } else {
        format!(
            "profile: `{folder}` is used, although it was made with another {}; give `--data` to make it again",
            ignored.join(" and ")
        )
    }
}

/// The work of a preparation of `checkpoint` with a profile of `tokens` tokens in sequences of `sequence_tokens` on `machine`.
fn workload(
    how: &Prepare<'_>,
    checkpoint: &Checkpoint,
    tokens: usize,
    sequence_tokens: f64,
    machine: &Hardware,
) -> Workload {
    let (config, options) = (checkpoint.config(), &how.options);
    let cores = machine.cpu.threads;
    let mut workload = Workload::new(config, options.quant(), cores, Rates::new(machine));
    workload.tokens = tokens as u64;
    workload.sequence_tokens = sequence_tokens;
    workload.trace_tokens = how.trace_tokens as u64;
    workload.certify_tokens = match options.certify_tokens {
        Some(count) => count as u64,
        None => certify_tokens(config, tokens as u64),
    };
    if let Recipe::Train(settings) = &how.recipe {
        (workload.calculates, workload.steps) = training_work(settings.method, settings.steps);
    }
    workload.searches = uses_predictors(how) && options.certifies();
    workload
}

fn uses_predictors(how: &Prepare<'_>) -> bool {
    !matches!(how.options.policy, Some(Policy::Dense | Policy::Exact))
}

/// Estimated seconds of each stage from number `first` on, except profiling on the GPU.
fn seconds(how: &Prepare<'_>, first: usize, workload: &Workload) -> Vec<(&'static str, f64)> {
    let is_on_gpu = first == 1 && how.device.is_some();
    let trains = first <= 2 && matches!(how.recipe, Recipe::Train(_)) && uses_predictors(how);
    let stages = [
        (StageKind::Profile, "profile", first == 1 && !is_on_gpu),
        (StageKind::Train, "predictors", trains),
        (StageKind::Place, "bundle", true),
        (StageKind::Certify, "certificate", how.options.certifies()),
    ];
    stages
        .into_iter()
        .filter(|(.., is_due)| *is_due)
        .map(|(kind, name, _)| (name, workload.needs(kind, 1).seconds))
        .collect()
}

/// The estimated times of the stages from number `first` on.
fn times(how: &Prepare<'_>, first: usize, workload: &Workload) -> String {
    let due = seconds(how, first, workload);
    let total: f64 = due.iter().map(|(_, seconds)| seconds).sum();
    let time = match total {
        ..1.0 => "less than a second".to_owned(),
        total => format!("about {}", duration(total)),
    };
    let elsewhere = if first == 1 && how.device.is_some() {
        ", not counting the profile on the GPU"
    } else {
        ""
    };
    let long = due.iter().filter(|(_, seconds)| *seconds >= 1.0);
    let each: Vec<String> = long
        .map(|(name, seconds)| format!("{name} {}", duration(*seconds)))
        .collect();
    let parts = match each.len() {
        0 => String::new(),
        _ => format!(": {}", each.join(", ")),
    };
    format!("this will take {time}{elsewhere}{parts}")
}
