//! Chooses the execution mode of each layer together with the placement.

use std::time::Instant;

use powerinfer_artifact::plan::{Objective, Plan};

use crate::{
    Candidate, Options, Problem, ReadCost, SolveError, SolveReport,
    candidate::with_modes,
    cost, latency,
    placement::Placement,
    problem::validate_neurons,
    solve::{Solved, solve_impact, solve_latency},
    write::write,
};

/// Rounds of placing and choosing modes in turn, for the paper's objective.
const ROUNDS: usize = 4;

/// Cost of a candidate in a given placement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CandidateCost {
    /// Predicted seconds per token of the layer's FFN, prediction included.
    pub seconds: f64,
    /// Weights that a token reads.
    pub work: ReadCost,
}

/// A placement with the execution mode of each layer.
#[derive(Debug, Clone)]
pub struct Decision {
    /// The placement.
    pub plan: Plan,
    /// Statistics of the solver.
    pub report: SolveReport,
    /// Per layer, the index of the chosen candidate.
    pub chosen: Vec<usize>,
    /// Per layer and candidate, its cost in this placement.
    pub costs: Vec<Vec<CandidateCost>>,
}

/// Chooses a placement for `problem` and an execution mode for each layer among its `candidates`. If candidates are
/// equally fast, the first is taken.
///
/// For the objective `latency`, modes and placement are optimised together. The objective `impact` does not
/// depend on modes: a placement is found, each layer takes its fastest mode in it, and both steps repeat
/// until nothing changes.
///
/// # Errors
///
/// When the problem is invalid, when no placement keeps the budget, or when the solver that `options` name is
/// not built in.
///
/// # Panics
///
/// When `candidates` does not have one list per layer, or a list has no allowed candidate.
pub fn decide(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    options: &Options,
) -> Result<Decision, SolveError> {
    let started = Instant::now();
    check(problem, candidates, options)?;
    let solve = |problem: &Problem| match options.objective {
        Objective::Latency => solve_latency(problem, candidates, options),
        Objective::Impact => alternate(problem, candidates, options),
    };
    let copied = |(solved, chosen): &(Solved, Vec<usize>)| {
        let problem = with_modes(problem, candidates, chosen);
        solved.placement.copied_bytes(&problem)
    };
    let mut found = solve(problem)?;
    // If the placement does not need all the room for copies, solving again without the unused room may improve it.
    let copied_bytes = copied(&found);
    if copied_bytes != problem.copied_bytes {
        let smaller = Problem {
            copied_bytes,
            ..problem.clone()
        };
        let seconds = |(solved, chosen): &(Solved, Vec<usize>)| {
            let problem = with_modes(problem, candidates, chosen);
            cost::total(&problem, &solved.placement).total
        };
        // For the paper's objective, more room can make a plan slower or leave too little for pinned neurons.
        if let Ok(again) = solve(&smaller)
            && copied(&again).fits(copied_bytes)
            && seconds(&again) <= seconds(&found)
        {
            found = again;
        }
    }
    let (solved, chosen) = found;
    let problem = with_modes(problem, candidates, &chosen);
    let costs = costs(&problem, candidates, &solved.placement);
    let (plan, report) = write(&problem, options, solved, started);
    Ok(Decision {
        plan,
        report,
        chosen,
        costs,
    })
}

/// Checks everything that the solver relies on.
fn check(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    options: &Options,
) -> Result<(), SolveError> {
    assert_eq!(
        candidates.len(),
        problem.layers.len(),
        "one list of candidates per layer"
    );
    problem.validate()?;
    if !options.backend.is_built_in() {
        return Err(SolveError::NoBackend {
            backend: options.backend,
        });
    }
    for (layer, candidates) in candidates.iter().enumerate() {
        assert!(
            candidates.iter().any(|candidate| candidate.allowed),
            "a layer has an allowed candidate"
        );
        for candidate in candidates {
            validate_neurons(layer, &candidate.mode, &candidate.frequencies)?;
        }
        let groups = problem.layers[layer]
            .frequencies
            .len()
            .div_ceil(problem.group_size);
        if groups >= latency::MAX_GROUPS || candidates.len() > latency::MAX_MODES {
            return Err(SolveError::TooManyGroups { layer, groups });
        }
    }
    Ok(())
}

/// Alternates between the best placement by the paper's objective and the fastest modes in it. Returns the
/// fastest of these placements, and its modes.
fn alternate(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    options: &Options,
) -> Result<(Solved, Vec<usize>), SolveError> {
    let first = |candidates: &Vec<Candidate>| candidates.iter().position(|one| one.allowed);
    let mut chosen: Vec<usize> = candidates
        .iter()
        .map(|candidates| first(candidates).expect("a layer has an allowed candidate"))
        .collect();
    let mut best: Option<(f64, Solved, Vec<usize>)> = None;
    for _ in 0..ROUNDS {
        let problem = with_modes(problem, candidates, &chosen);
        let solved = solve_impact(&problem, options)?;
        let costs = costs(&problem, candidates, &solved.placement);
        let fastest: Vec<usize> = costs
            .iter()
            .zip(candidates)
            .map(|(costs, candidates)| fastest(costs, candidates))
            .collect();
        let time = cost::total(&problem, &solved.placement).total;
        if best.as_ref().is_none_or(|(least, ..)| time < *least) {
            best = Some((time, solved, chosen.clone()));
        }
        if fastest == chosen {
            break;
        }
        chosen = fastest;
    }
    let (_, solved, chosen) = best.expect("there is at least one round");
    Ok((solved, chosen))
}

