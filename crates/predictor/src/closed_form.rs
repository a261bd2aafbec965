//! Predictors without training: linear networks that are calculated from the layer's gate and its sampled inputs.
//!
//! `B·A` is the best low-rank approximation of the gate W on the centred inputs X `[tokens, hidden]`, in the mean-square
//! sense (reduced-rank regression): the columns of B are the leading eigenvectors of `W·Xᵀ·X·Wᵀ`, and `A = Bᵀ·W`. Subspace
//! iteration needs only products with W and X, so that neither a covariance nor X·Wᵀ is formed.
//! Logistic regression fits slope and bias of each neuron's logit to its sampled activity; the slope scales its row of B.

use candle_core::{Device, Result, Tensor};
use powerinfer_artifact::random::Random;
use powerinfer_profile::TracePart;
use rayon::prelude::*;

use crate::{
    descent::{matrix, values},
    loss::{Labels, MissCost, sigmoid},
    network::Weights,
};

/// Largest number of tokens from which networks are calculated.
const MOST_TOKENS: usize = 4096;
/// Steps of the subspace iteration.
const ITERATIONS: usize = 3;
/// Length of a direction, relative to the first, below which it is rounding noise.
const NOISE: f32 = 1e-6;
/// Newton steps of the regression.
const NEWTON_STEPS: usize = 10;
/// Largest change of a slope or bias in a step.
const LARGEST_STEP: f32 = 2.0;
/// Precisions of weak priors on slope and bias, which bound both for neurons that are hardly ever active.
const PRIORS: [f32; 2] = [1e-2, 1e-3];
/// Neurons per block of regressions.
const BLOCK: usize = 256;

/// Directions of a layer; the first r of them give the network of rank r.
pub(crate) struct ClosedForm {
    /// `[tokens, hidden]`, centred.
    inputs: Tensor,
    /// Mean input, `[hidden]`.
    mean: Tensor,
    labels: Labels,
    /// `Bᵀ [rank, neurons]`, orthonormal rows.
    directions: Tensor,
    /// `[rank, hidden]`.
    a: Tensor,
    /// Initial biases, `[neurons]`.
    log_odds: Vec<f32>,
}

impl ClosedForm {
    /// The first `rank` directions of `gate [neurons, hidden]` on `samples`.
    pub(crate) fn new(
        samples: &TracePart,
        gate: &[f32],
        rank: usize,
        log_odds: &[f32],
        cost: MissCost,
    ) -> Result<Self> {
        let hidden = samples.hidden_size;
        let tokens = samples.tokens().min(MOST_TOKENS);
        let mut labels = Labels::default();
        let mut inputs = Vec::with_capacity(tokens * hidden);
        for place in 0..tokens {
            let token = place * samples.tokens() / tokens;
            inputs.extend(samples.input(token));
            labels.add(samples, token, cost);
            samples.release_after(place);
        }
        let inputs = matrix(&inputs, tokens, hidden)?;
        let mean = inputs.mean(0)?;
        let inputs = inputs.broadcast_sub(&mean)?;
        let gate = matrix(gate, log_odds.len(), hidden)?;
        let mut random = Random::new(0);
        let along: Vec<f32> = (0..rank * tokens).map(|_| random.normal() as f32).collect();
        let mut along = matrix(&along, rank, tokens)?;
        let mut directions = Vec::new();
        for iteration in 0..=ITERATIONS {
            // `along`·X·Wᵀ, without forming X·Wᵀ.
            let next = along.matmul(&inputs)?.matmul(&gate.t()?)?;
            directions = orthonormal(next.to_vec2()?);
            if iteration < ITERATIONS {
                let of_inputs = rows(&directions)?.matmul(&gate)?;
                along = of_inputs.matmul(&inputs.t()?)?;
            }
        }
        let directions = rows(&directions)?;
        Ok(Self {
            a: directions.matmul(&gate)?,
            inputs,
            mean,
            labels,
            directions,
            log_odds: log_odds.to_vec(),
        })
    }

    /// Number of directions.
    pub(crate) fn rank(&self) -> usize {
        self.directions.dims()[0]
    }

