//! The search for the rank of a layer's predictor.

use powerinfer_artifact::{Digest, Progress};
use powerinfer_kernels::Isa;
use powerinfer_profile::Traces;

use crate::{
    PredictorError, Settings,
    calibrate::{Quality, calibrate},
    learn::{Schedule, learn},
    loss::MissCost,
    network::{Network, Weights},
};

/// Share of the bytes that another rank must save for the search to continue.
const WORTHWHILE: f64 = 0.01;

/// Statistics of a layer from the profile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerStatistics {
    pub(crate) layer: usize,
    /// Share of the neurons that are active on a token.
    pub(crate) density: f64,
    /// Smallest share of the neurons with 80% of the activations.
    pub(crate) most: f64,
}

/// A trained network of the search.
pub(crate) struct Tried {
    weights: Weights,
    pub(crate) network: Network,
    pub(crate) quality: Quality,
    /// Bytes read per token.
    pub(crate) cost: f64,
}

/// The search for the predictor of a layer.
pub(crate) struct Search<'a> {
    pub(crate) known: LayerStatistics,
    pub(crate) traces: &'a Traces,
    pub(crate) settings: Settings,
    pub(crate) isa: Isa,
    pub(crate) progress: &'a dyn Progress,
    /// Candidate ranks within the byte budget, ascending; at least one.
    pub(crate) ladder: Vec<usize>,
    pub(crate) log_odds: Vec<f32>,
    pub(crate) cost: MissCost,
}

impl Search<'_> {
    /// Index of the first candidate rank: the higher the density, the larger.
    pub(crate) fn guess(&self) -> usize {
        let rank = self.known.density * self.traces.training.hidden_size as f64;
        let guess = self.ladder.partition_point(|tried| (*tried as f64) < rank);
        guess.min(self.ladder.len() - 1)
    }

    /// Finds the rank with the fewest bytes read per token: from the first guess upwards while that pays, else downwards.
    pub(crate) fn cheapest(&mut self) -> Result<Tried, PredictorError> {
        let start = self.guess();
        let mut best = self.try_rank(self.ladder[start], None)?;
        for direction in [1isize, -1] {
            let mut index = start;
            let began_at = best.cost;
            while let Some(next) = index
                .checked_add_signed(direction)
                .filter(|n| *n < self.ladder.len())
            {
                let tried = self.try_rank(self.ladder[next], Some(&best))?;
                if tried.cost >= (1.0 - WORTHWHILE) * best.cost {
                    break;
                }
                (best, index) = (tried, next);
            }
            if best.cost < began_at {
                break; // a larger rank paid, so a smaller one does not
            }
        }
        Ok(best)
    }

    /// Bytes of a layer's neurons read per token: the gate rows of the predicted neurons, and the other rows of those that are
    /// active.
    pub(crate) fn bytes_read(&self, predicted: f64, active: f64) -> f64 {
        let samples = &self.traces.training;
        let row = self.settings.quant.row_bytes(samples.hidden_size) as f64;
        let others = (self.settings.matrices_per_neuron - 1) as f64;
        samples.active.neurons() as f64 * (predicted + others * active) * row
    }

    /// Trains and evaluates a network of `rank`; starting from a trained one of another rank takes half the steps.
    pub(crate) fn try_rank(
        &mut self,
        rank: usize,
        from: Option<&Tried>,
    ) -> Result<Tried, PredictorError> {
        let (settings, layer) = (self.settings, self.known.layer);
        let numbers = [settings.seed, layer as u64, rank as u64].map(u64::to_le_bytes);
        let seed = Digest::of_parts(numbers.iter().map(|bytes| &bytes[..])).leading_bits();
        let samples = &self.traces.training;
        let (start, steps) = match from {
            None => {
                let bias = self.log_odds.clone();
                let start = Weights::random(samples.hidden_size, bias, rank, seed);
                (start, settings.steps)
            }
            Some(tried) => {
                let start = tried.weights.at_rank(rank, seed);
                (start, settings.steps.div_ceil(2))
            }
        };
        let schedule = Schedule {
            steps,
            patience: settings.patience,
            seed,
            layer,
            cost: self.cost,
        };
        let learnt = learn(&start, samples, schedule, || {
            Ok(self.progress.advance(0)?)
        })?;
        let network = learnt.weights.pack(settings.weights);
        let quality = calibrate(&network, &self.traces.held_out, settings.targets, self.isa);
        let predicted = quality.predicted_density;
        let cost =
            network.bytes() as f64 + self.bytes_read(predicted, quality.density * quality.recall);
        self.progress.detail(&format!(
            "layer {layer} rank {rank}: {} steps, loss {:.4}; {} bytes, predicts {:.1}% of the neurons, a token reads {cost:.0} bytes",
            learnt.steps,
            learnt.loss,
            network.bytes(),
            100.0 * predicted,
        ));
        Ok(Tried {
            weights: learnt.weights,
            network,
            quality,
            cost,
        })
    }
}
