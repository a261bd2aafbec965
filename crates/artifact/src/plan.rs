//! `plan.json`: placement of a model. Per layer, the number of its hottest neurons on the GPU; the memory
//! use of every device; how close the solution is to optimal.

mod budget;
mod error;
mod forecast;
mod layer;
mod memory_use;
mod policy;
mod threshold;
mod validate;

use std::fmt;

pub use budget::Budget;
pub use error::PlanError;
pub use forecast::{Baseline, BatchSpeed, Forecast, PROMPT_TOKENS};
pub use layer::{LayerPlan, Limit};
pub use memory_use::{
    ATTENTION, BudgetLine, CACHED_EXPERTS, COLD_NEURONS, EMBEDDINGS, HEAD, HOT_NEURONS, KV_CACHE,
    PINNED_EMBEDDINGS, PREDICTORS, RESERVE, SCRATCH, Totals,
};
pub use policy::Policy;
use serde::{Deserialize, Serialize};
pub use threshold::{InputThresholds, Score, Threshold};

use crate::hardware::{self, Hardware};

/// Placement of a model, with the machine and the budget it was made for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Objective that was optimised.
    pub objective: Objective,
    /// Number of neurons placed together.
    pub group_size: usize,
    /// Quality of the solution.
    pub solver: SolverSummary,
    /// Memory that may be used.
    pub budget: Budget,
    /// Memory use, by purpose and device.
    pub lines: Vec<BudgetLine>,
    /// Totals over lines and layers.
    pub totals: Totals,
    /// Device of the output head and the final norm. The embeddings are always on the CPU.
    pub head: Device,
    /// Index of the GPU with the head, if there are several.
    #[serde(default, skip_serializing_if = "is_first")]
    pub head_gpu: usize,
    /// Maximum number of prompt tokens in a pass; the GPU's scratch has memory for that many.
    #[serde(default = "prefill_batch", skip_serializing_if = "is_prefill_batch")]
    pub prompt_batch: usize,
    /// Predicted speed, and that of other placements for comparison.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Forecast>,
    /// One entry per layer, in order.
    pub layers: Vec<LayerPlan>,
    /// Machine that the plan was made for.
    pub hardware: Hardware,
}

/// Number of prompt tokens that are processed together (prefill batch) on the CPU, and on a GPU without memory for more.
pub const PREFILL_BATCH: usize = 64;

/// Larger prefill batches, for GPUs with memory for them; largest first.
pub const GPU_PREFILL_BATCHES: [usize; 3] = [512, 256, 128];

fn prefill_batch() -> usize {
    PREFILL_BATCH
}

fn is_prefill_batch(tokens: &usize) -> bool {
    *tokens == PREFILL_BATCH
}

/// Objective of the optimisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Objective {
    /// Maximise the activations on the GPU, as in the paper.
    Impact,
    /// Minimise the time per token.
    #[default]
    Latency,
}

impl fmt::Display for Objective {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Impact => "impact",
            Self::Latency => "latency",
        })
    }
}

/// Part of the machine that computes from its own memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Device {
    /// GPU and its memory.
    Gpu,
    /// CPU and main memory.
    Cpu,
}

impl fmt::Display for Device {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Gpu => "gpu",
            Self::Cpu => "cpu",
        })
    }
}

/// Quality of the solution; `objective` is evaluated on the plan itself, not reported by the solver.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SolverSummary {
    /// Algorithm that found the plan: `decomposition`, `microlp`, `highs`, or `greedy` if a general solver
    /// ran out of time.
    pub backend: String,
    /// Value of this plan: microseconds per token, or activations on the GPU per token.
    pub objective: f64,
    /// Bound on the value of every plan within the budget: lower for time, upper for activations.
    pub bound: f64,
    /// Distance of `objective` from `bound`, as a share of it; 0 is proven optimal.
    pub gap: f64,
}

impl Plan {
    /// Creates a plan with everything on the CPU and no memory accounting, for running weights directly and
    /// for tests.
    #[expect(
        clippy::missing_panics_doc,
        reason = "`cpu-only` is a built-in machine"
    )]
    pub fn unplaced(layers: usize, neurons: usize, policy: Policy, context_tokens: usize) -> Self {
        let layer = |layer| LayerPlan {
            layer,
            policy,
            reason: String::new(),
            threshold: None,
            input_thresholds: None,
            neuron_count: neurons,
            hot_count: 0,
            cached_experts: 0,
            hot_share: 0.0,
            neuron_bytes: 0,
            gpu: 0,
            attention: Device::Cpu,
            kv: Device::Cpu,
            predictor: None,
            gpu_bytes: 0,
            cpu_bytes: 0,
            gpu_microseconds: 0.0,
            cpu_microseconds: 0.0,
            sync_microseconds: 0.0,
            microseconds: 0.0,
            limit: None,
        };
        Self {
            objective: Objective::Impact,
            group_size: 1,
            solver: SolverSummary {
                backend: "none".to_owned(),
                objective: 0.0,
                bound: 0.0,
                gap: 0.0,
            },
            budget: Budget {
                vram_bytes: 0,
                ram_bytes: 0,
                context_tokens: context_tokens as u64,
                kv_cache: powerinfer_tensor::CacheFormat::F32,
                vram_split: Vec::new(),
            },
            lines: Vec::new(),
            totals: Totals {
                gpu_bytes: 0,
                cpu_bytes: 0,
                neuron_count: layers as u64 * neurons as u64,
                hot_count: 0,
                hot_share: 0.0,
                microseconds_per_token: 0.0,
            },
            head: Device::Cpu,
            head_gpu: 0,
            prompt_batch: PREFILL_BATCH,
            forecast: None,
            layers: (0..layers).map(layer).collect(),
            hardware: hardware::named("cpu-only").expect("the machine is built in"),
        }
    }

    /// Sums the bytes of the lines called `name` over all devices; 0 if there are none.
    pub fn line(&self, name: &str) -> u64 {
        let lines = self.lines.iter().filter(|line| line.name == name);
        lines.fold(0, |sum, line| sum.saturating_add(line.bytes))
    }

    /// Returns whether the plan accounts for memory; a plan with everything on the CPU may not.
    pub fn is_placed(&self) -> bool {
        !self.lines.is_empty() || self.budget.vram_bytes > 0 || self.budget.ram_bytes > 0
    }

    /// Returns whether any part of the model is on a GPU.
    pub fn uses_gpu(&self) -> bool {
        let has_some = |layer: &LayerPlan| layer.hot_count > 0 || layer.attention == Device::Gpu;
        self.head == Device::Gpu || self.layers.iter().any(has_some)
    }

    /// Clears the memory accounting, for a plan that is changed only to be measured.
    pub fn clear_memory_use(&mut self) {
        self.lines.clear();
        (self.budget.vram_bytes, self.budget.ram_bytes) = (0, 0);
        self.budget.vram_split.clear();
        (self.totals.gpu_bytes, self.totals.cpu_bytes) = (0, 0);
        for layer in &mut self.layers {
            (layer.neuron_bytes, layer.gpu_bytes, layer.cpu_bytes) = (0, 0, 0);
        }
    }
}

/// Returns whether `gpu` is the first one, which JSON omits.
fn is_first(gpu: &usize) -> bool {
    *gpu == 0
}
