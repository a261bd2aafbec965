//! Neurons to keep when a model is pruned: the hottest, or as many at random.

use powerinfer_artifact::random::Random;

/// Kept neurons of each layer, ascending, with the lowest activation frequency among them.
#[derive(Debug, Clone, PartialEq)]
pub struct Kept {
    /// One list of neurons per layer.
    pub layers: Vec<Vec<u32>>,
    /// Activation frequency of the coldest of them; 0 if none is kept.
    pub coldest: f32,
}

impl Kept {
    /// Share of all neurons, of layers with `neurons` neurons each.
    pub fn share(&self, neurons: usize) -> f64 {
        let kept: usize = self.layers.iter().map(Vec::len).sum();
        kept as f64 / (self.layers.len() * neurons).max(1) as f64
    }
}

/// Hottest `share` of the neurons of all layers together, by activation frequency (one list per layer); of equal neurons
/// the first.
pub fn hottest(frequencies: &[&[f32]], share: f64) -> Kept {
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
    Kept {
        layers,
        coldest: all.last().map_or(0.0, |last| last.0),
    }
}

/// As many random neurons of each layer as `like` keeps, of `neurons` each, drawn with `seed`.
pub fn random(like: &Kept, neurons: usize, seed: u64) -> Vec<Vec<u32>> {
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
                    match list.contains(&neuron) {
                        true => prop_assert!(frequency >= kept.coldest),
                        false => prop_assert!(count == 0 || frequency <= kept.coldest),
                    }
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
