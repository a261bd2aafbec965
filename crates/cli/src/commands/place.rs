//! `powerinfer place`: which neurons are computed, and which the GPU and which the CPU computes.

pub(crate) mod certify;
pub(crate) mod inputs;
pub(crate) mod search;
mod ways;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use powerinfer_artifact::{
    ByteSize, Digest,
    hardware::{self, Hardware},
    plan::{Budget, Device, InputThresholds, Plan, Policy},
    predictor_file::PredictorFile,
    threshold_curve::ERRORS,
    write::ScratchFolder,
};
use powerinfer_bundle::{
    Bundle, PackInputs, REQUEST, neuron_bytes, pack, weight_bytes, weight_bytes_by_input,
};
use powerinfer_kernels::Format;
use powerinfer_model::{Checkpoint, LayerWeight, ModelConfig, Weight};
use powerinfer_profile::Profile;
use powerinfer_solver::{
    GROUP_SIZE, Layer, NeuronShape, Options, Problem, SolveReport, Way, decide,
};
use powerinfer_text::Tokenizer;
use serde_json::json;

use crate::{
    engine::PolicyArgument,
    machine, model_argument,
    output::{Output, Table, percent, print, print_json},
    progress::Bar,
};

use inputs::InputSparsity;
use search::Judge;
use ways::{LayerWays, Leeway, Subject};

/// Longest context a plan makes room for unless told otherwise.
const DEFAULT_CONTEXT: usize = 4096;
/// Machine whose GPU is assumed where `--hardware` names none.
const ASSUMED_HARDWARE: &str = "rtx4090";

/// What to place, within what, and where to.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  powerinfer place demo --vram 24G\n  powerinfer place demo --vram 2M --dry-run"
)]
pub(crate) struct PlaceArguments {
    /// Model: a folder, a GGUF file, `org/name` on the hub, or `demo`
    #[arg(default_value = model_argument::DEMO)]
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
    /// Print the plan and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// What may be used, and in which format.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Budget")]
pub(crate) struct BudgetArguments {
    /// Memory to use on the GPU: `24G` and `24GiB` are 24·2³⁰ bytes, `24GB` is 24·10⁹; `0G` uses none
    #[arg(long, value_name = "SIZE")]
    vram: ByteSize,
    /// Memory to use on the CPU [default: all of this machine's]
    #[arg(long, value_name = "SIZE")]
    ram: Option<ByteSize>,
    /// Tokens that the KV cache has room for [default: the model's context, at most 4096]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Machine to plan for: a name (pc-high, pc-low, rtx4090, rtx3060-12g, cpu-only) or a JSON file
    #[arg(long, value_name = "NAME|FILE", default_value = ASSUMED_HARDWARE)]
    hardware: String,
    /// Which neurons every layer computes [default: what is quickest within the allowed rise of
    /// perplexity, layer by layer]
    #[arg(long, value_name = "POLICY")]
    policy: Option<PolicyArgument>,
    /// By how much skipping neurons may raise perplexity, on text held back from the profile
    #[arg(long, value_name = "SHARE%", default_value = "1%")]
    max_ppl_increase: Rise,
    /// Leave out this share of the inputs of attention's projections, the smallest, and of gate and up
    /// where every neuron is computed [default: none]
    #[arg(long, value_name = "SHARE%")]
    input_sparsity: Option<InputSparsity>,
    /// Tokens of held-back text to certify the bundle on, and as many to decide on; 0 certifies
    /// nothing [default: 8192, for models beyond a billion parameters fewer]
    #[arg(long, value_name = "N")]
    certify_tokens: Option<usize>,
    /// Format of the weights: f32, bf16, q8_0 or q4_0
    #[arg(long, value_name = "FORMAT", default_value_t = Format::Q8_0)]
    pub(crate) quant: Format,
}

/// A rise as a share, given in percent.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rise(f64);

impl std::str::FromStr for Rise {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let percent = text
            .strip_suffix('%')
            .map(|number| number.trim().parse::<f64>());
        match percent {
            Some(Ok(percent)) if (0.0..=1000.0).contains(&percent) => Ok(Self(percent / 100.0)),
            _ => Err("give a share in percent, such as `1%` or `0.5%`".to_owned()),
        }
    }
}

