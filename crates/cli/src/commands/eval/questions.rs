//! `powerinfer eval multiple-choice` and `powerinfer eval gsm8k`: questions that a model answers.

use std::path::PathBuf;

use anyhow::{Result, bail};
use powerinfer_artifact::{Digest, Progress};
use powerinfer_eval::{
    Ends, EvalError, ResultFile, Subject, complete, format,
    grade_school::{self, is_right, read_word_problems},
    multiple_choice::{answer, read_questions},
    statistics::{Interval, Paired, share},
};
use powerinfer_runtime::Sampler;
use powerinfer_text::Tokenizer;
use serde_json::{Value, json};

use super::{ResultArguments, choices, paired_json};
use crate::{
    engine::{PolicyArgument, evaluated::SubjectArguments},
    hint::Advised,
    output::{Output, Table, percent, print, print_json},
    progress::Bar,
};

/// Questions and policies.
#[derive(Debug, clap::Args)]
pub(crate) struct QuestionArguments {
    #[command(flatten)]
    subject: SubjectArguments,
    /// The questions: JSON lines, plain or compressed
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Evaluate only the first N questions
    #[arg(long, value_name = "N")]
    count: Option<usize>,
    /// Policies to compare, the others with the first [default: the plan's]
    #[arg(long, value_name = "POLICY", value_delimiter = ',')]
    policy: Vec<PolicyArgument>,
    #[command(flatten)]
    results: ResultArguments,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Questions with choices.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A line is a question: `context`, `choices` and `label`, the number of the right one from 0 on. The answer is the choice with the highest log-likelihood after the context: in all (`acc`) or per byte (`acc_norm`).\n\nExample:\n  powerinfer eval multiple-choice ./my-model.powerinfer --data questions.jsonl \\\n      --policy dense,predicted"
)]
pub(crate) struct ChoiceArguments {
    #[command(flatten)]
    common: QuestionArguments,
}

/// Word problems.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A line is a problem: `question`, and `answer` with `#### number` at its end. The number after `####` counts, or the last one.\n\nExample:\n  powerinfer eval gsm8k ./my-model.powerinfer --data test.jsonl --shots 5 --count 200"
)]
pub(crate) struct WordProblemArguments {
    #[command(flatten)]
    common: QuestionArguments,
    /// Use the first N problems as solved examples instead of asking them
    #[arg(long, value_name = "N", default_value_t = 5)]
    shots: usize,
    /// Tokens of an answer, at most
    #[arg(short = 'n', long, value_name = "N", default_value_t = 256)]
    max_tokens: usize,
}

/// Right or not by each metric; none if the question does not fit the context.
type Answer = Option<Vec<bool>>;

/// Results of one policy: for each question, whether it is right by each metric; none if it does not fit the context.
struct Row {
    policy: String,
    answers: Vec<Answer>,
}

pub(crate) fn multiple_choice(arguments: &ChoiceArguments, output: Output) -> Result<()> {
    let common = &arguments.common;
    let mut questions = read_questions(&common.data)?;
    questions.truncate(common.count.unwrap_or(usize::MAX));
    let ask = |model: &mut Subject, tokenizer: &Tokenizer, index: usize| {
        let (question, room) = (&questions[index], model.context_limit());
        let found = answer(model, tokenizer, question, room)?;
        let is_right = |taken: usize| taken == question.label;
        Ok(vec![is_right(found.best_by_length), is_right(found.best)])
    };
    let kind = Kind {
        metrics: &["acc_norm", "acc"],
        settings: json!("multiple-choice"),
    };
    evaluate(common, questions.len(), &kind, ask, output)
}

pub(crate) fn word_problems(arguments: &WordProblemArguments, output: Output) -> Result<()> {
    let common = &arguments.common;
    let problems = read_word_problems(&common.data)?;
    if arguments.shots >= problems.len() {
        bail!(Advised::new(
            format!(
                "`--shots` is {}, and there are {} problems",
                arguments.shots,
                problems.len()
            ),
            "take fewer for examples"
        ));
    }
    let (examples, asked) = problems.split_at(arguments.shots);
    let asked = &asked[..asked.len().min(common.count.unwrap_or(usize::MAX))];
    let ask = |model: &mut Subject, tokenizer: &Tokenizer, index: usize| {
        let prompt = grade_school::prompt(examples, &asked[index]);
        let ends = Ends {
            max_tokens: arguments.max_tokens,
            context: model.context_limit(),
            texts: &grade_school::STOPS,
        };
        let written = complete(model, tokenizer, &prompt, ends, Sampler::greedy(), |_| ())?;
        Ok(vec![is_right(&asked[index], &written.text)])
    };
    let kind = Kind {
        metrics: &["exact_match"],
        settings: json!({ "shots": arguments.shots, "max_tokens": arguments.max_tokens }),
    };
    evaluate(common, asked.len(), &kind, ask, output)
}

