//! Which way to run each layer's FFN, and where: the one that takes the least time.

use std::time::Instant;

use powerinfer_artifact::plan::{Objective, Plan};

use crate::{
    Layer, LayerMode, Options, Problem, SolveError, SolveReport, Work, cost, latency,
    places::Places,
    problem::validate_neurons,
    solve::{Solved, solve_impact, solve_latency},
    write::write,
};

/// Rounds after which the best placement so far is taken.
const ROUNDS: usize = 4;

/// One way that a layer could go.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// What is read.
    pub mode: LayerMode,
    /// Share of tokens for which each neuron is active under it, hottest first.
    pub frequencies: Vec<f64>,
    /// Memory that finding its neurons takes, used or not: predictor, signs, scores.
    pub predictor_bytes: u64,
    /// Whether it may be taken, or is only there to be compared with.
    pub allowed: bool,
}

/// What a candidate takes in a placement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Price {
    /// Predicted time of the layer's FFN with what predicts it, for one token.
    pub seconds: f64,
    /// What a token reads of it.
    pub work: Work,
}

/// A placement, and which way each layer goes in it.
#[derive(Debug, Clone)]
pub struct Decision {
    /// The placement.
    pub plan: Plan,
    /// How it was solved.
    pub report: SolveReport,
    /// Per layer, which of its candidates was taken.
    pub chosen: Vec<usize>,
    /// Per layer, what each of its candidates takes in this placement.
    pub prices: Vec<Vec<Price>>,
}

/// Places `problem`, whose layers may each go one of the ways in `candidates`; of equally quick ones
/// the first is taken.
///
/// Where time is the objective, ways and places are chosen together. The paper's knows no ways: there
/// a placement is found, each layer takes its quickest way in it, and so on until nothing changes.
///
/// # Panics
///
/// When there are not candidates for each layer, one of them allowed.
pub fn decide(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    options: &Options,
) -> Result<Decision, SolveError> {
    let started = Instant::now();
    check(problem, candidates, options)?;
    let (with_modes, solved, chosen) = match options.objective {
        Objective::Latency => {
            let (solved, chosen) = solve_latency(problem, candidates, options)?;
            (take(problem, candidates, &chosen), solved, chosen)
        }
        Objective::Impact => by_impact(problem, candidates, options)?,
    };
    let prices = prices(&with_modes, candidates, &solved.places);
    let (plan, report) = write(&with_modes, options, solved, started);
    Ok(Decision {
        plan,
        report,
        chosen,
        prices,
    })
}

/// Checks everything that solving relies on.
fn check(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    options: &Options,
) -> Result<(), SolveError> {
    assert_eq!(candidates.len(), problem.layers.len(), "a list per layer");
    problem.validate()?;
    if !options.backend.is_built_in() {
        return Err(SolveError::NoBackend {
            backend: options.backend,
        });
    }
    for (layer, candidates) in candidates.iter().enumerate() {
        assert!(
            candidates.iter().any(|candidate| candidate.allowed),
            "a layer may go some way"
        );
        for candidate in candidates {
            validate_neurons(layer, &candidate.mode, &candidate.frequencies)?;
        }
        let groups = problem.layers[layer]
            .frequencies
            .len()
            .div_ceil(problem.group_size);
        if groups >= latency::MOST_GROUPS || candidates.len() > latency::MAX_MODES {
            return Err(SolveError::TooManyGroups { layer, groups });
        }
    }
    Ok(())
}

/// The best placement by the paper's objective, and the ways that are quickest in it.
fn by_impact(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    options: &Options,
) -> Result<(Problem, Solved, Vec<usize>), SolveError> {
    let first = |candidates: &Vec<Candidate>| candidates.iter().position(|one| one.allowed);
    let mut chosen: Vec<usize> = candidates
        .iter()
        .map(|candidates| first(candidates).expect("a layer may go some way"))
        .collect();
    let mut best: Option<(f64, Problem, Solved, Vec<usize>)> = None;
    for _ in 0..ROUNDS {
        let with_modes = take(problem, candidates, &chosen);
        let solved = solve_impact(&with_modes, options)?;
        let prices = prices(&with_modes, candidates, &solved.places);
        let quickest: Vec<usize> = prices
            .iter()
            .zip(candidates)
            .map(|(prices, candidates)| quickest(prices, candidates))
            .collect();
        let time = cost::total(&with_modes, &solved.places).total;
        if best.as_ref().is_none_or(|(least, ..)| time < *least) {
            best = Some((time, with_modes, solved, chosen.clone()));
        }
        if quickest == chosen {
            break;
        }
        chosen = quickest;
    }
    let (_, problem, solved, chosen) = best.expect("there is at least one round");
    Ok((problem, solved, chosen))
}