impl BudgetArguments {
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
    predictors: Option<PredictorFile>,
    request: Request,
    quant: Format,
    seed: u64,
    /// Text to certify on.
    texts: Vec<Vec<u32>>,
    allowed_rise: f64,
}

pub(crate) fn run(arguments: &PlaceArguments, output: Output) -> Result<()> {
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
        quant: arguments.quant,
        forced: arguments.policy.map(Policy::from),
        inputs_left_out: arguments.input_sparsity.map(|InputSparsity(share)| share),
    };
    subject.check_forced()?;
    let problem = problem(
        config,
        request.budget.clone(),
        request.hardware.clone(),
        arguments.quant,
        subject.inputs_left_out,
    );
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
        request: &request,
        texts: search_texts,
        allowed_rise: arguments.max_ppl_increase.0,
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
        predictors,
        request,
        quant: arguments.quant,
        seed: profile.header().seed,
        texts: certificate_texts,
        allowed_rise: arguments.max_ppl_increase.0,
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

/// Where a bundle may be packed that is only there to be measured.
#[derive(Clone, Copy)]
pub(crate) enum Scratch<'a> {
    /// Nowhere: nothing is to be written.
    None,
    /// Beside this folder.
    Beside(&'a Path),
}

/// A solved placement.
struct Solved {
    plan: Plan,
    report: SolveReport,
    orders: Vec<Vec<u32>>,
    /// Per layer, microseconds that its way saves over the quickest that changes nothing.
    savings: Vec<f64>,
}

/// Finds a placement, and how far its policies may go.
struct Solver<'a> {
    checkpoint: &'a Checkpoint,
    subject: Subject<'a>,
    problem: Problem,
    request: &'a Request,
    /// Text to decide on.
    texts: Vec<Vec<u32>>,
    allowed_rise: f64,
    /// Per layer, which inputs are read; all where there is none.
    inputs: Option<Vec<InputThresholds>>,
    scratch: Scratch<'a>,
    output: Output,
}

/// Margins that a rise must stay below what is allowed: one for the text it is measured on, and one
/// for the text that it is certified on.
const CAUTION: f64 = 2.0;

/// The common error that a plan assumes where none may be measured, as a place in the curve.
const ASSUMED_LEVEL: f64 = 7.0;

