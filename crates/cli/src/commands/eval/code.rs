//! `powerinfer eval humaneval`: functions that a model completes, judged by their tests.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use powerinfer_artifact::{Digest, Progress};
use powerinfer_eval::{
    Ends, EvalError, PythonSandbox, Sample, SampleFile, complete, format,
    human_eval::{Judge, Problem, STOPS, Verdict, read_completions, read_problems},
    statistics::{Interval, Paired, bootstrap_mean, pass_at, share},
};
use powerinfer_runtime::{Sampler, SamplingSettings};
use powerinfer_text::Tokenizer;
use serde_json::{Value, json};

use super::{choices, paired_json};
use crate::{
    engine::{
        PolicyArgument,
        evaluated::{Evaluated, Model, SubjectArguments},
    },
    output::{Output, Table, percent, print, print_json},
    progress::Bar,
};

/// Which problems, and who solves and judges them.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Programs run in an embedded interpreter that has no files and no network; what it cannot judge is told.\n\nExamples:\n  powerinfer eval humaneval ./my-model.powerinfer --data HumanEval.jsonl.gz --policy dense,predicted\n  powerinfer eval humaneval ./my-model.powerinfer --data HumanEval.jsonl.gz --samples 20 --temperature 0.2 -k 1,10 --out samples.jsonl\n  powerinfer eval humaneval --data HumanEval.jsonl.gz --completions samples-from-elsewhere.jsonl"
)]
pub(crate) struct CodeArguments {
    #[command(flatten)]
    subject: SubjectArguments,
    /// The problems: JSON by lines, plain or compressed (`task_id`, `prompt`, `entry_point`, `canonical_solution`, `test`)
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Take the first N problems alone
    #[arg(long, value_name = "N")]
    count: Option<usize>,
    /// Completions of each problem
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    samples: u32,
    /// Divide the logits by this; 0 takes the likeliest token
    #[arg(
        long,
        value_name = "T",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    temperature: f32,
    /// Tell how likely it is that one of so many completions passes
    #[arg(
        short = 'k',
        value_name = "K",
        value_delimiter = ',',
        default_value = "1"
    )]
    k: Vec<u64>,
    /// Policies to compare, the others with the first [default: what the plan says]
    #[arg(long, value_name = "POLICY", value_delimiter = ',')]
    policy: Vec<PolicyArgument>,
    /// Most tokens of a completion
    #[arg(short = 'n', long, value_name = "N", default_value_t = 512)]
    max_tokens: usize,
    /// Write completions and verdicts to this file as they come, and go on from what it has; with several policies
    /// one file each, their names put in
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Judge the completions of this file (`task_id`, `completion` by lines) instead of letting a model write some
    #[arg(long, value_name = "FILE", conflicts_with_all = ["samples", "temperature", "policy", "out"])]
    completions: Option<PathBuf>,
    /// Judge with this Python, in a sandbox of the system's; an error where there can be none
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Seed of every random choice
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// What one policy, or a file, comes to.
struct Row {
    name: String,
    /// Of each problem, the verdicts on its completions.
    verdicts: Vec<Vec<Verdict>>,
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
        bail!("`--count` is 0; give at least one problem");
    }
    if arguments.samples > 1 && arguments.temperature == 0.0 {
        bail!("the likeliest tokens are the same each time; give `--temperature` with `--samples`");
    }
    let most = u64::from(arguments.samples);
    if let Some(k) = arguments
        .k
        .iter()
        .find(|k| **k == 0 || (**k > most && arguments.completions.is_none()))
    {
        bail!("`-k {k}` cannot be told from {most} completions; give `--samples` of {k} or more");
    }
    let judge = match &arguments.python {
        None => Judge::Embedded,
        Some(python) => Judge::Python(PythonSandbox::new(python)?),
    };
    let rows = match (&arguments.completions, completions) {
        (Some(path), Some(found)) => vec![judge_all(path, &problems, &found, &judge, output)?],
        _ => solve_all(arguments, &problems, &judge, output)?,
    };
    if arguments.json {
        let rows: Vec<Value> = rows
            .iter()
            .map(|row| row.to_json(&rows[0], &problems, arguments))
            .collect();
        return print_json(&json!({
            "problems": problems.len(), "samples": arguments.samples, "temperature": arguments.temperature,
            "seed": arguments.seed, "data": Digest::of_file(&arguments.data)?, "rows": rows,
        }));
    }
    print(table(&rows, arguments))?;
    for line in remarks(&rows, &problems, &arguments.k) {
        output.say(line);
    }
    Ok(())
}

