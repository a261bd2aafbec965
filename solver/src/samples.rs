//! Problems for tests.

use powerinfer_artifact::{hardware, plan::Budget};
use powerinfer_tensor::CacheFormat;

use crate::{CopiedBytes, GROUP_SIZE, Layer, LayerMode, NeuronShape, Problem};

/// Two layers of a few neurons with a large budget and free synchronisation.
pub(crate) fn small() -> Problem {
    let mut problem = shaped(2, 6, |_, neuron| 0.9 / (1.0 + neuron as f64));
    problem.group_size = 2;
    let gpu = problem.hardware.gpu.as_mut().unwrap();
    gpu.sync_seconds = 0.0;
    gpu.context_bytes = 1000;
    problem
}

/// `layer_count` layers of `neuron_count` neurons with these frequencies, on the paper's PC-High.
pub(crate) fn shaped(
    layer_count: usize,
    neuron_count: usize,
    frequency: impl Fn(usize, usize) -> f64,
) -> Problem {
    let layers = (0..layer_count).map(|layer| Layer {
        mode: LayerMode::exact(NeuronShape {
            bytes: 6912,
            matrices: 3,
        }),
        frequencies: (0..neuron_count)
            .map(|neuron| frequency(layer, neuron))
            .collect(),
        neuron_bytes: 6912,
        attention_bytes: 40_000,
        attention_read_bytes: 40_000,
        predictor_bytes: 10_000,
        kv_bytes: 30_000,
        pins: Default::default(),
    });
    let mut hardware = hardware::named("pc-high").unwrap();
    let gpu = hardware.gpu.as_mut().unwrap();
    // The card is larger than any budget, and the reserve is not negligible.
    (gpu.vram_bytes, gpu.context_bytes) = (1 << 50, 512 << 20);
    Problem {
        layers: layers.collect(),
        embedding_bytes: 100_000,
        pinned_embedding_bytes: 0,
        head_bytes: 100_000,
        tied_head: false,
        gpu_scratch_bytes: 5_000,
        copied_bytes: CopiedBytes::default(),
        prompt_batch: 64,
        gpu_prompt_bytes: Vec::new(),
        cpu_scratch_bytes: 5_000,
        hidden_bytes: 4096 * 4,
        group_size: GROUP_SIZE,
        budget: Budget {
            vram_bytes: 24 << 30,
            ram_bytes: 192 << 30,
            context_tokens: 2048,
            kv_cache: CacheFormat::F32,
            vram_split: Vec::new(),
        },
        hardware,
        head_pin: None,
        shared_neurons: None,
    }
}

/// Frequencies by a power law, with another scale and exponent in every layer.
pub(crate) fn power_law(layer: usize, neuron: usize) -> f64 {
    let scale = 0.3 + 0.7 * ((layer * 37 % 101) as f64 / 101.0);
    let exponent = 0.4 + 0.5 * ((layer * 61 % 89) as f64 / 89.0);
    scale * (1.0 + neuron as f64 / 50.0).powf(-exponent)
}
