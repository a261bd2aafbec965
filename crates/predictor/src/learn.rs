//! Trains a network until it learns nothing more.
//!
//! A sixteenth of the tokens is kept from learning, to see on them whether anything is still being
//! learnt. The held-out part of the samples has no say in this: it only judges.

use std::f64::consts::PI;

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
/// Tokens that are read before their place in the file is given back.
const PIECE: usize = 32;
/// Largest learning rate; it falls to zero along a cosine.
const LEARNING_RATE: f64 = 4e-3;
/// Steps until the learning rate is at its largest.
const WARM_UP: usize = 20;
/// Steps between two looks at the validation tokens.
const LOOK: usize = 20;
/// Of so many tokens one validates, where there are enough.
const VALIDATED: usize = 16;
/// Most validation tokens looked at.
const MOST_VALIDATED: usize = 1024;
/// Share of the loss that must be gained between two looks, else the learning rate falls faster.
const PROGRESS: f64 = 0.01;
/// Share of the loss that must be gained for patience to be renewed.
const WORTHWHILE: f64 = 0.001;
/// Most times as fast that the learning rate falls while anything is being learnt.
const FASTEST: f64 = 8.0;
/// Steps in which it falls to zero once patience is at its end.
const COOL_DOWN: f64 = 60.0;

/// How long and from where to train.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Schedule {
    /// Most steps.
    pub(crate) steps: usize,
    /// Steps without a gain after which training comes to its end.
    pub(crate) patience: usize,
    pub(crate) seed: u64,
    pub(crate) layer: usize,
    pub(crate) cost: MissCost,
}

/// What training came to.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Learnt {
    /// Those of all that were looked at with the lowest loss.
    pub(crate) weights: Weights,
    pub(crate) steps: usize,
    /// Loss on the validation tokens.
    pub(crate) loss: f64,
}

/// Which tokens are learnt from, and which validate.
#[derive(Debug, Clone, Copy)]
struct Split {
    tokens: usize,
    /// The last of so many tokens validates.
    stride: usize,
}

impl Split {
    /// Of few samples a larger share validates, since a loss on a handful says nothing.
    fn of(tokens: usize) -> Self {
        let stride = (tokens / 64).clamp(2, VALIDATED);
        Self { tokens, stride }
    }

    fn learning_count(self) -> usize {
        self.tokens - self.tokens / self.stride
    }

    /// The token that is learnt from with this running number.
    fn learning(self, number: usize) -> usize {
        number + number / (self.stride - 1)
    }

    /// The tokens that validate: all, or evenly spread as many as are looked at.
    fn validation(self) -> Vec<usize> {
        let count = self.tokens / self.stride;
        let looked_at = count.min(MOST_VALIDATED);
        let token = |place: usize| (place * count / looked_at + 1) * self.stride - 1;
        (0..looked_at).map(token).collect()
    }
}

/// Trains from `start` on `samples`; `between` runs after every step and may stop it.
///
/// The learning rate falls to zero along a cosine, over `steps`; whenever a look shows little
/// progress, what is left of the way is gone faster. So what is easily learnt is learnt in a
/// fraction of the steps, but never without its end at a low rate.
pub(crate) fn learn(
    start: &Weights,
    samples: &TracePart,
    schedule: Schedule,
    mut between: impl FnMut() -> Result<(), PredictorError>,
) -> Result<Learnt, PredictorError> {
    let mut descent = Descent::new(start.rank, &start.a, &start.b, &start.bias);
    let split = Split::of(samples.tokens());
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
    // The loss at the last look, and at the last that gained something.
    let (mut before, mut gained, mut gained_at) = (best.loss, best.loss, 0);
    let (mut progress, mut pace) = (0.0, 1.0);
    let mut batch = next_batch()?;
    for step in 1..=schedule.steps {
        let warm = (step as f64 / WARM_UP as f64).min(1.0);
        let learning_rate = LEARNING_RATE * warm * (0.5 + 0.5 * (PI * progress).cos());
        // The next batch is read while this one is learnt from.
        let (stepped, read) = rayon::join(|| descent.step(&batch, learning_rate), &mut next_batch);
        batch = read?;
        if !stepped? {
            return Err(diverged);
        }
        between()?;
        progress += pace / schedule.steps as f64;
        let is_last = step == schedule.steps || progress >= 1.0;
        if !is_last && step % LOOK != 0 {
            continue;
        }
        let loss = descent.loss(&validation)?;
        if !loss.is_finite() {
            return Err(diverged);
        }
        if loss < best.loss {
            let [a, b, bias] = descent.weights();
            best = Learnt {
                weights: Weights {
                    rank: start.rank,
                    a,
                    b,
                    bias,
                },
                steps: step,
                loss,
            };
        }
        if loss < (1.0 - WORTHWHILE) * gained {
            (gained, gained_at) = (loss, step);
        }
        if is_last {
            best.steps = step;
            break;
        }
        if step - gained_at >= schedule.patience {
            // What began well trained loses at a high rate before it gains at a low one.
            pace = pace.max((1.0 - progress) * schedule.steps as f64 / COOL_DOWN);
        } else if step > WARM_UP && loss > (1.0 - PROGRESS) * before {
            pace = pace.max(FASTEST.min(2.0 * pace));
        }
        before = loss;
    }
    Ok(best)
}

