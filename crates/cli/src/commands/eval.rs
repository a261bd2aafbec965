//! `powerinfer eval`: quality of a bundle or a model.

mod code;
mod prune;
mod questions;
mod text;

use std::{ops::Range, path::PathBuf};

use anyhow::{Result, bail};
use powerinfer_artifact::{
    ByteSize, Digest, Progress, Shard, certificate::Estimate, counted, plan::Policy,
};
use powerinfer_bundle::Bundle;
use powerinfer_datasets::minipython::{Split, Task, distinct_tasks};
use powerinfer_eval::{
    Ends, EvalError, Fidelity, Likelihood, PythonSandbox, ResultFile, Run, Subject, complete,
    continuation_likelihood,
    function_tasks::{CASES, is_solved},
    statistics::Paired,
};
use powerinfer_runtime::Sampler;
use powerinfer_text::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use self::{
    code::CodeArguments,
    prune::PruneArguments,
    questions::{ChoiceArguments, WordProblemArguments},
    text::{Shown, TextArguments},
};
use crate::{
    engine::{PolicyArgument, evaluated::SubjectArguments},
    hint::Advised,
    output::{Output, Table, percent, print, print_json},
    progress::Bar,
};

/// Measure to take.
#[derive(Debug, clap::Args)]
pub(crate) struct EvalArguments {
    #[command(subcommand)]
    measure: Measure,
}

#[derive(Debug, clap::Subcommand)]
enum Measure {
    /// Held-out function tasks: pass@1, perplexity and speed under each policy
    Tasks(TasksArguments),
    /// HumanEval: pass@k under each policy, or of completions made elsewhere
    Humaneval(CodeArguments),
    /// Multiple-choice questions, answered by log-likelihood
    MultipleChoice(ChoiceArguments),
    /// Word problems with a number as answer
    Gsm8k(WordProblemArguments),
    /// The cost of fewer neurons: skipped by predictors, cold ones dropped, or as many dropped at random
    Prune(PruneArguments),
    /// Perplexity of text under each policy
    Perplexity(TextArguments),
    /// Fidelity of each policy to `dense`: perplexity, KL divergence, top-1 agreement
    Fidelity(TextArguments),
}

/// File of the results, and shard of the items.
#[derive(Debug, clap::Args)]
struct ResultArguments {
    /// Append results to this file, and resume from it; with several policies one file each, named after the policy
    #[arg(long, value_name = "FILE", value_parser = crate::values::new_file)]
    out: Option<PathBuf>,
    /// Evaluate one of n shards of the items, as `3/16`; files are named after it. `powerinfer merge` puts those of a policy
    /// together, and this command without the option reports on `--out`
    #[arg(long, value_name = "I/N", default_value_t = Shard::WHOLE, hide_default_value = true, requires = "out")]
    shard: Shard,
}

impl ResultArguments {
    /// Items of the shard.
    fn items(&self, all: usize) -> Result<Range<usize>> {
        let range = self.shard.range(all);
        if range.is_empty() {
            bail!(Advised::new(
                format!("shard {} has no items: there are {all}", self.shard),
                "use fewer shards"
            ));
        }
        Ok(range)
    }

    /// File of a policy's results, of `policies`.
    fn path(&self, policy: &str, policies: usize) -> Option<PathBuf> {
        let path = self.out.as_ref()?;
        let mut name = path.file_name()?.to_string_lossy().into_owned();
        if policies > 1 {
            name = match name.rsplit_once('.') {
                Some((stem, extension)) => format!("{stem}-{policy}.{extension}"),
                None => format!("{name}-{policy}"),
            };
        }
        Some(path.with_file_name(self.shard.file_name(&name)))
    }

    /// The run of `settings`, of which each item has `rows_per_item` rows.
    fn run(&self, settings: &Value, items: &Range<usize>, rows_per_item: usize) -> Run {
        Run {
            digest: Digest::from_content(settings.to_string().as_bytes()).to_string(),
            shard: self.shard,
            rows: items.len() * rows_per_item,
        }
    }

    /// Reports that the results are those of a shard.
    fn say_shard(&self, items: &Range<usize>, all: usize, what: &str, output: Output) {
        if self.shard != Shard::WHOLE {
            output.say(format!(
                "shard {}: {} of {all} {what}",
                self.shard,
                items.len()
            ));
        }
    }
}

/// Tasks and policies.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  powerinfer eval tasks demo --count 200")]
struct TasksArguments {
    #[command(flatten)]
    subject: SubjectArguments,
    /// Number of tasks, all of combinations that the demo was not trained on
    #[arg(long, value_name = "N", default_value_t = 200)]
    count: usize,
    /// Policies to compare [default: dense, exact, predicted and the plan's, as far as the bundle supports them; dense for an
    /// unpacked model]
    #[arg(long, value_name = "POLICY", value_delimiter = ',')]
    policy: Vec<PolicyArgument>,
    /// Tokens of a solution, at most
    #[arg(short = 'n', long, value_name = "N", default_value_t = 200)]
    max_tokens: usize,
    /// Seed of the choice of tasks and of their inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    results: ResultArguments,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Result of a task under a policy.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TaskResult {
    passed: bool,
    /// Tokens of the completion.
    completion: Vec<u32>,
    /// Σ −ln p of the solution's tokens, in nats, and their number.
    likelihood: (f64, u64),
    /// Decoded tokens that the counts below are of.
    decoded: u64,
    bytes_read: u64,
    neurons_computed: u64,
    /// FFN neurons of all layers for each token; 0 for the reference engine, which counts none.
    neurons: u64,
    decode_seconds: f64,
}

