//! `powerinfer run`: text from a bundle.

mod chat;
mod prompt_cache;
mod verification;

use std::{
    io::{IsTerminal, Read},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail};
use powerinfer_artifact::{ByteSize, counted, shell_quoted};
use powerinfer_datasets::minipython::{Split, distinct_tasks};
use powerinfer_model::Files;
use powerinfer_runtime::{
    Engine, Generation, Sampler, SamplingSettings, Session, Speculation, SpeculationCounts,
    Statistics, StopConditions, StopReason, Text,
};
use powerinfer_text::{Message, SpecialText, SpecialTokens, StreamDecoder, Tokenizer};
use serde_json::json;

use self::prompt_cache::{PromptCache, PromptCacheArguments};
use crate::{
    engine::{EngineArguments, open_engine},
    hint::Advised,
    model_argument::DEMO,
    output::{Output, percent, print_data, print_json},
    progress::{interrupted, while_waiting},
    special_token_arguments::SpecialTokenArguments,
};

/// Bundle, prompt and sampling.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  powerinfer run demo\n  powerinfer run ./my-model.powerinfer --prompt 'Once upon a time' --temperature 0.8\n  cat prompt.txt | powerinfer run demo\n  powerinfer run ./my-model.powerinfer 'Summarise this.' < article.txt"
)]
pub(crate) struct RunArguments {
    /// Bundle, a folder with a bundle in it, or the name of a model prepared here
    #[arg(default_value = DEMO)]
    bundle: String,
    /// Text to continue, without the chat template. If stdin has text too, that comes first, then a blank line and this
    /// text
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Message to answer; without a chat template, the same as `--prompt` [default: stdin; on a terminal, a chat; for
    /// `demo`, an example first]
    #[arg(value_name = "PROMPT", conflicts_with_all = ["prompt", "interactive"])]
    words: Vec<String>,
    /// Chat, with line editing and history on a terminal; a line that ends in `\` continues on the next line, `/help`
    /// lists commands
    #[arg(short, long, conflicts_with = "prompt")]
    interactive: bool,
    /// Tokens to generate, at most; -1 for as many as the context has room for
    #[arg(
        short = 'n',
        long,
        alias = "n-predict",
        value_name = "N",
        default_value = "256",
        value_parser = count_or_all,
        allow_negative_numbers = true
    )]
    max_tokens: usize,
    #[command(flatten)]
    special_tokens: SpecialTokenArguments,
    #[command(flatten)]
    sampling: SamplingArguments,
    #[command(flatten)]
    prompt_cache: PromptCacheArguments,
    #[command(flatten)]
    engine: EngineArguments,
    /// Check the FFNs of every K-th token against dense and report their errors (with `-v` token by token); a layer that
    /// exceeds its certified error is reported and falls back to a lossless policy
    #[arg(long, value_name = "K", help_heading = "Execution", value_parser = clap::value_parser!(u32).range(1..))]
    verify_every: Option<u32>,
    /// Guess repeated text and verify several tokens at once, if that is faster; the text stays the same
    #[arg(long, conflicts_with = "verify_every", help_heading = "Execution")]
    speculate: bool,
    /// Write the prompt before its continuation
    #[arg(long)]
    echo: bool,
    /// Print one JSON document when done
    #[arg(long, conflicts_with = "interactive")]
    json: bool,
}

/// A number of tokens, or -1 for all that there is room for.
fn count_or_all(text: &str) -> Result<usize, String> {
    match text {
        "-1" => Ok(usize::MAX),
        _ => text
            .parse()
            .map_err(|_| "give a number of tokens, or -1".to_owned()),
    }
}

/// Sampling; defaults come from the model's `generation_config.json`.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArguments {
    /// Divide the logits by this; 0 is greedy [default: the model's, else 0]
    #[arg(long, alias = "temp", value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Sample from the K tokens with the largest probability; 0 for all
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Sample from the smallest set of tokens whose probabilities reach P
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Sample from tokens whose probability is at least P times the largest
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Penalise the last 64 tokens by this factor; 1 for no penalty
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    repeat_penalty: Option<f32>,
    /// Random seed [default: a different one for each run]
    #[arg(short, long, value_name = "SEED", allow_negative_numbers = true)]
    seed: Option<u64>,
}

