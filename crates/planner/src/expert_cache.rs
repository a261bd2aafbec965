//! Chooses the layers of a mixture of experts whose hot experts may be replaced while the model runs.
//!
//! A cache of `n` experts evicts the least recently selected one, and copies a missed expert if its reuse distance is below `2n`. Let
//! `F(n)` be the share of the profile's selections at a distance below `n`. If successive distances of an expert are independent, then
//!
//! ```text
//! hit rate               F(n) · F(2n)
//! copies per selection   F(2n) · (1 − F(n))
//! ```
//!
//! A copy costs as much host time as reading three times the bytes of an expert: the host reads and writes them, and the GPU reads them.

use powerinfer_artifact::plan::{Baseline, BudgetLine, CACHED_EXPERTS, Device, Plan, Policy};
use powerinfer_model::{Experts, ModelConfig};
use powerinfer_runtime::{EXPERT_COPY_BYTES, EXPERT_DISTANCES, memory::cached_expert_bytes};
use powerinfer_solver::{Candidate, Problem, cost::Cost};
use powerinfer_tensor::Format;

use crate::simulate::{
    engine::OURS,
    step::{Estimator, Kind, Pass, Placed, PlacedLayer},
};

/// Times that each byte of a copied expert is read from or written to host memory.
const ACCESSES: f64 = 3.0;

/// A layer as it would be with a cache.
struct Cached {
    layer: usize,
    /// Number of hot experts.
    experts: usize,
    /// Activation frequencies with the cache's hit rate.
    frequencies: Vec<f64>,
    /// Seconds per token saved, on both devices together and on each; without copies.
    saved: Cost,
    /// Seconds per token of copies.
    copying: f64,
    /// Bytes copied per token.
    copied: f64,
}

impl Cached {
    /// Seconds per token that the cache saves; negative if the layer becomes slower.
    fn gain(&self) -> f64 {
        self.saved.total - self.copying
    }
}

/// Sets `cached_experts` in the layers of `plan` that a cache makes faster. `hits` has the [`expert_hits`](crate::candidates::expert_hits)
/// of each layer; an entry is empty if they are unknown. Adds the alternative, with or without caches, to the plan's baselines.
///
/// Returns the candidates `chosen` with the activation frequencies that result, and the seconds per token that copies take.
pub(crate) fn choose(
    plan: &mut Plan,
    problem: &Problem,
    config: &ModelConfig,
    quant: Format,
    chosen: &[&Candidate],
    hits: &[&[f32]],
) -> (Vec<Candidate>, f64) {
    let mut candidates: Vec<Candidate> = chosen.iter().map(|one| (*one).clone()).collect();
    let Some(experts) = config.experts.as_ref().filter(|_| plan.uses_gpu()) else {
        return (candidates, 0.0);
    };
    let placed = Placed::new(plan, problem, config, quant, chosen);
    let mut found: Vec<Cached> = (placed.layers.iter().zip(hits).enumerate())
        .filter_map(|(index, (layer, hits))| cached(plan, &placed, (index, layer), experts, hits))
        .collect();
    let before = plan.totals.microseconds_per_token;
    let (count, all) = (found.len(), found.iter().map(Cached::gain).sum::<f64>());
    // Few copies fit between two tokens.
    found.sort_by(|a, b| (b.gain() * a.copied).total_cmp(&(a.gain() * b.copied)));
    let free = plan.budget.ram_bytes.saturating_sub(plan.totals.cpu_bytes);
    let (mut copied, mut gained, mut copying) = (0.0, 0.0, 0.0);
    let mut is_cached = false;
    for cached in found {
        let (index, gain) = (cached.layer, cached.gain());
        if gain <= 0.0 || copied + cached.copied > EXPERT_COPY_BYTES as f64 {
            continue;
        }
        plan.layers[index].cached_experts = cached.experts;
        if cached_expert_bytes(experts, &plan.layers) > free {
            plan.layers[index].cached_experts = 0;
            continue;
        }
        let layer = &mut plan.layers[index];
        let lower = |time: &mut f64, saved: f64| *time = (*time - 1e6 * saved).max(0.0);
        lower(&mut layer.gpu_microseconds, cached.saved.gpu);
        lower(
            &mut layer.cpu_microseconds,
            cached.saved.cpu - cached.copying,
        );
        lower(&mut layer.microseconds, gain);
        copied += cached.copied;
        copying += cached.copying;
        gained += gain;
        is_cached = true;
        candidates[index].frequencies = cached.frequencies;
    }
    plan.totals.microseconds_per_token = (before - 1e6 * gained).max(0.0);
    let bytes = cached_expert_bytes(experts, &plan.layers);
    if bytes > 0 {
        plan.totals.cpu_bytes += bytes;
        plan.lines.push(BudgetLine {
            name: CACHED_EXPERTS.to_owned(),
            device: Device::Cpu,
            gpu: 0,
            bytes,
        });
    }
    // A faster cache that was not chosen is no alternative: it lacks memory, or too much would be copied after a token.
    let other = if is_cached {
        Some(("the same experts, never replaced", before))
    } else {
        let with = before - 1e6 * all;
        (count > 0 && with >= before).then_some(("the same plan with a cache of experts", with))
    };
    if let (Some(forecast), Some((name, microseconds_per_token))) = (&mut plan.forecast, other) {
        forecast.baselines.push(Baseline {
            name: name.to_owned(),
            microseconds_per_token,
            fits_ram: true,
        });
    }
    (candidates, copying)
}