    /// The network of the first `rank` directions.
    pub(crate) fn weights(&self, rank: usize) -> Result<Weights> {
        let neurons = self.log_odds.len();
        let a = self.a.narrow(0, 0, rank)?;
        let b = self.directions.narrow(0, 0, rank)?.t()?;
        // Hidden units get unit variance on average, a good start for training. Columns of B keep equal lengths, which
        // is best for rounding a row of B in blocks.
        let size = self.inputs.matmul(&a.t()?)?.sqr()?.mean_all()?;
        let size = f64::from(size.to_scalar::<f32>()?.max(f32::MIN_POSITIVE)).sqrt();
        let (a, b) = ((a / size)?, (b * size)?);
        let units = self.inputs.matmul(&a.t()?)?;
        let starts: Vec<usize> = (0..neurons).step_by(BLOCK).collect();
        let blocks = starts.into_par_iter().map(|first| {
            let odds = &self.log_odds[first..neurons.min(first + BLOCK)];
            let b = b.narrow(0, first, odds.len())?;
            let scores = values(&units.matmul(&b.t()?)?)?;
            let [slopes, biases] = regress(&scores, &self.labels, first, odds);
            let slopes = matrix(&slopes, odds.len(), 1)?;
            Ok([values(&b.broadcast_mul(&slopes)?)?, biases])
        });
        let blocks: Vec<[Vec<f32>; 2]> = blocks.collect::<Result<_>>()?;
        let [b, bias] = [0, 1].map(|part| -> Vec<f32> {
            let parts = blocks.iter().map(|block| &block[part][..]);
            parts.collect::<Vec<_>>().concat()
        });
        // The network's inputs are not centred.
        let shift = a.matmul(&self.mean.unsqueeze(1)?)?;
        let shift = values(&matrix(&b, neurons, rank)?.matmul(&shift)?)?;
        Ok(Weights {
            rank,
            is_linear: true,
            a: values(&a)?,
            b,
            bias: bias
                .iter()
                .zip(shift)
                .map(|(bias, shift)| bias - shift)
                .collect(),
        })
    }
}

/// Slopes and biases with which `scores [tokens, neurons]` best fit the activity of neurons `first..`, by Newton's method;
/// biases start at `log_odds`.
fn regress(scores: &[f32], labels: &Labels, first: usize, log_odds: &[f32]) -> [Vec<f32>; 2] {
    let count = log_odds.len();
    let tokens = scores.len() / count;
    let mut squares = vec![0.0f32; count];
    for row in scores.chunks_exact(count) {
        for (sum, score) in squares.iter_mut().zip(row) {
            *sum += score * score;
        }
    }
    // The prior is on the slope of scores with unit variance.
    let unit: Vec<f32> = squares
        .iter()
        .map(|sum| {
            (tokens as f32 / sum.max(f32::MIN_POSITIVE))
                .sqrt()
                .min(1e15)
        })
        .collect();
    let (mut slope, mut bias) = (unit.clone(), log_odds.to_vec());
    for _ in 0..NEWTON_STEPS {
        let mut sums = Sums::new(count);
        for (place, row) in scores.chunks_exact(count).enumerate() {
            sums.add_inactive(row, &slope, &bias);
            for (neuron, cost) in labels.within(place, first, count) {
                sums.make_active(neuron, row[neuron], slope[neuron], bias[neuron], cost);
            }
        }
        for neuron in 0..count {
            let unit = unit[neuron];
            let [by_slope, by_bias] =
                sums.step(neuron, unit, [slope[neuron] / unit - 1.0, bias[neuron]]);
            slope[neuron] += unit * by_slope;
            bias[neuron] += by_bias;
        }
    }
    [slope, bias]
}

/// Gradient and negative Hessian of the log-likelihood in slope and bias, per neuron.
struct Sums {
    by_slope: Vec<f32>,
    by_bias: Vec<f32>,
    slope_slope: Vec<f32>,
    slope_bias: Vec<f32>,
    bias_bias: Vec<f32>,
}

impl Sums {
    fn new(count: usize) -> Self {
        let [by_slope, by_bias, slope_slope, slope_bias, bias_bias] =
            [(); 5].map(|()| vec![0.0; count]);
        Self {
            by_slope,
            by_bias,
            slope_slope,
            slope_bias,
            bias_bias,
        }
    }

    /// Adds a token as if no neuron were active on it.
    fn add_inactive(&mut self, scores: &[f32], slope: &[f32], bias: &[f32]) {
        let count = scores.len();
        let (slope, bias) = (&slope[..count], &bias[..count]);
        let Self {
            by_slope,
            by_bias,
            slope_slope,
            slope_bias,
            bias_bias,
        } = self;
        let (by_slope, by_bias) = (&mut by_slope[..count], &mut by_bias[..count]);
        let (slope_slope, slope_bias) = (&mut slope_slope[..count], &mut slope_bias[..count]);
        let bias_bias = &mut bias_bias[..count];
        for neuron in 0..count {
            let score = scores[neuron];
            let active = sigmoid(slope[neuron] * score + bias[neuron]);
            let variance = active * (1.0 - active);
            by_slope[neuron] -= active * score;
            by_bias[neuron] -= active;
            slope_slope[neuron] += variance * score * score;
            slope_bias[neuron] += variance * score;
            bias_bias[neuron] += variance;
        }
    }

