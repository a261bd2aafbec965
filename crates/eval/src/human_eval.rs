//! HumanEval (Chen et al. 2021, "Evaluating Large Language Models Trained on Code"): functions to complete, judged by
//! their unit tests.

mod results;

pub use results::{Results, SolveOptions, solve};

use std::{collections::BTreeMap, path::Path, time::Duration};

use powerinfer_guard::worker::{NoAnswer, Work, Worker};

use crate::{
    EvalError,
    data_file::{self, Row},
    interpreter::{self, CANDIDATE, Fault, Limits},
    python_sandbox::{PythonSandbox, Tests},
};

/// Texts that end a completion, those of the original harness.
pub const STOPS: [&str; 5] = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"];

/// Time limit of a program.
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

/// Outcome of a completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// All assertions held.
    Passed,
    /// An assertion failed.
    Failed(String),
    /// A syntax error, an exception or too much memory.
    Error(String),
    /// The time limit was exceeded.
    Timeout,
    /// The judge cannot run the program, for this reason.
    Unjudged(String),
}

impl Verdict {
    /// Name in one word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed(_) => "failed",
            Self::Error(_) => "error",
            Self::Timeout => "timeout",
            Self::Unjudged(_) => "unjudged",
        }
    }

    /// Message of the failure, if there is one.
    pub fn detail(&self) -> Option<&str> {
        match self {
            Self::Failed(detail) | Self::Error(detail) | Self::Unjudged(detail) => {
                (!detail.is_empty()).then_some(detail)
            }
            Self::Passed | Self::Timeout => None,
        }
    }

    /// Verdict of the given name.
    pub fn from_name(name: &str, detail: Option<&str>) -> Option<Self> {
        let detail = || detail.unwrap_or_default().to_owned();
        Some(match name {
            "passed" => Self::Passed,
            "failed" => Self::Failed(detail()),
            "error" => Self::Error(detail()),
            "timeout" => Self::Timeout,
            "unjudged" => Self::Unjudged(detail()),
            _ => return None,
        })
    }
}

