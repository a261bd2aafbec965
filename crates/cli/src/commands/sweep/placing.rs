//! Where a point of the grid has which neurons, and how fast that would be.

use anyhow::Result;
use powerinfer_artifact::{
    hardware::Hardware,
    plan::{Budget, Device, Plan},
};
use powerinfer_bundle::Bundle;
use powerinfer_planner::{
    problem::{largest_rank, problem},
    simulate::{
        engine::OURS,
        step::{Estimator, Kind, Pass, Placed},
    },
};
use powerinfer_solver::{Candidate, Options, Problem, SolveError, decide};

use super::rows::{Placement, Planned};

/// What is on the GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Hot {
    /// The best that fits so many bytes.
    Within(u64),
    /// Attention, the head, and every neuron that fires on at least this share of tokens, whatever it takes.
    From(f64),
}

/// What runs together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) batch: usize,
    pub(crate) prompt_tokens: usize,
    pub(crate) decode_tokens: usize,
}

impl Extent {
    /// Tokens of a sequence.
    pub(crate) fn context(self) -> usize {
        self.prompt_tokens + self.decode_tokens
    }
}

/// A placement, and what it would do.
pub(crate) struct Found {
    pub(crate) plan: Plan,
    pub(crate) placement: Placement,
    pub(crate) planned: Planned,
}

/// Places a model whose layers go the ways `candidates` on `hardware`, which is as the model finds it.
///
/// Fails where it does not fit.
pub(crate) fn place(
    bundle: &Bundle,
    candidates: &[Candidate],
    hardware: &Hardware,
    hot: Hot,
    extent: Extent,
) -> Result<Found, SolveError> {
    let vram_bytes = match hot {
        Hot::Within(bytes) => bytes,
        Hot::From(_) => MORE_THAN_ANY,
    };
    let mut problem = stated(bundle, hardware, vram_bytes, extent);
    if let Hot::From(_) = hot {
        problem.head_pin = Some(Device::Gpu);
        for layer in &mut problem.layers {
            layer.pins.attention = Some(Device::Gpu);
        }
    }
    let modes: Vec<_> = candidates.iter().map(|one| vec![one.clone()]).collect();
    let mut plan = decide(&problem, &modes, &Options::default())?.plan;
    if let Hot::From(threshold) = hot {
        draw(&mut plan, candidates, threshold);
    }
    let chosen: Vec<&Candidate> = candidates.iter().collect();
    let placed = Placed::of(&plan, &problem, bundle.config(), bundle.quant(), &chosen);
    Ok(Found {
        placement: placement(&plan, &placed, candidates),
        planned: predict(&placed, hardware, extent),
        plan,
    })
}

/// What the cost model says of `plan` on `hardware`, which is as the model finds it.
pub(crate) fn price(
    bundle: &Bundle,
    candidates: &[Candidate],
    plan: &Plan,
    hardware: &Hardware,
    extent: Extent,
) -> Planned {
    let problem = stated(bundle, hardware, MORE_THAN_ANY, extent);
    let chosen: Vec<&Candidate> = candidates.iter().collect();
    let placed = Placed::of(plan, &problem, bundle.config(), bundle.quant(), &chosen);
    predict(&placed, hardware, extent)
}

/// More memory than any model takes.
const MORE_THAN_ANY: u64 = 1 << 50;

/// The placement as the solver takes it.
fn stated(bundle: &Bundle, hardware: &Hardware, vram_bytes: u64, extent: Extent) -> Problem {
    let before = &bundle.plan().budget;
    let budget = Budget {
        vram_split: Vec::new(),
        vram_bytes,
        ram_bytes: before.ram_bytes.max(hardware.cpu.ram_bytes),
        context_tokens: (extent.batch * extent.context()) as u64,
        kv_cache: before.kv_cache,
    };
    let rank = largest_rank(bundle.predictors());
    let mut problem = problem(
        bundle.config(),
        budget,
        hardware.clone(),
        bundle.quant(),
        None,
        rank,
    );
    problem.hardware = hardware.clone();
    problem
}

