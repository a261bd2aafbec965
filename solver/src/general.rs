//! Solves mixed integer programs with a general solver, through good_lp.

use std::time::Duration;

use good_lp::{
    Constraint, ResolutionError, Solution, SolverModel, Variable, WithMipGap, WithTimeLimit,
    solvers::{SolutionStatus, microlp::microlp},
    variable::UnsolvedProblem,
};

use crate::Backend;

/// Time limit in seconds that stands for no limit; longer ones overflow in the solver.
const LONGEST_LIMIT: f64 = 1e9;

/// The best solution that a solver found.
pub(crate) struct Found {
    solution: Box<dyn Solution>,
    /// Whether the solver proved it optimal.
    pub(crate) is_proven: bool,
}

impl Found {
    /// Value of `variable` in the solution.
    pub(crate) fn value(&self, variable: Variable) -> f64 {
        self.solution.value(variable)
    }
}

/// Solves `program` under `constraints` with HiGHS if `backend` is HiGHS, else with microlp.
pub(crate) fn solve(
    program: UnsolvedProblem,
    constraints: Vec<Constraint>,
    backend: Backend,
    time_limit: Duration,
) -> Result<Found, ResolutionError> {
    match backend {
        #[cfg(feature = "highs")]
        Backend::Highs => {
            let model = program.using(good_lp::solvers::highs::highs);
            run(model, constraints, time_limit)
        }
        _ => run(program.using(microlp), constraints, time_limit),
    }
}

fn run<M>(
    mut model: M,
    constraints: Vec<Constraint>,
    time_limit: Duration,
) -> Result<Found, ResolutionError>
where
    M: SolverModel<Error = ResolutionError> + WithMipGap + WithTimeLimit,
    M::Solution: 'static,
{
    for constraint in constraints {
        model.add_constraint(constraint);
    }
    let seconds = time_limit.as_secs_f64().min(LONGEST_LIMIT);
    let solution = model
        .with_mip_gap(0.0)
        .map_err(|error| ResolutionError::Str(format!("{error:?}")))?
        .with_time_limit(seconds)
        .solve()?;
    // No gap was allowed, so a gap that the solver reports is the rounding of its own tolerance.
    let is_proven = matches!(
        solution.status(),
        SolutionStatus::Optimal | SolutionStatus::GapLimit
    );
    Ok(Found {
        is_proven,
        solution: Box::new(solution),
    })
}
