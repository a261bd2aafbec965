//! All stages in order.

use std::{path::Path, sync::Arc};

use powerinfer_artifact::{
    Progress, Shard,
    plan::{Plan, Policy},
    predictor_file::PredictorFile,
};
use powerinfer_bundle::Bundle;
use powerinfer_kernels::cuda::Device;
use powerinfer_model::Checkpoint;
use powerinfer_planner::{PlanOptions, Request, Scratch, certify_bundle, check_reserved, plan};
use powerinfer_predictor::{FEWEST_SAMPLES, Recipe, is_current};
use powerinfer_profile::{Profile, Settings};
use powerinfer_solver::SolveReport;
use powerinfer_text::Tokenizer;

use crate::{CalibrationText, PipelineError, Stage, profile, stages::check_model, train};

/// How a bundle is made.
#[derive(Debug)]
pub struct Prepare<'a> {
    /// Text to calibrate on.
    pub text: CalibrationText,
    /// Samples of each layer to keep for training.
    pub trace_tokens: usize,
    /// How predictors are made.
    pub recipe: Recipe,
    /// Budgets and formats.
    pub options: PlanOptions,
    /// Device that profiles; none for the CPU.
    pub device: Option<&'a Arc<dyn Device>>,
    /// Seed of every random choice.
    pub seed: u64,
}

