//! Memory in use by the lines of a plan, and the check that the plan accounts for it.

use crate::{
    RuntimeError,
    memory::{cached_expert_bytes, cpu_scratch_bytes},
    model::Model,
    selector::LayerSelectors,
};
use powerinfer_artifact::plan::{
    ATTENTION, BudgetLine, CACHED_EXPERTS, COLD_NEURONS, Device, EMBEDDINGS, GPU_PREFILL_BATCHES,
    HEAD, HOT_NEURONS, KV_CACHE, PINNED_EMBEDDINGS, PREDICTORS, Plan, SCRATCH,
};
use powerinfer_bundle::{Bundle, StoredLinear, StoredNorm};
use powerinfer_gpu::DeviceModel;

/// Memory in use for one purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// Name of the line in the plan; on the CPU `neurons` for hot and cold ones together, since all of them are mapped.
    pub line: &'static str,
    /// Device that has the memory. On the CPU, the line of the KV cache counts all layers.
    pub device: Device,
    /// Bytes: mapped or kept for weights and predictors, reserved for the KV cache, at most for scratch.
    pub bytes: u64,
}

/// The line for all neurons, hot and cold: on the host all of them are mapped.
const NEURONS: &str = "neurons";

/// Memory in use, line by line, with a session of `session_bytes` bytes.
pub(crate) fn held(model: &Model, session_bytes: u64) -> Vec<MemoryUse> {
    let Model {
        config,
        weights,
        selectors,
        ..
    } = model;
    let context = model.context_limit() as u64;
    let (mut attention, mut neurons) = (0, 0);
    for places in &model.experts {
        attention += size_of_val(places.blocks());
    }
    for layer in &weights.layers {
        let projections = [&layer.query, &layer.key, &layer.value, &layer.output];
        attention += projections.into_iter().map(linear).sum::<usize>();
        let norms = [
            &layer.attention_norm,
            &layer.attention_output_norm,
            &layer.ffn_norm,
            &layer.ffn_output_norm,
        ];
        attention += norms.into_iter().flatten().map(norm).sum::<usize>();
        if let Some(latent) = &layer.latent {
            attention += norm(&latent.norm) + linear(&latent.query);
            let down = latent.query_down.as_ref();
            attention += down.map_or(0, |(down, scale)| linear(down) + norm(scale));
        }
        attention += layer.sinks.as_deref().map_or(0, size_of_val);
        attention += layer.head_norms.iter().flatten().map(norm).sum::<usize>();
        attention += bias(&layer.down);
        let routing = [&layer.router, &layer.shared_gate].into_iter().flatten();
        attention += routing.map(linear).sum::<usize>();
        neurons += linear(&layer.gate) + layer.up.as_ref().map_or(0, linear);
        neurons += layer.down.matrix.bytes();
    }
    let own = weights.embedding.bytes()
        + weights.positions.as_ref().map_or(0, |found| found.bytes())
        + weights.project_in.as_ref().map_or(0, linear);
    let around_head = weights.final_norm.as_ref().map_or(0, norm)
        + weights.project_out.as_ref().map_or(0, linear)
        + bias(&weights.head);
    let (embeddings, head) = if config.tied_embeddings {
        (own + around_head, 0)
    } else {
        (own, weights.head.matrix.bytes() + around_head)
    };
    let rank = selectors
        .iter()
        .map(LayerSelectors::rank)
        .max()
        .unwrap_or(0);
    let scratch = cpu_scratch_bytes(config, context, rank);
    [
        (ATTENTION, attention as u64),
        (
            PREDICTORS,
            selectors.iter().map(LayerSelectors::bytes).sum::<usize>() as u64,
        ),
        (HEAD, head as u64),
        (EMBEDDINGS, embeddings as u64),
        (NEURONS, neurons as u64),
        (KV_CACHE, session_bytes),
        (SCRATCH, scratch),
    ]
    .map(|(line, bytes)| MemoryUse {
        line,
        device: Device::Cpu,
        bytes,
    })
    .to_vec()
}

/// Host memory for experts that are replaced on a device; `None` if there are none.
pub(crate) fn cached_experts(model: &Model) -> Option<MemoryUse> {
    let experts = model.config.experts.as_ref()?;
    let bytes = cached_expert_bytes(experts, &model.bundle.plan().layers);
    let held = MemoryUse {
        line: CACHED_EXPERTS,
        device: Device::Cpu,
        bytes,
    };
    (bytes > 0).then_some(held)
}

/// Memory in use on `device` and host memory pinned for it, line by line, with KV caches of `session_bytes` bytes.
pub(crate) fn held_on(device: &DeviceModel, session_bytes: u64) -> Vec<MemoryUse> {
    let parts = device.memory().map(|(line, bytes)| (line, bytes as u64));
    let lines = parts.into_iter().chain([(KV_CACHE, session_bytes)]);
    let lines = lines.map(|(line, bytes)| MemoryUse {
        line,
        device: Device::Gpu,
        bytes,
    });
    let pinned = MemoryUse {
        line: PINNED_EMBEDDINGS,
        device: Device::Cpu,
        bytes: device.pinned_embedding_bytes() as u64,
    };
    let pinned = Some(pinned).filter(|pinned| pinned.bytes > 0);
    pinned.into_iter().chain(lines).collect()
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

/// Checks that the plan of `bundle` accounts for what is `held`: weights and predictors exactly, KV cache and scratch
/// at least. Plans that account for nothing are accepted.
///
/// # Errors
///
/// Fails with the first line that differs.
pub(crate) fn check(bundle: &Bundle, held: &[MemoryUse]) -> Result<(), RuntimeError> {
    let plan = bundle.plan();
    if !plan.is_placed() {
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
    for MemoryUse { line, bytes, .. } in held {
        let planned = planned(plan, line);
        let is_right = match *line {
            KV_CACHE | SCRATCH => planned >= *bytes,
            // The plan has room for neurons in either layout; their rows are padded differently where sizes are no
            // multiples of a block.
            NEURONS if skips_inputs(plan) => planned >= *bytes,
            // A tied head is mapped once; the plan may have a copy of it for the GPU.
            HEAD if bundle.config().tied_embeddings => true,
            _ => planned == *bytes,
        };
        if !is_right {
            return wrong(line, planned, *bytes);
        }
    }
    Ok(())
}

/// Prefill batch, in tokens, of the plan of `bundle`; the largest one if the plan has no memory account.
pub(crate) fn planned_prompt_tokens(bundle: &Bundle) -> usize {
    let plan = bundle.plan();
    if plan.is_placed() {
        plan.prompt_batch
    } else {
        GPU_PREFILL_BATCHES[0]
    }
}

/// Bytes that `plan` has for `line`.
fn planned(plan: &Plan, line: &str) -> u64 {
    match line {
        NEURONS => plan
            .line(HOT_NEURONS)
            .saturating_add(plan.line(COLD_NEURONS)),
        SCRATCH => {
            let is_it = |line: &&BudgetLine| line.name == SCRATCH && line.device == Device::Cpu;
            plan.lines.iter().find(is_it).map_or(0, |line| line.bytes)
        }
        line => plan.line(line),
    }
}

fn skips_inputs(plan: &Plan) -> bool {
    let mut layers = plan.layers.iter();
    layers.any(|layer| layer.input_thresholds.is_some())
}
