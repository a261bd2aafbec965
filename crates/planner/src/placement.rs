//! A placement: the plan of a model within a budget, and everything needed to pack and certify it.

use std::path::Path;

use powerinfer_artifact::{
    Hint, Progress, Shard, placement_inputs::LayerInputs, plan::Plan,
    predictor_file::PredictorFile, progress::Silent, write::ScratchFolder,
};
use powerinfer_bundle::{Bundle, FIRST_REQUEST, IntegrityCheck, PackInputs, contents, pack_with};
use powerinfer_eval::format::percent;
use powerinfer_model::{Checkpoint, LanguageModel};
use powerinfer_pool::usable_cores;
use powerinfer_profile::Profile;
use powerinfer_runtime::{Execution, SingleSession};
use powerinfer_solver::SolveReport;
use powerinfer_tensor::Format;
use powerinfer_text::Tokenizer;

use crate::{
    PlanOptions, PlannerError, Request,
    certify::{self, Measurement},
    modes::Subject,
    pins,
    problem::{PredictorSizes, problem},
    search,
    solver::{Scratch, Solver},
};

/// Tokens that a new bundle is run on before it replaces another.
const TRIED_TOKENS: usize = 16;

/// A plan and everything needed to pack it.
pub struct Placement {
    plan: Plan,
    report: SolveReport,
    /// Folder of a temporary bundle of the same model, whose weights can be reused.
    packed: Option<ScratchFolder>,
    orders: Vec<Vec<u32>>,
    placing: Vec<LayerInputs>,
    predictors: Option<PredictorFile>,
    request: Request,
    quant: Format,
    seed: u64,
    /// Held-out texts for the certificate.
    texts: Vec<Vec<u32>>,
    /// Maximum number of tokens in these texts, set by `--certify`.
    most_tokens: usize,
    perplexity_budget: f64,
}

/// Finds the best placement of a model within its memory and perplexity budgets, for the `request` that `options`
/// resolve to.
///
/// If perplexity has to be measured, packs a temporary bundle into `scratch`.
///
/// # Errors
///
/// The inputs do not match the model or each other, an option cannot be met, no placement keeps the budget, a file cannot
/// be read or written, or `progress` interrupts.
pub fn plan(
    checkpoint: &Checkpoint,
    profile: &Profile,
    predictors: Option<PredictorFile>,
    request: Request,
    options: &PlanOptions,
    scratch: Scratch<'_>,
    progress: &dyn Progress,
) -> Result<Placement, PlannerError> {
    profile.check_model(checkpoint.identity())?;
    if let Some(file) = &predictors {
        file.header()
            .check_model(&file.path(), checkpoint.identity())?;
    }
    let config = checkpoint.config();
    options.check_attention(config)?;
    let subject = Subject {
        config,
        profile,
        predictors: predictors.as_ref(),
        quant: options.quant(),
        forced: options.policy,
        inputs_left_out: options.input_sparsity,
    };
    subject.check_forced()?;
    let mut problem = problem(
        config,
        request.budget.clone(),
        request.hardware.clone(),
        options.quant(),
        subject.inputs_left_out,
        PredictorSizes::of(config, predictors.as_ref()),
        options.prompt_batch,
    );
    pins::pin(&options.pins, &mut problem)?;
    if let Some(file) = &predictors {
        check_same_text(file, &request)?;
    }
    if let Scratch::NextTo(out) = scratch {
        ScratchFolder::remove_leftover(out, &contents(&[]))?;
        // Checked before the long measurements.
        contents(&Tokenizer::FILES).refuse_foreign(out)?;
        say_why_again(checkpoint, &request, options, out, progress);
    }
    let tokens = options.certify_tokens(config, profile);
    let [search_texts, certificate_texts] = held_out(profile, &request, tokens)?;
    let mut solver = Solver {
        checkpoint,
        subject,
        problem,
        options: options.solver(),
        request: &request,
        texts: search_texts,
        most_tokens: tokens,
        perplexity_budget: options.perplexity_budget(),
        inputs: None,
        scratch,
        packed: None,
        progress,
    };
    if let Some(share) = subject.inputs_left_out {
        solver.inputs = Some(solver.calibrated_inputs(share)?);
    }
    let allowed = solver.allowed_modes()?;
    let solved = solver.solve(&allowed)?;
    Ok(Placement {
        plan: solved.plan,
        report: solved.report,
        packed: solver.packed,
        orders: solved.orders,
        placing: solved.placing,
        predictors,
        request,
        quant: options.quant(),
        seed: profile.header().seed,
        texts: certificate_texts,
        most_tokens: tokens,
        perplexity_budget: options.perplexity_budget(),
    })
}