impl SamplingArguments {
    /// The flags, and the model's own settings if there is none.
    fn settings(&self, files: &Files) -> Result<SamplingSettings> {
        let model = SamplingSettings::of_model(files)?;
        Ok(SamplingSettings {
            temperature: self.temperature.unwrap_or(model.temperature),
            top_k: self.top_k.unwrap_or(model.top_k),
            top_p: self.top_p.unwrap_or(model.top_p),
            min_p: self.min_p.unwrap_or(model.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(model.repeat_penalty),
            seed: self.seed.unwrap_or_else(another_seed),
            ..model
        })
    }

    /// Given options that have no effect at `temperature`.
    fn unused(&self, temperature: f32) -> Vec<&'static str> {
        if temperature != 0.0 {
            return Vec::new();
        }
        let given = [
            ("`--seed`", self.seed.is_some()),
            ("`--top-k`", self.top_k.is_some()),
            ("`--top-p`", self.top_p.is_some()),
            ("`--min-p`", self.min_p.is_some()),
        ];
        let given = given.into_iter().filter(|(_, given)| *given);
        given.map(|(option, _)| option).collect()
    }
}

/// A seed from the clock.
fn another_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |since| since.as_nanos() as u64)
}

/// Tokens and times of one generation.
#[derive(Debug, Default, Clone)]
struct Timing {
    prompt_tokens: usize,
    /// Tokens of the prompt whose keys and values were cached.
    cached_tokens: usize,
    prompt: Duration,
    generated_tokens: usize,
    /// Generated tokens except the first of each text, which comes from the prompt's pass.
    later_tokens: usize,
    decode: Duration,
    decoded: Statistics,
    stop: Option<StopReason>,
    speculation: Option<SpeculationCounts>,
}

