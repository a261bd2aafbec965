//! Memory of a running bundle, by line of the plan: the planner budgets with these sizes, and the runtime
//! is checked against them.
//!
//! With tied embeddings the weights between the last layer and the head count with the embeddings, and a
//! head on the GPU is a copy of the embeddings.

use powerinfer_artifact::{
    hardware::Hardware,
    plan::{Budget, LayerPlan},
    predictor_file::PredictorSummary,
};
use powerinfer_bundle::{neuron_bytes, weight_bytes, weight_bytes_by_input};
use powerinfer_gpu::DeviceScratch;
use powerinfer_kernels::{
    AXPY_GROUP_ROWS, PackedActivations, QuantisedActivations, kernel_scratch_bytes,
};
use powerinfer_model::{Experts, LayerWeight, ModelConfig, Weight};
use powerinfer_tensor::{BLOCK, CacheFormat, Format, SignMatrix};

pub use powerinfer_artifact::plan::PREFILL_BATCH;

use crate::{EXPERT_COPY_BYTES, ffn::SLOTTED_NEURONS};

/// Maximum number of prompt tokens that run together on the CPU.
pub(crate) const MOST_PROMPT_TOKENS: usize = 512;

/// Maximum number of threads in a GEMM; each needs memory to unpack rows of weights.
pub const BATCH_THREADS: usize = 64;

/// Positions per span of the KV cache: attention computes spans separately and merges the results.
pub const ATTENTION_SPAN: usize = 512;

/// Query rows per KV head that attention processes together.
pub const ATTENTION_ROWS: usize = 32;

/// Query rows per KV head up to which threads split spans; above it they split queries.
pub const FEW_ROWS: usize = 8;

const FLOAT: u64 = size_of::<f32>() as u64;

/// Bytes of a layer outside its neurons: attention, norms, the FFN's output bias, and in a mixture of experts the router and the expert
/// of each neuron; `by_input` is the layout of the attention projections.
pub fn attention_bytes(config: &ModelConfig, quant: Format, by_input: bool) -> u64 {
    let bytes =
        |layer_weight: &LayerWeight| attention_weight_bytes(config, *layer_weight, quant, by_input);
    let experts = config
        .experts
        .as_ref()
        .map_or(0, |_| config.ffn_size * size_of::<u16>());
    attention_weights(config).iter().map(bytes).sum::<u64>() + experts as u64
}

/// Bytes of what a device needs of a layer to route tokens and to add biases of experts; 0 in a dense model.
pub fn routing_bytes(config: &ModelConfig) -> u64 {
    use LayerWeight::{DownBias, Router, RouterBias, SharedGate};
    if config.experts.is_none() {
        return 0;
    }
    let weights = config.layer_weights().into_iter();
    let weights = weights.filter(|it| matches!(it, DownBias | Router | RouterBias | SharedGate));
    let bytes = |it| attention_weight_bytes(config, it, Format::F32, false);
    weights.map(bytes).sum::<u64>() + (config.ffn_size * size_of::<u16>()) as u64
}

/// Bytes of these weights read per token if the share `skipped` of projection inputs is not read.
pub fn attention_read_bytes(config: &ModelConfig, quant: Format, skipped: Option<f64>) -> u64 {
    let read = |layer_weight: &LayerWeight| {
        let bytes = attention_weight_bytes(config, *layer_weight, quant, skipped.is_some()) as f64;
        match (skipped, &config.experts) {
            (Some(share), _) if is_projection(*layer_weight) => bytes * (1.0 - share),
            // Only those of the selected experts.
            (_, Some(experts)) if *layer_weight == LayerWeight::DownBias => {
                bytes * experts.per_token as f64 / experts.blocks() as f64
            }
            _ => bytes,
        }
    };
    attention_weights(config)
        .iter()
        .map(read)
        .sum::<f64>()
        .round() as u64
}

fn attention_weights(config: &ModelConfig) -> Vec<LayerWeight> {
    use LayerWeight::{Down, Gate, GateBias, Up, UpBias};
    let mut weights = config.layer_weights();
    weights.retain(|layer_weight| !matches!(layer_weight, Gate | GateBias | Up | UpBias | Down));
    weights
}

fn attention_weight_bytes(
    config: &ModelConfig,
    layer_weight: LayerWeight,
    quant: Format,
    by_input: bool,
) -> u64 {
    let weight = Weight::Layer(0, layer_weight); // layers are of equal size
    if by_input && is_projection(layer_weight) {
        weight_bytes_by_input(config, weight, quant)
    } else {
        weight_bytes(config, weight, quant)
    }
}

