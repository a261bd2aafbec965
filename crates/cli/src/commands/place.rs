//! `powerinfer place`: which neurons are computed, and which the GPU and which the CPU computes.

mod again;
pub(crate) mod certify;
mod describe;
mod forecast;
pub(crate) mod inputs;
pub(crate) mod modes;
mod options;
pub(crate) mod page;
pub(crate) mod problem;
pub(crate) mod request;
pub(crate) mod search;
mod solver;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use powerinfer_artifact::{
    ByteSize,
    placing::LayerPlacing,
    plan::{Plan, Policy},
    predictor_file::PredictorFile,
    write::ScratchFolder,
};
use powerinfer_bundle::{Bundle, PackInputs, pack};
use powerinfer_kernels::{CacheFormat, Format};
use powerinfer_model::{Checkpoint, ModelConfig};
use powerinfer_profile::Profile;
use powerinfer_solver::SolveReport;
use powerinfer_text::Tokenizer;
use serde_json::json;

use crate::{
    engine::PolicyArgument,
    model_argument,
    output::{Output, parse_percent, percent, print, print_json},
    progress::Bar,
};

use describe::say_result;
pub(crate) use describe::{beyond_the_card, describe};
use inputs::InputSparsity;
use modes::Subject;
use options::{PlacementArguments, VramArgument};
use problem::{largest_rank, problem};
pub(crate) use request::Request;
pub(crate) use solver::Scratch;
use solver::Solver;

/// What to place, within what, and where to.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  powerinfer place demo --vram 24G\n  powerinfer place demo --vram 2M --dry-run\n  powerinfer place demo.powerinfer/bundle --vram 12G"
)]
pub(crate) struct PlaceArguments {
    /// Model: a folder, a GGUF file, `org/name` on the hub, or `demo`; or a bundle, to be placed again:
    /// its plan alone is rewritten, and what no option names stays as it is
    #[arg(default_value = model_argument::DEMO, value_name = "MODEL|BUNDLE")]
    model: String,
    /// Folder of the profile [default: ./<model>.powerinfer/profile]
    #[arg(long, value_name = "DIR")]
    profile: Option<PathBuf>,
    /// Folder of the predictors [default: ./<model>.powerinfer/predictors, where it is there]
    #[arg(long, value_name = "DIR")]
    predictors: Option<PathBuf>,
    #[command(flatten)]
    budget: BudgetArguments,
    /// Folder to write the bundle to [default: ./<model>.powerinfer/bundle]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print the plan and write no bundle
    #[arg(long)]
    dry_run: bool,
    /// Draw the plan as a page that needs nothing from elsewhere
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// What may be used, and in which format.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Budget")]
pub(crate) struct BudgetArguments {
    /// Memory to use on the GPU: `24G` and `24GiB` are 24·2³⁰ bytes, `24GB` is 24·10⁹; `0G` uses none,
    /// `auto` what is free now less 256 MiB, and `24G,12G` two GPUs, which are planned for ahead
    #[arg(long, value_name = "SIZE[,SIZE…]|auto")]
    vram: VramArgument,
    /// Memory to use on the CPU [default: all of this machine's, or of the one `--hardware` names]
    #[arg(long, value_name = "SIZE")]
    ram: Option<ByteSize>,
    /// Tokens that the KV cache has room for [default: the model's context, at most 4096]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Format of the KV cache: f16, q8_0 at about half the memory, or f32 [default: f16]
    #[arg(long, value_name = "FORMAT")]
    kv_cache: Option<CacheFormat>,
    /// Machine to plan for: a name (pc-high, pc-low, rtx4090, rtx5090, rtx4060-8g, rtx3060-12g, h200-16c,
    /// laptop, cpu-only) or a TOML or JSON file, as `doctor --write` makes them [default: rtx4090]
    #[arg(long, value_name = "NAME|FILE")]
    hardware: Option<String>,
    /// Which neurons every layer computes [default: what is quickest within the allowed rise of
    /// perplexity, layer by layer]
    #[arg(long, value_name = "POLICY")]
    policy: Option<PolicyArgument>,
    /// By how much skipping neurons may raise perplexity, on text held back from the profile
    /// [default: 1%]
    #[arg(long, value_name = "SHARE%")]
    max_ppl_increase: Option<Rise>,
    /// Leave out this share of the inputs of attention's projections, the smallest, and of gate and up
    /// where every neuron is computed [default: none]
    #[arg(long, value_name = "SHARE%")]
    input_sparsity: Option<InputSparsity>,
    /// Tokens of held-back text to certify the bundle on, and as many to decide on; 0 certifies
    /// nothing [default: 8192, for models beyond a billion parameters fewer]
    #[arg(long, value_name = "N")]
    certify_tokens: Option<usize>,
    /// Format of the weights: f32, f16, bf16, q8_0, q4_k or q4_0 [default: q8_0]
    #[arg(long, value_name = "FORMAT")]
    quant: Option<Format>,
    #[command(flatten)]
    placement: PlacementArguments,
}

/// A rise as a share, given in percent.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rise(f64);

impl std::str::FromStr for Rise {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match parse_percent(text) {
            Some(share) if (0.0..=10.0).contains(&share) => Ok(Self(share)),
            _ => Err("give a share in percent, such as `1%` or `0.5%`".to_owned()),
        }
    }
}