impl Solver<'_> {
    /// Which inputs to read, for `share` of them to be left out on the text that decides.
    fn calibrated_inputs(&self, share: f64) -> Result<Vec<InputThresholds>> {
        let Scratch::Beside(out) = self.scratch else {
            bail!(
                "a dry run measures nothing, and `--input-sparsity` has to be calibrated; leave out one of them"
            )
        };
        if search::scored(&self.texts) == 0 {
            bail!(
                "there is no text to calibrate `--input-sparsity` on: none was held back from the profile, or `--certify-tokens` is too low; profile more text, or raise it"
            );
        }
        let folder = ScratchFolder::beside(out)?;
        let bundle = self.pack(&self.solved(&self.most())?, &folder.path().join("bundle"))?;
        inputs::calibrate(bundle, &self.texts, share, self.output)
    }

    /// The furthest that policies may go without being measured.
    fn most(&self) -> Leeway {
        Leeway {
            foreseen: vec![true; self.subject.config.layer_count],
            level: Some(ASSUMED_LEVEL),
        }
    }

    /// How far the policies may go.
    fn leeway(&mut self) -> Result<Leeway> {
        let layers = self.subject.config.layer_count;
        let none = Leeway::none(layers);
        let most = self.most();
        match self.subject.forced {
            Some(Policy::Dense | Policy::Exact) => return Ok(none),
            // Who forces these wants to see what they do; the certificate tells.
            Some(Policy::Predicted | Policy::SignBit) => return Ok(most),
            Some(Policy::Threshold) | None => {}
        }
        if !self.subject.has_thresholds() && self.subject.config.activation.has_exact_zeros() {
            return self.leeway_of_foresight(&none, &most);
        }
        if !self.subject.has_thresholds() {
            self.output.say("the activation is never exactly zero and there are no thresholds, so every neuron is computed; `powerinfer train-predictors` calibrates thresholds");
            return Ok(none);
        }
        if matches!(self.scratch, Scratch::None) {
            self.output.say(format!(
                "a dry run measures nothing: it assumes a relative FFN error of {} in every layer",
                percent(ERRORS[ASSUMED_LEVEL as usize])
            ));
            return Ok(most);
        }
        if !self.can_measure() {
            if self.subject.forced.is_some() {
                bail!(
                    "`--policy threshold` takes text that was held back, to find how far thresholds may go; profile more text, or raise `--certify-tokens`"
                );
            }
            return Ok(none);
        }
        let ladder = search::thresholds(layers);
        self.last_allowed(&ladder, &most)
    }

    /// Which layers may foresee: all that would be quicker for it, or as many of them as
    /// perplexity allows, those first that save most for what they miss.
    fn leeway_of_foresight(&mut self, none: &Leeway, most: &Leeway) -> Result<Leeway> {
        let solved = self.solved(most)?;
        let layers = solved.plan.layers.iter();
        let mut approximate: Vec<usize> = layers
            .filter(|layer| !layer.policy.is_lossless())
            .map(|layer| layer.layer)
            .collect();
        if approximate.is_empty() {
            return Ok(none.clone());
        }
        if matches!(self.scratch, Scratch::None) {
            self.output
                .say("a dry run measures nothing: it takes predictors by their recall alone");
            return Ok(most.clone());
        }
        if !self.can_measure() {
            return Ok(none.clone());
        }
        let missed = |layer: &usize| {
            let summaries = self
                .subject
                .predictors
                .map_or(&[][..], PredictorFile::layers);
            let recall = summaries.get(*layer).and_then(|s| s.contribution_recall);
            1.0 - recall.unwrap_or(1.0) + 1e-3
        };
        let worth = |layer: &usize| solved.savings[*layer] / missed(layer);
        approximate.sort_by(|a, b| worth(b).total_cmp(&worth(a)));
        let ladder = search::foreseen(none.foreseen.len(), &approximate);
        self.last_allowed(&ladder, most)
    }

    /// Whether there is text to measure on; says so where there is not.
    fn can_measure(&self) -> bool {
        let is_there = search::scored(&self.texts) >= certify::FEWEST;
        if !is_there {
            self.output.say(format!(
                "there are {} tokens to decide on, at least {} are needed, so nothing is skipped that changes the model; profile more text for more to be held back, or raise `--certify-tokens`",
                search::scored(&self.texts),
                certify::FEWEST
            ));
        }
        is_there
    }

    /// The last of `ladder` that perplexity allows.
    fn last_allowed(&mut self, ladder: &[Leeway], packed: &Leeway) -> Result<Leeway> {
        let Scratch::Beside(out) = self.scratch else {
            unreachable!("who may write nothing measures nothing")
        };
        let folder = ScratchFolder::beside(out)?;
        let solved = self.solved(packed)?;
        self.output.say(format!(
            "measuring how far policies may go for perplexity to rise by at most {} on {} tokens",
            percent(self.allowed_rise),
            search::scored(&self.texts)
        ));
        let bundle = self.pack(&solved, &folder.path().join("bundle"))?;
        let mut judge = Judge::new(bundle, self.texts.clone(), self.output)?;
        let found = search::last_allowed(ladder, |leeway| {
            let solved = self.solved(leeway)?;
            if solved
                .plan
                .layers
                .iter()
                .all(|layer| layer.policy.is_lossless())
            {
                return Ok(true);
            }
            let rise = judge.rise(&solved.plan.layers)?;
            self.output.detail(format!(
                "{}: perplexity {:+.3} ± {:.3} %",
                told(leeway),
                100.0 * rise.value,
                100.0 * rise.margin
            ));
            Ok(rise.value + CAUTION * rise.margin <= self.allowed_rise)
        })?;
        drop((judge, folder));
        if found == 0 {
            self.output.say(format!(
                "nothing that would skip more keeps perplexity within {}; `--max-ppl-increase` allows more",
                percent(self.allowed_rise)
            ));
        }
        Ok(ladder[found].clone())
    }

    /// The quickest placement within `leeway`.
    fn solved(&self, leeway: &Leeway) -> Result<Solved> {
        let layers = 0..self.subject.config.layer_count;
        let ways = layers.map(|layer| self.subject.ways(layer, leeway));
        let ways = ways.collect::<Result<Vec<LayerWays>>>()?;
        let candidates: Vec<_> = ways.iter().map(|ways| ways.candidates.clone()).collect();
        let decision = decide(&self.problem, &candidates, &Options::default())?;
        let mut plan = decision.plan;
        let mut savings = Vec::new();
        for (index, (layer, ways)) in plan.layers.iter_mut().zip(&ways).enumerate() {
            let (prices, chosen) = (&decision.prices[index], decision.chosen[index]);
            layer.reason = self.subject.reason(index, ways, prices, chosen);
            layer.threshold = ways.threshold;
            layer.input_thresholds = self.inputs.as_ref().map(|inputs| InputThresholds {
                ffn: inputs[index].ffn.filter(|_| layer.policy == Policy::Dense),
                ..inputs[index]
            });
            if let Some(read) = inputs::reason(layer) {
                layer.reason += &format!("; {read}");
            }
            let lossless = ways.candidates.iter().zip(prices);
            let lossless = lossless.filter(|(way, _)| way.way.policy.is_lossless());
            let least = lossless
                .map(|(_, price)| price.seconds)
                .fold(f64::INFINITY, f64::min);
            savings.push(1e6 * (least - prices[chosen].seconds));
        }
        Ok(Solved {
            plan,
            report: decision.report,
            orders: ways.into_iter().map(|ways| ways.order).collect(),
            savings,
        })
    }

    fn pack(&self, solved: &Solved, out: &Path) -> Result<Bundle> {
        let mut plan = solved.plan.clone();
        // A matrix by output gives the same with small inputs as zeros, and is quicker for prompts.
        for layer in &mut plan.layers {
            layer.input_thresholds = None;
        }
        // Signs come along where a policy needs them, and here any layer may.
        if let Some(file) = self.subject.predictors {
            for (layer, summary) in plan.layers.iter_mut().zip(file.layers()) {
                if summary.sign_bit.is_some() {
                    layer.policy = Policy::SignBit;
                }
            }
        }
        let inputs = PackInputs {
            checkpoint: self.checkpoint,
            orders: &solved.orders,
            predictors: self.subject.predictors,
            plan,
            quant: self.subject.quant,
            companions: &[],
            inputs: self.request.inputs.clone(),
            request: serde_json::Value::Null,
            seed: 0,
        };
        Ok(pack(&inputs, out, &Bar::new(self.output))?)
    }
}

