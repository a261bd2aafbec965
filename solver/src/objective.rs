//! The paper's objective `impact`, evaluated neuron by neuron.

use crate::Problem;

/// Mean number of active neurons per token on the GPU, `Σ f_i a_i`, if the first `hot_counts[layer]` neurons
/// of each layer are hot.
///
/// # Panics
///
/// When `hot_counts` does not have one count per layer, or a count exceeds the neurons of its layer.
pub fn evaluate(problem: &Problem, hot_counts: &[usize]) -> f64 {
    assert_eq!(
        problem.layers.len(),
        hot_counts.len(),
        "one count per layer"
    );
    problem
        .layers
        .iter()
        .zip(hot_counts)
        // An empty sum is −0; adding 0 makes it 0.
        .map(|(layer, &count)| layer.frequencies[..count].iter().sum::<f64>() + 0.0)
        .sum::<f64>()
}

/// `C_l`, the smallest number of hot neurons in `layer` that pays for the synchronisation: the least `C` with
/// `C·T_gpu + T_sync ≤ C·T_cpu`, where `T` is the size of a neuron over the read bandwidth of the device.
///
/// At most the number of neurons of the layer, since a layer that is entirely hot needs no synchronisation.
/// `None` if no count pays, because the GPU does not read faster than the CPU or there is no GPU.
///
/// # Panics
///
/// When `layer` is not the index of a layer.
pub fn fewest_hot(problem: &Problem, layer: usize) -> Option<usize> {
    let gpu = problem.hardware.gpu.as_ref()?;
    let cpu = &problem.hardware.cpu;
    let layer = &problem.layers[layer];
    let bytes = layer.neuron_bytes as f64;
    let on_gpu = bytes / gpu.read_bandwidth_bytes_per_second;
    let on_cpu = bytes / cpu.read_bandwidth_bytes_per_second;
    let sync = gpu.sync_seconds;
    let pays = |count: usize| count as f64 * on_gpu + sync <= count as f64 * on_cpu;
    if on_gpu > on_cpu || (on_gpu == on_cpu && sync > 0.0) {
        return None;
    }
    // If a count pays, every larger one does, so bisection finds the smallest.
    let (mut fails, mut enough) = (0, layer.frequencies.len());
    while enough - fails > 1 {
        let middle = fails + (enough - fails) / 2;
        if pays(middle) {
            enough = middle;
        } else {
            fails = middle;
        }
    }
    Some(enough)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn impact_is_the_mean_number_of_active_neurons_on_the_gpu() {
        let mut problem = samples::small();
        problem.layers[0].frequencies = vec![0.75, 0.5, 0.25];
        problem.layers[1].frequencies = vec![1.0, 0.5];
        assert_eq!(evaluate(&problem, &[0, 0]), 0.0);
        assert_eq!(evaluate(&problem, &[2, 1]), 2.25);
        assert_eq!(evaluate(&problem, &[3, 2]), 3.0);
    }

    #[test]
    fn the_fewest_hot_neurons_are_the_first_count_that_pays_for_the_sync() {
        let mut problem = samples::small();
        problem.layers[0].neuron_bytes = 1000;
        problem.layers[0].frequencies = vec![0.5; 100];
        problem.hardware.cpu.read_bandwidth_bytes_per_second = 1e9;
        let gpu = problem.hardware.gpu.as_mut().unwrap();
        // A neuron takes 1 µs on the CPU and 0.5 µs on the GPU, so 20.5 neurons save 10.25 µs.
        gpu.read_bandwidth_bytes_per_second = 2e9;
        gpu.sync_seconds = 10.25e-6;
        assert_eq!(fewest_hot(&problem, 0), Some(21));
        problem.hardware.gpu.as_mut().unwrap().sync_seconds = 0.0;
        assert_eq!(fewest_hot(&problem, 0), Some(1));
        problem.hardware.gpu.as_mut().unwrap().sync_seconds = 1.0;
        assert_eq!(
            fewest_hot(&problem, 0),
            Some(100),
            "an entirely hot layer needs no synchronisation"
        );
        let gpu = problem.hardware.gpu.as_mut().unwrap();
        gpu.read_bandwidth_bytes_per_second = 1e9;
        assert_eq!(fewest_hot(&problem, 0), None);
        problem.hardware.gpu = None;
        assert_eq!(fewest_hot(&problem, 0), None);
    }
}
