//! Solving by either objective: where every part of a model goes.

use powerinfer_artifact::plan::Device;

use crate::{
    Backend, Candidate, Options, Problem, SolveError,
    account::{bytes_on, lines, too_small},
    chain::Chain,
    cost,
    decide::take,
    decomposition::{self, Infeasible},
    dense::{place_dense, reserve_bytes},
    impact, latency, mixed_integer, objective,
    pins::pinned_too_much,
    places::Places,
    program::Program,
};

/// A placement as it was found, by whichever objective.
pub(crate) struct Solved {
    pub(crate) places: Places,
    pub(crate) backend: String,
    /// In the objective's own unit.
    pub(crate) value: f64,
    pub(crate) bound: f64,
    pub(crate) relaxation_bound: f64,
    pub(crate) open: usize,
    pub(crate) trouble: Option<String>,
    /// Seconds that a byte more VRAM saves.
    pub(crate) price: Option<f64>,
}

/// Solves by the paper's objective, each layer going the one way it has.
pub(crate) fn solve_impact(problem: &Problem, options: &Options) -> Result<Solved, SolveError> {
    let gpus = problem.budget.vram_split.len();
    if gpus > 1 {
        return Err(SolveError::ImpactGpus { gpus });
    }
    let (places, left_bytes) = place_dense(problem);
    if let Some(error) = pinned_too_much(problem, &places, left_bytes) {
        return Err(error);
    }
    let cold_bytes = bytes_on(Device::Cpu, &lines(problem, &places));
    let must_be_hot = cold_bytes.saturating_sub(problem.budget.ram_bytes);
    let program = Program::new(problem, left_bytes, must_be_hot);
    let answer = impact::solve(&program, options.backend, options.time_limit);
    let answer = answer.map_err(|most_hot| {
        let least = places.clone().with_hot(&most_hot);
        let needed = bytes_on(Device::Cpu, &lines(problem, &least));
        too_small(problem, &least, Device::Cpu, needed)
    })?;
    let places = places.with_hot(&program.hot_counts(&answer.choice));
    // The plan's own value; the answer's bound may differ from it by the order of summation.
    let value = objective::evaluate(problem, &places.hot_counts());
    let bound = match answer.bound > answer.mass {
        true => answer.bound.max(value),
        false => value,
    };
    Ok(Solved {
        places,
        backend: answer.backend.to_owned(),
        value,
        bound,
        relaxation_bound: answer.relaxation_bound,
        open: answer.open_groups,
        trouble: answer.trouble,
        price: None,
    })
}

/// Solves by time, each layer going the best of the ways it may; gives which.
pub(crate) fn solve_latency(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    options: &Options,
) -> Result<(Solved, Vec<usize>), SolveError> {
    let chain = latency::chain(problem, candidates);
    let always = problem.embedding_bytes + problem.cpu_scratch_bytes;
    if always > problem.budget.ram_bytes {
        let least = decomposition::fullest(&chain);
        let least = least.map(|least| least.taken.iter().map(|t| t.choice.cpu_bytes).sum());
        let infeasible = match least {
            Ok(needed) => Infeasible::Cpu { needed },
            Err(infeasible) => infeasible,
        };
        return Err(explain(problem, candidates, &chain, infeasible));
    }
    let mut answer = decomposition::solve(&chain)
        .map_err(|infeasible| explain(problem, candidates, &chain, infeasible))?;
    let gap = (answer.cost - answer.bound) / answer.cost.abs();
    let general = match options.backend {
        Backend::Decomposition => None,
        Backend::Auto if gap <= decomposition::GOOD_ENOUGH => None,
        Backend::Auto if Backend::Highs.is_built_in() => Some(Backend::Highs),
        Backend::Auto => Some(Backend::Microlp),
        general => Some(general),
    };
    let (mut open, mut trouble) = (0, None);
    let mut backend = Backend::Decomposition;
    if let Some(general) = general {
        let relaxation_bound = answer.relaxation_bound;
        if options.backend != Backend::Auto {
            // Who asks for a general solver wants its proof, not another one's.
            answer.bound = relaxation_bound;
        }
        let improved = mixed_integer::improve(&chain, &answer, general, options.time_limit);
        open = improved.open;
        if improved.trouble.is_none() || improved.answer.cost < answer.cost {
            backend = general;
        }
        answer = improved.answer;
        trouble = improved.trouble;
    }
    let (places, modes) = latency::places(problem, candidates, &answer.taken);
    let taken = take(problem, candidates, &modes);
    // The plan's own value, evaluated part by part.
    let seconds = cost::total(&taken, &places).total;
    let is_optimal = answer.bound >= answer.cost * (1.0 - 1e-12);
    let bound = match is_optimal {
        true => seconds,
        false => answer.bound.min(seconds),
    };
    let solved = Solved {
        places,
        backend: backend.to_string(),
        value: 1e6 * seconds,
        bound: 1e6 * bound,
        relaxation_bound: 1e6 * answer.relaxation_bound.min(seconds),
        open,
        trouble,
        price: answer.gpu_prices.first().copied(),
    };
    Ok((solved, modes))
}

/// Why nothing fits, in lines of the account.
fn explain(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    chain: &Chain,
    infeasible: Infeasible,
) -> SolveError {
    match infeasible {
        Infeasible::Gpu { .. } if chain.capacities.len() > 1 => SolveError::PinnedToGpus,
        Infeasible::Gpu { needed } => {
            let least = Places::cold(problem).with_pinned(problem);
            let needed = needed + reserve_bytes(problem);
            too_small(problem, &least, Device::Gpu, needed)
        }
        Infeasible::Cpu { needed } => {
            let always = problem.embedding_bytes + problem.cpu_scratch_bytes;
            match decomposition::fullest(chain) {
                Ok(fullest) => {
                    let (least, modes) = latency::places(problem, candidates, &fullest.taken);
                    let taken = take(problem, candidates, &modes);
                    too_small(&taken, &least, Device::Cpu, needed + always)
                }
                Err(_) => too_small(
                    problem,
                    &Places::cold(problem),
                    Device::Cpu,
                    needed + always,
                ),
            }
        }
    }
}
