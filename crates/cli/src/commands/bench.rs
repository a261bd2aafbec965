//! `powerinfer bench`: times a bundle on this machine, stage by stage.

mod report;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use powerinfer_artifact::{ByteSize, Progress, plan::Policy, progress::Silent, random::Random};
use powerinfer_eval::bench::{
    BatchBench, Bench, CHECKED_TOKENS, Completion, Work, check, kv_cache_bytes, time_ffns,
    time_hybrid, time_parts, time_speculation,
};
use powerinfer_kernels::Isa;
use powerinfer_model::LanguageModel;
use powerinfer_planner::machine::speed_test;
use powerinfer_pool::system;
use powerinfer_runtime::{ReadProbe, SingleSession, Threads};
use powerinfer_text::SpecialTokens;

use crate::{
    engine::{EngineArguments, open_engine},
    hint::Advised,
    model_argument::{DEMO, open_bundle},
    output::{Output, print, print_json},
    progress::Bar,
};
use report::Report;

/// Work to time, and how often.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Results are compared with `dense` before anything is timed. Timings are medians of the repeats; the read bandwidth, of a stream and of the rows that active neurons select, is measured between repeats.\n\nExamples:\n  powerinfer bench demo\n  powerinfer bench ./my-model.powerinfer --policy dense --threads 1 --json\n  powerinfer bench demo -p 0 -n 32 --depth 100\n  powerinfer bench demo --batch 1,2,4,8,16,32\n  powerinfer bench demo -p 0 --parts 8,16\n  powerinfer bench demo -p 0 -n 0 --completions edits.jsonl"
)]
pub(crate) struct BenchArguments {
    /// Bundle, a folder with a bundle in it, or the name of a model prepared here
    #[arg(default_value = DEMO)]
    bundle: String,
    /// Lengths of the prompts, 0 for none [default: 128 and 512, within the context; none with `--batch`]
    #[arg(short, long, value_name = "N", value_delimiter = ',')]
    prompt_tokens: Option<Vec<usize>>,
    /// Tokens to decode, 0 for none [default: 64, within the context]
    #[arg(short = 'n', long, value_name = "N")]
    decode_tokens: Option<usize>,
    /// Tokens in the context before the decoded ones
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    depth: usize,
    /// Decode N sequences at once instead of one, under the policy and, without a GPU, under `dense`
    #[arg(short, long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    batch: Vec<u32>,
    /// Repeats of each time measurement
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: u32,
    /// Also time single FFNs with these percentages of their neurons
    #[arg(long, value_name = "P", value_delimiter = ',', value_parser = parse_density)]
    ffn_densities: Vec<f64>,
    /// Also estimate the time per token on these numbers of threads, from the parts of its jobs, timed one after the other on one
    /// thread
    #[arg(long, value_name = "N", value_delimiter = ',', num_args = 0..=1, default_missing_value = "4,8,16", value_parser = clap::value_parser!(u32).range(1..=1024))]
    parts: Vec<u32>,
    /// Also time these texts with and without `--speculate`: JSON lines with `prompt` and `completion`
    #[arg(long, value_name = "FILE")]
    completions: Option<PathBuf>,
    /// Take the tokens from this text [default: random tokens]
    #[arg(long, value_name = "FILE")]
    prompt: Option<PathBuf>,
    /// Memory to read for the read bandwidth; several times the processor's caches
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    probe: ByteSize,
    #[command(flatten)]
    engine: EngineArguments,
    /// Seed of the random tokens
    #[arg(short, long, default_value_t = 0)]
    seed: u64,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &BenchArguments, output: Output) -> Result<()> {
    let threads = arguments.engine.threads.count();
    let probe_bytes = probe_bytes(arguments.probe)?;
    let mut model = SingleSession::new(open_engine(&arguments.bundle, &arguments.engine, output)?)?;
    if model.uses_device() && !arguments.ffn_densities.is_empty() {
        bail!(Advised::new(
            "`--ffn-densities` measures only the CPU",
            "add `--device cpu`"
        ));
    }
    if model.uses_device() && !arguments.parts.is_empty() {
        bail!(Advised::new(
            "`--parts` measures only the CPU",
            "add `--device cpu`"
        ));
    }
    let mut works = works(
        arguments,
        model.context_limit(),
        model.config().context_length,
    )?;
    let longest = works.iter().map(|work| work.context()).max().unwrap_or(0);
    let completions = completions(arguments, &model)?;
    let checked = CHECKED_TOKENS.min(model.context_limit());
    let ids = tokens(arguments, &model, longest.max(checked))?;
    // With batches, the decoded tokens are those of each sequence.
    let batched = match works.last() {
        Some(Work::Decode { tokens, depth }) if !arguments.batch.is_empty() => {
            Some((*tokens, *depth))
        }
        _ => None,
    };
    let batch_ids = match batched {
        Some((tokens, depth)) => {
            works.pop();
            let most = arguments
                .batch
                .iter()
                .max()
                .map_or(0, |most| *most as usize);
            batch_tokens(arguments, &model, most * (tokens + depth))?
        }
        None => Vec::new(),
    };
    let sizes: Vec<usize> = arguments.batch.iter().map(|size| *size as usize).collect();
    let mut batches = match batched {
        Some(each) => {
            check_room(&model, &sizes, each.0 + each.1)?;
            Some(BatchBench::new(&mut model, sizes, each, &batch_ids)?)
        }
        None => None,
    };

    let bar = Bar::new(output);
    bar.begin("checking", 1, "comparisons");
    // On the CPU, whatever device the other runs on.
    let mut dense = {
        let bundle = open_bundle(&arguments.bundle)?;
        let dense = Some(Policy::Dense);
        let execution = arguments.engine.execution_on_cpu();
        SingleSession::open(bundle, dense, &execution, &Silent)?
    };
    let mut found = check(&mut model, &mut dense, &ids[..checked], &bar)?;
    if let Some(batches) = &mut batches {
        found.sequences = batches.check(&mut model, &bar)?;
    }
    let is_dense = model.policies() == dense.policies() && !model.skips_inputs();
    // `dense` is on the CPU, and sequences on a device are not.
    let times_dense = !is_dense && !model.uses_device();
    let models = if times_dense { 2 } else { 1 };
    bar.advance(1)?;
    bar.end();

    let isa = Isa::detect()?;
    let probe = ReadProbe::new(probe_bytes)
        .with_context(|| format!("cannot allocate `--probe {}`", arguments.probe))?;
    let bench = Bench {
        isa,
        threads,
        repeats: arguments.repeats as usize,
        probe: &probe,
        ids: &ids,
        progress: &bar,
    };
    let steps: u64 = works.iter().map(|work| bench.steps(*work)).sum();
    let batch_steps = batches
        .as_ref()
        .map_or(0, |batches| batches.steps(bench.repeats, models));
    let completed: usize = completions.iter().map(Completion::token_count).sum();
    let completion_steps = (2 * bench.repeats * completed) as u64;
    let decoded = works.last().and_then(|work| match work {
        Work::Decode { tokens, depth } => Some((*tokens, *depth)),
        _ => None,
    });
    let decoded = decoded.filter(|_| !arguments.parts.is_empty());
    let part_steps = decoded.map_or(0, |(tokens, _)| tokens * arguments.parts.len()) as u64;
    let all_steps = steps + batch_steps + completion_steps + part_steps;
    bar.begin("timing", all_steps, "tokens");
    let mut measured = Vec::new();
    for work in works {
        measured.push(bench.measure(&mut model, work)?);
    }
    let hybrid = time_hybrid(&mut model, &ids, bench.read())?;
    let batches = match &mut batches {
        Some(batches) => {
            let dense = times_dense.then_some(&mut dense.engine);
            batches.measure(&bench, &mut model, dense)?
        }
        None => Vec::new(),
    };
    let densities = if arguments.ffn_densities.is_empty() {
        Vec::new()
    } else {
        time_ffns(&bench, &mut model, &arguments.ffn_densities)?
    };
    let speculation = if completions.is_empty() {
        None
    } else {
        Some(time_speculation(&bench, &mut model, &completions)?)
    };
    // Comes last, because the model computes on one thread from here on.
    let mut parts = Vec::new();
    if let Some(decoded) = decoded {
        for threads in &arguments.parts {
            parts.push(time_parts(&bench, &mut model, decoded, *threads as usize)?);
        }
    }
    let sync = speed_test(4 << 20, 4 << 20)?.kernel_seconds(&Threads::new(isa, threads)?)?;
    bar.end();

    let report = Report {
        model: &model,
        isa,
        threads,
        policy: arguments.engine.policy.map(Policy::from),
        text: arguments.prompt.as_deref(),
        seed: arguments.seed,
        probe_bytes: probe.bytes(),
        check: &found,
        measured: &measured,
        batches: &batches,
        densities: &densities,
        speculation: speculation.as_ref(),
        parts: &parts,
        hybrid: hybrid.as_ref(),
        sync_microseconds: 1e6 * sync,
    };
    if arguments.json {
        print_json(&report.json())
    } else {
        print(report.text()?)
    }
}

