//! A chain as a mixed integer program for a general solver.
//!
//! ```text
//! min  Σ cost_k z_k + Σ transition_st w_ist
//!      Σ_k z_ik = 1                          stage i takes one choice k
//!      Σ_t w_ist = Σ_{k in s} z_ik           a transition leaves the state of stage i …
//!      Σ_s w_ist = Σ_{k in t} z_i+1,k        … and enters the state of stage i+1
//!      Σ bytes_k z_k ≤ memory                of each GPU and of the CPU
//!      z ∈ {0, 1}, w ≥ 0
//! ```
//!
//! Its linear relaxation is as tight as the Lagrangian one, so choices that the Lagrangian bound excludes
//! from every solution better than a known one are left out beforehand.

use std::time::Duration;

use good_lp::{Expression, ProblemVariables, ResolutionError, Variable, variable};

use crate::{
    Backend,
    chain::{Chain, State, Step},
    decomposition::{Answer, ROUNDING, Taken},
    dual::{Hulls, maximise, potentials},
    general,
    labels::open_choices,
};

/// Right-hand side of the memory constraints after scaling, large against the tolerance of a solver.
const MEMORY_SCALE: f64 = 1e4;
/// Mean cost of a choice after scaling, for the same reason.
const COST_SCALE: f64 = 1e3;

/// Result of [`improve`].
#[derive(Debug)]
pub(crate) struct Improved {
    /// The better one of the known answer and the solver's, with the bound that holds for it.
    pub(crate) answer: Answer,
    /// Number of binary variables.
    pub(crate) open: usize,
    /// Reason why the solver proved nothing, if it did not.
    pub(crate) failure: Option<String>,
}

/// Per stage and state, the indices of the choices in the program.
type Open = Vec<Vec<Vec<usize>>>;

/// Solves `chain` with a general solver, given a known answer to improve on or to prove optimal.
pub(crate) fn improve(
    chain: &Chain,
    known: &Answer,
    backend: Backend,
    time_limit: Duration,
) -> Improved {
    let largest = chain.stages.iter().map(|stage| {
        let choices = stage.choices.iter().flatten();
        choices.map(|choice| choice.cpu_bytes).max().unwrap_or(0)
    });
    let ram_binds = largest.fold(0, u64::saturating_add) > chain.ram;
    let chain = chain.pruned(ram_binds);
    let open = open(&chain, ram_binds, known);
    let mut improved = Improved {
        answer: known.clone(),
        open: open.iter().flatten().map(Vec::len).sum(),
        failure: None,
    };
    match solve(&chain, &open, ram_binds, backend, time_limit) {
        Err(error) => improved.failure = Some(error.to_string()),
        Ok((steps, is_proven)) => {
            let cost = chain.cost(&steps);
            if !chain.fits(&steps) {
                improved.failure = Some("its solution does not fit".to_owned());
                return improved;
            }
            if cost < known.cost - ROUNDING * known.cost.abs() {
                improved.answer.cost = cost;
                improved.answer.taken = Taken::all(&chain, &steps);
            }
            let tolerance = 1e-6 * known.cost.abs();
            match is_proven {
                true if cost <= known.cost + tolerance => {
                    improved.answer.bound = improved.answer.cost;
                }
                true => {
                    improved.failure = Some("its solution is worse than a known one".to_owned())
                }
                false => improved.failure = Some(format!("stopped after {time_limit:?}")),
            }
        }
    }
    improved
}

/// Choices that a solution no worse than the known one can contain.
fn open(chain: &Chain, ram_binds: bool, known: &Answer) -> Open {
    let hulls = Hulls::new(chain, ram_binds);
    let multipliers = maximise(chain, &hulls, ram_binds).multipliers;
    let potentials = potentials(chain, &hulls, &multipliers);
    // Solutions as good as the known one stay, so the program is feasible.
    let choices = chain
        .stages
        .iter()
        .flat_map(|stage| &stage.choices)
        .flatten();
    let largest = choices.fold(1e-300, |largest: f64, choice| {
        largest.max(choice.cost.abs())
    });
    let cutoff = known.cost + 1e-6 * known.cost.abs() + 1e-9 * largest;
    let stage = |stage: usize| {
        let states = 0..chain.states();
        states
            .map(|state| open_choices(chain, &multipliers, &potentials, stage, state, cutoff))
            .collect()
    };
    (0..chain.stages.len()).map(stage).collect()
}

