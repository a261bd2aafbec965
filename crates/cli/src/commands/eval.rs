//! `powerinfer eval`: quality of a bundle or a model.

mod code;
mod prune;
mod questions;
mod text;

use std::time::Duration;

use anyhow::{Result, bail};
use powerinfer_artifact::{ByteSize, Progress, certificate::Estimate, counted, plan::Policy};
use powerinfer_datasets::minipython::{Split, distinct_tasks};
use powerinfer_eval::{
    Ends, Fidelity, Likelihood, complete, continuation_likelihood,
    function_tasks::{CASES, Verdict, judge},
    statistics::Paired,
};
use powerinfer_runtime::{Sampler, Statistics};
use powerinfer_text::Tokenizer;
use serde_json::{Value, json};

use self::{
    code::CodeArguments,
    prune::PruneArguments,
    questions::{ChoiceArguments, WordProblemArguments},
    text::{Shown, TextArguments},
};
use crate::{
    engine::{
        PolicyArgument,
        evaluated::{Model, SubjectArguments},
    },
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

/// Tasks and policies.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  powerinfer eval tasks demo --count 200")]
struct TasksArguments {
    #[command(flatten)]
    subject: SubjectArguments,
    /// Number of tasks, all of combinations that the demo was not trained on
    #[arg(long, value_name = "N", default_value_t = 200)]
    count: usize,
    /// Policies to compare [default: dense, exact and predicted; dense for an unpacked model]
    #[arg(long, value_name = "POLICY", value_delimiter = ',')]
    policy: Vec<PolicyArgument>,
    /// Tokens of a solution, at most
    #[arg(short = 'n', long, value_name = "N", default_value_t = 200)]
    max_tokens: usize,
    /// Seed of the choice of tasks and of their inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Results of one policy.
struct Row {
    policy: Policy,
    passed: usize,
    tasks: usize,
    likelihood: Likelihood,
    decoded: Statistics,
    decode: Duration,
    completions: Vec<Vec<u32>>,
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

/// Policies to compare, with their names; the plan's where none is given.
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

fn tasks(arguments: &TasksArguments, output: Output) -> Result<()> {
    if arguments.count == 0 {
        bail!("`--count` is 0; give at least one task");
    }
    let subject = arguments.subject.open(output)?;
    let mut policies = arguments.policy.clone();
    if policies.is_empty() {
        policies = match subject.checkpoint() {
            Some(_) => vec![PolicyArgument::Dense],
            None => vec![
                PolicyArgument::Dense,
                PolicyArgument::Exact,
                PolicyArgument::Predicted,
            ],
        };
    }
    let mut rows: Vec<Row> = Vec::new();
    for policy in policies {
        let quiet = Output {
            quiet: output.quiet || !rows.is_empty(),
            ..output
        };
        let policy = Policy::from(policy);
        let mut model = subject.model(Some(policy), quiet)?;
        let tokenizer = subject.tokenizer();
        rows.push(measure(&mut model, tokenizer, policy, arguments, output)?);
    }
    if arguments.json {
        let rows: Vec<Value> = rows.iter().map(|row| row.to_json(&rows[0])).collect();
        return print_json(
            &json!({ "tasks": arguments.count, "seed": arguments.seed, "policies": rows }),
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
            ByteSize(row.decoded.bytes_per_token() as u64).to_string(),
            percent(row.computed_share()),
            format!(
                "{} ({}/{})",
                percent(row.passed as f64 / row.tasks as f64),
                row.passed,
                row.tasks
            ),
            format!("{:.4}", row.likelihood.perplexity()),
            format!("{}/{}", row.same_as(&rows[0]), row.tasks),
        ]);
    }
    print(table.to_string())?;
    output.say(format!(
        "{}, greedy, {}; pass@1: the function behaves like the reference on {CASES} inputs; perplexity: of the solution's {} tokens given the task; identical outputs: completions equal to those of `{}`",
        counted(arguments.count, "held-out task"), counted(subject.threads(), "thread"), rows[0].likelihood.tokens, rows[0].policy
    ));
    Ok(())
}

/// Solves every task.
fn measure(
    model: &mut Model,
    tokenizer: &Tokenizer,
    policy: Policy,
    arguments: &TasksArguments,
    output: Output,
) -> Result<Row> {
    let tasks = distinct_tasks(Split::HeldOut, arguments.seed, arguments.count)?;
    let mut row = Row {
        policy,
        passed: 0,
        tasks: tasks.len(),
        likelihood: Likelihood::default(),
        decoded: Statistics::default(),
        decode: Duration::ZERO,
        completions: Vec::new(),
    };
    let bar = Bar::new(output);
    bar.begin(&policy.to_string(), tasks.len() as u64, "tasks");
    for task in &tasks {
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
            &mut Sampler::greedy(),
            |model| {
                model.take_statistics();
            },
        )?;
        row.decoded += model.take_statistics().unwrap_or_default();
        row.decode += completion.decode;
        row.passed += usize::from(judge(task, &completion.text, arguments.seed) == Verdict::Passed);
        row.likelihood +=
            continuation_likelihood(model, tokenizer, task.prompt(), task.solution())?;
        row.completions.push(completion.tokens);
        bar.advance(1)?;
    }
    bar.end();
    Ok(row)
}

impl Row {
    fn tokens_per_second(&self) -> f64 {
        let tokens: usize = self.completions.iter().map(Vec::len).sum();
        tokens as f64 / self.decode.as_secs_f64().max(1e-9)
    }

    /// Share of FFN neurons computed; 1 for the reference engine, which counts none.
    fn computed_share(&self) -> f64 {
        match self.decoded.neurons {
            0 => 1.0,
            _ => self.decoded.computed_share(),
        }
    }

    /// Number of completions equal to those of `other`.
    fn same_as(&self, other: &Self) -> usize {
        self.completions
            .iter()
            .zip(&other.completions)
            .filter(|(a, b)| a == b)
            .count()
    }

    fn to_json(&self, first: &Self) -> Value {
        json!({
            "policy": self.policy.to_string(),
            "tokens_per_second": self.tokens_per_second(),
            "bytes_per_token": self.decoded.bytes_per_token(),
            "ffn_neurons_computed": self.computed_share(),
            "passed": self.passed,
            "pass_at_1": self.passed as f64 / self.tasks as f64,
            "perplexity": self.likelihood.perplexity(),
            "same_completions_as_first": self.same_as(first),
        })
    }
}
