//! Held-out function tasks of the demo: a generated function passes if it behaves like the reference.

use std::time::Duration;

use powerinfer_datasets::minipython::{Argument, Task};

use crate::{EvalError, PythonSandbox, Tests, Verdict};

/// Calls on which a completion is compared with the reference.
pub const CASES: usize = 24;

/// Limit of the processor time of all calls.
const TIME_LIMIT: Duration = Duration::from_secs(1);

/// The part of `completion` that belongs to the function: everything before the first line that
/// is not indented. The first line continues the prompt and always belongs to it.
pub fn cut_completion(completion: &str) -> &str {
    completion
        .match_indices('\n')
        .map(|(newline, _)| newline + 1)
        .find(|&start| completion[start..].starts_with(|it: char| !it.is_whitespace()))
        .map_or(completion, |start| &completion[..start])
}

/// Whether `completion` solves `task`, see [`judge`].
///
/// # Errors
///
/// Fails with [`EvalError::NoSandbox`] if the sandbox did not run the program.
pub fn is_solved(
    task: &Task,
    completion: &str,
    seed: u64,
    sandbox: &PythonSandbox,
) -> Result<bool, EvalError> {
    match judge(task, completion, seed, sandbox) {
        Verdict::Unjudged(reason) => Err(EvalError::NoSandbox { reason }),
        verdict => Ok(verdict == Verdict::Passed),
    }
}

/// Compares the function that the task's prompt and `completion` define with the reference, on [`CASES`] inputs drawn
/// from `seed`: results must have the same `repr`.
///
/// The two run in separate processes: definitions of the completion cannot affect the reference.
pub fn judge(task: &Task, completion: &str, seed: u64, sandbox: &PythonSandbox) -> Verdict {
    let (prompt, name) = (task.prompt(), task.entry_point());
    let calls: Vec<String> = task
        .arguments(seed, CASES)
        .iter()
        .map(|arguments| tuple(arguments))
        .collect();
    let tests = Tests {
        reference: format!("{prompt}{}\nreference = {name}\n", task.solution()),
        // The function gets a copy of the arguments, and the reference may change them.
        test: format!(
            "def check(candidate):
    for arguments in [{}]:
        call = '{name}' + repr(arguments)
        found, expected = repr(candidate(*arguments)), repr(reference(*arguments))
        assert found == expected, call + ' gave ' + found + ', not ' + expected
",
            calls.join(", ")
        ),
        entry_point: name.to_owned(),
    };
    let program = format!("{prompt}{}\n", cut_completion(completion));
    sandbox.judge(&program, Some(&tests), TIME_LIMIT)
}

/// The arguments of a call as a Python tuple.
fn tuple(arguments: &[Argument]) -> String {
    let arguments: Vec<String> = arguments.iter().map(Argument::to_string).collect();
    format!("({},)", arguments.join(", "))
}

#[cfg(test)]
mod tests {
    use powerinfer_datasets::minipython::{Split, distinct_tasks, tasks};

    use super::*;
    use crate::python_sandbox::tests::for_tests;

    fn any_task() -> Task {
        tasks(Split::HeldOut, 1)
            .find(|task| task.combination().starts_with("numbers|"))
            .unwrap()
    }

    #[test]
    fn every_solution_passes_against_itself() {
        let Some(sandbox) = for_tests() else { return };
        for (seed, task) in tasks(Split::HeldOut, 1).enumerate() {
            let verdict = judge(&task, task.solution(), seed as u64, &sandbox);
            assert_eq!(verdict, Verdict::Passed, "{}", task.text());
        }
    }

    #[test]
    fn a_body_that_returns_nothing_fails() {
        let Some(sandbox) = for_tests() else { return };
        let failed = tasks(Split::HeldOut, 12)
            .take(300)
            .filter(|task| {
                let verdict = judge(task, "\n    return None\n", 0, &sandbox);
                matches!(verdict, Verdict::Failed(_))
            })
            .count();
        assert_eq!(failed, 300);
    }

    #[test]
    fn a_changed_constant_is_noticed() {
        let Some(sandbox) = for_tests() else { return };
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
            let verdict = judge(task, &mutated, seed as u64, &sandbox);
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
        let Some(sandbox) = for_tests() else { return };
        let task = any_task();
        for body in [
            "\n    global repr, solve\n    repr = lambda value: ''\n    return 7.25\n",
            "\n    raise SystemExit(0)\n",
            "\n    return Anything()\nclass Anything:\n    def __eq__(self, other): return True\n",
            "",
            " or 1",
        ] {
            let verdict = judge(&task, body, 3, &sandbox);
            assert_ne!(verdict, Verdict::Passed, "{body}");
        }
    }

    #[test]
    fn bad_completions_are_errors_and_not_crashes() {
        let Some(sandbox) = for_tests() else { return };
        let task = any_task();
        let verdict = |body: &str| judge(&task, body, 4, &sandbox);
        assert_eq!(
            verdict("\n    while True:\n        pass\n"),
            Verdict::Timeout
        );
        for body in [
            "\n    return [0] * 10 ** 12\n",
            "\n    return open('/etc/passwd').read()\n",
            "\n    return )(\n",
            "\n  \t  return 1\n   return 2",
            "\n    return undefined\n",
        ] {
            assert!(matches!(verdict(body), Verdict::Error(_)), "{body}");
        }
        // The root folder of the sandbox can be listed.
        let listed = verdict("\n    import os\n    return os.listdir('/')\n");
        assert!(matches!(listed, Verdict::Failed(_)), "{listed:?}");
    }
}
