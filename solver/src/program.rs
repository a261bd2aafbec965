//! The paper's integer program, reduced to what it can decide: for every layer, how many of its
//! groups are hot.
//!
//! Inside a layer all neurons cost the same, so whatever number of groups is hot, the most frequent
//! ones are the best choice: the hot set is a prefix. And since a layer holds no hot neuron or at
//! least `C_l`, its first `C_l` neurons stand or fall together. What remains is a choice of one
//! *level* per layer: 0 is none hot, 1 the fewest that pay, and each further level one more group.

use powerinfer_artifact::plan::Device;

use crate::{
    Problem,
    chain::{Chain, Choice, ON_CPU, Stage},
    objective,
};

/// Levels for every layer, and the two memory caps as limits on the bytes of hot neurons.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Program {
    /// The layers, in order.
    pub(crate) layers: Vec<Levels>,
    /// Bytes that the GPU can hold.
    pub(crate) capacity: u64,
    /// Bytes that it must hold, because the CPU cannot.
    pub(crate) at_least: u64,
}

/// The levels of one layer, coldest first. Mass is concave in bytes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Levels(pub(crate) Vec<Level>);

impl Levels {
    fn most_bytes(&self) -> u64 {
        self.0.last().map_or(0, |level| level.bytes)
    }
}

/// One possible hot set of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Level {
    /// Neurons in it.
    pub(crate) neurons: usize,
    /// Their size.
    pub(crate) bytes: u64,
    /// What they are worth: the sum of their frequencies.
    pub(crate) mass: f64,
}

impl Program {
    /// The program of a valid `problem` with `capacity` bytes for hot neurons, of which at least
    /// `at_least` must be used.
    pub(crate) fn new(problem: &Problem, capacity: u64, at_least: u64) -> Self {
        // What is pinned to the GPU is no choice; its bytes are gone beforehand.
        let pinned = problem
            .layers
            .iter()
            .filter(|layer| layer.pins.neurons == Some(Device::Gpu));
        let pinned: u64 = pinned
            .map(|layer| layer.neurons_bytes(layer.frequencies.len()))
            .sum();
        let (capacity, at_least) = (
            capacity.saturating_sub(pinned),
            at_least.saturating_sub(pinned),
        );
        let levels = |layer: usize| {
            let counts = level_counts(problem, layer);
            let layer = &problem.layers[layer];
            let (mut summed, mut mass) = (0, 0.0);
            let level = |neurons: usize| {
                for frequency in &layer.frequencies[summed..neurons] {
                    mass += frequency;
                }
                summed = neurons;
                let bytes = match layer.pins.neurons {
                    Some(Device::Gpu) => 0,
                    _ => layer.neurons_bytes(neurons),
                };
                Level {
                    neurons,
                    bytes,
                    mass,
                }
            };
            Levels(counts.into_iter().map(level).collect())
        };
        let layers: Vec<Levels> = (0..problem.layers.len()).map(levels).collect();
        let all: u64 = layers
            .iter()
            .filter_map(|levels| levels.0.last())
            .map(|top| top.bytes)
            .sum();
        Self {
            capacity: capacity.min(all),
            at_least,
            layers,
        }
    }

    /// The same limits, but every hot byte is worth the same and none is required: its optimum is
    /// the most that the GPU can hold.
    pub(crate) fn fullest(&self) -> Self {
        let mut program = self.clone();
        program.at_least = 0;
        for Levels(levels) in &mut program.layers {
            for level in levels {
                level.mass = level.bytes as f64;
            }
        }
        program
    }

    /// The same as a chain whose stages are the layers, and mass lost is the cost.
    pub(crate) fn chain(&self) -> Chain {
        let all: u64 = self.layers.iter().map(Levels::most_bytes).sum();
        let stages = self.layers.iter().map(|levels| {
            let choices = levels.0.iter().enumerate().map(|(index, level)| Choice {
                gpu_bytes: level.bytes,
                cpu_bytes: levels.most_bytes() - level.bytes,
                cost: -level.mass,
                what: index as u32,
            });
            let mut stage = Stage::default();
            stage.homes[ON_CPU] = choices.collect();
            stage
        });
        Chain {
            stages: stages.collect(),
            capacities: vec![self.capacity],
            ram: match self.at_least {
                0 => u64::MAX,
                at_least => all.saturating_sub(at_least),
            },
            crossing: 0.0,
            hop: 0.0,
        }
    }

    /// Size of a choice of levels.
    pub(crate) fn bytes(&self, choice: &[usize]) -> u64 {
        self.chosen(choice).map(|level| level.bytes).sum()
    }

    /// Value of a choice of levels.
    pub(crate) fn mass(&self, choice: &[usize]) -> f64 {
        self.chosen(choice).map(|level| level.mass).sum()
    }

    /// Whether a choice respects both limits.
    pub(crate) fn allows(&self, choice: &[usize]) -> bool {
        (self.at_least..=self.capacity).contains(&self.bytes(choice))
    }

    /// Neurons of each layer that a choice makes hot.
    pub(crate) fn hot_counts(&self, choice: &[usize]) -> Vec<usize> {
        self.chosen(choice).map(|level| level.neurons).collect()
    }

    fn chosen(&self, choice: &[usize]) -> impl Iterator<Item = &Level> {
        self.layers
            .iter()
            .zip(choice)
            .map(|(Levels(levels), &level)| &levels[level])
    }
}

/// Hot counts that the paper's constraints leave to a layer: 0, then whole groups from `C_l` on.
fn level_counts(problem: &Problem, layer: usize) -> Vec<usize> {
    let neurons = problem.layers[layer].frequencies.len();
    let mut counts = match problem.layers[layer].pins.neurons {
        Some(Device::Gpu) => return vec![neurons],
        Some(Device::Cpu) => return vec![0],
        None => vec![0],
    };
    if let Some(fewest) = objective::fewest_hot(problem, layer) {
        let first = fewest.div_ceil(problem.group_size);
        let groups = neurons.div_ceil(problem.group_size);
        counts.extend((first..=groups).map(|group| {
            // The last group is smaller where the size does not divide; nothing is dropped.
            group.saturating_mul(problem.group_size).min(neurons)
        }));
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn levels_are_none_the_fewest_that_pay_and_then_group_by_group() {
        let mut problem = samples::small();
        problem.group_size = 3;
        problem.layers[0].frequencies = vec![0.5; 11];
        problem.layers[0].neuron_bytes = 10;
        problem.layers[1].frequencies = vec![0.25; 6];
        problem.layers[1].neuron_bytes = 10;
        problem.hardware.cpu.read_bandwidth_bytes_per_second = 1e6;
        let gpu = problem.hardware.gpu.as_mut().unwrap();
        gpu.read_bandwidth_bytes_per_second = 2e6;
        // One neuron saves 5 µs, so four pay, which takes two groups.
        gpu.sync_seconds = 20e-6;
        let program = Program::new(&problem, 95, 1);
        let neurons: Vec<Vec<usize>> = program
            .layers
            .iter()
            .map(|levels| levels.0.iter().map(|level| level.neurons).collect())
            .collect();
        assert_eq!(neurons, [vec![0, 6, 9, 11], vec![0, 6]]);
        assert_eq!(program.mass(&[1, 1]), 4.5);
        assert_eq!(program.hot_counts(&[2, 0]), [9, 0]);
        assert!(program.allows(&[2, 0]) && !program.allows(&[2, 1]) && !program.allows(&[0, 0]));
    }
}
