//! The search for the predictor of a layer, calculated or trained, and its rank.

use std::time::Instant;

use powerinfer_artifact::{Digest, Progress};
use powerinfer_kernels::Isa;
use powerinfer_profile::Traces;

use crate::{
    Method, PredictorError, Settings,
    calibrate::{Quality, calibrate},
    closed_form::ClosedForm,
    learn::{Schedule, learn},
    loss::MissCost,
    network::{Network, Weights},
};

/// Share of the bytes that another rank must save for the search to continue.
const WORTHWHILE: f64 = 0.01;
/// Share of the inactive predicted neurons that training a calculated network is assumed to remove; 29% on the demo.
const LIKELY_SAVED: f64 = 0.25;

/// Statistics of a layer from the profile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerStatistics {
    pub(crate) layer: usize,
    /// Share of the neurons that are active on a token.
    pub(crate) density: f64,
    /// Smallest share of the neurons with 80% of the activations.
    pub(crate) most: f64,
}

/// A network of the search.
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
    /// `[neurons, hidden]`.
    pub(crate) gate: &'a [f32],
    /// Directions that were calculated for the largest rank so far.
    pub(crate) closed_form: Option<ClosedForm>,
    pub(crate) settings: Settings,
    /// Time after which calculated networks are not trained further.
    pub(crate) deadline: Option<Instant>,
    pub(crate) isa: Isa,
    pub(crate) progress: &'a dyn Progress,
    /// Candidate ranks within the byte budget, ascending; at least one.
    pub(crate) ladder: Vec<usize>,
    pub(crate) log_odds: Vec<f32>,
    pub(crate) cost: MissCost,
}

