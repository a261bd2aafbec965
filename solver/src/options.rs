//! Options of the solver.

use std::{fmt, time::Duration};

use powerinfer_artifact::plan::Objective;
use serde::Serialize;

/// Solver of the placement problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    /// Decomposition, then HiGHS, or with one GPU microlp, if its gap is too large.
    #[default]
    Auto,
    /// Lagrangian decomposition and exact search, without a general solver.
    Decomposition,
    /// Mixed integer program, solved by microlp.
    Microlp,
    /// Mixed integer program, solved by HiGHS; requires the feature `highs`.
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
    /// Whether this build contains the solver.
    pub fn is_built_in(self) -> bool {
        self != Self::Highs || cfg!(feature = "highs")
    }
}

/// Options of [`decide`](crate::decide) and [`place`](crate::place).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Objective to optimise.
    pub objective: Objective,
    /// Solver to use.
    pub backend: Backend,
    /// Time limit of a general solver, after which the best plan found so far is returned.
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