/// Per layer, the cost of every candidate with the layer's neurons placed as in `placement`.
fn costs(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    placement: &Placement,
) -> Vec<Vec<CandidateCost>> {
    let layers = placement.layers.iter().zip(candidates);
    let costs = layers.map(|(place, candidates)| {
        let cost = |candidate: &Candidate| {
            let (mode, frequencies) = (&candidate.mode, &candidate.frequencies);
            let active: f64 = frequencies.iter().sum();
            CandidateCost {
                seconds: cost::ffn_with_prediction(problem, mode, frequencies, place).total,
                work: mode.work(frequencies.len() as f64, active),
            }
        };
        candidates.iter().map(cost).collect()
    });
    costs.collect()
}

/// Index of the fastest allowed candidate, the first one of several.
fn fastest(costs: &[CandidateCost], candidates: &[Candidate]) -> usize {
    let mut allowed = (0..costs.len()).filter(|index| candidates[*index].allowed);
    let first = allowed.next().expect("a layer has an allowed candidate");
    allowed.fold(first, |best, next| {
        if costs[next].seconds < costs[best].seconds {
            next
        } else {
            best
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LayerMode, NeuronShape, Prediction, samples};
    use powerinfer_artifact::plan::Policy;

    /// Candidates of every layer of `problem`: `dense`, `exact`, and `predicted` with a predictor of `rows`
    /// rows and `bytes` bytes.
    fn candidates(problem: &Problem, bytes: f64, rows: f64) -> Vec<Vec<Candidate>> {
        let of = |layer: &crate::Layer| {
            let neuron = NeuronShape {
                bytes: layer.neuron_bytes,
                matrices: 3,
            };
            let predicted = Prediction {
                work: ReadCost {
                    bytes,
                    scattered_rows: rows,
                    axpy_rows: 0.0,
                },
                predicted_per_active: 1.5,
                recall: 1.0,
            };
            let frequencies = &layer.frequencies;
            let modes = [
                (LayerMode::dense(neuron), vec![1.0; frequencies.len()]),
                (LayerMode::exact(neuron), frequencies.clone()),
                (
                    LayerMode::predicted(Policy::Predicted, neuron, predicted),
                    frequencies.clone(),
                ),
            ];
            modes
                .map(|(mode, frequencies)| Candidate {
                    mode,
                    frequencies,
                    predictor_bytes: 10_000,
                    allowed: true,
                })
                .to_vec()
        };
        problem.layers.iter().map(of).collect()
    }

    fn policies(problem: &Problem, bytes: f64, rows: f64) -> Vec<Policy> {
        let candidates = candidates(problem, bytes, rows);
        let decision = decide(problem, &candidates, &Options::default()).unwrap();
        let layers = decision.plan.layers.iter();
        layers.map(|layer| layer.policy).collect()
    }

    #[test]
    fn a_layer_takes_its_fastest_mode() {
        let mut problem = samples::shaped(3, 512, |_, neuron| 0.4 / (1.0 + neuron as f64 / 8.0));
        problem.budget.vram_bytes = 0;
        problem.hardware.cpu.row_seconds = 0.0;
        problem.hardware.cpu.kernel_seconds = 0.0;
        let cheap = policies(&problem, 10_000.0, 512.0);
        assert_eq!(cheap, [Policy::Predicted; 3]);
        let large = policies(&problem, 3e6, 512.0);
        assert_eq!(
            large,
            [Policy::Exact; 3],
            "the bytes of the predictor cost more than they save"
        );
        problem.hardware.cpu.row_seconds = 1e-6;
        let many_rows = policies(&problem, 10_000.0, 5120.0);
        assert_eq!(
            many_rows,
            [Policy::Exact; 3],
            "the rows of the predictor cost more than they save"
        );
        problem.layers[1].frequencies = vec![1.0; 512];
        let busy = policies(&problem, 10_000.0, 5120.0);
        assert_eq!(busy[1], Policy::Dense, "every neuron is active");
    }

    #[test]
    fn no_candidate_is_faster_than_the_chosen_one() {
        let problem = samples::shaped(4, 256, samples::power_law);
        for vram in [0, 700 << 20, 24 << 30] {
            let mut problem = problem.clone();
            problem.budget.vram_bytes = vram;
            let candidates = candidates(&problem, 20_000.0, 300.0);
            let decision = decide(&problem, &candidates, &Options::default()).unwrap();
            for (costs, chosen) in decision.costs.iter().zip(&decision.chosen) {
                let chosen = costs[*chosen].seconds;
                assert!(costs.iter().all(|cost| chosen <= cost.seconds));
            }
        }
    }
}
