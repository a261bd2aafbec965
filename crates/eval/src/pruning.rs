//! Neurons to keep when a model is pruned: the hottest, or as many at random.

use powerinfer_artifact::{plan::Policy, random::Random};
use powerinfer_runtime::SingleSession;

/// An arm of the pruning study: a way to compute fewer neurons.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arm {
    /// All neurons are computed.
    Dense,
    /// Neurons that are not predicted are skipped, token by token, with the predictors' thresholds raised by this logit.
    SkipPredicted(f32),
    /// All but the hottest share of the neurons are dropped for good.
    DropCold(f64),
    /// The same number of neurons of each layer is dropped, at random.
    DropRandom(f64),
}

impl Arm {
    /// Name of the arm.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense",
            Self::SkipPredicted(_) => "skip predicted",
            Self::DropCold(_) => "drop cold",
            Self::DropRandom(_) => "drop random",
        }
    }

    /// Policy that the model is opened with.
    pub fn policy(self) -> Policy {
        match self {
            Self::SkipPredicted(_) => Policy::Predicted,
            _ => Policy::Dense,
        }
    }

    /// Applies the arm to `model`, whose layers have these activation `frequencies`; returns the lowest frequency of a
    /// kept neuron if cold ones are dropped.
    pub fn apply(
        self,
        model: &mut SingleSession,
        frequencies: &[&[f32]],
        seed: u64,
    ) -> Option<f32> {
        match self {
            Self::Dense => None,
            Self::SkipPredicted(by) => {
                model.experiments().raise_predictors(by);
                None
            }
            Self::DropCold(share) => {
                let kept = hottest(frequencies, share);
                model.experiments().keep_only(Some(&kept.layers));
                Some(kept.coldest)
            }
            Self::DropRandom(share) => {
                let neurons = frequencies.first().map_or(0, |layer| layer.len());
                let kept = random(&hottest(frequencies, share), neurons, seed);
                model.experiments().keep_only(Some(&kept));
                None
            }
        }
    }
}

/// Kept neurons of each layer, ascending, with the lowest activation frequency among them.
#[derive(Debug, Clone, PartialEq)]
pub struct KeptNeurons {
    /// One list of neurons per layer.
    pub layers: Vec<Vec<u32>>,
    /// Activation frequency of the coldest of them; 0 if none is kept.
    pub coldest: f32,
}

impl KeptNeurons {
    /// Share of all neurons, of layers with `neurons` neurons each.
    pub fn share(&self, neurons: usize) -> f64 {
        let kept: usize = self.layers.iter().map(Vec::len).sum();
        kept as f64 / (self.layers.len() * neurons).max(1) as f64
    }
}

/// Hottest `share` of the neurons of all layers together, by activation frequency (one list per layer); of equal neurons
/// the first.
pub fn hottest(frequencies: &[&[f32]], share: f64) -> KeptNeurons {
    let mut all: Vec<(f32, u32, u32)> = frequencies
        .iter()
        .zip(0..)
        .flat_map(|(layer, number)| {
            let neurons = layer.iter().zip(0..);
            neurons.map(move |(frequency, neuron)| (*frequency, number, neuron))
        })
        .collect();
    all.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    all.truncate((share * all.len() as f64).round() as usize);
    let mut layers = vec![Vec::new(); frequencies.len()];
    for (_, layer, neuron) in &all {
        layers[*layer as usize].push(*neuron);
    }
    layers.iter_mut().for_each(|layer| layer.sort_unstable());
    KeptNeurons {
        layers,
        coldest: all.last().map_or(0.0, |last| last.0),
    }
}

/// Random neurons of each layer, as many as `like` keeps, of `neurons` each, drawn with `seed`.
pub fn random(like: &KeptNeurons, neurons: usize, seed: u64) -> Vec<Vec<u32>> {
    let mut random = Random::new(seed);
    let draw = |kept: &Vec<u32>| {
        let mut all: Vec<u32> = (0..neurons as u32).collect();
        for place in 0..kept.len() {
            all.swap(place, place + random.below(neurons - place));
        }
        all.truncate(kept.len());
        all.sort_unstable();
        all
    };
    like.layers.iter().map(draw).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn kept_neurons_are_at_least_as_hot_as_dropped_ones(
            layers in prop::collection::vec(prop::collection::vec(0.0f32..1.0, 7), 1..5), share in 0.0f64..=1.0, seed in 0u64..9,
        ) {
            let views: Vec<&[f32]> = layers.iter().map(Vec::as_slice).collect();
            let kept = hottest(&views, share);
            let count: usize = kept.layers.iter().map(Vec::len).sum();
            prop_assert_eq!(count, (share * (7 * layers.len()) as f64).round() as usize);
            prop_assert!((kept.share(7) - share).abs() <= 0.5 / 7.0);
            for (layer, list) in kept.layers.iter().enumerate() {
                prop_assert!(list.windows(2).all(|pair| pair[0] < pair[1]));
                for neuron in 0..7u32 {
                    let frequency = layers[layer][neuron as usize];
                    if list.contains(&neuron) { prop_assert!(frequency >= kept.coldest) } else { prop_assert!(count == 0 || frequency <= kept.coldest) }
                }
            }
            let any = random(&kept, 7, seed);
            prop_assert_eq!(&any, &random(&kept, 7, seed));
            for (list, like) in any.iter().zip(&kept.layers) {
                prop_assert_eq!(list.len(), like.len());
                prop_assert!(list.windows(2).all(|pair| pair[0] < pair[1]) && list.iter().all(|neuron| *neuron < 7));
            }
        }
    }
}
