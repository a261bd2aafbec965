//! Multiple-choice questions, answered by the log-likelihood of each choice.

use std::path::Path;

use powerinfer_model::LanguageModel;
use powerinfer_text::{SpecialTokens, Tokenizer};

use crate::{EvalError, data_file, likelihood::likelihood_from};

/// A question with its choices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Text before the choice.
    pub context: String,
    /// The choices.
    pub choices: Vec<String>,
    /// Index of the right one.
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

/// Reads the questions of the file at `path`: JSON lines with `context`, `choices` and `label`.
///
/// # Errors
///
/// Fails if the file cannot be read, if a line lacks a field, or if its label is not the index of a choice.
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
        if choices.iter().any(String::is_empty) {
            Err(row.wrong("one of `choices` is empty"))
        } else {
            Ok(question)
        }
    };
    rows.iter().map(question).collect()
}

/// Answers `question` by the log-likelihood of each choice after the context.
///
/// # Errors
///
/// Fails with [`EvalError::PromptLength`] if context and choice have more than `room` tokens, and if the model fails.
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
        // A token across the end of the context counts to the choice.
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