    /// Corrects what [`add_inactive`](Self::add_inactive) added for a neuron that is active; a miss has the weight `cost`.
    fn make_active(&mut self, neuron: usize, score: f32, slope: f32, bias: f32, cost: f32) {
        let active = sigmoid(slope * score + bias);
        let gradient = cost * (1.0 - active) + active;
        let variance = (cost - 1.0) * active * (1.0 - active);
        self.by_slope[neuron] += gradient * score;
        self.by_bias[neuron] += gradient;
        self.slope_slope[neuron] += variance * score * score;
        self.slope_bias[neuron] += variance * score;
        self.bias_bias[neuron] += variance;
    }

    /// Newton step of a neuron's slope (in units of `unit`) and bias, at distances `from_prior` from the priors' centres.
    fn step(&self, neuron: usize, unit: f32, from_prior: [f32; 2]) -> [f32; 2] {
        let by_slope = self.by_slope[neuron] * unit - PRIORS[0] * from_prior[0];
        let by_bias = self.by_bias[neuron] - PRIORS[1] * from_prior[1];
        let slope_slope = self.slope_slope[neuron] * unit * unit + PRIORS[0];
        let slope_bias = self.slope_bias[neuron] * unit;
        let bias_bias = self.bias_bias[neuron] + PRIORS[1];
        let determinant = (slope_slope * bias_bias - slope_bias * slope_bias).max(1e-12);
        let step = |numerator: f32| (numerator / determinant).clamp(-LARGEST_STEP, LARGEST_STEP);
        [
            step(bias_bias * by_slope - slope_bias * by_bias),
            step(slope_slope * by_bias - slope_bias * by_slope),
        ]
    }
}

/// Makes rows orthonormal, in order, by the modified Gram–Schmidt method; those that depend on earlier ones become 0.
fn orthonormal(mut rows: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    let mut first = 0.0;
    for index in 0..rows.len() {
        let (done, rest) = rows.split_at_mut(index + 1);
        let row = &mut done[index];
        let length = dot(row, row).sqrt();
        first = if index == 0 { length } else { first };
        let scale = if length > NOISE * first {
            1.0 / length
        } else {
            0.0
        };
        row.iter_mut().for_each(|value| *value *= scale);
        rest.par_iter_mut().for_each(|other| {
            let along = dot(row, other);
            for (value, unit) in other.iter_mut().zip(&*row) {
                *value -= along * unit;
            }
        });
    }
    rows
}

fn rows(rows: &[Vec<f32>]) -> Result<Tensor> {
    Tensor::from_vec(rows.concat(), (rows.len(), rows[0].len()), &Device::Cpu)
}