pub(crate) fn run(arguments: &RunArguments, output: Output) -> Result<()> {
    let mut engine = open_engine(&arguments.bundle, &arguments.engine, output)?;
    if engine.uses_device() && arguments.verify_every.is_some() {
        bail!(Advised::new(
            "`--verify-every` works on the CPU alone",
            "add `--device cpu`, or leave it out"
        ));
    }
    if let Some(every) = arguments.verify_every {
        let verification = arguments.engine.verification(every, &engine);
        engine.verify(verification);
    }
    let files = engine.bundle().files();
    let tokenizer = powerinfer_pipeline::tokenizer(&files)?;
    let settings = arguments.sampling.settings(&files)?;
    let seed = settings.seed;
    let unused = arguments.sampling.unused(settings.temperature);
    if !unused.is_empty() {
        output.say(format!(
            "no effect at temperature 0, which always picks the most likely token: {}; to sample, use `--temperature 0.8`",
            unused.join(", ")
        ));
    }
    let sampler = Sampler::new(settings)?; // reports invalid settings before any work
    let is_demo = engine.bundle().header().model.name == DEMO;
    let (prompt, is_example) = match read_prompt(arguments, is_demo)? {
        Prompt::Text(text) => (text, false),
        Prompt::Example(text) => (text, true),
        Prompt::Interactive { .. } if arguments.prompt_cache.prompt_cache.is_some() => {
            bail!(Advised::new(
                "`--prompt-cache` takes a prompt",
                "give one with `--prompt TEXT` or on stdin"
            ))
        }
        Prompt::Interactive { example } => {
            let mut writer = Writer::new(arguments, engine, &tokenizer, sampler, output)?;
            return chat::run(&mut writer, example);
        }
    };
    let has_template = tokenizer.chat_template().is_some();
    let is_message = has_template && arguments.prompt.is_none();
    if has_template && !is_message && std::io::stderr().is_terminal() {
        output.say("`--prompt` is continued without the chat template; give the text without `--prompt` for an answer");
    }
    let ids = if is_message {
        let (role, content) = ("user".to_owned(), prompt.clone());
        chat::encode(arguments, &tokenizer, &[Message { role, content }])?
    } else {
        tokenizer.encode(&prompt, SpecialTokens::Add)?
    };
    let mut writer = Writer::new(arguments, engine, &tokenizer, sampler, output)?;
    writer.check_prompt(ids.len())?;
    if is_example {
        output.say("no prompt was given, so the demo solves an example; give a prompt with `--prompt`, or chat with `-i`");
    }
    if (arguments.echo || is_example) && !arguments.json {
        print_data(&prompt)?;
        print_data(if is_message { "\n" } else { "" })?;
    }
    let mut completion = String::new();
    let json = arguments.json;
    let timing = writer.respond(&ids, !is_message, &mut |piece| {
        completion.push_str(piece);
        if json { Ok(()) } else { print_data(piece) }
    })?;
    let observers = writer.engine.observers();
    if json {
        print_json(&json!({
            "prompt": prompt,
            "completion": completion,
            "seed": seed,
            "prompt_tokens": timing.prompt_tokens,
            "cached_prompt_tokens": timing.cached_tokens,
            "generated_tokens": timing.generated_tokens,
            "stop_reason": timing.stop.map(stop_name),
            "prompt_tokens_per_second": rate(timing.computed_tokens(), timing.prompt),
            "decode_tokens_per_second": timing.decode_rate(),
            "ffn_neurons_computed": timing.decoded.computed_share(),
            "bytes_per_token": timing.bytes_per_token(),
            "experts_on_device": timing.decoded.experts_on_device_share(),
            "graph_retries": observers.graph_retries(),
            "speculation": timing.speculation.map(|counts| json!({
                "passes": counts.passes,
                "proposed_tokens": counts.proposed,
                "accepted_tokens": counts.accepted,
            })),
            "verified": observers.verification().map(verification::to_json),
        }))?;
    } else if !completion.ends_with('\n') {
        print_data("\n")?;
    }
    timing.note_limit(output);
    output.say(timing.describe());
    if let (true, Some(share)) = (output.verbose, timing.decoded.experts_on_device_share()) {
        output.say(format!(
            "experts: {} of the selected experts were on the GPU, in layers whose experts are replaced while the model runs",
            percent(share)
        ));
    }
    if observers.graph_retries() > 0 {
        output.say(format!(
            "the GPU ran {} again without graphs, as the CPU was late or a graph failed",
            counted(observers.graph_retries() as usize, "token")
        ));
    }
    verification::print_summary(observers.verification(), output);
    if interrupted() {
        output.say("stopped");
        std::process::exit(130);
    }
    Ok(())
}

/// The prompt, or its source.
enum Prompt {
    Text(String),
    Example(String),
    /// A chat, which first answers the example, if there is one.
    Interactive {
        example: Option<String>,
    },
}

/// Combines stdin and `--prompt`. If both are absent: on a terminal, returns a chat, which for `demo` starts with an example; otherwise,
/// returns the example for `demo`.
fn read_prompt(arguments: &RunArguments, is_demo: bool) -> Result<Prompt> {
    if arguments.interactive {
        return Ok(Prompt::Interactive { example: None });
    }
    let piped = if std::io::stdin().is_terminal() {
        String::new()
    } else {
        piped_text()?
    };
    let words = Some(arguments.words.join(" ")).filter(|_| !arguments.words.is_empty());
    match arguments.prompt.clone().or(words) {
        Some(prompt) if piped.is_empty() => return Ok(Prompt::Text(prompt)),
        // The order is that of `ollama run`.
        Some(prompt) => return Ok(Prompt::Text(format!("{piped}\n\n{prompt}"))),
        None if !piped.is_empty() => return Ok(Prompt::Text(piped)),
        None => {}
    }
    let example = if is_demo {
        let task = distinct_tasks(Split::HeldOut, 1, 1)?.remove(0);
        Some(task.prompt().to_owned())
    } else {
        None
    };
    let is_single = arguments.json || (is_demo && arguments.prompt_cache.prompt_cache.is_some());
    if std::io::stdin().is_terminal() && !is_single {
        return Ok(Prompt::Interactive { example });
    }
    if let Some(example) = example {
        return Ok(Prompt::Example(example));
    }
    bail!(Advised::new(
        "there is no prompt",
        "give one with `--prompt TEXT` or on stdin"
    ))
}

