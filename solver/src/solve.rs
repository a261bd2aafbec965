//! Solves a problem for either objective: builds the chain, solves it, and translates the answer into a
//! placement.

use powerinfer_artifact::plan::{Device, RESERVE, SCRATCH};

use crate::{
    Backend, Candidate, Options, Problem, SolveError,
    account::{bytes_on, lines, too_small},
    baselines,
    candidate::with_modes,
    chain::Chain,
    cost,
    decomposition::{self, Answer, GOOD_ENOUGH, Infeasible},
    dense::{place_dense, reserve_bytes},
    impact, latency, mixed_integer, objective,
    pins::pinned_too_much,
    placement::Placement,
};

/// A solved placement, for either objective.
pub(crate) struct Solved {
    pub(crate) placement: Placement,
    /// Name of the solver that found it.
    pub(crate) backend: String,
    /// Value of the objective, in its own unit.
    pub(crate) value: f64,
    /// Bound on the objective.
    pub(crate) bound: f64,
    /// Bound by the relaxation alone.
    pub(crate) relaxation_bound: f64,
    /// Binary variables of the general solver.
    pub(crate) open: usize,
    /// Reason why the general solver proved nothing, if it did not.
    pub(crate) failure: Option<String>,
    /// Multiplier of VRAM: seconds per token that one more byte saves.
    pub(crate) vram_multiplier: Option<f64>,
}

/// Answer for a chain, and how it was found.
pub(crate) struct ChainAnswer {
    pub(crate) answer: Answer,
    pub(crate) backend: Backend,
    pub(crate) open: usize,
    pub(crate) failure: Option<String>,
}

/// Solves `chain` by decomposition, then by a general solver if `options` name one, or if they leave
/// the choice and the gap exceeds `tolerance`.
///
/// # Errors
///
/// When no solution fits.
pub(crate) fn solve_chain(
    chain: &Chain,
    options: &Options,
    tolerance: f64,
) -> Result<ChainAnswer, Infeasible> {
    let mut answer = decomposition::solve(chain)?;
    let general = match options.backend {
        Backend::Decomposition => None,
        Backend::Auto if answer.gap() <= tolerance => None,
        Backend::Auto if Backend::Highs.is_built_in() => Some(Backend::Highs),
        // With several GPUs microlp takes a minute for the relaxation alone, which it does not interrupt.
        Backend::Auto if chain.capacities.len() > 1 => None,
        Backend::Auto => Some(Backend::Microlp),
        general => Some(general),
    };
    let Some(general) = general else {
        return Ok(ChainAnswer {
            answer,
            backend: Backend::Decomposition,
            open: 0,
            failure: None,
        });
    };
    if options.backend != Backend::Auto {
        // A general solver that was asked for has to prove the answer itself.
        answer.bound = answer.relaxation_bound;
    }
    let improved = mixed_integer::improve(chain, &answer, general, options.time_limit);
    let is_general = improved.failure.is_none() || improved.answer.cost < answer.cost;
    Ok(ChainAnswer {
        answer: improved.answer,
        backend: if is_general {
            general
        } else {
            Backend::Decomposition
        },
        open: improved.open,
        failure: improved.failure,
    })
}

