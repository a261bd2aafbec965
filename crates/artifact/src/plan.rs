//! Where everything lives: `plan.json`, one page that says for every layer how many of its
//! hottest neurons the GPU holds, what that costs on each device, and how good the answer is.

use std::fmt;

pub use powerinfer_kernels::CacheFormat;
use serde::{Deserialize, Serialize};

use crate::{
    ByteSize,
    hardware::{self, Hardware},
};

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
    pub outlook: Option<Outlook>,
    /// One entry per layer, in order.
    pub layers: Vec<LayerPlan>,
    /// The machine that the plan was made for.
    pub hardware: Hardware,
}

/// What a plan is expected to do, and what other ways of placing would.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outlook {
    /// Decoding so many sequences at once.
    pub decode: Vec<BatchSpeed>,
    /// A prompt of [`PROMPT_TOKENS`] tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_per_second: Option<f64>,
    /// Microseconds that a token would take less with 1 GiB more VRAM, at the budget's margin; none
    /// where the objective does not count time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub microseconds_per_gibibyte: Option<f64>,
    /// Other placements, by the same arithmetic.
    pub baselines: Vec<Baseline>,
}

/// Tokens of the prompt whose speed an [`Outlook`] gives.
pub const PROMPT_TOKENS: usize = 512;

/// How quickly so many sequences are decoded at once.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchSpeed {
    /// Sequences.
    pub batch: usize,
    /// Of all of them together.
    pub tokens_per_second: f64,
}

/// Another way of placing the same model within the same budget.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Baseline {
    /// What it does, in a few words.
    pub name: String,
    /// Predicted time of one decoded token.
    pub microseconds_per_token: f64,
    /// Whether it keeps the budget of RAM too.
    pub fits_ram: bool,
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

/// Which neurons of a layer are computed for a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// All of them.
    Dense,
    /// Every gate, then the neurons that it leaves alive.
    Exact,
    /// Those that the predictor expects to be alive.
    Predicted,
    /// Those that most signs of their gates speak for.
    SignBit,
    /// Those whose score reaches the layer's threshold.
    Threshold,
}

impl Policy {
    /// Every policy.
    pub const ALL: [Self; 5] = [
        Self::Dense,
        Self::Exact,
        Self::Predicted,
        Self::SignBit,
        Self::Threshold,
    ];

    /// Whether the result is that of computing every neuron, for whatever model can have it.
    pub fn is_lossless(self) -> bool {
        matches!(self, Self::Dense | Self::Exact)
    }
}

/// What is compared with a layer's threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Score {
    /// `|act(gate_i·x)|`, as CATS has it (arXiv 2404.08763): known before up is read.
    Gate,
    /// `|act(gate_i·x)|·s_i` with `s_i = ‖down_i‖·rms(up_i·x)`, what the neuron may be expected to
    /// add: known before up is read.
    WeightedGate,
    /// `|h_i − c_i|·‖down_i‖`, what the neuron does add, as CETT has it (arXiv 2402.03804), beyond
    /// what it usually adds where the layer is centred.
    Contribution,
}

impl Score {
    /// Whether it is known before up is read.
    pub fn precedes_up(self) -> bool {
        self != Self::Contribution
    }
}

impl fmt::Display for Score {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Gate => "gate",
            Self::WeightedGate => "weighted-gate",
            Self::Contribution => "contribution",
        })
    }
}

/// From where on a neuron is computed under [`Policy::Threshold`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Threshold {
    /// What is compared.
    pub score: Score,
    /// Whether dropped neurons count as what they usually add, and not as nothing.
    pub centred: bool,
    /// Neurons with at least this score are computed.
    pub value: f32,
    /// The relative error of the layer's FFN output that this was calibrated to.
    pub error: f64,
}

impl fmt::Display for Policy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Dense => "dense",
            Self::Exact => "exact",
            Self::Predicted => "predicted",
            Self::SignBit => "sign-bit",
            Self::Threshold => "threshold",
        })
    }
}

/// From which magnitude on the inputs of a layer's projections are read, as TEAL has it
/// (arXiv 2408.14690): a smaller `|x_j|` counts as 0, and its channel's weights stay unread.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputThresholds {
    /// Share of the inputs that was to fall below, on the text that this was calibrated on.
    pub share: f64,
    /// Of query, key and value, which see one input.
    pub attention: f32,
    /// Of the output projection.
    pub output: f32,
    /// Of gate and up, which see one input; only where every neuron is computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ffn: Option<f32>,
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

