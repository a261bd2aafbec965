//! One predictor: `logits = B · relu(A · x) + b`.
//!
//! The bias is ours beside the published form `B · relu(A · x)`: without it the network spends
//! rank on remembering how often each neuron fires on the whole.

use candle_core::{Device, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use powerinfer_artifact::{predictor_file::PredictorInput, random::Random};
use powerinfer_kernels::{Format, Isa, OwnedMatrix, pack};
use powerinfer_profile::TracePart;

use crate::{PredictorError, loss::binary_cross_entropy};

/// Tokens per optimiser step.
const BATCH: usize = 256;
/// Largest learning rate; it falls to zero along a cosine.
const LEARNING_RATE: f64 = 4e-3;

/// A predictor as it is stored: rounded to its format, because that is what will run.
pub(crate) struct Network {
    pub(crate) rank: usize,
    pub(crate) input: PredictorInput,
    pub(crate) a: OwnedMatrix,
    pub(crate) b: OwnedMatrix,
    pub(crate) bias: Vec<f32>,
}

/// How long and from where to train.
#[derive(Clone, Copy)]
pub(crate) struct Schedule {
    pub(crate) steps: usize,
    pub(crate) seed: u64,
    pub(crate) layer: usize,
}

impl Network {
    /// Bytes of A, B and b.
    pub(crate) fn bytes(&self) -> usize {
        let matrices = [&self.a, &self.b].map(OwnedMatrix::as_view);
        let matrices = matrices.map(|matrix| matrix.rows() * matrix.row_bytes());
        matrices[0] + matrices[1] + size_of_val(&self.bias[..])
    }

    /// Trains a network of `rank` on `samples`, to be stored in the format `weights`; `between`
    /// runs after every step and may stop it.
    pub(crate) fn train(
        samples: &TracePart,
        rank: usize,
        weights: Format,
        schedule: Schedule,
        mut between: impl FnMut() -> Result<(), PredictorError>,
    ) -> Result<Self, PredictorError> {
        let (hidden, neurons) = (samples.hidden_size, samples.active.neurons());
        let mut random = Random::new(schedule.seed);
        let mut normal = |rows: usize, columns: usize| {
            let deviation = 1.0 / (columns as f64).sqrt();
            let values: Vec<f32> = (0..rows * columns)
                .map(|_| (random.normal() * deviation) as f32)
                .collect();
            Var::from_vec(values, (rows, columns), &Device::Cpu)
        };
        let (a, b) = (normal(rank, hidden)?, normal(neurons, rank)?);
        let (bias, density) = log_odds(samples);
        let bias = Var::from_vec(bias, neurons, &Device::Cpu)?;
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
            let mut labels = vec![0.0; batch.len() * neurons];
            for (token, labels) in batch.iter().zip(labels.chunks_exact_mut(neurons)) {
                samples.active.expand(*token, labels);
            }
            let x = Tensor::from_vec(inputs, (batch.len(), hidden), &Device::Cpu)?;
            let logits = x
                .matmul(&a.t()?)?
                .relu()?
                .matmul(&b.t()?)?
                .broadcast_add(&bias)?;
            let loss = binary_cross_entropy(&logits, labels, positive_weight)?;
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
            rank,
            input: PredictorInput::Normed,
            a: pack(weights, rank, hidden, &values(&a)?),
            b: pack(weights, neurons, rank, &values(&b)?),
            bias: values(&bias)?,
        })
    }

    /// Logits of every neuron for the input `x`, as the runtime computes them.
    pub(crate) fn logits(&self, isa: Isa, x: &[f32], middle: &mut [f32], logits: &mut [f32]) {
        isa.gemv(&self.a.as_view(), x, middle);
        middle.iter_mut().for_each(|value| *value = value.max(0.0));
        isa.gemv(&self.b.as_view(), middle, logits);
        logits
            .iter_mut()
            .zip(&self.bias)
            .for_each(|(logit, bias)| *logit += bias);
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
