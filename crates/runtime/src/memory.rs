//! What running holds in memory, line by line, and whether the plan says the same.

use powerinfer_artifact::{
    plan::{
        ATTENTION, BudgetLine, COLD_NEURONS, Device, EMBEDDINGS, HEAD, HOT_NEURONS, KV_CACHE,
        PREDICTORS, Plan, SCRATCH,
    },
    predictor_file::PredictorFile,
};
use powerinfer_bundle::{
    Bundle, StoredLinear, StoredNorm, StoredWeights, VERSION,
    memory::{cpu_scratch_bytes, scratch_bytes},
};
use powerinfer_model::ModelConfig;
use powerinfer_tensor::CacheFormat;

use crate::{RuntimeError, Sequence, choice::LayerChoices};

/// Memory that is held for one use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// The use: the name of a line of a plan; neurons, wherever they are planned, are `neurons`.
    pub line: &'static str,
    /// How much of it: weights and predictors as they are mapped or kept, the KV cache as it is
    /// reserved, of scratch the most there will be.
    pub bytes: u64,
}

/// The line for all neurons: both sides are held by the one processor that there is.
const NEURONS: &str = "neurons";

/// What is held, line by line.
pub(crate) fn held(
    config: &ModelConfig,
    weights: &StoredWeights,
    choices: &[LayerChoices],
    sequence: &Sequence,
    context: usize,
) -> Vec<Held> {
    let (mut attention, mut neurons) = (0, 0);
    for layer in &weights.layers {
        let projections = [&layer.query, &layer.key, &layer.value, &layer.output];
        attention += projections.into_iter().map(linear).sum::<usize>();
        attention += norm(&layer.attention_norm) + layer.ffn_norm.as_ref().map_or(0, norm);
        attention += layer.head_norms.iter().flatten().map(norm).sum::<usize>();
        attention += bias(&layer.down);
        neurons += linear(&layer.gate) + layer.up.as_ref().map_or(0, linear);
        neurons += layer.down.matrix.bytes();
    }
    let own = weights.embedding.bytes()
        + weights.positions.as_ref().map_or(0, |found| found.bytes())
        + weights.project_in.as_ref().map_or(0, linear);
    let around_head = weights.final_norm.as_ref().map_or(0, norm)
        + weights.project_out.as_ref().map_or(0, linear)
        + bias(&weights.head);
    let (embeddings, head) = match config.tied_embeddings {
        true => (own + around_head, 0),
        false => (own, weights.head.matrix.bytes() + around_head),
    };
    let rank = choices.iter().map(LayerChoices::rank).max().unwrap_or(0);
    let scratch = cpu_scratch_bytes(config, context as u64, rank);
    [
        (ATTENTION, attention as u64),
        (
            PREDICTORS,
            choices.iter().map(LayerChoices::bytes).sum::<usize>() as u64,
        ),
        (HEAD, head as u64),
        (EMBEDDINGS, embeddings as u64),
        (NEURONS, neurons as u64),
        (KV_CACHE, sequence.bytes() as u64),
        (SCRATCH, scratch),
    ]
    .map(|(line, bytes)| Held { line, bytes })
    .to_vec()
}

fn linear(stored: &StoredLinear) -> usize {
    stored.matrix.bytes() + bias(stored)
}

fn bias(stored: &StoredLinear) -> usize {
    stored.bias.as_deref().map_or(0, size_of_val)
}

fn norm(stored: &StoredNorm) -> usize {
    size_of_val(&stored.weight[..]) + stored.bias.as_deref().map_or(0, size_of_val)
}

/// Fails where the plan of `bundle` has another figure for a line than is `held`: of weights and
/// predictors the same, of KV cache and scratch no less. Plans that account for nothing, and those of
/// older bundles, are taken as they are.
pub(crate) fn check(bundle: &Bundle, held: &[Held]) -> Result<(), RuntimeError> {
    let plan = bundle.plan();
    if !plan.is_placed() || bundle.version() < VERSION {
        return Ok(());
    }
    let wrong = |line, planned, held| {
        Err(RuntimeError::OtherMemory {
            folder: bundle.folder().to_owned(),
            line,
            planned,
            held,
        })
    };
    // The GPU's, where it is planned, has what the CPU's has but for its threads.
    if let Some(planned) = scratch_line(plan, Device::Gpu) {
        let config = bundle.config();
        let layers = bundle.predictors().map_or(&[][..], PredictorFile::layers);
        let rank = layers.iter().map(|layer| layer.rank).max().unwrap_or(0);
        let taken = scratch_bytes(config, plan.budget.context_tokens, rank);
        if planned < taken {
            return wrong(SCRATCH, planned, taken);
        }
    }
    for Held { line, bytes } in held {
        let planned = planned(plan, line);
        let is_right = match *line {
            // Plans of old filled nothing up.
            KV_CACHE if plan.budget.kv_cache == CacheFormat::F32 => {
                planned >= *bytes || planned >= unfilled_kv_bytes(bundle)
            }
            KV_CACHE | SCRATCH => planned >= *bytes,
            // The plan has room for neurons in either layout, whose rows are filled up differently
            // where sizes are no multiples of a block.
            NEURONS if leaves_inputs_out(plan) => planned >= *bytes,
            // A tied head is held once; the plan may have a copy of it for the GPU.
            HEAD if bundle.config().tied_embeddings => true,
            _ => planned == *bytes,
        };
        if !is_right {
            return wrong(line, planned, *bytes);
        }
    }
    Ok(())
}

/// What `plan` has for `line`.
fn planned(plan: &Plan, line: &str) -> u64 {
    match line {
        NEURONS => plan
            .line(HOT_NEURONS)
            .saturating_add(plan.line(COLD_NEURONS)),
        SCRATCH => scratch_line(plan, Device::Cpu).unwrap_or(0),
        line => plan.line(line),
    }
}

/// Scratch that `plan` has on `device`.
fn scratch_line(plan: &Plan, device: Device) -> Option<u64> {
    let is_it = |line: &&BudgetLine| line.name == SCRATCH && line.device == device;
    plan.lines.iter().find(is_it).map(|line| line.bytes)
}

/// Bytes of keys and values in 32 bits, nothing filled up to blocks.
fn unfilled_kv_bytes(bundle: &Bundle) -> u64 {
    let (config, budget) = (bundle.config(), &bundle.plan().budget);
    let numbers = 2 * config.layer_count * config.kv_head_count * config.head_size;
    budget
        .context_tokens
        .saturating_mul((numbers * size_of::<f32>()) as u64)
}

fn leaves_inputs_out(plan: &Plan) -> bool {
    let mut layers = plan.layers.iter();
    layers.any(|layer| layer.input_thresholds.is_some())
}