/// What the plan may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// Memory on the GPU, on all of them together where there are several.
    pub vram_bytes: u64,
    /// Memory on the CPU.
    pub ram_bytes: u64,
    /// Tokens that the KV cache holds.
    pub context_tokens: u64,
    /// How it stores them; plans that do not say were made for 32 bits.
    #[serde(default = "full_width", with = "cache_format_name")]
    pub kv_cache: CacheFormat,
    /// Memory on each GPU, in the order of the layers they have; empty where there is one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vram_split: Vec<u64>,
}

/// The format of plans that name none.
fn full_width() -> CacheFormat {
    CacheFormat::F32
}

/// A format by its name.
mod cache_format_name {
    use powerinfer_kernels::CacheFormat;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(format: &CacheFormat, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(format.name())
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<CacheFormat, D::Error> {
        let name = String::deserialize(from)?;
        name.parse().map_err(D::Error::custom)
    }
}

impl Budget {
    /// The budget of `device`.
    pub fn bytes(&self, device: Device) -> u64 {
        match device {
            Device::Gpu => self.vram_bytes,
            Device::Cpu => self.ram_bytes,
        }
    }

    /// The budget of each GPU; of one where there is no more.
    pub fn vram_per_gpu(&self) -> Vec<u64> {
        match self.vram_split.is_empty() {
            true => vec![self.vram_bytes],
            false => self.vram_split.clone(),
        }
    }
}

/// One use of one device's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BudgetLine {
    /// What the memory is for: `attention`, [`HOT_NEURONS`], …
    pub name: String,
    /// Whose memory.
    pub device: Device,
    /// Which GPU's, where there are several.
    #[serde(default, skip_serializing_if = "is_first")]
    pub gpu: usize,
    /// How much of it.
    pub bytes: u64,
}

/// Whether a GPU is the first, which goes without saying.
fn is_first(gpu: &usize) -> bool {
    *gpu == 0
}

/// Name of the line for attention's weights, norms, and what the FFN adds beside its neurons.
pub const ATTENTION: &str = "attention";
/// Name of the line for what foresees: predictors, signs, scores.
pub const PREDICTORS: &str = "predictors";
/// Name of the line for the head.
pub const HEAD: &str = "head";
/// Name of the line for the embeddings.
pub const EMBEDDINGS: &str = "embeddings";
/// Name of the line for keys and values.
pub const KV_CACHE: &str = "KV cache";
/// Name of the line for activations and whatever else is only there while a token is computed.
pub const SCRATCH: &str = "scratch";
/// Name of the line for the neurons on the GPU.
pub const HOT_NEURONS: &str = "hot neurons";
/// Name of the line for the neurons on the CPU.
pub const COLD_NEURONS: &str = "cold neurons";

/// Sums over lines and layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Totals {
    /// Used on the GPU.
    pub gpu_bytes: u64,
    /// Used on the CPU.
    pub cpu_bytes: u64,
    /// Neurons of the model.
    pub neuron_count: u64,
    /// Neurons on the GPU.
    pub hot_count: u64,
    /// Share of all activations that the neurons on the GPU carry.
    pub hot_share: f64,
    /// Predicted time of one decoded token at full context.
    pub microseconds_per_token: f64,
}

impl Totals {
    /// What is used of `device`.
    pub fn bytes(&self, device: Device) -> u64 {
        match device {
            Device::Gpu => self.gpu_bytes,
            Device::Cpu => self.cpu_bytes,
        }
    }
}

