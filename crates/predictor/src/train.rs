//! Trains the predictor of a layer, as wide as pays.

use powerinfer_artifact::{Digest, Progress, predictor_file::BIAS};
use powerinfer_kernels::{Format, Isa};
use powerinfer_profile::{Profile, Traces};

use crate::{
    PredictorError, Targets,
    calibrate::{Quality, calibrate},
    make::FEWEST_SAMPLES,
    network::{Network, Schedule, Weights},
};

/// Share of the bytes that another rank must save to be worth the training.
const WORTHWHILE: f64 = 0.01;
/// Ranks that are tried, each about half as much again as the one before. Rows of B are stored in
/// blocks of 32, so below that only A gets smaller.
const LADDER: [usize; 16] = [
    16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
];

/// What shapes trained predictors, beside the profile.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// What must be foreseen on held-out tokens.
    pub targets: Targets,
    /// Most bytes of a layer's predictor.
    pub layer_bytes: u64,
    /// Optimiser steps per network.
    pub steps: usize,
    /// Format the weights of the neurons will have, which says what a neuron costs.
    pub quant: Format,
    /// Matrices that each neuron has a row of.
    pub matrices_per_neuron: usize,
    /// Format of the predictors' own weights.
    pub weights: Format,
    /// Seed of initialisation and batches.
    pub seed: u64,
}

/// What a token reads of a layer's FFN under a predictor.
fn cost(network: &Network, quality: Quality, settings: Settings, hidden: usize) -> f64 {
    let row = settings.quant.row_bytes(hidden) as f64;
    let neurons = network.b.as_view().rows() as f64;
    // The gate of those predicted, and the rest of those that the gate leaves alive.
    let others = (settings.matrices_per_neuron - 1) as f64;
    let rows = quality.predicted_density + others * quality.density * quality.recall;
    network.bytes() as f64 + neurons * rows * row
}

/// Looks for the rank at which a token reads least, predictor and neurons together, among those
/// within the byte budget: from a first guess upwards for as long as that pays, else downwards.
/// None where even the narrowest is over the budget.
pub(crate) fn best_network(
    layer: usize,
    profile: &Profile,
    settings: Settings,
    isa: Isa,
    progress: &dyn Progress,
) -> Result<Option<(Network, Quality)>, PredictorError> {
    let traces = profile.traces(layer)?;
    let (training, held_out) = (traces.training.tokens(), traces.held_out.tokens());
    if training < FEWEST_SAMPLES || held_out < FEWEST_SAMPLES {
        return Err(PredictorError::TooFewSamples {
            layer,
            training,
            held_out,
            needed: FEWEST_SAMPLES,
        });
    }
    let mut search = Search {
        layer,
        traces: &traces,
        settings,
        isa,
        progress,
    };
    let hidden = traces.training.hidden_size;
    let neurons = traces.training.active.neurons();
    let within = |rank: &usize| {
        let bytes = rank * settings.weights.row_bytes(hidden)
            + neurons * (settings.weights.row_bytes(*rank) + BIAS.row_bytes(1));
        *rank <= hidden && bytes as u64 <= settings.layer_bytes
    };
    let ladder: Vec<usize> = LADDER.into_iter().filter(within).collect();
    // The more neurons fire, the more there is to foresee.
    let density = 1.0 - profile.document().layers[layer].sparsity;
    let guess = ladder.partition_point(|rank| (*rank as f64) < density * hidden as f64);
    let Some(start) = ladder.len().checked_sub(1).map(|last| guess.min(last)) else {
        return Ok(None);
    };
    let first = search.try_rank(ladder[start], None)?;
    let mut best = first;
    for direction in [1isize, -1] {
        let mut place = start;
        let began_at = best.cost;
        while let Some(next) = place
            .checked_add_signed(direction)
            .filter(|n| *n < ladder.len())
        {
            let tried = search.try_rank(ladder[next], Some(&best.weights))?;
            if tried.cost >= (1.0 - WORTHWHILE) * best.cost {
                break;
            }
            (best, place) = (tried, next);
        }
        if best.cost < began_at {
            break; // wider paid, so narrower does not
        }
    }
    Ok(Some((best.network, best.quality)))
}

/// A network that was tried.
struct Tried {
    weights: Weights,
    network: Network,
    quality: Quality,
    /// Bytes a token reads.
    cost: f64,
}

/// The search for one layer's predictor.
struct Search<'a> {
    layer: usize,
    traces: &'a Traces,
    settings: Settings,
    isa: Isa,
    progress: &'a dyn Progress,
}

impl Search<'_> {
    /// Trains and judges a network of `rank`, from a trained one of another rank where there is
    /// one, which takes half the steps.
    fn try_rank(&mut self, rank: usize, from: Option<&Weights>) -> Result<Tried, PredictorError> {
        let settings = self.settings;
        let numbers = [settings.seed, self.layer as u64, rank as u64].map(u64::to_le_bytes);
        let seed = Digest::of_parts(numbers.iter().map(|bytes| &bytes[..])).leading_bits();
        let samples = &self.traces.training;
        let (start, steps) = match from {
            None => (Weights::random(samples, rank, seed), settings.steps),
            Some(weights) => (weights.at_rank(rank, seed), settings.steps.div_ceil(2)),
        };
        let schedule = Schedule {
            steps,
            seed,
            layer: self.layer,
        };
        let weights = start.train(samples, schedule, || Ok(self.progress.advance(0)?))?;
        let network = weights.pack(settings.weights);
        let quality = calibrate(&network, &self.traces.held_out, settings.targets, self.isa);
        let cost = cost(&network, quality, settings, samples.hidden_size);
        self.progress.detail(&format!(
            "layer {} rank {rank}: {} bytes, predicts {:.1} % of the neurons, a token reads {cost:.0} bytes",
            self.layer,
            network.bytes(),
            100.0 * quality.predicted_density,
        ));
        Ok(Tried {
            weights,
            network,
            quality,
            cost,
        })
    }
}
