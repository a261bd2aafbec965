//! One predictor: `logits = B · relu(A · x) + b`.
//!
//! The bias is ours beside the published form `B · relu(A · x)`: without it the network spends
//! rank on remembering how often each neuron fires on the whole.

use candle_core::{Device, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use powerinfer_artifact::{
    predictor_file::{BIAS, PredictorInput},
    random::Random,
};
use powerinfer_kernels::{Format, Isa, OwnedMatrix, pack};
use powerinfer_profile::TracePart;

use crate::{PredictorError, loss::binary_cross_entropy};

/// Tokens per optimiser step.
const BATCH: usize = 256;
/// Largest learning rate; it falls to zero along a cosine.
const LEARNING_RATE: f64 = 4e-3;

/// What missing any neuron costs, of what missing an average one does.
const EVEN: f32 = 0.3;
/// A neuron that adds more than so many times the average counts as so many.
const MOST_ADDED: f32 = 5.0;

/// A predictor as it is stored: rounded to its format, because that is what will run.
pub(crate) struct Network {
    pub(crate) rank: usize,
    pub(crate) input: PredictorInput,
    pub(crate) a: OwnedMatrix,
    pub(crate) b: OwnedMatrix,
    /// `[neurons, 1]`.
    pub(crate) bias: OwnedMatrix,
}

/// How long and from where to train.
#[derive(Clone, Copy)]
pub(crate) struct Schedule {
    pub(crate) steps: usize,
    pub(crate) seed: u64,
    pub(crate) layer: usize,
}

/// A network that is being trained, in full precision.
#[derive(Debug, Clone)]
pub(crate) struct Weights {
    pub(crate) rank: usize,
    /// `[rank, hidden]`.
    a: Vec<f32>,
    /// `[neurons, rank]`.
    b: Vec<f32>,
    /// `[neurons]`.
    bias: Vec<f32>,
}

impl Weights {
    /// Random weights; the bias is what each neuron's rate alone would say.
    pub(crate) fn random(samples: &TracePart, rank: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut normal = |rows: usize, columns: usize| -> Vec<f32> {
            let deviation = 1.0 / (columns as f64).sqrt();
            let values = (0..rows * columns).map(|_| (random.normal() * deviation) as f32);
            values.collect()
        };
        let (hidden, neurons) = (samples.hidden_size, samples.active.neurons());
        Self {
            rank,
            a: normal(rank, hidden),
            b: normal(neurons, rank),
            bias: log_odds(samples).0,
        }
    }

    /// The same function, or as much of it as fits, at another rank: units that do not fit are
    /// those that weigh least; those that are new look at random directions and weigh nothing yet.
    pub(crate) fn at_rank(&self, rank: usize, seed: u64) -> Self {
        let hidden = self.a.len() / self.rank;
        let neurons = self.bias.len();
        let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>();
        let weight = |unit: usize| {
            let row = &self.a[unit * hidden..][..hidden];
            let column = self.b.iter().skip(unit).step_by(self.rank);
            square(&mut row.iter().copied()) * square(&mut column.copied())
        };
        let mut units: Vec<usize> = (0..self.rank).collect();
        units.sort_by(|x, y| weight(*y).total_cmp(&weight(*x)));
        units.truncate(rank);
        let mut random = Random::new(seed);
        let deviation = 1.0 / (hidden as f64).sqrt();
        let mut a: Vec<f32> = units
            .iter()
            .flat_map(|unit| &self.a[unit * hidden..][..hidden])
            .copied()
            .collect();
        a.resize_with(rank * hidden, || (random.normal() * deviation) as f32);
        let mut b = vec![0.0; neurons * rank];
        for (neuron, row) in b.chunks_exact_mut(rank).enumerate() {
            for (place, unit) in row.iter_mut().zip(&units) {
                *place = self.b[neuron * self.rank + unit];
            }
        }
        Self {
            rank,
            a,
            b,
            bias: self.bias.clone(),
        }
    }

    /// The network in the format `format`.
    pub(crate) fn pack(&self, format: Format) -> Network {
        let (hidden, neurons) = (self.a.len() / self.rank, self.bias.len());
        Network {
            rank: self.rank,
            input: PredictorInput::Normed,
            a: pack(format, self.rank, hidden, &self.a),
            b: pack(format, neurons, self.rank, &self.b),
            bias: pack(BIAS, neurons, 1, &self.bias),
        }
    }

    /// Trains on `samples`; `between` runs after every step and may stop it.
    ///
    /// Missing a neuron costs in proportion to what it adds to the hidden state.
    pub(crate) fn train(
        &self,
        samples: &TracePart,
        schedule: Schedule,
        mut between: impl FnMut() -> Result<(), PredictorError>,
    ) -> Result<Self, PredictorError> {
        let (hidden, neurons) = (samples.hidden_size, samples.active.neurons());
        let mut random = Random::new(schedule.seed);
        let variable = |values: &[f32], rows: usize| {
            Var::from_slice(values, (rows, values.len() / rows), &Device::Cpu)
        };
        let (a, b) = (variable(&self.a, self.rank)?, variable(&self.b, neurons)?);
        let bias = Var::from_slice(&self.bias, neurons, &Device::Cpu)?;
        let density = log_odds(samples).1;
        // Between equal weights (1) and equal shares of the loss ((1−d)/d): their geometric mean.
        let positive_weight = ((1.0 - density) / density.max(1e-4))
            .sqrt()
            .clamp(1.0, 30.0) as f32;
        let parameters = ParamsAdamW {
            lr: LEARNING_RATE,
            beta1: 0.9,
            beta2: 0.99,
            eps: 1e-8,
            weight_decay: 1e-3,
        };
        let mut optimizer = AdamW::new(vec![a.clone(), b.clone(), bias.clone()], parameters)?;

        let tokens = samples.tokens();
        for step in 0..schedule.steps {
            let progress = step as f64 / schedule.steps as f64;
            let warm = ((step + 1) as f64 / 20.0).min(1.0);
            optimizer.set_learning_rate(
                LEARNING_RATE * warm * (0.5 + 0.5 * (std::f64::consts::PI * progress).cos()),
            );
            let batch: Vec<usize> = (0..BATCH.min(tokens))
                .map(|_| random.below(tokens))
                .collect();
            let inputs: Vec<f32> = batch
                .iter()
                .flat_map(|token| samples.input(*token))
                .collect();
            let mut weights = vec![0.0; batch.len() * neurons];
            for (token, weights) in batch.iter().zip(weights.chunks_exact_mut(neurons)) {
                for (neuron, added) in samples.fired(*token) {
                    let matters = EVEN + (1.0 - EVEN) * added.min(MOST_ADDED);
                    weights[neuron] = positive_weight * matters;
                }
            }
            let x = Tensor::from_vec(inputs, (batch.len(), hidden), &Device::Cpu)?;
            let logits = x
                .matmul(&a.t()?)?
                .relu()?
                .matmul(&b.t()?)?
                .broadcast_add(&bias)?;
            let loss = binary_cross_entropy(&logits, weights)?;
            if !loss.to_scalar::<f32>()?.is_finite() {
                return Err(PredictorError::Diverged {
                    layer: schedule.layer,
                });
            }
            optimizer.backward_step(&loss)?;
            between()?;
        }
        let values = |variable: &Var| variable.flatten_all()?.to_vec1::<f32>();
        Ok(Self {
            rank: self.rank,
            a: values(&a)?,
            b: values(&b)?,
            bias: values(&bias)?,
        })
    }
}

impl Network {
    /// Bytes of A, B and b.
    pub(crate) fn bytes(&self) -> usize {
        let matrices = [&self.a, &self.b, &self.bias].map(OwnedMatrix::as_view);
        let bytes = matrices
            .iter()
            .map(|matrix| matrix.rows() * matrix.row_bytes());
        bytes.sum()
    }

    /// Logits of every neuron for the input `x`, as the runtime computes them.
    pub(crate) fn logits(&self, isa: Isa, x: &[f32], middle: &mut [f32], logits: &mut [f32]) {
        isa.gemv(&self.a.as_view(), x, middle);
        middle.iter_mut().for_each(|value| *value = value.max(0.0));
        isa.gemv(&self.b.as_view(), middle, logits);
        let bias = self.bias.as_view();
        for (neuron, logit) in logits.iter_mut().enumerate() {
            let mut one = [0.0];
            bias.dequantise_row(neuron, &mut one);
            *logit += one[0];
        }
    }
}

/// Log-odds of each neuron's firing, with one imagined firing and one silence, and the mean density.
fn log_odds(samples: &TracePart) -> (Vec<f32>, f64) {
    let (tokens, neurons) = (samples.tokens(), samples.active.neurons());
    let mut fired = vec![0usize; neurons];
    for token in 0..tokens {
        for (neuron, count) in fired.iter_mut().enumerate() {
            *count += usize::from(samples.active.is_active(token, neuron));
        }
    }
    let total: usize = fired.iter().sum();
    let odds =
        |count: &usize| ((*count as f64 + 1.0) / ((tokens - count) as f64 + 1.0)).ln() as f32;
    (
        fired.iter().map(odds).collect(),
        total as f64 / (tokens * neurons).max(1) as f64,
    )
}
