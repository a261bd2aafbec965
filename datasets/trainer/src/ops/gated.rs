//! The gated FFN's middle, `h = act(gate) · up`, with the penalty that makes ReLU's sparse.
//!
//! The penalty is `Σ_i λ_i · relu(gate_i)`; it enters through its gradient, a constant `λ_i` on
//! every neuron that fires, so that it costs nothing. λ is shared by a band of neurons: with a
//! price for each band, what is needed often settles in the cheap ones, so that few neurons are
//! hot and many are cold, as in large models.

use std::sync::Mutex;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use super::{values, with_values};

/// What a neuron makes of its gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Activation {
    /// Exactly zero where the gate is negative, which has a price: most neurons fall silent.
    Relu,
    /// Never exactly zero and priced at nothing, as most published models are.
    Silu,
}

impl Activation {
    /// The name in `config.json`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Relu => "relu",
            Self::Silu => "silu",
        }
    }

    /// `act(gate)`.
    fn value(self, gate: f32) -> f32 {
        match self {
            Self::Relu => gate.max(0.0),
            Self::Silu => gate * sigmoid(gate),
        }
    }

    /// `act'(gate)`.
    fn slope(self, gate: f32) -> f32 {
        match self {
            Self::Relu => f32::from(u8::from(gate > 0.0)),
            Self::Silu => {
                let sigmoid = sigmoid(gate);
                sigmoid * (1.0 + gate * (1.0 - sigmoid))
            }
        }
    }

    /// Whether the neuron contributes anything.
    fn fires(self, gate: f32) -> bool {
        self == Self::Silu || gate > 0.0
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// How often each neuron of a layer fired.
#[derive(Default)]
pub(crate) struct Activity {
    /// Tokens seen.
    pub(crate) tokens: u64,
    /// Tokens on which each neuron fired.
    pub(crate) active: Vec<u64>,
}

/// Bands of neighbouring neurons that share a price.
pub(crate) const BANDS: usize = 8;

/// λ of each band, per token and neuron.
pub(crate) type Penalty = [f32; BANDS];

impl Activity {
    /// Share of its neurons that fire, for each band.
    pub(crate) fn by_band(&self) -> [f64; BANDS] {
        let width = self.active.len() / BANDS;
        std::array::from_fn(|band| {
            let fired: u64 = self.active[band * width..][..width].iter().sum();
            fired as f64 / (self.tokens as f64 * width as f64)
        })
    }
}

/// `gate_up [tokens, 2·ffn]`, gate first, to `[tokens, ffn]`.
pub(crate) struct Gated<'a> {
    /// What neurons make of their gates.
    pub(crate) activation: Activation,
    /// What firing costs.
    pub(crate) penalty: &'a Penalty,
    /// Where to count.
    pub(crate) activity: &'a Mutex<Activity>,
}

impl Gated<'_> {
    /// Applies the operation; counts who fires.
    pub(crate) fn apply(self, gate_up: &Tensor) -> Result<Tensor> {
        let width = gate_up.dim(1)? / 2;
        with_values(gate_up, |values| {
            let mut counted = self
                .activity
                .lock()
                .expect("no thread panics while counting");
            counted.active.resize(width, 0);
            for row in values.chunks_exact(2 * width) {
                counted.tokens += 1;
                for (count, gate) in counted.active.iter_mut().zip(&row[..width]) {
                    *count += u64::from(self.activation.fires(*gate));
                }
            }
            Ok(())
        })?;
        gate_up.apply_op1(Gate {
            activation: self.activation,
            penalty: *self.penalty,
        })
    }
}

struct Gate {
    activation: Activation,
    penalty: Penalty,
}

impl CustomOp1 for Gate {
    fn name(&self) -> &'static str {
        "gated"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (tokens, doubled) = layout.shape().dims2()?;
        let width = doubled / 2;
        let mut out = Vec::with_capacity(tokens * width);
        for row in values(storage, layout)?.chunks_exact(doubled) {
            let (gate, up) = row.split_at(width);
            out.extend(
                gate.iter()
                    .zip(up)
                    .map(|(gate, up)| self.activation.value(*gate) * up),
            );
        }
        Ok((CpuStorage::F32(out), (tokens, width).into()))
    }

    fn bwd(&self, gate_up: &Tensor, _out: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let width = grad.dim(1)?;
        let penalties: Vec<f32> = (0..width)
            .map(|index| match self.activation {
                Activation::Relu => self.penalty[index * BANDS / width],
                Activation::Silu => 0.0,
            })
            .collect();
        let out = with_values(gate_up, |values| {
            with_values(grad, |grad| {
                let mut out = Vec::with_capacity(values.len());
                for (row, grad) in values.chunks_exact(2 * width).zip(grad.chunks_exact(width)) {
                    let (gate, up) = row.split_at(width);
                    let act = self.activation;
                    out.extend(
                        (0..width).map(|i| act.slope(gate[i]) * (up[i] * grad[i] + penalties[i])),
                    );
                    out.extend((0..width).map(|i| act.value(gate[i]) * grad[i]));
                }
                Ok(out)
            })
        })?;
        Ok(Some(Tensor::from_vec(
            out,
            gate_up.shape(),
            gate_up.device(),
        )?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn the_penalty_adds_its_bands_price_where_a_neuron_fires() {
        let activity = Mutex::default();
        let mut gates = [1f32; 4 * BANDS];
        gates[3] = -1.0;
        let gates = candle_core::Var::from_slice(&gates, (1, 4 * BANDS), &Device::Cpu).unwrap();
        let penalty = std::array::from_fn(|band| band as f32 + 1.0);
        let out = Gated {
            activation: Activation::Relu,
            penalty: &penalty,
            activity: &activity,
        }
        .apply(gates.as_tensor())
        .unwrap();
        // Nothing comes from behind, so the penalty alone is left.
        let nothing = Tensor::zeros((1, 2 * BANDS), candle_core::DType::F32, &Device::Cpu).unwrap();
        let gradients = (out * nothing)
            .unwrap()
            .sum_all()
            .unwrap()
            .backward()
            .unwrap();
        let gradient = gradients
            .get(gates.as_tensor())
            .unwrap()
            .to_vec2::<f32>()
            .unwrap();
        assert_eq!(gradient[0][..6], [1.0, 1.0, 2.0, 0.0, 3.0, 3.0]);
        assert_eq!(gradient[0][2 * BANDS..], [0.0; 2 * BANDS]);
        let shares = activity.lock().unwrap().by_band();
        assert_eq!(shares[..3], [1.0, 0.5, 1.0]);
    }

    #[test]
    fn gradients_match_finite_differences() {
        let mix = Tensor::rand(-1f32, 1.0, (3, 4), &Device::Cpu).unwrap();
        for activation in [Activation::Relu, Activation::Silu] {
            let activity = Mutex::default();
            super::super::check_gradient((3, 8), |x| {
                (Gated {
                    activation,
                    penalty: &[0.0; BANDS],
                    activity: &activity,
                }
                .apply(x)?
                    * &mix)?
                    .sum_all()
            });
        }
    }
}