/// Inputs and labels of `tokens`; what was read of the file for them is given back.
fn batch(samples: &TracePart, tokens: &[usize], cost: MissCost) -> Result<Batch, PredictorError> {
    let mut inputs = Vec::with_capacity(tokens.len() * samples.hidden_size);
    let mut labels = Labels::default();
    // The system may map far more around a token than was asked for.
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
    };

    fn start() -> Weights {
        Weights::random(EASY.hidden, vec![-2.0; EASY.neurons], 16, 1)
    }

    #[test]
    fn every_token_is_learnt_from_or_validates() {
        for tokens in [16, 17, 100, 127, 128, 1000, 1024, 5000] {
            let split = Split::of(tokens);
            let learning = (0..split.learning_count()).map(|number| split.learning(number));
            let mut all: Vec<usize> = learning.chain(split.validation()).collect();
            all.sort_unstable();
            assert_eq!(all, (0..tokens).collect::<Vec<_>>());
        }
        let many = Split::of(100_000);
        assert_eq!(many.validation().len(), MOST_VALIDATED);
        let learns = |token: usize| (0..many.learning_count()).any(|n| many.learning(n) == token);
        let validation = many.validation();
        assert!(validation.iter().step_by(100).all(|token| !learns(*token)));
    }

    #[test]
    fn what_is_easy_is_learnt_in_a_fraction_of_the_steps() {
        let samples = planted(EASY, 2).training;
        let learnt = learn(&start(), &samples, SCHEDULE, || Ok(())).unwrap();
        assert!(learnt.steps < SCHEDULE.steps / 2, "{}", learnt.steps);
        let validation = batch(&samples, &Split::of(2000).validation(), SCHEDULE.cost).unwrap();
        let loss = |weights: &Weights| {
            let descent = Descent::new(16, &weights.a, &weights.b, &weights.bias);
            descent.loss(&validation).unwrap()
        };
        assert!(learnt.loss < 0.2 * loss(&start()), "{}", learnt.loss);
        assert_eq!(loss(&learnt.weights), learnt.loss, "the best are kept");
    }

    #[test]
    fn patience_ends_what_does_not_get_better() {
        let mut samples = planted(EASY, 2).training;
        // Inputs that have nothing to do with who fires.
        samples.inputs.to_mut().rotate_left(EASY.hidden * 7);
        let learnt = learn(&start(), &samples, SCHEDULE, || Ok(())).unwrap();
        assert!(learnt.steps < SCHEDULE.steps / 2, "{}", learnt.steps);
    }

    #[test]
    fn the_same_seed_learns_the_same_on_any_number_of_threads() {
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
    fn a_loss_that_is_no_number_is_an_error() {
        let mut samples = planted(EASY, 2).training;
        samples.inputs.to_mut().fill(half::bf16::MAX);
        let diverged = learn(&start(), &samples, SCHEDULE, || Ok(())).unwrap_err();
        assert!(matches!(diverged, PredictorError::Diverged { layer: 3 }));
        assert!(diverged.to_string().contains("layer 3"), "{diverged}");
    }
}