/// One layer: its first `hot_count` neurons, hottest first, are the GPU's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerPlan {
    /// Index of the layer.
    pub layer: usize,
    /// Which neurons are computed.
    pub policy: Policy,
    /// Why that policy, for people.
    #[serde(default)]
    pub reason: String,
    /// What [`Policy::Threshold`] compares with what, wherever it was calibrated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threshold: Option<Threshold>,
    /// Which inputs of its projections are read; all where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_thresholds: Option<InputThresholds>,
    /// Neurons of the layer.
    pub neuron_count: usize,
    /// Neurons on the GPU.
    pub hot_count: usize,
    /// Share of the layer's activations that they carry.
    pub hot_share: f64,
    /// Bytes of one neuron: its rows of gate and up and its column of down, packed.
    pub neuron_bytes: u64,
    /// Which GPU has whatever of the layer is on one, where there are several.
    #[serde(default, skip_serializing_if = "is_first")]
    pub gpu: usize,
    /// Where the attention weights and norms live.
    pub attention: Device,
    /// Where the KV cache lives.
    pub kv: Device,
    /// Where the predictor lives; `None` where the layer has none.
    pub predictor: Option<Device>,
    /// Bytes of the layer on the GPU, all parts together.
    pub gpu_bytes: u64,
    /// Bytes of the layer on the CPU, all parts together.
    pub cpu_bytes: u64,
    /// Predicted work of the GPU for one token.
    pub gpu_microseconds: f64,
    /// Predicted work of the CPU for one token.
    pub cpu_microseconds: f64,
    /// Predicted cost of handing work between them.
    pub sync_microseconds: f64,
    /// Predicted time of the layer: less than the sum where both sides work at once.
    pub microseconds: f64,
    /// What most of that time waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<Limit>,
}

/// What the time of a layer waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// The GPU reading its weights and cache.
    GpuMemory,
    /// The CPU reading its weights and cache.
    CpuMemory,
    /// Handing work from one side to the other.
    HandOver,
    /// What starting kernels costs, whatever they read.
    Kernels,
}

impl fmt::Display for Limit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::GpuMemory => "GPU memory",
            Self::CpuMemory => "CPU memory",
            Self::HandOver => "hand-over",
            Self::Kernels => "kernels",
        })
    }
}