fn is_projection(layer_weight: LayerWeight) -> bool {
    use LayerWeight::{Key, Output, Query, Value};
    matches!(layer_weight, Query | Key | Value | Output)
}

/// Upper bound of the bytes of one neuron over both layouts of gate and up, which differ if sizes are not
/// multiples of a block.
pub fn neuron_bytes_in_either_layout(config: &ModelConfig, quant: Format) -> u64 {
    let columns = (config.hidden_size * quant.row_bytes(config.ffn_size)) as u64;
    let rows = quant.row_bytes(config.hidden_size) as u64;
    let matrices = config.matrices_per_neuron() as u64 - 1;
    let more = (matrices * columns).div_ceil(config.ffn_size as u64);
    let by_output = neuron_bytes(config, quant);
    by_output.max(by_output - matrices * rows + more)
}

/// Bytes of the embeddings, including learned positions.
pub fn embedding_bytes(config: &ModelConfig, quant: Format) -> u64 {
    let own = [Weight::Embedding, Weight::Positions, Weight::ProjectIn];
    let own = sum(config, quant, &own);
    own + if config.tied_embeddings {
        head_extra_bytes(config, quant)
    } else {
        0
    }
}

/// Bytes of the copy of the embeddings in pinned memory, from which a device looks up rows; 0 if the device reads them from the head, or
/// if positions are added to them or a projection follows.
pub fn pinned_embedding_bytes(config: &ModelConfig, quant: Format) -> u64 {
    if config.tied_embeddings || !config.embeds_by_lookup() {
        return 0;
    }
    weight_bytes(config, Weight::Embedding, quant)
}

/// Bytes of the head and the final norm.
pub fn head_bytes(config: &ModelConfig, quant: Format) -> u64 {
    weight_bytes(config, Weight::Head, quant) + head_extra_bytes(config, quant)
}

fn head_extra_bytes(config: &ModelConfig, quant: Format) -> u64 {
    let weights = [
        Weight::FinalNorm,
        Weight::FinalNormBias,
        Weight::ProjectOut,
        Weight::HeadBias,
    ];
    sum(config, quant, &weights)
}

fn sum(config: &ModelConfig, quant: Format, weights: &[Weight]) -> u64 {
    let all = config.weights();
    let present = weights.iter().filter(|weight| all.contains(weight));
    present
        .map(|weight| weight_bytes(config, *weight, quant))
        .sum()
}

/// Bytes of a layer's predictors as a bundle stores them: an MLP with weights in `format`, score vectors,
/// and gate signs `with_signs`.
pub fn predictor_bytes(
    config: &ModelConfig,
    summary: &PredictorSummary,
    format: Format,
    with_signs: bool,
) -> u64 {
    let (hidden, neurons) = (config.hidden_size, config.ffn_size);
    let mut bytes = 0;
    if summary.rank > 0 {
        let rank = summary.rank;
        bytes += rank * (format.row_bytes(hidden) + format.row_bytes(neurons));
        // F32 values: the bias, and the block scales of transposed units.
        let blocks = if format.is_quantised() {
            rank.div_ceil(BLOCK)
        } else {
            0
        };
        bytes += (1 + blocks) * neurons * size_of::<f32>();
    }
    if !summary.thresholds.is_empty() {
        bytes += (3 * neurons + hidden) * size_of::<f32>();
    }
    if with_signs && summary.sign_bit.is_some() {
        bytes += neurons * SignMatrix::row_bytes(hidden);
    }
    bytes as u64
}

/// Bytes of a layer's KV cache in `format`; head size and `context` are padded to multiples of 32.
pub fn kv_bytes(config: &ModelConfig, context: u64, format: CacheFormat) -> u64 {
    let tile = format.plane_bytes(config.kv_head_count, config.head_size, BLOCK);
    context.div_ceil(BLOCK as u64) * (2 * tile) as u64
}

/// Upper bound of the temporary memory of a forward pass and of sampling, for predictors with at most
/// `rank` hidden units: activations of [`PREFILL_BATCH`] tokens, neuron lists, attention over spans of
/// `context` tokens, logits of one token.
pub fn scratch_bytes(config: &ModelConfig, context: u64, rank: usize) -> u64 {
    let (hidden, neurons) = (config.hidden_size, config.ffn_size);
    let queries = config.head_count * config.head_size;
    let width = config.head_size.next_multiple_of(BLOCK);
    let per_token = floats_per_token(config, list_floats(neurons));
    let batch = PREFILL_BATCH.min(usize::try_from(context).unwrap_or(usize::MAX));
    // For one token at a time. Lists grow by doubling, so two copies exist for a moment.
    let lists = 3 * (4 * neurons + 2 * hidden.max(queries) + 2 * rank);
    let single = lists + 6 * neurons + 4 * hidden + rank;
    // Logits, and the sampler's sorted copy.
    let logits = 8 * config.vocabulary_size + config.embedding_size + 2 * hidden;
    let tokens = (batch * per_token + single + logits) as u64;
    // Partial attention of few queries per span until they are merged, lists of spans, and the token ids.
    let rows = config.head_count.max(FEW_ROWS * config.kv_head_count);
    let span = rows * (width + 2) + 16 * config.kv_head_count;
    let spans = context.div_ceil(ATTENTION_SPAN as u64) * span as u64;
    (tokens + spans + context) * FLOAT
}

