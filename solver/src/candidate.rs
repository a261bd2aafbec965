//! Execution modes that a layer may take.

use crate::{LayerMode, Problem};

/// An execution mode that a layer may take.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The policy and what a token reads under it.
    pub mode: LayerMode,
    /// Activation frequency of each neuron under this mode, in falling order.
    pub frequencies: Vec<f64>,
    /// Bytes of the predictor, sign bits or scores that select the neurons.
    pub predictor_bytes: u64,
    /// Whether the mode may be chosen; if not, its cost is reported for comparison only.
    pub allowed: bool,
}

/// `problem` with the chosen candidate of each layer.
pub(crate) fn with_modes(
    problem: &Problem,
    candidates: &[Vec<Candidate>],
    chosen: &[usize],
) -> Problem {
    let mut problem = problem.clone();
    for ((layer, candidates), chosen) in problem.layers.iter_mut().zip(candidates).zip(chosen) {
        let candidate = &candidates[*chosen];
        layer.mode = candidate.mode;
        layer.frequencies.clone_from(&candidate.frequencies);
        layer.predictor_bytes = candidate.predictor_bytes;
    }
    problem
}
