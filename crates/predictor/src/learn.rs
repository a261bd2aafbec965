//! Trains a network with early stopping.
//!
//! A sixteenth of the training tokens is used for validation. The held-out part of the samples is not involved; it is for
//! evaluation only.

use std::{f64::consts::PI, time::Instant};

use candle_core::{Device, Tensor};
use powerinfer_artifact::random::Random;
use powerinfer_profile::TracePart;

use crate::{
    PredictorError,
    descent::{Batch, Descent},
    loss::{Labels, MissCost},
    network::Weights,
};

/// Tokens per optimiser step.
const BATCH: usize = 256;
/// Tokens that are read before their pages are released.
const PIECE: usize = 32;
/// Peak learning rate of the cosine schedule.
const LEARNING_RATE: f64 = 4e-3;
/// Warm-up steps.
const WARM_UP: usize = 20;
/// Steps between two validations.
const VALIDATION_INTERVAL: usize = 20;
/// One of `VALIDATED` tokens is used for validation, if there are enough.
const VALIDATED: usize = 16;
/// Largest number of validation tokens.
const MOST_VALIDATED: usize = 1024;
/// Relative improvement between two validations below which the schedule is accelerated.
const PROGRESS: f64 = 0.01;
/// Relative improvement that resets the patience.
const WORTHWHILE: f64 = 0.001;
/// Largest acceleration of the schedule while the loss improves.
const FASTEST: f64 = 8.0;
/// Steps until the end of the schedule once the patience is exhausted.
const COOL_DOWN: f64 = 60.0;

/// Schedule of a training run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Schedule {
    /// Limit of steps.
    pub(crate) steps: usize,
    /// Early stopping: steps without improvement.
    pub(crate) patience: usize,
    pub(crate) seed: u64,
    pub(crate) layer: usize,
    pub(crate) cost: MissCost,
    /// Time after which the learning rate falls quickly and training ends.
    pub(crate) deadline: Option<Instant>,
}

/// Result of a training run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Learnt {
    /// The weights with the lowest validation loss.
    pub(crate) weights: Weights,
    pub(crate) steps: usize,
    /// Validation loss.
    pub(crate) loss: f64,
}

/// Split of the tokens into training and validation.
#[derive(Debug, Clone, Copy)]
struct Split {
    tokens: usize,
    /// The last of every `stride` tokens is for validation.
    stride: usize,
}

impl Split {
    /// Few samples have a larger share for validation, since a loss on a handful is meaningless.
    fn new(tokens: usize) -> Self {
        let stride = (tokens / 64).clamp(2, VALIDATED);
        Self { tokens, stride }
    }

    fn learning_count(self) -> usize {
        self.tokens - self.tokens / self.stride
    }

    /// Token index of training token `number`.
    fn learning(self, number: usize) -> usize {
        number + number / (self.stride - 1)
    }

    /// Validation tokens, at most [`MOST_VALIDATED`], evenly spread.
    fn validation(self) -> Vec<usize> {
        let count = self.tokens / self.stride;
        let used = count.min(MOST_VALIDATED);
        let token = |place: usize| (place * count / used + 1) * self.stride - 1;
        (0..used).map(token).collect()
    }
}

/// Trains from `start` on `samples`; `between` runs after every step and may abort.
///
/// The learning rate follows a cosine over `steps`. When a validation shows little improvement, the rest of the schedule is
/// accelerated, so that easy layers take a fraction of the steps but always end at a low rate.
pub(crate) fn learn(
    start: &Weights,
    samples: &TracePart,
    schedule: Schedule,
    mut between: impl FnMut() -> Result<(), PredictorError>,
) -> Result<Learnt, PredictorError> {
    let mut descent = Descent::new(start);
    let split = Split::new(samples.tokens());
    let mut random = Random::new(schedule.seed);
    let learning = split.learning_count();
    let mut next_batch = || {
        let tokens = (0..BATCH.min(learning)).map(|_| split.learning(random.below(learning)));
        batch(samples, &tokens.collect::<Vec<_>>(), schedule.cost)
    };
    let validation = batch(samples, &split.validation(), schedule.cost)?;
    let diverged = PredictorError::Diverged {
        layer: schedule.layer,
    };
    let mut best = Learnt {
        weights: start.clone(),
        steps: 0,
        loss: descent.loss(&validation)?,
    };
    if !best.loss.is_finite() {
        return Err(diverged);
    }
    // Loss at the last validation, and at the last improvement.
    let (mut before, mut improved, mut improved_at) = (best.loss, best.loss, 0);
    let (mut progress, mut pace) = (0.0, 1.0);
    let mut batch = next_batch()?;
    for step in 1..=schedule.steps {
        let warm = (step as f64 / WARM_UP as f64).min(1.0);
        let learning_rate = LEARNING_RATE * warm * (0.5 + 0.5 * (PI * progress).cos());
        // The next batch is read in parallel with this step.
        let (stepped, read) = rayon::join(|| descent.step(&batch, learning_rate), &mut next_batch);
        batch = read?;
        if !stepped? {
            return Err(diverged);
        }
        between()?;
        progress += pace / schedule.steps as f64;
        let is_last = step == schedule.steps || progress >= 1.0;
        if !is_last && step % VALIDATION_INTERVAL != 0 {
            continue;
        }
        let loss = descent.loss(&validation)?;
        if !loss.is_finite() {
            return Err(diverged);
        }
        if loss < best.loss {
            best = Learnt {
                weights: descent.weights(),
                steps: step,
                loss,
            };
        }
        if loss < (1.0 - WORTHWHILE) * improved {
            (improved, improved_at) = (loss, step);
        }
        if is_last {
            best.steps = step;
            break;
        }
        let is_late = schedule.deadline.is_some_and(|end| Instant::now() >= end);
        if is_late || step - improved_at >= schedule.patience {
            // A well-trained start gets worse at a high rate before it improves at a low one.
            pace = pace.max((1.0 - progress) * schedule.steps as f64 / COOL_DOWN);
        } else if step > WARM_UP && loss > (1.0 - PROGRESS) * before {
            pace = pace.max(FASTEST.min(2.0 * pace));
        }
        before = loss;
    }
    Ok(best)
}