/// Reserved texts of `profile` for decisions and for certification; empty if the context is too short to score a token.
fn held_out(
    profile: &Profile,
    request: &Request,
    tokens: usize,
) -> Result<[Vec<Vec<u32>>; 2], PlannerError> {
    if request.budget.context_tokens < 2 {
        return Ok(Default::default());
    }
    Ok(certify::split(&profile.reserved()?, tokens))
}

/// Says why the bundle in `out`, if there is one, is not used.
fn say_why_again(
    checkpoint: &Checkpoint,
    request: &Request,
    options: &PlanOptions,
    out: &Path,
    progress: &dyn Progress,
) {
    let Ok(bundle) = Bundle::open(out, IntegrityCheck::Quick) else {
        return;
    };
    if request.packed(checkpoint, options.quant(), out).is_some() {
        return; // `--force`
    }
    let (folder, settings) = (out.display(), &bundle.header().settings);
    progress.note(&if settings.contains_key(FIRST_REQUEST) {
        format!("bundle: `{folder}` still has the policies of its first budget; making it again to choose policies for the new budget")
    } else {
        format!("bundle: `{folder}` was made from other artifacts or settings; making it again")
    });
}

/// Refuses predictors made from another profile, since they may have been trained on the reserved texts of this one.
fn check_same_text(file: &PredictorFile, request: &Request) -> Result<(), PlannerError> {
    let (fitted, here) = (
        file.header().inputs.get("profile"),
        request.inputs.get("profile"),
    );
    if fitted.is_some() && fitted != here {
        return Err(PlannerError::OtherProfile {
            folder: file.path(),
        });
    }
    Ok(())
}

/// Certifies a packed `bundle` on the reserved texts of `profile`, like [`Placement::certify`].
///
/// # Errors
///
/// The reserved texts cannot be read, the bundle cannot be run or changed, or `progress` interrupts.
pub fn certify_bundle(
    bundle: Bundle,
    checkpoint: &Checkpoint,
    profile: &Profile,
    request: &Request,
    options: &PlanOptions,
    progress: &dyn Progress,
) -> Result<Bundle, PlannerError> {
    let tokens = options.certify_tokens(checkpoint.config(), profile);
    let [_, texts] = held_out(profile, request, tokens)?;
    certify_on(
        bundle,
        &texts,
        tokens,
        options.perplexity_budget(),
        progress,
    )
}

/// Recommends more text, before hours of work, if the `reserved` texts of a profile are too short for a certificate.
pub fn check_reserved(reserved: &[Vec<u32>], progress: &dyn Progress) {
    let halves = certify::split(reserved, usize::MAX);
    let tokens = halves.iter().map(|texts| search::scored(texts)).min();
    if tokens < Some(certify::FEWEST) {
        advise_more(tokens.unwrap_or(0), Hint::ProfileMoreText, progress);
    }
}

fn advise_more(tokens: usize, hint: Hint, progress: &dyn Progress) {
    let line = format!(
        "there is no certificate: {tokens} tokens are reserved for it (about 1 in 16 tokens of a short text), but at least {} are needed",
        certify::FEWEST
    );
    progress.advise(&line, hint);
}

