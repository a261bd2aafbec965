//! `powerinfer place`: what the GPU computes and what the CPU computes.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use powerinfer_artifact::{
    ByteSize, Digest,
    hardware::{self, Hardware},
    plan::{Budget, Device, Plan, Policy},
    predictor_file::PredictorFile,
};
use powerinfer_bundle::{PackInputs, neuron_bytes, pack, weight_bytes};
use powerinfer_kernels::Format;
use powerinfer_model::{Checkpoint, LayerWeight, ModelConfig, Weight};
use powerinfer_profile::{LayerActivity, Profile};
use powerinfer_solver::{GROUP_SIZE, Layer, Options, Problem, SolveReport, place};
use powerinfer_text::Tokenizer;
use serde_json::json;

use crate::{
    engine::PolicyArgument,
    machine, model_argument,
    output::{Output, Table, percent, print, print_json},
    progress::Bar,
};

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
    /// Which neurons every layer computes [default: what reads the fewest bytes, layer by layer]
    #[arg(long, value_name = "POLICY")]
    policy: Option<PolicyArgument>,
    /// Format of the weights: f32, bf16, q8_0 or q4_0
    #[arg(long, value_name = "FORMAT", default_value_t = Format::Q8_0)]
    pub(crate) quant: Format,
}

/// A plan and everything needed to pack it.
pub(crate) struct Placement {
    plan: Plan,
    report: SolveReport,
    orders: Vec<Vec<u32>>,
    predictors: Option<PredictorFile>,
    inputs: BTreeMap<String, Digest>,
    quant: Format,
    seed: u64,
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
    let placement = solve(&checkpoint, &profile, predictors, &arguments.budget)?;
    if !arguments.json {
        print(describe(&placement.plan))?;
    }
    placement.say_result(output);
    if !arguments.dry_run {
        let out = arguments
            .out
            .clone()
            .unwrap_or_else(|| folder.join("bundle"));
        placement.pack(&checkpoint, &out, output)?;
    }
    if arguments.json {
        print_json(
            &json!({ "plan": placement.plan, "solve_seconds": placement.report.solve_seconds }),
        )?;
    }
    Ok(())
}

