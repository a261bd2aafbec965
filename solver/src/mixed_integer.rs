//! A chain as a mixed integer program, through good_lp.
//!
//! ```text
//! min  Σ c_k z_k + Σ way_st w_ist
//!      Σ_k z_ik = 1                          each stage i takes one choice k
//!      Σ_t w_ist = Σ_{k in s} z_ik           what leaves a state of a stage …
//!      Σ_s w_ist = Σ_{k in t} z_i+1,k        … arrives in one of the next
//!      Σ bytes_k z_k ≤ memory                for each GPU and the CPU
//!      z ∈ {0, 1}, w ≥ 0
//! ```
//!
//! Its relaxation is as tight as the Lagrangian's, so the choices that cannot be part of a better
//! solution than a known one are left out beforehand.

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

/// Memory rows are scaled to this, so that a solver's tolerance stays small beside it.
const ROW: f64 = 1e4;
/// Costs are scaled to this on average, for the same reason.
const COST: f64 = 1e3;

/// What a general solver made of a chain.
#[derive(Debug)]
pub(crate) struct Improved {
    pub(crate) answer: Answer,
    /// Choices that it had to decide between.
    pub(crate) open: usize,
    /// Why it was not solved to the end, if it was not.
    pub(crate) trouble: Option<String>,
}

/// Has `backend` improve on `known`, or prove that nothing does.
pub(crate) fn improve(
    chain: &Chain,
    known: &Answer,
    backend: Backend,
    time_limit: Duration,
) -> Improved {
    let needs = |ram_matters: bool| {
        let chain = chain.pruned(ram_matters);
        let hulls = Hulls::of(&chain, ram_matters);
        let dual = maximise(&chain, &hulls, ram_matters);
        let around = potentials(&chain, &hulls, &dual.prices);
        // What costs as much as the known answer stays, so that there always is a solution.
        let cutoff = known.cost + 1e-6 * known.cost.abs();
        let open: Vec<Vec<Vec<usize>>> = (0..chain.stages.len())
            .map(|stage| {
                let states = 0..chain.states();
                states
                    .map(|state| open_choices(&chain, &dual.prices, &around, stage, state, cutoff))
                    .collect()
            })
            .collect();
        (chain, open)
    };
    let slack = chain.stages.iter().map(|stage| {
        let choices = stage.homes.iter().flatten();
        choices.map(|choice| choice.cpu_bytes).max().unwrap_or(0)
    });
    let ram_matters = slack.fold(0, u64::saturating_add) > chain.ram;
    let (chain, open) = needs(ram_matters);
    let mut improved = Improved {
        answer: known.clone(),
        open: open.iter().flatten().map(Vec::len).sum(),
        trouble: None,
    };
    match solve(&chain, &open, ram_matters, backend, time_limit) {
        Err(error) => improved.trouble = Some(error.to_string()),
        Ok((steps, is_optimal)) => {
            let cost = chain.cost(&steps);
            if !chain.allows(&steps) {
                improved.trouble = Some("its answer does not fit".to_owned());
                return improved;
            }
            if cost < known.cost - ROUNDING * known.cost.abs() {
                improved.answer.cost = cost;
                let steps = steps.iter().enumerate();
                improved.answer.taken = steps
                    .map(|(stage, step)| Taken {
                        state: step.state,
                        choice: *chain.chosen(stage, *step),
                    })
                    .collect();
            }
            let within = 1e-6 * known.cost.abs();
            match is_optimal {
                true if cost <= known.cost + within => improved.answer.bound = improved.answer.cost,
                true => improved.trouble = Some("its answer is worse than one known".to_owned()),
                false => improved.trouble = Some(format!("stopped after {time_limit:?}")),
            }
        }
    }
    improved
}

/// States the program over the open choices and has it solved.
fn solve(
    chain: &Chain,
    open: &[Vec<Vec<usize>>],
    ram_matters: bool,
    backend: Backend,
    time_limit: Duration,
) -> Result<(Vec<Step>, bool), ResolutionError> {
    let mut variables = ProblemVariables::new();
    let mut rows = Vec::new();
    let (mut cost, mut ram) = (Expression::default(), Expression::default());
    let mut memory = vec![Expression::default(); chain.capacities.len()];
    let average = mean_cost(chain, open);
    let cost_scale = COST / average;
    let scales: Vec<f64> = chain
        .capacities
        .iter()
        .map(|c| ROW / (*c).max(1) as f64)
        .collect();
    let ram_scale = ROW / chain.ram.max(1) as f64;
    let mut stages: Vec<Vec<Vec<Variable>>> = Vec::new();
    for (stage, open) in open.iter().enumerate() {
        let mut one = Expression::default();
        let mut states = Vec::new();
        for (state, open) in open.iter().enumerate() {
            let gpu = State::of(state).gpu;
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
        rows.push(one.eq(1));
        stages.push(states);
    }
    let sum = |taken: &[Variable]| -> Expression { taken.iter().copied().sum() };
    let before: Vec<Expression> = (0..chain.states())
        .map(|state| Expression::from(f64::from(u8::from(state == Chain::START))))
        .collect();
    let mut leaving = before;
    for states in &stages {
        let mut arriving = vec![Expression::default(); chain.states()];
        for (from, leaving) in leaving.iter().enumerate() {
            let mut out = Expression::default();
            for (to, arriving) in arriving.iter_mut().enumerate() {
                let mode = chain.transition(from, to);
                if mode.is_infinite() {
                    continue;
                }
                let taken = variables.add(variable().min(0));
                cost.add_mul(mode * cost_scale, taken);
                out.add_mul(1.0, taken);
                arriving.add_mul(1.0, taken);
            }
            rows.push(out.eq(leaving.clone()));
        }
        leaving = states.iter().map(|taken| sum(taken)).collect();
        for (arriving, here) in arriving.into_iter().zip(&leaving) {
            rows.push(arriving.eq(here.clone()));
        }
    }
    for ((memory, capacity), scale) in memory.into_iter().zip(&chain.capacities).zip(&scales) {
        rows.push(memory.leq(*capacity as f64 * scale));
    }
    if ram_matters {
        rows.push(ram.leq(chain.ram as f64 * ram_scale));
    }
    let found = general::solve(variables.minimise(cost), rows, None, backend, time_limit)?;
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

/// Mean magnitude of the open choices' costs, never 0.
fn mean_cost(chain: &Chain, open: &[Vec<Vec<usize>>]) -> f64 {
    let (mut sum, mut count) = (0.0, 0);
    for (stage, states) in open.iter().enumerate() {
        for (state, open) in states.iter().enumerate() {
            for &choice in open {
                sum += chain.choices(stage, state)[choice].cost.abs();
                count += 1;
            }
        }
    }
    match sum > 0.0 {
        true => sum / f64::from(count),
        false => 1.0,
    }
}
