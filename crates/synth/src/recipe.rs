//! Distribution of random weights that gives neurons their activation frequencies.
//!
//! Let `x` be an FFN's input after its norm and `H` the hidden size. Channel 0 of the hidden state is the
//! constant `√H`; the other channels have mean square `ε`, which grows from layer to layer by what attention
//! and FFN add. After the norm, `x_0 = √(H/(1+ε))` and the others have mean square `ε/(1+ε)`. With gate
//! weights of variance `2/H`, `gate_i·x` without channel 0 is normal with standard deviation
//! `s = √(2ε/(1+ε))`. A neuron is active if `gate_i·x` exceeds the activation function's threshold `θ`, so its
//! frequency is `p` if channel 0 has the weight `(θ − z·s)/x_0` with `P(normal > z) = p`.

use powerinfer_model::{
    Activation, FfnKind, LayerWeight, ModelConfig, Multipliers, Positions, QueryKeyNorm, Weight,
};

use crate::{SynthError, rates::upper_quantile};

/// Mean square that all FFNs together add to a channel.
const FFN_ENERGY: f64 = 0.25;
/// Mean square that attention would add to a channel if it attended to one token: in the first layer, where
/// it makes hidden states context-dependent, and in all others together.
const ATTENTION_ENERGY: (f64, f64) = (1.0, 0.25);
/// Variance of queries, keys and values, large enough that attention is concentrated on few tokens.
const HEAD_VARIANCE: f64 = 8.0;
/// Resulting mean square of the attention weights, without and with normalised heads.
const CONCENTRATION: (f64, f64) = (0.6, 0.05);
/// Standard deviation of learned positions.
pub(crate) const POSITIONS: f64 = 0.1;

/// Standard deviations and offsets of the weights of one layer.
#[derive(Debug, Clone)]
pub(crate) struct LayerRecipe {
    /// Value of channel 0 of the FFN's input.
    pub(crate) constant: f64,
    /// Standard deviation of the other channels of the FFN's input.
    pub(crate) deviation: f64,
    /// Standard deviation of the attention output projection.
    pub(crate) output: f64,
    /// Standard deviation of the down projection.
    pub(crate) down: f64,
    /// Gate weight of channel 0, by activation frequency.
    pub(crate) gate_offsets: Vec<f64>,
    /// Router weight of channel 0, by selection frequency; empty in dense models.
    pub(crate) router_offsets: Vec<f64>,
    /// Up weight of channel 0, by activation frequency, if up has a ReLU too.
    pub(crate) up_offsets: Option<Vec<f64>>,
}

/// Standard deviation of gate and up.
pub(crate) fn projection_deviation(config: &ModelConfig) -> f64 {
    (2.0 / config.hidden_size as f64).sqrt()
}

/// Standard deviation of the query, key and value projections.
pub(crate) fn head_deviation(config: &ModelConfig) -> f64 {
    HEAD_VARIANCE.sqrt() * projection_deviation(config)
}

/// Computes the recipe of every layer for the activation frequencies `rates` of neurons and the selection frequencies of `experts`. The
/// neurons of an expert whose activation is never zero all have the same distribution.
pub(crate) fn recipe(
    config: &ModelConfig,
    rates: &[f64],
    experts: &[f64],
) -> Result<Vec<LayerRecipe>, SynthError> {
    let unsupported = |reason: &str| SynthError::Unsupported {
        reason: reason.to_owned(),
    };
    let is_dense = config.experts.is_none();
    if is_dense && !config.activation.has_exact_zeros() {
        return Err(unsupported(
            "the activation of this configuration is never exactly zero, so it has no sparsity to set; change it to `relu`",
        ));
    }
    if !config.block.norms_input()
        || config.block.norms_output()
        || config.embedding_size != config.hidden_size
    {
        return Err(unsupported(
            "models with norms after attention and FFN, or with an embedding size that differs from the hidden size, are not supported; use another shape",
        ));
    }
    let tensors = config.stored_tensors();
    let gate = tensors
        .iter()
        .find(|tensor| matches!(tensor.weight, Weight::Layer(0, LayerWeight::Gate)));
    if is_dense && gate.is_none_or(|gate| gate.shape != config.shape(gate.weight))
        || config.multipliers != Multipliers::default()
        || config.ffn == FfnKind::ClampedGated
    {
        return Err(unsupported(
            "this family stores its gates with other matrices, transposed, or with multipliers; take another shape",
        ));
    }
    let hidden = config.hidden_size as f64;
    let layers = config.layer_count as f64;
    let threshold = match config.activation {
        Activation::FatRelu { threshold } => f64::from(threshold),
        _ => 0.0,
    };
    // With a ReLU on both, a neuron is active if both are positive.
    let passing = |rate: f64| match config.ffn {
        FfnKind::DoublyGated => rate.sqrt(),
        FfnKind::Plain | FfnKind::Gated | FfnKind::ClampedGated => rate,
    };
    let quantiles: Vec<f64> = rates
        .iter()
        .map(|rate| match config.activation.has_exact_zeros() {
            true => upper_quantile(passing(*rate)),
            false => 0.0,
        })
        .collect();
    let concentration = if config.query_key_norm != QueryKeyNorm::None {
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
        let width = config.mixed_size() as f64;
        let values = HEAD_VARIANCE * scale(energy).powi(2);
        let output = (added / (width * values)).sqrt();
        let attended = energy + concentration * added;
        let seen = if config.block.is_parallel() {
            energy
        } else {
            attended
        };
        let constant = (hidden / (1.0 + seen)).sqrt();
        let deviation = scale(seen);
        // Mean square of the neurons' activations.
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
                    // Inputs rarely reach the limit.
                    FfnKind::ClampedGated => gate * (deviation * deviation + 1.0),
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
            router_offsets: experts
                .iter()
                .map(|rate| -upper_quantile(*rate) * deviation / constant)
                .collect(),
        });
        energy = attended + FFN_ENERGY / layers;
    }
    Ok(recipes)
}

/// Computes the mean of `activation(z)²` over normal `z` by the midpoint rule.
fn second_moment(activation: Activation, mean: f64, deviation: f64) -> f64 {
    const STEPS: i32 = 160;
    const RANGE: f64 = 8.0;
    let step = 2.0 * RANGE / f64::from(STEPS);
    let sum: f64 = (0..STEPS)
        .map(|index| {
            let z = -RANGE + (f64::from(index) + 0.5) * step;
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
    fn moments_match_the_formula() {
        // E[relu(N(0, 1))²] = 1/2; E[relu(N(m, 1))²] = (1 + m²)Φ(m) + mφ(m).
        assert!((second_moment(Activation::Relu, 0.0, 1.0) - 0.5).abs() < 1e-3);
        let (m, cumulative, density) = (-1.0, 0.158_655_25, 0.241_970_72);
        let expected = 2.0 * cumulative + m * density;
        assert!((second_moment(Activation::Relu, m, 1.0) - expected).abs() < 1e-3);
    }
}
