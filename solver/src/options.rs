//! How to solve: for what, by what, and for how long.

use std::{fmt, time::Duration};

use powerinfer_artifact::plan::Objective;
use serde::Serialize;

/// What solves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    /// Whatever proves its answer first.
    #[default]
    Auto,
    /// One price on memory, exact choices layer by layer, and an exact search for what is left.
    Decomposition,
    /// The mixed integer program by microlp.
    Microlp,
    /// The mixed integer program by HiGHS, where this program was built with it.
    Highs,
}

impl fmt::Display for Backend {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Auto => "auto",
            Self::Decomposition => "decomposition",
            Self::Microlp => "microlp",
            Self::Highs => "highs",
        })
    }
}

impl Backend {
    /// Whether this program was built with it.
    pub fn is_built_in(self) -> bool {
        self != Self::Highs || cfg!(feature = "highs")
    }
}

/// How to solve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// What to optimise.
    pub objective: Objective,
    /// What solves.
    pub backend: Backend,
    /// How long a general solver may take before the best plan so far is taken.
    pub time_limit: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            objective: Objective::Latency,
            backend: Backend::Auto,
            time_limit: Duration::from_secs(10),
        }
    }
}