/// Results of one policy.
struct Row {
    policy: Policy,
    tasks: Vec<TaskResult>,
}

pub(crate) fn run(arguments: &EvalArguments, output: Output) -> Result<()> {
    match &arguments.measure {
        Measure::Tasks(arguments) => tasks(arguments, output),
        Measure::Humaneval(arguments) => code::run(arguments, output),
        Measure::MultipleChoice(arguments) => questions::multiple_choice(arguments, output),
        Measure::Gsm8k(arguments) => questions::word_problems(arguments, output),
        Measure::Prune(arguments) => prune::run(arguments, output),
        Measure::Perplexity(arguments) => text::run(arguments, Shown::Perplexity, output),
        Measure::Fidelity(arguments) => text::run(arguments, Shown::Fidelity, output),
    }
}

/// Policies to compare, with their names; the plan's if none is given.
fn choices(asked: &[PolicyArgument]) -> Vec<(String, Option<Policy>)> {
    if asked.is_empty() {
        return vec![("planned".to_owned(), None)];
    }
    asked
        .iter()
        .map(|policy| Policy::from(*policy))
        .map(|policy| (policy.to_string(), Some(policy)))
        .collect()
}

/// Mean KL divergence with 1.96 standard errors, as JSON.
fn divergence_json(fidelity: &Fidelity) -> Value {
    let Estimate { value, margin } = fidelity.mean_divergence();
    json!({ "value": value, "margin_95_percent": margin })
}

/// A paired comparison as JSON.
fn paired_json(paired: Paired) -> Value {
    json!({
        "items": paired.items, "first_only": paired.first_only, "this_only": paired.second_only,
        "difference": paired.difference(), "p_value": paired.p_value(),
        "minimum_detectable_effect": paired.minimum_detectable_effect(),
    })
}

/// The default policies: `dense`, `exact`, `predicted` and that of the plan's first layer, as far as `bundle` supports them.
fn usual_policies(bundle: &Bundle) -> Vec<Policy> {
    let planned = bundle.plan().layers.first().map(|layer| layer.policy);
    let is_usual = |policy: &Policy| {
        let usual = [Policy::Dense, Policy::Exact, Policy::Predicted];
        usual.contains(policy) || Some(*policy) == planned
    };
    let possible = text::choices(&[], bundle, true).into_iter();
    possible
        .filter_map(|(_, policy)| policy)
        .filter(is_usual)
        .collect()
}

fn tasks(arguments: &TasksArguments, output: Output) -> Result<()> {
    if arguments.count == 0 {
        bail!(Advised::new("`--count` is 0", "give at least one task"));
    }
    let sandbox = PythonSandbox::find()?;
    let subject = arguments.subject.open(output)?;
    let asked = arguments.policy.iter().copied().map(Policy::from);
    let mut policies: Vec<Policy> = asked.collect();
    if policies.is_empty() {
        policies = match subject.bundle()? {
            Some(bundle) => usual_policies(&bundle),
            None => vec![Policy::Dense],
        };
    }
    subject.check_policies(policies.iter().copied().map(Some), output)?;
    let results = &arguments.results;
    let items = results.items(arguments.count)?;
    // All files first: an error in one must not appear after hours of another.
    let mut files = Vec::new();
    for policy in &policies {
        let policy = policy.to_string();
        let settings = json!({
            "bundle": subject.identity()?,
            "tasks": arguments.count,
            "policy": policy,
            "max_tokens": arguments.max_tokens,
            "seed": arguments.seed,
            "judge": sandbox.name(),
            "version": env!("CARGO_PKG_VERSION"),
        });
        let path = results.path(&policy, policies.len());
        files.push(ResultFile::open(
            path.as_deref(),
            &results.run(&settings, &items, 1),
        )?);
    }
    let tasks = distinct_tasks(Split::HeldOut, arguments.seed, arguments.count)?;
    let mut rows: Vec<Row> = Vec::new();
    for (policy, mut file) in policies.into_iter().zip(files) {
        let quiet = Output {
            quiet: output.quiet || !rows.is_empty(),
            ..output
        };
        let mut model = subject.model(Some(policy), quiet)?;
        let bar = Bar::new(output);
        bar.begin(&policy.to_string(), items.len() as u64, "tasks");
        let mut row = Row {
            policy,
            tasks: Vec::new(),
        };
        for index in items.clone() {
            let (tokenizer, task) = (subject.tokenizer(), &tasks[index]);
            let measure = || measure(&mut model, tokenizer, task, &sandbox, arguments);
            row.tasks.push(file.get_or(index, measure)?.clone());
            bar.advance(1)?;
        }
        bar.end();
        rows.push(row);
    }
    if arguments.json {
        let rows: Vec<Value> = rows.iter().map(|row| row.to_json(&rows[0])).collect();
        return print_json(
            &json!({ "tasks": items.len(), "seed": arguments.seed, "policies": rows }),
        );
    }
    let mut table = Table::new(&[
        "policy",
        "tokens/s",
        "read per token",
        "FFN neurons",
        "pass@1",
        "perplexity",
        "identical outputs",
    ]);
    for row in &rows {
        table.row(vec![
            row.policy.to_string(),
            format!("{:.0}", row.tokens_per_second()),
            ByteSize(row.bytes_per_token() as u64).to_string(),
            percent(row.computed_share()),
            format!(
                "{} ({}/{})",
                percent(row.passed() as f64 / row.tasks.len() as f64),
                row.passed(),
                row.tasks.len()
            ),
            format!("{:.4}", row.likelihood().perplexity()),
            format!("{}/{}", row.same_as(&rows[0]), row.tasks.len()),
        ]);
    }
    print(table.to_string())?;
    results.say_shard(&items, arguments.count, "tasks", output);
    output.say(format!(
        "{}, greedy, {}; pass@1: the function behaves like the reference on {CASES} inputs; perplexity: of the solution's {} tokens given the task; identical outputs: completions equal to those of `{}`",
        counted(items.len(), "held-out task"), counted(subject.threads(), "thread"), rows[0].likelihood().tokens, rows[0].policy
    ));
    Ok(())
}

