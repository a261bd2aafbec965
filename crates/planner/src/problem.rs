//! The placement problem of a model, as input of the solver.

use powerinfer_artifact::{
    hardware::{EngineRates, Hardware, ModelShape},
    plan::{Budget, Device, GPU_PREFILL_BATCHES, PREFILL_BATCH},
    predictor_file::PredictorFile,
};
use powerinfer_bundle::neuron_bytes;
use powerinfer_model::ModelConfig;
use powerinfer_runtime::memory;
use powerinfer_solver::{CopiedBytes, GROUP_SIZE, Layer, LayerMode, NeuronShape, Pins, Problem};
use powerinfer_tensor::Format;

/// Share of the VRAM for weights that larger prefill batches may take if not all layers are on the GPU. In return
/// for a few neurons, prompts are several times as fast.
const PROMPT_SHARE: f64 = 0.1;

/// Largest sizes of a layer's predictor.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PredictorSizes {
    /// Hidden units.
    pub(crate) rank: usize,
    /// Bytes.
    pub(crate) bytes: u64,
}

impl PredictorSizes {
    /// Largest sizes of the predictors in `file`; zeros without a file.
    pub(crate) fn of(config: &ModelConfig, file: Option<&PredictorFile>) -> Self {
        let Some(file) = file else {
            return Self::default();
        };
        let bytes = |summary| memory::predictor_bytes(config, summary, file.weights(), true);
        Self {
            rank: (file.layers().iter()).fold(0, |most, layer| most.max(layer.rank)),
            bytes: file.layers().iter().map(bytes).max().unwrap_or(0),
        }
    }
}

/// Builds the placement problem. `left_out` is the share of inputs that are skipped; `prompt_batch` is the requested prefill batch.
pub(crate) fn problem(
    config: &ModelConfig,
    budget: Budget,
    hardware: Hardware,
    quant: Format,
    left_out: Option<f64>,
    predictors: PredictorSizes,
    prompt_batch: Option<usize>,
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
        pins: Pins {
            attention: config.attention_obstacle().map(|_| Device::Cpu),
            neurons: None,
        },
    };
    let context = budget.context_tokens;
    let size = ModelShape {
        format: quant,
        hidden: config.hidden_size,
        neurons: config.ffn_size,
        vocabulary: config.vocabulary_size,
    };
    let rank = predictors.rank;
    let on_gpu = |tokens| memory::device_scratch_bytes(config, quant, &budget, rank, tokens);
    let gpu_scratch_bytes = on_gpu(PREFILL_BATCH);
    let gpu_prompt_bytes = GPU_PREFILL_BATCHES
        .into_iter()
        .filter(|tokens| prompt_batch.is_none_or(|most| *tokens <= most))
        .map(|tokens| (tokens, on_gpu(tokens) - gpu_scratch_bytes))
        .collect();
    let mut problem = Problem {
        layers: vec![layer; config.layer_count],
        embedding_bytes: memory::embedding_bytes(config, quant),
        pinned_embedding_bytes: memory::pinned_embedding_bytes(config, quant),
        head_bytes: memory::head_bytes(config, quant),
        tied_head: config.tied_embeddings,
        gpu_scratch_bytes,
        copied_bytes: CopiedBytes {
            routing: match budget.vram_per_gpu().len() {
                1 => config.layer_count as u64 * memory::routing_bytes(config),
                _ => 0,
            },
            ..CopiedBytes::default()
        },
        prompt_batch: PREFILL_BATCH,
        gpu_prompt_bytes,
        cpu_scratch_bytes: memory::cpu_scratch_bytes(config, context, rank),
        hidden_bytes: config.hidden_size as u64 * 4,
        group_size: GROUP_SIZE,
        budget,
        hardware: hardware.for_model(size, &EngineRates::CURRENT),
        head_pin: None,
        shared_neurons: config.experts.as_ref().map(|experts| experts.shared_size),
    };
    let copies = left_out.is_none()
        && config.attention_obstacle().is_none()
        && problem.budget.vram_bytes > 0
        && problem.budget.vram_per_gpu().len() == 1
        && memory::copying_pays(&problem.hardware, quant);
    if copies {
        let copied = CopiedBytes {
            attention: memory::attention_bytes(config, quant, false),
            predictor: predictors.bytes,
            kv: problem.layers[0].kv_bytes,
            ..problem.copied_bytes
        };
        let taken = problem.gpu_reserve_bytes() + problem.gpu_scratch_bytes;
        let left = problem.budget.vram_bytes.saturating_sub(taken);
        let most = (left as f64 * PROMPT_SHARE) as u64;
        let batches = problem.gpu_prompt_bytes.iter();
        let on_host = |tokens| {
            memory::host_copy_bytes(config, quant, &problem.budget, predictors.bytes, tokens)
        };
        let most_on_host = (problem.budget.ram_bytes as f64 * PROMPT_SHARE) as u64;
        let fits = |more: u64| fits_gpu(&problem, more);
        // A model that fits the GPU copies nothing, unless parts are pinned to the CPU.
        let found = batches.copied().find(|(tokens, bytes)| match prompt_batch {
            Some(_) => !fits(0) || fits(bytes + copied.total()),
            None => !fits(0) && bytes + copied.total() <= most && on_host(*tokens) <= most_on_host,
        });
        if let Some((tokens, bytes)) = found {
            let on_host = on_host(tokens);
            problem.prompt_batch = tokens;
            problem.gpu_scratch_bytes += bytes;
            problem.copied_bytes = copied;
            problem.cpu_scratch_bytes += on_host;
            let larger = |(batch, _): &(usize, u64)| *batch > tokens;
            problem.gpu_prompt_bytes.retain(larger);
            for (_, more) in &mut problem.gpu_prompt_bytes {
                *more = more.saturating_sub(bytes);
            }
        }
    }
    problem
}

/// Whether all layers and `more` bytes fit in VRAM. Predictors are not counted, because the policies are not yet known.
fn fits_gpu(problem: &Problem, more: u64) -> bool {
    let layers = problem.layers.iter().map(|layer| {
        let neurons = layer.frequencies.len() as u64 * layer.neuron_bytes;
        layer.attention_bytes + layer.kv_bytes + neurons
    });
    let reserve = problem.gpu_reserve_bytes() + problem.gpu_scratch_bytes;
    layers.sum::<u64>() + reserve + more <= problem.budget.vram_bytes
}
