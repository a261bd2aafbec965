//! A task: a signature and docstring to continue, the body that solves it, inputs to judge it.

use powerinfer_artifact::random::Random;
use serde::Deserialize;

use super::argument::{Argument, Kind, Landmarks};

/// One function to write; a line of a task file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    combination: String,
    parameters: Vec<Kind>,
    prompt: String,
    solution: String,
}

impl Task {
    /// Canonical key of what is asked, such as `numbers|keep:greater(10s)|times(2)|sum`.
    ///
    /// It holds thresholds and addends by their ten, so that a held-out task differs from every
    /// training task in more than the digit that is copied.
    pub fn combination(&self) -> &str {
        &self.combination
    }

    /// Signature and docstring, ending in `"""` without a newline.
    pub fn prompt(&self) -> &str {
        &self.prompt
    }

    /// The body, from the newline after the docstring to its own last newline.
    pub fn solution(&self) -> &str {
        &self.solution
    }

    /// Name of the function to write.
    pub fn entry_point(&self) -> &str {
        let signature = self.prompt.strip_prefix("def ").unwrap_or(&self.prompt);
        signature.split_once('(').map_or("", |(name, _)| name)
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
        let landmarks = Landmarks::new(&self.solution);
        (0..count)
            .map(|case| {
                self.parameters
                    .iter()
                    .map(|&kind| landmarks.argument(kind, case, &mut random))
                    .collect()
            })
            .collect()
    }
}