/// A plan that contradicts itself or breaks its promise; made by hand, or damaged.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// Layer entries are not 0, 1, 2, ….
    #[error(
        "plan entry {position} is for layer {layer}; layers must be listed in order, run `powerinfer place` again"
    )]
    LayerOrder {
        /// Position in the list.
        position: usize,
        /// Index it carries.
        layer: usize,
    },
    /// A layer with more hot neurons than neurons.
    #[error(
        "layer {layer} has {hot_count} hot neurons of {neuron_count}; lower `hot_count` or run `powerinfer place` again"
    )]
    TooManyHot {
        /// The layer.
        layer: usize,
        /// Hot neurons planned.
        hot_count: usize,
        /// Neurons there are.
        neuron_count: usize,
    },
    /// A share, time or objective that is no number, or out of range.
    #[error("`{field}` is {value}; run `powerinfer place` again")]
    Figure {
        /// Name of the figure, with its layer where it has one.
        field: String,
        /// What was found.
        value: f64,
    },
    /// Lines or layers that do not add up to the figure that stands for them.
    #[error(
        "`{what}` is {stated} bytes but its parts add up to {found}; run `powerinfer place` again instead of editing the plan"
    )]
    DoesNotAddUp {
        /// The figure.
        what: String,
        /// Its value.
        stated: u64,
        /// The sum of the parts.
        found: u128,
    },
    /// A part on a GPU that the budget does not have.
    #[error(
        "a part is on GPU {gpu} but the budget has {count}, counted from 0; run `powerinfer place` again"
    )]
    NoSuchGpu {
        /// The GPU.
        gpu: usize,
        /// GPUs in the budget.
        count: usize,
    },
    /// Layers of one GPU that are not a range.
    #[error("the layers are not dealt out to the GPUs in ranges; run `powerinfer place` again")]
    GpuOrder,
    /// One use of memory listed twice.
    #[error(
        "the plan has two lines `{name}` for {device} memory; run `powerinfer place` again instead of editing the plan"
    )]
    TwoLines {
        /// The line.
        name: String,
        /// Whose memory.
        device: Device,
    },
    /// More memory used than allowed.
    #[error("the plan needs {needed} of {device} memory but its budget is {budget}; run `powerinfer place` with a larger budget, or again with this one", needed = ByteSize(*needed), budget = ByteSize(*budget))]
    OverBudget {
        /// Whose memory.
        device: Device,
        /// Bytes used.
        needed: u64,
        /// Bytes allowed.
        budget: u64,
    },
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
                kv_cache: CacheFormat::F32,
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
            outlook: None,
            layers: (0..layers).map(layer).collect(),
            hardware: hardware::named("cpu-only").expect("the machine is built in"),
        }
    }

    /// Checks that the plan is consistent: layers in order, no more hot neurons than neurons,
    /// lines and layers that add up, totals within the budget.
    pub fn validate(&self) -> Result<(), PlanError> {
        for (position, layer) in self.layers.iter().enumerate() {
            layer.validate(position)?;
        }
        self.validate_figures()?;
        self.validate_lines()?;
        for device in [Device::Gpu, Device::Cpu] {
            self.validate_device(device)?;
        }
        self.validate_gpus()?;
        let neurons = |hot: bool| {
            let count = |layer: &LayerPlan| match hot {
                true => layer.hot_count,
                false => layer.neuron_count - layer.hot_count,
            };
            self.layers
                .iter()
                .map(|layer| count(layer) as u128 * u128::from(layer.neuron_bytes))
                .sum()
        };
        adds_up(HOT_NEURONS, self.line(HOT_NEURONS), neurons(true))?;
        adds_up(COLD_NEURONS, self.line(COLD_NEURONS), neurons(false))?;
        let count = |of: fn(&LayerPlan) -> usize| self.layers.iter().map(|l| of(l) as u128).sum();
        adds_up(
            "totals.neuron_count",
            self.totals.neuron_count,
            count(|l| l.neuron_count),
        )?;
        adds_up(
            "totals.hot_count",
            self.totals.hot_count,
            count(|l| l.hot_count),
        )
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

    fn validate_lines(&self) -> Result<(), PlanError> {
        for (index, line) in self.lines.iter().enumerate() {
            let is_same = |other: &&BudgetLine| {
                (&other.name, other.device, other.gpu) == (&line.name, line.device, line.gpu)
            };
            if self.lines[..index].iter().any(|other| is_same(&other)) {
                return Err(PlanError::TwoLines {
                    name: line.name.clone(),
                    device: line.device,
                });
            }
        }
        Ok(())
    }

    fn validate_device(&self, device: Device) -> Result<(), PlanError> {
        let stated = self.totals.bytes(device);
        let lines = self.lines.iter().filter(|line| line.device == device);
        let found = lines.map(|line| u128::from(line.bytes)).sum();
        adds_up(&format!("totals.{device}_bytes"), stated, found)?;
        let in_layers: u128 = self
            .layers
            .iter()
            .map(|layer| u128::from(layer.bytes(device)))
            .sum();
        if in_layers > found {
            return Err(PlanError::DoesNotAddUp {
                what: format!("totals.{device}_bytes"),
                stated,
                found: in_layers,
            });
        }
        let budget = self.budget.bytes(device);
        if stated > budget {
            return Err(PlanError::OverBudget {
                device,
                needed: stated,
                budget,
            });
        }
        Ok(())
    }

    /// Checks that each GPU keeps its budget, and that layers are dealt out in ranges.
    fn validate_gpus(&self) -> Result<(), PlanError> {
        let budgets = self.budget.vram_per_gpu();
        let split: u128 = budgets.iter().map(|budget| u128::from(*budget)).sum();
        adds_up("budget.vram_bytes", self.budget.vram_bytes, split)?;
        for (gpu, budget) in budgets.iter().enumerate() {
            let lines = self.lines.iter();
            let here = lines.filter(|line| line.device == Device::Gpu && line.gpu == gpu);
            let needed = here.fold(0, |sum: u64, line| sum.saturating_add(line.bytes));
            if needed > *budget {
                return Err(PlanError::OverBudget {
                    device: Device::Gpu,
                    needed,
                    budget: *budget,
                });
            }
        }
        let of_layers = self.layers.iter().map(|layer| layer.gpu);
        let of_lines = self.lines.iter().map(|line| line.gpu);
        let known = |gpu: &usize| *gpu < budgets.len();
        let Some(gpu) = of_layers
            .clone()
            .chain(of_lines)
            .chain([self.head_gpu])
            .find(|gpu| !known(gpu))
        else {
            return match of_layers.is_sorted() {
                true => Ok(()),
                false => Err(PlanError::GpuOrder),
            };
        };
        Err(PlanError::NoSuchGpu {
            gpu,
            count: budgets.len(),
        })
    }

    fn validate_figures(&self) -> Result<(), PlanError> {
        let solver = &self.solver;
        share("totals.hot_share", self.totals.hot_share)?;
        not_negative("solver.objective", solver.objective)?;
        not_negative("solver.bound", solver.bound)?;
        not_negative("solver.gap", solver.gap)?;
        not_negative(
            "totals.microseconds_per_token",
            self.totals.microseconds_per_token,
        )
    }
}