impl Candidate {
    /// Has `layer` go this way.
    fn give(&self, layer: &mut Layer) {
        layer.mode = self.mode;
        layer.frequencies.clone_from(&self.frequencies);
        layer.predictor_bytes = self.predictor_bytes;
    }
}

/// The problem whose layers go the `chosen` ways.
pub(crate) fn take(problem: &Problem, candidates: &[Vec<Candidate>], chosen: &[usize]) -> Problem {
    let mut problem = problem.clone();
    for ((layer, candidates), chosen) in problem.layers.iter_mut().zip(candidates).zip(chosen) {
        candidates[*chosen].give(layer);
    }
    problem
}

/// What every candidate takes where its layer's neurons are.
fn prices(problem: &Problem, candidates: &[Vec<Candidate>], places: &Places) -> Vec<Vec<Price>> {
    let layers = places.layers.iter().zip(candidates);
    let prices = layers.map(|(place, candidates)| {
        let price = |candidate: &Candidate| {
            let (mode, frequencies) = (&candidate.mode, &candidate.frequencies);
            let active: f64 = candidate.frequencies.iter().sum();
            let count = candidate.frequencies.len() as f64;
            Price {
                seconds: cost::ffn_with_prediction(problem, mode, frequencies, place).total,
                work: candidate.mode.work(count, active),
            }
        };
        candidates.iter().map(price).collect()
    });
    prices.collect()
}

/// The first of the quickest that may be taken.
fn quickest(prices: &[Price], candidates: &[Candidate]) -> usize {
    let mut allowed = (0..prices.len()).filter(|place| candidates[*place].allowed);
    let first = allowed.next().expect("a layer may go some way");
    allowed.fold(first, |best, next| {
        match prices[next].seconds < prices[best].seconds {
            true => next,
            false => best,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{NeuronShape, Prediction, samples};
    use powerinfer_artifact::plan::Policy;

    /// Candidates of every layer of `problem`: dense, exact, and predicted with a predictor of
    /// `rows` rows and `bytes` bytes.
    fn candidates(problem: &Problem, bytes: f64, rows: f64) -> Vec<Vec<Candidate>> {
        let of = |layer: &crate::Layer| {
            let neuron = NeuronShape {
                bytes: layer.neuron_bytes,
                matrices: 3,
            };
            let predicted = Prediction {
                work: Work {
                    bytes,
                    rows,
                    sums: 0.0,
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
    fn a_layer_goes_its_quickest_way() {
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
            "its bytes cost more than they save"
        );
        problem.hardware.cpu.row_seconds = 1e-6;
        let many_rows = policies(&problem, 10_000.0, 5120.0);
        assert_eq!(many_rows, [Policy::Exact; 3], "its rows do");
        problem.layers[1].frequencies = vec![1.0; 512];
        let busy = policies(&problem, 10_000.0, 5120.0);
        assert_eq!(busy[1], Policy::Dense, "no neuron is silent");
    }

    #[test]
    fn nothing_chosen_is_slower_than_what_was_left() {
        let problem = samples::shaped(4, 256, samples::power_law);
        for vram in [0, 700 << 20, 24 << 30] {
            let mut problem = problem.clone();
            problem.budget.vram_bytes = vram;
            let candidates = candidates(&problem, 20_000.0, 300.0);
            let decision = decide(&problem, &candidates, &Options::default()).unwrap();
            for (prices, chosen) in decision.prices.iter().zip(&decision.chosen) {
                let chosen = prices[*chosen].seconds;
                assert!(prices.iter().all(|price| chosen <= price.seconds));
            }
        }
    }
}