/// Upper bound of the temporary memory for a token of a batch, in floats; `lists` of them are for lists of neurons.
fn floats_per_token(config: &ModelConfig, lists: usize) -> usize {
    let (hidden, neurons) = (config.hidden_size, config.ffn_size);
    let queries = config.head_count * config.head_size;
    let keys = config.kv_head_count * config.head_size;
    // The hidden state, its norm, the attention output, and the state before the FFN; in addition the maximum of
    // embedding, attention and FFN. A GEMM output exists twice for a moment, by row group and in its final order; its
    // input also exists quantised or packed.
    let embedding = config.embedding_size + 2 * hidden;
    // Queries and attention outputs exist in a second order, padded to the block size.
    let ordered = config.head_count * config.head_size.next_multiple_of(BLOCK);
    let rank = config.latent.and_then(|latent| latent.query_rank);
    let widest = hidden
        .max(queries)
        .max(config.mixed_size())
        .max(rank.unwrap_or(0));
    let prepared = QuantisedActivations::vector_bytes(widest)
        .max(PackedActivations::vector_bytes(widest))
        .div_ceil(size_of::<f32>());
    // Queries, compressed queries and keys by token; projected queries or outputs by head.
    let latent = config.latent.as_ref().map_or(0, |latent| {
        let heads = config.head_count;
        let by_head = heads * latent.rank.max(latent.value_size);
        2 * heads * latent.query_size() + latent.query_rank.unwrap_or(0) + keys + by_head + prepared
    });
    let attention =
        queries + 2 * keys + 2 * hidden.max(queries).max(ordered) + hidden + prepared + latent;
    // Lists, and the masks of predicted neurons.
    let ffn = lists + neurons.div_ceil(32) + 3 * hidden + prepared;
    // Masks, logits, weights and inputs of routers.
    let routing = config.experts.as_ref().map_or(0, |experts| {
        neurons.div_ceil(32) + 2 * experts.blocks() + hidden + prepared
    });
    4 * hidden + embedding.max(attention).max(ffn + routing)
}

/// Floats of a token's lists of neurons if the token can compute all neurons: products of GEMMs by input; neurons and their
/// coefficients by group, by token, and spread over the rows of all tokens.
fn list_floats(neurons: usize) -> usize {
    7 * neurons
}

/// Number of prompt tokens that run together on the CPU: [`PREFILL_BATCH`], or more in a mixture of experts. A token of a mixture
/// computes few of the neurons, so up to 512 tokens fit into the memory that [`PREFILL_BATCH`] tokens would need to compute all of
/// them. The more tokens run together, the more of them share the weights of an expert.
pub fn prompt_tokens(config: &ModelConfig) -> usize {
    let (hidden, neurons) = (config.hidden_size, config.ffn_size);
    let Some(experts) = &config.experts else {
        return PREFILL_BATCH;
    };
    let computed = experts.most_neurons_per_token();
    // Neurons and coefficients by token, and the token's entry in each group of neurons; lists of entries double as they grow.
    let listed = 2 * computed + 8 * neurons.div_ceil(AXPY_GROUP_ROWS).min(computed);
    let slots = 2 * SLOTTED_NEURONS.min(neurons);
    // Sums and coefficients of the tokens that share an expert; every thread's products of a group of neurons.
    let shared = 4 * hidden + BATCH_THREADS * 64;
    let planned = PREFILL_BATCH * floats_per_token(config, list_floats(neurons));
    let fit = planned / floats_per_token(config, listed + slots + shared);
    (fit - fit % PREFILL_BATCH).clamp(PREFILL_BATCH, MOST_PROMPT_TOKENS)
}

