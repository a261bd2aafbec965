//! The placement problem of a model, as input of the solver.

use powerinfer_artifact::{
    hardware::{EngineRates, Hardware, ModelShape},
    plan::Budget,
    predictor_file::PredictorFile,
};
use powerinfer_bundle::neuron_bytes;
use powerinfer_model::ModelConfig;
use powerinfer_runtime::memory;
use powerinfer_solver::{GROUP_SIZE, Layer, LayerMode, NeuronShape, Pins, Problem};
use powerinfer_tensor::Format;

/// Builds the placement problem. `left_out` is the share of inputs that are skipped, `rank` the largest rank of a
/// predictor.
pub(crate) fn problem(
    config: &ModelConfig,
    budget: Budget,
    hardware: Hardware,
    quant: Format,
    left_out: Option<f64>,
    rank: usize,
) -> Problem {
    let budget = match config.device_obstacle() {
        None => budget,
        Some(_) => Budget {
            vram_bytes: 0,
            vram_split: Vec::new(),
            ..budget
        },
    };
    let neuron = match left_out {
        Some(_) => memory::neuron_bytes_in_either_layout(config, quant),
        None => neuron_bytes(config, quant),
    };
    let shape = NeuronShape {
        bytes: neuron,
        matrices: config.matrices_per_neuron(),
    };
    let layer = Layer {
        // Placeholders: the candidates replace mode and frequencies.
        mode: LayerMode::dense(shape),
        frequencies: vec![1.0; config.ffn_size],
        neuron_bytes: neuron,
        attention_bytes: memory::attention_bytes(config, quant, left_out.is_some()),
        attention_read_bytes: memory::attention_read_bytes(config, quant, left_out),
        predictor_bytes: 0,
        kv_bytes: memory::kv_bytes(config, budget.context_tokens, budget.kv_cache),
        pins: Pins::default(),
    };
    let context = budget.context_tokens;
    let size = ModelShape {
        format: quant,
        hidden: config.hidden_size,
        neurons: config.ffn_size,
        vocabulary: config.vocabulary_size,
    };
    Problem {
        layers: vec![layer; config.layer_count],
        embedding_bytes: memory::embedding_bytes(config, quant),
        head_bytes: memory::head_bytes(config, quant),
        tied_head: config.tied_embeddings,
        gpu_scratch_bytes: memory::device_scratch_bytes(config, quant, context, rank),
        gpu_prompt_bytes: memory::DEVICE_PREFILL_BATCHES
            .map(|tokens| memory::device_prompt_bytes(config, context, rank, tokens))
            .to_vec(),
        cpu_scratch_bytes: memory::cpu_scratch_bytes(config, context, rank),
        hidden_bytes: config.hidden_size as u64 * 4,
        group_size: GROUP_SIZE,
        budget,
        hardware: hardware.for_model(size, &EngineRates::CURRENT),
        head_pin: None,
    }
}

/// Largest rank of the predictors in `file`; 0 without predictors.
pub(crate) fn largest_rank(file: Option<&PredictorFile>) -> usize {
    let layers = file.map_or(&[][..], PredictorFile::layers);
    layers.iter().map(|layer| layer.rank).max().unwrap_or(0)
}