/// Reads the text on stdin, without a byte-order mark and the final line break.
fn piped_text() -> Result<String> {
    let mut bytes = Vec::new();
    while_waiting(|| std::io::stdin().read_to_end(&mut bytes))
        .context("cannot read the prompt from stdin")?;
    let Ok(text) = String::from_utf8(bytes) else {
        bail!(Advised::new("stdin is not UTF-8 text", "convert it first"));
    };
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let line = text.strip_suffix('\n');
    let line = line.map(|line| line.strip_suffix('\r').unwrap_or(line));
    Ok(line.unwrap_or(text).to_owned())
}

/// Writes texts with one engine and session.
struct Writer<'a> {
    arguments: &'a RunArguments,
    engine: Engine,
    session: Session,
    text: Text,
    tokenizer: &'a Tokenizer,
    output: Output,
}

impl<'a> Writer<'a> {
    fn new(
        arguments: &'a RunArguments,
        mut engine: Engine,
        tokenizer: &'a Tokenizer,
        sampler: Sampler,
        output: Output,
    ) -> Result<Self> {
        let end_of_text = &engine.bundle().config().end_of_text;
        let stop = StopConditions {
            max_tokens: arguments.max_tokens,
            stop_tokens: [tokenizer.stop_ids(), end_of_text].concat().into(),
            vocabulary: tokenizer.vocabulary_size(),
        };
        Ok(Self {
            arguments,
            session: engine.new_session(engine.context_limit())?,
            engine,
            text: Text::new(sampler, stop),
            tokenizer,
            output,
        })
    }

    /// Generates text after `ids` until a stop condition holds or Ctrl-C is pressed, and passes it to `write` piece by piece.
    /// `continues` is set if the text continues `ids` instead of answering them.
    fn respond(
        &mut self,
        ids: &[u32],
        continues: bool,
        write: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<Timing> {
        let Self {
            arguments,
            engine,
            session,
            text,
            output,
            ..
        } = self;
        let cache = PromptCache::open(&arguments.prompt_cache, engine, session, ids)?;
        let mut report = verification::Progress::new(engine.observers(), *output);
        let mut timing = Timing {
            prompt_tokens: ids.len(),
            cached_tokens: cache.taken,
            ..Timing::default()
        };
        engine.observers_mut().take_statistics();
        let started = Instant::now();
        let (mut generation, _) = Generation::start(engine, session, text, ids, interrupted)?;
        timing.prompt = started.elapsed();
        generation.passes().observers_mut().take_statistics();
        let (engine, session) = generation.parts();
        cache.keep_prompt(engine, session)?;
        if arguments.speculate {
            generation.text(0).speculate(Speculation::new(ids));
        }

        let mut decoder = if continues {
            StreamDecoder::after(self.tokenizer, ids, SpecialText::Skip)?
        } else {
            self.tokenizer.decode_stream(SpecialText::Skip)
        };
        let started = Instant::now();
        while let Some(token) = generation.next() {
            let token = token?;
            timing.generated_tokens += 1;
            if !token.is_stop
                && let Some(piece) = decoder.push(token.id)?
            {
                write(&piece)?;
            }
            report.print(generation.parts());
        }
        timing.stop = generation.text(0).stop_reason();
        generation.finish()?;
        let speculation = generation.text(0).speculation();
        timing.speculation = speculation.map(Speculation::counts);
        report.print(generation.parts());
        timing.decode = started.elapsed();
        timing.later_tokens = timing.generated_tokens.saturating_sub(1);
        timing.decoded = generation.passes().observers_mut().take_statistics();
        if let Some(piece) = decoder.finish()? {
            write(&piece)?;
        }
        let (engine, session) = generation.parts();
        cache.keep_all(engine, session)?;
        Ok(timing)
    }

    /// Refuses a prompt of `tokens` tokens that is empty or exceeds the context.
    fn check_prompt(&self, tokens: usize) -> Result<()> {
        let bundle = self.engine.bundle();
        let (limit, longest) = (self.engine.context_limit(), bundle.config().context_length);
        if tokens == 0 {
            bail!(Advised::new(
                "the prompt has no tokens",
                "give some text with `--prompt`"
            ));
        }
        if tokens <= limit {
            return Ok(());
        }
        // Room for the answer too.
        let needed = longest.min(tokens.saturating_add(self.arguments.max_tokens));
        let instead = if tokens <= longest {
            format!(
                "shorten it, or re-plan the bundle: `powerinfer place {} --context {needed}`",
                shell_quoted(&bundle.folder().to_string_lossy())
            )
        } else {
            format!("shorten it, the model supports a context of {longest} tokens at most")
        };
        bail!(Advised::new(
            format!("the prompt has {tokens} tokens, and the context holds {limit}"),
            instead
        ))
    }
}

/// Tokens per second.
fn rate(tokens: usize, time: Duration) -> f64 {
    tokens as f64 / time.as_secs_f64().max(1e-9)
}

/// The name of a reason in JSON.
fn stop_name(reason: StopReason) -> &'static str {
    match reason {
        StopReason::StopToken => "stop_token",
        StopReason::MaxTokens => "max_tokens",
        StopReason::ContextFull => "context_full",
        StopReason::Cancelled => "cancelled",
    }
}