/// Judges completions made elsewhere.
fn judge_all(
    path: &Path,
    problems: &[Problem],
    completions: &[Vec<String>],
    judge: &Judge,
    output: Output,
) -> Result<Row> {
    let bar = Bar::new(output);
    let all: usize = completions.iter().map(Vec::len).sum();
    bar.begin("judging", all as u64, "completions");
    let mut verdicts = Vec::new();
    for (problem, completions) in problems.iter().zip(completions) {
        let mut of_problem = Vec::new();
        for completion in completions {
            of_problem.push(problem.judge(completion, judge));
            bar.advance(1)?;
        }
        verdicts.push(of_problem);
    }
    bar.end();
    Ok(Row {
        name: path.display().to_string(),
        verdicts,
    })
}

/// Lets the model solve every problem under every policy.
fn solve_all(
    arguments: &CodeArguments,
    problems: &[Problem],
    judge: &Judge,
    output: Output,
) -> Result<Vec<Row>> {
    let subject = arguments.subject.open(output)?;
    let choices = choices(&arguments.policy);
    // All of them now: what is wrong with one is not told after hours of another.
    let mut files = Vec::new();
    for (name, _) in &choices {
        let run = run_digest(arguments, &subject, name)?;
        files.push(match &arguments.out {
            None => None,
            Some(path) => Some(SampleFile::open(&named(path, name, choices.len()), &run)?),
        });
    }
    let mut rows = Vec::new();
    for ((name, choice), mut file) in choices.iter().zip(files) {
        let quiet = Output {
            quiet: output.quiet || !rows.is_empty(),
            ..output
        };
        let mut model = subject.model(*choice, quiet)?;
        let verdicts = solve(
            arguments,
            problems,
            judge,
            &mut model,
            subject.tokenizer(),
            file.as_mut(),
            (name, output),
        )?;
        rows.push(Row {
            name: name.clone(),
            verdicts,
        });
    }
    Ok(rows)
}

/// Where the samples of a policy go.
fn named(path: &Path, policy: &str, policies: usize) -> PathBuf {
    if policies == 1 {
        return path.to_owned();
    }
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let name = match path.extension() {
        Some(extension) => format!("{stem}-{policy}.{}", extension.to_string_lossy()),
        None => format!("{stem}-{policy}"),
    };
    path.with_file_name(name)
}

/// What samples of this run have in common, and those of no other.
fn run_digest(arguments: &CodeArguments, subject: &Evaluated, policy: &str) -> Result<String> {
    let settings = json!({
        "bundle": subject.identity()?,
        "data": Digest::of_file(&arguments.data)?,
        "policy": policy,
        "temperature": arguments.temperature,
        "max_tokens": arguments.max_tokens,
        "seed": arguments.seed,
        "python": arguments.python,
        "version": env!("CARGO_PKG_VERSION"),
    });
    Ok(Digest::of(settings.to_string().as_bytes()).to_string())
}

fn solve(
    arguments: &CodeArguments,
    problems: &[Problem],
    judge: &Judge,
    model: &mut Model,
    tokenizer: &Tokenizer,
    mut file: Option<&mut SampleFile>,
    (name, output): (&str, Output),
) -> Result<Vec<Vec<Verdict>>> {
    let samples = arguments.samples as usize;
    let bar = Bar::new(output);
    bar.begin(name, (problems.len() * samples) as u64, "completions");
    let ends = Ends {
        max_tokens: arguments.max_tokens,
        context: model.context_limit(),
        texts: &STOPS,
    };
    let mut verdicts = Vec::new();
    for (index, problem) in problems.iter().enumerate() {
        let mut of_problem = Vec::new();
        for sample in 0..samples {
            let known = file
                .as_ref()
                .and_then(|file| file.find(&problem.task_id, sample));
            if let Some(known) = known {
                of_problem.push(known.verdict.clone());
                bar.advance(1)?;
                continue;
            }
            // A stream of its own, so that a run that goes on draws what it would have drawn.
            let mut sampler = Sampler::new(SamplingSettings {
                temperature: arguments.temperature,
                seed: arguments.seed ^ ((((index << 16) | sample) as u64) << 20),
                ..SamplingSettings::default()
            })?;
            let choose = |logits: &[f32]| sampler.sample(logits);
            let written = complete(model, tokenizer, &problem.prompt, ends, choose, |_| ());
            let (completion, verdict) = match written {
                Ok(completion) => {
                    let verdict = problem.judge(&completion.text, judge);
                    (completion.text, verdict)
                }
                Err(error @ EvalError::PromptLength { .. }) => {
                    (String::new(), Verdict::Unjudged(error.to_string()))
                }
                Err(error) => return Err(error.into()),
            };
            of_problem.push(verdict.clone());
            if let Some(file) = &mut file {
                file.push(Sample {
                    task_id: problem.task_id.clone(),
                    sample,
                    completion,
                    verdict,
                })?;
            }
            bar.advance(1)?;
        }
        verdicts.push(of_problem);
    }
    bar.end();
    Ok(verdicts)
}