/// Advice for work that exceeds the bundle's context of `limit` tokens; the model supports up to `longest`.
fn longer_context(longest: usize, limit: usize) -> &'static str {
    if longest > limit {
        "give fewer, or re-plan the bundle with a longer `--context`"
    } else {
        "give fewer: the model supports no more"
    }
}

/// Work to time, prompts first. Fails if there is none, or if it exceeds the context of `limit` tokens.
fn works(arguments: &BenchArguments, limit: usize, longest: usize) -> Result<Vec<Work>> {
    let depth = arguments.depth;
    let prompts = arguments.prompt_tokens.clone().unwrap_or_else(|| {
        let mut usual = if arguments.batch.is_empty() {
            vec![128, 512]
        } else {
            Vec::new()
        };
        usual.retain(|tokens| *tokens <= limit);
        usual
    });
    let tokens = arguments
        .decode_tokens
        .unwrap_or_else(|| 64.min(limit.saturating_sub(depth)));
    let mut works: Vec<Work> = prompts
        .into_iter()
        .map(|tokens| Work::Prompt { tokens })
        .collect();
    works.retain(|work| work.context() > 0);
    if tokens > 0 {
        works.push(Work::Decode { tokens, depth });
    }
    if arguments.decode_tokens.is_none() && depth > 0 && depth >= limit {
        bail!(Advised::new(
            format!("`--depth` is {depth}, and the bundle has room for {limit} tokens"),
            "give a smaller `--depth`"
        ));
    }
    for work in &works {
        let (what, asked) = match work {
            Work::Prompt { tokens } => ("--prompt-tokens", *tokens),
            Work::Decode { tokens, depth } | Work::Batch { tokens, depth, .. } => (
                "--depth` and `--decode-tokens",
                tokens.saturating_add(*depth),
            ),
        };
        if asked > limit {
            bail!(Advised::new(
                format!("`{what}` take {asked} tokens and the bundle has room for {limit}"),
                longer_context(longest, limit)
            ));
        }
    }
    if tokens == 0 && !arguments.parts.is_empty() {
        bail!(Advised::new(
            "`--parts` needs decoded tokens, but `--decode-tokens` is 0",
            "raise `--decode-tokens`, or omit `--parts`"
        ));
    }
    let has_works = !works.is_empty() || arguments.completions.is_some();
    if !has_works && arguments.ffn_densities.is_empty() {
        bail!(Advised::new(
            "nothing to time",
            "give `--prompt-tokens` or `--decode-tokens`"
        ));
    }
    if tokens == 0 && !arguments.batch.is_empty() {
        bail!(Advised::new(
            "`--batch` decodes, and `--decode-tokens` is 0",
            "give more, or leave one out"
        ));
    }
    Ok(works)
}

