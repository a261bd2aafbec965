//! `powerinfer place`: which neurons are computed, and which the GPU and which the CPU computes.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::ArgMatches;
use powerinfer_artifact::{
    Shard,
    certificate::{Certificate, certified_settings},
    plan::Plan,
    predictor_file::PredictorFile,
};
use powerinfer_bundle::{Bundle, IntegrityCheck};
use powerinfer_model::Checkpoint;
use powerinfer_planner::{
    Request, Scratch, certify, certify_bundle, certify_shard, place_again, plan, rewrite,
};
use powerinfer_profile::Profile;
use powerinfer_solver::{Decision, SolveReport};
use serde_json::json;

use crate::{
    budget_arguments::BudgetArguments,
    certificate_table,
    earlier_settings::{ResetArgument, with_earlier},
    hint::Advised,
    model_argument,
    output::{Output, print, print_json},
    page_file::refuse_inside,
    plan_table::{describe, draw, say_cost_of_skipping, say_warnings, summary},
    progress::Bar,
};

/// Model, budgets and target of a placement.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  powerinfer place demo --vram 24G\n  powerinfer place demo --vram 70M --dry-run\n  powerinfer place demo.powerinfer/bundle --vram 12G"
)]
pub(crate) struct PlaceArguments {
    /// Model: a folder, a GGUF file, `org/name` on the hub, or `demo`. To re-plan instead: a bundle, or the name of a
    /// model prepared here; only the plan is rewritten, and other settings are kept
    #[arg(default_value = model_argument::DEMO, value_name = "MODEL|BUNDLE")]
    model: String,
    /// Folder of the profile [default: ./<model>.powerinfer/profile]
    #[arg(long, value_name = "DIR")]
    profile: Option<PathBuf>,
    /// Folder of the predictors [default: ./<model>.powerinfer/predictors, if it exists]
    #[arg(long, value_name = "DIR")]
    predictors: Option<PathBuf>,
    #[command(flatten)]
    budget: BudgetArguments,
    /// Folder to write the bundle to, created if missing [default: ./<model>.powerinfer/bundle]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Pack, and leave the certificate to `--certify-shard`, or to this command without the option
    #[arg(long, conflicts_with = "dry_run")]
    certify_later: bool,
    /// Measure one of n shards of the packed bundle's certificate, such as `2/4`: to `bundle-certificate-2-of-4.jsonl` next to
    /// the bundle. `powerinfer merge` joins the shards, and this command without the option completes the certificate
    #[arg(long, value_name = "I/N", conflicts_with_all = ["dry_run", "force", "certify_later", "html", "json"])]
    certify_shard: Option<Shard>,
    /// Print the plan and write no bundle
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    reset: ResetArgument,
    /// Place and pack again what is up to date
    #[arg(long)]
    force: bool,
    /// Write a self-contained page of the plan
    #[arg(long, value_name = "FILE", value_parser = crate::values::new_file)]
    html: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &PlaceArguments, matches: &ArgMatches, output: Output) -> Result<()> {
    if let Some(folder) = model_argument::existing_bundle(&arguments.model) {
        refuse_decisions(arguments)?;
        let bundle = Bundle::open(&folder, IntegrityCheck::Quick)?;
        let model = bundle.header().model.clone();
        let work = folder.parent().filter(|work| {
            folder.ends_with("bundle")
                && work
                    .extension()
                    .is_some_and(|extension| extension == "powerinfer")
        });
        let work = work.map(Path::to_owned);
        let run = |arguments: &PlaceArguments| again(bundle, arguments, output);
        let (work, check) = (work.as_ref(), refuse_decisions);
        return with_earlier(arguments, matches, work, &model, output, check, run);
    }
    model_argument::check_model_or_bundle(&arguments.model)?;
    let (checkpoint, _) = model_argument::open_model(&arguments.model, output)?;
    let folder = model_argument::work_folder(&checkpoint.identity().name);
    let is_usual = arguments.out.is_none();
    let run = |arguments: &PlaceArguments| place(arguments, &checkpoint, &folder, output);
    let (folder, model) = (is_usual.then_some(&folder), checkpoint.identity());
    with_earlier(arguments, matches, folder, model, output, |_| Ok(()), run)
}

