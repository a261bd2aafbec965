//! Multiple-choice questions, answered by the log-likelihood of each choice.

use std::path::Path;

use powerinfer_model::LanguageModel;
use powerinfer_text::{SpecialTokens, Tokenizer};

use crate::{EvalError, data_file, likelihood::likelihood_from};

/// A question with its answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// What comes before the answer.
    pub context: String,
    /// The answers.
    pub choices: Vec<String>,
    /// Which of them is right.
    pub label: usize,
}

/// Choices that a model answers with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Choice with the highest log-likelihood (`acc`).
    pub best: usize,
    /// Choice with the highest log-likelihood per byte (`acc_norm`).
    pub best_by_length: usize,
}

/// The questions of the file at `path`, JSON by lines: `context`, `choices`, `label`.
pub fn read_questions(path: &Path) -> Result<Vec<Question>, EvalError> {
    let rows = data_file::read(path)?;
    let question = |row: &data_file::Row| {
        let question = Question {
            context: row.text("context")?,
            choices: row.texts("choices")?,
            label: row.number("label")?,
        };
        let Question { choices, label, .. } = &question;
        if *label >= choices.len() {
            let count = choices.len();
            return Err(row.wrong(format!(
                "`label` is {label}, and there are {count} `choices`"
            )));
        }
        match choices.iter().any(String::is_empty) {
            true => Err(row.wrong("one of `choices` is empty")),
            false => Ok(question),
        }
    };
    rows.iter().map(question).collect()
}

/// Lets `model` answer, by the log-likelihood of each choice after the context.
///
/// Fails where context and choice are more than `room` tokens.
pub fn answer<Model: LanguageModel + ?Sized>(
    model: &mut Model,
    tokenizer: &Tokenizer,
    question: &Question,
    room: usize,
) -> Result<Answer, EvalError> {
    let given = tokenizer.encode(&question.context, SpecialTokens::Add)?;
    let mut scores = Vec::new();
    for choice in &question.choices {
        let text = format!("{}{choice}", question.context);
        let ids = tokenizer.encode(&text, SpecialTokens::Add)?;
        if ids.len() > room || ids.len() < 2 {
            let tokens = ids.len();
            return Err(EvalError::PromptLength { tokens, room });
        }
        // Where a token reaches across the end of the context, the choice begins with it.
        let common = given.iter().zip(&ids).take_while(|(a, b)| a == b).count();
        let first = common.clamp(1, ids.len() - 1);
        let found = likelihood_from(model, &ids, first)?;
        scores.push((-found.negative_log, choice.len()));
    }
    let best = |score: &dyn Fn(&(f64, usize)) -> f64| {
        let mut best = 0;
        for (index, found) in scores.iter().enumerate() {
            if score(found) > score(&scores[best]) {
                best = index;
            }
        }
        best
    };
    Ok(Answer {
        best: best(&|(score, _)| *score),
        best_by_length: best(&|(score, length)| score / *length as f64),
    })
}