/// Solves a task.
fn measure(
    model: &mut Subject,
    tokenizer: &Tokenizer,
    task: &Task,
    sandbox: &PythonSandbox,
    arguments: &TasksArguments,
) -> Result<TaskResult, EvalError> {
    let ends = Ends {
        max_tokens: arguments.max_tokens,
        context: model.context_limit(),
        texts: &[],
    };
    let completion = complete(
        model,
        tokenizer,
        task.prompt(),
        ends,
        Sampler::greedy(),
        |model| {
            model.take_statistics();
        },
    )?;
    let decoded = model.take_statistics().unwrap_or_default();
    let likelihood = continuation_likelihood(model, tokenizer, task.prompt(), task.solution())?;
    Ok(TaskResult {
        passed: is_solved(task, &completion.text, arguments.seed, sandbox)?,
        completion: completion.tokens,
        likelihood: (likelihood.negative_log, likelihood.tokens),
        decoded: decoded.tokens,
        bytes_read: decoded.all_bytes_read(),
        neurons_computed: decoded.neurons_computed,
        neurons: decoded.neurons,
        decode_seconds: completion.decode.as_secs_f64(),
    })
}

impl Row {
    fn passed(&self) -> usize {
        self.tasks.iter().filter(|task| task.passed).count()
    }

    fn likelihood(&self) -> Likelihood {
        let mut all = Likelihood::default();
        for task in &self.tasks {
            let (negative_log, tokens) = task.likelihood;
            all += Likelihood {
                negative_log,
                tokens,
            };
        }
        all
    }

    fn sum(&self, count: fn(&TaskResult) -> u64) -> u64 {
        self.tasks.iter().map(count).sum()
    }

    fn tokens(&self) -> u64 {
        self.sum(|task| task.completion.len() as u64)
    }

    fn tokens_per_second(&self) -> f64 {
        let seconds: f64 = self.tasks.iter().map(|task| task.decode_seconds).sum();
        self.tokens() as f64 / seconds.max(1e-9)
    }

    fn bytes_per_token(&self) -> f64 {
        self.sum(|task| task.bytes_read) as f64 / self.sum(|task| task.decoded).max(1) as f64
    }

    /// Share of FFN neurons computed; 1 for the reference engine, which counts none.
    fn computed_share(&self) -> f64 {
        match self.sum(|task| task.neurons) {
            0 => 1.0,
            neurons => self.sum(|task| task.neurons_computed) as f64 / neurons as f64,
        }
    }

    /// Number of completions equal to those of `other`.
    fn same_as(&self, other: &Self) -> usize {
        let pairs = self.tasks.iter().zip(&other.tasks);
        let same = pairs.filter(|(a, b)| a.completion == b.completion);
        same.count()
    }

    fn to_json(&self, first: &Self) -> Value {
        json!({
            "policy": self.policy.to_string(),
            "tokens_per_second": self.tokens_per_second(),
            "bytes_per_token": self.bytes_per_token(),
            "ffn_neurons_computed": self.computed_share(),
            "passed": self.passed(),
            "pass_at_1": self.passed() as f64 / self.tasks.len() as f64,
            "perplexity": self.likelihood().perplexity(),
            "same_completions_as_first": self.same_as(first),
        })
    }
}
