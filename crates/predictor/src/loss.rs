//! Weighted binary cross-entropy on logits, value and gradient in one pass.

use std::sync::Mutex;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

/// Mean over all entries of `w·(−y·log σ(z) − (1−y)·log(1−σ(z)))` of logits z.
///
/// `weights`, in the order of the logits, are the w where y = 1, and zero where y = 0, which
/// weighs one.
pub(crate) fn binary_cross_entropy(logits: &Tensor, weights: Vec<f32>) -> Result<Tensor> {
    logits.apply_op1(BinaryCrossEntropy {
        weights,
        gradient: Mutex::default(),
    })
}

struct BinaryCrossEntropy {
    weights: Vec<f32>,
    /// Left by the forward pass, which has every exponential at hand.
    gradient: Mutex<Vec<f32>>,
}

impl CustomOp1 for BinaryCrossEntropy {
    fn name(&self) -> &'static str {
        "binary-cross-entropy"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (CpuStorage::F32(values), Some((start, end))) = (storage, layout.contiguous_offsets())
        else {
            bail!("contiguous float32 logits expected");
        };
        let logits = &values[start..end];
        let scale = 1.0 / logits.len() as f32;
        let mut gradient = Vec::with_capacity(logits.len());
        let mut total = 0f64;
        for (logit, weight) in logits.iter().zip(&self.weights) {
            // With e = exp(−|z|) ≤ 1 nothing overflows: σ(|z|) = 1/(1+e).
            let e = (-logit.abs()).exp();
            let probability = if *logit >= 0.0 { 1.0 } else { e } / (1.0 + e);
            let is_active = *weight > 0.0;
            let (label, weight) = if is_active {
                (1.0, *weight)
            } else {
                (0.0, 1.0)
            };
            gradient.push((probability - label) * weight * scale);
            let margin = if is_active { *logit } else { -*logit };
            total += f64::from((e.ln_1p() + (-margin).max(0.0)) * weight);
        }
        *self.gradient.lock().expect("one thread runs the operation") = gradient;
        let mean = (total / logits.len() as f64) as f32;
        Ok((CpuStorage::F32(vec![mean]), Shape::from(())))
    }

    fn bwd(&self, logits: &Tensor, _loss: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let outer = grad.to_scalar::<f32>()?;
        let gradient =
            std::mem::take(&mut *self.gradient.lock().expect("one thread runs the operation"));
        let gradient = Tensor::from_vec(gradient, logits.shape(), logits.device())?;
        Ok(Some((gradient * f64::from(outer))?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    #[test]
    fn loss_and_gradient_match_the_definition() {
        let logits = [-3.0f32, -0.5, 0.0, 0.7, 4.0, 40.0];
        let weights = vec![0.0f32, 2.5, 0.0, 1.5, 0.5, 0.0];
        let variable = Var::from_slice(&logits, (2, 3), &Device::Cpu).unwrap();
        let loss = binary_cross_entropy(variable.as_tensor(), weights.clone()).unwrap();
        let expected: f64 = logits
            .iter()
            .zip(&weights)
            .map(|(z, w)| {
                let p = 1.0 / (1.0 + (-f64::from(*z)).exp());
                if *w > 0.0 {
                    -p.ln() * f64::from(*w)
                } else {
                    -(1.0 - p).max(1e-300).ln().max(-40.0)
                }
            })
            .sum::<f64>()
            / 6.0;
        assert!((f64::from(loss.to_scalar::<f32>().unwrap()) - expected).abs() < 1e-2 * expected);
        let gradient = loss
            .backward()
            .unwrap()
            .get(variable.as_tensor())
            .unwrap()
            .flatten_all()
            .unwrap();
        for ((got, z), w) in gradient
            .to_vec1::<f32>()
            .unwrap()
            .iter()
            .zip(&logits)
            .zip(&weights)
        {
            let (y, w) = if *w > 0.0 { (1.0, *w) } else { (0.0, 1.0) };
            let want = (1.0 / (1.0 + (-z).exp()) - y) * w / 6.0;
            assert!((got - want).abs() < 1e-6, "{got} {want}");
        }
    }
}