/// A leeway in words.
fn told(leeway: &Leeway) -> String {
    match leeway.level {
        Some(level) => {
            let below = level.floor() as usize;
            let above = (below + 1).min(ERRORS.len() - 1);
            let error = ERRORS[below] + (ERRORS[above] - ERRORS[below]) * level.fract();
            format!("relative FFN error {}", percent(error))
        }
        None => {
            let layers = leeway.foreseen.iter().filter(|foreseen| **foreseen);
            format!("{} layers may foresee", layers.count())
        }
    }
}

/// What was asked for, resolved: the same again gives the same bundle.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    budget: Budget,
    hardware: Hardware,
    inputs: BTreeMap<String, Digest>,
    settings: serde_json::Value,
}

impl Request {
    /// Resolves `arguments` for a model.
    pub(crate) fn of(
        checkpoint: &Checkpoint,
        profile: &Profile,
        predictors: Option<&PredictorFile>,
        arguments: &BudgetArguments,
    ) -> Result<Self> {
        let mut inputs = BTreeMap::from([("profile".to_owned(), profile.digest()?)]);
        if let Some(file) = predictors {
            inputs.insert("predictors".to_owned(), Digest::of_file(&file.path())?);
        }
        let config = checkpoint.config();
        let context = arguments
            .context
            .unwrap_or(config.context_length.min(DEFAULT_CONTEXT));
        if context == 0 || context > config.context_length {
            bail!(
                "`--context` is {context}; this model was made for 1 to {} tokens",
                config.context_length
            );
        }
        let hardware = read_hardware(&arguments.hardware)?;
        let ram = arguments
            .ram
            .or_else(|| machine::memory().map(|(total, _)| ByteSize(total)))
            .unwrap_or(ByteSize(hardware.cpu.ram_bytes));
        let budget = Budget {
            vram_bytes: arguments.vram.0,
            ram_bytes: ram.0,
            context_tokens: context as u64,
        };
        let settings = json!({
            "budget": budget,
            "hardware": hardware,
            "policy": arguments.policy.map(Policy::from),
            "max_ppl_increase": arguments.max_ppl_increase.0,
            "input_sparsity": arguments.input_sparsity.map(|InputSparsity(share)| share),
            "certify_tokens": arguments.certify_tokens(config),
        });
        let settings = Digest::of(settings.to_string().as_bytes());
        Ok(Self {
            budget,
            hardware,
            inputs,
            settings: json!(settings),
        })
    }