/// Interpreter that runs the programs.
#[derive(Debug)]
pub enum Judge {
    /// The embedded interpreter, in a worker if the program has [`WORK`], else in this process.
    Embedded,
    /// CPython in a sandboxed child process.
    Python(PythonSandbox),
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
    pub fn judge(&self, completion: &str, judge: &Judge) -> Verdict {
        let completion = cut(completion);
        let program = |body: &str| format!("{}{body}\n", self.prompt);
        let tests = Tests {
            reference: program(&self.canonical_solution),
            test: self.test.clone(),
            entry_point: self.entry_point.clone(),
        };
        match judge {
            Judge::Embedded => in_worker(&program(completion), &tests),
            Judge::Python(sandbox) => sandbox.judge(&program(completion), Some(&tests), TIME_LIMIT),
        }
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

/// Judging in a worker, for [`work_as_worker`](powerinfer_guard::worker::work_as_worker). The interpreter notices the time only
/// between two operations, a worker can be killed within one.
pub const WORK: Work = ("judge", |request| {
    let verdict = match serde_json::from_slice::<(String, Tests)>(request) {
        Ok((program, tests)) => embedded(&program, &tests),
        Err(error) => Verdict::Unjudged(error.to_string()),
    };
    serde_json::to_vec(&(verdict.name(), verdict.detail())).expect("two strings are plain JSON")
});

/// Judges `program` in a worker, or in this process if there are none.
fn in_worker(program: &str, tests: &Tests) -> Verdict {
    let mut worker = match Worker::start(WORK.0) {
        Ok(Some(worker)) => worker,
        Ok(None) => return embedded(program, tests),
        Err(error) => return Verdict::Unjudged(format!("no child process: {error}")),
    };
    // The worker has the same limit, and answers by it unless it is within an operation.
    let request = serde_json::to_vec(&(program, tests)).expect("texts are plain JSON");
    match worker.ask(&request, TIME_LIMIT + Duration::from_secs(1)) {
        Err(NoAnswer::Timeout) => Verdict::Timeout,
        Err(NoAnswer::Ended(_)) => {
            Verdict::Error("the interpreter ended without a verdict".to_owned())
        }
        Ok(answer) => serde_json::from_slice(&answer)
            .ok()
            .and_then(|(name, detail): (String, Option<String>)| {
                Verdict::from_name(&name, detail.as_deref())
            })
            .unwrap_or_else(|| Verdict::Unjudged("the verdict cannot be read".to_owned())),
    }
}

/// Tests `program` in the embedded interpreter.
fn embedded(program: &str, tests: &Tests) -> Verdict {
    let limits = Limits {
        duration: TIME_LIMIT,
        value_bytes: 64 << 20,
        ..Limits::default()
    };
    let Tests {
        reference,
        test,
        entry_point,
    } = tests;
    let calls = format!("{reference}\n{test}\ncheck({CANDIDATE})\n");
    match interpreter::run_tests(&calls, program, entry_point, &limits) {
        Ok(()) => Verdict::Passed,
        Err(Fault::Timeout) => Verdict::Timeout,
        Err(Fault::Panicked) => Verdict::Unjudged(Fault::Panicked.to_string()),
        Err(Fault::Raised { kind, message }) => match kind.as_str() {
            "AssertionError" => Verdict::Failed(message),
            // One that the program raises itself is its own.
            "NotImplementedError" if program.contains("NotImplementedError") => {
                Verdict::Error(format!("{kind}: {message}"))
            }
            kind if is_gap(kind, &message) => Verdict::Unjudged(format!("{kind}: {message}")),
            kind => Verdict::Error(format!("{kind}: {message}")),
        },
        Err(fault) => Verdict::Error(fault.to_string()),
    }
}

/// Whether Python would have gone on where the embedded interpreter raises: at modules and functions of the standard library
/// that it has not, at sums of numbers and truth values, at assignments to slices.
fn is_gap(kind: &str, message: &str) -> bool {
    let is_named = |names: &[&str]| {
        names
            .iter()
            .any(|name| message.contains(&format!("'{name}'")))
    };
    match kind {
        "NotImplementedError" => true,
        "ModuleNotFoundError" => is_named(&MODULES),
        "NameError" => is_named(&FUNCTIONS),
        "TypeError" if message.contains("unsupported operand type(s)") => {
            message.contains("'bool'") && is_named(&["int", "float"])
        }
        "TypeError" => message.contains("indices must be integers or slices, not slice"),
        _ => false,
    }
}

/// Modules that Python brings along and that functions like these may want.
const MODULES: [&str; 30] = [
    "abc",
    "array",
    "bisect",
    "calendar",
    "cmath",
    "collections",
    "copy",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "io",
    "itertools",
    "numbers",
    "operator",
    "queue",
    "random",
    "re",
    "secrets",
    "statistics",
    "string",
    "struct",
    "textwrap",
    "time",
    "types",
    "typing",
    "unicodedata",
    "zlib",
];

/// Functions that Python has without an import.
const FUNCTIONS: [&str; 22] = [
    "bytearray",
    "bytes",
    "callable",
    "compile",
    "complex",
    "delattr",
    "dir",
    "eval",
    "exec",
    "format",
    "frozenset",
    "globals",
    "input",
    "iter",
    "locals",
    "memoryview",
    "next",
    "object",
    "setattr",
    "super",
    "vars",
    "__import__",
];

#[cfg(test)]
mod tests {
    use super::*;

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
        let judge = |completion: &str| problem().judge(completion, &Judge::Embedded);
        assert_eq!(judge("    return 2 * x\n"), Verdict::Passed);
        assert_eq!(judge("    return x + x\nprint(double(1))"), Verdict::Passed);
        assert!(
            matches!(judge("    return x\n"), Verdict::Failed(detail) if detail.starts_with("three"))
        );
        assert_eq!(judge("    while True: pass\n"), Verdict::Timeout);
        assert!(matches!(judge("    return )"), Verdict::Error(_)));
        assert!(matches!(judge("    return y"), Verdict::Error(_)));
        for gap in [
            "    return eval('2 * x')",
            "    import hashlib\n    return 2 * x",
            "    return x + sum([x > 1, x > 2]) if x == 3 else True + 0",
        ] {
            let verdict = judge(gap);
            let is_fair = matches!(verdict, Verdict::Unjudged(_) | Verdict::Failed(_));
            assert!(is_fair, "{gap}: {verdict:?}");
        }
        assert!(matches!(judge("    import nonsense"), Verdict::Error(_)));
        let raised = judge("    raise NotImplementedError\n");
        assert!(matches!(raised, Verdict::Error(_)), "{raised:?}");
        assert!(matches!(
            judge("    return [0] * 10 ** 12"),
            Verdict::Error(_)
        ));
        assert_ne!(judge("    raise SystemExit(0)\n"), Verdict::Passed);
        assert_ne!(judge("\n"), Verdict::Passed);
        for verdict in [
            Verdict::Passed,
            Verdict::Timeout,
            Verdict::Failed("a".to_owned()),
        ] {
            let again = Verdict::from_name(verdict.name(), verdict.detail());
            assert_eq!(again, Some(verdict));
        }
    }
}