/// Metrics and settings of a kind of questions.
struct Kind {
    /// Names of the metrics.
    metrics: &'static [&'static str],
    /// Settings that answers depend on.
    settings: Value,
}

/// Asks every question of the shard under every policy, and reports.
fn evaluate(
    arguments: &QuestionArguments,
    all: usize,
    kind: &Kind,
    ask: impl Fn(&mut Subject, &Tokenizer, usize) -> Result<Vec<bool>, EvalError>,
    output: Output,
) -> Result<()> {
    if all == 0 {
        bail!(Advised::new(
            "there is no question to ask",
            "give a larger `--count`"
        ));
    }
    let items = arguments.results.items(all)?;
    let (questions, metrics) = (items.len(), kind.metrics);
    let subject = arguments.subject.open(output)?;
    let tokenizer = subject.tokenizer();
    let data = Digest::of_file(&arguments.data)?;
    let choices = choices(&arguments.policy);
    subject.check_policies(choices.iter().map(|(_, policy)| *policy), output)?;
    // All files first: an error in one must not appear after hours of another.
    let mut files = Vec::new();
    for (policy, _) in &choices {
        let settings = json!({
            "bundle": subject.identity()?,
            "data": data,
            "policy": policy,
            "kind": kind.settings,
            "version": env!("CARGO_PKG_VERSION"),
        });
        let run = arguments.results.run(&settings, &items, 1);
        let path = arguments.results.path(policy, choices.len());
        files.push(ResultFile::<Answer>::open(path.as_deref(), &run)?);
    }
    let mut rows: Vec<Row> = Vec::new();
    for ((policy, choice), mut file) in choices.into_iter().zip(files) {
        let quiet = Output {
            quiet: output.quiet || !rows.is_empty(),
            ..output
        };
        let mut model = subject.model(choice, quiet)?;
        let bar = Bar::new(output);
        bar.begin(&policy, questions as u64, "questions");
        let mut answers = Vec::new();
        for index in items.clone() {
            let answer = file.get_or(index, || match ask(&mut model, tokenizer, index) {
                Ok(found) => Ok(Some(found)),
                Err(EvalError::PromptLength { .. }) => Ok(None),
                Err(error) => Err(error),
            })?;
            answers.push(answer.clone());
            bar.advance(1)?;
        }
        bar.end();
        rows.push(Row { policy, answers });
    }
    if arguments.json {
        let rows: Vec<Value> = rows
            .iter()
            .map(|row| row.to_json(&rows[0], metrics))
            .collect();
        return print_json(&json!({ "questions": questions, "data": data, "rows": rows }));
    }
    let mut headings = vec!["policy", "asked", "too long"];
    let shares: Vec<String> = metrics
        .iter()
        .map(|metric| format!("{metric} (95%)"))
        .collect();
    headings.extend(shares.iter().map(String::as_str));
    let mut table = Table::new(&headings);
    for row in &rows {
        let asked = row.answers.iter().flatten().count();
        let mut cells = vec![
            row.policy.clone(),
            asked.to_string(),
            (questions - asked).to_string(),
        ];
        cells.extend((0..metrics.len()).map(|metric| {
            let Interval { value, low, high } = row.share(metric);
            match asked {
                0 => "–".to_owned(),
                _ => format!("{} ({}–{})", percent(value), percent(low), percent(high)),
            }
        }));
        table.row(cells);
    }
    print(table.to_string())?;
    (arguments.results).say_shard(&items, all, "questions", output);
    for row in &rows[1..] {
        output.say(format::paired(
            &row.policy,
            &rows[0].policy,
            row.relative_to(&rows[0]),
        ));
    }
    Ok(())
}

impl Row {
    /// Share of right answers by a metric.
    fn share(&self, metric: usize) -> Interval {
        let answers = self.answers.iter().flatten();
        let right = answers.clone().filter(|answer| answer[metric]).count();
        share(right as u64, answers.count() as u64)
    }

    /// Comparison with `first` by the first metric, on questions that both were asked.
    fn relative_to(&self, first: &Self) -> Paired {
        let pairs = first.answers.iter().zip(&self.answers);
        let both = pairs.filter_map(|(a, b)| Some((a.as_ref()?[0], b.as_ref()?[0])));
        let (a, b): (Vec<bool>, Vec<bool>) = both.unzip();
        Paired::from_outcomes(&a, &b)
    }

    fn to_json(&self, first: &Self, metrics: &[&str]) -> Value {
        let shares: serde_json::Map<String, Value> = metrics
            .iter()
            .enumerate()
            .map(|(metric, name)| {
                let Interval { value, low, high } = self.share(metric);
                let figure = match self.answers.iter().flatten().count() {
                    0 => Value::Null,
                    _ => json!({ "value": value, "low": low, "high": high }),
                };
                ((*name).to_owned(), figure)
            })
            .collect();
        json!({
            "policy": self.policy,
            "asked": self.answers.iter().flatten().count(),
            "right": shares,
            "relative_to_first": paired_json(self.relative_to(first)),
        })
    }
}
