//! Times FFNs alone, with some of their neurons and with all.

use anyhow::Result;
use powerinfer_artifact::{progress::Interrupted, random::Random};
use powerinfer_model::LanguageModel;
use powerinfer_runtime::Runtime;
use serde::Serialize;

use super::measure::Spread;
use crate::progress::interrupted;

/// What a layer's FFN takes with a share of its neurons.
#[derive(Debug, Serialize)]
pub(super) struct FfnTime {
    pub(super) neuron_share: f64,
    /// Of all layers and repeats.
    pub(super) microseconds: Spread,
    /// Of the time with all neurons.
    pub(super) time_share: f64,
}

/// Each of `shares`, of random neurons, and all neurons at the end. Layers take turns, so that no cache
/// has what is read.
pub(super) fn measure(model: &mut Runtime, shares: &[f64], repeats: usize) -> Result<Vec<FfnTime>> {
    let (layers, neurons) = {
        let config = model.config();
        (config.layer_count, config.ffn_size)
    };
    let mut random = Random::new(0);
    let mut times = vec![Vec::new(); shares.len() + 1];
    // The first round is to warm up.
    for repeat in 0..=repeats {
        for (share, times) in shares.iter().map(Some).chain([None]).zip(&mut times) {
            if interrupted() {
                return Err(Interrupted.into());
            }
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
