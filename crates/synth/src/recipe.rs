//! What random weights must look like for neurons to fire at given rates.
//!
//! Write `x` for an FFN's input after its norm, `H` for the hidden size. Channel 0 of the hidden
//! state is the constant `√H`; the other channels have mean square `ε`, which grows from layer to
//! layer by what attention and FFN add. After the norm, `x_0 = √(H/(1+ε))` and the others have
//! mean square `ε/(1+ε)`. With gate weights of variance `2/H`, `gate_i·x` without channel 0 is
//! normal with deviation `s = √(2ε/(1+ε))`. The neuron fires where `gate_i·x` exceeds `θ`, the
//! threshold of the activation, so it fires at rate `p` if channel 0 weighs `(θ − z·s)/x_0` with
//! `P(normal > z) = p`.

use powerinfer_model::{Activation, Block, FfnKind, ModelConfig, Positions};

use crate::{SynthError, rates::upper_quantile};

/// Mean square of what all FFNs together add to a channel.
const FFN_ENERGY: f64 = 0.25;
/// Mean square of what attention adds to a channel, were it to look at one token: in the first
/// layer, where it makes hidden states differ by context, and in all others together.
const ATTENTION_ENERGY: (f64, f64) = (1.0, 0.25);
/// Variance of queries, keys and values, so large that attention looks at few tokens.
const HEAD_VARIANCE: f64 = 8.0;
/// Mean square of attention's weights that follows from it; heads that are normalised look around.
const CONCENTRATION: (f64, f64) = (0.6, 0.05);
/// Deviation of learned positions.
pub(crate) const POSITIONS: f64 = 0.1;

/// Deviations and offsets of the weights of one layer.
#[derive(Debug, Clone)]
pub(crate) struct LayerRecipe {
    /// Value of channel 0 of the FFN's input.
    pub(crate) constant: f64,
    /// Deviation of the other channels of the FFN's input.
    pub(crate) deviation: f64,
    /// Deviation of the rows of the attention's output projection.
    pub(crate) output: f64,
    /// Deviation of the rows of down.
    pub(crate) down: f64,
    /// What channel 0 weighs in the gate, per rate.
    pub(crate) gate_offsets: Vec<f64>,
    /// The same for up, where it has a ReLU of its own.
    pub(crate) up_offsets: Option<Vec<f64>>,
}

/// Deviation of gate and up.
pub(crate) fn projection_deviation(config: &ModelConfig) -> f64 {
    (2.0 / config.hidden_size as f64).sqrt()
}

/// Deviation of queries, keys and values.
pub(crate) fn head_deviation(config: &ModelConfig) -> f64 {
    HEAD_VARIANCE.sqrt() * projection_deviation(config)
}

/// The recipe of every layer, for neurons that fire at these rates.
pub(crate) fn recipe(config: &ModelConfig, rates: &[f64]) -> Result<Vec<LayerRecipe>, SynthError> {
    let unsuited = |reason: &str| SynthError::Unsuited {
        reason: reason.to_owned(),
    };
    if !config.activation.has_exact_zeros() {
        return Err(unsuited(
            "the activation of this configuration is never exactly zero, so it has no sparsity to set; change it to `relu`",
        ));
    }
    if config.block == Block::PostNorm || config.embedding_size != config.hidden_size {
        return Err(unsuited(
            "models with norms after their parts, or with embeddings of another width, are not made; take another shape",
        ));
    }
    let hidden = config.hidden_size as f64;
    let layers = config.layer_count as f64;
    let threshold = match config.activation {
        Activation::FatRelu { threshold } => f64::from(threshold),
        _ => 0.0,
    };
    // With a ReLU on both, a neuron fires where both pass.
    let passing = |rate: f64| match config.ffn {
        FfnKind::DoublyGated => rate.sqrt(),
        FfnKind::Plain | FfnKind::Gated => rate,
    };
    let quantiles: Vec<f64> = rates
        .iter()
        .map(|rate| upper_quantile(passing(*rate)))
        .collect();
    let concentration = if config.query_key_norm {
        CONCENTRATION.1
    } else {
        CONCENTRATION.0
    };
    let mut energy = match config.positions {
        Positions::Learned { .. } => 1.0 + POSITIONS * POSITIONS,
        _ => 1.0,
    };
    let scale = |energy: f64| (2.0 * energy / (1.0 + energy)).sqrt();
    let mut recipes = Vec::new();
    for layer in 0..config.layer_count {
        let added = match layer {
            0 => ATTENTION_ENERGY.0,
            _ => ATTENTION_ENERGY.1 / layers,
        };
        let width = (config.head_count * config.head_size) as f64;
        let values = HEAD_VARIANCE * scale(energy).powi(2);
        let output = (added / (width * values)).sqrt();
        let attended = energy + concentration * added;
        let seen = match config.block {
            Block::Parallel | Block::ParallelSharedNorm => energy,
            Block::PreNorm | Block::PostNorm => attended,
        };
        let constant = (hidden / (1.0 + seen)).sqrt();
        let deviation = scale(seen);
        // What each neuron passes on, on average over the neurons.
        let moment = quantiles
            .iter()
            .step_by(quantiles.len().div_ceil(512))
            .map(|quantile| {
                let mean = threshold - quantile * deviation;
                let gate = second_moment(config.activation, mean, deviation);
                match config.ffn {
                    FfnKind::Plain => gate,
                    FfnKind::Gated => gate * deviation * deviation,
                    FfnKind::DoublyGated => gate * gate,
                }
            });
        let (count, sum) = moment.fold((0, 0.0), |(count, sum), one| (count + 1, sum + one));
        let passed = config.ffn_size as f64 * sum / f64::from(count.max(1));
        let offsets: Vec<f64> = quantiles
            .iter()
            .map(|quantile| (threshold - quantile * deviation) / constant)
            .collect();
        recipes.push(LayerRecipe {
            constant,
            deviation: deviation / std::f64::consts::SQRT_2,
            output,
            down: (FFN_ENERGY / layers / passed.max(1e-12)).sqrt(),
            up_offsets: (config.ffn == FfnKind::DoublyGated).then(|| offsets.clone()),
            gate_offsets: offsets,
        });
        energy = attended + FFN_ENERGY / layers;
    }
    Ok(recipes)
}

/// The mean of `activation(z)²` over normal `z`, by the midpoint rule.
fn second_moment(activation: Activation, mean: f64, deviation: f64) -> f64 {
    const STEPS: i32 = 160;
    const REACH: f64 = 8.0;
    let step = 2.0 * REACH / f64::from(STEPS);
    let sum: f64 = (0..STEPS)
        .map(|index| {
            let z = -REACH + (f64::from(index) + 0.5) * step;
            let value = f64::from(activation.apply((mean + deviation * z) as f32));
            value * value * (-z * z / 2.0).exp()
        })
        .sum();
    sum * step / std::f64::consts::TAU.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_those_of_the_formula() {
        // E[relu(N(0, 1))²] = 1/2; E[relu(N(m, 1))²] = (1 + m²)Φ(m) + mφ(m).
        assert!((second_moment(Activation::Relu, 0.0, 1.0) - 0.5).abs() < 1e-3);
        let (m, cumulative, density) = (-1.0, 0.158_655_25, 0.241_970_72);
        let expected = 2.0 * cumulative + m * density;
        assert!((second_moment(Activation::Relu, m, 1.0) - expected).abs() < 1e-3);
    }
}
