//! Weighted cross-entropy: mean over rows of `−w · log softmax(logits)[target]`.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use super::{values, with_values};

/// The loss of `logits [rows, classes]`, a scalar; weights are divided by their sum.
pub(crate) fn cross_entropy(logits: &Tensor, targets: &[u32], weights: &[f32]) -> Result<Tensor> {
    let total: f32 = weights.iter().sum();
    let weights = weights.iter().map(|weight| weight / total).collect();
    logits.apply_op1(CrossEntropy {
        targets: targets.to_vec(),
        weights,
    })
}

struct CrossEntropy {
    targets: Vec<u32>,
    weights: Vec<f32>,
}

/// `log Σ exp(row)`, without overflow.
fn log_sum_exp(row: &[f32]) -> f32 {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    largest + row.iter().map(|x| (x - largest).exp()).sum::<f32>().ln()
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, classes) = layout.shape().dims2()?;
        let mut loss = 0f64;
        for (index, row) in values(storage, layout)?.chunks_exact(classes).enumerate() {
            let miss = log_sum_exp(row) - row[self.targets[index] as usize];
            loss += f64::from(miss * self.weights[index]);
        }
        Ok((CpuStorage::F32(vec![loss as f32]), Shape::from(())))
    }

    fn bwd(&self, logits: &Tensor, _out: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let classes = logits.dim(1)?;
        let grad = grad.to_scalar::<f32>()?;
        let out = with_values(logits, |values| {
            let mut out = Vec::with_capacity(values.len());
            for (index, row) in values.chunks_exact(classes).enumerate() {
                let weight = self.weights[index] * grad;
                let normaliser = log_sum_exp(row);
                let start = out.len();
                out.extend(row.iter().map(|x| (x - normaliser).exp() * weight));
                out[start + self.targets[index] as usize] -= weight;
            }
            Ok(out)
        })?;
        Ok(Some(Tensor::from_vec(
            out,
            logits.shape(),
            logits.device(),
        )?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradient_matches_finite_differences() {
        super::super::check_gradient((4, 6), |x| {
            cross_entropy(x, &[5, 0, 3, 3], &[1.0, 0.2, 1.0, 2.0])
        });
    }
}