impl LayerPlan {
    /// What the layer uses of `device`.
    pub fn bytes(&self, device: Device) -> u64 {
        match device {
            Device::Gpu => self.gpu_bytes,
            Device::Cpu => self.cpu_bytes,
        }
    }

    fn validate(&self, position: usize) -> Result<(), PlanError> {
        let layer = self.layer;
        if layer != position {
            return Err(PlanError::LayerOrder { position, layer });
        }
        if self.hot_count > self.neuron_count {
            return Err(PlanError::TooManyHot {
                layer,
                hot_count: self.hot_count,
                neuron_count: self.neuron_count,
            });
        }
        share(&format!("layers[{layer}].hot_share"), self.hot_share)?;
        if let Some(threshold) = self.threshold {
            let value = f64::from(threshold.value);
            not_negative(&format!("layers[{layer}].threshold.value"), value)?;
            not_negative(&format!("layers[{layer}].threshold.error"), threshold.error)?;
        }
        if let Some(thresholds) = self.input_thresholds {
            let field = |name: &str| format!("layers[{layer}].input_thresholds.{name}");
            share(&field("share"), thresholds.share)?;
            for (name, value) in [
                ("attention", thresholds.attention),
                ("output", thresholds.output),
                ("ffn", thresholds.ffn.unwrap_or_default()),
            ] {
                not_negative(&field(name), value.into())?;
            }
        }
        for (name, value) in [
            ("gpu_microseconds", self.gpu_microseconds),
            ("cpu_microseconds", self.cpu_microseconds),
            ("sync_microseconds", self.sync_microseconds),
            ("microseconds", self.microseconds),
        ] {
            not_negative(&format!("layers[{layer}].{name}"), value)?;
        }
        Ok(())
    }
}

fn adds_up(what: &str, stated: u64, found: u128) -> Result<(), PlanError> {
    if u128::from(stated) == found {
        return Ok(());
    }
    Err(PlanError::DoesNotAddUp {
        what: what.to_owned(),
        stated,
        found,
    })
}

fn share(field: &str, value: f64) -> Result<(), PlanError> {
    figure(field, value, (0.0..=1.0).contains(&value))
}

fn not_negative(field: &str, value: f64) -> Result<(), PlanError> {
    figure(field, value, value.is_finite() && value >= 0.0)
}

