//! `powerinfer eval prune`: the cost of computing fewer neurons: skipping those predicted inactive, dropping cold ones for
//! good, and dropping as many at random.

use std::path::PathBuf;

use anyhow::{Result, bail};
use powerinfer_artifact::{Progress, plan::Policy, progress::Silent};
use powerinfer_datasets::minipython::{Split, Task, distinct_tasks};
use powerinfer_eval::{
    Ends, Fidelity, PythonSandbox, Windows, complete, fidelity, format,
    function_tasks::is_solved,
    pruning::Arm,
    statistics::{Paired, share},
};
use powerinfer_model::LanguageModel;
use powerinfer_pipeline::{check_paths, texts};
use powerinfer_runtime::{Execution, Sampler, SingleSession};
use powerinfer_text::Tokenizer;
use serde_json::{Value, json};

use super::{divergence_json, paired_json};
use crate::{
    engine::evaluated::certificate_texts,
    hint::Advised,
    model_argument::{DEMO, open_bundle},
    output::{Output, Table, percent, print, print_json},
    progress::Bar,
    thread_argument::ThreadArgument,
};

/// Arms of the study, and the text and tasks they are judged on.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  powerinfer eval prune demo --tasks 100\n  powerinfer eval prune ./my-model.powerinfer --data held-out.txt --keep 0.5,0.2"
)]
pub(crate) struct PruneArguments {
    /// Bundle, a folder with a bundle in it, or the name of a model prepared here
    #[arg(default_value = DEMO)]
    bundle: String,
    /// Text that the profile has not seen, in any format that `profile --data` reads [default: for `demo` tasks it was not
    /// trained on, else the text of the bundle's certificate]
    #[arg(long, value_name = "FILE|DIR|-")]
    data: Vec<PathBuf>,
    /// Maximum number of tokens to read [default: 4096, or the certificate's whole text]
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// Shares of the neurons to keep: the hottest of all layers together, and as many of each layer at random
    #[arg(
        long,
        value_name = "SHARE",
        value_delimiter = ',',
        default_value = "0.8,0.6,0.4,0.2,0.1,0.05"
    )]
    keep: Vec<f64>,
    /// Logits to raise the predictors' thresholds by: the higher, the fewer neurons are computed
    #[arg(
        long,
        value_name = "LOGIT",
        value_delimiter = ',',
        allow_negative_numbers = true,
        default_value = "-2,0,2,4,6"
    )]
    raise: Vec<f32>,
    /// Held-out function tasks of the demo to solve, too
    #[arg(long, value_name = "N", default_value_t = 0)]
    tasks: usize,
    #[command(flatten)]
    threads: ThreadArgument,
    /// Seed of every random choice
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Parameter of an arm, for tables.
fn format_parameter(arm: Arm) -> String {
    match arm {
        Arm::Dense => "–".to_owned(),
        Arm::SkipPredicted(by) => format!("logit {by:+}"),
        Arm::DropCold(share) | Arm::DropRandom(share) => format!("keep {}", percent(share)),
    }
}

/// Results of one arm.
struct Row {
    arm: Arm,
    /// Lowest activation frequency of a kept neuron, if cold ones are dropped.
    coldest: Option<f32>,
    computed_share: f64,
    fidelity: Fidelity,
    /// Whether each task was solved.
    solved: Vec<bool>,
}

pub(crate) fn run(arguments: &PruneArguments, output: Output) -> Result<()> {
    check_paths(&arguments.data)?;
    if let Some(share) = arguments
        .keep
        .iter()
        .find(|share| !(0.0..=1.0).contains(*share))
    {
        bail!(Advised::new(
            format!("`--keep` has {share}"),
            "a share lies between 0 and 1"
        ));
    }
    let tasks = distinct_tasks(Split::HeldOut, arguments.seed, arguments.tasks)?;
    let has_tasks = !tasks.is_empty();
    let sandbox = has_tasks.then(PythonSandbox::find).transpose()?;
    let open = || open_bundle(&arguments.bundle);
    let bundle = open()?;
    let tokenizer = powerinfer_pipeline::tokenizer(&bundle.files())?;
    let certified = certificate_texts(&bundle, &arguments.data, arguments.tokens, output)?;
    let texts = match certified {
        Some(texts) => texts,
        None => texts(
            &arguments.data,
            bundle.header().model.name == DEMO,
            bundle.config(),
            &tokenizer,
            arguments.tokens.unwrap_or(4096),
            &Bar::new(output),
        )?,
    };
    let total: usize = texts.iter().map(|text| text.len().saturating_sub(1)).sum();
    if total < 2 {
        bail!(Advised::new(
            "the text has no tokens to score",
            "give more text by `--data`"
        ));
    }
    let placing = bundle.placement_inputs()?;
    let frequencies: Vec<&[f32]> = placing.iter().map(|layer| &layer.frequencies[..]).collect();
    let windows = Windows::for_context(bundle.plan().budget.context_tokens as usize);
    let threads = arguments.threads.count();
    let execution = Execution::on_cpu(threads);
    let has_predictors = bundle
        .predictors()
        .is_some_and(|file| file.layers().iter().all(|summary| summary.rank > 0));
    let policy = Some(Policy::Dense);
    let mut dense = SingleSession::open(bundle, policy, &execution, &Bar::new(output))?;
    let arms = arms(arguments, has_predictors);
    let bar = Bar::new(output);
    let steps = arms.len() * (total + tasks.len());
    bar.begin("computing fewer neurons", steps as u64, "tokens and tasks");
    let mut rows: Vec<Row> = Vec::new();
    for arm in arms {
        let mut other = SingleSession::open(open()?, Some(arm.policy()), &execution, &Silent)?;
        let coldest = arm.apply(&mut other, &frequencies, arguments.seed);
        let fidelity = fidelity(&mut dense, &mut other, &texts, windows, |tokens| {
            bar.advance(tokens).map_err(anyhow::Error::from)
        })?;
        let computed_share = other.observers_mut().take_statistics().computed_share();
        let solved = match &sandbox {
            Some(sandbox) => solve(
                &mut other,
                &tokenizer,
                &tasks,
                sandbox,
                arguments.seed,
                &bar,
            )?,
            None => Vec::new(),
        };
        rows.push(Row {
            arm,
            coldest,
            computed_share,
            fidelity,
            solved,
        });
    }
    bar.end();
    if arguments.json {
        let rows: Vec<Value> = rows.iter().map(|row| row.to_json(&rows[0])).collect();
        return print_json(&json!({
            "tokens": total, "window": windows.length, "stride": windows.stride, "tasks": tasks.len(),
            "seed": arguments.seed, "arms": rows,
        }));
    }
    print(table(&rows))?;
    report(&rows, total, output);
    Ok(())
}