/// Solves for the paper's objective, with the execution modes of the layers as they are.
///
/// # Errors
///
/// When no placement keeps the budget, or the budget has several GPUs.
pub(crate) fn solve_impact(problem: &Problem, options: &Options) -> Result<Solved, SolveError> {
    let gpus = problem.budget.vram_split.len();
    if gpus > 1 {
        return Err(SolveError::ImpactGpus { gpus });
    }
    let (placement, left_bytes) = place_dense(problem);
    if let Some(error) = pinned_too_much(problem, &placement, left_bytes) {
        return Err(error);
    }
    let chain = impact::chain_around(problem, &placement, left_bytes);
    let solved = solve_chain(&chain, options, 0.0).map_err(|_| {
        let least = decomposition::least_ram(&chain);
        let least = least.expect("what is pinned to the GPU fits it");
        let least_placement = placement
            .clone()
            .with_hot(&impact::hot_counts(&least.taken));
        too_small(problem, &least_placement, Device::Cpu, least.cpu_bytes())
    })?;
    let answer = solved.answer;
    let placement = placement.with_hot(&impact::hot_counts(&answer.taken));
    // Evaluated neuron by neuron, so that it does not depend on the order in which the solver sums.
    let value = objective::evaluate(problem, &placement.hot_counts());
    let bound = if answer.is_optimal() {
        value
    } else {
        value.max(-answer.bound)
    };
    Ok(Solved {
        placement,
        backend: solved.backend.to_string(),
        value,
        bound,
        relaxation_bound: value.max(-answer.relaxation_bound),
        open: solved.open,
        failure: solved.failure,
        vram_multiplier: None,
    })
}

/// Solves for time, with the best candidate of each layer. Also returns the index of the candidate of each
/// layer.
///
/// # Errors
///
/// When no placement keeps the budget.
pub(crate) fn solve_latency(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    options: &Options,
) -> Result<(Solved, Vec<usize>), SolveError> {
    let chain = latency::chain(problem, candidates);
    let pinned = Placement::cold(problem).with_pinned(problem);
    let pinned = lines(problem, &pinned).into_iter();
    let pinned = pinned.filter(|line| ![RESERVE, SCRATCH].contains(&&*line.name));
    let needed = bytes_on(Device::Gpu, &pinned.collect::<Vec<_>>());
    if needed > 0 && !latency::has_gpu(problem) {
        // Some stage has no choice.
        return Err(explain(
            problem,
            candidates,
            &chain,
            Infeasible::Gpu { needed },
        ));
    }
    let solved = solve_chain(&chain, options, GOOD_ENOUGH)
        .map_err(|infeasible| explain(problem, candidates, &chain, infeasible))?;
    let answer = solved.answer;
    let (mut placement, mut chosen) = latency::placement(problem, candidates, &answer.taken);
    // Evaluated part by part, so that it does not depend on the order in which the solver sums.
    let mut seconds = cost::total(&with_modes(problem, candidates, &chosen), &placement).total;
    // If both memories are nearly full, the search can miss simple placements.
    if answer.gap() > GOOD_ENOUGH
        && let Some(simple) = simple_placement(problem, candidates, &chosen)
        && simple.2 < seconds
    {
        (placement, chosen, seconds) = simple;
    }
    let bound = if answer.is_optimal() {
        seconds
    } else {
        answer.bound.min(seconds)
    };
    let solved = Solved {
        placement,
        backend: solved.backend.to_string(),
        value: 1e6 * seconds,
        bound: 1e6 * bound,
        relaxation_bound: 1e6 * answer.relaxation_bound.min(seconds),
        open: solved.open,
        failure: solved.failure,
        vram_multiplier: answer.gpu_multipliers.first().copied(),
    };
    Ok((solved, chosen))
}

/// The fastest placement that [`baselines::fitting`] finds with the `chosen` candidates or with one candidate index in every layer.
/// Returns the placement, its candidate indices and its time in seconds.
fn simple_placement(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    chosen: &[usize],
) -> Option<(Placement, Vec<usize>, f64)> {
    let most = candidates.iter().map(Vec::len).max().unwrap_or(0);
    let is_allowed = |index: &usize| {
        let mut layers = candidates.iter();
        layers.all(|layer| layer.get(*index).is_some_and(|one| one.allowed))
    };
    let uniform = (0..most).filter(is_allowed);
    let uniform = uniform.map(|index| vec![index; candidates.len()]);
    let placements = uniform.chain([chosen.to_vec()]).filter_map(|modes| {
        let (placement, seconds) = baselines::fitting(&with_modes(problem, candidates, &modes))?;
        Some((placement, modes, seconds))
    });
    placements.min_by(|one, other| one.2.total_cmp(&other.2))
}

