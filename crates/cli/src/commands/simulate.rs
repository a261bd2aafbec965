//! `powerinfer simulate`: how fast a model would be on a machine, without its weights.

mod answer;

use anyhow::{Result, bail};
use powerinfer_artifact::{
    ByteSize,
    plan::{Budget, Policy},
};
use powerinfer_model::ModelConfig;
use powerinfer_planner::{
    Vram, read_hardware,
    simulate::{Activity, ActivityOverrides, Request, SourcedValue},
};
use powerinfer_synth::{SHAPES, Shape};
use powerinfer_tensor::{CacheFormat, Format};

use crate::{
    engine::PolicyArgument,
    hint::Advised,
    output::{Output, print, print_json},
    values::{FORMATS, Offered},
};

use answer::{describe, say_result};

/// Default limit of the context.
const DEFAULT_CONTEXT: usize = 2048;
/// Default number of prompt tokens.
const DEFAULT_PROMPT: usize = 64;
/// Default number of tokens to generate.
const DEFAULT_TOKENS: usize = 128;

/// A model, a machine, and what to ask of them.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Shapes: those of `powerinfer synth` (ReLU versions of the models they are named after), or a folder with a `config.json`.\n\nNo weights are read: activation frequencies follow from sparsity and skew. Their defaults are the model's published values, if there are any. docs/reports/simulator.md compares estimates with published measurements.\n\nExamples:\n  powerinfer simulate --like llama-70b --hardware pc-high --quant q4_0\n  powerinfer simulate --like falcon-40b --vram 16G --sparsity 0.9"
)]
pub(crate) struct SimulateArguments {
    /// Shape of the model: a name, or a folder with a `config.json`
    #[arg(long, value_name = "SHAPE")]
    like: String,
    /// Machine: a name (see `powerinfer place --help`) or a TOML or JSON file
    #[arg(long, value_name = "NAME|FILE", default_value = "rtx4090")]
    hardware: String,
    /// Memory to use on the GPU, or on several as in `24G,24G`; 0 uses none [default: all of the GPU's]
    #[arg(long, value_name = "SIZE[,SIZE…]")]
    vram: Option<Vram>,
    /// Memory to use on the CPU [default: all of that machine's]
    #[arg(long, value_name = "SIZE")]
    ram: Option<ByteSize>,
    /// Tokens that the KV cache has room for [default: the model's context, at most 2048]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Format of the weights: f16, bf16, f32, q8_0, q4_k or q4_0
    #[arg(long, value_name = "FORMAT", default_value = "f16", value_parser = Offered(str::parse::<Format>, FORMATS), hide_possible_values = true)]
    quant: Format,
    /// Share of FFN activations that are zero [default: the model's published one]
    #[arg(long, value_name = "SHARE")]
    sparsity: Option<f64>,
    /// Share of a layer's neurons that carry 80% of its activations [default: the model's published
    /// one]
    #[arg(long, value_name = "SHARE")]
    skew: Option<f64>,
    /// Size of all predictors as a share of the model's parameters; 0 for none [default: the model's
    /// published one]
    #[arg(long, value_name = "SHARE")]
    predictor_share: Option<f64>,
    /// Policy of all layers [default: the fastest, layer by layer]
    #[arg(long, value_name = "POLICY")]
    policy: Option<PolicyArgument>,
    /// Fix the hot share: the share of every layer's neurons, the hottest first, that is on the GPU [default: the
    /// solver's]
    #[arg(long, value_name = "SHARE")]
    hot: Option<f64>,
    /// Requests that the KV cache has room for at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    batch: u32,
    /// Number of prompt tokens [default: 64, but at most a third of the context]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    prompt: Option<u32>,
    /// Number of tokens to generate [default: 128, or as many as fit in the context]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    tokens: Option<u32>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &SimulateArguments, output: Output) -> Result<()> {
    let answer = arguments.ask()?.answer()?;
    if arguments.json {
        return print_json(&answer);
    }
    print(describe(&answer))?;
    if is_relu_version(&answer.model.name) && arguments.sparsity.is_none() {
        output.say(format!(
            "this is a ReLU version of `{}`; `--sparsity 0` simulates the published model, which computes every neuron",
            answer.model.name
        ));
    }
    say_result(&answer, output);
    Ok(())
}