/// `layer` with a cache; `None` if it cannot have one or its hit rate is unknown.
fn cached(
    plan: &Plan,
    placed: &Placed<'_>,
    (index, layer): (usize, &PlacedLayer<'_>),
    experts: &Experts,
    hits: &[f32],
) -> Option<Cached> {
    let is_supported = matches!(layer.mode.policy, Policy::Dense | Policy::Exact);
    let hot_experts = layer.hot_count.checked_sub(experts.shared_size)? / experts.size;
    if !is_supported || hot_experts == 0 || hot_experts >= experts.count {
        return None;
    }
    let below = |distance: usize| {
        let share = hits.get(distance.min(experts.count)).copied();
        let share = share.map(f64::from);
        share.filter(|share| (0.0..=1.0).contains(share))
    };
    let (kept, worthwhile) = (below(hot_experts)?, below(EXPERT_DISTANCES * hot_experts)?);
    let sum = |frequencies: &[f64]| frequencies.iter().sum::<f64>();
    let (hot, cold) = layer.frequencies.split_at(layer.hot_count);
    let (shared, hot_sum) = (sum(&hot[..experts.shared_size]), sum(hot));
    let (fixed, all) = (hot_sum - shared, hot_sum - shared + sum(cold));
    if fixed <= 0.0 || fixed >= all {
        return None;
    }
    let rate = kept * worthwhile;
    let (more, fewer) = (rate * all / fixed, (1.0 - rate) * all / (all - fixed));
    let scaled = |frequency: (usize, &f64)| match frequency {
        (neuron, shared) if neuron < experts.shared_size => *shared,
        (neuron, hot) if neuron < layer.hot_count => (hot * more).min(1.0),
        (_, cold) => (cold * fewer).min(1.0),
    };
    let frequencies: Vec<f64> = layer.frequencies.iter().enumerate().map(scaled).collect();
    let estimator = Estimator {
        engine: &OURS,
        hardware: &plan.hardware,
    };
    let pass = Pass {
        tokens: 1.0,
        context: plan.budget.context_tokens as f64,
        kind: Kind::Decode,
    };
    let cost = |frequencies: &[f64]| {
        let alone = Placed {
            layers: vec![PlacedLayer {
                frequencies,
                ..*layer
            }],
            ..*placed
        };
        estimator.pass(&alone, pass)
    };
    let (before, after) = (cost(layer.frequencies), cost(&frequencies));
    let copies = experts.per_token as f64 * worthwhile * (1.0 - kept);
    let copied = copies * (experts.size as u64 * layer.neuron_bytes) as f64;
    Some(Cached {
        layer: index,
        experts: hot_experts,
        frequencies,
        saved: Cost {
            gpu: before.gpu - after.gpu,
            cpu: before.cpu - after.cpu,
            sync: 0.0,
            total: before.total - after.total,
        },
        copying: ACCESSES * copied / plan.hardware.cpu.read_bandwidth_bytes_per_second,
        copied,
    })
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::{hardware, plan::Budget};
    use powerinfer_synth::Shape;
    use powerinfer_tensor::CacheFormat;

    use super::*;
    use crate::simulate::subject::Subject;

    const GIB: u64 = 1 << 30;

    /// A plan for 48 layers of 128 equally frequent experts with `share[n]` of the selections at a distance below `n`, and the time of a
    /// decoded token in microseconds before and after the choice.
    fn plan(share: impl Fn(f64) -> f64, ram_bytes: u64) -> (Plan, [f64; 2], Vec<Vec<f64>>) {
        let config = Shape::find("qwen3-30b-a3b").unwrap().describe().unwrap();
        let experts = config.experts.clone().unwrap();
        let frequencies = vec![experts.selected_share(); config.ffn_size];
        let subject = Subject {
            config: &config,
            quant: Format::Q4_0,
            frequencies: &vec![frequencies.clone(); config.layer_count],
            selected: Some(&frequencies),
            rank: 0,
            budget: &Budget {
                vram_bytes: 8 * GIB,
                vram_split: Vec::new(),
                ram_bytes,
                context_tokens: 4096,
                kv_cache: CacheFormat::F16,
            },
            hardware: &hardware::named("rtx4090").unwrap(),
        };
        let solved = subject.solve(Some(Policy::Dense)).unwrap();
        let chosen = solved.candidates.iter().zip(&solved.decision.chosen);
        let chosen: Vec<&Candidate> = chosen.map(|(modes, index)| &modes[*index]).collect();
        let hits: Vec<f32> = (0..=experts.count)
            .map(|count| share(count as f64 / experts.count as f64) as f32)
            .collect();
        let mut plan = solved.decision.plan;
        let before = plan.totals.microseconds_per_token;
        let hits = vec![&hits[..]; config.layer_count];
        let (found, _) = choose(
            &mut plan,
            &solved.problem,
            &config,
            Format::Q4_0,
            &chosen,
            &hits,
        );
        plan.validate().unwrap();
        let after = plan.totals.microseconds_per_token;
        let frequencies = found.into_iter().map(|candidate| candidate.frequencies);
        (plan, [before, after], frequencies.collect())
    }

    fn cached_layers(plan: &Plan) -> usize {
        let layers = plan.layers.iter();
        layers.filter(|layer| layer.cached_experts > 0).count()
    }

    #[test]
    fn experts_that_are_soon_selected_again_are_cached() {
        // Nearly all selections are of recent experts.
        let (plan, [before, after], frequencies) = plan(|share| share.powf(0.02), 64 * GIB);
        assert!(cached_layers(&plan) > 24, "{}", cached_layers(&plan));
        assert!(after < 0.8 * before, "{after} of {before}");
        let forecast = plan.forecast.as_ref().unwrap();
        let other = forecast.baselines.last().unwrap();
        assert_eq!(other.name, "the same experts, never replaced");
        assert_eq!(other.microseconds_per_token, before);
        let mut carried = 0.0;
        for (layer, frequencies) in plan.layers.iter().zip(&frequencies) {
            let sum: f64 = frequencies.iter().sum();
            assert!(
                (sum - 8.0 * 768.0).abs() < 1e-6,
                "a token selects 8 experts"
            );
            carried += frequencies[..layer.hot_count].iter().sum::<f64>() / sum;
        }
        assert!(carried > 0.8 * 48.0, "{carried}");
    }

    #[test]
    fn a_cache_that_does_not_pay_is_only_a_baseline() {
        // No expert is selected again earlier than by chance.
        let (plan, [before, after], _) = plan(|share| share, 64 * GIB);
        assert_eq!((cached_layers(&plan), after), (0, before));
        let forecast = plan.forecast.as_ref().unwrap();
        let has = |name: &str| {
            let baselines = forecast.baselines.iter();
            baselines.filter(|other| other.name == name).count()
        };
        assert_eq!(has("the same experts, never replaced"), 0);
        assert_eq!(has("the same plan with a cache of experts"), 1);
    }

    #[test]
    fn replaced_experts_stay_in_the_budget_of_ram() {
        let (all, ..) = plan(|share| share.powf(0.02), 64 * GIB);
        let held = all.line(CACHED_EXPERTS);
        assert!(held > 2 * GIB, "{held}");
        let room = all.totals.cpu_bytes - held + 2 * GIB;
        let (fewer, ..) = plan(|share| share.powf(0.02), room);
        let held = fewer.line(CACHED_EXPERTS);
        assert!(held > GIB && held <= 2 * GIB, "{held}");
        assert!((1..cached_layers(&all)).contains(&cached_layers(&fewer)));
    }
}