    /// The bundle in `out`, where it was made from the same inputs and by the same request.
    pub(crate) fn packed(
        &self,
        checkpoint: &Checkpoint,
        quant: Format,
        out: &Path,
    ) -> Option<Bundle> {
        let bundle = Bundle::open(out, powerinfer_bundle::Verification::Quick).ok()?;
        let header = bundle.header();
        let is_same = header.model.fingerprint == checkpoint.identity().fingerprint
            && header.inputs == self.inputs
            && header.settings.get(REQUEST) == Some(&self.settings)
            && bundle.quant() == quant;
        is_same.then_some(bundle)
    }
}

/// The machine called `name`, or described in the JSON file of that name.
fn read_hardware(name: &str) -> Result<Hardware> {
    if let Some(hardware) = hardware::named(name) {
        return Ok(hardware);
    }
    let path = Path::new(name);
    if !path.exists() {
        bail!(
            "there is no machine called `{name}` and no such file; known are {}",
            hardware::NAMES.join(", ")
        );
    }
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read `{name}`"))?;
    let hardware: Hardware = serde_json::from_str(&text)
        .with_context(|| format!("`{name}` does not describe a machine"))?;
    hardware.validate()?;
    Ok(hardware)
}

/// States the placement as the solver takes it, with a share of inputs that are not read.
fn problem(
    config: &ModelConfig,
    budget: Budget,
    hardware: Hardware,
    quant: Format,
    left_out: Option<f64>,
) -> Problem {
    let bytes = |weight: Weight| weight_bytes(config, weight, quant);
    let all = config.weights();
    let sum = |weights: &[Weight]| -> u64 {
        let present = weights.iter().filter(|weight| all.contains(weight));
        present.map(|weight| bytes(*weight)).sum()
    };
    // Whatever of a layer is not its neurons: attention, norms, the bias of what the FFN adds.
    let attention: Vec<LayerWeight> = config
        .layer_weights()
        .into_iter()
        .filter(|weight| {
            !matches!(
                weight,
                LayerWeight::Gate
                    | LayerWeight::GateBias
                    | LayerWeight::Up
                    | LayerWeight::UpBias
                    | LayerWeight::Down
            )
        })
        .collect();
    let attention = |index: usize| -> (u64, f64) {
        let mut sum = (0, 0.0);
        for part in &attention {
            use LayerWeight::{Key, Output, Query, Value};
            let weight = Weight::Layer(index, *part);
            let (bytes, read) = match (part, left_out) {
                (Query | Key | Value | Output, Some(share)) => {
                    (weight_bytes_by_input(config, weight, quant), 1.0 - share)
                }
                _ => (bytes(weight), 1.0),
            };
            sum = (sum.0 + bytes, sum.1 + bytes as f64 * read);
        }
        sum
    };
    let neuron = neuron_bytes(config, quant);
    let shape = NeuronShape {
        bytes: neuron,
        matrices: config.matrices_per_neuron(),
    };
    let layer = |index: usize| Layer {
        // The candidates say what is active, and which way it goes.
        way: Way::dense(shape),
        frequencies: vec![1.0; config.ffn_size],
        neuron_bytes: neuron,
        attention_bytes: attention(index).0,
        attention_read_bytes: attention(index).1.round() as u64,
        predictor_bytes: 0,
        // Keys and values in float32.
        kv_bytes: budget.context_tokens * (2 * config.kv_head_count * config.head_size * 4) as u64,
    };
    let hidden_bytes = config.hidden_size as u64 * 4;
    let scratch = (config.ffn_size * 4 + config.vocabulary_size) as u64 * 4 + 8 * hidden_bytes;
    Problem {
        layers: (0..config.layer_count).map(layer).collect(),
        embedding_bytes: sum(&[Weight::Embedding, Weight::Positions, Weight::ProjectIn]),
        head_bytes: bytes(Weight::Head)
            + sum(&[
                Weight::FinalNorm,
                Weight::FinalNormBias,
                Weight::ProjectOut,
                Weight::HeadBias,
            ]),
        tied_head: config.tied_embeddings,
        gpu_scratch_bytes: scratch,
        cpu_scratch_bytes: scratch,
        hidden_bytes,
        group_size: GROUP_SIZE,
        budget,
        hardware,
    }
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
    certify_bundle(bundle, &texts, arguments.max_ppl_increase.0, output)
}