/// The texts of `--completions`.
fn completions(arguments: &BenchArguments, model: &SingleSession) -> Result<Vec<Completion>> {
    let Some(path) = &arguments.completions else {
        return Ok(Vec::new());
    };
    let tokenizer = powerinfer_pipeline::tokenizer(&model.bundle().files())?;
    Ok(Completion::read(path, &tokenizer, model.context_limit())?)
}

/// `count` tokens of the text, or random ones.
fn tokens(arguments: &BenchArguments, model: &SingleSession, count: usize) -> Result<Vec<u32>> {
    let mut ids = batch_tokens(arguments, model, count)?;
    if let Some(path) = arguments.prompt.as_ref().filter(|_| ids.len() < count) {
        bail!(Advised::new(
            format!(
                "`{}` has {} tokens and {count} are needed",
                path.display(),
                ids.len()
            ),
            "give a longer text or ask for fewer tokens"
        ));
    }
    ids.truncate(count);
    Ok(ids)
}

/// All tokens of the text, or `count` random ones.
fn batch_tokens(
    arguments: &BenchArguments,
    model: &SingleSession,
    count: usize,
) -> Result<Vec<u32>> {
    let Some(path) = &arguments.prompt else {
        let mut random = Random::new(arguments.seed);
        let vocabulary = model.config().vocabulary_size;
        return Ok((0..count)
            .map(|_| random.below(vocabulary) as u32)
            .collect());
    };
    let text = read_text(path)?;
    let tokenizer = powerinfer_pipeline::tokenizer(&model.bundle().files())?;
    Ok(tokenizer.encode(&text, SpecialTokens::Add)?)
}

fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read `{}`", path.display()))
}

/// A share, given in percent.
fn parse_density(text: &str) -> Result<f64, String> {
    let percent: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if percent > 0.0 && percent <= 100.0 {
        Ok(percent / 100.0)
    } else {
        Err("not above 0 and at most 100".to_owned())
    }
}

/// Fails if KV caches of `tokens` tokens for the largest of `batches` do not fit the free memory.
fn check_room(model: &SingleSession, batches: &[usize], tokens: usize) -> Result<()> {
    let sequences = batches.iter().max().copied().unwrap_or(0);
    let needed = kv_cache_bytes(model, sequences, tokens);
    if let Some((_, free)) = system::memory().filter(|(_, free)| needed > *free) {
        bail!(Advised::new(
            format!(
                "`--batch {sequences}` takes {} for the KV caches of {sequences} sequences of {tokens} tokens, and {} of memory are free",
                ByteSize(needed),
                ByteSize(free)
            ),
            "ask for smaller batches or fewer tokens, or re-plan the bundle with a smaller `--kv-cache`"
        ));
    }
    Ok(())
}

/// Bytes of the read probe, if they fit the free memory next to the model.
fn probe_bytes(asked: ByteSize) -> Result<usize> {
    if asked.0 < 1 << 20 {
        bail!(Advised::new(
            format!("`--probe` is {asked}, too little to time"),
            "give at least 1MiB"
        ));
    }
    if let Some((_, free)) = system::memory().filter(|(_, free)| asked.0 > free / 2) {
        bail!(Advised::new(
            format!(
                "`--probe` is {asked} and {} of memory are free",
                ByteSize(free)
            ),
            "give less"
        ));
    }
    Ok(asked.0 as usize)
}