impl Row {
    fn count(&self, name: &str) -> usize {
        let all = self.verdicts.iter().flatten();
        all.filter(|verdict| verdict.name() == name).count()
    }

    /// Problems that could be judged, by the number that passed and that were judged.
    fn judged(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.verdicts.iter().filter_map(|of_problem| {
            let judged = of_problem
                .iter()
                .filter(|verdict| !matches!(verdict, Verdict::Unjudged(_)));
            let (mut passed, mut all) = (0, 0);
            for verdict in judged {
                passed += u64::from(*verdict == Verdict::Passed);
                all += 1;
            }
            (all > 0).then_some((passed, all))
        })
    }

    /// pass@k of the problems that could be judged so often.
    fn pass_at(&self, k: u64) -> Vec<f64> {
        self.judged()
            .filter_map(|(passed, all)| pass_at(k, passed, all))
            .collect()
    }

    /// Whether each problem's first completion passed; none where it could not be judged.
    fn firsts(&self) -> Vec<Option<bool>> {
        let first = |of_problem: &Vec<Verdict>| match of_problem.first() {
            None | Some(Verdict::Unjudged(_)) => None,
            Some(verdict) => Some(*verdict == Verdict::Passed),
        };
        self.verdicts.iter().map(first).collect()
    }

    /// This row beside another, on the problems that both could be judged on.
    fn beside(&self, first: &Self) -> Paired {
        let pairs = first.firsts().into_iter().zip(self.firsts());
        let (a, b): (Vec<bool>, Vec<bool>) = pairs.filter_map(|(a, b)| a.zip(b)).unzip();
        Paired::of(&a, &b)
    }

    /// pass@k with its interval, and the problems it is of; none where there are none.
    fn interval(&self, k: u64, seed: u64) -> Option<(Interval, usize)> {
        let values = self.pass_at(k);
        let is_plain = values.iter().all(|value| *value == 0.0 || *value == 1.0);
        let found = match is_plain {
            true => share(
                values.iter().sum::<f64>().round() as u64,
                values.len() as u64,
            ),
            false => bootstrap_mean(&values, seed),
        };
        (!values.is_empty()).then_some((found, values.len()))
    }

    /// The same in words.
    fn told(&self, k: u64, seed: u64) -> String {
        let Some((found, _)) = self.interval(k, seed) else {
            return "–".to_owned();
        };
        let [value, low, high] = [found.value, found.low, found.high].map(percent);
        format!("{value} ({low}–{high})")
    }

    fn to_json(&self, first: &Self, problems: &[Problem], arguments: &CodeArguments) -> Value {
        let pass: serde_json::Map<String, Value> = arguments
            .k
            .iter()
            .map(|k| {
                let figure = self.interval(*k, arguments.seed).map(|(found, problems)| {
                    json!({ "value": found.value, "low": found.low, "high": found.high, "problems": problems })
                });
                (k.to_string(), json!(figure))
            })
            .collect();
        let paired = self.beside(first);
        let tasks = problems
            .iter()
            .zip(&self.verdicts)
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
                "passed": self.count("passed"), "failed": self.count("failed"), "error": self.count("error"),
                "timeout": self.count("timeout"), "unjudged": self.count("unjudged"),
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
        .map(|k| format!("pass@{k} (95 %)"))
        .collect();
    headings.extend(pass.iter().map(String::as_str));
    let mut table = Table::new(&headings);
    for row in rows {
        let counts = ["passed", "failed", "error", "timeout", "unjudged"];
        let mut cells = vec![row.name.clone()];
        cells.extend(counts.map(|name| row.count(name).to_string()));
        cells.extend(arguments.k.iter().map(|k| row.told(*k, arguments.seed)));
        table.row(cells);
    }
    table.to_string()
}

/// What there is to say beside the table.
fn remarks(rows: &[Row], problems: &[Problem], ks: &[u64]) -> Vec<String> {
    let mut lines = Vec::new();
    for row in rows {
        for k in ks {
            let counted = row.pass_at(*k).len();
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
            row.beside(&rows[0]),
        ));
    }
    let mut unjudged: Vec<String> = Vec::new();
    for row in rows {
        for (problem, verdicts) in problems.iter().zip(&row.verdicts) {
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