impl Timing {
    /// Notes that the text was cut off.
    fn note_limit(&self, output: Output) {
        match self.stop {
            Some(StopReason::MaxTokens) => output.say(format!(
                "stopped after {}; `-n` sets another limit",
                counted(self.generated_tokens, "token")
            )),
            Some(StopReason::ContextFull) => {
                output.say("stopped: the context is full");
            }
            Some(StopReason::StopToken | StopReason::Cancelled) | None => {}
        }
    }

    /// Tokens of the prompt that were computed.
    fn computed_tokens(&self) -> usize {
        self.prompt_tokens - self.cached_tokens
    }

    /// Tokens per second of decoding; `None` if no token follows the first.
    fn decode_rate(&self) -> Option<f64> {
        (self.later_tokens > 0).then(|| rate(self.later_tokens, self.decode))
    }

    /// Mean bytes read per token; if tokens are proposed, per generated one.
    fn bytes_per_token(&self) -> f64 {
        match self.speculation {
            None => self.decoded.bytes_per_token(),
            Some(_) => self.decoded.all_bytes_read() as f64 / self.generated_tokens.max(1) as f64,
        }
    }

    /// One line of statistics.
    fn describe(&self) -> String {
        let cached = match self.cached_tokens {
            0 => String::new(),
            cached => format!(" ({cached} of them cached)"),
        };
        let speculation = self.speculation.map_or_else(String::new, |counts| {
            format!(
                "; speculation: {} of {} accepted, {} passes",
                counts.accepted,
                counted(counts.proposed, "proposed token"),
                counts.passes
            )
        });
        let decode = self.decode_rate().map_or_else(String::new, |rate| {
            format!(
                ", {rate:.0} tokens/s, {} of FFN neurons computed, {} read per token{speculation}",
                percent(self.decoded.computed_share()),
                ByteSize(self.bytes_per_token() as u64),
            )
        });
        format!(
            "prompt: {}{cached}, {:.0} tokens/s; decode: {}{decode}",
            counted(self.prompt_tokens, "token"),
            rate(self.computed_tokens(), self.prompt),
            counted(self.generated_tokens, "token"),
        )
    }
}
