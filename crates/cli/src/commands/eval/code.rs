//! `powerinfer eval humaneval`: functions that a model completes, judged by their tests.

use std::{ops::Range, path::PathBuf};

use anyhow::{Result, bail};
use powerinfer_artifact::{Digest, Progress};
use powerinfer_eval::{
    PythonSandbox, SampleFile, Verdict, format,
    human_eval::{Problem, Results, SolveOptions, read_completions, read_problems, solve},
};
use serde_json::{Value, json};

use super::{ResultArguments, choices, paired_json};
use crate::{
    engine::{
        PolicyArgument,
        evaluated::{Evaluated, SubjectArguments},
    },
    hint::Advised,
    output::{Output, Table, print, print_json},
    progress::Bar,
};

/// Problems, generation and judge.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Programs run with the `python3` of this machine, in a sandbox without files and network (Linux).\n\nExamples:\n  powerinfer eval humaneval ./my-model.powerinfer --data HumanEval.jsonl.gz --policy dense,predicted\n  powerinfer eval humaneval ./my-model.powerinfer --data HumanEval.jsonl.gz \\\n      --samples 20 --temperature 0.2 -k 1,10 --out samples.jsonl\n  powerinfer eval humaneval --data HumanEval.jsonl.gz \\\n      --completions samples-from-elsewhere.jsonl"
)]
pub(crate) struct CodeArguments {
    #[command(flatten)]
    subject: SubjectArguments,
    /// The problems: JSON lines, plain or compressed (`task_id`, `prompt`, `entry_point`, `canonical_solution`, `test`)
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Take only the first N problems
    #[arg(long, value_name = "N")]
    count: Option<usize>,
    /// Completions of each problem
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    samples: u32,
    /// Sampling temperature; 0 is greedy
    #[arg(
        long,
        value_name = "T",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    temperature: f32,
    /// Report pass@K: the probability that one of K completions passes
    #[arg(
        short = 'k',
        value_name = "K",
        value_delimiter = ',',
        default_value = "1"
    )]
    k: Vec<u64>,
    /// Policies to compare, the others with the first [default: the plan's]
    #[arg(long, value_name = "POLICY", value_delimiter = ',')]
    policy: Vec<PolicyArgument>,
    /// Tokens of a completion, at most
    #[arg(short = 'n', long, value_name = "N", default_value_t = 512)]
    max_tokens: usize,
    #[command(flatten)]
    results: ResultArguments,
    /// Judge the completions of this file (JSON lines: `task_id`, `completion`) instead of generating some
    #[arg(long, value_name = "FILE", conflicts_with_all = ["samples", "temperature", "policy", "out", "shard"])]
    completions: Option<PathBuf>,
    /// Seed of every random choice
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Results of one policy, or of a file of completions.
struct Row {
    name: String,
    results: Results,
}

pub(crate) fn run(arguments: &CodeArguments, output: Output) -> Result<()> {
    let mut problems = read_problems(&arguments.data)?;
    let mut completions = match &arguments.completions {
        Some(path) => Some(read_completions(path, &problems)?),
        None => None,
    };
    let count = arguments.count.unwrap_or(usize::MAX);
    problems.truncate(count);
    completions
        .iter_mut()
        .for_each(|found| found.truncate(count));
    if problems.is_empty() {
        bail!(Advised::new("`--count` is 0", "give at least one problem"));
    }
    let all = problems.len();
    let items = arguments.results.items(all)?;
    let problems = &problems[items.clone()];
    if arguments.samples > 1 && arguments.temperature == 0.0 {
        bail!(Advised::new(
            "greedy completions are all the same",
            "give `--temperature` with `--samples`"
        ));
    }
    let most = u64::from(arguments.samples);
    if let Some(k) = arguments
        .k
        .iter()
        .find(|k| **k == 0 || (**k > most && arguments.completions.is_none()))
    {
        bail!(Advised::new(
            format!("`-k {k}` cannot be estimated from {most} completions"),
            format!("give `--samples` of {k} or more")
        ));
    }
    let sandbox = PythonSandbox::find()?;
    let rows = match (&arguments.completions, completions) {
        (Some(path), Some(found)) => {
            let bar = Bar::new(output);
            let count: usize = found.iter().map(Vec::len).sum();
            bar.begin("judging", count as u64, "completions");
            let results = Results::judge(problems, &found, &sandbox, &bar)?;
            bar.end();
            vec![Row {
                name: path.display().to_string(),
                results,
            }]
        }
        _ => solve_all(arguments, problems, &items, &sandbox, output)?,
    };
    (arguments.results).say_shard(&items, all, "problems", output);
    if arguments.json {
        let rows: Vec<Value> = rows
            .iter()
            .map(|row| row.to_json(&rows[0], problems, arguments))
            .collect();
        return print_json(&json!({
            "problems": problems.len(), "samples": arguments.samples, "temperature": arguments.temperature,
            "seed": arguments.seed, "data": Digest::of_file(&arguments.data)?, "rows": rows,
        }));
    }
    print(table(&rows, arguments))?;
    for line in remarks(&rows, problems, &arguments.k) {
        output.say(line);
    }
    Ok(())
}

