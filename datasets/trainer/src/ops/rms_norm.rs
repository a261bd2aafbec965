//! RMS norm over rows: `y = x · w / √(mean(x²) + ε)` (Zhang and Sennrich, 2019).

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};

use super::{values, with_values};

/// ε of every norm of the demo model.
pub(crate) const EPSILON: f32 = 1e-5;

/// Normalises `x [rows, width]` by `weight [width]`.
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    x.apply_op2(weight, RmsNorm)
}

struct RmsNorm;

/// `1 / √(mean(x²) + ε)` of one row.
fn inverse_rms(row: &[f32]) -> f32 {
    let mean = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
    1.0 / (mean + EPSILON).sqrt()
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        w: &CpuStorage,
        lw: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, weight) = (values(x, lx)?, values(w, lw)?);
        let mut out = Vec::with_capacity(x.len());
        for row in x.chunks_exact(weight.len()) {
            let scale = inverse_rms(row);
            out.extend(row.iter().zip(weight).map(|(x, w)| x * scale * w));
        }
        Ok((CpuStorage::F32(out), lx.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let width = w.elem_count();
        let (dx, dw) = with_values(x, |x| {
            with_values(w, |weight| {
                with_values(grad, |grad| {
                    let mut dx = Vec::with_capacity(x.len());
                    let mut dw = vec![0f32; width];
                    for (row, grad) in x.chunks_exact(width).zip(grad.chunks_exact(width)) {
                        let scale = inverse_rms(row);
                        let mut along = 0f32;
                        for column in 0..width {
                            along += grad[column] * weight[column] * row[column];
                            dw[column] += grad[column] * row[column] * scale;
                        }
                        let pull = along * scale * scale * scale / width as f32;
                        dx.extend((0..width).map(|column| {
                            grad[column] * weight[column] * scale - row[column] * pull
                        }));
                    }
                    Ok((dx, dw))
                })
            })
        })?;
        Ok((
            Some(Tensor::from_vec(dx, x.shape(), x.device())?),
            Some(Tensor::from_vec(dw, w.shape(), w.device())?),
        ))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn gradient_matches_finite_differences() {
        let weight = Tensor::from_slice(&[0.5f32, 1.5, -1.0, 2.0, 0.25], 5, &Device::Cpu).unwrap();
        let mix = Tensor::rand(-1f32, 1.0, (3, 5), &Device::Cpu).unwrap();
        super::super::check_gradient((3, 5), |x| (rms_norm(x, &weight)? * &mix)?.sum_all());
        let x = Tensor::rand(-1f32, 1.0, (3, 5), &Device::Cpu).unwrap();
        super::super::check_gradient((1, 5), |w| {
            (rms_norm(&x, &w.flatten_all()?)? * &mix)?.sum_all()
        });
    }
}