/// Arms to compare, `dense` first.
fn arms(arguments: &PruneArguments, has_predictors: bool) -> Vec<Arm> {
    let mut arms = vec![Arm::Dense];
    if has_predictors {
        arms.extend(arguments.raise.iter().map(|by| Arm::SkipPredicted(*by)));
    }
    arms.extend(arguments.keep.iter().map(|share| Arm::DropCold(*share)));
    arms.extend(arguments.keep.iter().map(|share| Arm::DropRandom(*share)));
    arms
}

/// Solves `tasks` greedily; returns which are solved.
fn solve(
    model: &mut SingleSession,
    tokenizer: &Tokenizer,
    tasks: &[Task],
    sandbox: &PythonSandbox,
    seed: u64,
    bar: &Bar,
) -> Result<Vec<bool>> {
    let ends = Ends {
        max_tokens: 200,
        context: model.context_limit(),
        texts: &[],
    };
    let mut solved = Vec::new();
    for task in tasks {
        let written = complete(
            model,
            tokenizer,
            task.prompt(),
            ends,
            Sampler::greedy(),
            |_| (),
        )?;
        solved.push(is_solved(task, &written.text, seed, sandbox)?);
        bar.advance(1)?;
    }
    model.reset();
    Ok(solved)
}

impl Row {
    fn passed(&self) -> u64 {
        self.solved.iter().filter(|solved| **solved).count() as u64
    }

    fn to_json(&self, dense: &Self) -> Value {
        let found = share(self.passed(), self.solved.len() as u64);
        let pass = if self.solved.is_empty() {
            Value::Null
        } else {
            json!({
                "value": found.value, "low": found.low, "high": found.high,
                "relative_to_dense": paired_json(Paired::from_outcomes(&dense.solved, &self.solved)),
            })
        };
        let parameter = match self.arm {
            Arm::Dense => Value::Null,
            Arm::SkipPredicted(by) => json!({ "raised_logit": by }),
            Arm::DropCold(share) | Arm::DropRandom(share) => json!({ "kept": share }),
        };
        json!({
            "arm": self.arm.name(),
            "parameter": parameter,
            "coldest_kept": self.coldest,
            "ffn_neurons_computed": self.computed_share,
            "perplexity": self.fidelity.other().perplexity(),
            "perplexity_rise": self.fidelity.perplexity_rise(),
            "kl_divergence_mean": divergence_json(&self.fidelity),
            "top1_agreement": self.fidelity.top1_agreement(),
            "pass_at_1": pass,
        })
    }
}

fn table(rows: &[Row]) -> String {
    let has_tasks = !rows[0].solved.is_empty();
    let mut headings = vec![
        "arm",
        "parameter",
        "FFN neurons",
        "perplexity",
        "rise (95%)",
        "top-1 agreement",
    ];
    if has_tasks {
        headings.push("pass@1 (95%)");
    }
    let mut table = Table::new(&headings);
    for row in rows {
        let rise = row.fidelity.perplexity_rise();
        let mut cells = vec![
            row.arm.name().to_owned(),
            format_parameter(row.arm),
            percent(row.computed_share),
            format!("{:.4}", row.fidelity.other().perplexity()),
            format::rise(rise, row.fidelity.other().tokens),
            percent(row.fidelity.top1_agreement()),
        ];
        if has_tasks {
            let found = share(row.passed(), row.solved.len() as u64);
            cells.push(format::share(found));
        }
        table.row(cells);
    }
    table.to_string()
}

/// Reports how it was measured, and which arms differ from `dense` on the tasks.
fn report(rows: &[Row], tokens: usize, output: Output) {
    output.say(format!(
        "{tokens} tokens scored; rise: of perplexity over `dense`, 95% by the paired block bootstrap; cold: by activation frequency in the profile, over all layers"
    ));
    for row in rows.iter().skip(1).filter(|row| !row.solved.is_empty()) {
        let name = format!("{} ({})", row.arm.name(), format_parameter(row.arm));
        let paired = Paired::from_outcomes(&rows[0].solved, &row.solved);
        output.say(format::paired(&name, rows[0].arm.name(), paired));
    }
}
