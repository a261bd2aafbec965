//! What a placement is worth: the paper's objective, evaluated neuron by neuron.

use crate::Problem;

/// Expected number of neuron activations per token that the GPU serves: `Σ f_i a_i`, when it holds
/// the first `hot_counts[layer]` neurons of each layer.
///
/// # Panics
///
/// When there is not one count per layer, or a count exceeds its layer.
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
        // Plus 0, for an empty sum is −0.
        .map(|(layer, &count)| layer.frequencies[..count].iter().sum::<f64>() + 0.0)
        .sum::<f64>()
}

/// `C_l`, the fewest neurons of `layer` that are worth a synchronisation: the smallest count with
/// `C·T_gpu + T_sync ≤ C·T_cpu`, a neuron's `T` being its bytes over the device's bandwidth.
///
/// A whole layer is always enough, since then nothing is handed over. `None` where no count pays
/// because the GPU does not read faster than the CPU, or there is none.
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
    // `pays` never turns false again as the count grows.
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
    fn impact_counts_the_activations_on_the_gpu() {
        let mut problem = samples::small();
        problem.layers[0].frequencies = vec![0.75, 0.5, 0.25];
        problem.layers[1].frequencies = vec![1.0, 0.5];
        assert_eq!(evaluate(&problem, &[0, 0]), 0.0);
        assert_eq!(evaluate(&problem, &[2, 1]), 2.25);
        assert_eq!(evaluate(&problem, &[3, 2]), 3.0);
    }

    #[test]
    fn the_fewest_hot_neurons_are_those_that_pay_the_sync() {
        let mut problem = samples::small();
        problem.layers[0].neuron_bytes = 1000;
        problem.layers[0].frequencies = vec![0.5; 100];
        problem.hardware.cpu.read_bandwidth_bytes_per_second = 1e9;
        let gpu = problem.hardware.gpu.as_mut().unwrap();
        // 1 µs per neuron on the CPU, half on the GPU, so 10.25 µs are 20.5 neurons' saving.
        gpu.read_bandwidth_bytes_per_second = 2e9;
        gpu.sync_seconds = 10.25e-6;
        assert_eq!(fewest_hot(&problem, 0), Some(21));
        problem.hardware.gpu.as_mut().unwrap().sync_seconds = 0.0;
        assert_eq!(fewest_hot(&problem, 0), Some(1));
        problem.hardware.gpu.as_mut().unwrap().sync_seconds = 1.0;
        assert_eq!(
            fewest_hot(&problem, 0),
            Some(100),
            "a whole layer needs none"
        );
        let gpu = problem.hardware.gpu.as_mut().unwrap();
        gpu.read_bandwidth_bytes_per_second = 1e9;
        assert_eq!(fewest_hot(&problem, 0), None);
        problem.hardware.gpu = None;
        assert_eq!(fewest_hot(&problem, 0), None);
    }
}