/// Solves every problem under every policy.
fn solve_all(
    arguments: &CodeArguments,
    problems: &[Problem],
    items: &Range<usize>,
    sandbox: &PythonSandbox,
    output: Output,
) -> Result<Vec<Row>> {
    let subject = arguments.subject.open(output)?;
    let choices = choices(&arguments.policy);
    subject.check_policies(choices.iter().map(|(_, policy)| *policy), output)?;
    // All files first: an error in one must not appear after hours of another.
    let mut files = Vec::new();
    for (name, _) in &choices {
        let settings = run_settings(arguments, &subject, sandbox, name)?;
        let run = (arguments.results).run(&settings, items, arguments.samples as usize);
        let path = arguments.results.path(name, choices.len());
        files.push(match path {
            None => None,
            Some(path) => Some(SampleFile::open(&path, &run)?),
        });
    }
    let mut rows = Vec::new();
    for ((name, choice), mut file) in choices.iter().zip(files) {
        let quiet = Output {
            quiet: output.quiet || !rows.is_empty(),
            ..output
        };
        let mut model = subject.model(*choice, quiet)?;
        let bar = Bar::new(output);
        let options = SolveOptions {
            samples: arguments.samples as usize,
            temperature: arguments.temperature,
            max_tokens: arguments.max_tokens,
            context: model.context_limit(),
            seed: arguments.seed,
            before: items.start,
        };
        let completions = problems.len() * options.samples;
        bar.begin(name, completions as u64, "completions");
        let (tokenizer, file) = (subject.tokenizer(), file.as_mut());
        let results = solve(
            &mut model, tokenizer, problems, sandbox, options, file, &bar,
        )?;
        bar.end();
        rows.push(Row {
            name: name.clone(),
            results,
        });
    }
    Ok(rows)
}

/// Settings that samples depend on.
fn run_settings(
    arguments: &CodeArguments,
    subject: &Evaluated,
    sandbox: &PythonSandbox,
    policy: &str,
) -> Result<Value> {
    Ok(json!({
        "bundle": subject.identity()?,
        "data": Digest::of_file(&arguments.data)?,
        "policy": policy,
        "temperature": arguments.temperature,
        "max_tokens": arguments.max_tokens,
        "seed": arguments.seed,
        "judge": sandbox.name(),
        "version": env!("CARGO_PKG_VERSION"),
    }))
}

impl Row {
    /// Mean pass@k with its interval.
    fn format_pass(&self, k: u64, seed: u64) -> String {
        let found = self.results.mean_pass_at(k, seed);
        found.map_or_else(|| "–".to_owned(), |(found, _)| format::share(found))
    }

    fn to_json(&self, first: &Self, problems: &[Problem], arguments: &CodeArguments) -> Value {
        let pass: serde_json::Map<String, Value> = arguments
            .k
            .iter()
            .map(|k| {
                let figure = self.results.mean_pass_at(*k, arguments.seed).map(|(found, problems)| {
                    json!({ "value": found.value, "low": found.low, "high": found.high, "problems": problems })
                });
                (k.to_string(), json!(figure))
            })
            .collect();
        let paired = self.results.relative_to(&first.results);
        let tasks = problems
            .iter()
            .zip(&self.results.verdicts)
            .map(|(problem, verdicts)| {
                let verdicts: Vec<Value> = verdicts
                    .iter()
                    .map(|verdict| json!({ "verdict": verdict.name(), "detail": verdict.detail() }))
                    .collect();
                json!({ "task_id": problem.task_id, "completions": verdicts })
            });
        json!({
            "name": self.name,
            "verdicts": {
                "passed": self.results.count("passed"), "failed": self.results.count("failed"), "error": self.results.count("error"),
                "timeout": self.results.count("timeout"), "unjudged": self.results.count("unjudged"),
            },
            "pass_at": pass,
            "relative_to_first": paired_json(paired),
            "tasks": tasks.collect::<Vec<_>>(),
        })
    }
}

fn table(rows: &[Row], arguments: &CodeArguments) -> String {
    let mut headings = vec!["policy", "passed", "failed", "error", "timeout", "unjudged"];
    let pass: Vec<String> = arguments
        .k
        .iter()
        .map(|k| format!("pass@{k} (95%)"))
        .collect();
    headings.extend(pass.iter().map(String::as_str));
    let mut table = Table::new(&headings);
    for row in rows {
        let counts = ["passed", "failed", "error", "timeout", "unjudged"];
        let mut cells = vec![row.name.clone()];
        cells.extend(counts.map(|name| row.results.count(name).to_string()));
        cells.extend(
            arguments
                .k
                .iter()
                .map(|k| row.format_pass(*k, arguments.seed)),
        );
        table.row(cells);
    }
    table.to_string()
}

/// Remarks below the table.
fn remarks(rows: &[Row], problems: &[Problem], ks: &[u64]) -> Vec<String> {
    let mut lines = Vec::new();
    for row in rows {
        for k in ks {
            let counted = row.results.pass_at(*k).len();
            if counted < problems.len() {
                lines.push(format!(
                    "{}: pass@{k} is of {counted} problems; the other {} have fewer completions that could be judged",
                    row.name,
                    problems.len() - counted
                ));
            }
        }
    }
    for row in &rows[1..] {
        lines.push(format::paired(
            &row.name,
            &rows[0].name,
            row.results.relative_to(&rows[0].results),
        ));
    }
    let mut unjudged: Vec<String> = Vec::new();
    for row in rows {
        for (problem, verdicts) in problems.iter().zip(&row.results.verdicts) {
            let reason = verdicts.iter().find_map(|verdict| match verdict {
                Verdict::Unjudged(reason) => Some(reason),
                _ => None,
            });
            let line = reason.map(|reason| format!("{} ({reason})", problem.task_id));
            unjudged.extend(line.filter(|line| !unjudged.contains(line)));
        }
    }
    if !unjudged.is_empty() {
        let shown = unjudged.len().min(8);
        let more = match unjudged.len() - shown {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        lines.push(format!(
            "not judged: {}{more}",
            unjudged[..shown].join(", ")
        ));
    }
    lines
}