/// Whether the built-in shape `name` has a ReLU in place of the published model's activation.
fn is_relu_version(name: &str) -> bool {
    let is_relu = ["opt-", "bamboo-"].iter().any(|own| name.starts_with(own));
    !is_relu && SHAPES.iter().any(|(known, _)| *known == name)
}

impl SimulateArguments {
    /// The resolved arguments.
    fn ask(&self) -> Result<Request> {
        let shape = Shape::find(&self.like)?;
        let config = shape.describe()?;
        let hardware = read_hardware(&self.hardware)?;
        let (prompt, tokens) = self.request_tokens(&config);
        let context = self.context(&config, prompt.saturating_add(tokens))?;
        let card = hardware.gpu.as_ref().map_or(0, |gpu| gpu.vram_bytes);
        let mut budget = Budget {
            vram_bytes: card,
            ram_bytes: self.ram.map_or(hardware.cpu.ram_bytes, |ram| ram.0),
            context_tokens: context as u64 * u64::from(self.batch),
            kv_cache: CacheFormat::F16,
            vram_split: Vec::new(),
        };
        if let Some(vram) = &self.vram {
            vram.set(&mut budget, Some(&hardware))?;
        }
        let mut activity = Activity::new(
            &shape.name,
            ActivityOverrides {
                sparsity: self.sparsity,
                skew: self.skew,
                predictor_share: self.predictor_share,
            },
        );
        if self.sparsity.is_none() && !config.activation.has_exact_zeros() {
            let source = format!(
                "{} is never exactly zero; `--sparsity` assumes that a share is skipped",
                config.activation.name()
            );
            activity.sparsity = SourcedValue::new(0.0, &source);
        }
        if self.predictor_share.is_none() && config.experts.is_some() {
            activity.predictor_share = SourcedValue::new(0.0, "the router selects experts");
        }
        for (option, given) in [
            ("--sparsity", self.sparsity),
            ("--skew", self.skew),
            ("--predictor-share", self.predictor_share),
        ] {
            if let Some(share) = given.filter(|share| !(0.0..1.0).contains(share)) {
                bail!(Advised::new(
                    format!("`{option}` is {share}"),
                    "give a share from 0 to below 1, such as 0.9"
                ));
            }
        }
        if let Some(hot) = self.hot.filter(|hot| !(0.0..=1.0).contains(hot)) {
            bail!(Advised::new(
                format!("`--hot` is {hot}"),
                "give a share from 0 to 1, such as 0.2"
            ));
        }
        Ok(Request {
            name: shape.name,
            config,
            hardware,
            budget,
            quant: self.quant,
            activity,
            is_skew_given: self.skew.is_some(),
            policy: self.policy.map(Policy::from),
            hot: self.hot,
            prompt,
            tokens,
            is_of_2023: false,
        })
    }

    /// Number of prompt tokens and number of tokens to generate.
    fn request_tokens(&self, config: &ModelConfig) -> (usize, usize) {
        let limit = self.context.unwrap_or(config.context_length);
        let count = |given: Option<u32>| given.map(|tokens| tokens as usize);
        let room = limit.saturating_sub(count(self.tokens).unwrap_or(0)).max(1);
        let usual = DEFAULT_PROMPT.min((limit / 3).max(1)).min(room);
        let prompt = count(self.prompt).unwrap_or(usual);
        let room = limit.saturating_sub(prompt).max(1);
        let tokens = count(self.tokens).unwrap_or(DEFAULT_TOKENS.min(room));
        (prompt, tokens)
    }

    /// Context length for a request of `needed` tokens.
    fn context(&self, config: &ModelConfig, needed: usize) -> Result<usize> {
        let usual = config.context_length.min(DEFAULT_CONTEXT.max(needed));
        let context = self.context.unwrap_or(usual);
        if context == 0 || context > config.context_length {
            bail!(Advised::new(
                format!("`--context` is {context}"),
                format!(
                    "this model was made for 1 to {} tokens",
                    config.context_length
                )
            ));
        }
        if needed > context {
            bail!(Advised::new(
                format!(
                    "`--prompt` and `--tokens` make {needed} tokens, but the context has room for {context}"
                ),
                if context < config.context_length {
                    "ask for fewer, or raise `--context`"
                } else {
                    "ask for fewer: the model supports no more"
                }
            ));
        }
        Ok(context)
    }
}
