//! What running a bundle holds in memory, by the lines of a plan: the one arithmetic that placing
//! budgets with and that the runtime is held to.
//!
//! Where the embeddings are the head too, what stands between the last layer and the head counts with
//! the embeddings, and the line of a head on the GPU is for a copy of all of it.

use powerinfer_artifact::predictor_file::PredictorSummary;
use powerinfer_kernels::{QuantisedActivations, kernel_scratch_bytes};
use powerinfer_model::{LayerWeight, ModelConfig, Weight};
use powerinfer_tensor::{BLOCK, CacheFormat, Format, SignMatrix};

use crate::weights::{neuron_bytes, weight_bytes, weight_bytes_by_input};

/// Tokens of a prompt that go through a layer together.
pub const PREFILL_BATCH: usize = 64;

/// Most threads that share a product over a batch: each has rows of weights unpacked meanwhile.
pub const BATCH_THREADS: usize = 64;

/// Positions whose keys and values attention takes together, before it merges what they give.
pub const ATTENTION_SPAN: usize = 512;

/// Queries that attention takes together for one head of keys and values.
pub const ATTENTION_ROWS: usize = 32;

/// Queries of one head of keys and values up to which threads share spans; beyond, they share queries.
pub const FEW_ROWS: usize = 8;

const FLOAT: u64 = size_of::<f32>() as u64;

/// Bytes of whatever of a layer is not its neurons: attention, norms, the bias of what the FFN adds;
/// with projections by input or by output.
pub fn attention_bytes(config: &ModelConfig, quant: Format, by_input: bool) -> u64 {
    let bytes = |part: &LayerWeight| attention_weight_bytes(config, *part, quant, by_input);
    attention_weights(config).iter().map(bytes).sum()
}

