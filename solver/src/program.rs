//! The paper's integer program, reduced to what it can decide: for every layer, how many of its
//! groups are hot.
//!
//! Inside a layer all neurons cost the same, so whatever number of groups is hot, the most frequent
//! ones are the best choice: the hot set is a prefix. And since a layer holds no hot neuron or at
//! least `C_l`, its first `C_l` neurons stand or fall together. What remains is a choice of one
//! *level* per layer: 0 is none hot, 1 the fewest that pay, and each further level one more group.

use crate::{Problem, objective};

/// Levels for every layer, and the two memory caps as limits on the bytes of hot neurons.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Program {
    /// The layers, in order.
    pub(crate) layers: Vec<Levels>,
    /// The GPU holds at most this, in units.
    pub(crate) capacity: u64,
    /// The CPU's cap: the GPU holds at least this, in units.
    pub(crate) at_least: u64,
    /// Bytes of one unit, the greatest common divisor of all level sizes. Counted in units the
    /// capacity has no remainder that nothing could ever fill, which is what makes bounds tight.
    pub(crate) unit_bytes: u64,
}

/// The levels of one layer, coldest first. Mass is concave in units.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Levels(pub(crate) Vec<Level>);

/// One possible hot set of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Level {
    /// Neurons in it.
    pub(crate) neurons: usize,
    /// Their size.
    pub(crate) units: u64,
    /// What they are worth: the sum of their frequencies.
    pub(crate) mass: f64,
}

impl Program {
    /// The program of a valid `problem` with `capacity_bytes` for hot neurons, of which at least
    /// `at_least_bytes` must be used.
    pub(crate) fn new(problem: &Problem, capacity_bytes: u64, at_least_bytes: u64) -> Self {
        let counts: Vec<Vec<usize>> = (0..problem.layers.len())
            .map(|layer| level_counts(problem, layer))
            .collect();
        let sizes = counts.iter().zip(&problem.layers);
        let unit_bytes = sizes
            .flat_map(|(counts, layer)| counts.iter().map(|&count| layer.neurons_bytes(count)))
            .fold(0, greatest_common_divisor)
            .max(1);
        let layers: Vec<Levels> = counts
            .into_iter()
            .zip(&problem.layers)
            .map(|(counts, layer)| {
                let (mut summed, mut mass) = (0, 0.0);
                Levels(
                    counts
                        .into_iter()
                        .map(|neurons| {
                            for frequency in &layer.frequencies[summed..neurons] {
                                mass += frequency;
                            }
                            summed = neurons;
                            Level {
                                neurons,
                                units: layer.neurons_bytes(neurons) / unit_bytes,
                                mass,
                            }
                        })
                        .collect(),
                )
            })
            .collect();
        let all: u64 = layers.iter().map(|levels| levels.top().units).sum();
        Self {
            capacity: (capacity_bytes / unit_bytes).min(all),
            at_least: at_least_bytes.div_ceil(unit_bytes),
            unit_bytes,
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
                level.mass = level.units as f64;
            }
        }
        program
    }

    /// Size of a choice of levels.
    pub(crate) fn units(&self, choice: &[usize]) -> u64 {
        self.chosen(choice).map(|level| level.units).sum()
    }

    /// Value of a choice of levels.
    pub(crate) fn mass(&self, choice: &[usize]) -> f64 {
        self.chosen(choice).map(|level| level.mass).sum()
    }

    /// Whether a choice respects both limits.
    pub(crate) fn allows(&self, choice: &[usize]) -> bool {
        (self.at_least..=self.capacity).contains(&self.units(choice))
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

impl Levels {
    /// The level with the most hot neurons.
    pub(crate) fn top(&self) -> &Level {
        self.0.last().expect("every layer has level 0")
    }
}

/// Hot counts that the paper's constraints leave to a layer: 0, then whole groups from `C_l` on.
fn level_counts(problem: &Problem, layer: usize) -> Vec<usize> {
    let neurons = problem.layers[layer].frequencies.len();
    let mut counts = vec![0];
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

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
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
        gpu.hand_over_seconds = 20e-6;
        let program = Program::new(&problem, 95, 1);
        let neurons: Vec<Vec<usize>> = program
            .layers
            .iter()
            .map(|levels| levels.0.iter().map(|level| level.neurons).collect())
            .collect();
        assert_eq!(neurons, [vec![0, 6, 9, 11], vec![0, 6]]);
        assert_eq!(program.unit_bytes, 10);
        assert_eq!((program.capacity, program.at_least), (9, 1));
        assert_eq!(program.mass(&[1, 1]), 4.5);
        assert_eq!(program.hot_counts(&[2, 0]), [9, 0]);
        assert!(program.allows(&[2, 0]) && !program.allows(&[2, 1]) && !program.allows(&[0, 0]));
    }
}
