//! A placement as the solver takes it.

use powerinfer_artifact::{
    hardware::{Hardware, ModelShape},
    plan::Budget,
};
use powerinfer_bundle::{neuron_bytes, weight_bytes, weight_bytes_by_input};
use powerinfer_kernels::Format;
use powerinfer_model::{LayerWeight, ModelConfig, Weight};
use powerinfer_solver::{GROUP_SIZE, Layer, NeuronShape, Problem, Way};

/// States the placement as the solver takes it, with a share of inputs that are not read.
pub(crate) fn problem(
    config: &ModelConfig,
    budget: Budget,
    hardware: Hardware,
    quant: Format,
    left_out: Option<f64>,
) -> Problem {
    let bytes = |weight: Weight| weight_bytes(config, weight, quant);
    let all = config.weights();
    let sum = |weights: &[Weight]| -> u64 {
        let present = weights.iter().filter(|weight| all.contains(weight));
        present.map(|weight| bytes(*weight)).sum()
    };
    // Whatever of a layer is not its neurons: attention, norms, the bias of what the FFN adds.
    let attention: Vec<LayerWeight> = config
        .layer_weights()
        .into_iter()
        .filter(|weight| {
            !matches!(
                weight,
                LayerWeight::Gate
                    | LayerWeight::GateBias
                    | LayerWeight::Up
                    | LayerWeight::UpBias
                    | LayerWeight::Down
            )
        })
        .collect();
    let attention = |index: usize| -> (u64, f64) {
        let mut sum = (0, 0.0);
        for part in &attention {
            use LayerWeight::{Key, Output, Query, Value};
            let weight = Weight::Layer(index, *part);
            let (bytes, read) = match (part, left_out) {
                (Query | Key | Value | Output, Some(share)) => {
                    (weight_bytes_by_input(config, weight, quant), 1.0 - share)
                }
                _ => (bytes(weight), 1.0),
            };
            sum = (sum.0 + bytes, sum.1 + bytes as f64 * read);
        }
        sum
    };
    let neuron = neuron_bytes(config, quant);
    let shape = NeuronShape {
        bytes: neuron,
        matrices: config.matrices_per_neuron(),
    };
    let layer = |index: usize| Layer {
        // The candidates say what is active, and which way it goes.
        way: Way::dense(shape),
        frequencies: vec![1.0; config.ffn_size],
        neuron_bytes: neuron,
        attention_bytes: attention(index).0,
        attention_read_bytes: attention(index).1.round() as u64,
        predictor_bytes: 0,
        // Keys and values in float32.
        kv_bytes: budget.context_tokens * (2 * config.kv_head_count * config.head_size * 4) as u64,
    };
    let hidden_bytes = config.hidden_size as u64 * 4;
    let scratch = (config.ffn_size * 4 + config.vocabulary_size) as u64 * 4 + 8 * hidden_bytes;
    Problem {
        layers: (0..config.layer_count).map(layer).collect(),
        embedding_bytes: sum(&[Weight::Embedding, Weight::Positions, Weight::ProjectIn]),
        head_bytes: bytes(Weight::Head)
            + sum(&[
                Weight::FinalNorm,
                Weight::FinalNormBias,
                Weight::ProjectOut,
                Weight::HeadBias,
            ]),
        tied_head: config.tied_embeddings,
        gpu_scratch_bytes: scratch,
        cpu_scratch_bytes: scratch,
        hidden_bytes,
        group_size: GROUP_SIZE,
        budget,
        hardware: hardware.for_model(ModelShape {
            format: quant,
            hidden: config.hidden_size,
            neurons: config.ffn_size,
            vocabulary: config.vocabulary_size,
        }),
    }
}