impl BudgetArguments {
    /// Format of the weights.
    pub(crate) fn quant(&self) -> Format {
        self.quant.unwrap_or(Format::Q8_0)
    }

    /// By how much of itself perplexity may rise.
    fn allowed_rise(&self) -> f64 {
        self.max_ppl_increase.map_or(0.01, |Rise(share)| share)
    }

    /// Tokens to certify a model on, and to decide on.
    fn certify_tokens(&self, config: &ModelConfig) -> usize {
        self.certify_tokens.unwrap_or_else(|| {
            let weights = config.weights().into_iter();
            let parameters = weights.map(|weight| config.shape(weight).iter().product::<usize>());
            certify::usual_tokens(parameters.sum())
        })
    }
}

/// A plan and everything needed to pack it.
pub(crate) struct Placement {
    plan: Plan,
    report: SolveReport,
    orders: Vec<Vec<u32>>,
    placing: Vec<LayerPlacing>,
    predictors: Option<PredictorFile>,
    request: Request,
    quant: Format,
    seed: u64,
    /// Text to certify on.
    texts: Vec<Vec<u32>>,
    allowed_rise: f64,
}

pub(crate) fn run(arguments: &PlaceArguments, output: Output) -> Result<()> {
    if let Some(folder) = model_argument::existing_bundle(&arguments.model) {
        return again::run(&folder, arguments, output);
    }
    let checkpoint = model_argument::open_checkpoint(&arguments.model, output)?;
    let folder = model_argument::work_folder(&checkpoint.identity().name);
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
    page::refuse_inside(arguments.html.as_deref(), &out)?;
    let scratch = match arguments.dry_run {
        true => Scratch::None,
        false => Scratch::Beside(&out),
    };
    let budget = &arguments.budget;
    let placement = solve(&checkpoint, &profile, predictors, budget, scratch, output)?;
    if !arguments.json {
        print(describe(&placement.plan))?;
    }
    placement.say_result(output);
    let drawing = arguments.html.as_deref();
    page::draw(drawing, checkpoint.identity(), &placement.plan, output)?;
    let mut certificate = None;
    if !arguments.dry_run {
        let bundle = placement.pack(&checkpoint, &out, output)?;
        let bundle = placement.certify(bundle, output)?;
        if let Some(found) = bundle.certificate() {
            if !arguments.json {
                print("\n")?;
                print(certify::describe(found))?;
            }
            certificate = Some(found.clone());
        }
    }
    if arguments.json {
        print_json(&json!({
            "plan": placement.plan,
            "objective": placement.report.objective,
            "bound": placement.report.bound,
            "gap": placement.report.gap,
            "solve_seconds": placement.report.solve_seconds,
            "certificate": certificate,
        }))?;
    }
    Ok(())
}

/// Solves the placement of a model within a budget, with policies as far as accuracy allows.
///
/// Where that takes measuring, a bundle is packed into `scratch` for it, and removed.
pub(crate) fn solve(
    checkpoint: &Checkpoint,
    profile: &Profile,
    predictors: Option<PredictorFile>,
    arguments: &BudgetArguments,
    scratch: Scratch<'_>,
    output: Output,
) -> Result<Placement> {
    profile.check_model(checkpoint.identity())?;
    let request = Request::of(checkpoint, profile, predictors.as_ref(), arguments)?;
    if let Some(file) = &predictors {
        file.header()
            .check_model(&file.path(), checkpoint.identity())?;
    }
    let config = checkpoint.config();
    let subject = Subject {
        config,
        profile,
        predictors: predictors.as_ref(),
        quant: arguments.quant(),
        forced: arguments.policy.map(Policy::from),
        inputs_left_out: arguments.input_sparsity.map(|InputSparsity(share)| share),
    };
    subject.check_forced()?;
    let mut problem = problem(
        config,
        request.budget.clone(),
        request.hardware.clone(),
        arguments.quant(),
        subject.inputs_left_out,
        largest_rank(predictors.as_ref()),
    );
    arguments.placement.pin(&mut problem)?;
    if let Some(file) = &predictors {
        check_same_text(file, &request)?;
    }
    if let Scratch::Beside(out) = scratch {
        ScratchFolder::remove_leftover(out)?;
    }
    let tokens = arguments.certify_tokens(config);
    let [search_texts, certificate_texts] = held_back(profile, &request, tokens)?;
    let mut solver = Solver {
        checkpoint,
        subject,
        problem,
        options: arguments.placement.options(),
        request: &request,
        texts: search_texts,
        allowed_rise: arguments.allowed_rise(),
        inputs: None,
        scratch,
        output,
    };
    if let Some(share) = subject.inputs_left_out {
        solver.inputs = Some(solver.calibrated_inputs(share)?);
    }
    let leeway = solver.leeway()?;
    let solved = solver.solved(&leeway)?;
    Ok(Placement {
        plan: solved.plan,
        report: solved.report,
        orders: solved.orders,
        placing: solved.placing,
        predictors,
        request,
        quant: arguments.quant(),
        seed: profile.header().seed,
        texts: certificate_texts,
        allowed_rise: arguments.allowed_rise(),
    })
}

