//! A placement as a shortest-path problem: a chain of stages, each of which takes one choice, under the
//! memory limits of the CPU and of every GPU.
//!
//! ```text
//! start ──▶ layer 0 ──▶ layer 1 ──▶ … ──▶ head
//!  CPU      CPU | GPU    CPU | GPU         CPU | GPU      device of the hidden state
//! ```
//!
//! A stage's *state* is the device that holds the hidden state. Changing the state from one stage to the
//! next costs a transfer. With several GPUs each has a contiguous range of stages, in the order of the
//! GPUs.

use std::collections::BTreeMap;

/// Integer program: minimise the cost of one choice per stage plus the transfers between stages.
#[derive(Debug, Clone)]
pub(crate) struct Chain {
    /// The stages, in order.
    pub(crate) stages: Vec<Stage>,
    /// Bytes that each GPU can hold; at least one GPU, possibly of 0 bytes.
    pub(crate) capacities: Vec<u64>,
    /// Bytes that the CPU can hold.
    pub(crate) ram: u64,
    /// Cost of a transfer between the CPU and a GPU.
    pub(crate) transfer: f64,
    /// Cost of a transfer between two GPUs.
    pub(crate) peer_transfer: f64,
}

/// Choices of one stage.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stage {
    /// Choices by the device of the hidden state: [`ON_CPU`], and [`ON_GPU`] for the GPU of the stage.
    pub(crate) choices: [Vec<Choice>; 2],
}

/// Index of the CPU in [`Stage::choices`].
pub(crate) const ON_CPU: usize = 0;
/// Index of the GPU in [`Stage::choices`].
pub(crate) const ON_GPU: usize = 1;

/// One alternative for a stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Choice {
    /// Memory on the GPU of the stage.
    pub(crate) gpu_bytes: u64,
    /// Memory on the CPU.
    pub(crate) cpu_bytes: u64,
    /// Contribution to the objective.
    pub(crate) cost: f64,
    /// Identifier given by the code that built the chain, which the solver does not interpret.
    pub(crate) tag: u32,
}

/// State of a stage: its GPU, and the device that holds the hidden state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct State {
    /// GPU whose memory the stage may use.
    pub(crate) gpu: usize,
    /// [`ON_CPU`] or [`ON_GPU`].
    pub(crate) device: usize,
}

/// Decision for one stage: a state by its index, and a choice of this state by its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) state: usize,
    pub(crate) choice: usize,
}

impl State {
    /// The state with this index.
    pub(crate) fn from_parts(index: usize) -> Self {
        Self {
            gpu: index / 2,
            device: index % 2,
        }
    }
}

impl Chain {
    /// Number of states of a stage.
    pub(crate) fn states(&self) -> usize {
        2 * self.capacities.len()
    }

    /// The state before the first stage.
    pub(crate) const START: usize = 0;

    /// Cost of going from one state to the next; infinite if the next stage is on an earlier GPU.
    pub(crate) fn transition(&self, from: usize, to: usize) -> f64 {
        let (from, to) = (State::from_parts(from), State::from_parts(to));
        match (from.device, to.device) {
            _ if to.gpu < from.gpu => f64::INFINITY,
            (ON_CPU, ON_CPU) => 0.0,
            (ON_GPU, ON_GPU) if from.gpu == to.gpu => 0.0,
            (ON_GPU, ON_GPU) => self.peer_transfer,
            _ => self.transfer,
        }
    }

    /// The choices of `stage` in `state`.
    pub(crate) fn choices(&self, stage: usize, state: usize) -> &[Choice] {
        &self.stages[stage].choices[State::from_parts(state).device]
    }

    /// The choice of a step.
    pub(crate) fn chosen(&self, stage: usize, step: Step) -> &Choice {
        &self.choices(stage, step.state)[step.choice]
    }

    /// Objective of a solution, summed in the order of the stages.
    pub(crate) fn cost(&self, steps: &[Step]) -> f64 {
        let mut previous = Self::START;
        let mut cost = 0.0;
        for (stage, step) in steps.iter().enumerate() {
            cost += self.transition(previous, step.state) + self.chosen(stage, *step).cost;
            previous = step.state;
        }
        cost
    }

    /// Bytes of a solution on each GPU.
    pub(crate) fn gpu_bytes(&self, steps: &[Step]) -> Vec<u64> {
        let mut bytes = vec![0; self.capacities.len()];
        for (stage, step) in steps.iter().enumerate() {
            bytes[State::from_parts(step.state).gpu] += self.chosen(stage, *step).gpu_bytes;
        }
        bytes
    }

    /// Bytes of a solution on the CPU.
    pub(crate) fn cpu_bytes(&self, steps: &[Step]) -> u64 {
        let steps = steps.iter().enumerate();
        steps
            .map(|(stage, step)| self.chosen(stage, *step).cpu_bytes)
            .sum()
    }

    /// Whether a solution keeps every memory limit.
    pub(crate) fn fits(&self, steps: &[Step]) -> bool {
        let gpus = self.gpu_bytes(steps);
        let mut gpus = gpus.iter().zip(&self.capacities);
        gpus.all(|(bytes, capacity)| bytes <= capacity) && self.cpu_bytes(steps) <= self.ram
    }

    /// The chain without dominated choices, the rest sorted by bytes on the GPU. Memory of the CPU counts
    /// only if `ram_binds`.
    pub(crate) fn pruned(&self, ram_binds: bool) -> Self {
        let mut pruned = self.clone();
        for choices in pruned
            .stages
            .iter_mut()
            .flat_map(|stage| &mut stage.choices)
        {
            retain_undominated(choices, ram_binds, |choice| {
                (choice.gpu_bytes, choice.cost, choice.cpu_bytes)
            });
        }
        pruned
    }
}

/// Removes every item that another one of no higher cost dominates in memory, and sorts the rest by bytes
/// on the GPU. `key` is (bytes on the GPU, cost, bytes on the CPU); the last counts only if `ram_binds`.
pub(crate) fn retain_undominated<T>(
    items: &mut Vec<T>,
    ram_binds: bool,
    key: impl Fn(&T) -> (u64, f64, u64),
) {
    items.sort_by(|a, b| {
        let (a, b) = (key(a), key(b));
        (a.0.cmp(&b.0))
            .then(a.1.total_cmp(&b.1))
            .then(a.2.cmp(&b.2))
    });
    if ram_binds {
        let mut front = ParetoFront::default();
        items.retain(|item| {
            let (_, cost, cpu_bytes) = key(item);
            front.insert(cpu_bytes, cost)
        });
    } else {
        let mut least = f64::INFINITY;
        items.retain(|item| {
            let cost = key(item).1;
            let is_better = cost < least;
            least = least.min(cost);
            is_better
        });
    }
}

/// Undominated pairs of bytes and cost.
#[derive(Debug, Default)]
struct ParetoFront(BTreeMap<u64, f64>);

impl ParetoFront {
    /// Adds a pair and returns `true`, unless a pair with no more bytes and no higher cost is present.
    fn insert(&mut self, bytes: u64, cost: f64) -> bool {
        if let Some((_, least)) = self.0.range(..=bytes).next_back()
            && *least <= cost
        {
            return false;
        }
        let dominated: Vec<u64> = self
            .0
            .range(bytes..)
            .take_while(|(_, other)| **other >= cost)
            .map(|(bytes, _)| *bytes)
            .collect();
        for bytes in dominated {
            self.0.remove(&bytes);
        }
        self.0.insert(bytes, cost);
        true
    }
}