/// Solves the placement of a model within a budget.
pub(crate) fn solve(
    checkpoint: &Checkpoint,
    profile: &Profile,
    predictors: Option<PredictorFile>,
    arguments: &BudgetArguments,
) -> Result<Placement> {
    profile.check_model(checkpoint.identity())?;
    let mut inputs = BTreeMap::from([("profile".to_owned(), profile.digest()?)]);
    if let Some(predictors) = &predictors {
        predictors
            .header()
            .check_model(&predictors.path(), checkpoint.identity())?;
        inputs.insert(
            "predictors".to_owned(),
            Digest::of_file(&predictors.path())?,
        );
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
    let orders: Vec<Vec<u32>> = profile
        .activities()
        .iter()
        .map(|activity| activity.hottest_first())
        .collect();
    let mut policies = policies(config, profile, predictors.as_ref(), arguments.quant);
    if let Some(forced) = arguments.policy {
        force(&mut policies, forced.into(), config, predictors.as_ref())?;
    }
    let problem = problem(
        checkpoint,
        profile,
        predictors.as_ref(),
        &policies,
        &orders,
        budget,
        hardware,
        arguments.quant,
    );
    let (mut plan, report) = place(&problem, &Options::default())?;
    for (layer, (_, reason)) in plan.layers.iter_mut().zip(policies) {
        layer.reason = reason;
    }
    let seed = profile.header().seed;
    Ok(Placement {
        plan,
        report,
        orders,
        predictors,
        inputs,
        quant: arguments.quant,
        seed,
    })
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

/// The policy of every layer, and why.
fn policies(
    config: &ModelConfig,
    profile: &Profile,
    predictors: Option<&PredictorFile>,
    quant: Format,
) -> Vec<(Policy, String)> {
    let activities = profile.activities().iter().enumerate();
    let of = |(index, activity): (usize, &LayerActivity)| {
        let summary = predictors.and_then(|file| file.layers().get(index));
        policy(
            config.activation.has_exact_zeros(),
            activity.sparsity(),
            summary.filter(|summary| summary.rank > 0),
            neuron_bytes(config, quant),
            // What the gate, which comes first, is of a neuron's bytes.
            1.0 / config.matrices_per_neuron() as f64,
            config.ffn_size,
        )
    };
    activities.map(of).collect()
}

/// Gives every layer the policy `forced`, where it can have it.
fn force(
    policies: &mut [(Policy, String)],
    forced: Policy,
    config: &ModelConfig,
    predictors: Option<&PredictorFile>,
) -> Result<()> {
    if forced == Policy::Predicted {
        let rank = |layer: usize| {
            let summary = predictors.and_then(|file| file.layers().get(layer));
            summary.map_or(0, |summary| summary.rank)
        };
        if let Some(layer) = (0..policies.len()).find(|layer| rank(*layer) == 0) {
            bail!(
                "layer {layer} has no predictor, so `--policy predicted` is not possible; train predictors, or give them more bytes by `--max-bytes`"
            );
        }
    }
    if forced == Policy::Exact && !config.activation.has_exact_zeros() {
        bail!(
            "the activation of this model is never exactly zero, so `--policy exact` would skip nothing; leave it out"
        );
    }
    for (policy, reason) in policies {
        *reason = match *policy == forced {
            true => format!("as `--policy` says; {reason}"),
            false => format!("as `--policy` says; left alone it would be {policy}: {reason}"),
        };
        *policy = forced;
    }
    Ok(())
}

/// States the placement as the solver takes it.
#[allow(clippy::too_many_arguments)] // each is another thing that a placement depends on
fn problem(
    checkpoint: &Checkpoint,
    profile: &Profile,
    predictors: Option<&PredictorFile>,
    policies: &[(Policy, String)],
    orders: &[Vec<u32>],
    budget: Budget,
    hardware: Hardware,
    quant: Format,
) -> Problem {
    let config = checkpoint.config();
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
    let neuron = neuron_bytes(config, quant);
    let layers = profile
        .activities()
        .iter()
        .enumerate()
        .map(|(index, activity)| {
            let summary = predictors
                .and_then(|file| file.layers().get(index))
                .filter(|summary| summary.rank > 0);
            let frequencies = activity.frequencies();
            Layer {
                policy: policies[index].0,
                frequencies: orders[index]
                    .iter()
                    .map(|neuron| frequencies[*neuron as usize])
                    .collect(),
                neuron_bytes: neuron,
                gate_bytes: neuron / config.matrices_per_neuron() as u64,
                attention_bytes: attention
                    .iter()
                    .map(|weight| bytes(Weight::Layer(index, *weight)))
                    .sum(),
                predictor_bytes: summary.map_or(0, |summary| summary.bytes),
                // Keys and values in float32.
                kv_bytes: budget.context_tokens
                    * (2 * config.kv_head_count * config.head_size * 4) as u64,
            }
        })
        .collect();
    let hidden_bytes = config.hidden_size as u64 * 4;
    let scratch = (config.ffn_size * 4 + config.vocabulary_size) as u64 * 4 + 8 * hidden_bytes;
    Problem {
        layers,
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

/// The policy that reads the fewest bytes of a layer's FFN for a token, and why.
fn policy(
    exact_zeros: bool,
    sparsity: f64,
    predictor: Option<&powerinfer_artifact::predictor_file::PredictorSummary>,
    neuron_bytes: u64,
    gate_share: f64,
    neurons: usize,
) -> (Policy, String) {
    if !exact_zeros {
        let reason = "the activation is never exactly zero".to_owned();
        return (Policy::Dense, reason);
    }
    let all = (neurons as u64 * neuron_bytes) as f64;
    let size = |bytes: f64| ByteSize(bytes as u64);
    // Whoever fires reads up and down, whatever was read to find that out.
    let others = all * (1.0 - gate_share);
    let exact = all * gate_share + others * (1.0 - sparsity);
    if exact >= all {
        let reason = "no neuron is ever silent".to_owned();
        return (Policy::Dense, reason);
    }
    let Some(summary) = predictor else {
        let reason = format!(
            "reads {} of {}; there is no predictor",
            size(exact),
            size(all)
        );
        return (Policy::Exact, reason);
    };
    // Of a predicted neuron the gate is read, up and down only where the gate agrees.
    let density = 1.0 - summary.predicted_sparsity;
    let read = gate_share + (1.0 - gate_share) * summary.precision;
    let predicted = summary.bytes as f64 + all * density * read;
    if predicted < exact {
        let reason = format!(
            "reads {}, {} of it the predictor of rank {}; `exact` would read {:.1}× as much, `dense` {:.1}×",
            size(predicted),
            ByteSize(summary.bytes),
            summary.rank,
            exact / predicted,
            all / predicted,
        );
        return (Policy::Predicted, reason);
    }
    let reason = format!(
        "reads {}; with the predictor of rank {} it would be {:.1}× as much",
        size(exact),
        summary.rank,
        predicted / exact,
    );
    (Policy::Exact, reason)
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

    /// Whether the bundle in `out` was made from the same inputs and has the same plan.
    pub(crate) fn is_packed(&self, checkpoint: &Checkpoint, out: &Path) -> bool {
        powerinfer_bundle::Bundle::open(out, powerinfer_bundle::Verification::Quick).is_ok_and(
            |bundle| {
                bundle.header().model.fingerprint == checkpoint.identity().fingerprint
                    && bundle.header().inputs == self.inputs
                    && bundle.quant() == self.quant
                    && *bundle.plan() == self.plan
            },
        )
    }

    /// Writes the bundle.
    pub(crate) fn pack(&self, checkpoint: &Checkpoint, out: &Path, output: Output) -> Result<()> {
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
            inputs: self.inputs.clone(),
            seed: self.seed,
        };
        let bundle = pack(&inputs, out, &Bar::new(output))?;
        output.say(format!("bundle written to `{}`", bundle.folder().display()));
        Ok(())
    }
}
