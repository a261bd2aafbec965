//! Where everything lives: `plan.json`, one page that says for every layer how many of its
//! hottest neurons the GPU holds, what that costs on each device, and how good the answer is.

mod account;
mod budget;
mod error;
mod forecast;
mod layer;
mod policy;
mod threshold;
mod validate;

use std::fmt;

pub use account::{
    ATTENTION, BudgetLine, COLD_NEURONS, EMBEDDINGS, HEAD, HOT_NEURONS, KV_CACHE, PREDICTORS,
    SCRATCH, Totals,
};
pub use budget::Budget;
pub use error::PlanError;
pub use forecast::{Baseline, BatchSpeed, Forecast, PROMPT_TOKENS};
pub use layer::{LayerPlan, Limit};
pub use policy::Policy;
use serde::{Deserialize, Serialize};
pub use threshold::{InputThresholds, Score, Threshold};

use crate::hardware::{self, Hardware};

/// What a solver decided, and for which machine and budget.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// What was optimised.
    pub objective: Objective,
    /// Neurons that are placed together.
    pub group_size: usize,
    /// How good the answer is.
    pub solver: SolverSummary,
    /// What may be used.
    pub budget: Budget,
    /// What is used, line by line.
    pub lines: Vec<BudgetLine>,
    /// What is used in all.
    pub totals: Totals,
    /// Where the output head and the last norm live. The embeddings always live on the CPU.
    pub head: Device,
    /// Which GPU has the head, where there are several.
    #[serde(default, skip_serializing_if = "is_first")]
    pub head_gpu: usize,
    /// What was predicted beside, to compare with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Forecast>,
    /// One entry per layer, in order.
    pub layers: Vec<LayerPlan>,
    /// The machine that the plan was made for.
    pub hardware: Hardware,
}

/// What a plan makes as good as it can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Objective {
    /// The paper's: the most activations carried by neurons on the GPU.
    Impact,
    /// The least time for a token, every part counted.
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

/// A side of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Device {
    /// The graphics card and its memory.
    Gpu,
    /// The processor and the main memory.
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

/// How good the answer is: `objective` is the plan's own value, evaluated, not the solver's word.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SolverSummary {
    /// What found the plan: `decomposition`, `microlp`, `highs`, or `greedy` where a general solver
    /// did not come to an end in time.
    pub backend: String,
    /// Value of this plan: microseconds per token, or activations on the GPU per token.
    pub objective: f64,
    /// No plan within the budget is better: none takes less time, or carries more activations.
    pub bound: f64,
    /// How far `objective` is from `bound`, as a share of it; 0 is proven optimal.
    pub gap: f64,
}

impl Plan {
    /// A plan that leaves everything on the CPU and accounts for nothing: for running weights
    /// as they are, and for tests.
    pub fn unplaced(layers: usize, neurons: usize, policy: Policy, context_tokens: usize) -> Self {
        let layer = |layer| LayerPlan {
            layer,
            policy,
            reason: String::new(),
            threshold: None,
            input_thresholds: None,
            neuron_count: neurons,
            hot_count: 0,
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
            forecast: None,
            layers: (0..layers).map(layer).collect(),
            hardware: hardware::named("cpu-only").expect("the machine is built in"),
        }
    }

    /// Bytes of the lines called `name`, on whichever devices; 0 where there are none.
    pub fn line(&self, name: &str) -> u64 {
        let lines = self.lines.iter().filter(|line| line.name == name);
        lines.fold(0, |sum, line| sum.saturating_add(line.bytes))
    }

    /// Whether this accounts for memory; a plan that leaves everything on the CPU need not.
    pub fn is_placed(&self) -> bool {
        !self.lines.is_empty() || self.budget.vram_bytes > 0 || self.budget.ram_bytes > 0
    }

    /// Whether anything of the model is on a GPU.
    pub fn uses_gpu(&self) -> bool {
        let has_some = |layer: &LayerPlan| layer.hot_count > 0 || layer.attention == Device::Gpu;
        self.head == Device::Gpu || self.layers.iter().any(has_some)
    }

    /// Takes the account of memory away, of a plan that is changed and only there to be measured.
    pub fn forget_account(&mut self) {
        self.lines.clear();
        (self.budget.vram_bytes, self.budget.ram_bytes) = (0, 0);
        self.budget.vram_split.clear();
        (self.totals.gpu_bytes, self.totals.cpu_bytes) = (0, 0);
        for layer in &mut self.layers {
            (layer.neuron_bytes, layer.gpu_bytes, layer.cpu_bytes) = (0, 0, 0);
        }
    }
}

/// Whether a GPU is the first, which goes without saying.
fn is_first(gpu: &usize) -> bool {
    *gpu == 0
}
