//! Held-out function tasks of the demo: a generated function passes if it behaves like the reference.

use std::time::Duration;

use powerinfer_datasets::minipython::{Argument, Task};

use crate::interpreter::{self, Fault, Limits};

/// Calls on which a completion is compared with the reference.
pub const CASES: usize = 24;

/// Outcome of a completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Every call returned the reference's result.
    Passed,
    /// A call returned another result.
    Failed {
        /// First such call, as Python source.
        call: String,
        /// Result of the reference, as `repr` shows it.
        expected: String,
        /// Result of the completion.
        found: String,
    },
    /// A syntax error, an exception or too much memory, in words.
    Error(String),
    /// The time limit was exceeded.
    Timeout,
}

/// The part of `completion` that belongs to the function: everything before the first line that
/// is not indented. The first line continues the prompt and always belongs to it.
pub fn cut_completion(completion: &str) -> &str {
    completion
        .match_indices('\n')
        .map(|(newline, _)| newline + 1)
        .find(|&start| completion[start..].starts_with(|it: char| !it.is_whitespace()))
        .map_or(completion, |start| &completion[..start])
}

/// Compares the function that the task's prompt and `completion` define with the reference, on [`CASES`] inputs drawn
/// from `seed`.
///
/// The two run as separate programs: definitions of the completion cannot affect the reference.
///
/// # Panics
///
/// Panics if the reference does not run, which is a defect of the task file.
pub fn judge(task: &Task, completion: &str, seed: u64) -> Verdict {
    let calls: Vec<String> = task
        .arguments(seed, CASES)
        .iter()
        .map(|arguments| call(task.entry_point(), arguments))
        .collect();
    let patient = Limits {
        duration: Duration::from_secs(20),
        ..Limits::default()
    };
    let expected = results(task, task.solution(), &calls, &patient)
        .unwrap_or_else(|fault| panic!("the reference runs, but: {fault}\n{}", task.text()));
    let found = match results(task, cut_completion(completion), &calls, &Limits::default()) {
        Ok(found) => found,
        Err(Fault::Timeout) => return Verdict::Timeout,
        Err(fault) => return Verdict::Error(fault.to_string()),
    };
    let wrong = calls
        .into_iter()
        .zip(expected.into_iter().zip(found))
        .find(|(_, (expected, found))| expected != found);
    match wrong {
        None => Verdict::Passed,
        Some((call, (expected, found))) => Verdict::Failed {
            call,
            expected,
            found,
        },
    }
}

fn call(function: &str, arguments: &[Argument]) -> String {
    let arguments: Vec<String> = arguments.iter().map(Argument::to_string).collect();
    format!("{function}({})", arguments.join(", "))
}

/// Results of the calls, one `repr` each.
fn results(
    task: &Task,
    body: &str,
    calls: &[String],
    limits: &Limits,
) -> Result<Vec<String>, Fault> {
    let source = format!("{}{body}\n[{}]\n", task.prompt(), calls.join(", "));
    let value = interpreter::run(&source, limits)?;
    let elements = value
        .elements()
        .expect("the program ends in a list of calls");
    Ok(elements.iter().map(interpreter::Value::repr).collect())
}

#[cfg(test)]
mod tests {
    use powerinfer_datasets::minipython::{Split, distinct_tasks, tasks};

    use super::*;

    fn any_task() -> Task {
        tasks(Split::HeldOut, 1)
            .find(|task| task.combination().starts_with("numbers|"))
            .unwrap()
    }

    #[test]
    fn every_solution_passes_against_itself() {
        for (seed, task) in tasks(Split::HeldOut, 1).enumerate() {
            let verdict = judge(&task, task.solution(), seed as u64);
            assert_eq!(verdict, Verdict::Passed, "{}", task.text());
        }
    }

    #[test]
    fn a_body_that_returns_nothing_fails() {
        let failed = tasks(Split::HeldOut, 12)
            .take(300)
            .filter(|task| {
                let verdict = judge(task, "\n    return None\n", 0);
                matches!(verdict, Verdict::Failed { .. })
            })
            .count();
        assert_eq!(failed, 300);
    }

    #[test]
    fn a_changed_constant_is_noticed() {
        let mut noticed = 0;
        let mut changed = 0;
        for (seed, task) in distinct_tasks(Split::HeldOut, 13, 800)
            .unwrap()
            .iter()
            .enumerate()
        {
            let Some(mutated) = with_one_constant_changed(task.solution(), seed) else {
                continue;
            };
            changed += 1;
            let verdict = judge(task, &mutated, seed as u64);
            noticed += usize::from(verdict != Verdict::Passed);
        }
        assert!(changed > 500, "only {changed} tasks have a constant");
        assert!(
            noticed * 10 >= changed * 9,
            "only {noticed} of {changed} changes were noticed"
        );
    }

    /// One of the integers of at least two is made larger by one.
    fn with_one_constant_changed(solution: &str, which: usize) -> Option<String> {
        let bytes = solution.as_bytes();
        let starts: Vec<usize> = (1..bytes.len())
            .filter(|&at| bytes[at].is_ascii_digit() && !bytes[at - 1].is_ascii_alphanumeric())
            .collect();
        let constants: Vec<(usize, usize, u64)> = starts
            .into_iter()
            .filter_map(|start| {
                let length = bytes[start..]
                    .iter()
                    .take_while(|byte| byte.is_ascii_digit())
                    .count();
                let value = solution[start..start + length].parse().ok()?;
                (value >= 2).then_some((start, start + length, value))
            })
            .collect();
        let &(start, end, value) = constants.get(which % constants.len().max(1))?;
        let larger = value + 1;
        Some(format!(
            "{}{larger}{}",
            &solution[..start],
            &solution[end..]
        ))
    }

    #[test]
    fn what_follows_the_function_is_cut() {
        let cut = cut_completion("\n    return 1\n\n    x\ndef g():\n    pass\n");
        assert_eq!(cut, "\n    return 1\n\n    x\n");
        assert_eq!(cut_completion("\nreturn 1"), "\n");
        assert_eq!(cut_completion(""), "");
    }

    #[test]
    fn tampering_does_not_help() {
        let task = any_task();
        for body in [
            "\n    global repr, solve\n    repr = lambda value: ''\n    return 7.25\n",
            "\n    raise SystemExit(0)\n",
            "\n    return Anything()\nclass Anything:\n    def __eq__(self, other): return True\n",
            "",
            " or 1",
        ] {
            let verdict = judge(&task, body, 3);
            assert_ne!(verdict, Verdict::Passed, "{body}");
        }
    }

    #[test]
    fn bad_completions_are_errors_and_not_crashes() {
        let task = any_task();
        let verdict = |body: &str| judge(&task, body, 4);
        assert_eq!(
            verdict("\n    while True:\n        pass\n"),
            Verdict::Timeout
        );
        for body in [
            "\n    return [0] * 10 ** 12\n",
            "\n    import os\n    return os.listdir('/')\n",
            "\n    return open('/etc/passwd').read()\n",
            "\n    return )(\n",
            "\n  \t  return 1\n   return 2",
            "\n    return undefined\n",
        ] {
            assert!(matches!(verdict(body), Verdict::Error(_)), "{body}");
        }
    }
}