/// Upper bound of the temporary memory on a device, with weights in `quant`, for predictors with at most `rank` hidden units and prompts
/// of up to `tokens` tokens at a time. The bound exceeds the allocated memory by less than 64 MiB.
pub fn device_scratch_bytes(
    config: &ModelConfig,
    quant: Format,
    budget: &Budget,
    rank: usize,
    tokens: usize,
) -> u64 {
    let context = usize::try_from(budget.context_tokens).unwrap_or(usize::MAX);
    DeviceScratch::new(config, quant, (context, budget.kv_cache), rank).bytes(tokens)
}

/// Upper bound of the temporary memory on the CPU: [`scratch_bytes`] and the buffers of each thread.
pub fn cpu_scratch_bytes(config: &ModelConfig, context: u64, rank: usize) -> u64 {
    scratch_bytes(config, context, rank) + (BATCH_THREADS * thread_bytes(config)) as u64
}

/// Upper bound of the host memory, in bytes, for the experts that `layers` may replace on the GPU: their weights, which the host reads
/// while the experts are not on the GPU, and pinned memory for copies. 0 if there are no such experts.
pub fn cached_expert_bytes(experts: &Experts, layers: &[LayerPlan]) -> u64 {
    let expert = |layer: &LayerPlan| experts.size as u64 * layer.neuron_bytes;
    let cached = layers.iter().filter(|layer| layer.cached_experts > 0);
    let largest = cached.clone().map(expert).max();
    let pinned = largest.map_or(0, |largest| largest.max(EXPERT_COPY_BYTES as u64));
    let weights = cached.map(|layer| {
        let most = (layer.hot_count / experts.size.max(1)) as u64;
        expert(layer) * most.min(layer.cached_experts as u64)
    });
    weights.fold(pinned, u64::saturating_add)
}

/// Whether, for more than [`PREFILL_BATCH`] tokens, copying weights in `quant` to the GPU is faster than multiplying them on the CPU.
pub fn copying_pays(hardware: &Hardware, quant: Format) -> bool {
    let (Some(gpu), Some(operations)) = (
        hardware.gpu.as_ref(),
        hardware.cpu.gemm_operations_per_second(quant),
    ) else {
        return false;
    };
    let copy = quant.row_bytes(BLOCK) as f64 / BLOCK as f64 / gpu.pcie_bandwidth_bytes_per_second;
    copy < 2.0 * PREFILL_BATCH as f64 / operations
}

/// Upper bound of the device memory, in bytes, for the parts of one layer that the GPU lacks, except neurons: attention, its KV cache,
/// and a predictor of `predictor_bytes`.
pub fn copied_bytes(
    config: &ModelConfig,
    quant: Format,
    budget: &Budget,
    predictor_bytes: u64,
) -> u64 {
    attention_bytes(config, quant, false)
        + predictor_bytes
        + kv_bytes(config, budget.context_tokens, budget.kv_cache)
}

/// Upper bound of the host memory, in bytes, of a prompt pass of `tokens` tokens that copies the parts that the GPU lacks. It
/// includes pinned memory for a layer's attention and predictor, inputs and outputs of the layers, and a layer's earlier keys
/// and values in the format of the GPU.
pub fn host_copy_bytes(
    config: &ModelConfig,
    quant: Format,
    budget: &Budget,
    predictor_bytes: u64,
    tokens: usize,
) -> u64 {
    let keys = (config.kv_head_count * config.head_size) as u64;
    let hidden = config.hidden_size as u64;
    let floats = tokens as u64 * (3 * hidden + 2 * keys);
    let copied = copied_bytes(config, quant, budget, predictor_bytes);
    copied + floats * FLOAT
}

/// Upper bound of the buffers of one thread in GEMMs and attention.
pub fn thread_bytes(config: &ModelConfig) -> usize {
    let width = config.head_size.next_multiple_of(BLOCK);
    let floats = ATTENTION_ROWS * (ATTENTION_SPAN + 2 * (width + 2));
    let rank = config.latent.and_then(|latent| latent.query_rank);
    let columns = config.hidden_size.max(config.head_count * config.head_size);
    let columns = columns.max(config.mixed_size()).max(rank.unwrap_or(0));
    // Next to a GEMM of few rows: the products of all tokens, and lists of the rows.
    let products = 64 * (PREFILL_BATCH + 8) * size_of::<f32>();
    let latent = config.latent.map_or(0, |latent| {
        let vectors = latent.rank.max(latent.key_size);
        let prepared = QuantisedActivations::vector_bytes(vectors)
            .max(PackedActivations::vector_bytes(vectors));
        PREFILL_BATCH * (vectors * size_of::<f32>() + prepared)
    });
    let gemm = kernel_scratch_bytes(columns.max(config.embedding_size)) + products + latent;
    gemm.max(floats * size_of::<f32>())
}
