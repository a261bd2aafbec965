//! A mixed integer program handed to a general solver, through good_lp.

use std::time::Duration;

use good_lp::{
    Constraint, ResolutionError, Solution, SolverModel, Variable, WithInitialSolution, WithMipGap,
    WithTimeLimit,
    solvers::{SolutionStatus, microlp::microlp},
    variable::UnsolvedProblem,
};

use crate::Backend;

/// Seconds that any caller may call for ever; more overflows in the solver.
const LONGEST_LIMIT: f64 = 1e9;

/// The best solution that a solver came to.
pub(crate) struct Found {
    solution: Box<dyn Solution>,
    /// Whether it says that nothing is better.
    pub(crate) is_proven: bool,
}

impl Found {
    /// What `variable` is in it.
    pub(crate) fn value(&self, variable: Variable) -> f64 {
        self.solution.value(variable)
    }
}

/// Has `backend` solve `program` under `rows`, from `start` where one is known; whatever is no general
/// solver stands for microlp.
pub(crate) fn solve(
    program: UnsolvedProblem,
    rows: Vec<Constraint>,
    start: Option<Vec<(Variable, f64)>>,
    backend: Backend,
    time_limit: Duration,
) -> Result<Found, ResolutionError> {
    match backend {
        #[cfg(feature = "highs")]
        Backend::Highs => {
            let model = program.using(good_lp::solvers::highs::highs);
            run(model, rows, start, time_limit)
        }
        _ => run(program.using(microlp), rows, start, time_limit),
    }
}

fn run<M>(
    mut model: M,
    rows: Vec<Constraint>,
    start: Option<Vec<(Variable, f64)>>,
    time_limit: Duration,
) -> Result<Found, ResolutionError>
where
    M: SolverModel<Error = ResolutionError> + WithInitialSolution + WithMipGap + WithTimeLimit,
    M::Solution: 'static,
{
    for row in rows {
        model.add_constraint(row);
    }
    let seconds = time_limit.as_secs_f64().min(LONGEST_LIMIT);
    let mut model = model
        .with_mip_gap(0.0)
        .map_err(|error| ResolutionError::Str(format!("{error:?}")))?
        .with_time_limit(seconds);
    if let Some(start) = start {
        model = model.with_initial_solution(start);
    }
    let solution = model.solve()?;
    Ok(Found {
        is_proven: is_proven(&solution.status()),
        solution: Box::new(solution),
    })
}

/// Whether a solver came to its end. None was allowed a gap, so one that it mentions is the rounding of
/// its own tolerance.
fn is_proven(status: &SolutionStatus) -> bool {
    matches!(status, SolutionStatus::Optimal | SolutionStatus::GapLimit)
}