impl Search<'_> {
    /// The network with the fewest bytes read per token.
    pub(crate) fn cheapest(&mut self) -> Result<Tried, PredictorError> {
        if self.settings.method == Method::Trained {
            return self.climb(self.guess(1.0), Self::try_rank);
        }
        // A linear unit replaces two with ReLU, so the search starts at half the rank.
        let calculated = self.climb(self.guess(0.5), |search, rank, _| search.calculate(rank))?;
        if self.settings.method == Method::ClosedForm || !self.promises_savings(&calculated) {
            return Ok(calculated);
        }
        let trained = self.train(&calculated.weights, self.settings.steps.div_ceil(2))?;
        let is_better = trained.cost < (1.0 - WORTHWHILE) * calculated.cost;
        Ok(if is_better { trained } else { calculated })
    }

    /// Index of the first candidate rank: the higher the density, the larger.
    pub(crate) fn guess(&self, share: f64) -> usize {
        let rank = share * self.known.density * self.traces.training.hidden_size as f64;
        let guess = self.ladder.partition_point(|tried| (*tried as f64) < rank);
        guess.min(self.ladder.len() - 1)
    }

    /// Finds the rank with the fewest bytes read per token: from candidate `start` upwards while that pays, else downwards.
    /// `try_rank` is given the best network so far.
    fn climb(
        &mut self,
        start: usize,
        mut try_rank: impl FnMut(&mut Self, usize, Option<&Tried>) -> Result<Tried, PredictorError>,
    ) -> Result<Tried, PredictorError> {
        let mut best = try_rank(self, self.ladder[start], None)?;
        for direction in [1isize, -1] {
            let mut index = start;
            let began_at = best.cost;
            while let Some(next) = index
                .checked_add_signed(direction)
                .filter(|n| *n < self.ladder.len())
            {
                let tried = try_rank(self, self.ladder[next], Some(&best))?;
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

    /// Whether training would probably save enough, and there is time for it.
    fn promises_savings(&self, calculated: &Tried) -> bool {
        let Quality {
            predicted_density,
            density,
            recall,
            ..
        } = calculated.quality;
        let wrong = self.bytes_read(predicted_density - density * recall, 0.0);
        let saved = LIKELY_SAVED * wrong / calculated.cost;
        let is_late = self.deadline.is_some_and(|end| Instant::now() >= end);
        let is_worth = saved >= self.settings.min_saving;
        self.progress.detail(&format!(
            "layer {}: training may save {:.1}% of the bytes{}",
            self.known.layer,
            100.0 * saved,
            match (is_worth, is_late) {
                (false, _) => ", too little",
                (true, true) => ", but there is no time left",
                (true, false) => "",
            }
        ));
        is_worth && !is_late
    }

    /// Bytes of a layer's neurons read per token: the gate rows of the predicted neurons, and the other rows of those that are
    /// active.
    pub(crate) fn bytes_read(&self, predicted: f64, active: f64) -> f64 {
        let samples = &self.traces.training;
        let row = self.settings.quant.row_bytes(samples.hidden_size) as f64;
        let others = (self.settings.matrices_per_neuron - 1) as f64;
        samples.active.neurons() as f64 * (predicted + others * active) * row
    }

    /// Calculates and evaluates a network of `rank`.
    fn calculate(&mut self, rank: usize) -> Result<Tried, PredictorError> {
        let found = self.closed_form.take().filter(|found| found.rank() >= rank);
        let closed_form = match found {
            Some(found) => found,
            None => {
                // Enough for the next rank of the search too.
                let next = self.ladder.iter().find(|next| **next > rank);
                ClosedForm::new(
                    &self.traces.training,
                    self.gate,
                    *next.unwrap_or(&rank),
                    &self.log_odds,
                    self.cost,
                )?
            }
        };
        self.progress.advance(0)?;
        let weights = closed_form.weights(rank)?;
        self.closed_form = Some(closed_form);
        if !weights.bias.iter().sum::<f32>().is_finite() {
            let layer = self.known.layer;
            return Err(PredictorError::Diverged { layer });
        }
        Ok(self.evaluate(weights, 0, None))
    }

    /// Trains and evaluates a network of `rank`; starting from a trained one of another rank takes half the steps.
    pub(crate) fn try_rank(
        &mut self,
        rank: usize,
        from: Option<&Tried>,
    ) -> Result<Tried, PredictorError> {
        let (settings, seed) = (self.settings, self.seed(rank));
        match from {
            None => {
                let (hidden, bias) = (self.traces.training.hidden_size, self.log_odds.clone());
                let start = Weights::random(hidden, bias, rank, seed);
                self.train(&start, settings.steps)
            }
            Some(tried) => {
                let start = tried.weights.at_rank(rank, seed);
                self.train(&start, settings.steps.div_ceil(2))
            }
        }
    }

    fn seed(&self, rank: usize) -> u64 {
        let numbers = [self.settings.seed, self.known.layer as u64, rank as u64];
        let numbers = numbers.map(u64::to_le_bytes);
        Digest::of_parts(numbers.iter().map(|bytes| &bytes[..])).leading_bits()
    }

    /// Trains a network for at most `steps`, and evaluates it.
    fn train(&mut self, start: &Weights, steps: usize) -> Result<Tried, PredictorError> {
        let schedule = Schedule {
            steps,
            patience: self.settings.patience,
            seed: self.seed(start.rank),
            layer: self.known.layer,
            cost: self.cost,
            deadline: self.deadline,
        };
        let learnt = learn(start, &self.traces.training, schedule, || {
            Ok(self.progress.advance(0)?)
        })?;
        Ok(self.evaluate(learnt.weights, learnt.steps, Some(learnt.loss)))
    }

    /// Evaluates a network after `steps` of training with this loss.
    fn evaluate(&self, weights: Weights, steps: usize, loss: Option<f64>) -> Tried {
        let settings = self.settings;
        let network = weights.pack(settings.weights, steps);
        let quality = calibrate(&network, &self.traces.held_out, settings.targets, self.isa);
        let predicted = quality.predicted_density;
        let cost =
            network.bytes() as f64 + self.bytes_read(predicted, quality.density * quality.recall);
        let made = match loss {
            Some(loss) => format!("{steps} steps, loss {loss:.4}"),
            None => "calculated".to_owned(),
        };
        self.progress.detail(&format!(
            "layer {} rank {}: {made}; {} bytes, predicts {:.1}% of the neurons, a token reads {cost:.0} bytes",
            self.known.layer,
            network.rank,
            network.bytes(),
            100.0 * predicted,
        ));
        Tried {
            weights,
            network,
            quality,
            cost,
        }
    }
}