/// Certifies `bundle` on `texts`, which were limited to `most` tokens, or advises more text if there is too little.
fn certify_on(
    bundle: Bundle,
    texts: &[Vec<u32>],
    most: usize,
    perplexity_budget: f64,
    progress: &dyn Progress,
) -> Result<Bundle, PlannerError> {
    let tokens = search::scored(texts);
    if tokens < certify::FEWEST {
        advise_more(tokens, certify::more_text(texts, most), progress);
        return Ok(bundle);
    }
    let measurement = Measurement::new(&bundle, texts);
    let certificate = measurement.measure_all(perplexity_budget, progress)?;
    if !certificate.holds() {
        let allowed = percent(perplexity_budget);
        match certificate.tokens_needed() {
            Some(needed) => progress.advise(
                &format!(
                    "perplexity may rise by more than the {allowed} allowed: {tokens} tokens are too few to tell; about {needed} would be enough if its change on them is {:+.1}% too",
                    100.0 * certificate.perplexity_rise.value
                ),
                certify::more_text(texts, most),
            ),
            None => progress.advise(
                &format!("perplexity rises by more than the {allowed} allowed"),
                Hint::LessSkipping,
            ),
        }
    }
    let bundle = bundle.certify(certificate, texts)?;
    certify::remove_windows(bundle.folder());
    Ok(bundle)
}

/// Measures `shard` of the certificate of `bundle` into [`certify::windows_file`]; returns its windows and all windows.
/// Once the files of all shards are merged, [`certify_bundle`] has nothing left to measure.
///
/// # Errors
///
/// The reserved texts cannot be read, the shard is empty, the bundle cannot be run, its file cannot be written, or `progress`
/// interrupts.
pub fn certify_shard(
    bundle: &Bundle,
    checkpoint: &Checkpoint,
    profile: &Profile,
    request: &Request,
    options: &PlanOptions,
    shard: Shard,
    progress: &dyn Progress,
) -> Result<(usize, usize), PlannerError> {
    let tokens = options.certify_tokens(checkpoint.config(), profile);
    let [_, texts] = held_out(profile, request, tokens)?;
    Measurement::new(bundle, &texts).measure_shard(shard, progress)
}

impl Placement {
    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Statistics of the solver.
    pub fn report(&self) -> &SolveReport {
        &self.report
    }

    /// Packs the bundle into the folder `out`, where it replaces another once its logits are known to be finite.
    ///
    /// # Errors
    ///
    /// A weight cannot be read or is beyond the format, logits are not finite, the bundle cannot be written, or `progress`
    /// interrupts.
    pub fn pack(
        &self,
        checkpoint: &Checkpoint,
        out: &Path,
        progress: &dyn Progress,
    ) -> Result<Bundle, PlannerError> {
        let inputs = PackInputs {
            checkpoint,
            orders: &self.orders,
            predictors: self.predictors.as_ref(),
            plan: self.plan.clone(),
            placement_inputs: Some(&self.placing),
            quant: self.quant,
            companions: &Tokenizer::FILES,
            inputs: self.request.inputs.clone(),
            request: self.request.settings.clone(),
            seed: self.seed,
        };
        let replaces = Bundle::open(out, IntegrityCheck::Quick).is_ok();
        let packed = self.packed.as_ref().map(ScratchFolder::path);
        pack_with(&inputs, packed.as_deref(), out, progress, |bundle| {
            if !replaces {
                return Ok(());
            }
            let execution = Execution::on_cpu(usable_cores());
            let mut model = SingleSession::open(bundle, None, &execution, &Silent)?;
            let text = self.texts.first().map_or(&[0][..], Vec::as_slice);
            let tokens = &text[..text.len().min(TRIED_TOKENS).min(model.context_limit())];
            model.forward_last(tokens)?;
            Ok(())
        })
    }

    /// Measures `bundle` on held-out text and adds the certificate to it.
    ///
    /// # Errors
    ///
    /// The bundle cannot be run or changed, or `progress` interrupts.
    pub fn certify(&self, bundle: Bundle, progress: &dyn Progress) -> Result<Bundle, PlannerError> {
        certify_on(
            bundle,
            &self.texts,
            self.most_tokens,
            self.perplexity_budget,
            progress,
        )
    }
}