/// What a token reads of them where it leaves out the share `left_out` of the inputs of projections.
pub fn attention_read_bytes(config: &ModelConfig, quant: Format, left_out: Option<f64>) -> u64 {
    let read = |part: &LayerWeight| {
        let bytes = attention_weight_bytes(config, *part, quant, left_out.is_some()) as f64;
        match left_out {
            Some(share) if is_projection(*part) => bytes * (1.0 - share),
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
    weights.retain(|part| !matches!(part, Gate | GateBias | Up | UpBias | Down));
    weights
}

fn attention_weight_bytes(
    config: &ModelConfig,
    part: LayerWeight,
    quant: Format,
    by_input: bool,
) -> u64 {
    let weight = Weight::Layer(0, part); // layers are equally large
    match by_input && is_projection(part) {
        true => weight_bytes_by_input(config, weight, quant),
        false => weight_bytes(config, weight, quant),
    }
}

fn is_projection(part: LayerWeight) -> bool {
    use LayerWeight::{Key, Output, Query, Value};
    matches!(part, Query | Key | Value | Output)
}

/// Bytes that hold one neuron whichever way gate and up lie: the more of both, which differ where
/// sizes are no multiples of a block.
pub fn neuron_bytes_in_either_layout(config: &ModelConfig, quant: Format) -> u64 {
    let columns = (config.hidden_size * quant.row_bytes(config.ffn_size)) as u64;
    let rows = quant.row_bytes(config.hidden_size) as u64;
    let turned = config.matrices_per_neuron() as u64 - 1;
    let more = (turned * columns).div_ceil(config.ffn_size as u64);
    let by_output = neuron_bytes(config, quant);
    by_output.max(by_output - turned * rows + more)
}

/// Bytes of the embeddings, learned positions among them.
pub fn embedding_bytes(config: &ModelConfig, quant: Format) -> u64 {
    let own = [Weight::Embedding, Weight::Positions, Weight::ProjectIn];
    let own = sum(config, quant, &own);
    own + if config.tied_embeddings {
        around_head_bytes(config, quant)
    } else {
        0
    }
}

/// Bytes of the head, with the last norm.
pub fn head_bytes(config: &ModelConfig, quant: Format) -> u64 {
    weight_bytes(config, Weight::Head, quant) + around_head_bytes(config, quant)
}

fn around_head_bytes(config: &ModelConfig, quant: Format) -> u64 {
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

/// Bytes of what predicts a layer's neurons as a bundle has it: a network with weights in `format`,
/// scores of thresholds, and signs only where the layer follows them.
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
        // Numbers that are kept in float32: the bias, and what sums of blocks are multiplied by.
        let blocks = match format.is_quantised() {
            true => rank.div_ceil(BLOCK),
            false => 0,
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

/// Bytes of a layer's KV cache for `context` tokens: keys and values in `format`, heads and context
/// filled up to multiples of 32.
pub fn kv_bytes(config: &ModelConfig, context: u64, format: CacheFormat) -> u64 {
    let block = format.plane_bytes(config.head_size, BLOCK);
    context.div_ceil(BLOCK as u64) * (2 * config.kv_head_count * block) as u64
}

/// Most bytes that are held beside all these while tokens are computed and chosen, of a model whose
/// predictors have at most `rank` units: activations of [`PREFILL_BATCH`] tokens, lists of neurons,
/// what attention has of spans of `context` tokens, the logits of one token.
pub fn scratch_bytes(config: &ModelConfig, context: u64, rank: usize) -> u64 {
    let (hidden, neurons) = (config.hidden_size, config.ffn_size);
    let queries = config.head_count * config.head_size;
    let keys = config.kv_head_count * config.head_size;
    // Of every token of a batch: the hidden state, a norm of it, what attention added, and the state
    // before the FFN; beside them the embeddings, or what is live in attention, or in the FFN.
    // A product over a batch is there twice for a moment, by groups of rows and as it is to be; what
    // is multiplied is there rounded as well.
    let embedding = config.embedding_size + 2 * hidden;
    // Attention has queries and what it gives for them in another order, and filled up.
    let width = config.head_size.next_multiple_of(BLOCK);
    let ordered = config.head_count * width;
    let rounded =
        QuantisedActivations::vector_bytes(hidden.max(queries)).div_ceil(size_of::<f32>());
    let attention = queries + 2 * keys + 2 * hidden.max(queries).max(ordered) + hidden + rounded;
    // Products of matrices by input; neurons and what their rows are multiplied by, found group by
    // group, by token, and spread over the rows of all tokens; who is predicted.
    let ffn = 7 * neurons + neurons.div_ceil(32) + 3 * hidden + rounded;
    let per_token = 4 * hidden + embedding.max(attention).max(ffn);
    let batch = PREFILL_BATCH.min(usize::try_from(context).unwrap_or(usize::MAX));
    // Of one token at a time. Lists grow by doubling, and are there twice while they do.
    let lists = 3 * (4 * neurons + 2 * hidden.max(queries) + 2 * rank);
    let single = lists + 6 * neurons + 4 * hidden + rank;
    // Logits, and what a sampler sorts of them.
    let logits = 8 * config.vocabulary_size + config.embedding_size + 2 * hidden;
    let tokens = (batch * per_token + single + logits) as u64;
    // What few queries get of each span of the context until it is merged, lists of spans, and which
    // tokens there are.
    let rows = config.head_count.max(FEW_ROWS * config.kv_head_count);
    let span = rows * (width + 2) + 16 * config.kv_head_count;
    let spans = context.div_ceil(ATTENTION_SPAN as u64) * span as u64;
    (tokens + spans + context) * FLOAT
}

/// The same on the CPU, whose threads unpack weights and score positions as well.
pub fn cpu_scratch_bytes(config: &ModelConfig, context: u64, rank: usize) -> u64 {
    scratch_bytes(config, context, rank) + (BATCH_THREADS * thread_bytes(config)) as u64
}

/// The most that each thread holds beside while it multiplies or attends.
pub fn thread_bytes(config: &ModelConfig) -> usize {
    let width = config.head_size.next_multiple_of(BLOCK);
    let floats = ATTENTION_ROWS * (ATTENTION_SPAN + 2 * (width + 2));
    let columns = config.hidden_size.max(config.head_count * config.head_size);
    // Beside a product of a few rows, the products of all tokens, and lists of the rows.
    let products = 64 * (PREFILL_BATCH + 8) * size_of::<f32>();
    let gemm = kernel_scratch_bytes(columns.max(config.embedding_size)) + products;
    gemm.max(floats * size_of::<f32>())
}
