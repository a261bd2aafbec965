//! CUDA kernels against the CPU kernels and against formulas in `f64`: on the emulator in several thread orders, or on a
//! GPU.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod attention;
mod batches;
mod feed_forward;
mod prediction;
mod projection;
mod routing;

#[path = "../support/devices.rs"]
mod devices;
#[path = "../support/noise.rs"]
mod noise;

use std::sync::Arc;

use powerinfer_kernels::{
    Arithmetic, Isa, QuantisedActivations,
    cuda::{Buffer, Device, GpuNorm},
};
use powerinfer_tensor::{Matrix, NormKind};

use noise::noise;

/// Row lengths: less than a block, whole blocks, odd lengths.
const COLUMNS: [usize; 8] = [1, 8, 31, 32, 33, 100, 256, 1030];

fn upload(device: &Arc<dyn Device>, values: &[f32]) -> Buffer<f32> {
    Buffer::from_slice(device, values).unwrap()
}

fn zeros<T: bytemuck::Pod>(device: &Arc<dyn Device>, count: usize) -> Buffer<T> {
    Buffer::new(device, count).unwrap()
}

/// A norm's weight and bias, with its formula in `f64`.
struct Norm {
    kind: NormKind,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

const EPSILON: f32 = 1e-5;

impl Norm {
    fn new(kind: NormKind, size: usize) -> Self {
        Self {
            kind,
            weight: noise(1, size),
            bias: (kind == NormKind::Layer).then(|| noise(2, size)),
        }
    }

    fn upload(&self, device: &Arc<dyn Device>) -> GpuNorm {
        GpuNorm::upload(
            device,
            self.kind,
            EPSILON,
            &self.weight,
            self.bias.as_deref(),
        )
        .unwrap()
    }

    fn apply(&self, x: &[f32]) -> Vec<f32> {
        let count = x.len() as f64;
        let mean = match self.kind {
            NormKind::Layer => x.iter().map(|x| f64::from(*x)).sum::<f64>() / count,
            NormKind::RootMeanSquare => 0.0,
        };
        let squares = x
            .iter()
            .map(|x| (f64::from(*x) - mean).powi(2))
            .sum::<f64>();
        let scale = 1.0 / (squares / count + f64::from(EPSILON)).sqrt();
        let normed = x.iter().enumerate().map(|(index, x)| {
            let bias = self.bias.as_ref().map_or(0.0, |bias| bias[index]);
            ((f64::from(*x) - mean) * scale * f64::from(self.weight[index]) + f64::from(bias))
                as f32
        });
        normed.collect()
    }
}

/// `matrix · x` of the CPU kernels.
fn product(matrix: &Matrix<'_>, x: &[f32], arithmetic: Arithmetic) -> Vec<f32> {
    let mut out = vec![0.0; matrix.rows()];
    if arithmetic == Arithmetic::Integer && matrix.format().is_quantised() {
        let mut int8 = QuantisedActivations::default();
        Isa::SCALAR.quantise(x, matrix.columns(), &mut int8);
        Isa::SCALAR.gemv_integer(matrix, int8.vector(0), &mut out);
    } else {
        Isa::SCALAR.gemv(matrix, x, &mut out);
    }
    out
}
