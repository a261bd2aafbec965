//! Trains the predictor of a layer, as wide as pays.

use powerinfer_artifact::{Digest, Progress};
use powerinfer_kernels::{Format, Isa};
use powerinfer_profile::Profile;

use crate::{
    PredictorError,
    calibrate::{Quality, calibrate},
    make::FEWEST_SAMPLES,
    network::{Network, Schedule},
};

/// Share of the bytes that a wider predictor must save to be worth training the next.
const WORTHWHILE: f64 = 0.02;
/// Narrowest predictor; ranks grow from here by half.
const FIRST_RANK: usize = 32;

/// What shapes trained predictors, beside the profile.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Share of active neurons that must be predicted on held-out tokens.
    pub recall: f64,
    /// Optimiser steps per network.
    pub steps: usize,
    /// Format the weights of the neurons will have, which says what a neuron costs.
    pub quant: Format,
    /// Format of the predictors' own weights.
    pub weights: Format,
    /// Seed of initialisation and batches.
    pub seed: u64,
}

/// Grows the rank while predictor and predicted neurons together get cheaper to read.
pub(crate) fn best_network(
    layer: usize,
    profile: &Profile,
    settings: Settings,
    isa: Isa,
    progress: &dyn Progress,
) -> Result<(Network, Quality), PredictorError> {
    let traces = profile.traces(layer)?;
    let (training, held_out) = (traces.training.tokens(), traces.held_out.tokens());
    if training < FEWEST_SAMPLES || held_out < FEWEST_SAMPLES {
        return Err(PredictorError::TooFewSamples {
            layer,
            training,
            held_out,
            needed: FEWEST_SAMPLES,
        });
    }
    let (hidden, neurons) = (
        traces.training.hidden_size,
        traces.training.active.neurons(),
    );
    let neuron_bytes = 3 * settings.quant.row_bytes(hidden);
    let mut best: Option<(f64, Network, Quality)> = None;
    let mut rank = FIRST_RANK;
    while rank <= hidden.max(FIRST_RANK) {
        let seed = Digest::of_parts(
            [settings.seed, layer as u64, rank as u64]
                .map(u64::to_le_bytes)
                .iter()
                .map(|b| &b[..]),
        )
        .leading_bits();
        let schedule = Schedule {
            steps: settings.steps,
            seed,
            layer,
        };
        let network = Network::train(&traces.training, rank, settings.weights, schedule, || {
            Ok(progress.advance(0)?)
        })?;
        let quality = calibrate(&network, &traces.held_out, settings.recall, isa);
        let cost =
            network.bytes() as f64 + quality.predicted_density * (neurons * neuron_bytes) as f64;
        match &best {
            Some((lowest, ..)) if cost >= (1.0 - WORTHWHILE) * lowest => break,
            _ => best = Some((cost, network, quality)),
        }
        rank += (rank / 2).next_multiple_of(32);
    }
    let (_, network, quality) = best.expect("the first rank is always tried");
    Ok((network, quality))
}