fn figure(field: &str, value: f64, good: bool) -> Result<(), PlanError> {
    if good {
        return Ok(());
    }
    Err(PlanError::Figure {
        field: field.to_owned(),
        value,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        let line = |name: &str, device, bytes| BudgetLine {
            name: name.to_owned(),
            device,
            gpu: 0,
            bytes,
        };
        Plan {
            objective: Objective::Impact,
            group_size: 2,
            solver: SolverSummary {
                backend: "microlp".to_owned(),
                objective: 1.5,
                bound: 1.5,
                gap: 0.0,
            },
            budget: Budget {
                vram_bytes: 60,
                ram_bytes: 50,
                context_tokens: 16,
                kv_cache: CacheFormat::F32,
                vram_split: Vec::new(),
            },
            lines: vec![
                line("attention", Device::Gpu, 40),
                line(HOT_NEURONS, Device::Gpu, 20),
                line(COLD_NEURONS, Device::Cpu, 20),
                line("KV cache", Device::Cpu, 8),
                line("embeddings", Device::Cpu, 16),
            ],
            totals: Totals {
                gpu_bytes: 60,
                cpu_bytes: 44,
                neuron_count: 4,
                hot_count: 2,
                hot_share: 0.75,
                microseconds_per_token: 3.0,
            },
            head: Device::Cpu,
            head_gpu: 0,
            outlook: None,
            layers: vec![LayerPlan {
                layer: 0,
                policy: Policy::Exact,
                reason: "no predictor".to_owned(),
                threshold: None,
                input_thresholds: None,
                neuron_count: 4,
                hot_count: 2,
                hot_share: 0.75,
                neuron_bytes: 10,
                gpu: 0,
                attention: Device::Gpu,
                kv: Device::Cpu,
                predictor: None,
                gpu_bytes: 60,
                cpu_bytes: 28,
                gpu_microseconds: 1.0,
                cpu_microseconds: 2.0,
                sync_microseconds: 0.5,
                microseconds: 2.5,
                limit: None,
            }],
            hardware: hardware::named("pc-high").unwrap(),
        }
    }

    #[test]
    fn a_consistent_plan_is_accepted_and_survives_json() {
        let plan = plan();
        plan.validate().unwrap();
        let json = serde_json::to_string_pretty(&plan).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), plan);
        assert!(json.contains("\"policy\": \"exact\""), "{json}");
    }

    /// Why `plan()` is refused after `edit`.
    fn refused(edit: fn(&mut Plan)) -> PlanError {
        let mut plan = plan();
        edit(&mut plan);
        plan.validate().unwrap_err()
    }

    #[test]
    fn a_plan_without_an_account_is_consistent_and_not_placed() {
        let mut plan = plan();
        assert!(plan.is_placed());
        assert_eq!(plan.line("attention"), 40);
        plan.forget_account();
        plan.validate().unwrap();
        assert!(!plan.is_placed());
        assert!(!Plan::unplaced(2, 8, Policy::Dense, 16).is_placed());
    }

    #[test]
    fn an_edit_that_breaks_the_plan_is_refused() {
        assert!(matches!(
            refused(|plan| plan.layers[0].hot_count = 5),
            PlanError::TooManyHot {
                layer: 0,
                hot_count: 5,
                neuron_count: 4
            }
        ));
        assert!(matches!(
            refused(|plan| plan.layers[0].hot_count = 3),
            PlanError::DoesNotAddUp { what, stated: 20, found: 30 } if what == HOT_NEURONS
        ));
        assert!(matches!(
            refused(|plan| plan.lines[0].bytes += 1),
            PlanError::DoesNotAddUp { what, .. } if what == "totals.gpu_bytes"
        ));
        assert!(matches!(
            refused(|plan| plan.lines[2].bytes = u64::MAX),
            PlanError::DoesNotAddUp { what, .. } if what == "totals.cpu_bytes"
        ));
        assert!(matches!(
            refused(|plan| plan.layers[0].cpu_bytes = 45),
            PlanError::DoesNotAddUp { what, .. } if what == "totals.cpu_bytes"
        ));
        assert!(matches!(
            refused(|plan| plan.budget.vram_bytes = 59),
            PlanError::OverBudget {
                device: Device::Gpu,
                needed: 60,
                budget: 59
            }
        ));
        assert!(matches!(
            refused(|plan| plan.layers[0].layer = 1),
            PlanError::LayerOrder {
                position: 0,
                layer: 1
            }
        ));
        assert!(matches!(
            refused(|plan| plan.layers[0].hot_share = 1.5),
            PlanError::Figure { .. }
        ));
        assert!(matches!(
            refused(|plan| plan.layers[0].microseconds = f64::NAN),
            PlanError::Figure { .. }
        ));
        for thresholds in [(1.5, 0.0, 0.0), (0.5, f32::NAN, 0.0), (0.5, 0.0, -1.0)] {
            let mut plan = plan();
            plan.layers[0].input_thresholds = Some(InputThresholds {
                share: thresholds.0,
                attention: 0.0,
                output: thresholds.1,
                ffn: Some(thresholds.2),
            });
            let error = plan.validate().unwrap_err().to_string();
            assert!(error.contains("layers[0].input_thresholds."), "{error}");
        }
        assert!(matches!(
            refused(|plan| {
                plan.lines[0].bytes -= 20;
                let line = plan.lines[0].clone();
                plan.lines.push(line);
            }),
            PlanError::TwoLines {
                device: Device::Gpu,
                ..
            }
        ));
        assert!(matches!(
            refused(|plan| plan.totals.hot_count = 3),
            PlanError::DoesNotAddUp { .. }
        ));
    }
}