/// Inputs and labels of `tokens`; releases their pages.
fn batch(samples: &TracePart, tokens: &[usize], cost: MissCost) -> Result<Batch, PredictorError> {
    let mut inputs = Vec::with_capacity(tokens.len() * samples.hidden_size);
    let mut labels = Labels::default();
    // The system may read far more around a token than requested.
    for tokens in tokens.chunks(PIECE) {
        for token in tokens {
            inputs.extend(samples.input(*token));
            labels.add(samples, *token, cost);
        }
        samples.release();
    }
    let inputs = Tensor::from_vec(inputs, (tokens.len(), samples.hidden_size), &Device::Cpu)?;
    Ok(Batch { inputs, labels })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planted::{EASY, planted};

    const SCHEDULE: Schedule = Schedule {
        steps: 2000,
        patience: 60,
        seed: 5,
        layer: 3,
        cost: MissCost::ByContribution(3.0),
        deadline: None,
    };

    fn start() -> Weights {
        Weights::random(EASY.hidden, vec![-2.0; EASY.neurons], 16, 1)
    }

    #[test]
    fn every_token_is_for_training_or_validation() {
        for tokens in [16, 17, 100, 127, 128, 1000, 1024, 5000] {
            let split = Split::new(tokens);
            let learning = (0..split.learning_count()).map(|number| split.learning(number));
            let mut all: Vec<usize> = learning.chain(split.validation()).collect();
            all.sort_unstable();
            assert_eq!(all, (0..tokens).collect::<Vec<_>>());
        }
        let many = Split::new(100_000);
        assert_eq!(many.validation().len(), MOST_VALIDATED);
        let learns = |token: usize| (0..many.learning_count()).any(|n| many.learning(n) == token);
        let validation = many.validation();
        assert!(validation.iter().step_by(100).all(|token| !learns(*token)));
    }

    #[test]
    fn an_easy_layer_takes_a_fraction_of_the_steps() {
        let samples = planted(EASY, 2).training;
        let learnt = learn(&start(), &samples, SCHEDULE, || Ok(())).unwrap();
        assert!(learnt.steps < SCHEDULE.steps / 2, "{}", learnt.steps);
        let validation = batch(&samples, &Split::new(2000).validation(), SCHEDULE.cost).unwrap();
        let loss = |weights: &Weights| {
            let descent = Descent::new(weights);
            descent.loss(&validation).unwrap()
        };
        assert!(learnt.loss < 0.2 * loss(&start()), "{}", learnt.loss);
        assert_eq!(
            loss(&learnt.weights),
            learnt.loss,
            "the best weights are returned"
        );
    }

    #[test]
    fn training_stops_early_without_improvement() {
        let mut samples = planted(EASY, 2).training;
        // Inputs that are independent of the activity.
        samples.inputs.to_mut().rotate_left(EASY.hidden * 7);
        let learnt = learn(&start(), &samples, SCHEDULE, || Ok(())).unwrap();
        assert!(learnt.steps < SCHEDULE.steps / 2, "{}", learnt.steps);
    }

    #[test]
    fn results_depend_on_the_seed_and_not_on_the_number_of_threads() {
        let samples = planted(EASY, 2).training;
        let schedule = Schedule {
            steps: 60,
            ..SCHEDULE
        };
        let with_threads = |threads: usize, seed: u64| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let schedule = Schedule { seed, ..schedule };
            let learn = || learn(&start(), &samples, schedule, || Ok(()));
            pool.build().unwrap().install(learn).unwrap()
        };
        let learnt = with_threads(1, 5);
        assert_eq!(learnt, with_threads(3, 5));
        assert_ne!(learnt, with_threads(1, 6));
    }

    #[test]
    fn a_loss_that_is_not_finite_is_an_error() {
        let mut samples = planted(EASY, 2).training;
        samples.inputs.to_mut().fill(half::bf16::MAX);
        let diverged = learn(&start(), &samples, SCHEDULE, || Ok(())).unwrap_err();
        assert!(matches!(diverged, PredictorError::Diverged { layer: 3 }));
        assert!(diverged.to_string().contains("layer 3"), "{diverged}");
    }
}
