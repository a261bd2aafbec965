//! A task: a signature and docstring to continue, the body that solves it, inputs to judge it.

use super::argument::{Argument, Landmarks};
use super::draft::{Draft, Parameter};
use super::family::Family;
use crate::random::Random;

/// One function to write.
#[derive(Debug, Clone)]
pub struct Task {
    combination: String,
    family: Family,
    steps: usize,
    entry_point: &'static str,
    parameters: Vec<Parameter>,
    prompt: String,
    solution: String,
}

/// What functions are called; the name says nothing about the task.
const FUNCTION_NAMES: [&str; 16] = [
    "solve",
    "f",
    "compute",
    "func",
    "process",
    "run",
    "task",
    "calc",
    "answer",
    "work",
    "g",
    "convert",
    "evaluate",
    "apply",
    "handle",
    "result_of",
];

impl Task {
    pub(super) fn new(family: Family, steps: usize, draft: Draft, random: &mut Random) -> Self {
        let entry_point = random.pick(&FUNCTION_NAMES);
        let names: Vec<&str> = draft.parameters.iter().map(|it| it.name).collect();
        let prompt = format!(
            "def {entry_point}({}):\n    \"\"\"{}\"\"\"",
            names.join(", "),
            draft.docstring
        );
        let mut solution = String::from("\n");
        for line in &draft.body {
            solution.push_str("    ");
            solution.push_str(line);
            solution.push('\n');
        }
        Self {
            combination: format!("{}|{}", family.name(), draft.combination),
            family,
            steps,
            entry_point,
            parameters: draft.parameters,
            prompt,
            solution,
        }
    }

    /// Canonical key of what is asked, such as `numbers|keep:greater(10s)|times(2)|sum`.
    ///
    /// Thresholds and addends stand in it by their ten, so that a held-out task differs from
    /// every training task in more than the digit that is copied.
    pub fn combination(&self) -> &str {
        &self.combination
    }

    /// Name of the family, for reports by family.
    pub fn family(&self) -> &str {
        self.family.name()
    }

    /// How many steps are composed, one to four.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Name of the function to write.
    pub fn entry_point(&self) -> &str {
        self.entry_point
    }

    /// Signature and docstring, ending in `"""` without a newline.
    pub fn prompt(&self) -> &str {
        &self.prompt
    }

    /// The body, from the newline after the docstring to its own last newline.
    pub fn solution(&self) -> &str {
        &self.solution
    }

    /// The whole function.
    pub fn text(&self) -> String {
        format!("{}{}", self.prompt, self.solution)
    }

    /// `count` lists of arguments to call the function with, the same for the same seed.
    ///
    /// The first are the edge cases (empty, one element); the others lie round the constants
    /// that occur in the solution.
    pub fn arguments(&self, seed: u64, count: usize) -> Vec<Vec<Argument>> {
        let mut random = Random::new(seed);
        let landmarks = Landmarks::of(&self.solution);
        (0..count)
            .map(|case| {
                self.parameters
                    .iter()
                    .map(|parameter| landmarks.argument(parameter.kind, case, &mut random))
                    .collect()
            })
            .collect()
    }
}
