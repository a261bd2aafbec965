//! Time of single FFNs with a share of their neurons and with all, and the time that memory needs for their rows.

use powerinfer_artifact::random::Random;
use powerinfer_model::LanguageModel;
use powerinfer_runtime::SingleSession;
use serde::Serialize;

use super::{Bench, ceiling::ListedRows, measure::Spread};
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
    /// Time in which memory reads as many rows, at random places; of all neurons, in a stream.
    pub ceiling_microseconds: f64,
}

/// Times FFNs with each of `shares` of their neurons, drawn at random, and last with all.
///
/// Layers take turns, so that weights come from memory and not from a cache.
///
/// # Errors
///
/// Fails if the user asks to stop.
pub fn time_ffns(
    bench: &Bench<'_>,
    model: &mut SingleSession,
    shares: &[f64],
) -> Result<Vec<FfnTime>, EvalError> {
    let (layers, neurons) = {
        let config = model.config();
        (config.layer_count, config.ffn_size)
    };
    let mut random = Random::new(0);
    let mut draw = |share: f64| -> Vec<u32> {
        let neurons = 0..neurons as u32;
        neurons.filter(|_| random.unit() < share).collect()
    };
    let mut times = vec![Vec::new(); shares.len() + 1];
    // The first round warms up.
    for repeat in 0..=bench.repeats {
        for (share, times) in shares.iter().map(Some).chain([None]).zip(&mut times) {
            bench.progress.advance(0)?;
            for layer in 0..layers {
                let listed = share.map(|share| draw(*share));
                let time = model.experiments().time_ffn(layer, listed.as_deref());
                if repeat > 0 {
                    times.push(time.as_secs_f64() * 1e6);
                }
            }
        }
    }
    let ffn_bytes = |layer| model.experiments().ffn_bytes(layer).iter().sum::<usize>();
    let bytes = (0..layers).map(ffn_bytes).sum::<usize>() as f64 / layers.max(1) as f64;
    let row_bytes = model.experiments().ffn_bytes(0)[2] / neurons.max(1);
    let bandwidths = shares.iter().map(|share| {
        let listed = ListedRows::drawn(|| draw(*share), neurons, row_bytes, bench.probe);
        if listed.rows.is_empty() {
            bench.read()
        } else {
            bench.read_rows(&listed)
        }
    });
    let bandwidths: Vec<f64> = bandwidths.chain([bench.read()]).collect();
    let shares = shares.iter().copied().chain([1.0]);
    let spreads: Vec<_> = shares
        .zip(times.into_iter().map(Spread::from_repeats))
        .collect();
    let all = spreads.last().map_or(1.0, |(_, whole)| whole.median);
    let found = spreads.into_iter().zip(bandwidths);
    let found = found.map(|((neuron_share, microseconds), bandwidth)| FfnTime {
        neuron_share,
        time_share: microseconds.median / all.max(1e-9),
        microseconds,
        ceiling_microseconds: neuron_share * bytes / bandwidth * 1e6,
    });
    Ok(found.collect())
}