/// Inner product; lanes are vectorised and then added in a fixed order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 32];
    for (a, b) in a.chunks(lanes.len()).zip(b.chunks(lanes.len())) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::planted::{EASY, Planted, planted, planted_gate};

    const SHAPE: Planted = Planted {
        hidden: 48,
        neurons: 300,
        tokens: [500, 0],
        rank: 8,
        threshold: 1.0,
    };

    fn closed_form(shape: Planted, rank: usize) -> ClosedForm {
        let samples = planted(shape, 3).training;
        let odds = vec![-2.0; shape.neurons];
        let cost = MissCost::ByContribution(3.0);
        ClosedForm::new(&samples, &planted_gate(shape, 3), rank, &odds, cost).unwrap()
    }

    /// Sum of the squared differences between the gate's outputs on centred inputs and their approximation by B·A.
    fn residual(found: &ClosedForm, rank: usize) -> f64 {
        let gate = matrix(&planted_gate(SHAPE, 3), SHAPE.neurons, SHAPE.hidden).unwrap();
        let products = found.inputs.matmul(&gate.t().unwrap()).unwrap();
        let [a, b] = [&found.a, &found.directions].map(|all| all.narrow(0, 0, rank).unwrap());
        let approximated = found
            .inputs
            .matmul(&a.t().unwrap())
            .unwrap()
            .matmul(&b)
            .unwrap();
        let squares = (products - approximated).unwrap().sqr().unwrap();
        f64::from(squares.sum_all().unwrap().to_scalar::<f32>().unwrap())
    }

    #[test]
    fn the_directions_explain_as_much_of_the_gate_as_any_can() {
        let found = closed_form(SHAPE, 12);
        let whole = residual(&found, 0);
        // The gate has eight directions, of decreasing weight.
        let left: Vec<f64> = (0..=12)
            .map(|rank| residual(&found, rank) / whole)
            .collect();
        assert!(
            left.windows(2).all(|pair| pair[1] <= pair[0] + 1e-6),
            "{left:?}"
        );
        assert!(left[7] > 1e-3 && left[8] < 1e-6, "{left:?}");
        // No other four directions explain more: random changes of the fourth leave a larger residual.
        let mut random = Random::new(9);
        for _ in 0..20 {
            let mut rows = found.directions.to_vec2::<f32>().unwrap();
            rows[3]
                .iter_mut()
                .for_each(|value| *value += 0.01 * random.normal() as f32);
            let changed = super::rows(&orthonormal(rows)).unwrap();
            let gate = matrix(&planted_gate(SHAPE, 3), SHAPE.neurons, SHAPE.hidden).unwrap();
            let other = ClosedForm {
                a: changed.matmul(&gate).unwrap(),
                directions: changed,
                ..closed_form(SHAPE, 12)
            };
            assert!(residual(&other, 4) > residual(&found, 4));
        }
    }

    #[test]
    fn a_network_of_a_smaller_rank_is_that_of_its_directions() {
        let of = |most: usize| closed_form(SHAPE, most).weights(4).unwrap();
        let (few, many) = (of(4), of(8));
        let near = |a: &[f32], b: &[f32]| {
            let largest = a.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            a.iter().zip(b).all(|(a, b)| (a - b).abs() < 0.05 * largest)
        };
        assert!(near(&few.bias, &many.bias));
        assert_eq!((few.rank, few.a.len(), few.b.len()), (4, 4 * 48, 300 * 4));
    }

    #[test]
    fn inputs_and_gates_without_any_direction_give_finite_networks() {
        let mut samples = planted(Planted { rank: 1, ..SHAPE }, 3).training;
        let odds = vec![-2.0; SHAPE.neurons];
        let zeros = vec![0.0; SHAPE.neurons * SHAPE.hidden];
        let is_finite = |samples: &TracePart, gate: &[f32]| {
            let cost = MissCost::Even(2.0);
            let found = ClosedForm::new(samples, gate, 16, &odds, cost).unwrap();
            let weights = found.weights(16).unwrap();
            let all = [&weights.a, &weights.b, &weights.bias];
            all.into_iter().flatten().all(|value| value.is_finite())
        };
        // A gate with one direction, a zero gate, and identical inputs.
        assert!(is_finite(
            &samples,
            &planted_gate(Planted { rank: 1, ..SHAPE }, 3)
        ));
        assert!(is_finite(&samples, &zeros));
        samples.inputs.to_mut().fill(half::bf16::ONE);
        assert!(is_finite(&samples, &planted_gate(SHAPE, 3)));
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        let with_threads = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let weights = || closed_form(EASY, 6).weights(6).unwrap();
            pool.build().unwrap().install(weights)
        };
        assert_eq!(with_threads(1), with_threads(3));
    }

    proptest! {
        #[test]
        fn slopes_and_biases_are_where_the_likelihood_is_flat(seed in 0u64..100, cost in 1.0f32..5.0) {
            const TOKENS: usize = 400;
            let mut random = Random::new(seed);
            let mut samples = TracePart::new(1, 2);
            let mut scores = Vec::new();
            for _ in 0..TOKENS {
                let score = [random.normal() as f32, 100.0 * random.normal() as f32];
                let noise = [random.normal() as f32, random.normal() as f32];
                samples.active.push(&[score[0] - 1.0 + noise[0], 0.01 * score[1] - 0.5 + noise[1]]);
                scores.extend(score);
            }
            let mut labels = Labels::default();
            (0..TOKENS).for_each(|token| labels.add(&samples, token, MissCost::Even(cost)));
            let [slope, bias] = regress(&scores, &labels, 0, &[-1.0, -1.0]);
            for neuron in 0..2 {
                let (mut by_slope, mut by_bias) = (0.0, 0.0);
                for (token, scores) in scores.chunks(2).enumerate() {
                    let score = f64::from(scores[neuron]);
                    let z = f64::from(slope[neuron]) * score + f64::from(bias[neuron]);
                    let active = 1.0 / (1.0 + (-z).exp());
                    let gradient = match samples.active.is_active(token, neuron) {
                        true => f64::from(cost) * (1.0 - active),
                        false => -active,
                    };
                    by_slope += gradient * score / if neuron == 0 { 1.0 } else { 100.0 };
                    by_bias += gradient;
                }
                // The priors leave a small gradient.
                prop_assert!(by_slope.abs() < 0.2 && by_bias.abs() < 0.2, "{} {}", by_slope, by_bias);
            }
        }
    }
}
