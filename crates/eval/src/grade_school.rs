//! GSM8K (Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems"): questions whose answer is a number.

use std::path::Path;

use crate::{EvalError, data_file};

/// Mark before the number at the end of an answer.
const MARK: &str = "####";

/// Texts that end a generated answer.
pub const STOPS: [&str; 2] = ["\nQuestion:", "\n\n"];

/// A question with its solution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WordProblem {
    /// The question.
    pub question: String,
    /// Solution in words, with the number at its end.
    pub answer: String,
    /// The number.
    pub number: String,
}

/// Reads the problems of the file at `path`: JSON lines with `question`, and `answer` with `#### number` at its end.
///
/// # Errors
///
/// Fails if the file cannot be read, or if a line has other fields.
pub fn read_word_problems(path: &Path) -> Result<Vec<WordProblem>, EvalError> {
    let rows = data_file::read(path)?;
    rows.iter()
        .map(|row| {
            let (question, answer) = (row.text("question")?, row.text("answer")?);
            let number = answer
                .rsplit_once(MARK)
                .and_then(|(_, last)| last_number(last))
                .ok_or_else(|| row.wrong(format!("`answer` has no number behind `{MARK}`")))?;
            Ok(WordProblem {
                question,
                answer,
                number,
            })
        })
        .collect()
}

/// Prompt of `problem`: `examples` with their answers, then the question.
pub fn prompt(examples: &[WordProblem], problem: &WordProblem) -> String {
    let solved = examples.iter().map(|example| {
        format!(
            "Question: {}\nAnswer: {}\n\n",
            example.question, example.answer
        )
    });
    let solved: String = solved.collect();
    format!("{solved}Question: {}\nAnswer:", problem.question)
}

/// Whether `completion` has the right number: the one after the mark, or the last one if there is no mark.
pub fn is_right(problem: &WordProblem, completion: &str) -> bool {
    let ends = STOPS.iter().filter_map(|stop| completion.find(stop));
    let answer = &completion[..ends.min().unwrap_or(completion.len())];
    let found = match answer.split_once(MARK) {
        Some((_, behind)) => behind.lines().next().and_then(first_number),
        None => last_number(answer),
    };
    found.as_deref() == Some(problem.number.as_str())
}

/// Numbers of `text`, without thousands separators and trailing zeros.
fn numbers(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut number = String::new();
    let letters: Vec<char> = text.chars().chain([' ']).collect();
    for (index, letter) in letters.iter().enumerate() {
        let next_is_digit = letters.get(index + 1).is_some_and(char::is_ascii_digit);
        match letter {
            '0'..='9' => number.push(*letter),
            '-' if number.is_empty() && next_is_digit => number.push('-'),
            '.' if next_is_digit && !number.contains('.') && !number.is_empty() => number.push('.'),
            ',' if next_is_digit && !number.is_empty() => {}
            _ if !number.is_empty() => found.push(std::mem::take(&mut number)),
            _ => {}
        }
    }
    let plain = |number: String| {
        if number.contains('.') {
            number
                .trim_end_matches('0')
                .trim_end_matches('.')
                .to_owned()
        } else {
            number
        }
    };
    found.into_iter().map(plain).collect()
}

fn first_number(text: &str) -> Option<String> {
    numbers(text).into_iter().next()
}

fn last_number(text: &str) -> Option<String> {
    numbers(text).pop()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_that_counts_is_found() {
        let problem = WordProblem {
            question: "How many?".to_owned(),
            answer: "2 * 9 = 18\n#### 1,018".to_owned(),
            number: last_number("1,018").unwrap(),
        };
        for right in [
            "1018",
            " so it is $1,018.00.",
            "5 then\n#### 1018\nQuestion: 7",
            "1018\n\n#### 3",
        ] {
            assert!(is_right(&problem, right), "{right}");
        }
        for wrong in [
            "",
            "none",
            "-1018",
            "1018 or 1019",
            "#### 18 1018",
            "1018.5",
            "\n\n1018",
        ] {
            assert!(!is_right(&problem, wrong), "{wrong}");
        }
        assert_eq!(
            numbers("a-3 b 4.50, 7, 1,200 and 8."),
            ["-3", "4.5", "7", "1200", "8"]
        );
        assert_eq!(
            prompt(std::slice::from_ref(&problem), &problem),
            "Question: How many?\nAnswer: 2 * 9 = 18\n#### 1,018\n\nQuestion: How many?\nAnswer:"
        );
    }
}
