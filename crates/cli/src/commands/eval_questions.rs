//! `powerinfer eval multiple-choice` and `powerinfer eval gsm8k`: questions that a model answers.

use std::path::PathBuf;

use anyhow::{Result, bail};
use powerinfer_artifact::{Digest, Progress, plan::Policy};
use powerinfer_eval::{
    Ends, EvalError, complete,
    grade_school::{self, is_right, read_word_problems},
    multiple_choice::{answer, read_questions},
    statistics::{Interval, Paired, share},
};
use powerinfer_model::greedy_token;
use powerinfer_text::Tokenizer;
use serde_json::{Value, json};

use super::eval_code::told_beside;
use crate::{
    engine::{
        PolicyArgument,
        evaluated::{Model, SubjectArguments},
    },
    output::{Output, Table, percent, print, print_json},
    progress::Bar,
};

/// Which questions, and who answers.
#[derive(Debug, clap::Args)]
pub(crate) struct QuestionArguments {
    #[command(flatten)]
    subject: SubjectArguments,
    /// The questions, JSON by lines, plain or compressed
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Ask the first N questions alone
    #[arg(long, value_name = "N")]
    count: Option<usize>,
    /// Policies to compare, the others with the first [default: what the plan says]
    #[arg(long, value_name = "POLICY", value_delimiter = ',')]
    policy: Vec<PolicyArgument>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Questions with choices.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A line is a question: `context`, `choices` and `label`, the number of the right one from 0 on. Choices are told apart by their log-likelihood after the context, as it is and a byte.\n\nExample:\n  powerinfer eval multiple-choice ./my-model.powerinfer --data questions.jsonl --policy dense,predicted"
)]
pub(crate) struct ChoiceArguments {
    #[command(flatten)]
    common: QuestionArguments,
}

/// Word problems.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A line is a problem: `question`, and `answer` with `#### number` at its end. What counts is the number behind `####`, or the last one.\n\nExample:\n  powerinfer eval gsm8k ./my-model.powerinfer --data test.jsonl --shots 5 --count 200"
)]
pub(crate) struct WordProblemArguments {
    #[command(flatten)]
    common: QuestionArguments,
    /// Take the first N problems for solved examples instead of asking them
    #[arg(long, value_name = "N", default_value_t = 5)]
    shots: usize,
    /// Most tokens of an answer
    #[arg(short = 'n', long, value_name = "N", default_value_t = 256)]
    max_tokens: usize,
}

/// What one policy does: of each question, how each way to count it ends; none where it does not fit.
struct Row {
    policy: String,
    answers: Vec<Option<Vec<bool>>>,
}

pub(crate) fn multiple_choice(arguments: &ChoiceArguments, output: Output) -> Result<()> {
    let common = &arguments.common;
    let mut questions = read_questions(&common.data)?;
    questions.truncate(common.count.unwrap_or(usize::MAX));
    let ask = |model: &mut Model, tokenizer: &Tokenizer, index: usize| {
        let (question, room) = (&questions[index], model.context_limit());
        let found = answer(model, tokenizer, question, room)?;
        let is_right = |taken: usize| taken == question.label;
        Ok(vec![
            is_right(found.likeliest_by_length),
            is_right(found.likeliest),
        ])
    };
    let ways = ["likeliest a byte", "likeliest"];
    evaluate(common, questions.len(), &ways, ask, output)
}

pub(crate) fn word_problems(arguments: &WordProblemArguments, output: Output) -> Result<()> {
    let common = &arguments.common;
    let problems = read_word_problems(&common.data)?;
    if arguments.shots >= problems.len() {
        bail!(
            "`--shots` is {}, and there are {} problems; take fewer for examples",
            arguments.shots,
            problems.len()
        );
    }
    let (examples, asked) = problems.split_at(arguments.shots);
    let asked = &asked[..asked.len().min(common.count.unwrap_or(usize::MAX))];
    let ask = |model: &mut Model, tokenizer: &Tokenizer, index: usize| {
        let prompt = grade_school::prompt(examples, &asked[index]);
        let ends = Ends {
            max_tokens: arguments.max_tokens,
            context: model.context_limit(),
            texts: &grade_school::STOPS,
        };
        let written = complete(model, tokenizer, &prompt, ends, greedy_token, |_| ())?;
        Ok(vec![is_right(&asked[index], &written.text)])
    };
    evaluate(common, asked.len(), &["right number"], ask, output)
}

