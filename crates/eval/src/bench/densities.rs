//! Time of single FFNs with a share of their neurons and with all.

use powerinfer_artifact::{Progress, random::Random};
use powerinfer_model::LanguageModel;
use powerinfer_runtime::Runtime;
use serde::Serialize;

use super::measure::Spread;
use crate::EvalError;

/// Time of one layer's FFN with a share of its neurons.
#[derive(Debug, Serialize)]
pub struct FfnTime {
    /// Share of the neurons computed.
    pub neuron_share: f64,
    /// Time over all layers and repeats.
    pub microseconds: Spread,
    /// Time relative to that of all neurons.
    pub time_share: f64,
}

/// Times FFNs with each of `shares` of their neurons, drawn at random, and last with all.
///
/// Layers take turns, so that weights come from memory and not from a cache.
///
/// # Errors
///
/// Fails if the user asks to stop.
pub fn time_ffns(
    model: &mut Runtime,
    shares: &[f64],
    repeats: usize,
    progress: &dyn Progress,
) -> Result<Vec<FfnTime>, EvalError> {
    let (layers, neurons) = {
        let config = model.config();
        (config.layer_count, config.ffn_size)
    };
    let mut random = Random::new(0);
    let mut times = vec![Vec::new(); shares.len() + 1];
    // The first round warms up.
    for repeat in 0..=repeats {
        for (share, times) in shares.iter().map(Some).chain([None]).zip(&mut times) {
            progress.advance(0)?;
            for layer in 0..layers {
                let listed: Option<Vec<u32>> = share.map(|share| {
                    let neurons = 0..neurons as u32;
                    neurons.filter(|_| random.unit() < *share).collect()
                });
                let time = model.time_ffn(layer, listed.as_deref());
                if repeat > 0 {
                    times.push(time.as_secs_f64() * 1e6);
                }
            }
        }
    }
    let shares = shares.iter().copied().chain([1.0]);
    let spreads: Vec<_> = shares.zip(times.into_iter().map(Spread::of)).collect();
    let all = spreads.last().map_or(1.0, |(_, whole)| whole.median);
    let found = spreads
        .into_iter()
        .map(|(neuron_share, microseconds)| FfnTime {
            neuron_share,
            time_share: microseconds.median / all.max(1e-9),
            microseconds,
        });
    Ok(found.collect())
}