/// Places `checkpoint`, whose artifacts are in the work `folder`.
fn place(
    arguments: &PlaceArguments,
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
    let predictors = match &arguments.predictors {
        Some(folder) => Some(PredictorFile::open(folder)?),
        None => {
            let folder = folder.join("predictors");
            folder
                .exists()
                .then(|| PredictorFile::open(&folder))
                .transpose()?
        }
    };
    let out = arguments
        .out
        .clone()
        .unwrap_or_else(|| folder.join("bundle"));
    refuse_inside(arguments.html.as_deref(), &out)?;
    let scratch = if arguments.dry_run {
        Scratch::None
    } else {
        Scratch::NextTo(&out)
    };
    let (options, bar) = (arguments.budget.options()?, Bar::new(output));
    let request = Request::new(checkpoint, &profile, predictors.as_ref(), &options, &bar)?;
    if let Some(shard) = arguments.certify_shard {
        let Some(bundle) = request.packed(checkpoint, options.quant(), &out) else {
            bail!(Advised::new(
                format!(
                    "`{}` is not the bundle that these options make",
                    out.display()
                ),
                "first run this command with `--certify-later` instead of `--certify-shard`"
            ));
        };
        let shard_of = certify_shard(
            &bundle, checkpoint, &profile, &request, &options, shard, &bar,
        )?;
        let file = certify::windows_file(bundle.folder(), shard);
        output.say(format!(
            "certificate: {} of {} windows measured; written to `{}`",
            shard_of.0,
            shard_of.1,
            file.display()
        ));
        return Ok(());
    }
    let certifies = options.certifies() && !arguments.certify_later;
    if !arguments.force
        && !arguments.dry_run
        && let Some(mut bundle) = request.packed(checkpoint, options.quant(), &out)
    {
        output.say(format!("bundle: `{}` is up to date", out.display()));
        if certifies && bundle.certificate().is_none() {
            bundle = certify_bundle(bundle, checkpoint, &profile, &request, &options, &bar)?;
        }
        let (plan, certificate) = (bundle.plan(), bundle.certificate().cloned());
        draw(
            arguments.html.as_deref(),
            checkpoint.identity(),
            plan,
            output,
        )?;
        return if arguments.json {
            print_answer(plan, None, certificate)
        } else {
            print_plan(plan, None, output)
        };
    }
    let placement = plan(
        checkpoint, &profile, predictors, request, &options, scratch, &bar,
    )?;
    let (plan, report) = (placement.plan(), placement.report());
    if !arguments.json {
        print_plan(plan, Some(report), output)?;
    }
    say_warnings(plan, report, output);
    say_cost_of_skipping(plan, checkpoint.config(), options.certifies(), output);
    draw(
        arguments.html.as_deref(),
        checkpoint.identity(),
        plan,
        output,
    )?;
    let mut certificate = None;
    if !arguments.dry_run {
        let bundle = placement.pack(checkpoint, &out, &bar)?;
        output.say(format!("bundle written to `{}`", bundle.folder().display()));
        let bundle = if certifies {
            placement.certify(bundle, &bar)?
        } else {
            bundle
        };
        if let Some(found) = bundle.certificate() {
            if !arguments.json {
                print("\n")?;
                print(certificate_table::describe(found))?;
                if output.verbose {
                    print(certificate_table::layers(found))?;
                }
            }
            certificate = Some(found.clone());
        }
    }
    if arguments.json {
        print_answer(plan, Some(report), certificate)?;
    }
    Ok(())
}

/// Prints a plan in a few lines, with `--verbose` all of it.
fn print_plan(plan: &Plan, report: Option<&SolveReport>, output: Output) -> Result<()> {
    if output.verbose {
        print(describe(plan, report))
    } else {
        print(summary(plan, report))
    }
}

/// Prints a plan, how it was solved unless it was up to date, and its certificate.
fn print_answer(
    plan: &Plan,
    report: Option<&SolveReport>,
    certificate: Option<Certificate>,
) -> Result<()> {
    print_json(&json!({
        "plan": plan,
        "objective": report.map(|report| report.objective),
        "bound": report.map(|report| report.bound),
        "gap": report.map(|report| report.gap),
        "solve_seconds": report.map(|report| report.solve_seconds),
        "certificate": certificate,
    }))
}

/// Re-plans `bundle`, and rewrites its plan unless this is a dry run.
fn again(bundle: Bundle, arguments: &PlaceArguments, output: Output) -> Result<()> {
    let folder = bundle.folder().to_owned();
    refuse_inside(arguments.html.as_deref(), &folder)?;
    let (options, bar) = (arguments.budget.options()?, Bar::new(output));
    let Decision { plan, report, .. } = place_again(&bundle, &options, &bar)?;
    if !arguments.json {
        print_plan(&plan, Some(&report), output)?;
    }
    say_warnings(&plan, &report, output);
    let model = bundle.header().model.clone();
    let certificate = bundle.certificate().cloned();
    if !arguments.dry_run {
        rewrite(bundle, plan.clone())?;
        output.say(format!(
            "re-planned the bundle in `{}`; it computes the same neurons as before",
            folder.display()
        ));
        let is_certified = |found: &Certificate| found.decisions == certified_settings(&plan);
        if certificate
            .as_ref()
            .is_some_and(|found| !is_certified(found))
        {
            output.say("the certificate is of another format of the KV cache; place the model, not the bundle, for a new one");
        }
    }
    draw(arguments.html.as_deref(), &model, &plan, output)?;
    if arguments.json {
        print_answer(&plan, Some(&report), certificate)?;
    }
    Ok(())
}

/// Refuses options that would change what a bundle computes, or where it is.
fn refuse_decisions(arguments: &PlaceArguments) -> Result<()> {
    let given = [
        ("--profile", arguments.profile.is_some()),
        ("--predictors", arguments.predictors.is_some()),
        ("--out", arguments.out.is_some()),
        ("--certify-later", arguments.certify_later),
        ("--certify-shard", arguments.certify_shard.is_some()),
    ];
    let given = given.into_iter().find(|(_, is_given)| *is_given);
    let option = given.map(|(option, _)| option);
    if let Some(option) = option.or_else(|| arguments.budget.deciding_option()) {
        bail!(Advised::new(
            format!(
                "`{}` is a bundle, and re-planning does not change which neurons are computed",
                arguments.model
            ),
            format!("`{option}` requires the model, not the bundle")
        ));
    }
    Ok(())
}