/// Says in a line what a bundle is certified for.
pub(crate) fn say_certificate(bundle: &Bundle, output: Output) {
    if let Some(certificate) = bundle.certificate() {
        output.say(format!(
            "certified on {} tokens that nothing was fitted to: perplexity {:+.2} ± {:.2} % over `dense`, the same likeliest token for {}, {} of the FFN neurons computed",
            certificate.scoring.tokens,
            100.0 * certificate.perplexity_rise.value,
            100.0 * certificate.perplexity_rise.margin,
            percent(certificate.same_likeliest_token),
            percent(certificate.ffn_neurons_computed),
        ));
    }
}

/// The plan as a table, and the account of both memories.
pub(crate) fn describe(plan: &Plan) -> String {
    let mut table = Table::new(&[
        "layer",
        "policy",
        "hot neurons",
        "carry",
        "on GPU",
        "on CPU",
        "GPU µs",
        "CPU µs",
        "sync µs",
        "layer µs",
    ]);
    for layer in &plan.layers {
        table.row(vec![
            layer.layer.to_string(),
            layer.policy.to_string(),
            format!("{}/{}", layer.hot_count, layer.neuron_count),
            percent(layer.hot_share),
            ByteSize(layer.gpu_bytes).to_string(),
            ByteSize(layer.cpu_bytes).to_string(),
            format!("{:.1}", layer.gpu_microseconds),
            format!("{:.1}", layer.cpu_microseconds),
            format!("{:.1}", layer.sync_microseconds),
            format!("{:.1}", layer.microseconds),
        ]);
    }
    let mut reasons = String::new();
    for layer in &plan.layers {
        reasons += &format!(
            "layer {}: {}; {}\n",
            layer.layer, layer.policy, layer.reason
        );
    }
    let mut lines = Table::new(&["memory", "where", "bytes"]);
    for line in &plan.lines {
        lines.row(vec![
            line.name.clone(),
            line.device.to_string(),
            ByteSize(line.bytes).to_string(),
        ]);
    }
    for device in [Device::Gpu, Device::Cpu] {
        lines.row(vec![
            format!("total, of {}", ByteSize(plan.budget.bytes(device))),
            device.to_string(),
            ByteSize(plan.totals.bytes(device)).to_string(),
        ]);
    }
    format!("{table}\n{reasons}\n{lines}")
}

impl Placement {
    /// Says how good the plan is and for which machine.
    pub(crate) fn say_result(&self, output: Output) {
        let (plan, report) = (&self.plan, &self.report);
        output.say(format!(
            "placed {} of {} neurons on the GPU, which carry {} of the activations; {} solved it in {:.3} s, gap {:.3} %",
            plan.totals.hot_count,
            plan.totals.neuron_count,
            percent(plan.totals.hot_share),
            report.backend,
            report.solve_seconds,
            100.0 * report.gap
        ));
        if let Some(trouble) = &report.trouble {
            output.say(format!(
                "the integer program was not solved to the end: {trouble}"
            ));
        }
        if plan.budget.vram_bytes > 0 && plan.totals.gpu_bytes == 0 {
            output.say(format!(
                "the VRAM budget is below the {} that using the GPU takes at all, so everything stays on the CPU",
                ByteSize(report.gpu_reserve_bytes)
            ));
        }
        output.say(format!(
            "times are predictions for `{}`, {:.0} tokens/s; `--hardware` plans for another machine",
            plan.hardware.name,
            1e6 / plan.totals.microseconds_per_token
        ));
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