/// The error for a chain without a solution, in lines of the memory account.
fn explain(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    chain: &Chain,
    infeasible: Infeasible,
) -> SolveError {
    match infeasible {
        Infeasible::Gpu { .. } if chain.capacities.len() > 1 => SolveError::PinnedToGpus,
        Infeasible::Gpu { needed } => {
            let least = Placement::cold(problem).with_pinned(problem);
            too_small(
                problem,
                &least,
                Device::Gpu,
                needed + reserve_bytes(problem),
            )
        }
        Infeasible::Cpu { needed } => {
            let least = decomposition::least_ram(chain);
            let least = least.expect("only the memory of the CPU is too small");
            let (placement, chosen) = latency::placement(problem, candidates, &least.taken);
            let least = with_modes(problem, candidates, &chosen);
            too_small(&least, &placement, Device::Cpu, needed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn parts_pinned_to_a_gpu_whose_budget_is_below_the_reserve_do_not_fit() {
        let mut problem = samples::small();
        problem.layers[1].pins.attention = Some(Device::Gpu);
        problem.budget.vram_bytes = reserve_bytes(&problem) - 1;
        let candidates: Vec<Vec<Candidate>> = (problem.layers.iter())
            .map(|layer| {
                vec![Candidate {
                    mode: layer.mode,
                    frequencies: layer.frequencies.clone(),
                    predictor_bytes: layer.predictor_bytes,
                    allowed: true,
                }]
            })
            .collect();
        let options = Options::default();
        let latency = solve_latency(&problem, &candidates, &options).map(|(solved, _)| solved);
        for found in [latency, solve_impact(&problem, &options)] {
            let error = found.err().unwrap();
            let is_small = matches!(
                error,
                SolveError::TooSmall {
                    device: Device::Gpu,
                    ..
                }
            );
            assert!(is_small, "{error}");
        }
    }

    #[test]
    fn a_simple_placement_keeps_the_budget_and_takes_the_fastest_candidates() {
        let mut problem = samples::shaped(4, 640, samples::power_law);
        problem.budget.vram_bytes = reserve_bytes(&problem) + 15_000_000;
        problem.budget.ram_bytes = u64::MAX;
        let candidate = |layer: &crate::Layer, share: f64, allowed| Candidate {
            mode: layer.mode,
            frequencies: layer.frequencies.iter().map(|one| share * one).collect(),
            predictor_bytes: layer.predictor_bytes,
            allowed,
        };
        let of = |layer: &crate::Layer| {
            let shares = [(1.0, true), (0.5, true), (0.25, false)];
            shares
                .map(|(share, allowed)| candidate(layer, share, allowed))
                .to_vec()
        };
        let candidates: Vec<Vec<Candidate>> = problem.layers.iter().map(of).collect();
        let slow = [0; 4];
        let (placement, modes, seconds) = simple_placement(&problem, &candidates, &slow).unwrap();
        assert_eq!(modes, [1; 4]);
        let problem_of = |modes: &[usize]| with_modes(&problem, &candidates, modes);
        let cold = cost::total(&problem_of(&slow), &Placement::cold(&problem)).total;
        assert!(seconds < cold && placement.layers.iter().any(|layer| layer.hot_count > 0));
        let bytes = |device| bytes_on(device, &lines(&problem_of(&modes), &placement));
        assert!(bytes(Device::Gpu) <= problem.budget.vram_bytes);
        problem.budget.ram_bytes = bytes(Device::Cpu);
        assert!(simple_placement(&problem, &candidates, &slow).is_some());
        problem.budget.ram_bytes -= 1;
        assert!(simple_placement(&problem, &candidates, &slow).is_none());
        problem.budget.ram_bytes += 1;
        problem.head_pin = Some(Device::Cpu);
        assert!(
            simple_placement(&problem, &candidates, &slow).is_none(),
            "pins may not be kept"
        );
    }
}