/// A stage that has ended, with what it has made or found up to date.
#[derive(Debug)]
pub enum Work<'a> {
    /// A stage has work to do: its artifact is missing or out of date.
    Begins {
        /// Its number, from 1.
        stage: usize,
        /// Tokens that the profile has, or will usually have.
        tokens: usize,
        /// Mean number of tokens per sequence if the stage is the profile, otherwise 0.
        sequence_tokens: f64,
    },
    /// No text was given, so the existing profile is used, whatever text it was made from.
    ProfileKept(&'a Profile),
    /// The profile.
    Profile(&'a Stage<Profile>),
    /// The predictors, and how they were made.
    Predictors(&'a Stage<PredictorFile>, &'a Recipe),
    /// No predictors are trained, because the policy of all layers uses none.
    NoPredictors(Policy),
    /// A plan that is about to be packed.
    Plan(&'a Plan, &'a SolveReport),
    /// The bundle, before it is certified; true if it was just packed, false if it was up to date.
    Bundle(&'a Bundle, bool),
}

/// Receives the beginning and the results of each stage.
pub type Report<'a> = &'a mut dyn FnMut(Work<'_>);

/// Makes the profile, the predictors and the bundle of `checkpoint` in the folders `profile`, `predictors` and `bundle` of
/// `folder`, and certifies the bundle if the options ask for that. Artifacts that are up to date are reused.
///
/// # Errors
///
/// A stage fails, or `progress` interrupts; finished stages are kept.
pub fn prepare(
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
    prepare: &Prepare<'_>,
    folder: &Path,
    progress: &dyn Progress,
    report: Report<'_>,
) -> Result<(Bundle, Profile), PipelineError> {
    let options = &prepare.options;
    let stage = |number| progress.stage(number, 3);
    stage(1);
    // Errors that need no profile come before hours of profiling.
    options.check(checkpoint.config())?;
    prepare.recipe.check()?;
    if options.policy == Some(Policy::Predicted) {
        prepare.recipe.check_budget(checkpoint.config())?;
    }
    let profile = prepare.profile(
        checkpoint,
        tokenizer,
        &folder.join("profile"),
        progress,
        report,
    )?;
    stage(2);
    let out = folder.join("predictors");
    let predictors = match options.policy {
        Some(policy @ (Policy::Dense | Policy::Exact)) => {
            report(Work::NoPredictors(policy));
            // As `place` does: predictors that exist are used.
            out.exists()
                .then(|| PredictorFile::open(&out))
                .transpose()?
        }
        _ => {
            let (recipe, whole) = (&prepare.recipe, Shard::WHOLE);
            if !is_current(&out, &profile, recipe, whole)? {
                report(begins(2, &profile));
            }
            let made = train(checkpoint, &profile, recipe, whole, &out, false, progress)?;
            report(Work::Predictors(&made, recipe));
            Some(made.artifact)
        }
    };

    stage(3);
    let out = folder.join("bundle");
    let bundle = place(
        checkpoint, &profile, predictors, options, &out, progress, report,
    )?;
    Ok((bundle, profile))
}

/// Places, packs and certifies a bundle of `checkpoint` in the folder `out`, unless an up-to-date one is there.
///
/// # Errors
///
/// The model does not fit the budget, an option is out of range, a file cannot be read or written, or `progress`
/// interrupts.
pub fn place(
    checkpoint: &Checkpoint,
    profile: &Profile,
    predictors: Option<PredictorFile>,
    options: &PlanOptions,
    out: &Path,
    progress: &dyn Progress,
    report: Report<'_>,
) -> Result<Bundle, PipelineError> {
    let request = Request::new(checkpoint, profile, predictors.as_ref(), options, progress)?;
    if let Some(bundle) = request.packed(checkpoint, options.quant(), out) {
        report(Work::Bundle(&bundle, false));
        // A run may have been stopped between packing and certifying.
        if bundle.certificate().is_some() || !options.certifies() {
            return Ok(bundle);
        }
        let certified = certify_bundle(bundle, checkpoint, profile, &request, options, progress);
        return Ok(certified?);
    }
    report(begins(3, profile));
    let scratch = Scratch::NextTo(out);
    let placement = plan(
        checkpoint, profile, predictors, request, options, scratch, progress,
    )?;
    report(Work::Plan(placement.plan(), placement.report()));
    let bundle = placement.pack(checkpoint, out, progress)?;
    report(Work::Bundle(&bundle, true));
    if !options.certifies() {
        return Ok(bundle);
    }
    Ok(placement.certify(bundle, progress)?)
}

fn begins(stage: usize, profile: &Profile) -> Work<'_> {
    Work::Begins {
        stage,
        tokens: usize::try_from(profile.document().tokens).unwrap_or(usize::MAX),
        sequence_tokens: 0.0,
    }
}

impl Prepare<'_> {
    /// The profile in `out`, made again if the given text has changed. Without text, an existing profile of this model is used
    /// as it is.
    fn profile(
        &self,
        checkpoint: &Checkpoint,
        tokenizer: &Tokenizer,
        out: &Path,
        progress: &dyn Progress,
        report: Report<'_>,
    ) -> Result<Profile, PipelineError> {
        let files = checkpoint.files();
        if !self.text.has_text(files)
            && let Ok(profile) = Profile::open(out)
        {
            check_model(&profile, checkpoint)?;
            report(Work::ProfileKept(&profile));
            return Ok(profile);
        }
        let config = checkpoint.config();
        let calibration = self
            .text
            .read(files, config, tokenizer, self.seed, progress)?;
        calibration.check_parts(FEWEST_SAMPLES)?;
        if self.options.certifies() {
            check_reserved(calibration.reserved(), progress);
        }
        let settings = Settings {
            trace_tokens: self.trace_tokens,
            amount: self.text.amount(),
            shard: Shard::WHOLE,
            seed: self.seed,
        };
        if !Profile::is_current(out, checkpoint, &calibration, settings) {
            let has_exact_zeros = config.activation.has_exact_zeros();
            let sequences = calibration.sequences().len().max(1);
            report(Work::Begins {
                stage: 1,
                tokens: settings.usual_tokens(&calibration, has_exact_zeros),
                sequence_tokens: calibration.tokens() as f64 / sequences as f64,
            });
        }
        let made = profile(
            checkpoint,
            &calibration,
            settings,
            self.device,
            out,
            false,
            progress,
        )?;
        report(Work::Profile(&made));
        Ok(made.artifact)
    }
}