fn predict(placed: &Placed<'_>, hardware: &Hardware, extent: Extent) -> Planned {
    let estimator = Estimator {
        engine: &OURS,
        hardware,
    };
    let context = extent.prompt_tokens as f64 + extent.decode_tokens as f64 / 2.0;
    let step = estimator.pass(
        placed,
        Pass {
            tokens: extent.batch as f64,
            context: extent.batch as f64 * context,
            kind: Kind::Decode,
        },
    );
    Planned {
        hardware: hardware.name.clone(),
        simulated: true,
        first_token_milliseconds: 1e3 * estimator.prompt(placed, extent.prompt_tokens),
        decode_microseconds: 1e6 * step.total,
        gpu_microseconds: 1e6 * step.gpu,
        cpu_microseconds: 1e6 * step.cpu,
        sync_microseconds: 1e6 * step.sync,
        tokens_per_second: extent.batch as f64 / step.total,
    }
}

/// Everything on a GPU: the bytes before any layer, and those of the layers.
///
/// Fails where `hardware` has no GPU.
pub(crate) fn whole(
    bundle: &Bundle,
    candidates: &[Candidate],
    hardware: &Hardware,
    extent: Extent,
) -> Result<(u64, u64), SolveError> {
    let all = Hot::Within(MORE_THAN_ANY);
    let plan = place(bundle, candidates, hardware, all, extent)?.plan;
    let layers = plan.layers.iter().map(|layer| layer.bytes(Device::Gpu));
    let layers: u64 = layers.sum();
    Ok((plan.totals.gpu_bytes.saturating_sub(layers), layers))
}

/// Draws the line between hot and cold at `threshold` instead.
fn draw(plan: &mut Plan, candidates: &[Candidate], threshold: f64) {
    let mut moved: i128 = 0;
    for (layer, candidate) in plan.layers.iter_mut().zip(candidates) {
        let hot = candidate
            .frequencies
            .partition_point(|frequency| *frequency >= threshold);
        let bytes = (hot as i128 - layer.hot_count as i128) * i128::from(layer.neuron_bytes);
        layer.hot_count = hot;
        moved += bytes;
    }
    let shifted = |bytes: u64, by: i128| (i128::from(bytes) + by).max(0) as u64;
    let (gpu, cpu) = (plan.totals.gpu_bytes, plan.totals.cpu_bytes);
    let (gpu, cpu) = (shifted(gpu, moved), shifted(cpu, -moved));
    // The lines no longer add up: it is a plan to be run and measured, and no promise.
    plan.clear_memory_use();
    (plan.totals.gpu_bytes, plan.totals.cpu_bytes) = (gpu, cpu);
    plan.totals.hot_count = plan.layers.iter().map(|layer| layer.hot_count as u64).sum();
}

fn placement(plan: &Plan, placed: &Placed<'_>, candidates: &[Candidate]) -> Placement {
    // Where nothing fires, nothing is carried.
    let [neuron_share, activation_share] = placed
        .hot()
        .map(|share| if share.is_finite() { share } else { 0.0 });
    let rarest = plan
        .layers
        .iter()
        .zip(candidates)
        .filter_map(|(layer, candidate)| {
            let last = layer.hot_count.checked_sub(1)?;
            candidate.frequencies.get(last).copied()
        });
    Placement {
        hot_neurons: plan.layers.iter().map(|layer| layer.hot_count as u64).sum(),
        neurons: plan
            .layers
            .iter()
            .map(|layer| layer.neuron_count as u64)
            .sum(),
        neuron_share,
        activation_share,
        load_share: placed.load_on_gpu(),
        coldest_hot_frequency: rarest.reduce(f64::min),
        gpu_bytes: plan.totals.gpu_bytes,
        cpu_bytes: plan.totals.cpu_bytes,
        attention_layers: plan
            .layers
            .iter()
            .filter(|layer| layer.attention == Device::Gpu)
            .count(),
        layers: plan.layers.len(),
        hot_per_layer: plan.layers.iter().map(|layer| layer.hot_count).collect(),
    }
}

/// The plan as `bundle` can run it: what is stored stays as it is, and so do its thresholds.
pub(crate) fn to_run(mut plan: Plan, bundle: &Bundle) -> Plan {
    plan.clear_memory_use();
    for (layer, before) in plan.layers.iter_mut().zip(&bundle.plan().layers) {
        layer.threshold = before.threshold;
        layer.input_thresholds = before.input_thresholds;
    }
    plan.budget.context_tokens = bundle.plan().budget.context_tokens;
    plan.budget.kv_cache = bundle.plan().budget.kv_cache;
    plan
}
