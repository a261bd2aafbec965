//! HumanEval (Chen et al. 2021, "Evaluating Large Language Models Trained on Code"): functions to complete, judged by
//! their unit tests.

mod results;

pub use results::{Results, SolveOptions, solve};

use std::{collections::BTreeMap, path::Path, time::Duration};

use crate::{
    EvalError, PythonSandbox, Tests, Verdict,
    data_file::{self, Row},
};

/// Texts that end a completion, those of the original harness.
pub const STOPS: [&str; 5] = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"];

/// Limit of a program's processor time.
pub const TIME_LIMIT: Duration = Duration::from_secs(3);

/// A function to complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Name, such as `HumanEval/0`.
    pub task_id: String,
    /// Imports, signature and docstring.
    pub prompt: String,
    /// Name of the function.
    pub entry_point: String,
    /// Body that passes.
    pub canonical_solution: String,
    /// Source of a function `check` with assertions.
    pub test: String,
}

impl Problem {
    fn from_row(row: &Row) -> Result<Self, EvalError> {
        Ok(Self {
            task_id: row.text("task_id")?,
            prompt: row.text("prompt")?,
            entry_point: row.text("entry_point")?,
            canonical_solution: row.text("canonical_solution")?,
            test: row.text("test")?,
        })
    }

    /// Judges `completion` up to the first of [`STOPS`].
    pub fn judge(&self, completion: &str, sandbox: &PythonSandbox) -> Verdict {
        let completion = cut(completion);
        let program = |body: &str| format!("{}{body}\n", self.prompt);
        let tests = Tests {
            reference: program(&self.canonical_solution),
            test: self.test.clone(),
            entry_point: self.entry_point.clone(),
        };
        sandbox.judge(&program(completion), Some(&tests), TIME_LIMIT)
    }
}

/// Reads the problems of the file at `path`: JSON lines, plain or compressed with gzip.
///
/// # Errors
///
/// Fails if the file cannot be read, if a line lacks a field, or if a `task_id` appears twice.
pub fn read_problems(path: &Path) -> Result<Vec<Problem>, EvalError> {
    let rows = data_file::read(path)?;
    let mut seen = BTreeMap::new();
    let mut problems = Vec::new();
    for row in &rows {
        let problem = Problem::from_row(row)?;
        if seen.insert(problem.task_id.clone(), ()).is_some() {
            return Err(row.wrong(format!("`task_id` `{}` is there twice", problem.task_id)));
        }
        problems.push(problem);
    }
    Ok(problems)
}

/// Reads completions of `problems` from the file at `path`, JSON lines with `task_id` and `completion`; one list per
/// problem, in the file's order.
///
/// # Errors
///
/// Fails if the file cannot be read, if a line lacks a field, or if no problem has its `task_id`.
pub fn read_completions(path: &Path, problems: &[Problem]) -> Result<Vec<Vec<String>>, EvalError> {
    let places: BTreeMap<&str, usize> = problems
        .iter()
        .enumerate()
        .map(|(index, problem)| (problem.task_id.as_str(), index))
        .collect();
    let mut completions = vec![Vec::new(); problems.len()];
    for row in data_file::read(path)? {
        let task_id = row.text("task_id")?;
        let Some(place) = places.get(task_id.as_str()) else {
            return Err(row.wrong(format!("no problem is called `{task_id}`")));
        };
        completions[*place].push(row.text("completion")?);
    }
    Ok(completions)
}

/// `completion` up to the first stop.
pub fn cut(completion: &str) -> &str {
    let stops = STOPS.iter().filter_map(|stop| completion.find(stop));
    &completion[..stops.min().unwrap_or(completion.len())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::python_sandbox::tests::for_tests;

    #[test]
    fn a_completion_ends_where_something_else_begins() {
        assert_eq!(cut("    return 1\n"), "    return 1\n");
        assert_eq!(cut("    return 1\ndef g():\n    pass"), "    return 1");
        assert_eq!(
            cut("    x = 1\n    if x:\n        return 2\nif x"),
            "    x = 1\n    if x:\n        return 2"
        );
        assert_eq!(cut("\nclass A: pass\n#"), "");
        assert_eq!(cut(""), "");
    }

    fn problem() -> Problem {
        Problem {
            task_id: "T/0".to_owned(),
            prompt: "def double(x):\n    \"\"\"Twice x.\"\"\"\n".to_owned(),
            entry_point: "double".to_owned(),
            canonical_solution: "    return 2 * x\n".to_owned(),
            test: "def check(candidate):\n    assert candidate(3) == 6, 'three'\n    assert candidate(0) == 0\n".to_owned(),
        }
    }

    #[test]
    fn each_end_has_its_verdict() {
        let Some(sandbox) = for_tests() else { return };
        let judge = |completion: &str| problem().judge(completion, &sandbox);
        assert_eq!(judge("    return 2 * x\n"), Verdict::Passed);
        assert_eq!(judge("    return x + x\nprint(double(1))"), Verdict::Passed);
        assert_eq!(
            judge("    import hashlib\n    return eval('2 * x')"),
            Verdict::Passed
        );
        // Without a body, the function returns nothing.
        for wrong in ["    return x\n", "\n"] {
            assert_eq!(judge(wrong), Verdict::Failed("three".to_owned()));
        }
        assert_eq!(judge("    while True: pass\n"), Verdict::Timeout);
        for wrong in [
            "    return )",
            "    return y",
            "    import nonsense",
            "    raise NotImplementedError\n",
            "    return [0] * 10 ** 12",
            "    raise SystemExit(0)\n",
        ] {
            let verdict = judge(wrong);
            assert!(matches!(verdict, Verdict::Error(_)), "{wrong}: {verdict:?}");
        }
    }
}