/// The texts that `profile` has held back, to decide on and to certify on; none where the context is
/// too short to score anything.
fn held_back(profile: &Profile, request: &Request, tokens: usize) -> Result<[Vec<Vec<u32>>; 2]> {
    if request.budget.context_tokens < 2 {
        return Ok(Default::default());
    }
    Ok(certify::split(&profile.reserved()?, tokens))
}

/// Refuses predictors that were fitted to another profile's text: what this profile has held back may
/// be among it.
fn check_same_text(file: &PredictorFile, request: &Request) -> Result<()> {
    let (fitted, here) = (
        file.header().inputs.get("profile"),
        request.inputs.get("profile"),
    );
    if fitted.is_some() && fitted != here {
        bail!(
            "the predictors in `{}` were made from another profile, which may have read the text that this one holds back to certify on; name their profile by `--profile`, or run `powerinfer train-predictors` with this one",
            file.path().display()
        );
    }
    Ok(())
}

/// Certifies `bundle` on `texts`, where there are any.
pub(crate) fn certify_bundle(
    bundle: Bundle,
    texts: &[Vec<u32>],
    allowed_rise: f64,
    output: Output,
) -> Result<Bundle> {
    let tokens = search::scored(texts);
    if tokens < certify::FEWEST {
        output.say(format!(
            "there is no certificate: {tokens} tokens were held back for it, at least {} are needed; profile more text, or raise `--certify-tokens`",
            certify::FEWEST
        ));
        return Ok(bundle);
    }
    let certificate = certify::measure(&bundle, texts, allowed_rise, output)?;
    if !certificate.holds() {
        let told = match certificate.tokens_needed() {
            Some(tokens) => format!(
                "is not shown to be within the {} allowed; that would take about {tokens} tokens",
                percent(allowed_rise)
            ),
            None => format!("is more than the {} allowed", percent(allowed_rise)),
        };
        output.say(format!("the rise of perplexity {told}"));
    }
    Ok(bundle.certify(certificate, texts)?)
}

/// Certifies a bundle that was packed without coming so far.
pub(crate) fn certify_again(
    bundle: Bundle,
    checkpoint: &Checkpoint,
    profile: &Profile,
    request: &Request,
    arguments: &BudgetArguments,
    output: Output,
) -> Result<Bundle> {
    let tokens = arguments.certify_tokens(checkpoint.config());
    let [_, texts] = held_back(profile, request, tokens)?;
    certify_bundle(bundle, &texts, arguments.allowed_rise(), output)
}

/// Says in a line what a bundle is certified for.
pub(crate) fn say_certificate(bundle: &Bundle, output: Output) {
    if let Some(certificate) = bundle.certificate() {
        output.say(format!(
            "certified on {} tokens that nothing was fitted to: perplexity {:+.2} % ({:+.2} to {:+.2}) over `dense`, top-1 agreement {}, {} of the FFN neurons computed",
            certificate.scoring.tokens,
            100.0 * certificate.perplexity_rise.value,
            100.0 * certificate.perplexity_rise.low,
            100.0 * certificate.perplexity_rise.high,
            percent(certificate.top1_agreement),
            percent(certificate.ffn_neurons_computed),
        ));
    }
}

impl Placement {
    /// Says how good the plan is and for which machine.
    pub(crate) fn say_result(&self, output: Output) {
        say_result(&self.plan, &self.report, output);
    }

    /// Writes the bundle.
    pub(crate) fn pack(
        &self,
        checkpoint: &Checkpoint,
        out: &Path,
        output: Output,
    ) -> Result<Bundle> {
        let mut companions = Tokenizer::FILES.to_vec();
        companions.push("generation_config.json");
        companions.dedup();
        let inputs = PackInputs {
            checkpoint,
            orders: &self.orders,
            predictors: self.predictors.as_ref(),
            plan: self.plan.clone(),
            placing: Some(&self.placing),
            quant: self.quant,
            companions: &companions,
            inputs: self.request.inputs.clone(),
            request: self.request.settings.clone(),
            seed: self.seed,
        };
        let bundle = pack(&inputs, out, &Bar::new(output))?;
        output.say(format!("bundle written to `{}`", bundle.folder().display()));
        Ok(bundle)
    }

    /// Measures `bundle` on text that was held back, and writes down what was found.
    pub(crate) fn certify(&self, bundle: Bundle, output: Output) -> Result<Bundle> {
        certify_bundle(bundle, &self.texts, self.allowed_rise, output)
    }
}