/// Asks every question under every policy, and reports.
fn evaluate(
    arguments: &QuestionArguments,
    questions: usize,
    ways: &[&str],
    ask: impl Fn(&mut Model, &Tokenizer, usize) -> Result<Vec<bool>, EvalError>,
    output: Output,
) -> Result<()> {
    if questions == 0 {
        bail!("there is no question to ask; give a larger `--count`");
    }
    let subject = arguments.subject.open(output)?;
    let tokenizer = subject.tokenizer();
    let mut rows: Vec<Row> = Vec::new();
    for (policy, choice) in choices(&arguments.policy) {
        let quiet = Output {
            quiet: output.quiet || !rows.is_empty(),
            ..output
        };
        let mut model = subject.model(choice, quiet)?;
        let bar = Bar::new(output);
        bar.begin(&policy, questions as u64, "questions");
        let mut answers = Vec::new();
        for index in 0..questions {
            answers.push(match ask(&mut model, tokenizer, index) {
                Ok(found) => Some(found),
                Err(EvalError::PromptLength { .. }) => None,
                Err(error) => return Err(error.into()),
            });
            bar.advance(1)?;
        }
        bar.end();
        rows.push(Row { policy, answers });
    }
    if arguments.json {
        let rows: Vec<Value> = rows.iter().map(|row| row.to_json(&rows[0], ways)).collect();
        let data = Digest::of_file(&arguments.data)?;
        return print_json(&json!({ "questions": questions, "data": data, "rows": rows }));
    }
    let mut headings = vec!["policy", "asked", "too long"];
    let shares: Vec<String> = ways.iter().map(|way| format!("{way} (95 %)")).collect();
    headings.extend(shares.iter().map(String::as_str));
    let mut table = Table::new(&headings);
    for row in &rows {
        let asked = row.answers.iter().flatten().count();
        let mut cells = vec![
            row.policy.clone(),
            asked.to_string(),
            (questions - asked).to_string(),
        ];
        cells.extend((0..ways.len()).map(|way| {
            let Interval { value, low, high } = row.share(way);
            match asked {
                0 => "–".to_owned(),
                _ => format!("{} ({}–{})", percent(value), percent(low), percent(high)),
            }
        }));
        table.row(cells);
    }
    print(table.to_string())?;
    for row in &rows[1..] {
        output.say(told_beside(
            &row.policy,
            &rows[0].policy,
            row.beside(&rows[0]),
        ));
    }
    Ok(())
}

/// The policies to compare, with their names.
pub(super) fn choices(asked: &[PolicyArgument]) -> Vec<(String, Option<Policy>)> {
    if asked.is_empty() {
        return vec![("planned".to_owned(), None)];
    }
    asked
        .iter()
        .map(|policy| Policy::from(*policy))
        .map(|policy| (policy.to_string(), Some(policy)))
        .collect()
}

impl Row {
    /// The share of right answers, counted one way.
    fn share(&self, way: usize) -> Interval {
        let answers = self.answers.iter().flatten();
        let right = answers.clone().filter(|answer| answer[way]).count();
        share(right as u64, answers.count() as u64)
    }

    /// This row beside another, counted the first way, on questions that both were asked.
    fn beside(&self, first: &Self) -> Paired {
        let pairs = first.answers.iter().zip(&self.answers);
        let both = pairs.filter_map(|(a, b)| Some((a.as_ref()?[0], b.as_ref()?[0])));
        let (a, b): (Vec<bool>, Vec<bool>) = both.unzip();
        Paired::of(&a, &b)
    }

    fn to_json(&self, first: &Self, ways: &[&str]) -> Value {
        let shares: serde_json::Map<String, Value> = ways
            .iter()
            .enumerate()
            .map(|(way, name)| {
                let Interval { value, low, high } = self.share(way);
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
            "beside_first": super::eval_code::paired_json(self.beside(first)),
        })
    }
}
