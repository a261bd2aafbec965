//! Synthetic samples with known structure, for tests.

use candle_core::{Device, Tensor};
use half::bf16;
use powerinfer_artifact::random::Random;
use powerinfer_profile::{Part, Traces};

/// Shape of samples where the activation of neuron i is `max(0, (U·V·x)_i − t_i)` for random inputs x. V has `rank` rows with
/// decreasing weights; the t vary around `threshold`, so that activation frequencies differ widely.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Planted {
    pub(crate) hidden: usize,
    pub(crate) neurons: usize,
    /// Tokens of the training and of the held-out part.
    pub(crate) tokens: [usize; 2],
    pub(crate) rank: usize,
    pub(crate) threshold: f32,
}

/// An easy layer: activity depends on a single direction.
pub(crate) const EASY: Planted = Planted {
    hidden: 128,
    neurons: 1024,
    tokens: [2000, 1000],
    rank: 1,
    threshold: 1.65,
};

/// Factors V `[rank, hidden]` and U `[neurons, rank]` of the gate.
fn factors(shape: Planted, random: &mut Random) -> [Tensor; 2] {
    let scaled = |values: Vec<f32>, by: &dyn Fn(usize) -> f32| -> Vec<f32> {
        let values = values.into_iter().enumerate();
        values.map(|(index, value)| value * by(index)).collect()
    };
    let (hidden, neurons, rank) = (shape.hidden, shape.neurons, shape.rank);
    let direction = 1.0 / (hidden as f32).sqrt();
    let v = scaled(normal(random, rank * hidden), &|_| direction);
    let v = Tensor::from_vec(v, (rank, hidden), &Device::Cpu).unwrap();
    let all: f32 = (1..=rank).map(|place| 1.0 / place as f32).sum();
    let weight = |index: usize| (1.0 / ((index % rank + 1) as f32 * all)).sqrt();
    let u = scaled(normal(random, neurons * rank), &weight);
    let u = Tensor::from_vec(u, (neurons, rank), &Device::Cpu).unwrap();
    [v, u]
}

/// The gate `U·V` of the samples that [`planted`] generates, `[neurons, hidden]`.
pub(crate) fn planted_gate(shape: Planted, seed: u64) -> Vec<f32> {
    let [v, u] = factors(shape, &mut Random::new(seed));
    let gate = u.matmul(&v).unwrap();
    gate.flatten_all().unwrap().to_vec1().unwrap()
}

/// Generates samples of this shape.
pub(crate) fn planted(shape: Planted, seed: u64) -> Traces {
    let mut random = Random::new(seed);
    let [v, u] = factors(shape, &mut random);
    let (hidden, neurons) = (shape.hidden, shape.neurons);
    let thresholds = normal(&mut random, neurons);
    let thresholds: Vec<f32> = thresholds
        .iter()
        .map(|t| shape.threshold + 0.8 * t)
        .collect();
    let mut traces = Traces::new(hidden, neurons);
    for part in Part::ALL {
        let samples = traces.part_mut(part);
        let mut left = shape.tokens[part as usize];
        samples.inputs.to_mut().reserve_exact(left * hidden);
        while left > 0 {
            let tokens = left.min(1000);
            left -= tokens;
            let x = normal(&mut random, tokens * hidden);
            let rounded = x.iter().map(|value| bf16::from_f32(*value));
            samples.inputs.to_mut().extend(rounded);
            let x = Tensor::from_vec(x, (tokens, hidden), &Device::Cpu).unwrap();
            let z = x.matmul(&v.t().unwrap()).unwrap();
            let z = z.matmul(&u.t().unwrap()).unwrap();
            for mut row in z.to_vec2::<f32>().unwrap() {
                for (value, threshold) in row.iter_mut().zip(&thresholds) {
                    *value = (*value - threshold).max(0.0);
                }
                samples.active.push(&row);
                let active = row.into_iter().filter(|value| *value > 0.0);
                samples.contributions.push(active);
            }
        }
    }
    traces
}

/// Approximately normal values, four per random word for speed.
fn normal(random: &mut Random, count: usize) -> Vec<f32> {
    let mut values = Vec::with_capacity(count.next_multiple_of(4));
    while values.len() < count {
        let bits = random.next_bits();
        values.extend((0..4).map(|place| {
            // Sum of four uniform integers below 16, with a standard deviation of √85 / 2 each.
            let nibbles = (0..4).map(|nibble| (bits >> (16 * place + 4 * nibble) & 15) as f32);
            (nibbles.sum::<f32>() - 30.0) / 85f32.sqrt()
        }));
    }
    values.truncate(count);
    values
}