/// Solves the program over the open choices. Returns its solution and whether it is proven optimal.
fn solve(
    chain: &Chain,
    open: &Open,
    ram_binds: bool,
    backend: Backend,
    time_limit: Duration,
) -> Result<(Vec<Step>, bool), ResolutionError> {
    let mut variables = ProblemVariables::new();
    let mut constraints = Vec::new();
    let (mut cost, mut ram) = (Expression::default(), Expression::default());
    let mut memory = vec![Expression::default(); chain.capacities.len()];
    let cost_scale = COST_SCALE / mean_cost(chain, open);
    let scales: Vec<f64> = chain
        .capacities
        .iter()
        .map(|capacity| MEMORY_SCALE / (*capacity).max(1) as f64)
        .collect();
    let ram_scale = MEMORY_SCALE / chain.ram.max(1) as f64;
    let mut stages: Vec<Vec<Vec<Variable>>> = Vec::new();
    for (stage, open) in open.iter().enumerate() {
        let mut one = Expression::default();
        let mut states = Vec::new();
        for (state, open) in open.iter().enumerate() {
            let gpu = State::from_parts(state).gpu;
            let taken = variables.add_vector(variable().binary(), open.len());
            for (&taken, &choice) in taken.iter().zip(open) {
                let choice = &chain.choices(stage, state)[choice];
                one.add_mul(1.0, taken);
                cost.add_mul(choice.cost * cost_scale, taken);
                memory[gpu].add_mul(choice.gpu_bytes as f64 * scales[gpu], taken);
                ram.add_mul(choice.cpu_bytes as f64 * ram_scale, taken);
            }
            states.push(taken);
        }
        constraints.push(one.eq(1));
        stages.push(states);
    }
    let mut leaving: Vec<Expression> = (0..chain.states())
        .map(|state| Expression::from(f64::from(u8::from(state == Chain::START))))
        .collect();
    for states in &stages {
        let mut entering = vec![Expression::default(); chain.states()];
        for (from, leaving) in leaving.iter().enumerate() {
            let mut out = Expression::default();
            for (to, entering) in entering.iter_mut().enumerate() {
                let transition = chain.transition(from, to);
                if transition.is_infinite() {
                    continue;
                }
                let taken = variables.add(variable().min(0));
                cost.add_mul(transition * cost_scale, taken);
                out.add_mul(1.0, taken);
                entering.add_mul(1.0, taken);
            }
            constraints.push(out.eq(leaving.clone()));
        }
        leaving = states
            .iter()
            .map(|taken| taken.iter().copied().sum())
            .collect();
        for (entering, taken) in entering.into_iter().zip(&leaving) {
            constraints.push(entering.eq(taken.clone()));
        }
    }
    for ((memory, capacity), scale) in memory.into_iter().zip(&chain.capacities).zip(&scales) {
        constraints.push(memory.leq(*capacity as f64 * scale));
    }
    if ram_binds {
        constraints.push(ram.leq(chain.ram as f64 * ram_scale));
    }
    let found = general::solve(variables.minimise(cost), constraints, backend, time_limit)?;
    let steps = stages.iter().zip(open).map(|(states, open)| {
        let mut best = (
            f64::NEG_INFINITY,
            Step {
                state: 0,
                choice: 0,
            },
        );
        for (state, (taken, open)) in states.iter().zip(open).enumerate() {
            for (&taken, &choice) in taken.iter().zip(open) {
                let value = found.value(taken);
                if value > best.0 {
                    best = (value, Step { state, choice });
                }
            }
        }
        best.1
    });
    Ok((steps.collect(), found.is_proven))
}

/// Mean magnitude of the costs of the open choices, never 0.
fn mean_cost(chain: &Chain, open: &Open) -> f64 {
    let (mut sum, mut count) = (0.0, 0);
    for (stage, states) in open.iter().enumerate() {
        for (state, open) in states.iter().enumerate() {
            for &choice in open {
                sum += chain.choices(stage, state)[choice].cost.abs();
                count += 1;
            }
        }
    }
    if sum > 0.0 {
        sum / f64::from(count)
    } else {
        1.0
    }
}
